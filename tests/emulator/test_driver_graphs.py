"""Stream capture and CUDA graphs of the stand-in driver: what becomes a node, replay, what is forbidden."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from tests.emulator.driver_kit import FakeExecutor, launch, load, ok, open_driver, ptx, refused, word_at

MODES = cuda.CUstreamCaptureMode
GLOBAL = MODES.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = MODES.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = MODES.CU_STREAM_CAPTURE_MODE_RELAXED
STATUS = cuda.CUstreamCaptureStatus
ACTIVE = STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
INVALIDATED = STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
NONE = STATUS.CU_STREAM_CAPTURE_STATUS_NONE


def stream_of(driver: Driver, flags: int = 1) -> Any:
    return ok(driver.cuStreamCreate(flags))


def begin(driver: Driver, stream: Any, mode: Any = THREAD_LOCAL) -> None:
    ok(driver.cuStreamBeginCapture(stream, mode), driver)


def end(driver: Driver, stream: Any) -> Any:
    """The executable graph of the capture that ends in ``stream``."""
    graph = ok(driver.cuStreamEndCapture(stream), driver)
    executable = ok(driver.cuGraphInstantiate(graph, 0), driver)
    ok(driver.cuGraphDestroy(graph), driver)
    return executable


def replay(driver: Driver, executable: Any, stream: Any) -> None:
    ok(driver.cuGraphLaunch(executable, stream), driver)
    ok(driver.cuStreamSynchronize(stream), driver)


def status(driver: Driver, stream: Any) -> Any:
    return ok(driver.cuStreamIsCapturing(stream))


def wait_for(driver: Driver, waiter: Any, stream: Any) -> None:
    """``waiter`` waits for what ``stream`` has now."""
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(event, stream), driver)
    ok(driver.cuStreamWaitEvent(waiter, event, 0), driver)


def words(driver: Driver, address: Any, count: int = 1) -> list[int]:
    found = np.empty(count, np.uint32)
    ok(driver.cuMemcpyDtoH(found.ctypes.data, address, found.nbytes), driver)
    return found.tolist()


# --------------------------------------------------------------------------------------- capture and replay


def test_nothing_runs_until_the_graph_is_launched() -> None:
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAlloc(16))
    ok(driver.cuMemsetD32(memory, 5, 4))
    begin(driver, stream)
    assert status(driver, stream) is ACTIVE
    ok(driver.cuMemsetD32Async(memory, 9, 4, stream))
    executable = end(driver, stream)
    assert status(driver, stream) is NONE
    assert words(driver, memory) == [5]
    replay(driver, executable, stream)
    assert words(driver, memory) == [9]
    ok(driver.cuMemsetD32(memory, 5, 4))
    replay(driver, executable, stream)
    assert words(driver, memory) == [9]


def test_kernel_arguments_are_frozen_at_capture() -> None:
    seen: list[int] = []
    executor = FakeExecutor(effect=lambda device, params: seen.append(int.from_bytes(params[:4], "little")))
    driver = open_driver(executor=executor)
    function = load(driver, ptx(params=".param .u32 n"))
    stream = stream_of(driver)
    argument = ctypes.c_uint32(7)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    begin(driver, stream)
    ok(launch(driver, function, stream, ctypes.addressof(pointers)), driver)
    executable = end(driver, stream)
    assert seen == []
    assert driver.process.contexts[0].launches == 0
    argument.value = 8
    for _ in range(3):
        replay(driver, executable, stream)
    assert seen == [7, 7, 7]
    assert driver.process.contexts[0].launches == 3


def test_copies_of_host_memory_read_it_when_they_run() -> None:
    """Pageable memory too: a graph copies what is there at its launch."""
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAlloc(4))
    source, target = np.array([1], np.uint32), np.zeros(1, np.uint32)
    begin(driver, stream)
    ok(driver.cuMemcpyHtoDAsync(memory, source.ctypes.data, 4, stream), driver)
    ok(driver.cuMemcpyDtoHAsync(target.ctypes.data, memory, 4, stream), driver)
    executable = end(driver, stream)
    for value in (3, 4):
        source[0] = value
        replay(driver, executable, stream)
        assert target.tolist() == [value]


def test_forked_streams_run_beside_each_other_and_join() -> None:
    """The copy of the other stream sees the first memset, and is done before the last."""
    driver = open_driver()
    first, other = stream_of(driver), stream_of(driver)
    memory, host = ok(driver.cuMemAlloc(1 << 20)), ok(driver.cuMemHostAlloc(1 << 20, 0))
    begin(driver, first)
    ok(driver.cuMemsetD8Async(memory, 1, 1 << 20, first))
    wait_for(driver, other, first)
    assert status(driver, other) is ACTIVE
    ok(driver.cuMemcpyDtoHAsync(host, memory, 1 << 20, other))
    ok(driver.cuMemsetD8Async(memory, 2, 16, first))
    wait_for(driver, first, other)
    ok(driver.cuMemsetD8Async(memory, 3, 16, first))
    executable = end(driver, first)
    assert status(driver, other) is NONE
    replay(driver, executable, first)
    assert words(driver, memory) == [0x03030303]
    assert word_at(host + 4096).value == 0x01010101


def test_graph_takes_its_turn_in_the_stream_and_after_its_own_last_launch() -> None:
    order: list[int] = []
    executor = FakeExecutor(effect=lambda device, params: order.append(params[0]))
    driver = open_driver(executor=executor)
    function = load(driver, ptx(params=".param .u32 n"))
    streams = [stream_of(driver), stream_of(driver)]

    def mark(stream: Any, value: int) -> None:
        argument = ctypes.c_uint32(value)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        ok(launch(driver, function, stream, ctypes.addressof(pointers)), driver)

    begin(driver, streams[0])
    mark(streams[0], 2)
    mark(streams[0], 3)
    executable = end(driver, streams[0])
    gate = ok(driver.cuMemHostAlloc(4, 2))
    ok(driver.cuStreamWaitValue32(streams[0], gate, 1, 1))
    mark(streams[0], 1)
    ok(driver.cuGraphLaunch(executable, streams[0]))
    mark(streams[0], 4)
    ok(driver.cuGraphLaunch(executable, streams[1]))
    word_at(gate).value = 1
    ok(driver.cuCtxSynchronize(), driver)
    assert order in ([1, 2, 3, 4, 2, 3], [1, 2, 3, 2, 3, 4], [1, 2, 3, 2, 4, 3])


def test_waits_and_writes_of_values_are_nodes() -> None:
    """The wait waits again in every launch."""
    driver = open_driver()
    stream, flag = stream_of(driver), ok(driver.cuMemHostAlloc(8, 2))
    begin(driver, stream)
    ok(driver.cuStreamWaitValue32(stream, flag, 1, 1), driver)
    ok(driver.cuStreamWriteValue32(stream, flag, 0, 0), driver)
    ok(driver.cuStreamWriteValue32(stream, flag + 4, 5, 0), driver)
    executable = end(driver, stream)
    for _ in range(2):
        word_at(flag + 4).value = 0
        ok(driver.cuGraphLaunch(executable, stream))
        assert driver.cuStreamQuery(stream)[0] is cuda.CUresult.CUDA_ERROR_NOT_READY
        word_at(flag).value = 1
        ok(driver.cuStreamSynchronize(stream), driver)
        assert (word_at(flag).value, word_at(flag + 4).value) == (0, 5)


def test_graph_of_two_devices() -> None:
    driver = open_driver("h100", "h100")
    contexts = [ok(driver.cuDevicePrimaryCtxRetain(device)) for device in range(2)]
    streams, memory = [], []
    for context in contexts:
        ok(driver.cuCtxSetCurrent(context))
        streams.append(stream_of(driver))
        memory.append(ok(driver.cuMemAlloc(16)))
    begin(driver, streams[0])
    ok(driver.cuCtxSetCurrent(contexts[0]))
    ok(driver.cuMemsetD32Async(memory[0], 1, 4, streams[0]))
    wait_for(driver, streams[1], streams[0])
    ok(driver.cuCtxSetCurrent(contexts[1]))
    ok(driver.cuMemsetD32Async(memory[1], 2, 4, streams[1]), driver)
    wait_for(driver, streams[0], streams[1])
    executable = end(driver, streams[0])
    replay(driver, executable, streams[0])
    assert words(driver, memory[0]) + words(driver, memory[1]) == [1, 2]


def test_launch_costs_the_host_one_call() -> None:
    driver = open_driver()
    function, stream = load(driver, ptx()), stream_of(driver)
    begin(driver, stream)
    for _ in range(10):
        ok(launch(driver, function, stream))
    executable = end(driver, stream)
    before = driver.process.host_time_s
    ok(driver.cuGraphLaunch(executable, stream))
    of_graph = driver.process.host_time_s - before
    before = driver.process.host_time_s
    ok(launch(driver, function, stream))
    assert of_graph == pytest.approx(driver.process.host_time_s - before)


def test_empty_graph_is_a_graph() -> None:
    driver = open_driver()
    stream = stream_of(driver)
    begin(driver, stream)
    executable = end(driver, stream)
    replay(driver, executable, stream)


def test_upload_takes_its_place_in_the_stream() -> None:
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAlloc(16))
    begin(driver, stream)
    ok(driver.cuMemsetD32Async(memory, 1, 4, stream))
    executable = end(driver, stream)
    ok(driver.cuGraphUpload(executable, stream), driver)
    replay(driver, executable, stream)
    assert words(driver, memory) == [1]


def test_destroyed_graphs_and_executables_are_refused() -> None:
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAlloc(16))
    begin(driver, stream)
    ok(driver.cuMemsetD32Async(memory, 3, 4, stream))
    graph = ok(driver.cuStreamEndCapture(stream))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphDestroy(graph))
    refused(driver, driver.cuGraphInstantiate(graph, 0), "INVALID_VALUE", "is no graph")
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuGraphExecDestroy(executable))
    refused(driver, driver.cuGraphLaunch(executable, stream), "INVALID_VALUE", "no executable graph")
    ok(driver.cuStreamSynchronize(stream))
    assert words(driver, memory) == [3], "a launch under way ends as it would have"


def test_two_hundred_graphs_leave_no_stream_behind() -> None:
    driver = open_driver()
    stream = stream_of(driver)
    objects = len(driver.process.objects)
    for _ in range(200):
        begin(driver, stream)
        executable = end(driver, stream)
        ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuStreamSynchronize(stream))
    assert len(driver.process.objects) == objects
    assert len(driver.node.timeline.streams_of(driver.process.contexts[0])) == 1


def test_capture_tells_its_state() -> None:
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAlloc(16))
    assert ok(driver.cuStreamGetCaptureInfo(stream))[0] is NONE
    begin(driver, stream)
    ok(driver.cuMemsetD32Async(memory, 3, 4, stream))
    state, number, graph, nodes, *_, count = ok(driver.cuStreamGetCaptureInfo(stream))
    assert (state, len(nodes), count) == (ACTIVE, 1, 1)
    assert int(number) > 0
    refused(driver, driver.cuGraphDestroy(graph), "INVALID_VALUE", "still being captured")
    assert int(ok(driver.cuStreamEndCapture(stream))) == int(graph)


# ----------------------------------------------------------------------------------------- what is forbidden


@pytest.mark.parametrize(
    "call", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize", "cuStreamDestroy"]
)
def test_host_may_not_wait_for_a_capturing_stream(call: str) -> None:
    driver = open_driver()
    stream = stream_of(driver)
    begin(driver, stream, RELAXED)
    arguments = () if call == "cuCtxSynchronize" else (stream,)
    answer = getattr(driver, call)(*arguments)
    refused(driver, answer, "STREAM_CAPTURE_UNSUPPORTED", "captures", "invalidates the capture")
    assert status(driver, stream) is INVALIDATED
    refused(driver, driver.cuStreamEndCapture(stream), "STREAM_CAPTURE_INVALIDATED", "was invalidated by")
    assert status(driver, stream) is NONE
    ok(getattr(driver, call)(*arguments), driver)


def test_work_after_the_capture_broke_is_refused() -> None:
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAlloc(16))
    begin(driver, stream)
    driver.cuStreamSynchronize(stream)
    answer = driver.cuMemsetD32Async(memory, 3, 4, stream)
    refused(driver, answer, "STREAM_CAPTURE_INVALIDATED", "is invalid since", "cuStreamEndCapture")


def test_default_stream_waits_for_blocking_streams_that_capture() -> None:
    driver = open_driver()
    memory = ok(driver.cuMemAlloc(16))
    blocking = stream_of(driver, 0)
    begin(driver, blocking, RELAXED)
    refused(driver, driver.cuStreamIsCapturing(0), "STREAM_CAPTURE_IMPLICIT", "CU_STREAM_NON_BLOCKING")
    assert status(driver, blocking) is ACTIVE, "asking breaks nothing"
    answer = driver.cuMemsetD32Async(memory, 3, 4, 0)
    refused(driver, answer, "STREAM_CAPTURE_IMPLICIT", "the default stream waits for")
    refused(driver, driver.cuStreamEndCapture(blocking), "STREAM_CAPTURE_INVALIDATED")
    apart = stream_of(driver, 1)
    begin(driver, apart, RELAXED)
    ok(driver.cuMemsetD32Async(memory, 3, 4, 0), driver)
    ok(driver.cuStreamEndCapture(apart), driver)


def test_default_stream_is_not_captured() -> None:
    driver = open_driver()
    refused(driver, driver.cuStreamBeginCapture(0, GLOBAL), "STREAM_CAPTURE_UNSUPPORTED", "create a stream")
    begin(driver, cuda.CU_STREAM_PER_THREAD)
    ok(driver.cuStreamEndCapture(cuda.CU_STREAM_PER_THREAD), driver)


def test_capture_begins_and_ends_once() -> None:
    driver = open_driver()
    stream = stream_of(driver)
    refused(driver, driver.cuStreamEndCapture(stream), "INVALID_VALUE", "is not capturing")
    begin(driver, stream)
    refused(driver, driver.cuStreamBeginCapture(stream, GLOBAL), "INVALID_VALUE", "capturing already")
    ok(driver.cuStreamEndCapture(stream), driver)


def test_forks_are_joined() -> None:
    driver = open_driver()
    first, other, memory = stream_of(driver), stream_of(driver), ok(driver.cuMemAlloc(16))
    begin(driver, first)
    wait_for(driver, other, first)
    ok(driver.cuMemsetD32Async(memory, 3, 4, other))
    answer = driver.cuStreamEndCapture(first)
    refused(driver, answer, "STREAM_CAPTURE_UNJOINED", "did not wait for all", "memset of 16 bytes")
    assert status(driver, other) is NONE


def test_capture_is_ended_where_it_began() -> None:
    driver = open_driver()
    first, other = stream_of(driver), stream_of(driver)
    begin(driver, first)
    wait_for(driver, other, first)
    refused(driver, driver.cuStreamEndCapture(other), "STREAM_CAPTURE_UNMATCHED", "end it there")


def test_work_outside_of_the_capture_comes_not_before_its_nodes() -> None:
    driver = open_driver()
    first, other = stream_of(driver), stream_of(driver)
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(event, other))
    begin(driver, first)
    answer = driver.cuStreamWaitEvent(first, event, 0)
    refused(driver, answer, "STREAM_CAPTURE_ISOLATION", "outside of the capture", "record the event in")


def test_captures_are_not_merged() -> None:
    driver = open_driver()
    first, other = stream_of(driver), stream_of(driver)
    begin(driver, first)
    begin(driver, other)
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(event, first))
    answer = driver.cuStreamWaitEvent(other, event, 0)
    refused(driver, answer, "STREAM_CAPTURE_MERGE", "captures cannot be merged")
    for stream in (first, other):
        refused(driver, driver.cuStreamEndCapture(stream), "STREAM_CAPTURE_INVALIDATED")


@pytest.mark.parametrize("call", ["cuEventSynchronize", "cuEventQuery", "cuStreamWaitEvent"])
def test_events_of_a_capture_mark_nothing_that_runs(call: str) -> None:
    driver = open_driver()
    stream, event = stream_of(driver), ok(driver.cuEventCreate(0))
    begin(driver, stream, RELAXED)
    ok(driver.cuEventRecord(event, stream))
    if call == "cuStreamWaitEvent":  # in a capture it joins; afterwards it means nothing
        ok(driver.cuStreamEndCapture(stream))
        answer = driver.cuStreamWaitEvent(stream, event, 0)
    else:
        answer = getattr(driver, call)(event)
    refused(driver, answer, "CAPTURED_EVENT", "last recorded in a capturing stream")
    if call != "cuStreamWaitEvent":
        refused(driver, driver.cuStreamEndCapture(stream), "STREAM_CAPTURE_INVALIDATED")
    ok(driver.cuEventRecord(event, stream))
    ok(driver.cuEventSynchronize(event), driver)


def test_capture_ends_in_its_thread() -> None:
    driver = open_driver()
    stream = stream_of(driver)
    answers: list[Any] = []

    def elsewhere(mode: Any) -> Any:
        begin(driver, stream, mode)
        context = ok(driver.cuCtxGetCurrent())
        thread = threading.Thread(
            target=lambda: (
                driver.cuCtxSetCurrent(context),
                answers.append(driver.cuStreamEndCapture(stream)),
            )
        )
        thread.start()
        thread.join()
        return answers.pop()

    refused(driver, elsewhere(THREAD_LOCAL), "STREAM_CAPTURE_WRONG_THREAD", "the thread that began it")
    ok(driver.cuStreamEndCapture(stream), driver)
    ok(elsewhere(RELAXED), driver)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread-local", "relaxed"])
def test_unsafe_calls_and_the_modes(mode: Any) -> None:
    """cuMemAlloc of the capturing thread and of another one, per mode of the capture."""
    driver = open_driver()
    stream, context = stream_of(driver), ok(driver.cuCtxGetCurrent())

    def by_another_thread() -> tuple[Any, ...]:
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: (driver.cuCtxSetCurrent(context), answers.append(driver.cuMemAlloc(16)))
        )
        thread.start()
        thread.join()
        return answers[0]

    begin(driver, stream, mode)
    theirs = by_another_thread()
    if mode is GLOBAL:
        refused(driver, theirs, "STREAM_CAPTURE_UNSUPPORTED", "cuMemAlloc while stream", "GLOBAL")
        refused(driver, driver.cuStreamEndCapture(stream), "STREAM_CAPTURE_INVALIDATED")
        begin(driver, stream, mode)
    else:
        ok(theirs, driver)
    mine = driver.cuMemAlloc(16)
    if mode is RELAXED:
        ok(mine, driver)
        ok(driver.cuStreamEndCapture(stream), driver)
    else:
        refused(driver, mine, "STREAM_CAPTURE_UNSUPPORTED", "do it before cuStreamBeginCapture")


def test_thread_may_permit_itself_unsafe_calls() -> None:
    driver = open_driver()
    stream = stream_of(driver)
    begin(driver, stream, GLOBAL)
    assert ok(driver.cuThreadExchangeStreamCaptureMode(RELAXED)) is GLOBAL
    ok(driver.cuMemAlloc(16), driver)
    assert ok(driver.cuThreadExchangeStreamCaptureMode(GLOBAL)) is RELAXED
    ok(driver.cuStreamEndCapture(stream), driver)


def test_what_is_not_emulated_is_refused_by_name() -> None:
    driver = open_driver()
    stream, memory = stream_of(driver), ok(driver.cuMemAllocAsync(16, 0))
    begin(driver, stream)
    executable = end(driver, stream)
    begin(driver, stream)
    refused(driver, driver.cuGraphLaunch(executable, stream), "NOT_SUPPORTED", "child graph")
    refused(driver, driver.cuMemAllocAsync(16, stream), "NOT_SUPPORTED", "an allocation in a stream that")
    refused(
        driver, driver.cuMemFreeAsync(memory, stream), "NOT_SUPPORTED", "a free in a stream that captures"
    )
    graph = ok(driver.cuStreamEndCapture(stream), driver)
    flag = cuda.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
    refused(driver, driver.cuGraphInstantiate(graph, int(flag)), "NOT_SUPPORTED", "the device launches")
    for name in ("cuGraphCreate", "cuGraphAddKernelNode", "cuGraphExecUpdate", "cuGraphClone"):
        assert not hasattr(driver, name)


def test_end_of_the_context_ends_its_captures_and_graphs() -> None:
    driver = open_driver()
    stream = stream_of(driver)
    begin(driver, stream)
    executable = end(driver, stream)
    begin(driver, stream)
    ok(driver.cuDevicePrimaryCtxRelease(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    ok(driver.cuMemAlloc(16), driver)
    refused(driver, driver.cuGraphLaunch(executable, 0), "INVALID_VALUE", "no executable graph")


def test_kernels_of_a_graph_follow_each_other_faster_than_those_of_a_stream() -> None:
    """By the profile's two gaps, which one public measurement has for both (modelled)."""
    cycles = 17550.0
    driver = open_driver(executor=FakeExecutor(cycles))
    function, stream = load(driver, ptx()), stream_of(driver)
    begin(driver, stream)
    for _ in range(4):
        ok(launch(driver, function, stream))
    executable = end(driver, stream)
    first, last = (ok(driver.cuEventCreate(0)) for _ in range(2))
    profile = driver.node.devices[0].profile
    kernel_us = cycles / driver.node.devices[0].clock.clock_mhz

    def time_of(queue: Callable[[], None]) -> float:
        gate = ok(driver.cuMemHostAlloc(4, 2))  # so that the host's own time does not count
        ok(driver.cuStreamWaitValue32(stream, gate, 1, 1))
        ok(driver.cuEventRecord(first, stream))
        queue()
        ok(driver.cuEventRecord(last, stream))
        word_at(gate).value = 1
        ok(driver.cuStreamSynchronize(stream), driver)
        return float(ok(driver.cuEventElapsedTime(first, last))) * 1e3

    def four_launches() -> None:
        for _ in range(4):
            ok(launch(driver, function, stream))

    gap = profile.host
    replayed = time_of(lambda: ok(driver.cuGraphLaunch(executable, stream)))
    ok(driver.cuCtxSynchronize())
    launched = time_of(four_launches)
    assert replayed == pytest.approx(4 * kernel_us + 3 * gap.graph_gap_us, rel=1e-3)
    assert launched == pytest.approx(4 * kernel_us + 3 * gap.kernel_gap_us, rel=1e-3)
    assert gap.graph_gap_us < gap.kernel_gap_us
