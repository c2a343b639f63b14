"""cp.async.mbarrier.arrive: when it arrives, what may be read after which wait, and what its forms count."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.emulator.errors import BarrierFault, CopyFault, Deadlock
from tests.emulator.exec_kit import Outcome, every_schedule, execute, report

_SHARED = ".shared .align 8 .b64 full;\n.shared .align 128 .b8 tile[4096];"
_DATA = np.random.default_rng(12).integers(0, 1 << 32, 2048).astype(np.uint32)
_PROLOGUE = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
shl.b32 %r23, %r2, 2;
cvt.u64.u32 %rd20, %r23;
add.u32 %r23, %r23, %r22;
add.s64 %rd20, %rd20, %rd1;
setp.eq.u32 %p1, %r2, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r20], {count};
bar.sync 0;
"""
_COPY = ".loc 1 30 0\ncp.async.ca.shared.global [%r23], [%rd20], 4;\n"
_ARRIVE = ".loc 1 31 0\ncp.async.mbarrier.arrive{form}.shared.b64 [%r20];\n"
_WAIT = """
W:
mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra W;
"""
#: Reads the word that the thread 32 above or below has copied.
_CROSS = """
xor.b32 %r24, %r2, 32;
shl.b32 %r24, %r24, 2;
add.u32 %r24, %r24, %r22;
.loc 1 60 0
ld.shared.u32 %r30, [%r24];
st.global.u32 [%rd3], %r30;
"""
_OWN = ".loc 1 61 0\nld.shared.u32 %r30, [%r23];\nst.global.u32 [%rd3], %r30;\n"


def go(body: str, schedule: str, count: int = 64, **more: object) -> Outcome:
    text = _PROLOGUE.format(count=count) + body
    return execute(text, schedule=schedule, shared=_SHARED, a=_DATA, block=64, **more)  # type: ignore[arg-type]


@every_schedule
def test_noinc_arrives_once_per_thread_when_its_copies_are_complete(schedule: str) -> None:
    """64 threads, 64 expected arrivals, no other synchronisation: everybody reads a neighbour's word."""
    done = go(_COPY + _ARRIVE.format(form=".noinc") + _WAIT + _CROSS, schedule)
    assert done.out.tolist() == _DATA[np.arange(64) ^ 32].tolist()
    assert done.counters.mbarrier_arrivals == 64


@every_schedule
def test_without_noinc_the_pending_count_is_raised_first(schedule: str) -> None:
    """Only the threads' own mbarrier.arrive are counted at init."""
    own = "mbarrier.arrive.shared::cta.b64 _, [%r20];\n"
    done = go(_COPY + _ARRIVE.format(form="") + own + _WAIT + _CROSS, schedule)
    assert done.out.tolist() == _DATA[np.arange(64) ^ 32].tolist()
    with report("full of CTA 0, phase 0", "64 of 64 arrivals missing", kind=Deadlock):
        go(_COPY + _ARRIVE.format(form="") + _WAIT + _CROSS, schedule)


@every_schedule
def test_noinc_counts_against_the_expected_arrivals(schedule: str) -> None:
    """A barrier of 128 takes the threads' own 64 arrivals and 64 of their copies."""
    own = "mbarrier.arrive.shared::cta.b64 _, [%r20];\n"
    arrive = _ARRIVE.format(form=".noinc")
    assert go(_COPY + own + arrive + _WAIT + _OWN, schedule, count=128).out.tolist() == _DATA[:64].tolist()
    with report("full of CTA 0, phase 0", "64 of 128 arrivals missing", kind=Deadlock):
        go(_COPY + arrive + _WAIT + _OWN, schedule, count=128)


@every_schedule
def test_the_bytes_are_closed_until_the_wait(schedule: str) -> None:
    """An engine that arrived, or opened the bytes, at issue would let these pass."""
    arrive = _ARRIVE.format(form=".noinc")
    with report("destination of the cp.async of 4 bytes", "case.cu:60", "case.cu:30", kind=CopyFault):
        go(_COPY + arrive + "bar.sync 0;\n" + _CROSS, schedule)
    with report("destination of the cp.async of 4 bytes", "case.cu:61", kind=CopyFault):
        go(_COPY + arrive + _OWN, schedule)
    # the own wait_group still works for the own bytes, before and after the arrival
    assert go(_COPY + arrive + "cp.async.wait_all;\n" + _OWN, schedule).out.tolist() == _DATA[:64].tolist()
    waited = go(_COPY + "cp.async.wait_all;\n" + arrive + _WAIT + _CROSS, schedule)
    assert waited.out.tolist() == _DATA[np.arange(64) ^ 32].tolist()


@every_schedule
def test_copies_issued_after_the_arrival_are_not_covered(schedule: str) -> None:
    late = ".loc 1 33 0\ncp.async.ca.shared.global [%r23+1024], [%rd20], 4;\n"
    body = _COPY + _ARRIVE.format(form=".noinc") + late + _WAIT
    with report("destination of the cp.async of 4 bytes", "case.cu:33", "case.cu:60", kind=CopyFault):
        go(body + _CROSS.replace("[%r24]", "[%r24+1024]"), schedule)
    assert go(body + _CROSS, schedule).out.tolist() == _DATA[np.arange(64) ^ 32].tolist()


@every_schedule
def test_all_prior_copies_are_covered_committed_or_not(schedule: str) -> None:
    first = "cp.async.ca.shared.global [%r23+1024], [%rd20], 4;\ncp.async.commit_group;\n"
    body = first + _COPY + _ARRIVE.format(form=".noinc") + _WAIT
    for offset in (0, 1024):
        got = go(body + _CROSS.replace("[%r24]", f"[%r24+{offset}]"), schedule).out
        assert got.tolist() == _DATA[np.arange(64) ^ 32].tolist()


@every_schedule
def test_a_thread_without_copies_arrives_too(schedule: str) -> None:
    body = "setp.lt.u32 %p2, %r2, 32;\n" + _COPY.replace("cp.async", "@%p2 cp.async", 1)
    body += _ARRIVE.format(form=".noinc") + _WAIT + "@%p2 bra END;\n" + _CROSS + "END:\n"
    got = go(body, schedule, zero_out=True).out
    assert got[32:].tolist() == _DATA[:32].tolist()


@every_schedule
def test_a_ring_of_two_stages(schedule: str) -> None:
    """Eight tiles through two stages: full[] by cp.async, empty[] by the readers; phases and parities."""
    shared = ".shared .align 8 .b64 full[4];\n.shared .align 128 .b8 tile[512];"
    body = """
    mov.u32 %r20, full;
    mov.u32 %r22, tile;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r20], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r20+8], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r20+16], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r20+24], 32;
    bar.sync 0;
    and.b32 %r5, %r2, 31;
    shl.b32 %r5, %r5, 2;
    mov.u32 %r6, 0;
    setp.ge.u32 %p2, %r2, 32;
    LOOP:
    and.b32 %r7, %r6, 1;
    shr.u32 %r8, %r6, 1;
    and.b32 %r8, %r8, 1;
    shl.b32 %r9, %r7, 7;
    add.u32 %r9, %r9, %r22;
    add.u32 %r9, %r9, %r5;
    shl.b32 %r10, %r7, 3;
    add.u32 %r10, %r10, %r20;
    shl.b32 %r11, %r6, 7;
    add.u32 %r11, %r11, %r5;
    cvt.u64.u32 %rd10, %r11;
    @%p2 bra CONSUME;
    xor.b32 %r12, %r8, 1;
    E:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10+16], %r12;
    @!%p3 bra E;
    add.s64 %rd11, %rd10, %rd1;
    cp.async.ca.shared.global [%r9], [%rd11], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r10];
    bra NEXT;
    CONSUME:
    F:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], %r8;
    @!%p3 bra F;
    xor.b32 %r13, %r9, 4;
    ld.shared.u32 %r14, [%r13];
    mbarrier.arrive.shared::cta.b64 _, [%r10+16];
    add.s64 %rd11, %rd10, %rd0;
    st.global.u32 [%rd11], %r14;
    NEXT:
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p4, %r6, 8;
    @%p4 bra LOOP;
    """
    for seed in (1, 2, 3) if schedule == "random" else (0,):
        got = execute(body, schedule=schedule, seed=seed, shared=shared, a=_DATA, block=64, words=256).out
        assert got.tolist() == _DATA[np.arange(256) ^ 1].tolist()


def test_timed_the_phase_completes_when_the_slowest_copy_does() -> None:
    """A wait on the barrier and a wait_all see the same modelled time of completion, but for the costs of the
    barrier: arrival, look, waking."""
    read = "mov.u64 %rd9, %clock64;\nmul.wide.u32 %rd8, %r1, 8;\nadd.s64 %rd8, %rd8, %rd0;\n"
    read += "st.global.u64 [%rd8], %rd9;"

    def cycles(body: str) -> np.ndarray:
        m = go(body + read, "timed", words=128)
        return m.out.view(np.uint64)

    by_group = cycles(_COPY + "cp.async.wait_all;\n")
    by_barrier = cycles(_COPY + _ARRIVE.format(form=".noinc") + _WAIT)
    extra = by_barrier.max() - by_group.max()
    assert 0 <= extra < 200 and by_barrier.min() >= by_group.min()
    without = cycles(_ARRIVE.format(form=".noinc") + _WAIT)
    assert by_barrier.max() > without.max() + 200  # it did wait for DRAM


def test_an_arrival_on_a_barrier_nobody_initialised() -> None:
    body = _COPY + "cp.async.mbarrier.arrive{}.shared.b64 [%r20+8];\n"
    for form in ("", ".noinc"):
        with pytest.raises(BarrierFault, match="no barrier has been initialised"):
            go(body.format(form), "min-pc")
