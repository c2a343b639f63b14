"""Devices, contexts, error names; nodes are independent."""

from __future__ import annotations

import threading

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from smfree.emulator.profile import load
from tests.emulator.driver_kit import FakeExecutor, ok, open_driver, refused

A = cuda.CUdevice_attribute


def test_calls_before_cuinit_are_refused() -> None:
    driver = Driver(Node(["h100"], executor=FakeExecutor()))
    refused(driver, driver.cuDeviceGetCount(), "NOT_INITIALIZED", "cuInit(0)")


def test_cuinit_takes_no_flags() -> None:
    driver = Driver(Node(["h100"], executor=FakeExecutor()))
    refused(driver, driver.cuInit(1), "INVALID_VALUE", "got 1")


def test_device_that_does_not_exist_is_refused_with_the_count() -> None:
    driver = open_driver("h100", "a100")
    refused(driver, driver.cuDeviceGet(2), "INVALID_DEVICE", "no device 2", "has 2")


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_attributes_answer_from_the_profile(name: str) -> None:
    driver, spec = open_driver(name), load(name).device
    asked = {
        A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: spec.num_sms,
        A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: spec.compute_major,
        A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: spec.compute_minor,
        A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: spec.shared_bytes_per_block_optin,
        A.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: spec.l2_bytes,
        A.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: round(spec.sm_clock_mhz * 1000),
        A.CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: int(name == "h100"),
        A.CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: int(name == "h100"),
        A.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
    }
    assert {key: ok(driver.cuDeviceGetAttribute(key, 0)) for key in asked} == asked
    assert ok(driver.cuDeviceTotalMem(0)) == spec.memory_bytes
    assert ok(driver.cuDeviceGetName(128, 0)).split(b"\0")[0].decode() == spec.name


def test_attribute_without_an_answer_is_refused_by_name() -> None:
    driver = open_driver()
    unknown = A.CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH
    refused(driver, driver.cuDeviceGetAttribute(unknown, 0), "INVALID_VALUE", "MAXIMUM_SURFACE1D_WIDTH")


def test_name_is_cut_to_the_buffer() -> None:
    driver = open_driver()
    name = ok(driver.cuDeviceGetName(7, 0))
    assert len(name) == 7 and name.endswith(b"\0") and load("h100").device.name.encode().startswith(name[:6])


def test_uuids_differ_between_devices() -> None:
    driver = open_driver("h100", "h100")
    first, second = (bytes(ok(driver.cuDeviceGetUuid(ordinal)).bytes) for ordinal in (0, 1))
    assert len(first) == 16 and first != second


def test_error_names_and_texts() -> None:
    driver = Driver(Node(["h100"], executor=FakeExecutor()))
    code = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert ok(driver.cuGetErrorName(code)) == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    assert ok(driver.cuGetErrorString(code)) == b"an illegal memory access was encountered"
    for each in cuda.CUresult:
        assert ok(driver.cuGetErrorString(each))


def test_primary_context_is_counted() -> None:
    driver = open_driver()
    assert ok(driver.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    again = ok(driver.cuDevicePrimaryCtxRetain(0))
    assert int(again) == int(ok(driver.cuCtxGetCurrent()))
    ok(driver.cuDevicePrimaryCtxRelease(0))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert ok(driver.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    refused(driver, driver.cuCtxSynchronize(), "INVALID_CONTEXT", "cuDevicePrimaryCtxRetain")
    refused(driver, driver.cuDevicePrimaryCtxRelease(0), "INVALID_CONTEXT", "not retained")


def test_releasing_the_context_frees_memory_and_handles() -> None:
    driver = open_driver()
    pointer, stream = ok(driver.cuMemAlloc(4096)), ok(driver.cuStreamCreate(0))
    ok(driver.cuDevicePrimaryCtxRelease(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    free, total = ok(driver.cuMemGetInfo())
    assert free == total
    refused(driver, driver.cuMemsetD8(pointer, 0, 1), "INVALID_VALUE", "freed")
    refused(driver, driver.cuStreamSynchronize(stream), "INVALID_HANDLE")


def test_context_stack_pushes_and_pops() -> None:
    driver = open_driver("h100", "a100")
    second = ok(driver.cuDevicePrimaryCtxRetain(1))
    ok(driver.cuCtxPushCurrent(second))
    assert int(ok(driver.cuCtxGetDevice())) == 1
    assert int(ok(driver.cuCtxPopCurrent())) == int(second)
    assert int(ok(driver.cuCtxGetDevice())) == 0


def test_other_host_threads_have_no_current_context() -> None:
    driver = open_driver()
    seen: list[tuple[object, ...]] = []
    thread = threading.Thread(target=lambda: seen.append(driver.cuCtxSynchronize()))
    thread.start()
    thread.join()
    assert seen == [(cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT,)]


def test_nodes_are_independent() -> None:
    first, second = open_driver(), open_driver()
    pointer = ok(first.cuMemAlloc(64))
    ok(first.cuMemsetD8(pointer, 3, 64))
    refused(second, second.cuMemsetD8(pointer, 3, 64), "INVALID_VALUE", "outside every allocation")
    assert first.report() == ""
