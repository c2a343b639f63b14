"""Asynchronous copies: bytes move at completion, not before; misuse is named with both its sides."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.barriers import MBarriers
from smfree.emulator.copies import CopyEngine, CopyGroups, CopyKind, PendingCopies
from smfree.emulator.errors import BarrierFault, CopyFault, EmulationError, MemoryFault, Severity, Unsupported
from smfree.emulator.memory import GlobalMemory, SharedMemory
from smfree.emulator.tensor_boxes import swizzle
from smfree.emulator.tensormap import ELEMENT_BYTES, DataType, Swizzle, decode, encode

PITCH = 64 * 1024
TILE = 1024  # offset of the tile in shared memory; the barrier lies at 0
ONE = np.zeros(1, np.int64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Rig:
    """Two CTAs, a barrier of count 1 in each, a random source and an empty destination of 64 KiB."""

    def __init__(self) -> None:
        self.findings: list[EmulationError] = []
        self.memory = GlobalMemory(capacity_bytes=8 << 20)
        self.shared = SharedMemory(2, PITCH, PITCH)
        self.barriers = MBarriers(2, PITCH, memory=self.shared)
        self.engine = CopyEngine(self.memory, self.shared, self.barriers, report=self.findings.append)
        self.src = self.memory.alloc(1 << 16, label="src")
        self.dst = self.memory.alloc(1 << 16, label="dst")
        self.data = np.random.default_rng(7).integers(0, 256, 1 << 16, dtype=np.uint8)
        self.memory.write(self.src, self.data)
        self.key = self.barriers.keys(ints(0, PITCH))
        self.barriers.init(self.key, 1, np.zeros(2))

    def fill(self, offset: int, nbytes: int, value: int = 3) -> None:
        """Plain stores of a constant to the shared memory of slot 0."""
        self.shared.store(offset + np.arange(nbytes, dtype=np.int64), np.full(nbytes, value, np.uint8))

    def tile(self, offset: int, nbytes: int) -> np.ndarray:
        """Plain loads from shared memory."""
        return self.shared.load(offset + np.arange(nbytes, dtype=np.int64), 1)[:, 0]

    def load(self, nbytes: int = 1024, dst: int = TILE, src: int = 0) -> PendingCopies:
        return self.engine.bulk_load(
            ONE, ints(dst), ints(self.src + src), nbytes, self.key[:1], label="k.cu:7"
        )

    def store(self, nbytes: int = 1024, src: int = TILE, dst: int = 0, **more: Any) -> PendingCopies:
        return self.engine.bulk_store(ONE, ints(self.dst + dst), ints(src), nbytes, **more)


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- bulk copies ---


def test_a_bulk_load_lands_at_completion_and_counts_its_bytes(rig: Rig) -> None:
    rig.fill(TILE, 1024)
    rig.barriers.arrive(rig.key[:1], 1, np.zeros(1), expect_tx=1024)
    copy = rig.load()
    assert copy.kind is CopyKind.BULK_G2S and (rig.shared.data[TILE : TILE + 1024] == 3).all()
    assert np.isinf(copy.complete_at).all() and len(rig.engine.pending()) == 1
    key, nbytes = copy.perform(ONE)
    rig.barriers.complete_tx(key, nbytes, np.array([900.0]))
    assert rig.barriers.test(rig.key[:1], 0).all()
    assert (rig.tile(TILE, 1024) == rig.data[:1024]).all()
    assert not rig.engine.pending() and not len(rig.memory.in_flight)


def test_an_engine_that_copied_at_issue_would_miss_a_late_source(rig: Rig) -> None:
    copy = rig.load()
    rig.memory.write(rig.src, bytes(1024))  # a host write goes unchecked: it shows when the source is read
    copy.perform(ONE)
    assert (rig.tile(TILE, 1024) == 0).all()


def test_reading_a_destination_before_completion_names_the_copy(rig: Rig) -> None:
    rig.fill(TILE, 1024)
    copy = rig.load()
    with pytest.raises(CopyFault) as fault:
        rig.shared.load(ints(64 + TILE, TILE - 16 * 0), 4, 4)
    assert fault.value.rule == "copy.destination_read"
    assert "reads the destination of the cp.async.bulk load of 1024 bytes to shared+0x400" in str(fault.value)
    assert "k.cu:7" in str(fault.value)
    copy.perform(ONE, publish=False)
    with pytest.raises(CopyFault):  # landed, but nobody has waited for it
        rig.shared.load(ints(TILE), 4, 4)
    copy.publish(ONE)
    assert rig.shared.load(ints(TILE), 4, 4).view(np.uint8).tolist() == [rig.data[:16].tolist()]


def test_overwriting_a_destination_before_completion(rig: Rig) -> None:
    copy = rig.load()
    with pytest.raises(CopyFault, match="overwrites the destination of") as fault:
        rig.shared.store(ints(TILE), np.zeros(1, np.uint8))
    assert fault.value.rule == "copy.destination_overwritten"
    rig.fill(TILE - 16, 16)
    rig.fill(TILE + 1024, 16)
    copy.perform(ONE)
    rig.fill(TILE, 16)


def test_two_copies_in_flight_to_one_place(rig: Rig) -> None:
    copy = rig.load()
    with pytest.raises(CopyFault, match="overwrites the destination of") as fault:
        rig.load(dst=TILE + 1008)
    assert fault.value.rule == "copy.overlap"
    rig.load(dst=TILE + 1024)
    copy.perform(ONE)
    rig.load()


@pytest.mark.parametrize(
    ("src", "dst", "nbytes", "said"),
    [
        (4, TILE, 32, "cp.async.bulk source must be 16-byte aligned"),
        (16, TILE + 8, 32, "cp.async.bulk destination must be 16-byte aligned"),
        (16, TILE, 24, r"size must be a multiple of 16 bytes \(got 24\)"),
    ],
)
def test_bulk_operands(rig: Rig, src: int, dst: int, nbytes: int, said: str) -> None:
    with pytest.raises(CopyFault, match=said):
        rig.load(nbytes, dst=dst, src=src)
    rig.load(32, dst=TILE, src=16).perform(ONE)


@pytest.mark.parametrize(("src", "dst", "nbytes"), [(TILE + 4, 0, 32), (TILE, 8, 32), (TILE, 0, 40)])
def test_bulk_store_operands(rig: Rig, src: int, dst: int, nbytes: int) -> None:
    rig.fill(TILE, 64)
    with pytest.raises(CopyFault, match="16"):
        rig.store(nbytes, src=src, dst=dst)
    rig.store(32).perform(ONE)


def test_bulk_ranges_and_their_lane(rig: Rig) -> None:
    lanes = ints(0, 1)
    with pytest.raises(
        MemoryFault, match=r"source of 1024 bytes .* past the end of allocation 'src'"
    ) as fault:
        rig.engine.bulk_load(lanes, ints(TILE, TILE + PITCH), rig.src + ints(0, 65536 - 512), 1024, rig.key)
    assert fault.value.index == 1
    with pytest.raises(MemoryFault, match="512 bytes past its end") as fault:
        rig.engine.bulk_load(lanes, ints(TILE, 2 * PITCH - 512), rig.src + ints(0, 0), 1024, rig.key)
    assert fault.value.index == 1
    rig.engine.bulk_load(lanes, ints(TILE, 2 * PITCH - 512), rig.src + ints(0, 65024), 512, rig.key).perform(
        lanes
    )
    assert (rig.shared.data[2 * PITCH - 512 :] == rig.data[-512:]).all()


def test_a_load_needs_a_live_barrier_and_keeps_off_it(rig: Rig) -> None:
    with pytest.raises(BarrierFault, match="no barrier has been initialised"):
        rig.engine.bulk_load(ONE, ints(TILE), ints(rig.src), 16, ints(5))
    with pytest.raises(BarrierFault, match="touches a live mbarrier"):
        rig.load(dst=0)
    rig.load(dst=16)


def test_unwritten_source_bytes_are_a_finding(rig: Rig) -> None:
    hole = rig.memory.alloc(64)
    rig.memory.fill(hole, 48, 1)
    rig.engine.bulk_load(ONE, ints(TILE), ints(hole), 64, rig.key[:1])
    (finding,) = rig.findings
    assert finding.rule == "memory.uninitialized" and "reads 16 bytes nobody has written" in str(finding)
    rig.engine.bulk_load(ONE, ints(TILE + 64), ints(hole), 48, rig.key[:1])
    assert len(rig.findings) == 1


def test_bulk_stores_have_two_moments(rig: Rig) -> None:
    groups = CopyGroups(4)
    lane = ints(2)
    rig.fill(TILE, 1024, 9)
    copy = rig.engine.bulk_store(lane, ints(rig.dst), ints(TILE), 1024, group=groups.current(lane))
    groups.add(copy)
    groups.commit(lane)
    copy.read_at[:], copy.complete_at[:] = 500.0, 900.0
    upto = groups.upto(lane, 0)
    assert groups.ready_time(lane, upto, read=True).tolist() == [500.0]
    assert groups.ready_time(lane, upto).tolist() == [900.0]
    with pytest.raises(CopyFault, match=r"overwrites the source of the cp.async.bulk store") as fault:
        rig.fill(TILE, 16, 1)
    assert fault.value.rule == "copy.source_modified"
    assert (rig.tile(TILE, 16) == 9).all()  # reading it is fine
    copy.read_sources(ONE)
    assert not groups.blocked(lane, upto, read=True).any() and groups.blocked(lane, upto).all()
    rig.fill(TILE, 1024, 1)
    with pytest.raises(CopyFault, match=r"load reads 4 bytes .* has yet to write"):
        rig.memory.load(ints(rig.dst), 4)
    copy.perform(ONE)
    assert not groups.blocked(lane, upto).any()
    assert (rig.memory.read(rig.dst, 1024) == 9).all()
    assert (rig.memory.load(ints(rig.dst), 1) == 9).all()


def test_storing_a_tile_that_is_still_landing_or_was_never_filled(rig: Rig) -> None:
    landing = rig.load()
    with pytest.raises(CopyFault, match=r"cp.async.bulk store reads shared.* is not complete"):
        rig.store()
    landing.perform(ONE)
    rig.store().perform(ONE)
    assert (rig.memory.read(rig.dst, 1024) == rig.data[:1024]).all()
    rig.store(src=TILE + 1024)
    (finding,) = rig.findings
    assert finding.rule == "copy.source_unwritten" and "1024 bytes from shared+0x800" in str(finding)


def test_refilling_a_staging_buffer_by_another_load(rig: Rig) -> None:
    rig.fill(TILE, 1024)
    store = rig.store()
    with pytest.raises(CopyFault, match=r"overwrites the source of the cp.async.bulk store"):
        rig.load()
    store.read_sources(ONE)
    rig.load()


def test_loading_what_a_store_in_flight_has_yet_to_write(rig: Rig) -> None:
    rig.fill(TILE, 1024)
    store = rig.store()
    with pytest.raises(CopyFault, match=r"load reads .* has yet to write"):
        rig.engine.bulk_load(ONE, ints(TILE + 2048), ints(rig.dst + 512), 1024, rig.key[:1])
    store.perform(ONE)
    rig.engine.bulk_load(ONE, ints(TILE + 2048), ints(rig.dst), 1024, rig.key[:1])


def test_writing_the_global_source_of_a_load_in_flight(rig: Rig) -> None:
    copy = rig.load()
    with pytest.raises(CopyFault, match=r"store writes 4 bytes .* still reads") as fault:
        rig.memory.store(ints(rig.src + 2048, rig.src + 1020), np.zeros(2, np.uint32))
    assert fault.value.rule == "copy.race" and fault.value.index == 1
    rig.memory.store(ints(rig.src + 1024), np.zeros(1, np.uint32))
    rig.memory.load(ints(rig.src), 4)
    copy.perform(ONE)
    rig.memory.store(ints(rig.src), np.zeros(1, np.uint32))


def test_one_of_two_loads_completes_and_the_other_still_reads(rig: Rig) -> None:
    near, far = rig.load(), rig.load(dst=8192, src=32768)
    near.perform(ONE)
    rig.memory.store(ints(rig.src), np.zeros(1, np.uint32))
    with pytest.raises(CopyFault, match="still reads"):
        rig.memory.store(ints(rig.src + 32768), np.zeros(1, np.uint32))
    far.perform(ONE)
    rig.memory.store(ints(rig.src + 32768), np.zeros(1, np.uint32))


def test_a_cta_exits_while_a_bulk_store_reads_its_memory(rig: Rig) -> None:
    rig.fill(TILE, 1024)
    store = rig.store()
    rig.engine.check_exit(ints(1))
    with pytest.raises(
        CopyFault, match=r"exits while the cp.async.bulk store .* its shared memory .*wait_group.read 0"
    ) as fault:
        rig.engine.check_exit(ints(0))
    assert fault.value.rule == "copy.exit" and "(one such copy)" in str(fault.value)
    store.read_sources(ONE)
    rig.engine.check_exit(ints(0))


def test_copies_that_outlive_their_ctas_are_counted_with_their_ctas(rig: Rig) -> None:
    for slot in (0, 1):
        rig.fill(slot * PITCH + TILE, 1024)
    slots = np.array([0, 0, 1])
    rig.engine.bulk_store(
        ints(0, 1, 32),
        ints(*(rig.dst + 256 * i for i in range(3))),
        slots * PITCH + TILE + ints(0, 256, 0),
        256,
    )
    told = {(0, 1): "(3 such copies, of CTA slot 0, CTA slot 1)", (0,): "(2 such copies, of CTA slot 0)"}
    for gone, text in (*told.items(), ((1,), "CTA slot 1 exits")):
        with pytest.raises(CopyFault) as fault:
            rig.engine.check_exit(np.array(gone))
        assert fault.value.rule == "copy.exit" and text in str(fault.value)


@pytest.mark.parametrize("nbytes", [0, 16, 1024, 2048, 8192])
def test_batches_of_many_copies(rig: Rig, nbytes: int) -> None:
    lanes = np.arange(6)
    slots = ints(0, 1, 0, 1, 0, 1) * PITCH
    tiles = slots + TILE + lanes // 2 * 8192
    order = rig.src + ints(5, 3, 1, 0, 2, 4) * 8192
    load = rig.engine.bulk_load(lanes, tiles, order, nbytes, rig.key[lanes % 2])
    key, counted = load.perform(lanes)
    assert key.tolist() == rig.key[lanes % 2].tolist() and counted.tolist() == [nbytes] * 6
    store = rig.engine.bulk_store(lanes, rig.dst + lanes * 8192, tiles, nbytes)
    store.read_sources(ints(1, 4))
    assert len(store.perform(lanes)[0]) == 0
    got = rig.memory.read(rig.dst, 6 * 8192).reshape(6, 8192)[:, :nbytes]
    assert (got == rig.data.reshape(-1, 8192)[[5, 3, 1, 0, 2, 4], :nbytes]).all()
    assert not rig.engine.pending() and not len(rig.memory.in_flight)


def test_a_batch_of_different_sizes_completes_in_pieces(rig: Rig) -> None:
    lanes, sizes = np.arange(3), ints(16, 4096, 48)
    load = rig.engine.bulk_load(lanes, TILE + lanes * 4096, rig.src + lanes * 4096, sizes, rig.key[[0, 0, 0]])
    assert load.perform(ints(1))[1].tolist() == [4096]
    assert (rig.tile(TILE + 4096, 4096) == rig.data[4096:8192]).all()
    with pytest.raises(CopyFault):
        rig.tile(TILE, 16)
    assert load.perform(lanes)[1].tolist() == [16, 48]
    assert len(load.perform(lanes)[1]) == 0
    assert (rig.tile(TILE + 8192, 48) == rig.data[8192 : 8192 + 48]).all()


def test_a_far_offset_keeps_its_64_bits() -> None:
    memory, shared = GlobalMemory(capacity_bytes=6 << 30), SharedMemory(1, PITCH, PITCH)
    barriers = MBarriers(1, PITCH, memory=shared)
    engine = CopyEngine(memory, shared, barriers)
    barriers.init(ints(0), 1, np.zeros(1))
    base = memory.alloc(5 << 30)
    far = base + (5 << 30) - 16
    memory.write(far, b"0123456789abcdef")
    engine.bulk_load(ONE, ints(TILE), ints(far), 16, ints(0)).perform(ONE)
    tensor = decode(encode("UINT8", base, [1 << 20, 5 << 10], [1 << 20], [16, 1]))
    coords = ints((1 << 20) - 16, (5 << 10) - 1)[None]
    engine.tensor_load(ONE, ints(2 * TILE), ONE, coords, ints(0), maps=tensor).perform(ONE)
    for start in (TILE, 2 * TILE):
        assert shared.data[start : start + 16].tobytes() == b"0123456789abcdef"


# --- cp.async ---


@pytest.mark.parametrize(("cp_bytes", "cache"), [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")])
def test_cp_async_moves_at_completion(rig: Rig, cp_bytes: int, cache: str) -> None:
    lanes = np.arange(128)
    copy = rig.engine.cp_async(lanes, TILE + lanes * cp_bytes, rig.src + lanes * 32, cp_bytes, cache=cache)
    with pytest.raises(CopyFault, match=f"destination of the cp.async of {cp_bytes} bytes"):
        rig.tile(TILE, 4)
    copy.perform(lanes[64:])
    copy.perform(lanes)
    want = rig.data[: 128 * 32].reshape(128, 32)[:, :cp_bytes].reshape(-1)
    assert (rig.tile(TILE, 128 * cp_bytes) == want).all()


@pytest.mark.parametrize(("cp_bytes", "cache"), [(2, "ca"), (12, "ca"), (32, "ca"), (8, "cg"), (4, "cg")])
def test_cp_async_sizes(rig: Rig, cp_bytes: int, cache: str) -> None:
    with pytest.raises(CopyFault, match=rf"cp.async.{cache} copies .* \(got {cp_bytes}\)") as fault:
        rig.engine.cp_async(ONE, ints(TILE), ints(rig.src), cp_bytes, cache=cache)
    assert fault.value.rule == "cp.async.size"


@pytest.mark.parametrize(("dst", "src", "side"), [(4, 0, "destination"), (0, 4, "source")])
def test_cp_async_alignment_on_both_sides(rig: Rig, dst: int, src: int, side: str) -> None:
    with pytest.raises(CopyFault, match=f"cp.async.ca {side} must be 8-byte aligned") as fault:
        rig.engine.cp_async(ints(0, 1), TILE + ints(16, dst), rig.src + ints(16, src), 8)
    assert fault.value.index == 1
    rig.engine.cp_async(ints(0, 1), TILE + ints(16, dst), rig.src + ints(16, src), 4)


@pytest.mark.parametrize("size", [0, 4, 7, 12, 16])
def test_cp_async_zero_fills_the_rest(rig: Rig, size: int) -> None:
    rig.fill(TILE, 16)
    null = size == 0
    copy = rig.engine.cp_async(ONE, ints(TILE), ints(0 if null else rig.src), 16, size)
    copy.perform(ONE)
    assert rig.tile(TILE, 16).tolist() == rig.data[:size].tolist() + [0] * (16 - size)


def test_cp_async_source_size_per_lane(rig: Rig) -> None:
    tail = rig.memory.alloc(20)
    rig.memory.write(tail, rig.data[:20])
    lanes = np.arange(3)
    with pytest.raises(MemoryFault, match=r"cp.async.ca source: .* past the end") as fault:
        rig.engine.cp_async(lanes, TILE + lanes * 16, tail + lanes * 16, 16)
    assert fault.value.index == 1
    with pytest.raises(MemoryFault, match="past the end") as fault:
        rig.engine.cp_async(lanes, TILE + lanes * 16, tail + lanes * 16, 16, ints(16, 8, 0))
    assert fault.value.index == 1
    rig.engine.cp_async(lanes, TILE + lanes * 16, tail + lanes * 16, 16, ints(16, 4, 0)).perform(lanes)
    assert rig.tile(TILE, 48).tolist() == rig.data[:20].tolist() + [0] * 28
    with pytest.raises(CopyFault, match=r"must not exceed its cp-size 16 \(got 20\)"):
        rig.engine.cp_async(ONE, ints(TILE), ints(rig.src), 16, 20)


def test_two_cp_async_of_one_instruction_to_one_place(rig: Rig) -> None:
    with pytest.raises(CopyFault, match="unordered, the result is undefined") as fault:
        rig.engine.cp_async(np.arange(3), TILE + ints(32, 0, 0), rig.src + ints(0, 16, 32), 16)
    assert fault.value.rule == "copy.overlap" and fault.value.index == 2
    rig.engine.cp_async(np.arange(3), TILE + ints(32, 0, 16), rig.src + ints(0, 16, 32), 16)


def test_two_cp_async_of_one_group_to_one_place(rig: Rig) -> None:
    first = rig.engine.cp_async(ONE, ints(TILE), ints(rig.src), 4)
    with pytest.raises(CopyFault, match=r"overwrites the destination of the cp.async") as fault:
        rig.engine.cp_async(ONE, ints(TILE), ints(rig.src + 16), 4)
    assert fault.value.rule == "copy.overlap"
    rig.engine.cp_async(ONE, ints(TILE + 4), ints(rig.src + 16), 4)  # same 16 bytes, other word
    first.perform(ONE)
    rig.engine.cp_async(ONE, ints(TILE), ints(rig.src + 16), 4)


def test_a_prefetch_never_drained_meets_the_epilogue(rig: Rig) -> None:
    lanes = np.arange(32)
    prefetch = rig.engine.cp_async(lanes, TILE + lanes * 16, rig.src + lanes * 16, 16)
    with pytest.raises(CopyFault, match=r"store of 1 bytes at .* overwrites the destination of the cp.async"):
        rig.fill(TILE, 64)
    prefetch.perform(lanes)
    rig.fill(TILE, 64)


def test_a_cta_may_exit_after_a_copy_of_no_bytes(rig: Rig) -> None:
    rig.load(nbytes=0)
    rig.engine.check_exit(ints(0))


def test_a_cta_may_exit_with_cp_async_pending(rig: Rig) -> None:
    lanes = np.arange(2)
    rig.engine.cp_async(lanes, ints(TILE, TILE + PITCH), rig.src + lanes * 16, 16)
    rig.engine.check_exit(ints(0))
    rig.engine.abandon(ints(0))
    assert [w.tolist() for _, w in rig.engine.pending_of_slots(ints(0, 1))] == [[1]]
    rig.engine.abandon(ints(1))
    assert not rig.engine.pending() and not len(rig.memory.in_flight)


# --- commit groups ---


def issue(rig: Rig, groups: CopyGroups, lane: int, place: int) -> PendingCopies:
    lanes = ints(lane)
    copy = rig.engine.cp_async(
        lanes, ints(TILE + place * 16), ints(rig.src + place * 16), 16, group=groups.current(lanes)
    )
    groups.add(copy)
    return copy


def test_three_groups_and_what_each_wait_covers(rig: Rig) -> None:
    groups, lane = CopyGroups(8), ints(5)
    copies = []
    for place in range(3):
        copies.append(issue(rig, groups, 5, place))
        groups.commit(lane)
    for pending, covered in ((3, 0), (2, 1), (1, 2), (0, 3)):
        assert sum(len(w) for _, w in groups.covered(lane, groups.upto(lane, pending))) == covered
        assert groups.blocked(lane, groups.upto(lane, pending)).tolist() == [covered > 0]
    with pytest.raises(CopyFault):  # wait_group 3 let nothing be assumed
        rig.tile(TILE, 16)
    for batch, which in groups.covered(lane, groups.upto(lane, 2)):
        batch.perform(which)
    assert (rig.tile(TILE, 16) == rig.data[:16]).all() and not copies[1].done.any()
    with pytest.raises(CopyFault):
        rig.tile(TILE + 16, 16)


def test_empty_groups_count_and_threads_count_apart(rig: Rig) -> None:
    groups, both = CopyGroups(2), ints(0, 1)
    copy = issue(rig, groups, 0, 0)
    groups.commit(both)
    groups.commit(ints(0))  # empty
    assert groups.blocked(both, groups.upto(both, 1)).tolist() == [True, False]
    issue(rig, groups, 0, 1)  # not committed: no wait_group covers it
    copy.perform(ONE)
    assert not groups.blocked(both, groups.upto(both, 0)).any()
    assert groups.blocked(both, groups.upto_all(both)).tolist() == [True, False]
    assert groups.outstanding(both).tolist() == [1, 0]
    groups.commit(both)  # cp.async.wait_all = commit, wait_group 0
    assert groups.blocked(both, groups.upto(both, 0)).tolist() == [True, False]


def test_ready_time_is_the_latest_copy_covered(rig: Rig) -> None:
    groups, lanes = CopyGroups(3), ints(0, 1, 2)
    for place, when in enumerate((70.0, 50.0, 90.0)):
        issue(rig, groups, place % 2, place).complete_at[:] = when
    groups.commit(lanes)
    assert groups.ready_time(lanes, groups.upto(lanes, 0)).tolist() == [90.0, 50.0, -np.inf]
    assert groups.ready_time(lanes, groups.upto(lanes, 1)).tolist() == [-np.inf] * 3


def test_a_batch_without_groups_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="group ids"):
        CopyGroups(1).add(rig.load())


# --- tensor copies ---


def matrix(base: int, **more: Any) -> bytes:
    """A 2-D view of 128 x 128 floats at ``base``, box 32 x 8."""
    fields: dict[str, Any] = {"data_type": "FLOAT32", "dims": [128, 128], "strides": [512], "box": [32, 8]}
    return encode(address=base, **(fields | more))


def load_box(rig: Rig, raw: bytes, *coords: int, dst: int = TILE) -> PendingCopies:
    at = np.array([coords], np.int64)
    return rig.engine.tensor_load(ONE, ints(dst), ONE, at, rig.key[:1], maps=decode(raw))


def store_box(rig: Rig, raw: bytes, *coords: int, src: int = TILE) -> PendingCopies:
    return rig.engine.tensor_store(ONE, ints(src), ONE, np.array([coords], np.int64), maps=decode(raw))


@st.composite
def copies(draw: st.DrawFn) -> tuple[bytes, list[int], list[list[int]], bool]:
    rank = draw(st.integers(1, 5))
    mode = draw(st.sampled_from([m for m in Swizzle if m is not Swizzle.B128_ATOM_32B_FLIP_8B]))
    kind = draw(st.sampled_from([DataType.UINT8, DataType.FLOAT16, DataType.FLOAT32]))
    element = ELEMENT_BYTES[kind]
    span = {Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.NONE: draw(st.integers(1, 3)) * 16}.get(mode, 128)
    box = [span // element, *(draw(st.integers(1, 4)) for _ in range(rank - 1))]
    step = 16 // element
    dims = [draw(st.integers(1, 12)) * step, *(draw(st.integers(1, 6)) for _ in range(rank - 1))]
    strides, size = [], dims[0] * element
    for d in range(1, rank):
        strides.append(size)
        size *= dims[d]
    steps = [1, *(draw(st.integers(1, 3)) for _ in range(rank - 1))]
    coords = [
        [draw(st.integers(-2, 13)) * step, *(draw(st.integers(-3, 7)) for _ in dims[1:])] for _ in range(2)
    ]
    nan = draw(st.booleans()) and kind is not DataType.UINT8
    return (
        encode(kind, 1 << 40, dims, strides, box, steps, swizzle=mode, oob_fill=int(nan)),
        dims,
        coords,
        nan,
    )


@settings(max_examples=200)
@given(copies())
def test_tensor_copies_equal_element_by_element(case: tuple[bytes, list[int], list[list[int]], bool]) -> None:
    raw, dims, coords, nan = case
    shape = decode(raw)
    rig = Rig()
    total = shape.end - shape.address
    src, dst = rig.memory.alloc(total), rig.memory.alloc(total)
    data = np.random.default_rng(total).integers(0, 256, total, dtype=np.uint8)
    rig.memory.write(src, data)
    rig.memory.fill(dst, total, 0)
    there, back = (
        decode(
            encode(
                shape.data_type,
                address,
                dims,
                shape.strides[1:],
                shape.box,
                shape.element_strides,
                swizzle=shape.swizzle,
                oob_fill=int(nan),
            )
        )
        for address in (src, dst)
    )
    element = shape.element_bytes
    lanes = ints(0, 1)
    tiles = ints(0, PITCH) + 8192
    load = rig.engine.tensor_load(lanes, tiles, lanes, np.array(coords), rig.key, maps=there)
    assert load.perform(lanes)[1].tolist() == [shape.box_bytes] * 2
    written = np.zeros(total, np.uint8)
    for tile, start in zip(tiles.tolist(), coords, strict=True):
        outer = [range(n) for n in reversed(shape.shared_box)]
        for n, where in enumerate(itertools.product(*outer)):
            at = [c + i * s for c, i, s in zip(start, reversed(where), shape.element_strides, strict=True)]
            place = int(swizzle(ints(tile + n * element), shape.swizzle)[0])
            got = rig.shared.data[place : place + element].tobytes()
            if all(0 <= c < d for c, d in zip(at, dims, strict=True)):
                offset = sum(c * s for c, s in zip(at, shape.strides, strict=True))
                assert got == data[offset : offset + element].tobytes()
                written[offset : offset + element] = data[offset : offset + element]
            else:
                assert got == shape.fill_word
    store = rig.engine.tensor_store(lanes, tiles, lanes, np.array(coords), maps=back)
    store.perform(lanes)
    assert (rig.memory.read(dst, total) == written).all()
    assert not rig.engine.pending() and not len(rig.memory.in_flight)


def test_a_load_beyond_the_tensor_is_zeros_and_full_bytes(rig: Rig) -> None:
    load = load_box(rig, matrix(rig.src), 0, 128)
    assert load.perform(ONE)[1].tolist() == [1024] and not rig.findings
    assert (rig.tile(TILE, 1024) == 0).all()
    rig.engine.flag_outside = True
    load_box(rig, matrix(rig.src), 0, 120, dst=4096).perform(ONE)
    assert not rig.findings
    load_box(rig, matrix(rig.src), 128, 0, dst=8192)
    assert [f.rule for f in rig.findings] == ["tensor.outside"]


def test_element_stride_2_loads_every_second_row(rig: Rig) -> None:
    load = load_box(rig, matrix(rig.src, element_strides=[1, 2]), 0, 0)
    assert load.perform(ONE)[1].tolist() == [512]
    want = rig.data.reshape(128, 512)[:8:2, :128].reshape(-1)
    assert (rig.tile(TILE, 512) == want).all()
    with pytest.raises(MemoryFault, match="nobody has written"):
        rig.tile(TILE + 512, 1)


def test_shared_address_of_a_tensor_copy(rig: Rig) -> None:
    with pytest.raises(CopyFault, match=r"destination must be 128-byte aligned \(got shared\+0x440"):
        load_box(rig, matrix(rig.src), 0, 0, dst=TILE + 64)
    load_box(rig, matrix(rig.src), 0, 0, dst=TILE + 128).perform(ONE)
    with pytest.raises(CopyFault, match="source must be 128-byte aligned"):
        store_box(rig, matrix(rig.dst), 0, 0, src=TILE + 64)


def test_swizzle_works_on_absolute_addresses_and_says_so(rig: Rig) -> None:
    raw = matrix(rig.src, swizzle="128B")
    load_box(rig, raw, 0, 0, dst=TILE).perform(ONE)
    assert not rig.findings
    load_box(rig, raw, 0, 0, dst=8192 + 128).perform(ONE)
    (finding,) = rig.findings
    assert finding.rule == "tensor.swizzle_base" and finding.severity is Severity.STRICT
    assert "not aligned to 1024" in str(finding)
    rows = rig.data.reshape(128, 512)[:8, :128].reshape(-1)
    relative = np.empty(1024, np.uint8)
    relative[swizzle(np.arange(1024), Swizzle.B128)] = rows
    assert (rig.tile(TILE, 1024) == relative).all()
    assert (rig.tile(8192 + 128, 1024) != relative).any()
    absolute = swizzle(8192 + 128 + np.arange(1024), Swizzle.B128)
    assert (rig.shared.data[absolute] == rows).all()


@pytest.mark.parametrize(
    ("coords", "rule"), [((2, 0), "tensor.inner_start"), ((0, -1), "tensor.store_negative"), ((4, 0), None)]
)
def test_where_a_store_may_start(rig: Rig, coords: tuple[int, int], rule: str | None) -> None:
    rig.fill(TILE, 1024)
    store_box(rig, matrix(rig.dst), *coords).perform(ONE)
    assert [f.rule for f in rig.findings] == ([rule] if rule else [])
    assert all(f.severity is Severity.STRICT for f in rig.findings)


def test_a_load_may_start_before_the_tensor(rig: Rig) -> None:
    load_box(rig, matrix(rig.src), -4, -1).perform(ONE)
    assert not rig.findings
    tile = rig.tile(TILE, 1024).reshape(8, 128)
    assert (tile[0] == 0).all() and (tile[:, :16] == 0).all()
    assert (tile[1:, 16:] == rig.data.reshape(128, 512)[:7, :112]).all()


@pytest.mark.parametrize(("width", "spilled"), [(20, 0), (22, 8)])
def test_a_store_tail_inside_a_16_byte_unit(rig: Rig, width: int, spilled: int) -> None:
    rig.memory.fill(rig.dst, 1024, 0xEE)
    rig.fill(TILE, 1024, 3)
    store_box(rig, matrix(rig.dst, dims=[width, 2]), 0, 0).perform(ONE)
    assert [f.rule for f in rig.findings] == (["tensor.store_tail"] if spilled else [])
    rows = rig.memory.read(rig.dst, 1024).reshape(2, 512)
    assert (rows[:, : width * 4 + spilled] == 3).all() and (rows[:, width * 4 + spilled :] == 0xEE).all()


def test_a_store_tail_at_the_end_of_an_allocation_stays_inside(rig: Rig) -> None:
    last = rig.memory.alloc(88)
    rig.fill(TILE, 128, 3)
    store_box(rig, encode("FLOAT32", last, [22], [], [32]), 0).perform(ONE)
    assert (rig.memory.read(last, 88) == 3).all()
    assert (rig.memory.span(last + 88, 40)[0] == 0).all()


def test_a_tensor_that_reaches_past_its_allocation(rig: Rig) -> None:
    raw = matrix(rig.src, dims=[128, 129])
    with pytest.raises(MemoryFault, match=r"tensor copy through 2-D FLOAT32 .* past the end|outside"):
        load_box(rig, raw, 0, 128)
    load_box(rig, raw, 0, 120).perform(ONE)


def test_coordinates_match_the_rank(rig: Rig) -> None:
    with pytest.raises(CopyFault, match="2-D tensor map needs 2 coordinates"):
        load_box(rig, matrix(rig.src), 0, 0, 0)


def test_a_box_narrower_than_its_swizzle_is_refused(rig: Rig) -> None:
    with pytest.raises(Unsupported, match="inner box of 64 bytes narrower than the 128-byte swizzle"):
        load_box(rig, matrix(rig.src, box=[16, 8], swizzle="128B"), 0, 0)


def test_editing_a_map_in_memory_while_copies_use_it(rig: Rig) -> None:
    where = rig.memory.alloc(128)
    rig.memory.write(where, matrix(rig.src))
    load = rig.engine.tensor_load(ONE, ints(TILE), ints(where), ints(0, 0)[None], rig.key[:1])
    with pytest.raises(CopyFault, match=r"writes 8 bytes .* descriptor modified while 1 copies in flight"):
        rig.memory.store(ints(where + 16), np.zeros(1, np.uint64))
    load.perform(ONE)
    rig.memory.store(ints(where + 16), np.zeros(1, np.uint64))
    with pytest.raises(CopyFault, match="edited by ordinary stores"):
        rig.engine.tensor_load(ONE, ints(TILE), ints(where), ints(0, 0)[None], rig.key[:1])


def test_a_map_in_memory_is_found_aligned_and_real(rig: Rig) -> None:
    where = rig.memory.alloc(256)
    rig.memory.fill(where, 256, 0)
    for bad, said in ((where + 32, "tensor map must be 64-byte aligned"), (where, "no tensor map lies here")):
        with pytest.raises(CopyFault, match=said):
            rig.engine.tensor_load(ONE, ints(TILE), ints(bad), ints(0, 0)[None], rig.key[:1])
    with pytest.raises(MemoryFault, match="tensor map of 128 bytes"):
        rig.engine.tensor_load(ONE, ints(TILE), ints(TILE), ints(0, 0)[None], rig.key[:1])


def test_tensor_stores_hold_their_source_and_destination(rig: Rig) -> None:
    rig.fill(TILE, 1024, 5)
    rig.memory.fill(rig.dst, 1 << 16, 0)
    store = store_box(rig, matrix(rig.dst), 32, 8)
    with pytest.raises(CopyFault, match=r"overwrites the source of the cp.async.bulk.tensor store"):
        rig.fill(TILE, 1)
    inside = rig.dst + 8 * 512 + 128
    with pytest.raises(CopyFault, match=r"coordinates \(32, 8\).* has yet to write"):
        rig.memory.load(ints(inside), 4)
    assert rig.memory.load(ints(inside + 128), 4).item() == 0  # beside the box, inside its envelope
    store.perform(ONE)
    rig.fill(TILE, 1)
    assert rig.memory.load(ints(inside), 1).item() == 5
