"""Named barriers whose number is a register: warps that run together may meet at different ones."""

from __future__ import annotations

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
