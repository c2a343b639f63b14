"""Several processes on one node: contexts, faults and clocks of their own; nothing is left when one ends."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.errors import MemoryFault
from tests.emulator.driver_kit import (
    FakeExecutor,
    array_of,
    attach,
    launch,
    load,
    ok,
    open_driver,
    ptx,
    refused,
    values_at,
)

WORDS = np.arange(256, dtype=np.uint32)


def test_processes_share_a_device_but_no_context_handle_or_memory() -> None:
    first = open_driver()
    second = attach(first.node)
    stream, pointer = ok(first.cuStreamCreate(1)), array_of(first, WORDS)
    refused(second, second.cuStreamSynchronize(stream), "INVALID_HANDLE", "never made")
    mine = array_of(second, WORDS + 1)
    assert int(mine) != int(pointer)
    assert (values_at(first, pointer, 256) == WORDS).all()
    free, total = ok(second.cuMemGetInfo())
    assert total - free == 2 * WORDS.nbytes
    ok(second.cuDevicePrimaryCtxRelease(0))
    assert ok(first.cuDevicePrimaryCtxGetState(0))[1] == 1
    assert (values_at(first, pointer, 256) == WORDS).all()


def test_page_locked_memory_of_another_process_is_unknown() -> None:
    first = open_driver()
    second = attach(first.node)
    host, device = ok(first.cuMemHostAlloc(64, 0)), ok(second.cuMemAlloc(64))
    for result in (second.cuMemHostGetFlags(host), second.cuMemFreeHost(host)):
        refused(second, result, "INVALID_VALUE", "no page-locked range of process 1")
    refused(second, second.cuMemcpyDtoD(device, host, 64), "INVALID_VALUE", "neither a device address nor")
    ok(first.cuMemcpyDtoD(ok(first.cuMemAlloc(64)), host, 64))
    refused(second, second.cuMemHostUnregister(host), "HOST_MEMORY_NOT_REGISTERED")
    ok(first.cuMemFreeHost(host))


def test_fault_kills_the_context_of_one_process_only() -> None:
    def fail(device: Any, params: bytes) -> None:
        raise MemoryFault("a fault of one process", rule="memory.bounds")

    executor = FakeExecutor(effect=fail)
    first = open_driver(executor=executor)
    second = attach(first.node)
    ok(launch(first, load(first, ptx())))
    refused(first, first.cuCtxSynchronize(), "ILLEGAL_ADDRESS", "a fault of one process")
    executor.effect = None
    ok(launch(second, load(second, ptx())))
    ok(second.cuCtxSynchronize())
    assert second.report() == ""
    refused(first, first.cuMemAlloc(64), "ILLEGAL_ADDRESS", "sticky")


def test_host_clocks_are_separate_and_the_device_is_shared() -> None:
    cycles = 1e6
    first = open_driver(executor=FakeExecutor(cycles))
    second = attach(first.node)
    for driver in (first, second):
        ok(launch(driver, load(driver, ptx())))
    ok(second.cuCtxSynchronize())
    assert first.process.host_time_s < second.process.host_time_s
    ok(first.cuCtxSynchronize())
    kernel_s = cycles / (first.node.devices[0].clock.clock_mhz * 1e6)
    assert second.process.host_time_s > kernel_s


def test_processes_are_listed_and_named() -> None:
    first = open_driver()
    second = attach(first.node, label="rank 1 (pid 4711)")
    assert first.node.processes == [first.process, second.process]
    assert [str(process) for process in first.node.processes] == ["process 0", "rank 1 (pid 4711)"]
    second.end()
    assert first.node.processes == [first.process]


def opened(exporter: Driver, importer: Driver, pointer: Any) -> Any:
    """Open the exporter's memory in the importer."""
    handle = cuda.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), ok(exporter.cuIpcGetMemHandle(pointer)).getPtr(), 64)
    return ok(importer.cuIpcOpenMemHandle(handle, 1))


def test_nothing_is_left_of_a_process_that_ended() -> None:
    first = open_driver("h100", "h100")
    second = attach(first.node, 1, "rank 1")
    before = first.node.count_of(second.process)
    opened(first, second, array_of(first, WORDS))
    ok(first.cuIpcGetMemHandle(array_of(first, WORDS)))
    ok(second.cuIpcGetMemHandle(array_of(second, WORDS)))
    ok(second.cuIpcGetEventHandle(ok(second.cuEventCreate(6))))
    ok(second.cuMemHostAlloc(4096, 0))
    flag = ok(first.cuMemHostAlloc(4, 0))
    function, stream = (
        load(second, ptx(variables=".visible .global .b32 word;")),
        ok(second.cuStreamCreate(1)),
    )
    ok(launch(second, function, stream))
    assert len(first.node.ipc_handles) == 4
    second.end()
    second.end()
    left = first.node.count_of(second.process)
    assert left == before._replace(contexts=0)
    assert len(first.node.ipc_handles) == 2 and len(first.node.host.ranges) == 1
    assert first.node.devices[1].memory.allocated_bytes == 0
    assert second.cuMemAlloc(64)[0] == cuda.CUresult.CUDA_ERROR_DEINITIALIZED
    assert "rank 1 has ended" in second.report()
    ok(first.cuMemFreeHost(flag))
    ok(first.cuCtxSynchronize())


def test_queued_work_of_a_process_that_ended_never_runs() -> None:
    executor = FakeExecutor()
    first = open_driver(executor=executor)
    second = attach(first.node)
    ok(launch(second, load(second, ptx())))
    ok(launch(first, load(first, ptx("mine"), b"mine")))
    second.end()
    ok(first.cuCtxSynchronize())
    assert [call.kernel for call in executor.calls] == ["mine"]


def test_counts_return_after_many_allocations_exports_and_openings() -> None:
    """1,000 rounds leave neither allocation, mapping, handle nor byte."""
    first = open_driver("h100", "h100")
    second = attach(first.node, 1)
    node = first.node
    before = [node.count_of(driver.process) for driver in (first, second)]
    handles, used = len(node.ipc_handles), node.devices[0].memory.allocated_bytes
    for _ in range(1000):
        pointer = ok(first.cuMemAlloc(4096))
        ok(second.cuIpcCloseMemHandle(opened(first, second, pointer)))
        ok(first.cuMemFree(pointer))
    assert [node.count_of(driver.process) for driver in (first, second)] == before
    assert (len(node.ipc_handles), node.devices[0].memory.allocated_bytes) == (handles, used)


def test_count_shows_what_leaks() -> None:
    first = open_driver("h100", "h100")
    second = attach(first.node, 1)
    array_of(second, WORDS)
    before = first.node.count_of(second.process)
    opened(first, second, array_of(first, WORDS))
    array_of(second, WORDS)
    ok(second.cuEventCreate(0))
    ok(second.cuMemHostAlloc(64, 0))
    after = first.node.count_of(second.process)
    grown = [name for name in before._fields if getattr(after, name) - getattr(before, name) == 1]
    assert grown == ["allocations", "mappings", "handles", "host_ranges"]


# --- host functions


def test_host_function_runs_in_stream_order() -> None:
    driver = open_driver()
    pointer, stream = array_of(driver, WORDS), ok(driver.cuStreamCreate(1))
    out = ok(driver.cuMemHostAlloc(4, 0))
    seen: list[tuple[int | None, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(argument: int | None) -> None:
        seen.append((argument, ctypes.c_uint32.from_address(out).value))

    ok(driver.cuMemcpyDtoHAsync(out, int(pointer) + 4, 4, stream))
    function = cuda.CUhostFn(ctypes.cast(note, ctypes.c_void_p).value)
    ok(driver.cuLaunchHostFunc(stream, function, 77))
    assert seen == []
    ok(driver.cuStreamSynchronize(stream))
    assert seen == [(77, 1)]
    refused(driver, driver.cuLaunchHostFunc(stream, None, 0), "INVALID_VALUE", "fn is NULL")


def test_host_function_may_not_call_the_driver() -> None:
    driver = open_driver()
    results: list[Any] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def call(argument: int | None) -> None:
        results.append(driver.cuMemAlloc(64))

    ok(driver.cuLaunchHostFunc(0, cuda.CUhostFn(ctypes.cast(call, ctypes.c_void_p).value), None))
    ok(driver.cuCtxSynchronize())
    assert results == [(cuda.CUresult.CUDA_ERROR_NOT_PERMITTED, None)]
    assert "must not call the driver" in driver.report()
    ok(driver.cuMemAlloc(64))
