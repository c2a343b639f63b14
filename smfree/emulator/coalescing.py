"""What one warp-wide access costs: 32-byte sectors in global memory, wavefronts in shared memory.

Both are vectorised over many warps at once. ``warp_starts`` are the positions in ``addr`` where each warp's active
lanes begin (ascending, first is 0; the lanes of a warp are adjacent).
"""

from __future__ import annotations

import numpy as np


def sectors_per_warp(addr: np.ndarray, nbytes: int, warp_starts: np.ndarray) -> np.ndarray:
    """Distinct 32-byte sectors each warp touches -> int64[warps]. ``nbytes`` per lane."""
    raise NotImplementedError


def wavefronts_per_warp(addr: np.ndarray, nbytes: int, warp_starts: np.ndarray, lane_id: np.ndarray | None = None) -> np.ndarray:
    """Shared-memory wavefronts of each warp -> int64[warps] (1 = free of conflicts up to 4 bytes per lane).

    32 banks of 4 bytes; lanes that read the same word share it; 8-byte accesses go per half-warp, 16-byte ones
    per quarter-warp (the parts are found from ``lane_id``, or from position when all 32 lanes are active).
    """
    raise NotImplementedError
