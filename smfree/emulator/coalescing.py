"""What one warp-wide access costs: 32-byte sectors in global memory, wavefronts in shared memory.

Vectorised over many warps at once. The active lanes of a warp are adjacent in ``addr``; ``warp_starts`` are the
positions where each warp begins (ascending, the first is 0).
"""

from __future__ import annotations

import numpy as np

SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4
WARP_LANES = 32
_KEY_BITS = 46


def sectors_per_warp(addr: np.ndarray, nbytes: int, warp_starts: np.ndarray) -> np.ndarray:
    """Distinct 32-byte sectors that each warp touches -> int64[warps].

    ``addr`` int64[n], naturally aligned accesses of ``nbytes`` (1..32) per lane.
    """
    warps = len(warp_starts)
    if not warps:
        return np.zeros(0, np.int64)
    sector = addr >> 5
    if len(addr) == warps * WARP_LANES:
        grid = sector.reshape(warps, WARP_LANES)
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

    32 banks of 4 bytes; lanes on the same word share it, two words of one bank take two wavefronts. An access of 8
    bytes per lane goes per half-warp, one of 16 per quarter-warp, so a full warp without conflicts takes 1, 2 or 4.
    The parts follow ``lane_id`` (0..31), or the position in the warp when that is not given. ``addr`` may be flat
    over CTAs when their pitch is a multiple of 128 bytes.
    """
    warps = len(warp_starts)
    if not warps:
        return np.zeros(0, np.int64)
    parts = max(1, nbytes // BANK_BYTES)
    words = max(1, nbytes // BANK_BYTES)
    if len(addr) == warps * WARP_LANES:
        grid = addr.reshape(warps, WARP_LANES)
        shape = grid - grid[:, :1]
        same = bool((shape == shape[0]).all())
        if same and (
            nbytes >= BANK_BYTES or bool((grid[:, 0] % BANK_BYTES == grid[0, 0] % BANK_BYTES).all())
        ):
            # Moving a warp as a whole rotates its banks: one warp answers for all.
            step = int(shape[0, 1])
            if step == nbytes and bool((np.diff(shape[0]) == step).all()):
                return np.full(warps, parts, np.int64)
            one = _wavefronts(grid[0], words, np.zeros(1, np.int64), np.arange(WARP_LANES), parts)
            return np.full(warps, one[0], np.int64)
    if lane_id is None:
        lane_id = np.arange(len(addr)) - np.repeat(warp_starts, np.diff(warp_starts, append=len(addr)))
    return _wavefronts(addr, words, warp_starts, lane_id, parts)


def _wavefronts(
    addr: np.ndarray, words: int, warp_starts: np.ndarray, lane_id: np.ndarray, parts: int
) -> np.ndarray:
    warps = len(warp_starts)
    lengths = np.diff(warp_starts, append=len(addr))
    owner = np.repeat(np.arange(warps), lengths) * parts + lane_id // (WARP_LANES // parts)
    word = (addr >> 2)[:, None] + np.arange(words)
    keys = np.unique(((owner << _KEY_BITS)[:, None] | word).reshape(-1))
    bank = (keys >> _KEY_BITS) * BANKS + (keys & (BANKS - 1))
    count = np.bincount(bank, minlength=warps * parts * BANKS).reshape(warps * parts, BANKS)
    return count.max(axis=1).reshape(warps, parts).sum(axis=1)
