"""Copies between the CTAs of a cluster: multicast, shared to shared memory, st.async and red.async."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import BarrierFault, CopyFault, MemoryFault
from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.reductions import CLUSTER_TYPES, Reduction
from tests.emulator.exec_kit import Outcome, every_schedule, execute, report

SHARED = (
    ".shared .align 8 .b64 full;\n.shared .align 128 .b8 tile[1024];\n.shared .align 128 .b8 other[1024];"
)
DATA = np.random.default_rng(4).integers(0, 1 << 32, 256).astype(np.uint32)
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
#: %r20 barrier, %r22 tile, %r23 my word of the tile, %r24 my rank, %r25 my word of other; %p1 thread 0.
PROLOGUE = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
mov.u32 %r26, other;
shl.b32 %r23, %r2, 2;
add.u32 %r25, %r23, %r26;
add.u32 %r23, %r23, %r22;
mov.u32 %r24, %cluster_ctarank;
setp.eq.u32 %p1, %r2, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
@%p1 fence.mbarrier_init.release.cluster;
"""
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {nbytes};\n"
WAIT = """
W:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra W;
"""
OUT = ".loc 1 60 0\nld.shared.u32 %r30, [%r23];\nst.global.u32 [%rd3], %r30;\n"
MULTICAST = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [%r22], [%rd1], 128, [%r20], %h1;\n"
)
TO_PEER = (
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r10], [%r26], 128, [%r11];\n"
)


def go(body: str, schedule: str = "min-pc", *, cluster: int = 2, grid: int = 2, **more: Any) -> Outcome:
    return execute(
        PROLOGUE + body, schedule=schedule, shared=SHARED, a=DATA, cluster=cluster, grid=grid, **more
    )


def leader(rank: int) -> str:
    """%p2: thread 0 of this rank."""
    return f"setp.eq.u32 %p2, %r24, {rank};\nand.pred %p2, %p2, %p1;\n"


def mapped(rank: int) -> str:
    """%r10, %r11, %r12: tile, barrier and word 0 of ``other`` in the CTA of this rank."""
    return "".join(
        f"mapa.shared::cluster.u32 %r{10 + i}, {name}, {rank};\n"
        for i, name in enumerate(("%r22", "%r20", "%r26"))
    )


# ------------------------------------------------------------------------------------------------- multicast


@every_schedule
@pytest.mark.parametrize("mask", [0b0001, 0b0110, 0b1111])
def test_a_multicast_reaches_every_cta_of_its_mask(mask: int, schedule: str) -> None:
    """Rank 0 of a cluster of four copies for those of the mask; each waits on its own barrier."""
    body = SYNC + leader(0)
    body += f"mov.u32 %r13, {mask};\nshr.u32 %r14, %r13, %r24;\nand.b32 %r14, %r14, 1;\n"
    body += "setp.ne.u32 %p3, %r14, 0;\n@!%p3 bra OTHERS;\n"
    body += EXPECT.format(nbytes=128) + "OTHERS:\n" + SYNC
    body += f"mov.b16 %h1, {mask};\n@%p2 {MULTICAST}@!%p3 bra END;\n{WAIT}{OUT}END:\n{SYNC}"
    done = go(body, schedule, cluster=4, grid=8, zero_out=True)
    for cta, words in enumerate(done.out.reshape(8, 32)):
        assert words.tolist() == (DATA[:32].tolist() if mask >> cta % 4 & 1 else [0] * 32)
    count = bin(mask).count("1")
    assert done.counters.tma_requests == 2 and done.counters.bytes_async == 2 * 128
    assert done.counters.bytes_multicast == (2 * 128 * count if count > 1 else 0)


def test_one_read_of_l2_serves_all_destinations() -> None:
    """Four CTAs that load 128 bytes each, and one that loads them for all."""
    each = (
        EXPECT.format(nbytes=128)
        + "@%p1 "
        + MULTICAST.replace(".multicast::cluster", "").replace(", %h1", "")
    )
    alone = go(each + WAIT + OUT, "timed", cluster=4, grid=4)
    body = EXPECT.format(nbytes=128) + SYNC + leader(0) + f"mov.b16 %h1, 15;\n@%p2 {MULTICAST}" + WAIT + OUT
    together = go(body + SYNC, "timed", cluster=4, grid=4)
    assert (alone.out == together.out).all()
    total = [c.l2_hit_bytes + c.l2_miss_bytes for c in (alone.counters, together.counters)]
    loads = [t - 4 * 128 for t in total]  # the stores of the results
    assert loads == [4 * 128, 128]
    assert (alone.counters.bytes_async, together.counters.bytes_async) == (512, 128)


_MASKS = [
    (0, "empty CTA mask", 2),
    (0b100, "names rank 2, the cluster has 2 CTAs", 2),
    (0x8003, "names rank 15, the cluster has 4 CTAs", 4),
]


@pytest.mark.parametrize(("mask", "text", "cluster"), _MASKS)
def test_a_mask_names_ctas_of_the_cluster(mask: int, text: str, cluster: int) -> None:
    body = SYNC + leader(0) + f"mov.b16 %h1, {mask};\n.loc 1 35 0\n@%p2 {MULTICAST}"
    with report(text, "case.cu:35", "CTA 0 thread 0", rule="multicast.mask", kind=CopyFault):
        go(body, cluster=cluster, grid=cluster)


def test_each_destination_has_its_own_barrier() -> None:
    """A peer that has not initialised its barrier, or has not published it."""
    late = PROLOGUE.replace("@%p1 mbarrier.init", "@%p5 mbarrier.init").replace(
        "@%p1 fence.mbarrier", "@%p5 fence.mbarrier"
    )
    only_0 = late.replace(
        "setp.eq.u32 %p1, %r2, 0;", "setp.eq.u32 %p1, %r2, 0;\n" + leader(0).replace("%p2", "%p5")
    )
    body = SYNC + leader(0) + f"mov.b16 %h1, 3;\n@%p2 {MULTICAST}"
    with report("no barrier has been initialised", "CTA 1", rule="mbarrier.uninitialised", kind=BarrierFault):
        execute(only_0 + body, shared=SHARED, a=DATA, cluster=2, grid=2)
    no_fence = PROLOGUE.replace("@%p1 fence.mbarrier_init.release.cluster;", "")
    relaxed = body.replace(".release", ".relaxed")
    with report("without making that visible to the cluster", rule="mbarrier.init_fence", kind=BarrierFault):
        execute(no_fence + relaxed, shared=SHARED, a=DATA, cluster=2, grid=2)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_a_destination_leaves_before_the_multicast_lands(schedule: str) -> None:
    """A17 for data: CTA 1 neither waits for its bytes nor stays; the twin waits."""
    body = SYNC + EXPECT.format(nbytes=128) + leader(0) + "mov.b16 %h1, 3;\n"
    body += f".loc 1 35 0\n@%p2 {MULTICAST}.loc 1 36 0\nbar.sync 0;\n"
    leave = "setp.eq.u32 %p4, %r24, 1;\n@%p4 bra END;\n" + WAIT + OUT + "END:\n"
    with report("CTA 1 exits while the cp.async.bulk load of 128 bytes", "(CTA 1)",
                "issued by CTA 0 thread 0", "case.cu:35", rule="copy.exit", kind=CopyFault):  # fmt: skip
        go(body + SYNC + leave, schedule)
    go(body + SYNC + WAIT + OUT, schedule)


def test_a_multicast_to_a_cta_that_has_left() -> None:
    body = SYNC + leader(0) + "setp.eq.u32 %p4, %r24, 1;\n@%p4 ret;\nmov.b16 %h1, 3;\nnanosleep.u32 5000;\n"
    body += f".loc 1 35 0\n@%p2 {MULTICAST}"
    with report("CTA 0 touches the shared memory of CTA 1, which has exited", "case.cu:35",
                rule="cluster.exited", kind=MemoryFault):  # fmt: skip
        go(body, "timed")


@pytest.mark.parametrize("strict", ["error", "record"])
def test_a_finding_names_the_thread_that_issued_the_multicast(strict: str) -> None:
    """Both CTAs multicast to both in one instruction: four destinations of two issuing threads."""
    body = "mov.b16 %h1, 3;\nshl.b32 %r27, %r24, 7;\nadd.u32 %r27, %r27, %r22;\n.loc 1 35 0\n"
    body += "@%p1 " + MULTICAST.replace("%r22", "%r27")
    told = "CTA 0 touches the shared memory of CTA 1 before"
    if strict == "error":
        with report(told, "at CTA 0 thread 0, case.cu:35", rule="cluster.not_started", kind=MemoryFault):
            go(body)
        return
    found = go(EXPECT.format(nbytes=256) + body + WAIT + SYNC, "timed", strict="record").result.findings
    first = next(f for f in found if f.rule == "cluster.not_started")
    assert told in str(first) and "at CTA 0 thread 0, case.cu:35" in str(first)
    clean = go(EXPECT.format(nbytes=256) + SYNC + body + WAIT + SYNC, "timed", strict="record")
    assert not clean.result.findings


def test_a_multicast_past_shared_memory_is_named_with_its_cta() -> None:
    """The size is the issuing thread's: CTA 1 asks for 256 bytes, CTA 0 for 128."""
    copy = MULTICAST.replace("%r22", "%r27").replace("128", "%r28")
    body = SYNC + "mov.b16 %h1, 3;\nmov.u32 %r28, 128;\nmad.lo.u32 %r28, %r24, 128, %r28;\n"
    body += f"mad.lo.u32 %r27, %r24, 8192, %r22;\n.loc 1 35 0\n@%p1 {copy}"
    with report("cp.async.bulk destination of 256 bytes at offset 0x2080 of CTA 0 leaves the 2176 bytes",
                "at CTA 1 thread 0, case.cu:35", rule="shared.bounds", kind=MemoryFault):  # fmt: skip
        go(body)


def test_the_plain_forms_name_their_cta() -> None:
    """.shared::cta with a mapped address; destination and barrier in two CTAs; a load for a peer is fine."""
    copy = "cp.async.bulk.{}.global.mbarrier::complete_tx::bytes [{}], [%rd1], 128, [{}];\n"
    body = SYNC + leader(0) + mapped(1) + ".loc 1 35 0\n@%p2 "
    with report("address belongs to CTA 1", "needs .shared::cluster", "case.cu:35", rule="cluster.own"):
        go(body + copy.format("shared::cta", "%r10", "%r11"))
    for dst, barrier, texts in (
        ("%r10", "%r20", ("the mbarrier is in CTA 0, the destination in CTA 1",)),
        ("%r22", "%r11", ("the mbarrier is in CTA 1, the destination in CTA 0",)),
    ):
        with report(*texts, "case.cu:35", rule="copy.barrier_cta", kind=CopyFault):
            go(body + copy.format("shared::cluster", dst, barrier))
    right = SYNC + "setp.eq.u32 %p4, %r24, 1;\n@!%p4 bra NOT;\n" + EXPECT.format(nbytes=128) + "NOT:\n" + SYNC
    right += leader(0) + mapped(1) + "@%p2 " + copy.format("shared::cluster", "%r10", "%r11")
    right += "@!%p4 bra END;\n" + WAIT + OUT + "END:\n" + SYNC
    assert go(right, zero_out=True).out[32:].tolist() == DATA[:32].tolist()


# ----------------------------------------------------------------------------- shared memory to shared memory

FILL = "mul.lo.u32 %r31, %r2, 3;\nadd.u32 %r31, %r31, %r24;\nst.shared.u32 [%r25], %r31;\n"
FILL += "st.shared.u32 [%r23], 100;\nfence.proxy.async.shared::cta;\n"


def exchange(copy: str, nbytes: int = 128, before: str = "", after: str = "") -> str:
    """Each CTA of a pair sends its ``other`` to the peer's tile."""
    body = FILL + EXPECT.format(nbytes=nbytes) + "bar.sync 0;\n" + SYNC
    body += "xor.b32 %r13, %r24, 1;\n" + mapped(0).replace(", 0;", ", %r13;")
    return body + before + f".loc 1 35 0\n@%p1 {copy}" + after + WAIT + OUT + SYNC


@every_schedule
def test_a_pair_exchanges_tiles(schedule: str) -> None:
    done = go(exchange(TO_PEER), schedule)
    assert done.out.tolist() == [3 * t + rank for rank in (1, 0) for t in range(32)]
    assert done.counters.cluster_async_bytes == 256 and done.counters.tma_requests == 2
    assert done.counters.bytes_async == 0 and done.counters.bytes_through_registers == 2 * 32 * 4


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_the_source_stays_until_the_peer_has_the_bytes(schedule: str) -> None:
    """Refilled after issue: a fault naming both; after the peer says that it has them: clean."""
    refill = ".loc 1 55 0\nst.shared.u32 [%r25], 1;\n"
    with report("store of 4 bytes", "overwrites the source of the cp.async.bulk copy to another CTA of 128",
                "case.cu:35", "case.cu:55", rule="copy.source_modified", kind=CopyFault):  # fmt: skip
        go(exchange(TO_PEER, after=refill), schedule)
    body = exchange(TO_PEER)
    assert body.endswith(SYNC)
    assert go(body + refill, schedule).out.tolist() == [3 * t + rank for rank in (1, 0) for t in range(32)]


@every_schedule
def test_the_peer_may_not_look_before_its_wait(schedule: str) -> None:
    body = exchange(TO_PEER, after=SYNC).replace(WAIT, "")
    with report("reads the destination of the cp.async.bulk copy to another CTA", "case.cu:60", "case.cu:35",
                rule="copy.destination_read", kind=CopyFault):  # fmt: skip
        go(body, schedule)


def test_b02_a_copy_to_another_cta_goes_to_another_cta() -> None:
    body = exchange(TO_PEER.replace("%r10", "%r22").replace("%r11", "%r20"))
    with report("must go to another CTA", "(CTA 0)", "case.cu:35", rule="copy.own_cta", kind=CopyFault):
        go(body)
    for old, new, text in (("[%r26]", "[%r26+8]", "source"), ("[%r10]", "[%r10+8]", "destination")):
        with report(text, "16-byte aligned", "case.cu:35", rule="copy.misaligned", kind=CopyFault):
            go(exchange(TO_PEER.replace(old, new)))
    with report("size must be a multiple of 16 bytes (got 40)", rule="bulk.size", kind=CopyFault):
        go(exchange(TO_PEER.replace("128", "%r15"), before="mov.u32 %r15, 40;\n"))


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_a_cta_leaves_while_its_memory_is_read_or_written(schedule: str) -> None:
    """The last cluster barrier keeps both; without it, somebody leaves under the copy."""
    body = exchange(TO_PEER)
    cut = body[: body.index(WAIT)]
    with report("exits while the cp.async.bulk copy to another CTA of 128 bytes", "issued by CTA",
                "case.cu:35", "wait on its mbarrier", rule="copy.exit", kind=CopyFault):  # fmt: skip
        go(cut, schedule)


# ----------------------------------------------------------------------------------- reductions between CTAs

CASES = [(op, kind) for op, kinds in CLUSTER_TYPES.items() for kind in kinds]


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_every_reduction_into_a_peer(op: str, kind: str) -> None:
    """Rank 1 and 2 and 3 reduce into rank 0's tile at once: bytes may overlap, all count on its barrier."""
    copy = (
        f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{kind}"
        " [%r10], [%r26], 128, [%r11];\n"
    )
    body = FILL + "setp.eq.u32 %p4, %r24, 0;\n@!%p4 bra NOT;\n" + EXPECT.format(nbytes=384) + "NOT:\n"
    body += (
        "bar.sync 0;\n"
        + SYNC
        + mapped(0)
        + f"setp.ne.u32 %p2, %r24, 0;\nand.pred %p2, %p2, %p1;\n@%p2 {copy}"
    )
    body += "@!%p4 bra END;\n" + WAIT + OUT + "END:\n" + SYNC
    results = [
        go(body, s, cluster=4, grid=4, zero_out=True).out[:32] for s in ("min-pc", "async-latest", "random")
    ]
    old = np.full(32, 100, np.uint32).view(np.uint8)
    outcomes = set()
    for order in ((1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2)):
        value = old
        for rank in order:
            value = Reduction(op, kind).combine(
                value, (3 * np.arange(32, dtype=np.uint32) + rank).view(np.uint8)
            )
        outcomes.add(value.tobytes())
    for got in results:
        if op in ("inc", "dec"):  # the order of the three differs element by element: only the range is fixed
            assert all(0 <= g <= max(100, 3 * t + 3) for t, g in enumerate(got.tolist()))
        else:
            assert len(outcomes) == 1 and got.tobytes() in outcomes


def test_a_reduction_into_a_peer_and_a_copy_do_not_overlap() -> None:
    reduce = (
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
        " [%r10], [%r26], 128, [%r11];\n"
    )
    for first, second in ((reduce, TO_PEER), (TO_PEER, reduce)):
        body = exchange(first, nbytes=256, after=f".loc 1 36 0\n@%p1 {second}")
        with report("case.cu:36", "case.cu:35", rule="copy.overlap", kind=CopyFault):
            go(body, "async-latest")
    done = go(exchange(reduce, nbytes=256, after=f"@%p1 {reduce}"), "async-latest")
    assert done.out.tolist() == [100 + 2 * (3 * t + rank) for rank in (1, 0) for t in range(32)]


# ---------------------------------------------------------------------------------------- st.async, red.async

#: every thread sends one word to its peer's tile
ST_ASYNC = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10], %r14, [%r11];\n"
RED_ASYNC = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"


def send(instruction: str, nbytes: int = 128, after: str = "") -> str:
    body = FILL + EXPECT.format(nbytes=nbytes) + "bar.sync 0;\n" + SYNC + "xor.b32 %r13, %r24, 1;\n"
    body += "mapa.shared::cluster.u32 %r10, %r23, %r13;\nmapa.shared::cluster.u32 %r11, %r20, %r13;\n"
    body += "mad.lo.u32 %r14, %r24, 1000, %r2;\nmov.u32 %r15, 7;\n.loc 1 35 0\n"
    return body + instruction + after + WAIT + OUT + SYNC


@every_schedule
def test_st_async_delivers_on_the_peer_s_barrier(schedule: str) -> None:
    done = go(send(ST_ASYNC), schedule)
    assert done.out.tolist() == [1000 * rank + t for rank in (1, 0) for t in range(32)]
    assert done.counters.cluster_async_bytes == 256 and done.counters.tma_requests == 0


@pytest.mark.parametrize(
    ("form", "registers", "step"),
    [(".v2.b32", "{%r14, %r15}", 8), (".v4.u32", "{%r14, %r15, %r14, %r15}", 16), (".b64", "%rd8", 8),
     (".v2.b64", "{%rd8, %rd8}", 16)],
)  # fmt: skip
def test_st_async_vectors(form: str, registers: str, step: int) -> None:
    """Eight threads, so that the tile is filled once at most."""
    instruction = (
        ST_ASYNC.replace(".b32", form).replace("%r14", registers).replace("st.async", "@%p6 st.async")
    )
    pre = f"setp.lt.u32 %p6, %r2, 8;\nmul.lo.u32 %r16, %r2, {step - 4};\nadd.u32 %r10, %r10, %r16;\n"
    pre += "mov.b64 %rd8, {%r14, %r15};\n"
    body = send(pre + instruction, nbytes=8 * step)
    got = go(body).out.reshape(2, 32)[:, : 2 * step]
    for rank, words in zip((1, 0), got, strict=True):
        sent = [x for t in range(8) for x in [1000 * rank + t, 7] * (step // 8)]
        assert words.tolist()[: len(sent)] == sent[:32]


@every_schedule
def test_the_peer_reads_after_its_wait_only(schedule: str) -> None:
    with report("reads the destination of the st.async of 4 bytes", "case.cu:60", "case.cu:35",
                rule="copy.destination_read", kind=CopyFault):  # fmt: skip
        go(send(ST_ASYNC, after=SYNC).replace(WAIT, ""), schedule)


@every_schedule
def test_red_async_of_all_threads_into_one_word(schedule: str) -> None:
    """32 threads of each CTA add into word 0 of the peer's tile: one instruction, overlapping reductions."""
    red = f"{RED_ASYNC}.add.u32 [%r12], %r14, [%r11];\n"
    body = send("mapa.shared::cluster.u32 %r12, %r22, %r13;\n" + red)
    done = go(body, schedule)
    assert [int(done.out[0]), int(done.out[32])] == [100 + 32 * 1000 + 496, 100 + 496]
    assert done.out[1:32].tolist() == [100] * 31


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_every_operation_of_red_async(op: str, kind: str) -> None:
    wide = kind.endswith("64")
    value = "%rd8" if wide else "%r14"
    red = f"{RED_ASYNC}.{op}.{kind} [%r12], {value}, [%r11];\n"
    pre = (
        "mov.b64 %rd8, {%r14, %r15};\nsetp.lt.u32 %p6, %r2, 16;\nmapa.shared::cluster.u32 %r12, %r22, %r13;\n"
    )
    pre += "shl.b32 %r16, %r2, 3;\nadd.u32 %r12, %r12, %r16;\n"
    size = 8 if wide else 4
    done = go(send(pre + f"@%p6 {red}", nbytes=16 * size))
    for rank, words in zip((1, 0), done.out.reshape(2, 32), strict=True):
        old = np.full(32, 100, np.uint32)
        sent = (1000 * rank + np.arange(16)).astype(np.uint32)
        new = np.stack((sent, np.full(16, 7, np.uint32)), axis=1)
        if wide:
            want = Reduction(op, kind).combine(
                old.view(np.uint8), np.ascontiguousarray(new).view(np.uint8).ravel()
            )
            assert words.tobytes() == want.tobytes()
        else:
            want = Reduction(op, kind).combine(old[:16].view(np.uint8), sent.view(np.uint8)).view(np.uint32)
            assert words[0::2].tolist() == want.tolist() and (words[1::2] == 100).all()


def test_rules_of_st_async_and_red_async() -> None:
    red = ST_ASYNC.replace("st.async.weak", "red.async.relaxed.cluster").replace(".b32", ".add.u32")
    with report("st.async needs a cluster of more than one CTA", "case.cu:35", rule="copy.no_cluster"):
        go(send(ST_ASYNC).replace("xor.b32 %r13, %r24, 1;", "mov.u32 %r13, 0;"), cluster=1, grid=1)
    with report("red.async to .shared::cluster must go to another CTA", "case.cu:35", rule="copy.own_cta"):
        go(send(red).replace("xor.b32 %r13, %r24, 1;", "mov.u32 %r13, %r24;"))
    with report("the mbarrier is in CTA 0, the destination in CTA 1", "case.cu:35", rule="copy.barrier_cta"):
        go(send(ST_ASYNC.replace("%r11", "%r20")))
    with report("st.async destination must be 8-byte aligned", "case.cu:35", rule="copy.misaligned"):
        go(send("mov.b64 %rd8, 1;\n" + ST_ASYNC.replace(".b32", ".b64").replace("%r14", "%rd8")))
    with report("touches a live mbarrier", "case.cu:35", rule="mbarrier.plain_access"):
        go(send(ST_ASYNC.replace("[%r10]", "[%r11]")))


def test_copies_of_two_sizes_in_one_instruction_do_not_overlap() -> None:
    """Two threads copy 128 and 64 bytes; the second's place lies in the first's."""
    body = SYNC + "setp.lt.u32 %p2, %r2, 2;\nmov.u32 %r10, 128;\n@!%p1 mov.u32 %r10, 64;\n"
    body += "mov.u32 %r11, %r22;\n@!%p1 add.u32 %r11, %r22, {gap};\n.loc 1 35 0\n"
    body += (
        "@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r11], [%rd1], %r10, [%r20];\n"
    )
    expect = EXPECT.format(nbytes=192)
    with report("case.cu:35", "CTA 0 thread", rule="copy.overlap", kind=CopyFault):
        go(expect + body.format(gap=64), grid=2)
    go(expect + body.format(gap=128) + WAIT, grid=2)
