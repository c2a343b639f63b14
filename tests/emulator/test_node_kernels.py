"""Kernels of several devices and streams run side by side, in every order that is legal."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.trace import Trace
from tests.emulator.driver_kit import launch, load, ok, refused
from tests.emulator.node_kit import COUNTING, HEAD, MEET, POLL, SIGNAL, Ranks

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
NOT_READY = (cuda.CUresult.CUDA_ERROR_NOT_READY,)


@every_schedule
@pytest.mark.parametrize("count", [2, 3, 8])
def test_kernels_that_wait_for_each_other(count: int, schedule: str) -> None:
    ranks = Ranks(count, schedule=schedule, seed=3)
    for i in range(count):
        ranks.launch(i, (i + 1) % count)
    for i in range(count):
        ranks.synchronize(i)
        assert ranks.value(i) == 1


@every_schedule
@pytest.mark.parametrize("body", [MEET, SIGNAL + COUNTING], ids=["polling", "counting"])
def test_kernels_of_two_streams_of_one_device(body: str, schedule: str) -> None:
    """Each polls a flag that the other one sets, on the same device."""
    ranks = Ranks(1, body, schedule=schedule, seed=1)
    driver, other = ranks.driver, ok(ranks.driver.cuStreamCreate(1))
    flags = [ranks.flags[0], int(ok(driver.cuMemAlloc(4)))]
    ok(driver.cuMemsetD32(flags[1], 0, 1))
    ok(driver.cuCtxSynchronize())
    for k, stream in enumerate((ranks.streams[0], other)):
        params = ((flags[k], flags[1 - k]), (ctypes.c_void_p, ctypes.c_void_p))
        ok(launch(driver, ranks.functions[0], stream, params), driver)
    ok(driver.cuCtxSynchronize(), driver)


@every_schedule
def test_a_counting_poll_lets_the_others_go_on(schedule: str) -> None:
    ranks = Ranks(2, SIGNAL + COUNTING, schedule=schedule)
    for i in range(2):
        ranks.launch(i, 1 - i)
    for i in range(2):
        ranks.synchronize(i)


@every_schedule
def test_a_copy_feeds_a_kernel_that_polls(schedule: str) -> None:
    """A copy engine brings the value while the kernel runs; so does a write of the stream."""
    ranks = Ranks(1, POLL, schedule=schedule)
    driver, other = ranks.driver, ok(ranks.driver.cuStreamCreate(1))
    source = ok(driver.cuMemAlloc(4))
    ok(driver.cuMemsetD32Async(source, 7, 1, other))
    ranks.launch(0, 0)
    ok(driver.cuMemcpyDtoDAsync(ranks.flags[0], source, 4, other))
    ranks.synchronize(0)
    ok(driver.cuMemsetD32Async(ranks.flags[0], 0, 1, ranks.streams[0]))
    ranks.synchronize(0)
    ranks.launch(0, 0)
    ok(driver.cuStreamWriteValue32(other, ranks.flags[0], 3, 0))
    ranks.synchronize(0)


def test_the_poller_goes_on_when_the_copy_has_landed() -> None:
    """Modelled: the kernel ends after the copy's end, and soon after it."""
    ranks = Ranks(1, POLL)
    driver, other = ranks.driver, ok(ranks.driver.cuStreamCreate(1))
    nbytes = 1 << 20
    big, source = ok(driver.cuMemAlloc(nbytes)), ok(driver.cuMemAlloc(nbytes))
    ok(driver.cuMemsetD32(source, 1, nbytes // 4))
    ok(driver.cuMemsetD32(big, 0, nbytes // 4))
    ok(driver.cuCtxSynchronize())
    ranks.flags[0] = int(big) + nbytes - 4
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ranks.launch(0, 0)
    ok(driver.cuEventRecord(start, other))
    ok(driver.cuMemcpyDtoDAsync(big, source, nbytes, other))
    ok(driver.cuEventRecord(end, other))
    ok(driver.cuCtxSynchronize(), driver)
    kernel = driver.node.devices[0].last_launch
    copied_s = ok(driver.cuEventElapsedTime(start, end)) * 1e-3
    assert kernel.end_s - kernel.start_s > copied_s * 0.5
    first_s = kernel.start_s
    assert first_s < driver.process.host_time_s
    assert kernel.end_s - first_s < copied_s + 8e-6


# ------------------------------------------------------------------------------------------------------- room

_BIG = HEAD.replace("ld.param", ".shared .align 4 .b8 room[BYTES];\nld.param", 1)


def _two(ranks: Ranks, bodies: list[str], grid: int, shared: int) -> list[Any]:
    """Two kernels on two streams of device 0, CTAs with so many bytes of shared memory: their streams."""
    driver = ranks.driver
    streams = [ranks.streams[0], ok(driver.cuStreamCreate(1))]
    flags = [ranks.flags[0], int(ok(driver.cuMemAlloc(4)))]
    ok(driver.cuMemsetD32(flags[1], 0, 1))
    ok(driver.cuCtxSynchronize())
    for k, body in enumerate(bodies):
        text = _BIG.replace("BYTES", str(shared)) + body + "ret;\n}\n"
        function = load(driver, text.encode())
        params = ((flags[k], flags[1 - k]), (ctypes.c_void_p, ctypes.c_void_p))
        ok(launch(driver, function, streams[k], params, grid=(grid, 1, 1)), driver)
    return streams


@every_schedule
def test_half_the_device_each_is_enough_room_for_both(schedule: str) -> None:
    ranks = Ranks(1, schedule=schedule)
    _two(ranks, [MEET, MEET], ranks.driver.node.devices[0].profile.device.num_sms * 2, 48 << 10)
    ok(ranks.driver.cuCtxSynchronize(), ranks.driver)


@pytest.mark.parametrize("schedule", ["timed", "min-pc"])
def test_a_kernel_for_which_there_is_no_room_waits_its_turn(schedule: str) -> None:
    """The first fills the device; the second starts when CTAs of the first have left."""
    ranks = Ranks(1, schedule=schedule)
    sms = ranks.driver.node.devices[0].profile.device.num_sms
    _two(ranks, [SIGNAL, MEET], sms, 40 << 10)
    ok(ranks.driver.cuCtxSynchronize(), ranks.driver)


def test_kernels_that_do_not_fit_side_by_side_are_told() -> None:
    """Each waits for the other one, and every SM has room for CTAs of one only."""
    ranks = Ranks(1)
    sms = ranks.driver.node.devices[0].profile.device.num_sms
    _two(ranks, [MEET, MEET], sms * 5, 40 << 10)
    refused(
        ranks.driver,
        ranks.driver.cuCtxSynchronize(),
        "LAUNCH_TIMEOUT",
        "deadlock",
        "polls 4 bytes",
        "never started: beside work the device has no room for 1 CTA",
    )


def test_ctas_spread_over_the_sms_that_others_leave() -> None:
    """Two kernels of as many CTAs as half of the SMs share none."""
    ranks = Ranks(1)
    sms = ranks.driver.node.devices[0].profile.device.num_sms
    streams = _two(ranks, [MEET, POLL], sms // 2, 1 << 10)
    timeline = ranks.driver.node.timeline
    for _ in range(40):
        timeline.step(ranks.driver.process.host_time_s + 40e-6)
    launches = ranks.driver.node.devices[0].residents.launches
    taken = Counter(sm for each in launches for sm in each.sms.tolist())
    assert len(launches) <= 2 and max(taken.values(), default=1) == 1
    ok(ranks.driver.cuStreamSynchronize(streams[1]), ranks.driver)


def test_a_trace_counts_from_the_start_of_its_own_kernel() -> None:
    """Two kernels share the device's clock; each trace begins at zero."""
    ranks = Ranks(1)
    trace = ranks.driver.node.devices[0].trace = Trace()
    _two(ranks, [MEET, MEET], 2, 1 << 10)
    ok(ranks.driver.cuCtxSynchronize(), ranks.driver)
    assert len(trace.launches) == 2
    for kept in trace.launches:
        assert min(life.start for life in kept.warps) == 0
        assert 0 < max(life.end for life in kept.warps) <= kept.cycles


# ---------------------------------------------------------------------------------------------------- queries


@every_schedule
def test_a_loop_of_queries_gets_there(schedule: str) -> None:
    ranks = Ranks(2, schedule=schedule)
    for i in range(2):
        ranks.launch(i, 1 - i)
    queries = 0
    for i in range(2):
        ranks.on(i)
        while ranks.driver.cuStreamQuery(ranks.streams[i]) == NOT_READY:
            queries += 1
            assert queries < 500
        ok(ranks.driver.cuStreamQuery(ranks.streams[i]))


def test_a_query_never_calls_it_a_deadlock_and_lets_the_host_act() -> None:
    """The kernel polls; the host looks, then has the value copied, and looks again."""
    ranks = Ranks(1, POLL)
    driver, other = ranks.driver, ok(ranks.driver.cuStreamCreate(1))
    ranks.launch(0, 0)
    for _ in range(50):
        assert driver.cuStreamQuery(ranks.streams[0]) == NOT_READY
    ok(driver.cuMemsetD32Async(ranks.flags[0], 1, 1, other))
    for _ in range(200):
        if driver.cuStreamQuery(ranks.streams[0]) != NOT_READY:
            break
    ok(driver.cuStreamQuery(ranks.streams[0]))


def test_a_loop_of_queries_lets_other_threads_in() -> None:
    ranks = Ranks(1, POLL)
    driver, done = ranks.driver, threading.Event()
    ranks.launch(0, 0)

    def release() -> None:
        ok(driver.cuCtxSetCurrent(ranks.contexts[0]))
        other = ok(driver.cuStreamCreate(1))
        ok(driver.cuMemsetD32Async(ranks.flags[0], 1, 1, other))
        done.set()

    thread = threading.Thread(target=release)
    thread.start()
    for _ in range(200_000):
        if driver.cuStreamQuery(ranks.streams[0]) != NOT_READY:
            break
    thread.join()
    assert done.is_set()
    ok(driver.cuStreamSynchronize(ranks.streams[0]), driver)


# ------------------------------------------------------------------------------------------------ same again


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_seed_gives_the_same_run(schedule: str) -> None:
    """Four kernels add their number to a word, two digits at a time: the order shows in it."""
    body = """
    mov.u32 %r3, %tid.x;
    ld.acquire.sys.global.u32 %r1, [%rd2];
    shl.b32 %r1, %r1, 3;
    add.u32 %r1, %r1, NUMBER;
    st.release.sys.global.u32 [%rd2], %r1;
    """

    def run(seed: int) -> int:
        ranks = Ranks(4, schedule=schedule, seed=seed)
        for i in range(4):
            ranks.on(i)
            text = f"{HEAD}{body.replace('NUMBER', str(i + 1))}ret;\n}}\n"
            params = ((ranks.flags[0], ranks.flags[0]), (ctypes.c_void_p, ctypes.c_void_p))
            function = load(ranks.driver, text.encode())
            ok(launch(ranks.driver, function, ranks.streams[i], params, block=(1, 1, 1)), ranks.driver)
        for i in range(4):
            ranks.synchronize(i)
        return ranks.value(0)

    assert run(5) == run(5)
    if schedule == "random":
        assert len({run(seed) for seed in range(5)}) > 1
