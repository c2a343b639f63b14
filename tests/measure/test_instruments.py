"""The probes as the compiler leaves them, and what keeps a run on a real GPU from hanging or crawling."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from smfree.cuda import CudaSource, compile_cuda
from smfree.measure import clocks
from smfree.measure.clocks import ClockWatch, smi_name
from smfree.measure.instruments import PROBE_SOURCE
from smfree.measure.queue import locked_bindings
from smfree.measure.timer import DeviceTimer
from tests.measure.fakes import FakeQueue

ARCHS = ("sm_80", "sm_90a", "sm_100a")


def stems(kernel: str, arch: str) -> Counter[str]:
    return Counter(compile_cuda(CudaSource(PROBE_SOURCE), arch).sass(kernel).stems())


@pytest.mark.parametrize("arch", ARCHS)
def test_the_read_sweep_still_reads_after_ptxas(arch: str) -> None:
    """ptxas drops loads whose words nobody uses, volatile asm or not: then nothing flushes the L2."""
    assert stems("read_sweep", arch)["LDG"] >= 1


@pytest.mark.parametrize("arch", ARCHS)
def test_the_clock_probe_reads_both_clocks_around_its_spin(arch: str) -> None:
    found = compile_cuda(CudaSource(PROBE_SOURCE), arch).sass("clock_probe").instructions
    clocks_read = [
        name
        for i in found
        for name in ("SR_CLOCK", "SR_GLOBALTIMER")
        if i.stem in ("CS2R", "CS2UR") and name in i.operands
    ]
    assert clocks_read == ["SR_GLOBALTIMER"] * 2 + ["SR_CLOCK", "SR_GLOBALTIMER", "SR_CLOCK"]


def test_a_clock_that_stays_low_is_rested_for_once_and_then_taken_as_it_is() -> None:
    watch = ClockWatch()
    assert not watch.throttled(1980.0)
    assert watch.throttled(1700.0)
    assert watch.settle(1700.0)
    assert not watch.throttled(1700.0)
    assert not watch.settle(1700.0)


def test_rests_of_a_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(clocks.time, "sleep", slept.append)
    watch = ClockWatch()
    while watch.rest():
        assert len(slept) < 10_000
    assert sum(slept) == pytest.approx(clocks.MAX_RESTS_S, abs=clocks.REST_S)


def test_nvidia_smi_is_asked_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(clocks, "throttle_reasons", lambda uuid: asked.append(uuid) or "1980, 0x0")
    watch = ClockWatch()
    assert {watch.ask("00" * 16) for _ in range(5)} == {"1980, 0x0"}
    assert len(asked) == 1


def test_a_uuid_is_written_as_nvidia_smi_takes_it() -> None:
    assert smi_name("0123456789ABCDEF0123456789abcdef") == "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("version", "locked"),
    [("12.8.0", True), ("12.9.0", True), ("12.9.1", False), ("12.9.10", False), ("13.0.0", False)],
)
def test_no_blocker_where_the_bindings_hold_the_interpreter_lock(version: str, locked: bool) -> None:
    assert ("install 12.9.1 or newer" in locked_bindings(version)) is locked


def test_nothing_is_collected_while_the_stream_is_held() -> None:
    queue = FakeQueue()
    collecting: list[bool] = []
    DeviceTimer(queue).batch(lambda i, s: collecting.append(gc.isenabled()), 2)
    assert collecting == [False, False]
    assert gc.isenabled()
