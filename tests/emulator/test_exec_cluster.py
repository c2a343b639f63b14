"""Clusters: geometry, cluster barriers, shared memory and mbarriers of other CTAs."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import Deadlock, MemoryFault, Unsupported
from tests.emulator.exec_kit import Machine, Outcome, every_schedule, execute, report

SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
_COORDINATES = ("%clusterid", "%cluster_ctaid", "%nclusterid", "%cluster_nctaid", "%ctaid")


def run(body: str, *, cluster: Any = 2, grid: Any = 2, shared: str = "", **options: Any) -> Outcome:
    """A body on a small grid of clusters; ``shared`` are declarations."""
    return execute(body, cluster=cluster, grid=grid, shared=shared, **options)


# ------------------------------------------------------------------------------------------------- geometry


def _store_all(names: list[str]) -> str:
    """Each CTA stores these registers to its own line of ``out``, by its linear number in the grid."""
    lines = [
        ".reg .b32 %q<8>;", "mov.u32 %q0, %ctaid.z;", "mov.u32 %q1, %nctaid.y;", "mov.u32 %q2, %ctaid.y;",
        "mad.lo.u32 %q0, %q0, %q1, %q2;", "mov.u32 %q1, %nctaid.x;", "mov.u32 %q2, %ctaid.x;",
        "mad.lo.u32 %q0, %q0, %q1, %q2;", f"mul.wide.u32 %rd10, %q0, {4 * len(names)};",
        "add.s64 %rd10, %rd0, %rd10;",
    ]  # fmt: skip
    for i, name in enumerate(names):
        lines += [f"mov.u32 %q3, {name};", f"st.global.u32 [%rd10+{4 * i}], %q3;"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("grid", "cluster"),
    [
        ((8, 1, 1), (2, 1, 1)),
        ((6, 4, 1), (3, 2, 1)),
        ((4, 4, 4), (1, 2, 2)),
        ((4, 2, 6), (2, 1, 3)),
        ((4, 6, 2), (2, 2, 2)),
    ],
)
def test_each_cta_knows_its_cluster_and_its_place_in_it(grid: Any, cluster: Any) -> None:
    names = [f"{stem}.{axis}" for stem in _COORDINATES for axis in "xyz"]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    got = run(_store_all(names), grid=grid, cluster=cluster, block=1, words=int(np.prod(grid)) * len(names))
    rows = got.out.reshape(-1, len(names))
    for row, (z, y, x) in zip(rows, product(*(range(n) for n in reversed(grid))), strict=True):
        place = [c % d for c, d in zip((x, y, z), cluster, strict=True)]
        assert row[:3].tolist() == [c // d for c, d in zip((x, y, z), cluster, strict=True)]
        assert row[3:6].tolist() == place
        assert row[6:9].tolist() == [g // d for g, d in zip(grid, cluster, strict=True)]
        assert row[9:12].tolist() == list(cluster) and row[12:15].tolist() == [x, y, z]
        assert row[15] == place[0] + cluster[0] * (place[1] + cluster[1] * place[2])
        assert row[16] == np.prod(cluster)


def test_without_clusters_a_cta_is_a_cluster_of_one() -> None:
    names = ["%clusterid.x", "%nclusterid.x", "%cluster_ctaid.x", "%cluster_nctaid.x", "%cluster_ctarank"]
    got = run(_store_all(names), cluster=None, grid=3, block=1, words=15)
    assert got.out.reshape(3, 5).tolist() == [[cta, 3, 0, 1, 0] for cta in range(3)]


def test_the_cta_of_a_cluster_stand_on_neighbouring_sms() -> None:
    got = run(_store_all(["%smid", "%cluster_ctarank"]), grid=12, cluster=4, block=1, words=24)
    sm, rank = got.out.reshape(12, 2).T
    assert rank.tolist() == [0, 1, 2, 3] * 3 and sm.tolist() == list(range(12))


@pytest.mark.parametrize(("explicit", "cluster"), [(1, 2), (1, 1), (0, None)])
def test_whether_the_launch_asked_for_clusters(explicit: int, cluster: int | None) -> None:
    body = "mov.pred %p1, %is_explicit_cluster;\nselp.u32 %r10, 1, 0, %p1;\nst.global.u32 [%rd3], %r10;"
    assert set(run(body, cluster=cluster).out.tolist()) == {explicit}


def test_clusters_move_in_when_the_last_cta_of_another_has_left() -> None:
    # Of two CTAs per SM at most, 3 * 132 CTAs in clusters of 3 need a second round. Rank 2 stays for a while.
    body = """
    mov.u32 %r10, %cluster_ctarank;
    setp.eq.u32 %p1, %r10, 2;
    @%p1 nanosleep.u32 2000;
    ld.shared.u32 %r11, [data];
    """
    with report("bytes nobody has written", rule="memory.uninitialized"):
        run(f"{body}", grid=3, cluster=3, shared=".shared .u32 data;")
    body = f"st.shared.u32 [data], %r3;\n{body}\nst.global.u32 [%rd3], %r11;"
    grid = 3 * 132
    got = run(body, grid=grid, cluster=3, block=1024, shared=".shared .u32 data;", schedule="timed")
    assert (got.out.reshape(grid, 1024) == np.arange(grid)[:, None]).all()
    assert got.result.ctas_per_sm == 2


def test_residents_are_whole_clusters() -> None:
    # 132 SMs of one CTA each hold 18 clusters of 7; the 19th starts when one has left.
    body = "mov.u32 %r10, %smid;\nst.global.u32 [%rd3], %r10;"
    got = run(body, grid=19 * 7, cluster=7, block=1, dynamic_shared_bytes=200 * 1024)
    assert got.out[: 18 * 7].tolist() == list(range(126)) and got.out[18 * 7 :].max() < 126


def test_a_gpu_without_clusters_refuses_them() -> None:
    with report("A100", "no clusters", "(2, 1, 1)", rule="cluster.absent", kind=Unsupported):
        run("ret;", machine=Machine(profile="a100"))


# -------------------------------------------------------------------------------------------------- barrier


@every_schedule
@pytest.mark.parametrize("block", [32, 96, 40])
def test_what_was_stored_before_the_barrier_is_read_from_the_peer(schedule: str, block: int) -> None:
    body = f"""
    mov.u32 %r10, data;
    shl.b32 %r11, %r2, 2;
    add.u32 %r10, %r10, %r11;
    mad.lo.u32 %r12, %r3, 1000, %r2;
    st.shared.u32 [%r10], %r12;
    {SYNC}
    mov.u32 %r13, %cluster_ctarank;
    add.u32 %r13, %r13, 1;
    mov.u32 %r14, %cluster_nctarank;
    rem.u32 %r13, %r13, %r14;
    mapa.shared::cluster.u32 %r15, %r10, %r13;
    ld.shared::cluster.u32 %r16, [%r15];
    st.global.u32 [%rd3], %r16;
    {SYNC}
    """
    grid, cluster = 12, 4
    data = ".shared .u32 data[96];"
    got = run(body, grid=grid, cluster=cluster, block=block, shared=data, schedule=schedule, seed=3)
    cta = np.arange(grid)
    peer = cta // cluster * cluster + (cta + 1) % cluster
    assert (got.out.reshape(grid, block) == peer[:, None] * 1000 + np.arange(block)).all()


@every_schedule
def test_arrive_and_wait_are_two_phases(schedule: str) -> None:
    # CTA 1 arrives, works, and waits; its work is seen only in the second phase.
    body = """
    mov.u32 %r10, 0;
    LOOP:
    barrier.cluster.arrive.relaxed;
    add.u32 %r10, %r10, 1;
    barrier.cluster.wait;
    setp.lt.u32 %p1, %r10, 5;
    @%p1 bra LOOP;
    st.global.u32 [%rd3], %r10;
    """
    got = run(body, schedule=schedule, block=64, seed=1)
    assert set(got.out.tolist()) == {5}
    assert got.counters.barriers == 5 * 4


@every_schedule
def test_threads_that_have_exited_are_not_waited_for(schedule: str) -> None:
    body = f"""
    setp.eq.u32 %p1, %r3, 1;
    setp.ge.u32 %p2, %r2, 32;
    and.pred %p1, %p1, %p2;
    @%p1 ret;
    {SYNC}
    st.global.u32 [%rd3], %r2;
    """
    got = run(body, block=64, schedule=schedule, seed=2, zero_out=True)
    assert got.out.reshape(2, 64)[0].tolist() == list(range(64))


@every_schedule
def test_an_exit_completes_the_barrier_for_those_who_wait(schedule: str) -> None:
    body = f"""
    setp.eq.u32 %p1, %r3, 1;
    @%p1 nanosleep.u32 9000;
    @%p1 ret;
    {SYNC}
    mov.u32 %r10, {"%clock" if schedule == "timed" else "9000000"};
    st.global.u32 [%rd3], %r10;
    """
    got = run(body, schedule=schedule, zero_out=True)
    assert got.out[:32].min() > 9000 * Machine().device.profile.device.sm_clock_mhz / 1000
    assert not got.out[32:].any()


def test_arriving_twice_is_an_error() -> None:
    twice = "barrier.cluster.arrive.aligned;\n.loc 1 7 0\nbarrier.cluster.arrive.aligned;"
    with report("second time without barrier.cluster.wait", "case.cu:7", rule="cluster.arrive_twice"):
        run(twice)
    run("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\nbarrier.cluster.arrive.aligned;")


def test_waiting_without_an_arrival_is_an_error() -> None:
    with report("without barrier.cluster.arrive", "CTA 0 thread 0", rule="cluster.wait_first"):
        run("barrier.cluster.wait.aligned;")
    with report("without barrier.cluster.arrive", rule="cluster.wait_first"):
        run(f"{SYNC}\nbarrier.cluster.wait.aligned;")


_TWO_PLACES = """
setp.lt.u32 %p1, %r2, 16;
@%p1 bra LOW;
.loc 1 11 0
barrier.cluster.arrive{aligned};
bra END;
LOW:
.loc 1 12 0
barrier.cluster.arrive{aligned};
END:
barrier.cluster.wait;
"""


@every_schedule
def test_lanes_of_a_warp_at_different_aligned_barriers(schedule: str) -> None:
    with report("different barrier.cluster instructions", "case.cu:11", "case.cu:12", rule="bar.divergent"):
        run(_TWO_PLACES.format(aligned=".aligned"), schedule=schedule)
    run(_TWO_PLACES.format(aligned=""), schedule=schedule)


@every_schedule
def test_one_lane_at_an_aligned_barrier_waits_for_its_warp(schedule: str) -> None:
    body = (
        "setp.eq.u32 %p1, %r2, 0;\n@%p1 barrier.cluster.arrive.aligned;\n@%p1 barrier.cluster.wait.aligned;"
    )
    spin = "SPIN:\nld.global.u32 %r10, [%rd0];\nsetp.eq.u32 %p2, %r10, 0;\n@%p2 bra SPIN;"
    with report("barrier.cluster.arrive.aligned waits for lanes 1-31", kind=Deadlock):
        run(f"{body}\n{spin}", schedule=schedule, zero_out=True)
    run(f"setp.ne.u32 %p3, %r2, 0;\n@%p3 ret;\n{body}", schedule=schedule)  # the others have exited


@every_schedule
def test_a_deadlock_at_a_cluster_barrier_names_who_is_missing(schedule: str) -> None:
    body = f"""
    mov.u32 %r10, %ctaid.x;
    setp.eq.u32 %p1, %r10, 3;
    setp.ge.u32 %p2, %r2, 32;
    and.pred %p1, %p1, %p2;
    @%p1 bra STUCK;
    .loc 1 21 0
    {SYNC}
    ret;
    STUCK:
    .loc 1 22 0
    bar.sync 1, 64;
    """
    with report(
        "cluster barrier of CTA 2, CTA 3, phase 0: 32 of 128 threads missing (CTA 3 threads 32-63)",
        "waiting: CTA 2 threads 0-63 at case.cu:21", "CTA 3 threads 0-31 at case.cu:21",
        "barrier 1 of CTA 3: 32 of 64 threads missing; waiting: CTA 3 threads 32-63 at case.cu:22",
        kind=Deadlock,
    ) as caught:  # fmt: skip
        run(body, grid=4, block=64, schedule=schedule)
    assert "CTA 0" not in str(caught.value)  # its cluster is through


# ---------------------------------------------------------------------------------------------- addresses

_DATA = ".shared .align 16 .b8 pad[64];\n.shared .align 16 .u32 data[64];"


def test_mapa_and_getctarank_agree_in_all_forms() -> None:
    body = f"""
    {SYNC}
    mov.u32 %r10, data;
    mapa.shared::cluster.u32 %r11, %r10, 1;
    mapa.shared::cluster.u32 %r12, data, 1;
    mapa.shared::cluster.u32 %r13, data+4, 1;
    cvt.u64.u32 %rd10, %r10;
    mapa.shared::cluster.u64 %rd11, %rd10, 1;
    cvt.u32.u64 %r14, %rd11;
    cvta.shared.u64 %rd12, %rd10;
    mapa.u64 %rd13, %rd12, 1;
    cvta.to.shared::cluster.u64 %rd14, %rd13;
    cvt.u32.u64 %r15, %rd14;
    sub.u32 %r13, %r13, 4;
    setp.ne.u32 %p1, %r11, %r12;
    setp.ne.or.u32 %p1, %r11, %r13, %p1;
    setp.ne.or.u32 %p1, %r11, %r14, %p1;
    setp.ne.or.u32 %p1, %r11, %r15, %p1;
    @%p1 trap;
    getctarank.shared::cluster.u32 %r16, %r11;
    getctarank.shared::cluster.u32 %r17, data+4;
    getctarank.u64 %r18, %rd13;
    getctarank.u64 %r19, %rd12;
    mad.lo.u32 %r20, %r16, 10, %r17;
    mad.lo.u32 %r20, %r20, 10, %r18;
    mad.lo.u32 %r20, %r20, 10, %r19;
    st.global.u32 [%rd3], %r20;
    """
    got = run(body, shared=_DATA, block=1)
    assert got.out.tolist() == [1010, 1111]


def test_the_windows_of_generic_addresses() -> None:
    body = """
    mov.u32 %r10, data;
    cvt.u64.u32 %rd10, %r10;
    cvta.shared.u64 %rd11, %rd10;
    mapa.u64 %rd12, %rd11, 1;
    isspacep.shared::cta %p1, %rd11;
    isspacep.shared::cta %p2, %rd12;
    isspacep.shared::cluster %p3, %rd12;
    isspacep.shared %p4, %rd12;
    isspacep.shared::cluster %p5, %rd0;
    selp.u32 %r11, 1, 0, %p1;
    @%p2 add.u32 %r11, %r11, 10;
    @%p3 add.u32 %r11, %r11, 100;
    @%p4 add.u32 %r11, %r11, 1000;
    @%p5 add.u32 %r11, %r11, 10000;
    st.global.u32 [%rd3], %r11;
    """
    assert run(body, shared=_DATA, block=1).out.tolist() == [101, 1111]


@every_schedule
@pytest.mark.parametrize("generic", [False, True])
def test_loads_stores_and_atomics_reach_the_peer(schedule: str, generic: bool) -> None:
    """Both CTAs: a vector store into the peer, atomics there, and a vector load back."""
    space, a = ("", "%rd12") if generic else (".shared::cluster", "%r12")
    body = f"""
    mov.u32 %r10, data;
    st.shared.u32 [data+32], 5;
    mov.u32 %r11, %cluster_ctarank;
    xor.b32 %r11, %r11, 1;
    mapa.shared::cluster.u32 %r12, %r10, %r11;
    cvt.u64.u32 %rd10, %r10;
    cvta.shared.u64 %rd10, %rd10;
    mapa.u64 %rd12, %rd10, %r11;
    {SYNC}
    mul.lo.u32 %r13, %r3, 100;
    add.u32 %r14, %r13, 1;
    st{space}.v2.u32 [{a}], {{%r13, %r14}};
    atom{space}.add.u32 %r15, [{a}+32], 7;
    red{space}.add.u32 [{a}+32], 1;
    atom{space}.cas.b32 %r17, [{a}+32], 13, 21;
    {SYNC}
    ld.shared.u32 %r16, [data+32];
    mad.lo.u32 %r16, %r16, 100, %r15;
    mad.lo.u32 %r16, %r16, 100, %r17;
    ld{space}.v2.u32 {{%r18, %r19}}, [{a}];
    mul.wide.u32 %rd20, %r3, 12;
    add.s64 %rd20, %rd0, %rd20;
    st.global.u32 [%rd20], %r16;
    st.global.u32 [%rd20+4], %r18;
    st.global.u32 [%rd20+8], %r19;
    {SYNC}
    """
    got = run(body, shared=_DATA, block=1, words=6, schedule=schedule)
    assert got.out.reshape(2, 3).tolist() == [[210513, 0, 1], [210513, 100, 101]]
    c = got.counters
    assert (c.cluster_store_requests, c.cluster_store_bytes) == (2, 16)
    assert (c.cluster_load_requests, c.cluster_load_bytes) == (2, 16)
    assert c.atomics == 6


def test_an_own_address_is_a_shared_address_like_any_other() -> None:
    body = """
    mov.u32 %r10, %cluster_ctarank;
    mapa.shared::cluster.u32 %r11, data, %r10;
    st.shared::cluster.u32 [%r11], %r3;
    ld.shared.u32 %r12, [%r11];
    ld.shared::cluster.u32 %r13, [data];
    add.u32 %r12, %r12, %r13;
    st.global.u32 [%rd3], %r12;
    """
    got = run(body, shared=_DATA, block=1)
    assert got.out.tolist() == [0, 2]
    assert got.counters.cluster_load_bytes == 0 and got.counters.shared_load_bytes == 16
    assert run(body, shared=_DATA, block=1, cluster=None).out.tolist() == [0, 2]


def test_lanes_may_ask_several_ctas_at_once() -> None:
    body = f"""
    st.shared.u32 [data], %r3;
    {SYNC}
    mapa.shared::cluster.u32 %r11, data, %r2;
    ld.shared::cluster.u32 %r12, [%r11];
    st.global.u32 [%rd3], %r12;
    {SYNC}
    """
    for schedule in ("min-pc", "timed"):
        got = run(body, shared=_DATA, block=8, cluster=8, grid=8, schedule=schedule)
        assert got.out.reshape(8, 8).tolist() == [list(range(8))] * 8


@pytest.mark.parametrize(
    ("text", "phrases", "rule"),
    [
        ("data, 2", ("rank 2 of a cluster of 2", "%cluster_nctarank"), "cluster.rank"),
        ("data, 253", ("CTA rank 253 of a cluster of 2",), "cluster.rank"),
        ("data, 254", ("CTA rank above 253 of a cluster of 2",), "cluster.rank"),
        ("data, 300", ("CTA rank above 253 of a cluster of 2",), "cluster.rank"),
        ("data+500, 1", ("offset 0x234 of CTA 1", "320 bytes"), "shared.bounds"),
        ("data+2, 1", ("4-byte aligned", "CTA 1"), "memory.misaligned"),
        ("data+16, 1", ("nobody has written", "CTA 1"), "memory.uninitialized"),
    ],
)
def test_a_wrong_address_is_named_with_its_cta(text: str, phrases: tuple[str, ...], rule: str) -> None:
    mapa, clean = f"mapa.shared::cluster.u32 %r11, {text};", "mapa.shared::cluster.u32 %r11, data, 1;"
    body = f"st.shared.u32 [data], 1;\n{SYNC}\n{mapa}\nld.shared::cluster.u32 %r12, [%r11];\n{SYNC}"
    with report(*phrases, rule=rule, kind=MemoryFault):
        run(body, shared=_DATA, block=1)
    run(body.replace(mapa, clean), shared=_DATA, block=1)


# ------------------------------------------------------------------------------------------- remote mbarriers


@every_schedule
@pytest.mark.parametrize("generic", [False, True])
def test_every_operation_that_may_be_remote_reaches_the_peers_mbarrier(schedule: str, generic: bool) -> None:
    """CTA 1 waits three phases of its barrier of 3 arrivals, all of which CTA 0 completes:
    arrivals with and without a count, announced and completed bytes, and a drop."""
    space, a = ("", "%rd12") if generic else (".shared::cluster", "%r12")
    op = "mbarrier.{}.cluster{}.b64".format
    arrive, release = op("arrive.release", space), op("arrive.expect_tx.release", space)
    body = f"""
    setp.eq.u32 %p1, %r3, 1;
    @%p1 mbarrier.init.shared.b64 [bar], 3;
    fence.mbarrier_init.release.cluster;
    mapa.shared::cluster.u32 %r12, bar, 1;
    mov.u32 %r13, bar;
    cvt.u64.u32 %rd10, %r13;
    cvta.shared.u64 %rd10, %rd10;
    mapa.u64 %rd12, %rd10, 1;
    {SYNC}
    @%p1 bra WAIT;
    {arrive} _, [{a}];
    {arrive} _, [{a}], 2;
    {SYNC}
    {release} _, [{a}], 64;
    {op("expect_tx.relaxed", space)} [{a}], 32;
    {arrive} _, [{a}], 2;
    {op("complete_tx.relaxed", space)} [{a}], 96;
    {SYNC}
    {op("arrive_drop.release", space)} _, [{a}];
    {op("arrive_drop.expect_tx.release", space)} _, [{a}], 16;
    {op("complete_tx.relaxed", space)} [{a}], 16;
    {arrive} _, [{a}];
    {SYNC}
    {arrive} _, [{a}];
    bra END;
    WAIT:
    mov.u32 %r14, 0;
    AGAIN:
    and.b32 %r15, %r14, 1;
    TRY:
    mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [bar], %r15;
    @!%p2 bra TRY;
    add.u32 %r14, %r14, 1;
    setp.lt.u32 %p3, %r14, 4;
    @!%p3 bra DONE;
    {SYNC}
    bra AGAIN;
    DONE:
    st.global.u32 [%rd3], %r14;
    END:
    {SYNC}
    """
    got = run(body, shared=".shared .b64 bar;", block=1, schedule=schedule, zero_out=True)
    assert got.out.tolist() == [0, 4]
    assert got.counters.mbarrier_arrivals == 8


@every_schedule
def test_bytes_missing_at_a_remote_barrier_are_told_with_its_cta(schedule: str) -> None:
    body = f"""
    setp.eq.u32 %p1, %r3, 1;
    @%p1 mbarrier.init.shared.b64 [bar], 2;
    fence.mbarrier_init.release.cluster;
    mapa.shared::cluster.u32 %r12, bar, 1;
    {SYNC}
    @!%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r12], 64;
    @%p1 mbarrier.arrive.shared.b64 _, [bar];
    TRY:
    @%p1 mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [bar], 0;
    @%p1 bra CHECK;
    bra END;
    CHECK:
    @!%p2 bra TRY;
    END:
    {SYNC}
    """
    with report(
        "bar of CTA 1, phase 0 (parity 0): 64 of 64 bytes missing, 0 of 2 arrivals missing (arrived: CTA 0, "
        "CTA 1)",
        kind=Deadlock,
    ):
        run(body, shared=".shared .b64 bar;", block=1, schedule=schedule)


# -------------------------------------------------------------------------------------------------- timing

_PING = f"""
.reg .b64 %t<4>;
st.shared.u32 [data], 0;
mapa.shared::cluster.u32 %r11, data, {{rank}};
{SYNC}
mov.u32 %r13, 0;
mov.u64 %t0, %clock64;
LOOP:
ld.shared::cluster.u32 %r12, [%r11];
add.u32 %r11, %r11, %r12;
add.u32 %r13, %r13, 1;
setp.lt.u32 %p1, %r13, 64;
@%p1 bra LOOP;
mov.u64 %t1, %clock64;
sub.s64 %t1, %t1, %t0;
cvt.u32.u64 %r14, %t1;
st.global.u32 [%rd3], %r14;
{SYNC}
"""


def test_a_dependent_load_takes_the_latency_of_the_network() -> None:
    far = run(_PING.format(rank=1), shared=_DATA, block=1, schedule="timed").out[0] / 64
    near = run(_PING.format(rank=0), shared=_DATA, block=1, schedule="timed").out[0] / 64
    profile = Machine().device.profile
    more = profile.cluster.latency_cycles - profile.shared.latency_cycles
    assert far - near == pytest.approx(more, abs=0.5)


def test_a_peer_that_waits_sees_an_arrival_after_the_latency() -> None:
    """CTA 0 notes when it arrives at CTA 1's barrier, CTA 1 when its wait ends."""
    body = f"""
    .reg .b64 %t<2>;
    mov.u32 %r11, %cluster_ctarank;
    setp.eq.u32 %p1, %r11, 1;
    @%p1 mbarrier.init.shared.b64 [bar], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    {SYNC}
    @%p1 bra WAIT;
    nanosleep.u32 3000;
    mov.u64 %t0, %clock64;
    mapa.shared::cluster.u32 %r12, bar, 1;
    mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r12];
    bra END;
    WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bar], 0;
    @!%p2 bra WAIT;
    mov.u64 %t0, %clock64;
    END:
    cvt.u32.u64 %r14, %t0;
    st.global.u32 [%rd3], %r14;
    {SYNC}
    """
    got = run(body, shared=".shared .b64 bar;", block=1, schedule="timed")
    sent, seen = got.out.astype(np.int64)
    clock = Machine().device.clock
    least = clock.cluster_store_cycles + clock.mbarrier_arrive_cycles + clock.mbarrier_wait_wake_cycles
    assert least <= seen - sent < least + 40


def test_the_last_arrival_ends_the_barrier_for_all() -> None:
    body = f"""
    .reg .b64 %t<2>;
    setp.eq.u32 %p1, %r3, 1;
    @%p1 nanosleep.u32 4000;
    {SYNC}
    mov.u64 %t0, %clock64;
    cvt.u32.u64 %r14, %t0;
    st.global.u32 [%rd3], %r14;
    """
    got = run(body, block=64, schedule="timed")
    assert np.ptp(got.out.astype(np.int64)) <= 2
    assert got.out[0] > 4000 * Machine().device.profile.device.sm_clock_mhz / 1000


def test_many_bytes_are_limited_by_the_ports_of_an_sm() -> None:
    """64 KiB by 16 bytes a thread from one peer: the rate of one port."""
    body = f"""
    .reg .b64 %t<2>;
    mov.u32 %r10, buf;
    shl.b32 %r11, %r2, 4;
    add.u32 %r10, %r10, %r11;
    st.shared.v4.u32 [%r10], {{%r2, %r2, %r2, %r2}};
    mapa.shared::cluster.u32 %r12, %r10, 1;
    {SYNC}
    mov.u64 %t0, %clock64;
    mov.u32 %r13, 0;
    LOOP:
    ld.shared::cluster.v4.u32 {{%r14, %r15, %r16, %r17}}, [%r12];
    add.u32 %r13, %r13, 1;
    setp.lt.u32 %p1, %r13, 4;
    @%p1 bra LOOP;
    add.u32 %r14, %r14, %r15;
    mov.u64 %t1, %clock64;
    sub.s64 %t1, %t1, %t0;
    cvt.u32.u64 %r14, %t1;
    setp.ne.u32 %p2, %r3, 0;
    @%p2 mov.u32 %r14, 0;
    st.global.u32 [%rd3], %r14;
    {SYNC}
    """
    got = run(body, block=1024, shared=".shared .align 16 .b8 buf[16384];", schedule="timed")
    cycles, cluster = int(got.out.max()), Machine().device.profile.cluster
    assert cycles == pytest.approx(65536 / cluster.bytes_per_cycle + cluster.latency_cycles, rel=0.1)


# ---------------------------------------------------------------------------------------------- all together

_EXCHANGE = f"""
.reg .b32 %v<8>;
mov.u32 %v0, %cluster_ctarank;
mov.u32 %v1, %cluster_nctarank;
setp.eq.u32 %p1, %r2, 0;
@%p1 mbarrier.init.shared.b64 [bar], {{block}};
@%p1 fence.mbarrier_init.release.cluster;
mov.u32 %v2, data;
shl.b32 %v3, %r2, 2;
add.u32 %v2, %v2, %v3;
mad.lo.u32 %v4, %r3, 100, %r2;
st.shared.u32 [%v2], %v4;
add.u32 %v5, %v0, {{shift}};
rem.u32 %v5, %v5, %v1;
mapa.shared::cluster.u32 %r10, %v2, %v5;
mapa.shared::cluster.u32 %r11, bar, %v5;
{SYNC}
mov.u32 %r20, 0;
LOOP:
ld.shared.u32 %r12, [%v2];
add.u32 %r12, %r12, 1;
{SYNC}
st.shared::cluster.u32 [%r10], %r12;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];
and.b32 %r13, %r20, 1;
TRY:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bar], %r13;
@!%p2 bra TRY;
add.u32 %r20, %r20, 1;
setp.lt.u32 %p3, %r20, {{rounds}};
@%p3 bra LOOP;
ld.shared.u32 %r12, [%v2];
st.global.u32 [%rd3], %r12;
{SYNC}
"""


@every_schedule
def test_values_passed_around_in_clusters_of_any_size(schedule: str) -> None:
    """Each thread adds 1 to its word and puts it ``shift`` CTAs further, again and again; so does numpy."""
    rng = np.random.default_rng(11)
    for size, block in ((1, 32), (2, 48), (3, 8), (8, 64), (16, 1)):
        clusters, rounds, shift = (int(rng.integers(1, high)) for high in (4, 5, size + 1))
        body = _EXCHANGE.format(block=block, shift=shift, rounds=rounds)
        data = ".shared .b64 bar;\n.shared .u32 data[64];"
        options: Any = {"shared": data, "schedule": schedule, "seed": size}
        got = run(body, cluster=size, grid=size * clusters, block=block, **options)
        words = np.arange(size * clusters)[:, None] * 100 + np.arange(block)
        words = words.reshape(clusters, size, block)
        for _ in range(rounds):
            words = np.roll(words + 1, shift, axis=1)
        assert (got.out.reshape(words.shape) == words).all(), (size, block, clusters, rounds, shift)


@pytest.mark.parametrize(
    "form",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r16];",
        "ldmatrix.sync.aligned.m8n8.x1.b16 {%r10}, [%rd12];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r16], {%r2};",
        "cp.async.ca.shared.global [%r16], [%rd0], 4;",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r16], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd0], [%r16], 16;",
        "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r16], %r15;",
        "tensormap.replace.tile.rank.b1024.b32 [%rd12], %r15;",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [%rd0], [%r16], 128;",
    ],
)
def test_forms_that_know_only_the_own_shared_memory_do_not_ask_for_another_space(form: str) -> None:
    peer = "mov.u32 %r15, tile;\nmapa.shared::cluster.u32 %r16, %r15, 1;\nmov.u32 %r15, 1;\n"
    peer += "cvt.u64.u32 %rd12, %r16;\ncvta.shared::cluster.u64 %rd12, %rd12;\n"
    body = f"{SYNC}\n{peer}{form}"
    with report(
        "address belongs to CTA 1 of the cluster (rank 1), CTA 0 executes",
        "the operand must lie in the shared memory of the executing CTA", rule="cluster.own",
    ):  # fmt: skip
        run(body, shared=".shared .align 128 .b8 tile[256];", words=64, zero_out=True)


def test_a_matrix_through_the_mapped_address_of_the_own_cta() -> None:
    body = """
    mov.u32 %r22, tile;
    mad.lo.u32 %r23, %r2, 16, %r22;
    mov.u32 %r24, %cluster_ctarank;
    st.shared.v4.u32 [%r23], {%r1, %r1, %r1, %r1};
    bar.sync 0;
    cvt.u64.u32 %rd12, %r23;
    cvta.shared.u64 %rd12, %rd12;
    mapa.u64 %rd12, %rd12, %r24;
    ldmatrix.sync.aligned.m8n8.x1.b16 {%r10}, [%rd12];
    st.global.u32 [%rd3], %r10;
    """
    got = run(body, shared=".shared .align 16 .b8 tile[512];").out.reshape(2, 32)
    assert got.tolist() == [[32 * cta + lane // 4 for lane in range(32)] for cta in range(2)]
