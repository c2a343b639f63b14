"""mbarriers in kernels: what hangs and how it is told, waits in all their forms, a ring that wraps around."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.emulator.errors import Deadlock
from tests.emulator.exec_kit import every_schedule, execute, report
from tests.emulator.mbarrier_kit import PROLOGUE, go, init, wait


@every_schedule
def test_arrivals_missing_are_counted(schedule: str) -> None:
    body = init(3) + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];\n" + wait(0)
    with report(
        "full[0] of CTA 0, phase 0 (parity 0): no bytes announced, 2 of 3 arrivals missing", kind=Deadlock
    ):
        go(body, schedule)


@every_schedule
def test_the_second_phase_is_named_when_it_is_the_one_that_hangs(schedule: str) -> None:
    body = (
        init(32) + "mbarrier.arrive.shared::cta.b64 _, [%r20];\n" + wait(0)
        + "setp.lt.u32 %p2, %r2, 30;\n@%p2 mbarrier.arrive.shared::cta.b64 _, [%r20];\n"
        + wait(1, line=91, name="W2")
    )  # fmt: skip
    with report("full[0] of CTA 0, phase 1 (parity 1): no bytes announced, 2 of 32 arrivals missing",
                "case.cu:91",
                kind=Deadlock):  # fmt: skip
        go(body, schedule)


@every_schedule
def test_a_hang_in_one_of_several_ctas_names_that_cta(schedule: str) -> None:
    body = init(1) + "setp.eq.and.u32 %p2, %r3, 3, %p1;\nnot.pred %p3, %p2;\nand.pred %p3, %p3, %p1;\n"
    body += "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r20];\n" + wait(0)
    with report("full[0] of CTA 3, phase 0", "CTA 3 threads 0-31", kind=Deadlock) as caught:
        go(body, schedule, grid=5)
    assert "CTA 2" not in str(caught.value)


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_an_init_count_is_in_range(count: int) -> None:
    with report(f"got {count}", "1..1048575", rule="mbarrier.count"):
        go(PROLOGUE + f"mov.u32 %r10, {count};\n@%p1 mbarrier.init.shared::cta.b64 [%r20], %r10;", "min-pc")


@every_schedule
def test_h01_a_failed_try_wait_lets_its_own_thread_arrive(schedule: str) -> None:
    body = (
        init(1)
        + """
    @!%p1 bra END;
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r20], 0;
    mbarrier.arrive.shared::cta.b64 _, [%r20];
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20], 0;
    selp.u32 %r10, 1, 0, %p2;
    selp.u32 %r11, 2, 0, %p3;
    or.b32 %r10, %r10, %r11;
    st.global.u32 [%rd3], %r10;
    END:
    """
    )
    assert go(body, schedule)[0] == 2


@every_schedule
def test_test_wait_never_blocks_and_its_loop_sees_the_arrival(schedule: str) -> None:
    """Warp 0 polls with test_wait, counting; warp 1 arrives after some work."""
    body = (
        init(32)
        + """
    setp.ge.u32 %p2, %r2, 32;
    mov.u32 %r10, 0;
    @%p2 bra WORK;
    POLL:
    add.u32 %r10, %r10, 1;
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r20], 0;
    @!%p3 bra POLL;
    setp.gt.u32 %p4, %r10, 0;
    selp.u32 %r11, 1, 0, %p4;
    bra END;
    WORK:
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p5, %r10, 20;
    @%p5 bra WORK;
    mbarrier.arrive.shared::cta.b64 _, [%r20];
    mov.u32 %r11, 2;
    END:
    st.global.u32 [%rd3], %r11;
    """
    )
    assert go(body, schedule, block=64).tolist() == [1] * 32 + [2] * 32


@every_schedule
def test_a_test_wait_loop_that_nobody_answers_is_a_deadlock(schedule: str) -> None:
    body = (
        init(1)
        + """
    .loc 1 52 0
    POLL:
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r20], 0;
    @!%p3 bra POLL;
    """
    )
    with report("looping for ever", "case.cu:52", kind=Deadlock):
        go(body, schedule)


@every_schedule
def test_a_bounded_number_of_tries_ends(schedule: str) -> None:
    body = (
        init(1)
        + """
    mov.u32 %r10, 0;
    TRY:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20], 0, 100;
    add.u32 %r10, %r10, 1;
    setp.lt.and.u32 %p4, %r10, 12, !%p3;
    @%p4 bra TRY;
    st.global.u32 [%rd3], %r10;
    """
    )
    assert go(body, schedule).tolist() == [12] * 32


@every_schedule
def test_waits_by_state(schedule: str) -> None:
    """The state of an arrival is what the arriving thread waits on; pending_count reads it."""
    body = (
        init(64)
        + """
    mbarrier.arrive.shared::cta.b64 %rd10, [%r20];
    W:
    mbarrier.try_wait.shared::cta.b64 %p2, [%r20], %rd10;
    @!%p2 bra W;
    mbarrier.pending_count.b64 %r10, %rd10;
    st.global.u32 [%rd3], %r10;
    """
    )
    got = go(body, schedule, block=64)
    assert sorted(got.tolist()) == list(range(1, 65))


@every_schedule
def test_a_stale_state_is_an_error(schedule: str) -> None:
    body = init(32) + "mbarrier.arrive.shared::cta.b64 %rd10, [%r20];\n" + wait(0)
    body += "mbarrier.arrive.shared::cta.b64 %rd11, [%r20];\n" + wait(1, name="W2")
    body += ".loc 1 88 0\nmbarrier.test_wait.shared::cta.b64 %p2, [%r20], %rd10;"
    with report("state of phase 0 while phase 2", "case.cu:88", rule="mbarrier.state"):
        go(body, schedule)


@every_schedule
@pytest.mark.parametrize("stages", [1, 2])
def test_a_ring_of_full_and_empty_barriers_wraps_around(stages: int, schedule: str) -> None:
    """Warp 0 fills, warp 1 drains, 7 rounds over one or two stages; phases flip at each wrap."""
    shared = """
    .shared .align 8 .b64 full[2];
    .shared .align 8 .b64 empty[2];
    .shared .align 16 .b8 slot[256];
    """
    body = f"""
    mov.u32 %r20, full;
    mov.u32 %r21, empty;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], 32;
    mbarrier.init.shared::cta.b64 [%r20+8], 32;
    mbarrier.init.shared::cta.b64 [%r21], 32;
    mbarrier.init.shared::cta.b64 [%r21+8], 32;
    READY:
    bar.sync 0;
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
    mov.u32 %r12, 0;
    mov.u32 %r13, 0;
    mov.u32 %r22, slot;
    and.b32 %r14, %r2, 31;
    shl.b32 %r14, %r14, 2;
    add.u32 %r22, %r22, %r14;
    setp.ge.u32 %p2, %r2, 32;
    LOOP:
    mad.lo.u32 %r23, %r11, 8, %r20;
    mad.lo.u32 %r24, %r11, 8, %r21;
    mad.lo.u32 %r25, %r11, 128, %r22;
    @%p2 bra DRAIN;
    xor.b32 %r15, %r12, 1;
    E:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r24], %r15;
    @!%p3 bra E;
    mad.lo.u32 %r16, %r10, 1000, %r2;
    st.shared.u32 [%r25], %r16;
    mbarrier.arrive.shared::cta.b64 _, [%r23];
    bra NEXT;
    DRAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r23], %r12;
    @!%p4 bra DRAIN;
    ld.shared.u32 %r16, [%r25];
    add.u32 %r13, %r13, %r16;
    mbarrier.arrive.shared::cta.b64 _, [%r24];
    NEXT:
    add.u32 %r10, %r10, 1;
    add.u32 %r11, %r11, 1;
    setp.eq.u32 %p5, %r11, {stages};
    @%p5 mov.u32 %r11, 0;
    @%p5 xor.b32 %r12, %r12, 1;
    setp.lt.u32 %p6, %r10, 7;
    @%p6 bra LOOP;
    st.global.u32 [%rd3], %r13;
    """
    got = execute(body, block=64, grid=3, shared=shared, schedule=schedule).out.reshape(3, 64)
    assert (got[:, 32:] == 21000 + 7 * np.arange(32)).all()
