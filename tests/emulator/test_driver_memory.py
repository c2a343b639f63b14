"""Allocations, copies, memsets, host memory, pointer queries."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from tests.emulator.driver_kit import FakeExecutor, launch, load, ok, open_driver, ptx, refused, word_at

P = cuda.CUpointer_attribute


def device_bytes(driver: Driver, pointer: object, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    ok(driver.cuMemcpyDtoH(out, pointer, nbytes), driver)
    return bytes(out)


def test_copy_there_and_back_is_bitwise_equal() -> None:
    driver = open_driver()
    data = np.random.default_rng(1).integers(0, 256, 4097, np.uint8)
    pointer = ok(driver.cuMemAlloc(data.nbytes))
    ok(driver.cuMemcpyHtoD(pointer, data, data.nbytes))
    assert device_bytes(driver, pointer, data.nbytes) == data.tobytes()


def test_memory_past_a_freed_one_that_filled_the_device_is_usable() -> None:
    driver = open_driver()
    most = ok(driver.cuMemGetInfo())[0] - (1 << 20)
    ok(driver.cuMemFree(ok(driver.cuMemAlloc(most))))
    pointer = ok(driver.cuMemAlloc(1 << 16))  # freed addresses are not used again while there are others
    ok(driver.cuMemsetD8(pointer, 7, 1 << 16))
    assert device_bytes(driver, pointer, 1 << 16) == bytes([7]) * (1 << 16)


@pytest.mark.parametrize("form", ["int", "wrapper", "bytes", "array"])
def test_source_may_be_an_address_or_a_buffer(form: str) -> None:
    driver = open_driver()
    data = np.arange(16, dtype=np.uint8)
    forms = {"int": data.ctypes.data, "wrapper": data.ctypes.data, "bytes": data.tobytes(), "array": data}
    pointer = ok(driver.cuMemAlloc(16))
    destination = int(pointer) if form == "int" else pointer
    ok(driver.cuMemcpyHtoD(destination, forms[form], 16))
    assert device_bytes(driver, pointer, 16) == data.tobytes()


def test_copy_past_an_allocation_is_refused_with_the_overrun() -> None:
    driver = open_driver()
    pointer = ok(driver.cuMemAlloc(64))
    report = refused(
        driver, driver.cuMemcpyHtoD(pointer, bytes(80), 80), "INVALID_VALUE", "dstDevice", "64 bytes"
    )
    assert "16 bytes past the end" in report


def test_host_address_as_device_pointer_is_refused() -> None:
    driver = open_driver()
    data = np.zeros(16, np.uint8)
    refused(
        driver, driver.cuMemcpyHtoD(data.ctypes.data, data, 16), "INVALID_VALUE", "neither a device address"
    )


def test_copy_of_zero_bytes_works() -> None:
    driver = open_driver()
    pointer = ok(driver.cuMemAlloc(16))
    ok(driver.cuMemcpyHtoD(pointer, None, 0))
    ok(driver.cuMemcpyDtoD(pointer, pointer, 0))


def test_copy_inside_the_device_and_by_inferred_direction() -> None:
    driver = open_driver()
    first, second = ok(driver.cuMemAlloc(16)), ok(driver.cuMemAlloc(16))
    data, out = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    ok(driver.cuMemcpy(first, data.ctypes.data, 16))
    ok(driver.cuMemcpyDtoD(second, first, 16))
    ok(driver.cuMemcpy(out.ctypes.data, second, 16))
    assert (out == data).all()


def test_freed_memory_cannot_be_used_or_freed_again() -> None:
    driver = open_driver()
    pointer = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemFree(pointer))
    refused(driver, driver.cuMemcpyHtoD(pointer, bytes(4), 4), "INVALID_VALUE", "freed allocation")
    refused(driver, driver.cuMemFree(pointer), "INVALID_VALUE", "second free")
    ok(driver.cuMemFree(0))


def test_allocation_names_where_it_was_made() -> None:
    driver = open_driver()
    pointer = ok(driver.cuMemAlloc(64))
    report = refused(driver, driver.cuMemsetD8(pointer, 0, 65), "INVALID_VALUE")
    assert "cuMemAlloc at test_driver_memory.py:" in report


def test_more_memory_than_the_device_has_is_refused() -> None:
    driver = open_driver()
    free, total = ok(driver.cuMemGetInfo())
    assert free == total
    refused(driver, driver.cuMemAlloc(total + 1), "OUT_OF_MEMORY", "full")
    refused(driver, driver.cuMemAlloc(0), "INVALID_VALUE", "positive")


def test_free_memory_follows_allocations() -> None:
    driver = open_driver()
    before, _ = ok(driver.cuMemGetInfo())
    pointer = ok(driver.cuMemAlloc(1 << 20))
    assert ok(driver.cuMemGetInfo())[0] == before - (1 << 20)
    ok(driver.cuMemFree(pointer))
    assert ok(driver.cuMemGetInfo())[0] == before


@pytest.mark.parametrize("width", [1, 2, 4])
def test_memset_repeats_the_element(width: int) -> None:
    driver = open_driver()
    pointer = ok(driver.cuMemAlloc(16))
    call = {1: driver.cuMemsetD8, 2: driver.cuMemsetD16, 4: driver.cuMemsetD32}[width]
    value = 0x04030201 & (1 << 8 * width) - 1
    ok(call(pointer, value, 16 // width))
    assert device_bytes(driver, pointer, 16) == value.to_bytes(width, "little") * (16 // width)


def test_memset_needs_an_aligned_address() -> None:
    driver = open_driver()
    pointer = int(ok(driver.cuMemAlloc(16)))
    refused(driver, driver.cuMemsetD32(pointer + 2, 0, 1), "INVALID_VALUE", "4-byte aligned")
    ok(driver.cuMemsetD16(pointer + 2, 0, 1))


def test_async_copy_from_pageable_memory_takes_the_bytes_at_the_call() -> None:
    driver = open_driver()
    stream, pointer = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(4))
    data = np.full(4, 1, np.uint8)
    ok(driver.cuMemcpyHtoDAsync(pointer, data, 4, stream))
    data[:] = 2
    ok(driver.cuStreamSynchronize(stream))
    assert device_bytes(driver, pointer, 4) == b"\1\1\1\1"


def test_async_copy_from_pinned_memory_takes_the_bytes_when_it_runs() -> None:
    driver = open_driver()
    stream, pointer, host = (
        ok(driver.cuStreamCreate(1)),
        ok(driver.cuMemAlloc(4)),
        ok(driver.cuMemAllocHost(4)),
    )
    word_at(host).value = 1
    ok(driver.cuMemcpyHtoDAsync(pointer, host, 4, stream))
    word_at(host).value = 2
    ok(driver.cuStreamSynchronize(stream))
    assert device_bytes(driver, pointer, 4) == b"\2\0\0\0"


def test_async_copy_to_pinned_memory_arrives_only_after_a_synchronisation() -> None:
    driver = open_driver()
    stream, pointer, host = (
        ok(driver.cuStreamCreate(1)),
        ok(driver.cuMemAlloc(4)),
        ok(driver.cuMemAllocHost(4)),
    )
    ok(driver.cuMemsetD32(pointer, 5, 1))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuMemcpyDtoHAsync(host, pointer, 4, stream))
    assert word_at(host).value == 0
    ok(driver.cuStreamSynchronize(stream))
    assert word_at(host).value == 5


def test_async_copy_to_pageable_memory_blocks() -> None:
    driver = open_driver()
    stream, pointer = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(4))
    ok(driver.cuMemsetD32Async(pointer, 5, 1, stream))
    out = np.zeros(1, np.uint32)
    ok(driver.cuMemcpyDtoHAsync(out, pointer, 4, stream))
    assert out[0] == 5


def test_async_copy_inside_of_the_host_blocks() -> None:
    driver = open_driver()
    one, other = (ok(driver.cuMemHostAlloc(64, 0)) for _ in range(2))
    ctypes.memset(one, 5, 64)
    ok(driver.cuMemcpyAsync(other, one, 64, ok(driver.cuStreamCreate(1))))
    assert ctypes.string_at(other, 64) == bytes([5]) * 64


def test_pageable_copies_cost_more_than_pinned_ones() -> None:
    driver = open_driver()
    nbytes = 1 << 24
    pointer, host, pageable = ok(driver.cuMemAlloc(nbytes)), ok(driver.cuMemAllocHost(nbytes)), bytes(nbytes)
    clock = driver.process
    t0 = clock.host_time_s
    ok(driver.cuMemcpyHtoD(pointer, host, nbytes))
    t1 = clock.host_time_s
    ok(driver.cuMemcpyHtoD(pointer, pageable, nbytes))
    t2 = clock.host_time_s
    assert t2 - t1 > 1.5 * (t1 - t0) > 0


def test_stream_ordered_allocation_lives_until_its_free_runs() -> None:
    driver = open_driver()
    stream = ok(driver.cuStreamCreate(0))
    pointer = ok(driver.cuMemAllocAsync(64, stream))
    ok(driver.cuMemsetD8Async(pointer, 1, 64, stream))
    ok(driver.cuMemFreeAsync(pointer, stream))
    ok(driver.cuStreamSynchronize(stream))
    refused(driver, driver.cuMemsetD8(pointer, 1, 64), "INVALID_VALUE", "freed")


def test_work_behind_a_stream_ordered_free_kills_the_context() -> None:
    driver = open_driver()
    stream = ok(driver.cuStreamCreate(0))
    pointer = ok(driver.cuMemAllocAsync(64, stream))
    ok(driver.cuMemFreeAsync(pointer, stream))
    ok(driver.cuMemsetD8Async(pointer, 1, 64, stream))
    refused(
        driver,
        driver.cuStreamSynchronize(stream),
        "ILLEGAL_ADDRESS",
        "freed allocation",
        "memset of 64 bytes",
    )


# --- host memory


def test_pinned_memory_has_the_same_address_on_the_device() -> None:
    driver = open_driver()
    host = ok(driver.cuMemHostAlloc(4096, cuda.CU_MEMHOSTALLOC_DEVICEMAP))
    assert int(ok(driver.cuMemHostGetDevicePointer(host, 0))) == host
    assert ok(driver.cuMemHostGetFlags(host)) == cuda.CU_MEMHOSTALLOC_DEVICEMAP
    ok(driver.cuMemFreeHost(host))
    refused(driver, driver.cuMemHostGetDevicePointer(host, 0), "INVALID_VALUE", "no page-locked range")


def test_host_memory_is_registered_once_and_unregistered() -> None:
    driver = open_driver()
    data = np.zeros(4096, np.uint8)
    ok(driver.cuMemHostRegister(data, data.nbytes, 0))
    again = driver.cuMemHostRegister(data.ctypes.data + 8, 8, 0)
    refused(driver, again, "HOST_MEMORY_ALREADY_REGISTERED", "overlaps")
    refused(driver, driver.cuMemFreeHost(data), "INVALID_VALUE", "cuMemHostUnregister")
    ok(driver.cuMemHostUnregister(data))
    refused(driver, driver.cuMemHostUnregister(data), "HOST_MEMORY_NOT_REGISTERED")


def test_copy_over_the_end_of_a_registered_range_is_refused() -> None:
    driver = open_driver()
    data, pointer = np.zeros(64, np.uint8), ok(driver.cuMemAlloc(64))
    ok(driver.cuMemHostRegister(data, 32, 0))
    refused(driver, driver.cuMemcpyHtoD(pointer, data, 64), "INVALID_VALUE", "partly inside")
    ok(driver.cuMemcpyHtoD(pointer, data, 32))


# --- pointers


def test_pointer_attributes_of_device_and_host_memory() -> None:
    driver = open_driver("h100", "a100")
    pointer, host = ok(driver.cuMemAlloc(4096)), ok(driver.cuMemAllocHost(64))
    inside = int(pointer) + 100
    kind = cuda.CUmemorytype
    asked = [P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, P.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    assert ok(driver.cuPointerGetAttributes(2, asked, inside)) == [kind.CU_MEMORYTYPE_DEVICE, 4096]
    assert ok(driver.cuPointerGetAttributes(2, asked, host)) == [kind.CU_MEMORYTYPE_HOST, 64]
    start = ok(driver.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside))
    assert int(start) == int(pointer)
    assert ok(driver.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside)) == 0
    assert int(ok(driver.cuPointerGetAttribute(P.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, inside))) == inside


def test_unknown_pointer_is_refused_alone_and_zero_in_a_list() -> None:
    driver = open_driver()
    kind = P.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    refused(driver, driver.cuPointerGetAttribute(kind, 4096), "INVALID_VALUE", "unknown to the driver")
    assert ok(driver.cuPointerGetAttributes(1, [kind], 4096)) == [0]


def test_address_range_gives_base_and_size() -> None:
    driver = open_driver()
    pointer = ok(driver.cuMemAlloc(1000))
    base, size = ok(driver.cuMemGetAddressRange(int(pointer) + 999))
    assert (int(base), size) == (int(pointer), 1000)
    refused(driver, driver.cuMemGetAddressRange(int(pointer) + 1000), "NOT_FOUND")


def test_freeing_waits_for_the_device_unless_the_memory_is_stream_ordered() -> None:
    """cuMemFree does not synchronise for memory of cuMemAllocAsync: its users must have ended."""
    executor = FakeExecutor(100_000)
    driver = open_driver(executor=executor)
    plain, ordered = ok(driver.cuMemAlloc(64)), ok(driver.cuMemAllocAsync(64, 0))
    ok(launch(driver, load(driver, ptx())))
    ok(driver.cuMemFree(ordered))
    assert executor.calls == []
    ok(driver.cuMemFree(plain))
    assert len(executor.calls) == 1
    late = ok(driver.cuMemAllocAsync(64, 0))
    ok(driver.cuMemsetD8Async(late, 1, 64, 0))
    ok(driver.cuMemFree(late))
    refused(driver, driver.cuCtxSynchronize(), "ILLEGAL_ADDRESS", "freed allocation", "cuMemAllocAsync")


def test_variables_of_a_module_cannot_be_freed() -> None:
    driver = open_driver()
    module = ok(driver.cuModuleLoadData(ptx(variables=".visible .global .b32 table[4];")))
    address, _ = ok(driver.cuModuleGetGlobal(module, b"table"))
    refused(driver, driver.cuMemFree(address), "INVALID_VALUE", "a module's variable", "unload the module")
    ok(driver.cuModuleUnload(module))
