"""Tensor maps: encode with every rule of cuTensorMapEncodeTiled, decode, and the addresses of a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

MAP_BYTES = 128


class DataType(IntEnum):
    """Values equal CUtensorMapDataType."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12


class Swizzle(IntEnum):
    """Values equal CUtensorMapSwizzle."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A decoded map. Dimension 0 is the innermost; ``strides[d]`` is in bytes, strides[0] = element size."""

    data_type: DataType
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: Swizzle
    fill_nan: bool

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        raise NotImplementedError

    @property
    def shared_box(self) -> tuple[int, ...]:
        """Elements per dimension that one copy places in shared memory: ceil(box / element stride)."""
        raise NotImplementedError

    @property
    def box_bytes(self) -> int:
        """Bytes in shared memory of one box = bytes that complete_tx counts, filled ones included."""
        raise NotImplementedError


def encode(
    data_type: int | str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    *,
    interleave: int | str = 0,
    swizzle: int | str = 0,
    l2_promotion: int | str = 0,
    oob_fill: int | str = 0,
    map_address: int | None = None,
) -> bytes:
    """128 bytes. ``strides`` has rank-1 entries in bytes (dimension 1 on), as the driver takes them.

    Enums come by number or by name without prefix ("FLOAT32", "128B", "NONE"). Raises CopyFault, one rule each.
    """
    raise NotImplementedError


def decode(data: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
    """128 bytes -> map; CopyFault when they were not made by :func:`encode` (or were damaged)."""
    raise NotImplementedError


def swizzle(addr: np.ndarray, mode: Swizzle) -> np.ndarray:
    """Absolute shared byte addresses -> where the swizzle puts them."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BoxRows:
    """n boxes as rows of contiguous inner bytes. ``row_bytes`` per row; R rows per box.

    global_addr int64[n, R] (of the first element, may lie outside the tensor), valid bool[n, R] (outer
    coordinates inside), lo/hi int64[n, R]: valid byte range [lo, hi) inside the row.
    """

    row_bytes: int
    global_addr: np.ndarray
    valid: np.ndarray
    lo: np.ndarray
    hi: np.ndarray


def box_rows(tensor: TensorMap, coords: np.ndarray) -> BoxRows:
    """Rows of the boxes at ``coords`` (int64[n, rank], innermost first)."""
    raise NotImplementedError
