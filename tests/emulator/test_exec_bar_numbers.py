"""Named barriers whose number is a register: warps that run together may meet at different ones."""

from __future__ import annotations

import pytest

from tests.emulator.exec_kit import every_schedule, execute, report

_SHARED = ".shared .align 4 .b8 sm[512];"

_BY_NUMBER = """
    shl.b32 %r10, %r2, 2;
    mov.u32 %r11, sm;
    add.u32 %r10, %r10, %r11;
    st.shared.u32 [%r10], %r2;
    {number}
    bar.sync %r20, 64;
    xor.b32 %r12, %r10, 128;
    ld.shared.u32 %r13, [%r12];
    st.global.u32 [%rd3], %r13;
"""


@every_schedule
def test_pairs_of_warps_meet_at_a_barrier_each(schedule: str) -> None:
    """Warps 0 and 1 at barrier 1, warps 2 and 3 at barrier 2: each pair exchanges its numbers."""
    body = _BY_NUMBER.format(number="shr.u32 %r20, %r2, 6;\nadd.u32 %r20, %r20, 1;")
    got = execute(body, block=128, grid=2, shared=_SHARED, schedule=schedule)
    assert got.out.tolist() == [thread ^ 32 for thread in range(128)] * 2
    assert got.counters.barriers == 8


@every_schedule
def test_arrivals_at_several_barriers_pass_and_syncs_wait(schedule: str) -> None:
    """Warps 0 and 1 arrive at barriers 1 and 2 and go on; warps 2 and 3 wait at 1 and 2 for them."""
    body = """
    shr.u32 %r20, %r2, 5;
    and.b32 %r20, %r20, 1;
    add.u32 %r20, %r20, 1;
    and.b32 %r14, %r2, 63;
    shl.b32 %r10, %r14, 2;
    mov.u32 %r11, sm;
    add.u32 %r10, %r10, %r11;
    setp.ge.u32 %p1, %r2, 64;
    @%p1 bra WAIT;
    st.shared.u32 [%r10], %r2;
    bar.arrive %r20, 64;
    bra DONE;
    WAIT:
    bar.sync %r20, 64;
    ld.shared.u32 %r13, [%r10];
    st.global.u32 [%rd3], %r13;
    DONE:
    """
    out = execute(body, block=128, shared=_SHARED, schedule=schedule).out
    assert out[64:].tolist() == list(range(64))


def test_lanes_of_one_warp_must_name_one_barrier() -> None:
    body = _BY_NUMBER.format(number="and.b32 %r20, %r2, 1;")
    with report("the lanes of a warp must name one barrier (got 0 and 1)", rule="bar.number"):
        execute(body, block=64, shared=_SHARED)


def test_a_number_above_15_is_named_with_the_thread_that_has_it() -> None:
    body = _BY_NUMBER.format(number="shr.u32 %r20, %r2, 6;\nmul.lo.u32 %r20, %r20, 16;")
    with report("barrier number must be 0..15 (got 16)", "thread 64", rule="bar.number"):
        execute(body, block=128, shared=_SHARED, schedule="min-pc")


@every_schedule
def test_each_cta_may_count_its_own_threads(schedule: str) -> None:
    """CTA c keeps (c + 1) warps of its three; they meet by a thread count in a register."""
    body = """
    add.u32 %r20, %r3, 1;
    shl.b32 %r20, %r20, 5;
    setp.ge.u32 %p1, %r2, %r20;
    @%p1 exit;
    bar.sync 1, %r20;
    st.global.u32 [%rd3], %r20;
    """
    got = execute(body, block=96, grid=3, zero_out=True, schedule=schedule).out.reshape(3, 96)
    for cta in range(3):
        here = 32 * (cta + 1)
        assert got[cta].tolist() == [here] * here + [0] * (96 - here)


def test_lanes_of_one_warp_must_name_one_thread_count() -> None:
    body = "and.b32 %r20, %r2, 1;\nadd.u32 %r20, %r20, 1;\nshl.b32 %r20, %r20, 5;\nbar.sync 1, %r20;"
    with report("the lanes of a warp must name one thread count (got 32 and 64)", rule="bar.count"):
        execute(body, block=64)


@every_schedule
@pytest.mark.parametrize("form", ["bar.sync 1, 64;", "bar.red.popc.u32 %r21, 1, 64, %p1;"])
def test_ctas_that_wait_together_leave_one_by_one(form: str, schedule: str) -> None:
    """Warp 0 of both CTAs waits as one group; warp 1 of CTA 1 comes much later than that of CTA 0."""
    body = f"""
    mov.u32 %r21, 0;
    setp.ge.u32 %p1, %r2, 32;
    @%p1 bra LATER;
    {form}
    bra DONE;
    LATER:
    mul.lo.u32 %r12, %r3, 50;
    LOOP:
    setp.eq.u32 %p2, %r12, 0;
    @%p2 bra MEET;
    nanosleep.u32 100;
    sub.u32 %r12, %r12, 1;
    bra LOOP;
    MEET:
    {form}
    DONE:
    st.global.u32 [%rd3], %r21;
    """
    want = 32 if "popc" in form else 0
    assert execute(body, block=64, grid=2, schedule=schedule, strict="off").out.tolist() == [want] * 128
