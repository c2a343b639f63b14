"""Cases of kind A of docs/cases.md: mbarriers used wrong in ways that people met, and the correct twins."""

from __future__ import annotations

import pytest

from smfree.emulator.errors import BarrierFault, Deadlock
from tests.emulator.exec_kit import every_schedule, execute, reads, report
from tests.emulator.mbarrier_kit import DATA, PROLOGUE, READ, SHARED, go, init, load, wait


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
    twin = init(1) + announce + load(1024) + load(1024, at=1024) + wait(0) + READ
    assert go(twin, schedule, block=64).tolist() == DATA[:64].tolist()


@every_schedule
@pytest.mark.parametrize("content", ["zeroed", "garbage", "never written"])
def test_a08_expect_tx_is_no_initialisation(content: str, schedule: str) -> None:
    fill = {"zeroed": "@%p1 st.shared.u64 [%r20], 0;", "garbage": "@%p1 st.shared.u64 [%r20], 0x1234;"}
    body = PROLOGUE + fill.get(content, "") + "\nbar.sync 0;\n.loc 1 15 0\n"
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
                PROLOGUE + body.format(sync=""),
                shared=SHARED,
                a=DATA,
                block=64,
                schedule=schedule,
                seed=seed,
            )
        except BarrierFault as fault:
            assert fault.rule == "mbarrier.uninitialised"
            reads(["no barrier has been initialised", "case.cu:25", "thread 32"], str(fault))
            found.append(schedule)
        execute(
            PROLOGUE + body.format(sync="bar.sync 0;"),
            shared=SHARED,
            a=DATA,
            block=64,
            schedule=schedule,
            seed=seed,
        )
    assert "random" in found


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
    go(body.replace("mov.u32 %r10, 2;", "mov.u32 %r10, 2;\nand.b32 %r10, %r10, 1;"), schedule)
    got = execute(body, schedule=schedule, shared=SHARED, a=DATA, strict="record")
    assert {f.rule for f in got.result.findings} == {"mbarrier.parity"}
    with report("phase 0", "1 of 1 arrivals missing", kind=Deadlock):  # it behaves as parity 0, not "phase 2"
        execute(
            init(1) + "mov.u32 %r10, 2;\n" + wait("%r10"), schedule=schedule, shared=SHARED, strict="record"
        )


@every_schedule
def test_a12_several_copies_on_one_arrival_also_before_the_announcement(schedule: str) -> None:
    announce = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 3072;\n"
    copies = "".join(load(1024, at=1024 * i) for i in range(3))
    for body in (announce + copies, copies + announce):
        got = go(init(1) + body + wait(0) + READ, schedule, block=64)
        assert got.tolist() == DATA[:64].tolist()


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
    with report("touches a live mbarrier (full[0] of CTA 0)", "case.cu:19", rule="mbarrier.plain_access"):
        go(init(1) + f".loc 1 19 0\n@%p1 {text}", schedule)
    inval = "@%p1 mbarrier.inval.shared::cta.b64 [%r20];\n@%p1 st.shared.u64 [%r20], 7;\n"
    go(init(1) + inval + f"@%p1 {text}", schedule)  # bytes like any other


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


@every_schedule
def test_a25_nobody_arrives_reads_differently_from_bytes_missing(schedule: str) -> None:
    with report(
        "full[1] of CTA 0, phase 0 (parity 0): no bytes announced, 2 of 2 arrivals missing",
        "nobody ever arrived at it or announced bytes", "threads 0-31 at case.cu:44", kind=Deadlock,
    ):  # fmt: skip
        go(init(1, other=2) + wait(0, line=44, barrier="%r21"), schedule)
    two = "setp.lt.u32 %p2, %r2, 2;\n@%p2 mbarrier.arrive.shared::cta.b64 _, [%r21];\n"
    go(init(1, other=2) + two + wait(0, line=44, barrier="%r21"), schedule)
