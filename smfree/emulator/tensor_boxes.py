"""Where the bytes of a box lie: rows in global memory, swizzled granules in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smfree.emulator.bytespace import signed
from smfree.emulator.errors import Unsupported
from smfree.emulator.tensor_types import SWIZZLE_XOR, Swizzle
from smfree.emulator.tensormap import TensorMap


def swizzle(addr: np.ndarray, mode: Swizzle) -> np.ndarray:
    """Absolute shared byte addresses -> where the swizzle puts their bytes (its own inverse)."""
    if mode is Swizzle.NONE:
        return addr
    if mode not in SWIZZLE_XOR:
        raise Unsupported(f"swizzle {Swizzle(mode).name} is not modelled", rule="tensormap")
    shift, mask = SWIZZLE_XOR[mode]
    return addr ^ ((addr >> shift) & mask)


@dataclass(frozen=True, slots=True)
class BoxRows:
    """n boxes of R rows of ``row_bytes`` contiguous bytes.

    ``addr`` int64[n, R]: global address of the row's first byte, possibly outside the tensor; ``inside``
    bool[n, R]: the outer coordinates lie in the tensor; ``lo``, ``hi`` int64[n]: the part [lo, hi) of each
    row, in bytes, that does (lo == hi: none).
    """

    addr: np.ndarray
    inside: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    row_bytes: int

    @property
    def whole(self) -> bool:
        """Nothing is out of bounds."""
        return bool(self.inside.all() and (self.lo == 0).all() and (self.hi == self.row_bytes).all())


def box_rows(tensor: TensorMap, coords: np.ndarray) -> BoxRows:
    """Rows of the boxes that start at ``coords`` (int64[n, rank], innermost first)."""
    element = tensor.element_bytes
    first = coords[:, 0]
    lo = np.clip(-first, 0, tensor.box[0]) * element
    hi = np.maximum(np.clip(tensor.dims[0] - first, 0, tensor.box[0]) * element, lo)
    start = signed(tensor.address) + coords @ np.array(tensor.strides, np.int64)
    steps, offsets = tensor._row_steps
    addr = start[:, None] + offsets
    inside = np.ones(addr.shape, bool)
    for d in range(1, tensor.rank):
        if (coords[:, d] < 0).any() or (coords[:, d] + tensor.box[d] > tensor.dims[d]).any():
            at = coords[:, d, None] + steps[:, d - 1]
            inside &= (at >= 0) & (at < tensor.dims[d])
    return BoxRows(addr, inside, lo, hi, tensor.row_bytes)
