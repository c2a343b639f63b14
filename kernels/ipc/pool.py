"""Symmetric memory in slabs that the peers open once; a buffer is an offset (cases D01, D08, D35).

Opening a peer's memory costs up to a millisecond and grows with its size, so it happens when a slab is made,
never for a buffer: ``open_seconds`` says what it took. Buffers come from the slab's heap. Every rank makes
the same calls on a heap of the same size and so gets the same offsets, without a word between the ranks. That
is why buffers are freed by name, not by the garbage collector.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from kernels.common import check_whole
from kernels.ipc.errors import PoolError
from kernels.ipc.slabs import Slabs

ALIGNMENT_BYTES = 256
"""Of every offset: what cuMemAlloc itself gives, and above the 128 bytes of a line and of a tensor map."""


class Heap:
    """Which of ``nbytes`` bytes are free: first fit, whole holes joined again. Offsets only, no memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._holes: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes."""
        return sum(end - start for start, end in self._holes)

    @property
    def largest_hole_bytes(self) -> int:
        """Bytes in the largest hole: what :meth:`take` can give at most."""
        return max((end - start for start, end in self._holes), default=0)

    def take(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` bytes in the first hole that holds them; None when none does. Zero bytes take
        room, too, so that two buffers never share an offset."""
        size = rounded(nbytes)
        for i, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take back what :meth:`take` gave for ``nbytes``. Raises PoolError when part of it is free."""
        start, end = offset, offset + rounded(nbytes)
        i = bisect_left(self._holes, (start, end))
        before = self._holes[i - 1] if i else (0, 0)
        after = self._holes[i] if i < len(self._holes) else (self.nbytes, self.nbytes)
        if before[1] > start or after[0] < end:
            raise PoolError(f"bytes {start} to {end} are free in part; give back each range once")
        low, high = i, i
        if i and before[1] == start:
            start, low = before[0], i - 1
        if i < len(self._holes) and after[0] == end:
            end, high = after[1], i + 1
        self._holes[low:high] = [(start, end)]


def rounded(nbytes: int) -> int:
    """What a buffer of ``nbytes`` takes."""
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


@dataclass(frozen=True, eq=False)
class Block:
    """``nbytes`` bytes at ``offset`` of slab ``slab`` of a pool: a ticket, valid until it is freed.

    ``serial`` counts the pool's allocations, so that a ticket of freed memory is told from its successor's.
    """

    pool: Pool = field(repr=False)
    serial: int
    slab: int
    offset: int
    nbytes: int
    label: str

    def __str__(self) -> str:
        return f"'{self.label}' ({self.nbytes} bytes, allocation {self.serial})"


class Pool:
    """The memory of one group, on every rank alike.

    ``make`` makes the slabs of all local ranks for a size in bytes, together with the peers.
    """

    def __init__(self, nbytes: int, make: Callable[[int], Slabs]) -> None:
        self._make = make
        self._slabs: list[Slabs] = []
        self._heaps: list[Heap] = []
        self._live: dict[int, Block] = {}
        self._serial = 0
        self._closed = False
        self.grow(nbytes)

    @property
    def backing(self) -> str:
        """How the memory is shared, and why so."""
        return f"{self._slabs[0].backing}: {self._slabs[0].reason}" if self._slabs else "closed"

    @property
    def direct_reason(self) -> str | None:
        """Why the peers' slabs cannot be used; None when they can."""
        return self._slabs[0].direct_reason if self._slabs else "the pool is closed"

    @property
    def multicast_reason(self) -> str | None:
        """Why the first slab has no multicast address; None when it has."""
        return self._slabs[0].multicast_reason if self._slabs else "the pool is closed"

    @property
    def open_seconds(self) -> float:
        """Wall time that making and opening all slabs took, peers included."""
        return sum(slabs.open_seconds for slabs in self._slabs)

    @property
    def nbytes(self) -> int:
        """Size of all slabs of one rank."""
        return sum(heap.nbytes for heap in self._heaps)

    @property
    def free_bytes(self) -> int:
        """Bytes in holes, of one rank."""
        return sum(heap.free_bytes for heap in self._heaps)

    @property
    def live(self) -> tuple[Block, ...]:
        """What is allocated, oldest first."""
        return tuple(self._live.values())

    def grow(self, nbytes: int) -> None:
        """Add a slab of ``nbytes``, on all ranks together: the only other time at which memory is opened."""
        self._check_open()
        size = check_whole("nbytes", nbytes)
        if size <= 0:
            raise PoolError(f"a slab has at least one byte (got {size}); ask for what the buffers need")
        slabs = self._make(size)
        self._slabs.append(slabs)
        self._heaps.append(Heap(slabs.nbytes))

    def allocate(self, nbytes: int, label: str) -> Block:
        """A block of ``nbytes``, its offset a multiple of 256. Raises PoolError with what is free."""
        self._check_open()
        size = check_whole("nbytes", nbytes)
        if size < 0:
            raise PoolError(f"'{label}' has no negative size (got {size}); use 0 or more bytes")
        for number, heap in enumerate(self._heaps):
            offset = heap.take(size)
            if offset is not None:
                self._serial += 1
                block = self._live[self._serial] = Block(self, self._serial, number, offset, size, label)
                return block
        hole = max(heap.largest_hole_bytes for heap in self._heaps)
        raise PoolError(
            f"the pool has no {size} bytes in one piece for '{label}' (of {self.nbytes} bytes "
            f"{self.free_bytes} are free, {hole} in the largest hole); free buffers, make the group with "
            "more pool_bytes, or pool.grow() on all ranks"
        )

    def free(self, block: Block) -> None:
        """Give a block back; its ticket is stale from now on. Raises PoolError for one that is not live."""
        self.check(block)
        del self._live[block.serial]
        self._heaps[block.slab].give(block.offset, block.nbytes)

    def check(self, block: Block) -> Slabs:
        """The slabs that a live block of this pool lies in. Raises PoolError for a stale or foreign one."""
        if not isinstance(block, Block) or block.pool is not self:
            raise PoolError(f"{block} belongs to another group's pool; use the group that allocated it")
        self._check_open()
        if self._live.get(block.serial) is not block:
            now = [other for other in self._live.values() if _overlap(other, block)]
            holder = f"; {now[0]} lies there now" if now else ""
            raise PoolError(f"{block} was freed{holder}; allocate a new buffer")
        return self._slabs[block.slab]

    def close(self) -> None:
        """Close what was opened and free what was allocated; every block is stale. Twice is fine."""
        self._closed = True
        self._live.clear()
        while self._slabs:
            self._slabs.pop().close()
        self._heaps.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("the pool was closed with its group; make a new group")


def _overlap(a: Block, b: Block) -> bool:
    return (
        a.slab == b.slab and a.offset < b.offset + max(1, b.nbytes) and b.offset < a.offset + max(1, a.nbytes)
    )
