"""What cannot go on is told once for the node; a wait that others could end is limited, and names them."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.exec.launch import Launch
from smfree.emulator.exec.schedule import SCHEDULES
from tests.emulator.driver_kit import (
    config,
    cooperative_attribute,
    launch,
    load,
    ok,
    open_driver,
    refused,
    word_at,
)
from tests.emulator.node_kit import HEAD, POLL, Ranks

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
POINTERS = (ctypes.c_void_p, ctypes.c_void_p)


@every_schedule
def test_ranks_one_after_another_are_a_deadlock_that_names_the_poll(schedule: str) -> None:
    """Rank 0 is launched and waited for before rank 1 is launched."""
    ranks = Ranks(2, schedule=schedule)
    ranks.launch(0, 1)
    flag = ranks.flags[0]
    report = refused(
        ranks.driver,
        ranks.driver.cuStreamSynchronize(ranks.streams[0]),
        "LAUNCH_TIMEOUT",
        "deadlock",
        "kernel work (grid (1, 1, 1)",
        "(device 0 of process 0)",
        f"CTA 0 threads 0-31 polls 4 bytes at {flag:#x} (+0 of allocation",
        "now 0x0",
        "device 1 of process 0: nothing runs; no kernel was launched there",
    )
    assert report.count("deadlock") == 1
    ranks.on(1)
    ok(ranks.driver.cuStreamSynchronize(ranks.streams[1]), ranks.driver)


@every_schedule
def test_ranks_launched_before_the_first_is_waited_for_are_fine(schedule: str) -> None:
    ranks = Ranks(2, schedule=schedule)
    for i in range(2):
        ranks.launch(i, 1 - i)
    for i in range(2):
        ranks.synchronize(i)


def test_a_kernel_queued_behind_the_one_that_waits_for_it_is_named() -> None:
    """Both ranks in one stream: the second never starts."""
    ranks = Ranks(1, POLL)
    ranks.launch(0, 0)
    ranks.launch(0, 0)
    refused(
        ranks.driver,
        ranks.driver.cuCtxSynchronize(),
        "LAUNCH_TIMEOUT",
        "never started: waits behind kernel work",
    )


def test_every_stuck_context_gets_the_same_report() -> None:
    ranks = Ranks(2, POLL)
    for i in range(2):
        ranks.launch(i, 1 - i)
    reports = []
    for i in range(2):
        ranks.on(i)
        reports.append(refused(ranks.driver, ranks.driver.cuCtxSynchronize(), "LAUNCH_TIMEOUT", "deadlock"))
    assert reports[0] == reports[1]
    for i in range(2):
        assert f"(device {i} of process 0):" in reports[0]


def test_a_kernel_that_waits_for_itself_alone_fails_though_others_could_act() -> None:
    """Nobody outside can arrive at an mbarrier: there is no wait for the other process."""
    body = """
    .shared .align 8 .b64 bar;
    mbarrier.init.shared::cta.b64 [bar], 1;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;
    @!%p2 bra WAIT;
    """
    driver = open_driver(executor=Launch, host_wait_limit_s=60)
    Driver(driver.node, "another process")
    function = load(driver, f"{HEAD}{body}ret;\n}}\n".encode())
    ok(launch(driver, function, 0, ((0, 0), POINTERS), block=(1, 1, 1)), driver)
    before = time.monotonic()
    refused(driver, driver.cuCtxSynchronize(), "LAUNCH_TIMEOUT", "bar of CTA 0, phase 0", "1 of 1 arrivals")
    assert time.monotonic() - before < 10


# ------------------------------------------------------------------------------------- others could still act


def test_a_wait_for_another_process_is_limited_and_names_it() -> None:
    ranks = Ranks(2, host_wait_limit_s=0.05)
    Driver(ranks.driver.node, "rank 1 (pid 4711)")
    ranks.launch(0, 1)
    report = refused(
        ranks.driver,
        ranks.driver.cuStreamSynchronize(ranks.streams[0]),
        "TIMEOUT",
        "polls 4 bytes",
        "rank 1 (pid 4711) has launched nothing",
        "Only others could still end this: rank 1 (pid 4711)",
    )
    assert "deadlock" not in report
    ranks.launch(1, 0)
    for i in range(2):
        ranks.synchronize(i)


def test_another_thread_launches_what_the_first_waits_for() -> None:
    ranks = Ranks(2, host_wait_limit_s=30)
    ready = threading.Event()

    def second() -> None:
        ranks.on(1)
        ready.set()
        time.sleep(0.05)
        ranks.launch(1, 0)
        ranks.synchronize(1)

    thread = threading.Thread(target=second)
    thread.start()
    ready.wait()
    ranks.launch(0, 1)
    ranks.synchronize(0)
    thread.join()


def test_threads_that_all_wait_are_a_deadlock() -> None:
    ranks = Ranks(2, POLL, host_wait_limit_s=30)
    ready, results = threading.Barrier(2), {}

    def wait(rank: int) -> None:
        ranks.launch(rank, 1 - rank)
        ready.wait()
        results[rank] = ranks.driver.cuStreamSynchronize(ranks.streams[rank])[0]

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(2)]
    with ranks.driver.node.waiting():  # the main thread has called the driver, too
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    timed_out = cuda.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT
    assert results == {0: timed_out, 1: timed_out}


def _polls_host(**settings: Any) -> tuple[Driver, Any]:
    driver = open_driver(executor=Launch, **settings)
    flag = ok(driver.cuMemHostAlloc(4, 0))
    function = load(driver, f"{HEAD}{POLL}ret;\n}}\n".encode())
    ok(launch(driver, function, 0, ((int(flag), 0), POINTERS)), driver)
    return driver, flag


def test_a_kernel_that_polls_host_memory_is_given_time() -> None:
    driver, flag = _polls_host(host_wait_limit_s=30)

    def release() -> None:
        time.sleep(0.05)
        word_at(flag).value = 1

    thread = threading.Thread(target=release)
    thread.start()
    ok(driver.cuCtxSynchronize(), driver)
    thread.join()


def test_host_memory_that_nobody_writes_is_a_limited_wait() -> None:
    driver, flag = _polls_host(host_wait_limit_s=0.05)
    report = refused(
        driver, driver.cuCtxSynchronize(), "TIMEOUT", f"polls 4 bytes at {int(flag):#x}", "the host"
    )
    assert "deadlock" not in report
    word_at(flag).value = 1
    ok(driver.cuCtxSynchronize(), driver)


# --------------------------------------------------------------------------------------- residency (case D24)

GRID_BARRIER = """
atom.add.acq_rel.gpu.global.u32 %r1, [%rd1], 1;
mov.u32 %r2, %nctaid.x;
WAIT:
ld.acquire.gpu.global.u32 %r3, [%rd1];
setp.lt.u32 %p1, %r3, %r2;
@%p1 bra WAIT;
"""


def _grid_barrier(schedule: str, more: int) -> tuple[Ranks, int, int]:
    """A grid barrier of as many CTAs of 1024 threads as fit, and ``more``: the ranks, the grid, what fits."""
    ranks = Ranks(1, schedule=schedule)
    fit = 2 * ranks.driver.node.devices[0].profile.device.num_sms
    body = GRID_BARRIER.replace("atom", "mov.u32 %r4, %tid.x;\nsetp.eq.u32 %p2, %r4, 0;\n@%p2 atom", 1)
    ranks.functions[0] = load(ranks.driver, f"{HEAD}{body}ret;\n}}\n".encode())
    ranks.driver.describe_function(ranks.functions[0], registers=16)
    return ranks, fit + more, fit


@pytest.mark.parametrize("schedule", ["timed", "min-pc", "async-latest"])
def test_a_grid_barrier_of_more_ctas_than_fit_names_those_that_never_started(schedule: str) -> None:
    ranks, grid, fit = _grid_barrier(schedule, 3)
    ranks.launch(0, 0, grid=(grid, 1, 1), block=(1024, 1, 1))
    refused(
        ranks.driver,
        ranks.driver.cuCtxSynchronize(),
        "LAUNCH_TIMEOUT",
        f"CTAs {fit}-{grid - 1} never started: {fit} CTAs fill the device",
        f"now {fit:#x}",
    )


def test_a_grid_barrier_of_as_many_ctas_as_fit_passes() -> None:
    ranks, grid, _ = _grid_barrier("timed", 0)
    ranks.launch(0, 0, grid=(grid, 1, 1), block=(1024, 1, 1))
    ranks.synchronize(0)


def test_a_cooperative_launch_of_more_ctas_than_fit_is_refused_before() -> None:
    ranks, grid, fit = _grid_barrier("timed", 3)
    shape = config((grid, 1, 1), (1024, 1, 1), 0, [cooperative_attribute()], ranks.streams[0])
    params = ((ranks.flags[0], 0), POINTERS)
    result = ranks.driver.cuLaunchKernelEx(shape, ranks.functions[0], params, 0)
    refused(ranks.driver, result, "COOPERATIVE_LAUNCH_TOO_LARGE", f"{grid} CTAs", f"{fit} fit")


def test_a_cooperative_launch_waits_until_all_its_ctas_fit() -> None:
    """Half of the room is taken by a kernel that polls: the cooperative one waits for its end."""
    ranks, grid, _ = _grid_barrier("timed", 0)
    driver, other = ranks.driver, ok(ranks.driver.cuStreamCreate(1))
    gate = int(ok(driver.cuMemAlloc(4)))
    ok(driver.cuMemsetD32(gate, 0, 1))
    ok(driver.cuCtxSynchronize())
    poll = load(driver, f"{HEAD}{POLL}ret;\n}}\n".encode())
    ok(launch(driver, poll, other, ((gate, 0), POINTERS)), driver)
    shape = config((grid, 1, 1), (1024, 1, 1), 0, [cooperative_attribute()], ranks.streams[0])
    ok(driver.cuLaunchKernelEx(shape, ranks.functions[0], ((ranks.flags[0], 0), POINTERS), 0), driver)
    third = ok(driver.cuStreamCreate(1))
    for _ in range(20):
        assert driver.cuStreamQuery(ranks.streams[0])[0] is cuda.CUresult.CUDA_ERROR_NOT_READY
    assert len(driver.node.devices[0].residents.launches) == 1
    ok(driver.cuStreamWriteValue32(third, gate, 1, 0))
    ok(driver.cuCtxSynchronize(), driver)
