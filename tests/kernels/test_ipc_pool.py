"""The pool: offsets by first fit, tickets that go stale, slabs that are opened once. No device takes part."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kernels.ipc.errors import PoolError
from kernels.ipc.pool import ALIGNMENT_BYTES, Block, Heap, Pool
from kernels.ipc.slabs import Backing, Slabs

UNIT = ALIGNMENT_BYTES


class Makes:
    """Makes slabs without memory, and remembers what became of them."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.sizes: list[int] = []
        self.closed: list[int] = []
        self.pause_s = pause_s

    def __call__(self, nbytes: int) -> Slabs:
        number = len(self.sizes)
        self.sizes.append(nbytes)
        start = time.perf_counter()
        time.sleep(self.pause_s)
        slabs = Slabs(nbytes, Backing.PEER, "a test")
        slabs.open_seconds = time.perf_counter() - start
        slabs.undo.append(lambda: self.closed.append(number))
        return slabs


def test_offsets_are_those_of_a_first_fit_by_brute_force() -> None:
    """2000 random calls against a map of all units: the same offsets, holes and largest hole."""
    units, order = 64, random.Random(4)
    heap, used = Heap(units * UNIT), np.zeros(units, bool)
    live: list[tuple[int, int]] = []
    for _ in range(2000):
        if live and order.random() < 0.5:
            offset, nbytes = live.pop(order.randrange(len(live)))
            heap.give(offset, nbytes)
            used[offset // UNIT : offset // UNIT + max(1, -(-nbytes // UNIT))] = False
        else:
            nbytes = order.randrange(0, 12 * UNIT)
            count = max(1, -(-nbytes // UNIT))
            fits = [at for at in range(units - count + 1) if not used[at : at + count].any()]
            offset = heap.take(nbytes)
            assert offset == (fits[0] * UNIT if fits else None)
            if offset is not None:
                used[fits[0] : fits[0] + count] = True
                live.append((offset, nbytes))
        runs = "".join("x" if unit else "." for unit in used).split("x")
        assert heap.free_bytes == UNIT * int((~used).sum())
        assert heap.largest_hole_bytes == UNIT * max(map(len, runs))


def test_a_heap_takes_back_a_range_once() -> None:
    heap = Heap(4 * UNIT)
    first, second = heap.take(UNIT), heap.take(2 * UNIT)
    assert (first, second) == (0, UNIT)
    heap.give(UNIT, 2 * UNIT)
    with pytest.raises(PoolError, match=r"bytes 256 to 768 are free in part; give back each range once"):
        heap.give(UNIT, 2 * UNIT)
    heap.give(0, UNIT)
    assert heap.largest_hole_bytes == 4 * UNIT


def test_ten_thousand_allocations_leave_one_hole_and_open_nothing() -> None:
    makes, order = Makes(), random.Random(7)
    pool = Pool(1 << 16, makes)
    live: list[Block] = []
    for number in range(10_000):
        if len(live) > 20 or (live and order.random() < 0.4):
            pool.free(live.pop(order.randrange(len(live))))
        block = pool.allocate(order.randrange(0, 2000), f"buffer {number}")
        assert block.offset % 256 == 0
        live.append(block)
    assert makes.sizes == [1 << 16]
    assert set(pool.live) == set(live)
    for block in live:
        pool.free(block)
    assert pool.live == () and pool.free_bytes == pool.nbytes == 1 << 16
    assert pool.allocate(1 << 16, "all of it").offset == 0


def test_every_pool_of_a_size_gives_the_same_offsets() -> None:
    """What makes memory symmetric: the calls alone decide."""
    offsets = []
    for _ in range(2):
        pool, found = Pool(1 << 15, Makes()), []
        first = pool.allocate(1000, "a")
        found += [first.offset, pool.allocate(5000, "b").offset]
        pool.free(first)
        found += [pool.allocate(1025, "c").offset, pool.allocate(1024, "d").offset]
        offsets.append(found)
    assert offsets[0] == offsets[1] == [0, 1024, 6144, 0]


def test_a_freed_block_is_refused_and_its_successor_named() -> None:
    pool = Pool(1 << 12, Makes())
    old = pool.allocate(512, "old")
    pool.check(old)
    pool.free(old)
    with pytest.raises(
        PoolError, match=r"'old' \(512 bytes, allocation 1\) was freed; allocate a new buffer"
    ):
        pool.check(old)
    new = pool.allocate(100, "new")
    assert new.offset == old.offset
    stale = r"'old' .* was freed; 'new' \(100 bytes, allocation 2\) lies there now; allocate a new buffer"
    with pytest.raises(PoolError, match=stale):
        pool.check(old)
    with pytest.raises(PoolError, match=stale):
        pool.free(old)
    pool.check(new)


def test_a_block_of_another_group_is_refused() -> None:
    mine, other = Pool(1 << 12, Makes()), Pool(1 << 12, Makes())
    block = other.allocate(64, "theirs")
    with pytest.raises(PoolError, match=r"'theirs' .* belongs to another group's pool"):
        mine.free(block)
    assert other.live == (block,)
    other.free(block)


def test_too_large_a_buffer_is_told_what_is_free_and_the_largest_hole() -> None:
    pool = Pool(4 * UNIT, Makes())
    blocks = [pool.allocate(UNIT, str(number)) for number in range(4)]
    pool.free(blocks[0])
    pool.free(blocks[2])
    with pytest.raises(PoolError) as refused:
        pool.allocate(UNIT + 1, "wide")
    assert (
        "no 257 bytes in one piece for 'wide' (of 1024 bytes 512 are free, 256 in the largest hole)"
        in str(refused.value)
    )
    pool.free(blocks[1])
    assert pool.allocate(UNIT + 1, "wide").offset == 0


def test_a_size_is_not_negative() -> None:
    with pytest.raises(PoolError, match=r"'x' has no negative size \(got -1\)"):
        Pool(1 << 12, Makes()).allocate(-1, "x")


def test_growing_adds_a_slab_and_moves_nothing() -> None:
    makes = Makes()
    pool = Pool(UNIT, makes)
    first = pool.allocate(UNIT, "first")
    pool.grow(8 * UNIT)
    second = pool.allocate(2 * UNIT, "second")
    assert makes.sizes == [UNIT, 8 * UNIT]
    assert [(block.slab, block.offset) for block in (first, second)] == [(0, 0), (1, 0)]
    assert pool.nbytes == 9 * UNIT
    pool.close()
    assert makes.closed == [1, 0]


def test_d35_opening_is_timed_and_happens_once() -> None:
    """D35: with a driver that takes 20 ms to open a slab, a thousand buffers do not."""
    makes = Makes(pause_s=0.02)
    pool = Pool(1 << 16, makes)
    start = time.perf_counter()
    for _ in range(1000):
        pool.free(pool.allocate(4096, "buffer"))
    assert time.perf_counter() - start < 1.0
    assert makes.sizes == [1 << 16]
    assert 0.02 <= pool.open_seconds < 1.0


def test_a_closed_pool_has_no_live_block() -> None:
    pool = Pool(1 << 12, Makes())
    block = pool.allocate(8, "x")
    pool.close()
    pool.close()
    for use in (lambda: pool.check(block), lambda: pool.allocate(8, "y"), lambda: pool.grow(8)):
        with pytest.raises(PoolError, match=r"the pool was closed with its group; make a new group"):
            use()
