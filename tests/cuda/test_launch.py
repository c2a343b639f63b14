"""Launches: what is refused before the driver sees it, and what the driver gets."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import Device, FunctionFacts, Kernel, LaunchError
from smfree.cuda.launch import LaunchShape, as_dims
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sources import CLUSTER, COPY, DYNAMIC, source

Id = cuda.CUlaunchAttributeID


@pytest.fixture
def kernel(device: Device) -> Kernel:
    """The dynamic-shared-memory kernel on the fake device."""
    return device.compile(source(DYNAMIC)).kernel()


@pytest.fixture
def args(device: Device) -> list[object]:
    """Arguments that fit it."""
    return [device.empty(8, np.uint32), device.empty(8, np.uint32), np.uint32(8)]


@pytest.mark.parametrize(
    ("value", "dims"),
    [(4, (4, 1, 1)), ((4,), (4, 1, 1)), ((4, 2), (4, 2, 1)), (np.array([1, 2, 3]), (1, 2, 3))],
)
def test_grids_and_blocks_have_one_to_three_numbers(value: Any, dims: tuple) -> None:
    assert as_dims(value, "grid") == dims


@pytest.mark.parametrize("value", [(), (1, 2, 3, 4), (1.5,), (True,)])
def test_other_grids_are_refused(value: Any) -> None:
    with pytest.raises(LaunchError, match=r"grid is one to three integers"):
        as_dims(value, "grid")


def test_configuration_reaches_the_driver_as_given(fake: FakeDriver, kernel: Kernel, args: list) -> None:
    stream = kernel.module.device.stream()
    kernel.launch((5, 2), (64, 2), args, stream=stream, shared_bytes=1024)
    ((config, handle, params, extra),) = fake.calls("cuLaunchKernelEx")
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (5, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 2, 1)
    assert config.sharedMemBytes == 1024 and int(config.hStream) == stream.handle
    assert (handle, extra) == (kernel.handle, 0) and params != 0
    assert config.numAttrs == 0


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"cluster": 2}, [Id.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION]),
        ({"cooperative": True}, [Id.CU_LAUNCH_ATTRIBUTE_COOPERATIVE]),
        ({"programmatic": True}, [Id.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]),
        (
            {"cluster": (2, 1, 1), "programmatic": True},
            [
                Id.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                Id.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            ],
        ),
    ],
)
def test_launch_attributes_arrive_in_the_c_struct(
    fake: FakeDriver, kernel: Kernel, args: list, options: dict, ids: list
) -> None:
    """E10: read back through the raw CUlaunchConfig, as the driver reads it: count, pointer, ids, values."""
    kernel.launch(4, 32, args, **options)
    ((config, *_),) = fake.calls("cuLaunchKernelEx")
    raw = ctypes.string_at(config.getPtr(), 56)
    attributes, count = int.from_bytes(raw[40:48], "little"), int.from_bytes(raw[48:52], "little")
    assert count == len(ids)
    for index, wanted in enumerate(ids):
        entry = ctypes.string_at(attributes + 72 * index, 72)
        assert int.from_bytes(entry[0:4], "little") == int(wanted)
        words = np.frombuffer(entry, np.uint32, 3, 8).tolist()
        assert words == ([2, 1, 1] if wanted is Id.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION else [1, 0, 0])


def test_more_than_48_kib_of_shared_memory_is_asked_for_once(
    fake: FakeDriver, kernel: Kernel, args: list
) -> None:
    """E08: the opt-in attribute is set before the launch, and again only for more."""
    for size in (48 * 1024, 100_000, 60_000, 200_000):
        kernel.launch(1, 32, args, shared_bytes=size)
    wanted = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert fake.calls("cuFuncSetAttribute") == [(kernel.handle, wanted, n) for n in (100_000, 200_000)]
    order = [api for api, _ in fake.log if api in ("cuFuncSetAttribute", "cuLaunchKernelEx")]
    assert order[:3] == ["cuLaunchKernelEx", "cuFuncSetAttribute", "cuLaunchKernelEx"]


def test_static_shared_memory_counts_towards_48_kib(fake: FakeDriver, device: Device) -> None:
    """E08: 40 KiB static and 20 KiB dynamic need the attribute too."""
    text = """extern "C" __global__ void f(unsigned* p) {
      __shared__ unsigned s[10240]; extern __shared__ unsigned d[];
      s[threadIdx.x] = p[0]; d[threadIdx.x] = p[1]; __syncthreads(); p[0] = s[p[2]] + d[p[3]];
    }"""
    kernel = device.compile(source(text)).kernel()
    assert kernel.static_shared_bytes == 40960
    kernel.launch(1, 32, [device.empty(16, np.uint32)], shared_bytes=20480)
    assert [args[2] for args in fake.calls("cuFuncSetAttribute")] == [20480]


def test_shared_memory_above_the_device_limit_is_refused(
    fake: FakeDriver, kernel: Kernel, args: list
) -> None:
    """E08: with limit, request and remedy, before the driver sees it."""
    with pytest.raises(LaunchError) as caught:
        kernel.launch(1, 32, args, shared_bytes=232449)
    assert "at most 232448 bytes of shared memory on Fake H100" in str(caught.value)
    assert "232449 dynamic + 0 static" in str(caught.value) and "fewer stages" in str(caught.value)
    kernel.launch(1, 32, args, shared_bytes=232448)
    assert len(fake.calls("cuLaunchKernelEx")) == 1


def test_compiled_in_cluster_is_respected(fake: FakeDriver, device: Device) -> None:
    """E09: conflicts with the launch attribute, and grids it does not divide, are errors naming both."""
    kernel = device.compile(source(CLUSTER)).kernel()
    array = device.empty(64, np.uint32)
    with pytest.raises(
        LaunchError, match=r"compiled for clusters of \(2, 1, 1\), the launch asks for \(4, 1, 1\)"
    ):
        kernel.launch(8, 32, [array], cluster=4)
    with pytest.raises(LaunchError, match=r"grid \(7, 1, 1\) is not divisible by the cluster \(2, 1, 1\)"):
        kernel.launch(7, 32, [array])
    assert not fake.calls("cuLaunchKernelEx")
    kernel.launch(8, 32, [array])
    kernel.launch(8, 32, [array], cluster=2)
    assert len(fake.calls("cuLaunchKernelEx")) == 2


def test_cooperative_cluster_kernel_is_limited_by_active_clusters(fake: FakeDriver, device: Device) -> None:
    """E09: "cooperative launch too large" counts clusters, not CTAs (the fake device holds 16 clusters)."""
    kernel = device.compile(source(CLUSTER)).kernel()
    array = device.empty(64, np.uint32)
    kernel.launch(32, 32, [array], cooperative=True)
    with pytest.raises(LaunchError, match=r"all 34 CTAs of a cooperative launch must be resident, 32 fit"):
        kernel.launch(34, 32, [array], cooperative=True)
    ((_, config), *_) = fake.calls("cuOccupancyMaxActiveClusters")
    assert config.numAttrs == 1 and config.attrs[0].value.clusterDim.x == 2


def test_cooperative_grid_must_be_resident(fake: FakeDriver, kernel: Kernel, args: list) -> None:
    kernel.launch(264, 32, args, cooperative=True)
    with pytest.raises(LaunchError, match=r"all 265 CTAs.*264 fit on 132 SMs"):
        kernel.launch(265, 32, args, cooperative=True)


def test_cluster_above_8_asks_for_the_wide_size(fake: FakeDriver, kernel: Kernel, args: list) -> None:
    kernel.launch(16, 32, args, cluster=16)
    wanted = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert fake.calls("cuFuncSetAttribute") == [(kernel.handle, wanted, 1)]
    with pytest.raises(LaunchError, match=r"1 to 16 CTAs \(got \(32, 1, 1\)"):
        kernel.launch(32, 32, args, cluster=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, grid=(0, 1, 1)), r"grid \(0, 1, 1\) has no CTA; do not launch"),
        (lambda s: replace(s, grid=(1, 65536, 1)), r"grid\.y is 1 to 65535 \(got 65536\)"),
        (lambda s: replace(s, grid=(-1, 1, 1)), r"grid\.x is 1 to 2147483647 \(got -1\)"),
        (lambda s: replace(s, block=(0, 1, 1)), r"block\.x is 1 to 1024 threads \(got 0\)"),
        (lambda s: replace(s, block=(1, 1, 65)), r"block\.z is 1 to 64"),
        (lambda s: replace(s, block=(64, 32, 1)), r"the device allows 1024 threads per CTA \(got 2048\)"),
        (lambda s: replace(s, shared_bytes=-1), "asked for -1 dynamic"),
        (lambda s: replace(s, cluster=(0, 1, 1)), "a cluster has 1 to 16 CTAs"),
    ],
)
def test_impossible_shapes_are_refused_with_the_rule(
    device: Device, change: Callable[[LaunchShape], LaunchShape], message: str
) -> None:
    shape = LaunchShape((1, 1, 1), (32, 1, 1))
    facts = FunctionFacts("k", (), registers=32)
    shape.validate(facts, device.capabilities)
    with pytest.raises(LaunchError, match=message):
        change(shape).validate(facts, device.capabilities)


@pytest.mark.parametrize(
    ("facts", "threads", "message"),
    [
        (FunctionFacts("k", (), registers=32, max_threads=96), 128, "__launch_bounds__ allows 96 threads"),
        (FunctionFacts("k", (), required_block=(64, 1, 1)), 32, r"blocks of exactly \(64, 1, 1\)"),
        (FunctionFacts("k", (), registers=72), 1024, "1024 threads of 72 registers need 73728 registers"),
    ],
)
def test_kernel_limits_are_checked(device: Device, facts: FunctionFacts, threads: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchShape((1, 1, 1), (threads, 1, 1)).validate(facts, device.capabilities)


def test_older_device_refuses_what_it_has_not() -> None:
    ampere = FakeDriver(COMPUTE_CAPABILITY_MAJOR=8, COOPERATIVE_LAUNCH=0)
    device = Device(ampere, 0, spec="cuda:0", is_emulated=False)
    kernel = device.compile(source(COPY)).kernel()
    args = [device.empty(4, np.uint32), device.empty(4, np.uint32), np.uint32(4)]
    assert device.capabilities.arch == "sm_80" and not device.capabilities.has_tma
    for options, message in (
        ({"cluster": 2}, "has no clusters"),
        ({"programmatic": True}, r"compute capability 9\.0 \(this device has 8\.0\)"),
        ({"cooperative": True}, "has no cooperative launch"),
    ):
        with pytest.raises(LaunchError, match=message):
            kernel.launch(2, 32, args, **options)
    assert not ampere.calls("cuLaunchKernelEx")


def test_block_may_be_left_out_only_when_compiled_in(kernel: Kernel, args: list) -> None:
    with pytest.raises(LaunchError, match=r"was not compiled for one block size; pass block"):
        kernel.launch(1, None, args)


def test_stream_of_another_device_is_refused(kernel: Kernel, args: list) -> None:
    other = Device(FakeDriver(), 0, spec="cuda:1", is_emulated=False)
    with pytest.raises(LaunchError, match=r"loaded on cuda:0, the stream belongs to cuda:1"):
        kernel.launch(1, 32, args, stream=other.stream())


def test_occupancy_sets_the_shared_limit_first(fake: FakeDriver, kernel: Kernel) -> None:
    assert kernel.occupancy(128, 150_000) == 2
    order = [api for api, _ in fake.log if api in ("cuFuncSetAttribute",) or "Occupancy" in api]
    assert order == ["cuFuncSetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor"]


def test_same_source_is_loaded_once(device: Device, fake: FakeDriver) -> None:
    assert device.compile(source(COPY)) is device.compile(source(COPY))
    assert device.compile(source(COPY)) is not device.compile(source(COPY, N=1))
    assert len(fake.calls("cuModuleLoadData")) == 2
