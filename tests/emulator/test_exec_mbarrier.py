"""mbarriers in kernels: the public failing cases, their reports, and their correct twins."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.emulator.errors import BarrierFault, Deadlock
from tests.emulator.exec_kit import every_schedule, execute, reads, report

_SHARED = """
.shared .align 8 .b64 full[2];
.shared .align 128 .b8 tile[4096];
"""

# Registers: %r20 = full[0], %r21 = full[1], %r22 = tile, %p1 = "thread 0". Data source: %rd1.
_PROLOGUE = """
mov.u32 %r20, full;
add.u32 %r21, %r20, 8;
mov.u32 %r22, tile;
setp.eq.u32 %p1, %r2, 0;
"""


def init(count: int, *, other: int | None = None) -> str:
    """Thread 0 initialises full[0] (and full[1]); everyone may use them afterwards."""
    second = f"@%p1 mbarrier.init.shared::cta.b64 [%r21], {other};\n" if other else ""
    return f"{_PROLOGUE}@%p1 mbarrier.init.shared::cta.b64 [%r20], {count};\n{second}bar.sync 0;\n"


def wait(parity: int | str, *, line: int = 90, barrier: str = "%r20", name: str = "W") -> str:
    """The usual loop around try_wait, at case.cu:LINE."""
    return f"""
    {name}:
    .loc 1 {line} 0
    mbarrier.try_wait.parity.shared::cta.b64 %p8, [{barrier}], {parity};
    @!%p8 bra {name};
    """


def load(nbytes: int, *, at: int = 0, line: int = 80) -> str:
    """Thread 0 issues one bulk load of ``nbytes`` into the tile."""
    return f"""
    add.u32 %r23, %r22, {at};
    add.s64 %rd20, %rd1, {at};
    .loc 1 {line} 0
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r23], [%rd20], {nbytes}, [%r20];
    """


_READ = """
shl.b32 %r24, %r2, 2;
add.u32 %r24, %r24, %r22;
ld.shared.u32 %r25, [%r24];
st.global.u32 [%rd3], %r25;
"""
_DATA = np.random.default_rng(11).integers(0, 1 << 32, 1024).astype(np.uint32)


def go(body: str, schedule: str, **more: object) -> np.ndarray:
    return execute(body, schedule=schedule, shared=_SHARED, a=_DATA, **more).out  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- bytes and arrivals missing


@every_schedule
def test_a03_one_of_two_announced_loads_left_out(schedule: str) -> None:
    announce = ".loc 1 70 0\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 2048;\n"
    body = init(1) + announce + load(1024) + wait(0)
    with report(
        "full[0] of CTA 0, phase 0 (parity 0): 1024 of 2048 bytes missing, 0 of 1 arrivals missing",
        "waiting: CTA 0 threads 0-63 at case.cu:90", kind=Deadlock,
    ) as caught:  # fmt: skip
        go(body, schedule, block=64)
    assert "nobody ever" not in str(caught.value)
    twin = init(1) + announce + load(1024) + load(1024, at=1024) + wait(0) + _READ
    assert go(twin, schedule, block=64).tolist() == _DATA[:64].tolist()


@every_schedule
def test_a12_several_copies_on_one_arrival_also_before_the_announcement(schedule: str) -> None:
    announce = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 3072;\n"
    copies = "".join(load(1024, at=1024 * i) for i in range(3))
    for body in (announce + copies, copies + announce):
        got = go(init(1) + body + wait(0) + _READ, schedule, block=64)
        assert got.tolist() == _DATA[:64].tolist()


@every_schedule
def test_a25_nobody_arrives_reads_differently_from_bytes_missing(schedule: str) -> None:
    with report(
        "full[1] of CTA 0, phase 0 (parity 0): no bytes announced, 2 of 2 arrivals missing",
        "nobody ever arrived at it or announced bytes", "threads 0-31 at case.cu:44", kind=Deadlock,
    ):  # fmt: skip
        go(init(1, other=2) + wait(0, line=44, barrier="%r21"), schedule)


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


# --------------------------------------------------------------------------------------------- initialisation


@every_schedule
@pytest.mark.parametrize("content", ["zeroed", "garbage", "never written"])
def test_a08_expect_tx_is_no_initialisation(content: str, schedule: str) -> None:
    fill = {"zeroed": "@%p1 st.shared.u64 [%r20], 0;", "garbage": "@%p1 st.shared.u64 [%r20], 0x1234;"}
    body = _PROLOGUE + fill.get(content, "") + "\nbar.sync 0;\n.loc 1 15 0\n"
    body += "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 1024;\n"
    text = {"zeroed": "zeroed bytes", "garbage": "0x0000000000001234", "never written": "nobody has written"}
    with report(
        "no barrier has been initialised at this shared address", text[content], "case.cu:15",
        "CTA 0 thread 0",
        rule="mbarrier.uninitialised", kind=BarrierFault,
    ):  # fmt: skip
        go(body, schedule)


def test_a09_init_by_thread_0_used_by_warp_1_without_a_barrier() -> None:
    """Thread 0 takes its time. Schedules that let warp 1 run first show it; with bar.sync all are clean."""
    body = """
    @!%p1 bra USE;
    mov.u32 %r10, 0;
    SLOW:
    ld.volatile.global.u32 %r11, [%rd1];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p2, %r10, 6;
    @%p2 bra SLOW;
    mbarrier.init.shared::cta.b64 [%r20], 32;
    USE:
    {sync}
    setp.ge.u32 %p3, %r2, 32;
    .loc 1 25 0
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r20];
    """
    found = []
    for schedule, seed in (("timed", 0), ("min-pc", 0), *(("random", s) for s in range(6))):
        try:
            execute(
                _PROLOGUE + body.format(sync=""),
                shared=_SHARED,
                a=_DATA,
                block=64,
                schedule=schedule,
                seed=seed,
            )
        except BarrierFault as fault:
            assert fault.rule == "mbarrier.uninitialised"
            reads(["no barrier has been initialised", "case.cu:25", "thread 32"], str(fault))
            found.append(schedule)
        execute(
            _PROLOGUE + body.format(sync="bar.sync 0;"),
            shared=_SHARED,
            a=_DATA,
            block=64,
            schedule=schedule,
            seed=seed,
        )
    assert "random" in found


@every_schedule
def test_a14_a_second_init_needs_inval_in_between(schedule: str) -> None:
    again = "@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;\nbar.sync 0;\n"
    inval = "@%p1 mbarrier.inval.shared::cta.b64 [%r20];\nbar.sync 0;\n"
    use = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];\n" + wait(0)
    with report("init over a live mbarrier", rule="mbarrier.reinit"):
        go(init(1) + use + "bar.sync 0;\n" + again, schedule)
    go(init(1) + use + "bar.sync 0;\n" + inval + again, schedule)
    with report("after mbarrier.inval", rule="mbarrier.invalidated"):
        go(init(1) + "bar.sync 0;\n" + inval + use, schedule)


@every_schedule
@pytest.mark.parametrize("text", ["st.shared.u32 [%r20+4], %r2;", "ld.shared.u64 %rd10, [%r20];"])
def test_a14_plain_access_to_a_live_barrier(text: str, schedule: str) -> None:
    with report("touches a live mbarrier", "case.cu:19", rule="mbarrier.plain_access"):
        go(init(1) + f".loc 1 19 0\n@%p1 {text}", schedule)


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_an_init_count_is_in_range(count: int) -> None:
    with report(f"got {count}", "1..1048575", rule="mbarrier.count"):
        go(_PROLOGUE + f"mov.u32 %r10, {count};\n@%p1 mbarrier.init.shared::cta.b64 [%r20], %r10;", "min-pc")


# ----------------------------------------------------------------------------------------------------- parity


@every_schedule
def test_a10_parity_of_a_fresh_barrier(schedule: str) -> None:
    look = """
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r20], 1;
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r20], 0;
    bar.sync 0;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r20], 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p5, [%r20], 1;
    """
    for i, p in enumerate("2345"):
        look += f"selp.u32 %r{10 + i}, {1 << i}, 0, %p{p};\n"
    look += "or.b32 %r10, %r10, %r11;\nor.b32 %r12, %r12, %r13;\nor.b32 %r10, %r10, %r12;\n"
    look += "st.global.u32 [%rd3], %r10;"
    assert go(init(1) + look, schedule, block=64).tolist() == [0b0101] * 64
    go(init(1) + wait(1), schedule)  # goes through at once
    with report("phase 0 (parity 0)", "1 of 1 arrivals missing", kind=Deadlock):
        go(init(1) + "setp.eq.u32 %p2, %r2, 5;\n@!%p2 exit;\n" + wait(0), schedule)


@every_schedule
def test_a11_a_running_round_number_as_parity(schedule: str) -> None:
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];\n"
    body = init(1) + arrive + "mov.u32 %r10, 2;\n" + wait("%r10")
    with report("operand 2 is outside {0, 1}", "case.cu:90", rule="mbarrier.parity"):
        go(body, schedule)
    got = execute(body, schedule=schedule, shared=_SHARED, a=_DATA, strict="record")
    assert {f.rule for f in got.result.findings} == {"mbarrier.parity"}
    with report("phase 0", "1 of 1 arrivals missing", kind=Deadlock):  # it behaves as parity 0, not "phase 2"
        execute(
            init(1) + "mov.u32 %r10, 2;\n" + wait("%r10"), schedule=schedule, shared=_SHARED, strict="record"
        )


# ---------------------------------------------------------------------------------------- counts out of range


@every_schedule
def test_a15_all_lanes_arrive_on_count_one(schedule: str) -> None:
    with report(
        "more arrivals than phase 0 expects", "1 of 1 pending", "case.cu:33", rule="mbarrier.overflow"
    ):
        go(init(1) + ".loc 1 33 0\nmbarrier.arrive.shared::cta.b64 _, [%r20];", schedule)
    go(init(32) + "mbarrier.arrive.shared::cta.b64 _, [%r20];\n" + wait(0), schedule)


@every_schedule
def test_a22_range_of_the_transaction_count(schedule: str) -> None:
    one = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r20], {};\n"
    done = "@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], {};\n"
    fine = (
        init(1)
        + one.format(1048575)
        + done.format(1048575)
        + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];\n"
    )
    go(fine + wait(0), schedule)
    with report("1048575", "got 1048576", rule="mbarrier.operand_range"):
        go(init(1) + "mov.u32 %r10, 1048576;\n" + one.format("%r10"), schedule)
    with report("1048575", "brings it to 1048576", rule="mbarrier.tx_range"):
        go(init(1) + one.format(1048575) + one.format(1), schedule)
    with report("brings it to -1048576", rule="mbarrier.tx_range"):
        go(init(1) + done.format(1048575) + done.format(1), schedule)


# --------------------------------------------------------------------------------------------------- waiting


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
