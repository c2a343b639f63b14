"""Which lines of global memory are in the emulated L2."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smfree.emulator.allocations import Reserve
from smfree.emulator.profile import Profile
from smfree.emulator.specs import LINE_BYTES


class L2:
    """First in, first out by bytes, whole 128-byte lines, one partition.

    A line stays resident until ``l2.usable_fraction`` of the L2's size in other lines has been filled after
    it. Reads and writes both fill. The state lasts over launches; :meth:`flush` empties it.
    """

    def __init__(self, profile: Profile, arena_lines: int) -> None:
        self.capacity_lines = max(1, int(profile.device.l2_bytes * profile.l2.usable_fraction) // LINE_BYTES)
        self._piece = max(1, self.capacity_lines // 4)
        self._filled = self.capacity_lines  # lines filled so far; starts so that 0 means "never"
        self._fill_at = Reserve(8 * arena_lines).bytes.view(np.int64)

    def touch(self, line_ids: NDArray[np.int64], write: bool) -> NDArray[np.bool_]:
        """Access lines in order and return which were resident (length n).

        ``line_ids`` are line numbers inside the arena (address offset // 128); of several accesses to one
        line that was absent, the first misses and the others hit. ``write`` makes no difference to
        residency: a written line that misses is filled without being read, and its bytes are charged to DRAM
        as a write at once (docs/counting.md, "Cache state"). A call is decided in pieces of a quarter of the
        capacity: lines that a piece pushes out still count as resident for the rest of that piece.
        """
        n = len(line_ids)
        if n > self._piece:
            parts = [line_ids[i : i + self._piece] for i in range(0, n, self._piece)]
            return np.concatenate([self.touch(part, write) for part in parts])
        if (
            n
            and line_ids[-1] - line_ids[0] == n - 1
            and (n < 3 or bool((line_ids[1:] > line_ids[:-1]).all()))
        ):
            where: NDArray[np.int64] | slice = slice(int(line_ids[0]), int(line_ids[-1]) + 1)
            last, distinct = int(line_ids[-1]), True
        else:
            where, last, distinct = line_ids, int(line_ids.max(initial=-1)), False
        if last >= len(self._fill_at):
            raise IndexError(f"line {last} is outside the arena of {len(self._fill_at)} lines")
        hit = self._filled - self._fill_at[where] < self.capacity_lines
        if hit.all():
            return hit
        missing = line_ids[~hit]
        if not distinct:
            # Written backwards, the first of several accesses to one line leaves its mark.
            mark = self._filled + 1 + np.arange(len(missing))
            self._fill_at[missing[::-1]] = mark[::-1]
            first = self._fill_at[missing] == mark
            if not first.all():
                hit[np.flatnonzero(~hit)[~first]] = True
                missing = missing[first]
        self._fill_at[missing] = self._filled + 1 + np.arange(len(missing))
        self._filled += len(missing)
        return hit

    def flush(self) -> None:
        """Nothing is resident any more."""
        self._filled += self.capacity_lines
