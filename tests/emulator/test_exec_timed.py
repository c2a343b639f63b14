"""Exact counters, and what the modelled clock must keep in order."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from smfree.emulator.errors import Unsupported
from smfree.emulator.exec.launch import run
from tests.emulator.exec_kit import UNTIMED, Machine, every_schedule, execute, kernel, report

_ENTRY_ALU, _ENTRY_PARAMS = 6, 4  # instructions of the kit's prologue; `ret` is one branch


def _classes(**more: int) -> dict[str, int]:
    """The instructions of one warp, by class."""
    names = {"alu": _ENTRY_ALU, "param load": _ENTRY_PARAMS, "branch": 1}
    for name, count in more.items():
        names[name.replace("_", " ")] = names.get(name.replace("_", " "), 0) + count
    return names


@every_schedule
def test_counters_of_a_strided_copy(schedule: str) -> None:
    """Two warps load 16 bytes per lane, 32 bytes apart: one sector each; then store 4 bytes side by side."""
    body = """
    mul.wide.u32 %rd4, %r1, 32;
    add.s64 %rd4, %rd1, %rd4;
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd4];
    st.global.u32 [%rd3], %r12;
    """
    c = execute(body, block=64, a=np.zeros(64 * 8, np.uint32), schedule=schedule).counters
    want = _classes(alu=2, global_load=1, global_store=1)
    assert c.instructions_by_class == {name: 2 * count for name, count in want.items()}
    assert c.warp_instructions == 2 * sum(want.values())
    assert c.thread_instructions == 64 * sum(want.values())
    assert (c.global_load_requests, c.global_load_sectors, c.global_load_bytes) == (2, 64, 1024)
    assert (c.global_store_requests, c.global_store_sectors, c.global_store_bytes) == (2, 8, 256)
    assert (c.bytes_through_registers, c.bytes_async) == (1280, 0)
    assert (c.barriers, c.atomics, c.fences, c.tma_requests, c.cp_async_requests) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (0, 1), (2048, 32)], ids=["1", "2", "8", "same", "far"]
)
def test_sectors_follow_the_stride(stride: int, sectors: int) -> None:
    body = f"""
    mul.wide.u32 %rd4, %r1, {stride};
    add.s64 %rd4, %rd1, %rd4;
    ld.global.u32 %r10, [%rd4];
    """
    c = execute(body, a=np.zeros(32 * max(stride, 4), np.uint8)).counters
    assert (c.global_load_requests, c.global_load_sectors, c.global_load_bytes) == (1, sectors, 128)


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (16, 4), (128, 32), (0, 1), (132, 1)])
def test_wavefronts_follow_bank_conflicts(stride: int, wavefronts: int) -> None:
    body = f"""
    mul.lo.u32 %r10, %r2, {stride};
    mov.u32 %r11, sm;
    add.u32 %r10, %r10, %r11;
    st.shared.u32 [%r10], 1;
    ld.shared.u32 %r12, [%r10];
    """
    c = execute(body, shared=".shared .align 128 .b8 sm[8192];").counters
    assert (c.shared_store_requests, c.shared_store_wavefronts, c.shared_store_bytes) == (1, wavefronts, 128)
    assert (c.shared_load_requests, c.shared_load_wavefronts, c.shared_load_bytes) == (1, wavefronts, 128)


@every_schedule
def test_counters_of_guards_barriers_and_atomics(schedule: str) -> None:
    """Predicated-off lanes are no thread instructions; a warp with no lane left still issues."""
    body = """
    setp.lt.u32 %p1, %r2, 10;
    @%p1 add.u32 %r10, %r2, 1;
    @!%p1 mov.u32 %r10, 0;
    @%p1 red.global.add.u32 [%rd1], 1;
    bar.sync 0;
    fence.acq_rel.gpu;
    """
    c = execute(body, block=64, a=np.zeros(1, np.uint32), schedule=schedule).counters
    assert c.instructions_by_class == {
        "alu": 2 * (_ENTRY_ALU + 3), "param load": 8, "atomic": 2, "barrier": 2, "fence": 2, "branch": 2
    }  # fmt: skip
    assert c.thread_instructions == 64 * (_ENTRY_ALU + _ENTRY_PARAMS + 1 + 1 + 1 + 1) + 10 + 54 + 10
    assert (c.atomics, c.barriers, c.fences) == (10, 2, 2)


@every_schedule
def test_counters_of_asynchronous_copies(schedule: str) -> None:
    body = """
    setp.eq.u32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    bar.sync 0;
    mov.u32 %r10, tile;
    shl.b32 %r11, %r2, 4;
    add.u32 %r12, %r10, %r11;
    cvt.u64.u32 %rd4, %r11;
    add.s64 %rd4, %rd4, %rd1;
    cp.async.cg.shared.global [%r12+1024], [%rd4], 16;
    cp.async.wait_all;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd1], 1024, [bar];
    W:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;
    @!%p2 bra W;
    """
    shared = ".shared .align 8 .b64 bar;\n.shared .align 128 .b8 tile[2048];"
    c = execute(body, block=64, shared=shared, a=np.zeros(256, np.uint32), schedule=schedule).counters
    assert (c.cp_async_requests, c.tma_requests, c.bytes_async) == (2, 1, 1024 + 1024)
    assert (c.mbarrier_arrivals, c.bytes_through_registers) == (1, 0)
    assert c.mbarrier_wait_hits + c.mbarrier_wait_misses == 64
    assert c.instructions_by_class["cp.async"] == 2


def test_counters_do_not_depend_on_the_schedule_of_a_straight_kernel() -> None:
    body = """
    add.s64 %rd4, %rd1, %rd39;
    ld.global.u32 %r10, [%rd4];
    bar.sync 0;
    st.global.u32 [%rd3], %r10;
    """
    data = np.arange(40 * 5, dtype=np.uint32)
    runs = [execute(body, block=40, grid=5, a=data, schedule=s).counters.as_dict() for s in UNTIMED]
    assert all(r == runs[0] for r in runs)


# -------------------------------------------------------------------------------------------- the timed clock


def _chain(k: int, *, dependent: bool) -> int:
    """Cycles of k loads of different lines, each address taken from the previous load or not."""
    loads = ""
    for i in range(k):
        address = f"%rd{11 + i}+4096" if dependent else f"%rd9+{4096 * (i + 1)}"
        loads += f"ld.global.u64 %rd{12 + i}, [{address}];\n"
    sums = "".join(f"add.s64 %rd30, %rd30, %rd{12 + i};\n" for i in range(k))
    body = f"""
    mov.u64 %rd9, %rd1;
    mov.u64 %rd11, %rd1;
    mov.u64 %rd30, 0;
    mov.u64 %rd31, %clock64;
    {loads}{sums}
    and.b64 %rd30, %rd30, 0;
    mov.u64 %rd32, %clock64;
    sub.s64 %rd32, %rd32, %rd31;
    add.s64 %rd32, %rd32, %rd30;
    st.global.u64 [%rd0], %rd32;
    """
    m = Machine("timed")
    size = 4096 * (k + 2)
    a = m.empty(size)
    chain = np.zeros(size // 8, np.uint64)
    chain[::512] = a + 4096 * np.arange(size // 4096, dtype=np.uint64)
    m.memory.write(a, chain.tobytes())
    out = m.empty(64)
    m.launch(kernel(body), struct.pack("<QQQI", out, a, 0, 0), block=1)
    return int(m.get(out, 1, np.uint64)[0])


def test_dependent_loads_add_up_and_independent_ones_overlap() -> None:
    one, many = _chain(1, dependent=True), 8
    assert one > 300
    assert _chain(many, dependent=True) > 0.9 * many * one
    assert _chain(many, dependent=False) < 1.5 * one
    grown = [_chain(k, dependent=True) for k in (1, 2, 4, 8)]
    assert grown == sorted(grown) and len(set(grown)) == 4


def test_a_use_waits_for_its_load_and_not_before() -> None:
    """The clock read between load and use is early; the one behind the use is late."""
    body = """
    mov.u64 %rd10, %clock64;
    ld.global.u32 %r10, [%rd1];
    mov.u64 %rd11, %clock64;
    add.u32 %r11, %r10, 1;
    mov.u64 %rd12, %clock64;
    sub.s64 %rd11, %rd11, %rd10;
    sub.s64 %rd12, %rd12, %rd10;
    st.global.u64 [%rd0], %rd11;
    st.global.u64 [%rd0+8], %rd12;
    """
    early, late = (
        execute(body, block=1, words=4, a=np.zeros(1, np.uint32), schedule="timed").view(np.uint64).tolist()
    )
    assert early < 50
    assert late > 300


@pytest.mark.parametrize("clock", ["%clock64", "%globaltimer"])
def test_a_clock_never_runs_backwards(clock: str) -> None:
    body = f"""
    mov.u64 %rd10, {clock};
    mov.u32 %r10, 0;
    mov.u32 %r12, 0;
    and.b32 %r14, %r2, 15;
    LOOP:
    ld.volatile.global.u32 %r11, [%rd1];
    add.u32 %r11, %r11, 1;
    bar.warp.sync 0xffffffff;
    mov.u64 %rd11, {clock};
    setp.lt.u64 %p1, %rd11, %rd10;
    @%p1 add.u32 %r12, %r12, 1;
    mov.u64 %rd10, %rd11;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p2, %r10, 20;
    @%p2 bra LOOP;
    st.global.u32 [%rd3], %r12;
    """
    got = execute(body, block=96, grid=4, a=np.zeros(1, np.uint32), schedule="timed")
    assert got.out.tolist() == [0] * 384


def test_time_starts_where_the_launch_does_and_ends_behind_its_stores() -> None:

    m = Machine("timed")
    out = m.empty(8)
    k = kernel("mov.u64 %rd10, %clock64;\nst.global.u64 [%rd0], %rd10;")
    for start in (0.0, 123456.0):  # cycles
        result = run(m.device, k, struct.pack("<QQQI", out, 0, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1), 0,
                     schedule="timed", start_s=start / (m.device.clock.clock_mhz * 1e6))  # fmt: skip
        seen = int(m.get(out, 1, np.uint64)[0])
        assert start <= seen < start + result.cycles


def test_a_barrier_levels_the_clocks_of_its_warps() -> None:
    body = """
    setp.ge.u32 %p1, %r2, 32;
    mov.u32 %r10, 0;
    @%p1 bra MEET;
    WORK:
    ld.volatile.global.u32 %r11, [%rd1];
    add.u32 %r10, %r10, %r11;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p2, %r10, 10;
    @%p2 bra WORK;
    MEET:
    bar.sync 0;
    mov.u64 %rd10, %clock64;
    cvt.u32.u64 %r12, %rd10;
    st.global.u32 [%rd3], %r12;
    """
    got = execute(body, block=64, a=np.zeros(1, np.uint32), schedule="timed").out
    assert got.min() > 10 * 200
    assert int(got.max()) - int(got.min()) < 40


def test_each_warp_sleeps_for_its_own_time() -> None:
    body = """
    shr.u32 %r10, %r2, 5;
    mul.lo.u32 %r10, %r10, 1000;
    mov.u64 %rd10, %clock64;
    nanosleep.u32 %r10;
    mov.u64 %rd11, %clock64;
    sub.u64 %rd11, %rd11, %rd10;
    cvt.u32.u64 %r11, %rd11;
    st.global.u32 [%rd3], %r11;
    """
    slept = execute(body, block=128, schedule="timed").out.reshape(4, 32)[:, 0].astype(np.int64)
    assert (np.diff(slept) == 1980).all()  # 1 us at the H100's 1980 MHz


def test_a_timed_run_is_the_same_every_time() -> None:
    body = """
    add.s64 %rd4, %rd1, %rd39;
    ld.global.u32 %r10, [%rd4];
    bar.sync 0;
    st.global.u32 [%rd3], %r10;
    """
    data = np.arange(64 * 9, dtype=np.uint32)
    first, second = (execute(body, block=64, grid=9, a=data, schedule="timed") for _ in range(2))
    assert first.result.cycles == second.result.cycles > 0
    assert first.counters == second.counters


@pytest.mark.parametrize("schedule", UNTIMED)
@pytest.mark.parametrize("register", ["%clock64", "%globaltimer"])
def test_without_a_clock_reading_it_is_refused(register: str, schedule: str) -> None:
    with report(
        f"the '{schedule}' schedule has no clock",
        "'timed'",
        "case.cu:77",
        rule="clock.none",
        kind=Unsupported,
    ):
        execute(f".loc 1 77 0\nmov.u64 %rd10, {register};", schedule=schedule)
