"""The whole host side on emulated GPUs: the same calls as on a real one."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from smfree.cuda import (
    ArrayError,
    ContextFailedError,
    CudaSource,
    Device,
    DriverError,
    KernelFaultError,
    LaunchError,
    TensorMapError,
    TritonDescriptor,
    TritonSource,
    UnavailableError,
)
from tests.cuda import triton_kernels as kernels
from tests.cuda.sources import ABI, CLUSTER_RING, COPY, DYNAMIC, FACTS, TENSOR_LOAD, source
from tests.cuda.test_triton import descriptor_source, pointer_source

RNG = np.random.default_rng(7)
_NUMPY = {"fp16": np.float16, "fp32": np.float32}


def _words(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


def test_capabilities_of_the_profiles(emulated: Device) -> None:
    caps = emulated.capabilities
    if emulated.spec == "emu:h100":
        assert (caps.arch, caps.generation, caps.num_sms) == ("sm_90a", "hopper", 132)
        assert caps.has_tma and caps.has_clusters and not caps.has_wide_access
        assert caps.max_shared_bytes_per_block == 227 * 1024
    else:
        assert (caps.arch, caps.generation, caps.num_sms) == ("sm_80", "ampere", 108)
        assert caps.has_cp_async and caps.has_mbarrier and not caps.has_tma and not caps.has_clusters
        assert caps.max_shared_bytes_per_block == 163 * 1024
    assert caps.peak_memory_gbps > 1000 and caps.sm_clock_mhz > 1000
    assert emulated.emulator is not None and emulated.clock_source == "modelled"


@pytest.mark.parametrize("cluster", [(2, 1, 1), (4, 2, 1), (16, 1, 1)])
def test_clusters_read_each_others_shared_memory(h100: Device, cluster: tuple[int, int, int]) -> None:
    """Also above the portable size: the host asks for it by itself."""
    kernel = h100.compile(source(CLUSTER_RING)).kernel()
    grid, size = (cluster[0] * 3, cluster[1], 1), cluster[0] * cluster[1]
    out = h100.empty((3, size), np.uint32)
    kernel.launch(grid, 32, [out], cluster=cluster)
    assert (out.numpy() == np.roll(np.arange(size), -1)).all()
    assert kernel.max_active_clusters(cluster, 1024) == 2 * 132 // size
    with pytest.raises(LaunchError, match="is not divisible by the cluster"):
        kernel.launch((cluster[0] * 3 + 1, cluster[1], 1), 32, [out], cluster=cluster)


def test_arrays_streams_and_events(emulated: Device) -> None:
    data = _words(1000)
    stream = emulated.stream()
    start = stream.record()
    array = emulated.empty(1000, np.uint32).copy_from(data, stream=stream)
    copy = emulated.empty(1000, np.uint32).copy_from_device(array, stream=stream)
    end = stream.record()
    assert np.array_equal(copy.numpy(stream=stream), data)
    assert end.query() and stream.query() and end.elapsed_us(start) >= 0
    other = emulated.stream()
    other.wait(end)
    other.synchronize()
    assert np.array_equal(array[10:20].fill(0xAB).numpy(), np.full(10, 0xABABABAB, np.uint32))


@pytest.mark.parametrize("n", [1, 127, 128, 129, 5000])
def test_cuda_kernel_copies_bit_for_bit(emulated: Device, n: int) -> None:
    data = _words(n)
    dst = emulated.empty(n, np.uint32)
    kernel = emulated.compile(source(COPY)).kernel("copy_words")
    kernel.launch(4, 128, [dst, emulated.asarray(data), np.uint32(n)])
    assert np.array_equal(dst.numpy(), data)


def test_arguments_arrive_where_the_kernel_reads_them(h100: Device) -> None:
    """E13 end to end: every argument of the mixed signature is read back by the kernel itself."""
    out = h100.asarray(np.zeros(8, np.uint64))
    array = h100.empty((64, 64), np.float32)
    tensor_map = h100.tensor_map(array, (32, 32))
    vector = np.array([11, 12, 13, 14], np.float32)
    kernel = h100.compile(source(ABI)).kernel()
    kernel.launch(
        1, 1, [np.uint8(200), out, tensor_map, np.uint16(60000), vector, np.uint8(9), np.float64(77.0)]
    )
    words = np.frombuffer(tensor_map.tobytes(), np.uint64)
    assert out.numpy().tolist() == [200, int(words[0]), int(words[15]), 60000, 11, 14, 9, 77]


def test_a_structure_argument_may_be_indexed_by_the_thread(emulated: Device) -> None:
    class Table(ctypes.Structure):
        _fields_ = (("entry", ctypes.c_int * 100),)

    text = (
        "struct Table { int entry[100]; };\n"
        'extern "C" __global__ void look_up(int* out, Table t) {\n'
        "  out[threadIdx.x] = t.entry[99 - threadIdx.x];\n"
        "}\n"
    )
    table = Table((ctypes.c_int * 100)(*range(500, 600)))
    out = emulated.empty(64, np.int32)
    kernel = emulated.compile(CudaSource("look_up.cu", text=text)).kernel("look_up")
    kernel.launch(1, 64, [out, table])
    assert np.array_equal(out.numpy(), np.arange(599, 535, -1))


@pytest.mark.parametrize("n", [1000, 20_000])
def test_dynamic_shared_memory_above_48_kib(emulated: Device, n: int) -> None:
    """E08: 80,000 bytes need the opt-in, which the launch sets."""
    data = _words(n)
    dst = emulated.empty(n, np.uint32)
    emulated.compile(source(DYNAMIC)).kernel().launch(
        1, 256, [dst, emulated.asarray(data), np.uint32(n)], shared_bytes=4 * n
    )
    assert np.array_equal(dst.numpy(), data[::-1])


def test_shared_memory_limit_is_the_devices(emulated: Device) -> None:
    """E08: one byte more than the device has is refused with its limit."""
    limit = emulated.capabilities.max_shared_bytes_per_block
    args = [emulated.empty(4, np.uint32), emulated.empty(4, np.uint32), np.uint32(0)]
    kernel = emulated.compile(source(DYNAMIC)).kernel()
    with pytest.raises(LaunchError, match=f"at most {limit} bytes of shared memory"):
        kernel.launch(1, 32, args, shared_bytes=limit + 1)
    kernel.launch(1, 32, args, shared_bytes=limit)
    emulated.synchronize()


def test_occupancy_follows_registers_and_shared_memory(emulated: Device) -> None:
    caps = emulated.capabilities
    kernel = emulated.compile(source(DYNAMIC)).kernel()
    by_threads = caps.max_threads_per_sm // 1024
    assert kernel.occupancy(1024) == by_threads
    half = caps.shared_bytes_per_sm // 2 - caps.reserved_shared_bytes_per_cta
    assert kernel.occupancy(32, half) == 2
    assert kernel.occupancy(32, half + 1024) == 1
    spilling = emulated.compile(source(FACTS)).kernel("spills")
    assert spilling.registers == 32 and spilling.occupancy(1024) == 2


def test_cooperative_launch_beyond_residency_is_refused(emulated: Device) -> None:
    kernel = emulated.compile(source(COPY)).kernel()
    args = [emulated.empty(4, np.uint32), emulated.empty(4, np.uint32), np.uint32(0)]
    fit = kernel.occupancy(1024) * emulated.capabilities.num_sms
    with pytest.raises(LaunchError, match=f"{fit} fit on"):
        kernel.launch(fit + 1, 1024, args, cooperative=True)
    kernel.launch(8, 128, args, cooperative=True)
    emulated.synchronize()


def test_fault_carries_the_emulators_report_and_stops_the_device() -> None:
    """E15: read past the end; the report names the access, and what follows names the first failure."""
    device = Device.open("emu:h100")
    kernel = device.compile(source(COPY)).kernel()
    dst, src = device.empty(64, np.uint32), device.asarray(_words(32))
    with pytest.raises(KernelFaultError) as caught:
        kernel.launch(1, 64, [dst, src, np.uint32(64)])
        device.synchronize()
    assert caught.value.code_name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert caught.value.report and "copy_words" in str(caught.value)
    with pytest.raises(ContextFailedError, match=r"First failure"):
        device.asarray(np.zeros(4))
    with pytest.raises(ContextFailedError, match=r"cuGetProcAddress|cuTensorMapEncodeTiled"):
        device.tensor_map(dst.view(np.uint32, (8, 8)), (8, 8))
    device.close()


def test_fault_of_one_device_leaves_another_alone(h100: Device) -> None:
    """E15: the context is dead, not the process."""
    device = Device.open("emu:a100")
    kernel = device.compile(source(COPY)).kernel()
    with pytest.raises(KernelFaultError):
        kernel.launch(1, 64, [device.empty(64, np.uint32), device.asarray(_words(32)), np.uint32(64)])
        device.synchronize()
    assert np.array_equal(h100.asarray(np.arange(4)).numpy(), np.arange(4))


def _load_box(device: Device, qualifier: str) -> np.ndarray:
    data = device.asarray(np.arange(64 * 64, dtype=np.uint32).reshape(64, 64))
    out = device.empty((16, 16), np.uint32)
    kernel = device.compile(source(TENSOR_LOAD, QUALIFIER=qualifier)).kernel()
    kernel.launch(1, 32, [device.tensor_map(data, (16, 16)), out], shared_bytes=1024)
    return out.numpy()


def test_map_copied_to_local_memory_is_reported_with_the_remedy(h100: Device) -> None:
    """E14: without __grid_constant__ the compiler copies the map to local memory, where the TMA cannot see
    it."""
    expected = np.arange(64 * 64, dtype=np.uint32).reshape(64, 64)[:16, :16]
    assert np.array_equal(_load_box(h100, "const __grid_constant__"), expected)
    with pytest.raises(KernelFaultError) as caught:
        _load_box(h100, "")
    text = str(caught.value)
    assert "tensor map lies in local memory" in text and "__grid_constant__" in text and "load_box" in text


def test_tensor_maps_need_tma() -> None:
    with Device.open("emu:a100") as device, pytest.raises(TensorMapError, match=r"no tensor maps"):
        device.tensor_map(device.empty((64, 64), np.float32), (32, 32))


def test_foreign_pointer_is_refused(emulated: Device) -> None:
    array = emulated.empty(16, np.float32)

    class Foreign:
        __cuda_array_interface__ = array.__cuda_array_interface__ | {"data": (array.ptr + 4096, False)}

    with pytest.raises(ArrayError, match=r"are not memory of emu:"):
        emulated.wrap(Foreign())


def test_pinned_and_pageable_buffers_are_copied_both_ways(emulated: Device) -> None:
    data = _words(256)
    stream = emulated.stream()
    for buffer in (emulated.pinned(256, np.uint32), emulated.pageable(256, np.uint32)):
        buffer.array[:] = data
        array = emulated.empty(256, np.uint32).copy_from(buffer, stream=stream)
        assert np.array_equal(array.numpy(stream=stream), data)


def test_buffers_dropped_after_the_launch_are_still_there(emulated: Device) -> None:
    """E12: no reference left while the work is queued; the result is intact."""
    data = _words(4096)
    dst = emulated.empty(4096, np.uint32)
    stream = emulated.stream()
    kernel = emulated.compile(source(COPY)).kernel()
    kernel.launch(8, 128, [dst, emulated.asarray(data), np.uint32(4096)], stream=stream)
    gc.collect()
    emulated.empty(4096, np.uint32).fill(0, stream=stream)
    assert np.array_equal(dst.numpy(stream=stream), data)


def test_ctypes_and_numpy_scalars_are_equivalent(emulated: Device) -> None:
    data = _words(64)
    for count in (np.uint32(64), ctypes.c_uint32(64), np.int32(64)):
        dst = emulated.asarray(np.zeros(64, np.uint32))
        emulated.compile(source(COPY)).kernel().launch(1, 64, [dst, emulated.asarray(data), count])
        assert np.array_equal(dst.numpy(), data)


@pytest.mark.parametrize("n", [16, 1008, 1024, 4000])
def test_triton_pointer_kernel_copies_bit_for_bit(emulated: Device, n: int) -> None:
    data = RNG.integers(-(2**31), 2**31, n, dtype=np.int32)
    dst = emulated.empty(n, np.int32)
    kernel = emulated.compile(pointer_source()).kernel()
    kernel.launch(-(-n // 1024), None, [dst, emulated.asarray(data), n])
    assert np.array_equal(dst.numpy(), data)


@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (100, 84)])
def test_triton_descriptor_kernel_copies_bit_for_bit(emulated: Device, shape: tuple[int, int]) -> None:
    """Host descriptors: tensor maps on Hopper, decomposed into pointers on Ampere; ragged edges are
    clipped."""
    data = RNG.standard_normal(shape, dtype=np.float32)
    src, dst = emulated.asarray(data), emulated.empty(shape, np.float32)
    kernel = emulated.compile(descriptor_source()).kernel()
    grid = (-(-shape[0] // 64), -(-shape[1] // 64))
    kernel.launch(grid, None, [TritonDescriptor(dst, (64, 64)), TritonDescriptor(src, (64, 64))])
    assert dst.numpy().tobytes() == data.tobytes()


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "rows", "cols"),
    [
        ("fp32", 8, 4),
        ("fp32", 8, 8),
        ("fp32", 8, 16),
        ("fp32", 8, 32),
        ("fp32", 16, 16),
        ("fp16", 8, 8),
        ("fp16", 4, 32),
    ],
)
def test_small_pipelined_tiles_give_the_right_sum(
    h100: Device, kind: str, rows: int, cols: int, stages: int
) -> None:
    """F06: rows of 16 to 128 bytes at every pipeline depth: equal sums, no misaligned address."""
    data = RNG.integers(0, 100, (6 * rows, cols)).astype(_NUMPY[kind])
    made = TritonSource(
        kernels.sum_descriptors,
        {"out": "*fp32", "src": f"tensordesc<{kind}[{rows}, {cols}]>", "steps": "i32"},
        {"ROWS": rows, "COLS": cols, "STAGES": stages},
        ("out",),
        num_stages=stages,
        num_warps=1,
    )
    out = h100.empty((rows, cols), np.float32)
    h100.compile(made).kernel().launch(1, None, [out, TritonDescriptor(h100.asarray(data), (rows, cols)), 6])
    assert np.array_equal(out.numpy(), data.reshape(6, rows, cols).sum(0))


@pytest.mark.parametrize("seed", range(10))
def test_descriptor_stores_are_right_under_every_schedule(seed: int) -> None:
    """F08: each mismatch would be a failure, never a rerun: ten random interleavings, asynchronous work
    last."""
    shape = (128, 128)
    data = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    with Device.open("emu:h100", schedule="random", seed=seed) as device:
        src, dst = device.asarray(data), device.empty(shape, np.float32)
        maps = [TritonDescriptor(array, (64, 64)) for array in (dst, src)]
        device.compile(descriptor_source()).kernel().launch((2, 2), None, maps)
        assert dst.numpy().tobytes() == data.tobytes()


@pytest.mark.parametrize("schedule", ["timed", "async-latest", "random"])
@pytest.mark.parametrize("shape", [(128, 64), (100, 60)])
def test_host_and_device_made_descriptors_give_the_same_bytes(shape: tuple[int, int], schedule: str) -> None:
    """F05: the same copy through host descriptors and through descriptors that the kernel makes, whole tiles
    and ragged ones."""
    data = RNG.standard_normal(shape, dtype=np.float32)
    signature = {"dst": "*fp32", "src": "*fp32", "rows": "i32", "cols": "i32"}
    constants = {"ROWS": 64, "COLS": 32}
    device_made = TritonSource(kernels.device_descriptors, signature, constants, ("dst", "src"))
    with Device.open("emu:h100", schedule=schedule, seed=1) as device:
        src = device.asarray(data)
        by_host, by_device = device.empty(shape, np.float32), device.empty(shape, np.float32)
        made = TritonDescriptor(by_host, (64, 32)), TritonDescriptor(src, (64, 32))
        device.compile(descriptor_source(rows=64, cols=32)).kernel().launch((2, 2), None, made)
        device.compile(device_made).kernel().launch((2, 2), None, [by_device, src, *shape])
        assert by_host.numpy().tobytes() == by_device.numpy().tobytes() == data.tobytes()


# ------------------------------------------------------------------------------------- matrix instructions


def _product(
    device: Device, kind: str, out: str, tile: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(what ``kernels.product`` computed of whole numbers, what numpy says)."""
    rows, cols, depth = tile
    size = 2 * max(tile)
    a, b = (RNG.integers(-8, 9, (size, size)).astype(_NUMPY[kind]) for _ in range(2))
    made = TritonSource(
        kernels.product,
        {"a": f"*{kind}", "b": f"*{kind}", "c": f"*{out}", "columns": "i32", "depth": "i32"},
        {"ROWS": rows, "COLS": cols, "DEPTH": depth},
        ("a", "b", "c", "columns", "depth"),
    )
    c = device.empty((size, size), _NUMPY[out])
    device.compile(made).kernel().launch(
        (size // rows, size // cols), None, [device.asarray(a), device.asarray(b), c, size, size]
    )
    return c.numpy(), a.astype(np.float32) @ b.astype(np.float32)


@pytest.mark.parametrize("kind", ["fp16", "fp32"])
@pytest.mark.parametrize("tile", [(16, 16, 16), (16, 64, 32), (64, 64, 32)])
def test_triton_products_by_mma_sync_on_ampere(kind: str, tile: tuple[int, int, int]) -> None:
    """ldmatrix and mma.sync of .f16 and .tf32, fed by cp.async."""
    with Device.open("emu:a100") as device:
        got, expected = _product(device, kind, "fp32", tile)
        assert np.array_equal(got, expected)
        assert device.emulator.last_launch.counters.instructions_by_class["matrix"] > 0


@pytest.mark.parametrize("spec", ["emu:h100", "emu:b200"])
@pytest.mark.parametrize(("kind", "out"), [("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")])
def test_triton_products_of_small_tiles_on_hopper_and_blackwell(spec: str, kind: str, out: str) -> None:
    """With 16 rows Triton takes mma.sync there, too, and stores through stmatrix."""
    with Device.open(spec) as device:
        got, expected = _product(device, kind, out, (16, 16, 16))
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(("spec", "name"), [("emu:h100", "wgmma"), ("emu:b200", "tcgen05")])
def test_triton_products_of_large_tiles_are_refused_by_name(spec: str, name: str) -> None:
    with Device.open(spec) as device, pytest.raises(DriverError, match=rf"{name}.*is not modelled"):
        _product(device, "fp16", "fp32", (64, 64, 32))


@pytest.mark.parametrize("schedule", ["timed", "random", "producer-ahead"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_warp_specialised_product_ends_with_any_number_of_stages(stages: int, schedule: str) -> None:
    """F09: producer and consumer warps hand registers over (setmaxnreg) and meet at mbarriers."""
    rows, cols, depth, steps = 16, 64, 32, 5
    a = RNG.integers(-8, 9, (rows, steps * depth)).astype(np.float16)
    b = RNG.integers(-8, 9, (steps * depth, cols)).astype(np.float16)
    made = TritonSource(
        kernels.product_specialised,
        {
            "out": "*fp32",
            "a": f"tensordesc<fp16[{rows}, {depth}]>",
            "b": f"tensordesc<fp16[{depth}, {cols}]>",
            "steps": "i32",
        },
        {"ROWS": rows, "COLS": cols, "DEPTH": depth, "STAGES": stages},
        ("out",),
        num_stages=stages,
        num_warps=4,
    )
    with Device.open("emu:b200", schedule=schedule, seed=stages) as device:
        module = device.compile(made)
        assert "setmaxnreg.dec" in module.image.ptx
        out = device.empty((rows, cols), np.float32)
        maps = [
            TritonDescriptor(device.asarray(x), tile) for x, tile in ((a, (rows, depth)), (b, (depth, cols)))
        ]
        module.kernel().launch(1, None, [out, *maps, steps])
        assert np.array_equal(out.numpy(), a.astype(np.float32) @ b.astype(np.float32))


def test_the_hosts_clock_counts_calls_and_waits(h100: Device) -> None:
    """Modelled: Python costs nothing."""
    before = h100.host_seconds()
    assert h100.host_seconds() == before
    array = h100.empty(1 << 20)
    called = h100.host_seconds()
    array.fill(0)
    h100.synchronize()
    assert before < called < h100.host_seconds()


def test_a_schedule_without_a_clock_has_none_for_the_host_either() -> None:
    with (
        Device.open("emu:h100", schedule="random") as device,
        pytest.raises(UnavailableError, match=r"'random' has no clock; .* schedule='timed'"),
    ):
        device.host_seconds()
