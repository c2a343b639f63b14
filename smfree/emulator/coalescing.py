"""What one warp-wide access costs: 32-byte sectors in global memory, wavefronts in shared memory.

Vectorised over many warps at once. The active lanes of a warp are adjacent in ``addr``; ``warp_starts`` are
the positions where each warp begins (ascending, the first is 0).
"""

from __future__ import annotations

import numpy as np

from smfree.emulator.specs import WARP_SIZE

BANKS = 32
BANK_BYTES = 4
_KEY_BITS = 46


def sectors_per_warp(addr: np.ndarray, nbytes: int, warp_starts: np.ndarray) -> np.ndarray:
    """Distinct 32-byte sectors that each warp touches -> int64[warps].

    ``addr`` int64[n], naturally aligned accesses of ``nbytes`` (1..32) per lane.
    """
    warps = len(warp_starts)
    if not warps:
        return np.zeros(0, np.int64)
    sector = addr >> 5
    if len(addr) == warps * WARP_SIZE:
        grid = sector.reshape(warps, WARP_SIZE)
        shape = grid - grid[:, :1]
        if (shape == shape[0]).all():
            return np.full(warps, len(np.unique(shape[0])), np.int64)
    first = np.zeros(len(addr), bool)
    first[warp_starts] = True
    step = np.empty_like(sector)
    step[0] = 0
    np.subtract(sector[1:], sector[:-1], out=step[1:])
    if not (first | (step >= 0)).all():
        owner = np.cumsum(first) << _KEY_BITS
        ordered = np.sort(owner | (sector & ((1 << _KEY_BITS) - 1)))
        step[1:] = ordered[1:] != ordered[:-1]
    return np.add.reduceat((first | (step != 0)).astype(np.int64), warp_starts)


def wavefronts_per_warp(
    addr: np.ndarray, nbytes: int, warp_starts: np.ndarray, lane_id: np.ndarray | None = None
) -> np.ndarray:
    """Shared-memory wavefronts of each warp -> int64[warps].

    32 banks of 4 bytes; lanes on the same word share it, two words of one bank take two wavefronts. An
    access of 8 bytes per lane goes per half-warp, one of 16 per quarter-warp: a full warp without conflicts
    takes 1, 2 or 4. The parts follow ``lane_id`` (0..31), or the position in the warp when that is not given.
    ``addr`` may be flat over CTAs when their pitch is a multiple of 128 bytes.
    """
    warps = len(warp_starts)
    if not warps:
        return np.zeros(0, np.int64)
    words = parts = max(1, nbytes // BANK_BYTES)
    lanes = WARP_SIZE // parts
    word = addr >> 2
    if len(addr) == warps * WARP_SIZE:
        grid = word.reshape(warps * parts, lanes)
        cost = _conflicts(grid, words)
        if isinstance(cost, int):
            return np.full(warps, parts * cost)
        return cost.reshape(warps, parts).sum(axis=1)
    lengths = np.diff(warp_starts, append=len(addr))
    if lane_id is None:
        lane_id = np.arange(len(addr)) - np.repeat(warp_starts, lengths)
    row = np.repeat(np.arange(warps) * parts, lengths) + lane_id // lanes
    some, used = np.zeros(warps * parts, np.int64), np.zeros(warps * parts, bool)
    some[row], used[row] = word, True
    # Idle lanes repeat a word of their part, which costs nothing.
    grid = np.repeat(some[:, None], lanes, axis=1)
    grid[row, lane_id % lanes] = word
    cost = _conflicts(grid[used], words)
    out = np.zeros(warps * parts, np.int64)
    out[used] = cost
    return out.reshape(warps, parts).sum(axis=1)


def _conflicts(grid: np.ndarray, words: int) -> np.ndarray | int:
    """Wavefronts of each row of first words (``words`` per lane); an int when all rows look alike."""
    shape = grid - grid[:, :1]
    if (shape == shape[0]).all():
        # Moving a row as a whole rotates its banks: one row answers for all.
        if (shape[0, 1:] - shape[0, :-1] == words).all():
            return 1
        grid = grid[:1]
        return int(_count(grid, words)[0])
    return _count(grid, words)


def _count(grid: np.ndarray, words: int) -> np.ndarray:
    rows = len(grid)
    if words > 1:
        grid = (grid[:, :, None] + np.arange(words)).reshape(rows, -1)
    ordered = np.sort(grid, axis=1)
    fresh = np.ones(ordered.shape, bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=fresh[:, 1:])
    bank = (ordered & (BANKS - 1)) + np.arange(rows)[:, None] * BANKS
    return np.bincount(bank[fresh], minlength=rows * BANKS).reshape(rows, BANKS).max(axis=1)
