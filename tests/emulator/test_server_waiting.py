"""Clients that wait: for each other, for ever, and beside a client whose kernel runs for long."""

from __future__ import annotations

import ctypes
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from smfree.emulator.server import RemoteDriver, start
from smfree.emulator.server.link import Link
from tests.emulator.driver_kit import load, ok
from tests.emulator.server_kit import Servers, child, opened, told

SPIN = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 flag)
{
  .reg .pred %p;
  .reg .b32 %r0;
  .reg .b64 %rd0;
  ld.param.u64 %rd0, [flag];
LOOP:
  ld.acquire.sys.global.u32 %r0, [%rd0];
  setp.eq.u32 %p, %r0, 0;
  @%p bra LOOP;
  ret;
}
.visible .entry count(.param .u64 out, .param .u32 turns)
{
  .reg .pred %p;
  .reg .b32 %r<4>;
  .reg .b64 %rd0;
  ld.param.u64 %rd0, [out];
  ld.param.u32 %r1, [turns];
  mov.u32 %r0, 0;
  mov.u32 %r2, 1;
LOOP:
  mad.lo.u32 %r2, %r2, 5, %r0;
  add.u32 %r0, %r0, 1;
  setp.lt.u32 %p, %r0, %r1;
  @%p bra LOOP;
  st.global.u32 [%rd0], %r2;
  ret;
}
"""
TURNS = 80_000


def launch_spin(driver: Any) -> Any:
    """A kernel that polls a new flag; the flag."""
    flag = ok(driver.cuMemAlloc(4))
    ok(driver.cuMemsetD32(flag, 0, 1))
    function = load(driver, SPIN, b"spin")
    params = ((int(flag),), (ctypes.c_uint64,))
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, params, 0), driver)
    return flag


def spins(parent: Connection, address: str, ordinal: int) -> None:
    """Launch a kernel that waits for a flag that nobody sets, and wait for it when told so."""
    driver = opened(RemoteDriver(Link(address, f"rank {ordinal}")), ordinal)
    launch_spin(driver)
    parent.send("launched")
    parent.recv()
    began = time.monotonic()
    code = driver.cuCtxSynchronize()[0].name
    parent.send((code, driver.report(), time.monotonic() - began))


def test_all_processes_stuck_is_a_deadlock_at_once_and_a_missing_one_is_waited_for() -> None:
    with (
        start("h100x2", clients=2, wait_limit_s=30.0) as node,
        child(spins, node.address, 0) as (_, first),
        child(spins, node.address, 1) as (_, second),
    ):
        assert told(first) == told(second) == "launched"
        first.send("go")
        assert not first.poll(0.3), "rank 1 could still act: that is no deadlock"
        second.send("go")
        for other, limit_s in ((first, 10.0), (second, 10.0)):
            code, report, waited_s = told(other)
            assert code == "CUDA_ERROR_LAUNCH_TIMEOUT" and waited_s < limit_s
            assert all(f"rank {rank} (pid" in report for rank in (0, 1)) and report.count("spin") >= 2


def test_wait_for_a_process_that_does_nothing_is_limited_and_names_it(servers: Servers) -> None:
    """Its twin above: here somebody else could act, so it is a time-out and not a deadlock."""
    idle, driver = servers.driver("h100"), servers.driver("h100")
    launch_spin(driver)
    code = driver.cuCtxSynchronize()[0].name
    report = driver.report()
    assert code == "CUDA_ERROR_TIMEOUT" and "Only others could still end this" in report
    assert "processes that have not attached yet" in report and "thread MainThread of process" in report
    assert ok(idle.cuDeviceGetCount()) == 1


def test_flag_set_by_another_thread_of_the_process_ends_the_wait(servers: Servers) -> None:
    driver = servers.driver("h100")
    flag, context, answers = launch_spin(driver), ok(driver.cuCtxGetCurrent()), []

    def waits() -> None:
        driver.cuCtxSetCurrent(context)
        answers.append(driver.cuCtxSynchronize())

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.05)
    assert not answers
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuMemsetD32Async(flag, 1, 1, stream), driver)
    ok(driver.cuStreamSynchronize(stream), driver)
    thread.join(5)
    assert ok(answers[0], driver) is None


def runs_for_ever(parent: Connection, address: str) -> None:
    driver = opened(RemoteDriver(Link(address, "rank 6")))
    out = ok(driver.cuMemAlloc(1 << 20))
    params = ((int(out), (1 << 32) - 1), (ctypes.c_uint64, ctypes.c_uint32))
    ok(driver.cuLaunchKernel(load(driver, SPIN, b"count"), 1, 1, 1, 32, 1, 1, 0, 0, params, 0), driver)
    parent.send("launched")
    driver.cuCtxSynchronize()


def test_kernel_of_a_killed_process_stops(servers: Servers) -> None:
    driver = servers.driver("h100", "h100")
    before, _ = ok(driver.cuMemGetInfo())
    with child(runs_for_ever, servers.node("h100", "h100").address) as (process, other):
        assert told(other) == "launched"
        time.sleep(0.1)
        assert ok(driver.cuMemGetInfo())[0] < before
        process.kill()
        end = time.monotonic() + 2.0
        while ok(driver.cuMemGetInfo())[0] != before:
            assert time.monotonic() < end, "the dead process still has its memory"
    out = ok(driver.cuMemAlloc(4))
    params = ((int(out), 3), (ctypes.c_uint64, ctypes.c_uint32))
    ok(driver.cuLaunchKernel(load(driver, SPIN, b"count"), 1, 1, 1, 32, 1, 1, 0, 0, params, 0), driver)
    found = ctypes.c_uint32()
    ok(driver.cuMemcpyDtoH(ctypes.addressof(found), out, 4), driver)
    assert found.value == ((1 * 5 + 0) * 5 + 1) * 5 + 2


def test_calls_get_in_while_another_process_waits_for_a_long_kernel(servers: Servers) -> None:
    busy, other = servers.driver("h100", "h100"), servers.driver("h100", "h100")
    out, context = ok(busy.cuMemAlloc(4)), ok(busy.cuCtxGetCurrent())
    params = ((int(out), TURNS), (ctypes.c_uint64, ctypes.c_uint32))
    ok(busy.cuLaunchKernel(load(busy, SPIN, b"count"), 1, 1, 1, 32, 1, 1, 0, 0, params, 0), busy)
    finished = threading.Event()

    def waits() -> None:
        busy.cuCtxSetCurrent(context)
        ok(busy.cuCtxSynchronize(), busy)
        finished.set()

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.1)  # now the kernel runs, alone, in one slice
    answered = 0
    while not finished.is_set():
        ok(other.cuMemGetInfo())
        answered += not finished.is_set()
    thread.join()
    assert answered >= 3
