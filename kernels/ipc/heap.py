"""Which bytes of a slab are free: first fit, whole holes joined again. Offsets only, no memory.

Every rank runs the same calls on a heap of the same size, so every rank gets the same offsets: that is what
makes memory symmetric, without a word between the ranks.
"""

from __future__ import annotations

from bisect import bisect_left

from kernels.ipc.errors import PoolError

ALIGNMENT_BYTES = 256
"""Of every offset: what cuMemAlloc itself gives, and above the 128 bytes of a line and of a tensor map."""


class Heap:
    """``nbytes`` bytes, all free."""

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
