"""Order and time of queued work: streams, events, the default stream, values in a stream."""

from __future__ import annotations

import threading
import time

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.driver.queueing import QUEUE_LIMIT
from tests.emulator.driver_kit import FakeExecutor, launch, load, ok, open_driver, ptx, refused, word_at

NOT_READY = (cuda.CUresult.CUDA_ERROR_NOT_READY,)
WAIT = cuda.CUstreamWaitValue_flags
CYCLES = 17550.0


def started(executor: FakeExecutor, driver: Driver) -> list[float]:
    """Start of each kernel in seconds."""
    return [call.start_s for call in executor.calls]


def elapsed_us(driver: Driver, start: object, end: object) -> float:
    return 1e3 * float(ok(driver.cuEventElapsedTime(start, end), driver))


def test_kernel_runs_at_the_synchronisation_not_at_the_launch() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    ok(launch(driver, load(driver, ptx())))
    assert executor.calls == []
    ok(driver.cuCtxSynchronize())
    assert len(executor.calls) == 1


def test_events_around_a_kernel_measure_launch_and_cycles() -> None:
    executor = FakeExecutor(CYCLES)
    driver = open_driver(executor=executor)
    function, host = load(driver, ptx()), driver.node.devices[0].profile.host
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(start, 0))
    ok(launch(driver, function))
    ok(driver.cuEventRecord(end, 0))
    ok(driver.cuEventSynchronize(end))
    kernel_us = CYCLES / driver.node.devices[0].clock.clock_mhz
    assert elapsed_us(driver, start, end) == pytest.approx(kernel_us + host.launch_us, abs=1)
    assert driver.process.host_time_s >= driver.node.devices[0].last_launch.end_s


def test_kernels_queued_behind_a_blocker_follow_each_other_at_the_kernel_gap() -> None:
    executor = FakeExecutor(CYCLES)
    driver = open_driver(executor=executor)
    function, flag = load(driver, ptx()), ok(driver.cuMemHostAlloc(4, 0))
    stream = ok(driver.cuStreamCreate(1))
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuStreamWaitValue32(stream, flag, 1, WAIT.CU_STREAM_WAIT_VALUE_GEQ))
    ok(driver.cuEventRecord(start, stream))
    for _ in range(8):
        ok(launch(driver, function, stream))
    ok(driver.cuEventRecord(end, stream))
    assert driver.cuStreamQuery(stream) == NOT_READY
    assert executor.calls == []
    released_s = driver.process.host_time_s
    word_at(flag).value = 1
    ok(driver.cuStreamSynchronize(stream))
    kernel_us = CYCLES / driver.node.devices[0].clock.clock_mhz
    gap_us = driver.node.devices[0].profile.host.kernel_gap_us
    assert elapsed_us(driver, start, end) == pytest.approx(8 * kernel_us + 7 * gap_us, rel=1e-4)
    assert started(executor, driver)[0] >= released_s


def test_flag_that_was_set_before_blocks_nothing() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    flag = ok(driver.cuMemHostAlloc(4, 0))
    word_at(flag).value = 5
    ok(driver.cuStreamWaitValue32(0, flag, 5, WAIT.CU_STREAM_WAIT_VALUE_EQ))
    ok(launch(driver, load(driver, ptx())))
    ok(driver.cuCtxSynchronize())
    assert len(executor.calls) == 1


def test_wait_that_only_the_host_could_end_is_reported_not_endless() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor, host_wait_limit_s=0.02)
    flag, stream = ok(driver.cuMemHostAlloc(4, 0)), ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(stream, flag, 7, WAIT.CU_STREAM_WAIT_VALUE_EQ))
    ok(launch(driver, load(driver, ptx()), stream))
    report = refused(
        driver, driver.cuStreamSynchronize(stream), "TIMEOUT", f"at {int(flag):#x} == 0x7, it holds 0x0"
    )
    assert f"stream {int(stream):#x}" in report and "1 operations queued behind it" in report
    word_at(flag).value = 7
    ok(driver.cuStreamSynchronize(stream))
    assert len(executor.calls) == 1


def test_another_host_thread_may_release_a_waiting_synchronisation() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor, host_wait_limit_s=30)
    flag = ok(driver.cuMemHostAlloc(4, 0))
    ok(driver.cuStreamWaitValue32(0, flag, 1, WAIT.CU_STREAM_WAIT_VALUE_GEQ))
    ok(launch(driver, load(driver, ptx())))

    def release() -> None:
        time.sleep(0.05)
        word_at(flag).value = 1

    thread = threading.Thread(target=release)
    thread.start()
    ok(driver.cuCtxSynchronize())
    thread.join()
    assert len(executor.calls) == 1


@pytest.mark.parametrize(
    ("flags", "wanted", "blocked", "free"),
    [
        (WAIT.CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 6),
        (WAIT.CU_STREAM_WAIT_VALUE_GEQ, 0xFFFF_FFFF, 0xFFFF_FFFE, 1),  # cyclic
        (WAIT.CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5),
        (WAIT.CU_STREAM_WAIT_VALUE_AND, 6, 1, 2),
        (WAIT.CU_STREAM_WAIT_VALUE_NOR, 0xFFFF_FFF0, 0xF, 0x7),
    ],
)
def test_conditions_of_wait_value(flags: int, wanted: int, blocked: int, free: int) -> None:
    driver = open_driver()
    flag = ok(driver.cuMemHostAlloc(4, 0))
    word_at(flag).value = blocked
    ok(driver.cuStreamWaitValue32(0, flag, wanted, flags))
    assert driver.cuStreamQuery(0) == NOT_READY
    word_at(flag).value = free
    ok(driver.cuStreamSynchronize(0))


@pytest.mark.parametrize("where", ["host", "device"])
def test_one_stream_writes_what_another_waits_for(where: str) -> None:
    executor = FakeExecutor(CYCLES)
    driver = open_driver(executor=executor)
    address = ok(driver.cuMemHostAlloc(8, 0)) if where == "host" else ok(driver.cuMemAlloc(8))
    if where == "device":
        ok(driver.cuMemsetD32(address, 0, 2))
    waiting, writing = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
    function, mark = load(driver, ptx()), ok(driver.cuEventCreate(0))
    ok(driver.cuStreamWaitValue64(waiting, address, 1 << 40, WAIT.CU_STREAM_WAIT_VALUE_EQ))
    ok(driver.cuEventRecord(mark, waiting))
    ok(launch(driver, function, writing))
    ok(driver.cuStreamWriteValue64(writing, address, 1 << 40, 0))
    ok(driver.cuEventSynchronize(mark))
    assert driver.process.host_time_s >= driver.node.devices[0].last_launch.end_s
    assert len(executor.calls) == 1


def test_value_address_must_be_aligned_and_known() -> None:
    driver = open_driver()
    pointer = int(ok(driver.cuMemAlloc(16)))
    refused(driver, driver.cuStreamWaitValue64(0, pointer + 4, 0, 0), "INVALID_VALUE", "8-byte aligned")
    refused(driver, driver.cuStreamWriteValue32(0, 4096, 0, 0), "INVALID_VALUE", "neither a device address")


# --- order of streams


def order(driver: Driver, executor: FakeExecutor) -> list[str]:
    ok(driver.cuCtxSynchronize(), driver)
    return [call.kernel for call in executor.calls]


def test_default_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    executor = FakeExecutor(CYCLES)
    driver = open_driver(executor=executor)
    names = ("first", "second", "third")
    functions = [load(driver, ptx(name), name.encode()) for name in names]
    one, two = ok(driver.cuStreamCreate(0)), ok(driver.cuStreamCreate(0))
    flag = ok(driver.cuMemHostAlloc(4, 0))
    ok(driver.cuStreamWaitValue32(one, flag, 1, 0))
    for function, stream in zip(functions, (one, 0, two), strict=True):
        ok(launch(driver, function, stream))
    assert driver.cuStreamQuery(two) == NOT_READY
    assert executor.calls == []
    word_at(flag).value = 1
    assert order(driver, executor) == list(names)


def test_non_blocking_stream_passes_a_blocked_default_stream() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor, host_wait_limit_s=0.01)
    flag, free = ok(driver.cuMemHostAlloc(4, 0)), ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(0, flag, 1, 0))
    ok(launch(driver, load(driver, ptx()), free))
    ok(driver.cuStreamSynchronize(free))
    assert len(executor.calls) == 1
    word_at(flag).value = 1
    ok(driver.cuCtxSynchronize())


def test_event_orders_two_streams() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    before, after = load(driver, ptx("before"), b"before"), load(driver, ptx("after"), b"after")
    one, two = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
    flag, event = ok(driver.cuMemHostAlloc(4, 0)), ok(driver.cuEventCreate(2))
    ok(driver.cuStreamWaitValue32(one, flag, 1, 0))
    ok(launch(driver, before, one))
    ok(driver.cuEventRecord(event, one))
    ok(driver.cuStreamWaitEvent(two, event, 0))
    ok(launch(driver, after, two))
    assert driver.cuStreamQuery(two) == NOT_READY
    word_at(flag).value = 1
    ok(driver.cuStreamSynchronize(two))
    assert order(driver, executor) == ["before", "after"]


def test_kernels_of_two_streams_run_side_by_side() -> None:
    executor = FakeExecutor(CYCLES)
    driver = open_driver(executor=executor)
    function = load(driver, ptx())
    for _ in range(2):
        ok(launch(driver, function, ok(driver.cuStreamCreate(1))))
    ok(driver.cuCtxSynchronize())
    first, second = started(executor, driver)
    assert second - first < CYCLES / (driver.node.devices[0].clock.clock_mhz * 1e6)


def test_copies_of_both_directions_overlap_a_kernel() -> None:
    executor = FakeExecutor(1e6)
    driver = open_driver(executor=executor)
    nbytes = 1 << 20
    host, pointer = ok(driver.cuMemAllocHost(nbytes)), ok(driver.cuMemAlloc(nbytes))
    one, two = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
    ok(launch(driver, load(driver, ptx()), one))
    ok(driver.cuMemcpyHtoDAsync(pointer, host, nbytes, two))
    ok(driver.cuStreamSynchronize(two))
    assert driver.process.host_time_s < 1e6 / (driver.node.devices[0].clock.clock_mhz * 1e6)


def test_destroyed_stream_still_runs_its_work_and_its_handle_is_gone() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    stream = ok(driver.cuStreamCreate(1))
    ok(launch(driver, load(driver, ptx()), stream))
    ok(driver.cuStreamDestroy(stream))
    refused(driver, driver.cuStreamSynchronize(stream), "INVALID_HANDLE", "destroyed")
    ok(driver.cuCtxSynchronize())
    assert len(executor.calls) == 1


def test_priority_is_clamped_and_flags_are_kept() -> None:
    driver = open_driver()
    least, greatest = ok(driver.cuCtxGetStreamPriorityRange())
    stream = ok(driver.cuStreamCreateWithPriority(1, -100))
    assert (ok(driver.cuStreamGetPriority(stream)), ok(driver.cuStreamGetFlags(stream))) == (greatest, 1)
    assert least == 0
    refused(driver, driver.cuStreamCreate(2), "INVALID_VALUE", "got 2")


def test_per_thread_stream_is_a_blocking_stream_of_its_own() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    ok(launch(driver, load(driver, ptx()), cuda.CU_STREAM_PER_THREAD))
    ok(driver.cuStreamSynchronize(cuda.CU_STREAM_LEGACY))
    assert len(executor.calls) == 1


def test_full_queue_makes_the_host_wait_and_a_blocked_one_is_reported() -> None:
    executor = FakeExecutor(CYCLES)
    driver = open_driver(executor=executor, host_wait_limit_s=0.01)
    function, stream = load(driver, ptx()), ok(driver.cuStreamCreate(1))
    for _ in range(QUEUE_LIMIT + 1):
        ok(launch(driver, function, stream))
    assert len(executor.calls) == 1
    flag, blocked = ok(driver.cuMemHostAlloc(4, 0)), ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(blocked, flag, 1, 0))
    results = [launch(driver, function, blocked) for _ in range(QUEUE_LIMIT)]
    assert all(result[0] == 0 for result in results[:-1])
    refused(driver, results[-1], "TIMEOUT", f"{QUEUE_LIMIT - 1} operations queued behind it")


# --- events


def test_query_turns_ready_as_the_host_clock_passes_the_end() -> None:
    driver = open_driver(executor=FakeExecutor(CYCLES))
    ok(launch(driver, load(driver, ptx())))
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(event, 0))
    queries = 0
    while driver.cuEventQuery(event) == NOT_READY:
        queries += 1
        assert queries < 1000
    assert queries > 1
    assert driver.process.host_time_s >= driver.node.devices[0].last_launch.end_s
    assert driver.report() == ""


def test_event_without_timing_has_no_elapsed_time() -> None:
    driver = open_driver()
    plain, timed = (
        ok(driver.cuEventCreate(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)),
        ok(driver.cuEventCreate(0)),
    )
    for event in (plain, timed):
        ok(driver.cuEventRecord(event, 0))
    ok(driver.cuCtxSynchronize())
    refused(driver, driver.cuEventElapsedTime(timed, plain), "INVALID_HANDLE", "hEnd", "DISABLE_TIMING")


def test_event_that_was_never_recorded_is_ready_but_has_no_time() -> None:
    driver = open_driver()
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuEventQuery(start))
    ok(driver.cuEventSynchronize(start))
    ok(driver.cuStreamWaitEvent(0, start, 0))
    refused(driver, driver.cuEventElapsedTime(start, end), "INVALID_HANDLE", "never recorded")


def test_elapsed_time_of_unfinished_work_is_not_ready() -> None:
    driver = open_driver(executor=FakeExecutor(1e8))
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(start, 0))
    ok(launch(driver, load(driver, ptx())))
    ok(driver.cuEventRecord(end, 0))
    assert driver.cuEventElapsedTime(start, end) == (*NOT_READY, None)


def test_schedules_without_a_clock_refuse_times_by_name() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor, schedule="random")
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(start, 0))
    ok(launch(driver, load(driver, ptx())))
    ok(driver.cuEventRecord(end, 0))
    ok(driver.cuEventSynchronize(end))
    assert len(executor.calls) == 1
    assert driver.process.host_time_s == 0.0
    refused(driver, driver.cuEventElapsedTime(start, end), "NOT_SUPPORTED", "'random' has no clock")


def test_event_belongs_to_its_device() -> None:
    driver = open_driver("h100", "h100")
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    refused(
        driver,
        driver.cuEventRecord(event, 0),
        "INVALID_HANDLE",
        "belongs to device 0 of process 0",
        "the default stream to device 1",
    )


def test_counters_add_up_per_device_and_stay_per_launch() -> None:
    driver = open_driver()
    function, device = load(driver, ptx()), driver.node.devices[0]
    for _ in range(3):
        ok(launch(driver, function, grid=(5, 1, 1)))
    ok(driver.cuCtxSynchronize())
    assert device.counters.as_dict()["instructions[alu]"] == 21
    assert (device.counters.launches, device.counters.warp_instructions) == (3, 21)
    assert device.last_launch.counters.warp_instructions == 7
    assert (device.last_launch.kernel, device.last_launch.grid) == ("work", (5, 1, 1))
