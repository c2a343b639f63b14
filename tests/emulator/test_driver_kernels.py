"""Real PTX through the stand-in, executed by the real interpreter."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from tests.emulator.driver_kit import array_of, attach, load, ok, open_node, refused, values_at

COPY = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 dst, .param .u64 src, .param .u32 count)
{
  .reg .pred %p;
  .reg .b32 %r<6>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd0, [dst];
  ld.param.u64 %rd1, [src];
  ld.param.u32 %r0, [count];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %p, %r4, %r0;
  @%p bra DONE;
  mul.wide.u32 %rd2, %r4, 4;
  add.u64 %rd3, %rd1, %rd2;
  add.u64 %rd4, %rd0, %rd2;
  ld.global.u32 %r5, [%rd3];
  st.global.u32 [%rd4], %r5;
DONE:
  ret;
}
"""
TYPES = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)


def open_real(*profiles: str) -> Driver:
    driver = Driver(Node(list(profiles) or ["h100"]))
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    return driver


def run_copy(driver: Driver, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Copy ``count`` words; (source, destination) on the host."""
    source = np.random.default_rng(count).integers(0, 2**32, max(1, count), np.uint32)
    src, dst = ok(driver.cuMemAlloc(source.nbytes)), ok(driver.cuMemAlloc(source.nbytes))
    ok(driver.cuMemcpyHtoD(src, source, source.nbytes))
    ok(driver.cuMemsetD8(dst, 0, source.nbytes))
    function = load(driver, COPY, b"copy")
    values = int(dst), int(src), count
    grid = max(1, -(-count // 128))
    ok(driver.cuLaunchKernel(function, grid, 1, 1, 128, 1, 1, 0, 0, (values, TYPES), 0), driver)
    out = np.empty_like(source)
    result = driver.cuMemcpyDtoH(out, dst, out.nbytes)
    assert result[0] == 0, driver.report()
    return source[:count], out[:count]


@pytest.mark.parametrize("profile", ["a100", "h100"])
@pytest.mark.parametrize("count", [0, 1, 31, 127, 128, 129, 5000])
def test_copy_is_bitwise_equal(profile: str, count: int) -> None:
    source, out = run_copy(open_real(profile), count)
    assert (source == out).all()


def test_counters_of_a_full_copy_are_exact() -> None:
    driver = open_real()
    run_copy(driver, 1024)
    found = driver.node.devices[0].last_launch
    assert (found.kernel, found.grid, found.block) == ("copy", (8, 1, 1), (128, 1, 1))
    counters = found.counters
    # 15 instructions in each of 32 warps; the untaken branch is executed by no thread.
    assert (counters.launches, counters.warp_instructions, counters.thread_instructions) == (
        1,
        15 * 32,
        14 * 1024,
    )
    assert (counters.global_load_requests, counters.global_load_sectors, counters.global_load_bytes) == (
        32,
        128,
        4096,
    )
    assert (counters.global_store_requests, counters.global_store_sectors) == (32, 128)
    assert counters.bytes_through_registers == 8192
    assert found.cycles > 0 and found.end_s > found.start_s


def test_store_past_the_end_is_an_illegal_address_with_the_full_story() -> None:
    driver = open_real()
    source = np.zeros(256, np.uint32)
    src, dst = ok(driver.cuMemAlloc(1024)), ok(driver.cuMemAlloc(512))
    ok(driver.cuMemcpyHtoD(src, source, 1024))
    values = int(dst), int(src), 256
    function = load(driver, COPY, b"copy")
    ok(driver.cuLaunchKernel(function, 2, 1, 1, 128, 1, 1, 0, 0, (values, TYPES), 0))
    report = refused(
        driver, driver.cuCtxSynchronize(), "ILLEGAL_ADDRESS", "512 bytes", "kernel copy", "PTX line"
    )
    assert "CTA" in report and "thread" in report
    refused(driver, driver.cuMemAlloc(16), "ILLEGAL_ADDRESS", "sticky")


def test_misaligned_pointer_is_a_misaligned_address() -> None:
    driver = open_real()
    pointer = int(ok(driver.cuMemAlloc(1024)))
    ok(driver.cuMemsetD8(pointer, 0, 1024))
    function = load(driver, COPY, b"copy")
    values = pointer + 512, pointer + 2, 4
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, (values, TYPES), 0))
    refused(driver, driver.cuCtxSynchronize(), "MISALIGNED_ADDRESS", "4-byte aligned")


def test_copy_then_read_back_through_events_takes_time() -> None:
    driver = open_real()
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(start, 0))
    run_copy(driver, 4096)
    ok(driver.cuEventRecord(end, 0))
    ok(driver.cuEventSynchronize(end))
    kernel_s = driver.node.devices[0].last_launch.end_s - driver.node.devices[0].last_launch.start_s
    assert ok(driver.cuEventElapsedTime(start, end)) > kernel_s * 1e3 > 0


WAIT_FOR_NOBODY = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry wait()
{
  .reg .pred %p;
  .reg .b32 %r0;
  .shared .align 8 .b64 full;
  mov.u32 %r0, full;
  mbarrier.init.shared.b64 [%r0], 1;
AGAIN:
  mbarrier.try_wait.parity.shared.b64 %p, [%r0], 0;
  @!%p bra AGAIN;
  ret;
}
"""


def test_deadlock_is_a_time_out_with_the_barriers_story() -> None:
    driver = open_real()
    function = load(driver, WAIT_FOR_NOBODY, b"wait")
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, None, 0), driver)
    report = refused(
        driver, driver.cuCtxSynchronize(), "LAUNCH_TIMEOUT", "full", "phase 0", "kernel wait (grid"
    )
    assert "PTX line" in report


def test_registers_limit_the_ctas_that_are_resident() -> None:
    driver = open_real()
    source = np.zeros(1024, np.uint32)
    src, dst = ok(driver.cuMemAlloc(4096)), ok(driver.cuMemAlloc(4096))
    ok(driver.cuMemcpyHtoD(src, source, 4096))
    function, resident = load(driver, COPY, b"copy"), []
    for registers in (32, 128):
        driver.describe_function(function, registers=registers)
        values = int(dst), int(src), 1024
        ok(driver.cuLaunchKernel(function, 4, 1, 1, 256, 1, 1, 0, 0, (values, TYPES), 0), driver)
        ok(driver.cuCtxSynchronize(), driver)
        launched = driver.node.devices[0].last_launch
        assert launched is not None
        resident.append(launched.ctas_per_sm)
        assert launched.ctas_per_sm == ok(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 256, 0)
        )
    assert resident == [8, 2]


@pytest.mark.parametrize("enabled", [False, True], ids=["disabled", "enabled"])
def test_kernel_reads_another_gpus_memory_with_peer_access_only(enabled: bool) -> None:
    """D13: both devices are named, and only the context of the reader fails."""
    driver = open_real("h100", "h100")
    first, second = open_node(driver)
    source = np.arange(256, dtype=np.uint32)
    src = array_of(driver, source)
    ok(driver.cuCtxSetCurrent(second))
    if enabled:
        ok(driver.cuCtxEnablePeerAccess(first, 0))
    dst = ok(driver.cuMemAlloc(source.nbytes))
    function = load(driver, COPY, b"copy")
    ok(driver.cuLaunchKernel(function, 2, 1, 1, 128, 1, 1, 0, 0, ((int(dst), int(src), 256), TYPES), 0))
    if enabled:
        assert (values_at(driver, dst, 256) == source).all()
        return
    refused(
        driver, driver.cuCtxSynchronize(), "ILLEGAL_ADDRESS", "device 1 uses", "memory of device 0",
        "peer access from device 1 to device 0 is not enabled", "kernel copy",
    )  # fmt: skip
    ok(driver.cuCtxSetCurrent(first))
    assert (values_at(driver, src, 256) == source).all()


@pytest.mark.parametrize("ordinal", [0, 1], ids=["same-device", "other-device"])
def test_kernel_copies_from_memory_of_another_process(ordinal: int) -> None:
    exporter = open_real("h100", "h100")
    importer = attach(exporter.node, ordinal)
    source = np.arange(256, dtype=np.uint32)
    src = array_of(exporter, source)
    handle = cuda.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), ok(exporter.cuIpcGetMemHandle(src)).getPtr(), 64)
    opened, dst = ok(importer.cuIpcOpenMemHandle(handle, 1)), ok(importer.cuMemAlloc(source.nbytes))
    function = load(importer, COPY, b"copy")
    for pointer, count in ((opened, 256), (src, 1)):
        values = (int(dst), int(pointer), count), TYPES
        ok(importer.cuLaunchKernel(function, 2, 1, 1, 128, 1, 1, 0, 0, values, 0))
        if pointer is opened:
            assert (values_at(importer, dst, 256) == source).all()
    refused(
        importer, importer.cuCtxSynchronize(), "ILLEGAL_ADDRESS", "of process 0", "exchange an IPC handle"
    )
    assert (values_at(exporter, src, 256) == source).all()


SIGNAL = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry await(.param .u64 flag, .param .u64 out)
{
  .reg .pred %p;
  .reg .b32 %r;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd0, [flag];
  ld.param.u64 %rd1, [out];
LOOP:
  ld.acquire.sys.global.u32 %r, [%rd0];
  setp.eq.u32 %p, %r, 0;
  @%p bra LOOP;
  st.global.u32 [%rd1], %r;
  ret;
}
.visible .entry tell(.param .u64 flag, .param .u64 out)
{
  .reg .b64 %rd;
  ld.param.u64 %rd, [flag];
  st.release.sys.global.u32 [%rd], 7;
  ret;
}
"""
POINTERS = (ctypes.c_uint64, ctypes.c_uint64)


def run_signal(driver: Driver, name: bytes, flag: Any, out: Any = 0) -> None:
    function = load(driver, SIGNAL, name)
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((int(flag), int(out)), POINTERS), 0))


def processes(ordinal: int) -> tuple[Driver, Driver, Any, Any]:
    """Two processes, a zero word of the first one on device 0, and the second one's pointer to it."""
    first = open_real("h100", "h100")
    second = attach(first.node, ordinal, "rank 1")
    word = array_of(first, np.zeros(1, np.uint32))
    handle = cuda.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), ok(first.cuIpcGetMemHandle(word)).getPtr(), 64)
    return first, second, word, ok(second.cuIpcOpenMemHandle(handle, 1))


@pytest.mark.parametrize("ordinal", [0, 1], ids=["same-device", "other-device"])
@pytest.mark.parametrize("waiter", [0, 1], ids=["owner-waits", "importer-waits"])
def test_kernels_of_two_processes_signal_each_other(ordinal: int, waiter: int) -> None:
    first, second, word, opened = processes(ordinal)
    sides = [(first, word), (second, opened)]
    (waiting, seen), (telling, written) = sides[waiter], sides[1 - waiter]
    out = array_of(waiting, np.zeros(1, np.uint32))
    run_signal(waiting, b"await", seen, out)
    run_signal(telling, b"tell", written)
    assert values_at(waiting, out, 1)[0] == 7


def test_running_kernel_of_a_process_that_ends_is_dropped() -> None:
    """It polls memory of the survivor, whose own kernels and memory go on."""
    first, second, word, opened = processes(1)
    run_signal(second, b"await", opened, ok(second.cuMemAlloc(4)))
    out = array_of(first, np.zeros(1, np.uint32))
    second.end()
    ok(first.cuMemFree(word), first)
    flag = array_of(first, np.ones(1, np.uint32))
    run_signal(first, b"await", flag, out)
    assert values_at(first, out, 1)[0] == 1
    assert first.node.devices[1].memory.allocated_bytes == 0
