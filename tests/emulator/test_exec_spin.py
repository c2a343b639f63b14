"""Polling: loops that wait for memory end when somebody writes it, and are named when nobody will."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.emulator.errors import Deadlock, EmulationError
from tests.emulator.exec_kit import every_schedule, execute, report

_POLLS = {
    "ld.volatile": "ld.volatile.global.u32 %r11, [%rd1];",
    "ld.acquire": "ld.acquire.gpu.global.u32 %r11, [%rd1];",
    "ld.relaxed": "ld.relaxed.sys.global.u32 %r11, [%rd1];",
    "atom.or": "atom.global.or.b32 %r11, [%rd1], 0;",
    "atom.add": "atom.acquire.gpu.global.add.u32 %r11, [%rd1], 0;",
    "atom.cas": "atom.global.cas.b32 %r11, [%rd1], 7, 7;",
    "sleeping": "nanosleep.u32 100;\nld.volatile.global.u32 %r11, [%rd1];",
}
# CTA 0 polls, the last CTA sets the flag. {count} is an instruction of the loop.
_FLAG = """
mov.u32 %r10, 0;
mov.u32 %r12, %nctaid.x;
sub.u32 %r12, %r12, 1;
setp.eq.u32 %p1, %r3, %r12;
@%p1 bra SET;
LOOP:
.loc 1 30 0
{count}
{poll}
setp.eq.u32 %p2, %r11, 0;
@%p2 bra LOOP;
bra END;
SET:
st.release.gpu.global.u32 [%rd1], 9;
mov.u32 %r11, 1;
END:
st.global.u32 [%rd3], %r11;
"""
_ZERO = np.zeros(4, np.uint32)


@every_schedule
@pytest.mark.parametrize("poll", sorted(_POLLS))
@pytest.mark.parametrize("count", ["", "add.u32 %r10, %r10, 1;"], ids=["plain", "counting"])
def test_a_flag_between_ctas(poll: str, count: str, schedule: str) -> None:
    body = _FLAG.format(poll=_POLLS[poll], count=count)
    assert execute(body, grid=3, a=_ZERO, schedule=schedule).out.tolist() == [9] * 64 + [1] * 32


@every_schedule
@pytest.mark.parametrize("poll", [p for p in sorted(_POLLS) if p != "sleeping"])
def test_a_flag_that_nobody_sets_is_a_deadlock(poll: str, schedule: str) -> None:
    body = (
        "mov.u32 %r10, 0;\nLOOP:\n.loc 1 30 0\n"
        + _POLLS[poll]
        + "\nsetp.eq.u32 %p2, %r11, 0;\n@%p2 bra LOOP;"
    )
    with report(
        "looping for ever over what nobody else will change",
        "case.cu:30",
        "CTA 1 threads 0-31",
        kind=Deadlock,
    ):
        execute(body, grid=2, a=_ZERO, schedule=schedule)


def test_a_word_that_many_poll_is_told_once_and_a_loop_without_a_line_has_that_of_what_follows() -> None:
    """NVRTC gives the head of a loop line 0 where it reloads a parameter there."""
    body = """
LOOP:
.loc 1 0 0
mov.u64 %rd9, %rd1;
.loc 1 30 0
ld.volatile.global.u32 %r11, [%rd9];
setp.eq.u32 %p2, %r11, 0;
@%p2 bra LOOP;
"""
    with pytest.raises(Deadlock) as caught:
        execute(body, grid=2, a=_ZERO)
    text = str(caught.value)
    assert "CTA 0 threads 0-31 at case.cu:30 (PTX line" in text
    assert text.count("polls 4 bytes") == 1 and "CTA 0 threads 0-31; CTA 1 threads 0-31 polls 4 bytes" in text


@every_schedule
def test_a_flag_in_shared_memory_between_warps(schedule: str) -> None:
    body = """
    setp.eq.u32 %p1, %r2, 0;
    @%p1 st.shared.u32 [sm], 0;
    bar.sync 0;
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra SET;
    LOOP:
    ld.volatile.shared.u32 %r11, [sm];
    setp.eq.u32 %p3, %r11, 0;
    @%p3 bra LOOP;
    bra END;
    SET:
    setp.eq.u32 %p4, %r2, 40;
    @%p4 st.volatile.shared.u32 [sm], 5;
    mov.u32 %r11, 0;
    END:
    st.global.u32 [%rd3], %r11;
    """
    got = execute(body, block=64, shared=".shared .align 4 .b8 sm[4];", schedule=schedule).out
    assert got.tolist() == [5] * 32 + [0] * 32


@every_schedule
def test_a_flag_between_lanes_of_one_warp(schedule: str) -> None:
    """Independent thread scheduling: lane 31 sets what the other lanes of its warp poll for."""
    body = """
    setp.eq.u32 %p1, %r2, 31;
    @%p1 bra SET;
    LOOP:
    ld.volatile.global.u32 %r11, [%rd1];
    setp.eq.u32 %p2, %r11, 0;
    @%p2 bra LOOP;
    bra END;
    SET:
    st.volatile.global.u32 [%rd1], 3;
    mov.u32 %r11, 1;
    END:
    st.global.u32 [%rd3], %r11;
    """
    assert execute(body, a=_ZERO, schedule=schedule).out.tolist() == [3] * 31 + [1]


@every_schedule
def test_a_lock_that_every_thread_takes(schedule: str) -> None:
    """The lock is held by one lane while the rest of its warp polls; increments are not lost."""
    body = """
    LOOP:
    atom.global.cas.b32 %r11, [%rd1], 0, 1;
    setp.ne.u32 %p2, %r11, 0;
    @%p2 bra LOOP;
    ld.volatile.global.u32 %r12, [%rd1+4];
    add.u32 %r12, %r12, 1;
    st.volatile.global.u32 [%rd1+4], %r12;
    atom.global.exch.b32 %r13, [%rd1], 0;
    st.global.u32 [%rd3], %r12;
    """
    got = execute(body, grid=2, block=40, a=_ZERO, schedule=schedule).out
    assert sorted(got.tolist()) == list(range(1, 81))


@every_schedule
def test_a_bounded_poll_gives_up(schedule: str) -> None:
    body = """
    mov.u32 %r10, 0;
    LOOP:
    ld.volatile.global.u32 %r11, [%rd1];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p1, %r10, 700;
    setp.eq.and.u32 %p2, %r11, 0, %p1;
    @%p2 bra LOOP;
    st.global.u32 [%rd3], %r10;
    """
    assert execute(body, a=_ZERO, schedule=schedule).out.tolist() == [700] * 32


@every_schedule
def test_a_chain_of_flags_through_many_ctas(schedule: str) -> None:
    """Each CTA waits for the one before it, the last one starts: nobody may be starved."""
    body = """
    mov.u32 %r12, %nctaid.x;
    sub.u32 %r13, %r12, %r3;
    sub.u32 %r13, %r13, 1;
    mov.u32 %r10, 0;
    LOOP:
    ld.acquire.gpu.global.u32 %r11, [%rd1];
    add.u32 %r10, %r10, 1;
    setp.ne.u32 %p1, %r11, %r13;
    @%p1 bra LOOP;
    setp.eq.u32 %p2, %r2, 0;
    bar.sync 0;
    add.u32 %r14, %r13, 1;
    @%p2 st.release.gpu.global.u32 [%rd1], %r14;
    st.global.u32 [%rd3], %r13;
    """
    got = execute(body, grid=12, a=_ZERO, schedule=schedule).out.reshape(12, 32)
    assert (got == 11 - np.arange(12)[:, None]).all()


@every_schedule
def test_a_spinner_is_fed_by_a_copy_in_flight(schedule: str) -> None:
    """The flag is the last word of a bulk store that completes only later."""
    body = """
    setp.eq.u32 %p1, %r2, 0;
    mov.u32 %r22, tile;
    shl.b32 %r23, %r2, 2;
    add.u32 %r23, %r23, %r22;
    setp.ne.u32 %p2, %r3, 0;
    @%p2 bra WAIT;
    st.shared.u32 [%r23], 8;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r22], 128;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
    @%p1 st.release.gpu.global.u32 [%rd1], 1;
    ret;
    WAIT:
    ld.acquire.gpu.global.u32 %r11, [%rd1];
    setp.eq.u32 %p3, %r11, 0;
    @%p3 bra WAIT;
    ld.global.u32 %r12, [%rd2+124];
    st.global.u32 [%rd3], %r12;
    """
    got = execute(
        body,
        grid=2,
        a=_ZERO,
        b=np.zeros(32, np.uint32),
        shared=".shared .align 128 .b8 tile[128];",
        schedule=schedule,
    ).out
    assert got[32:].tolist() == [8] * 32


# ------------------------------------------------------------------------------------------------- watchdogs

_WATCHDOG = """
mov.u64 %rd10, {clock};
LOOP:
ld.volatile.global.u32 %r11, [%rd1];
setp.ne.u32 %p1, %r11, 0;
@%p1 bra DONE;
mov.u64 %rd11, {clock};
sub.s64 %rd12, %rd11, %rd10;
setp.lt.u64 %p2, %rd12, {limit};
@%p2 bra LOOP;
st.global.u32 [%rd3], 0xdead;
ret;
DONE:
st.global.u32 [%rd3], 1;
"""


@pytest.mark.parametrize("clock", ["%clock64", "%globaltimer"])
def test_a_watchdog_on_a_clock_ends_and_is_no_deadlock(clock: str) -> None:
    got = execute(_WATCHDOG.format(clock=clock, limit=20000), grid=2, a=_ZERO, schedule="timed")
    assert got.out.tolist() == [0xDEAD] * 64
    assert got.result.cycles > 20000


def test_a_watchdog_around_try_wait_ends() -> None:
    body = """
    setp.eq.u32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    bar.sync 0;
    mov.u64 %rd10, %clock64;
    LOOP:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @%p3 bra DONE;
    mov.u64 %rd11, %clock64;
    sub.s64 %rd12, %rd11, %rd10;
    setp.lt.u64 %p2, %rd12, 1000000;
    @%p2 bra LOOP;
    st.global.u32 [%rd3], 0xdead;
    ret;
    DONE:
    st.global.u32 [%rd3], 1;
    """
    got = execute(body, shared=".shared .align 8 .b64 bar;", schedule="timed")
    assert got.out.tolist() == [0xDEAD] * 32


@pytest.mark.parametrize("seed", [1, 7])
def test_a_random_seed_reproduces_the_text_of_a_deadlock(seed: int) -> None:
    body = """
    setp.lt.u32 %p1, %r2, 5;
    @%p1 bra A;
    bar.warp.sync 0xffffffff;
    A:
    ld.volatile.global.u32 %r11, [%rd1];
    setp.eq.u32 %p2, %r11, 0;
    @%p2 bra A;
    """
    texts = []
    for _ in range(2):
        with pytest.raises(EmulationError) as caught:
            execute(body, grid=3, block=64, a=_ZERO, schedule="random", seed=seed)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "looping for ever" in texts[0]
    assert "waits for lanes 0-4 of warp 0" in texts[0]
