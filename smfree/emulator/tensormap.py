"""Tensor maps: encode with every rule of cuTensorMapEncodeTiled, decode, and the rows of a box.

The 128 bytes are our own layout (hardware's is not public): magic, fields, CRC. Modelled: rank 1..5, tiled,
no interleave, element strides from dimension 1 on, fill with zero or NaN, swizzles 32B, 64B, 128B and 128B
with atoms of 32 and 64 bytes. Everything else is refused by name.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np

from smfree.emulator.errors import CopyFault, Unsupported
from smfree.emulator.tensor_types import (
    ELEMENT_BYTES,
    FLOATS,
    NAN_WORD,
    SHARED_ALIGNMENT,
    SWIZZLE_PERIOD,
    SWIZZLE_SPAN,
    SWIZZLE_XOR,
    DataType,
    Interleave,
    L2Promotion,
    OutOfBoundsFill,
    Swizzle,
)

__all__ = [
    "ELEMENT_BYTES",
    "MAP_BYTES",
    "SHARED_ALIGNMENT",
    "SWIZZLE_PERIOD",
    "SWIZZLE_SPAN",
    "BoxRows",
    "DataType",
    "Interleave",
    "L2Promotion",
    "OutOfBoundsFill",
    "Swizzle",
    "TensorMap",
    "box_rows",
    "decode",
    "encode",
    "replace_address",
    "swizzle",
]

MAP_BYTES = 128
_MAGIC = b"SMFTMAP\x01"
# magic, type, rank, swizzle, interleave, promotion, fill, pad, address, dims - 1, strides, boxes, element
# strides
_LAYOUT = struct.Struct("<8s6B2xQ5I4Q5H5B")
_MAX_RANK = 5


_Enum = TypeVar("_Enum", bound=IntEnum)


@dataclass(frozen=True)
class TensorMap:
    """A decoded map. Dimension 0 is the innermost; ``strides[d]`` in bytes, ``strides[0]`` the element
    size."""

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
        return ELEMENT_BYTES[self.data_type]

    @cached_property
    def shared_box(self) -> tuple[int, ...]:
        """Elements per dimension that one copy places in shared memory: ceil(box / element stride)."""
        outer = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-b // s) for b, s in outer))

    @cached_property
    def row_bytes(self) -> int:
        return self.box[0] * self.element_bytes

    @cached_property
    def rows(self) -> int:
        """Rows of ``row_bytes`` in one box."""
        return int(np.prod(self.shared_box[1:], dtype=np.int64))

    @property
    def box_bytes(self) -> int:
        """Shared bytes of one box = what complete_tx counts, filled elements included."""
        return self.row_bytes * self.rows

    @property
    def fill_word(self) -> bytes:
        """One element of the out-of-bounds fill."""
        if not self.fill_nan:
            return bytes(self.element_bytes)
        return NAN_WORD.get(self.data_type, b"\xff\xff\xff\x7f")

    @cached_property
    def _row_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Per row of the box: element offsets [R, rank - 1] in the outer dimensions, byte offsets [R]."""
        if self.rank == 1:
            return np.zeros((1, 0), np.int64), np.zeros(1, np.int64)
        grids = np.indices(self.shared_box[:0:-1]).reshape(self.rank - 1, -1)[::-1]
        steps = grids.T * np.array(self.element_strides[1:], np.int64)
        return steps, steps @ np.array(self.strides[1:], np.int64)

    @cached_property
    def end(self) -> int:
        """One past the last byte of the tensor."""
        span = sum((d - 1) * s for d, s in zip(self.dims, self.strides, strict=True))
        return self.address + span + self.element_bytes

    def __str__(self) -> str:
        return (
            f"{self.rank}-D {self.data_type.name} tensor at 0x{self.address:x}, dims {self.dims}, "
            f"box {self.box}, swizzle {self.swizzle.name}"
        )


def _refuse(rule: str, value: str, remedy: str) -> CopyFault:
    return CopyFault(f"cuTensorMapEncodeTiled: {value}; {remedy}", rule=f"tensormap.{rule}")


def _enum(kind: type[_Enum], value: int | str, what: str) -> _Enum:
    try:
        if not isinstance(value, str):
            return kind(int(value))
        name = value.upper().rpartition("SWIZZLE_")[2].rpartition("DATA_TYPE_")[2].rpartition("FILL_")[2]
        for key in (name, f"B{name}", f"B{name.removesuffix('B')}", name.replace("128B_", "B128_", 1)):
            if key in kind.__members__:
                return kind[key]
    except ValueError:
        pass
    known = ", ".join(kind.__members__)
    raise _refuse(what.replace(" ", "_"), f"unknown {what} {value!r}", f"use one of {known}")


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
    """128 bytes, after checking every rule of cuTensorMapEncodeTiled (CopyFault: rule, value, remedy).

    ``dims``, ``box``, ``element_strides`` have rank entries, innermost first; ``strides`` rank - 1, in bytes,
    from dimension 1 on, as the driver takes them. Enums by number or by name ("FLOAT32", "128B").
    ``map_address`` is where the map will be stored.
    """
    kind = _enum(DataType, data_type, "data type")
    swz = _enum(Swizzle, swizzle, "swizzle")
    inter = _enum(Interleave, interleave, "interleave")
    promotion = _enum(L2Promotion, l2_promotion, "L2 promotion")
    fill = _enum(OutOfBoundsFill, oob_fill, "out-of-bounds fill")
    rank = len(dims)
    if map_address is not None and map_address % 64:
        raise _refuse(
            "map_alignment", f"the map must be 64-byte aligned (got 0x{map_address:x})", "align its buffer"
        )
    if not 1 <= rank <= _MAX_RANK:
        raise _refuse("rank", f"rank must be 1..5 (got {rank})", "merge or split dimensions")
    steps = tuple(element_strides) if element_strides is not None else (1,) * rank
    for name, given, wanted in (
        ("strides", strides, rank - 1),
        ("box", box, rank),
        ("element strides", steps, rank),
    ):
        if len(given) != wanted:
            raise _refuse(
                "rank", f"rank {rank} needs {wanted} {name} (got {len(given)})", "give one per dimension"
            )
    _check_memory(kind, inter, address, dims, strides)
    _check_box(kind, inter, swz, box, steps)
    if inter is not Interleave.NONE:
        if rank < 3:
            raise _refuse(
                "rank", f"interleaved layouts need rank 3 or more (got {rank})", "use interleave NONE"
            )
        if inter is Interleave.B32 and swz is not Swizzle.B32:
            raise _refuse("swizzle", f"interleave 32B needs swizzle 32B (got {swz.name})", "set swizzle 32B")
    if fill is OutOfBoundsFill.NAN_REQUEST_ZERO_FMA and kind not in FLOATS:
        raise _refuse("fill", f"NaN fill is for floating-point types (got {kind.name})", "use oob fill NONE")
    if inter is not Interleave.NONE:
        raise Unsupported(
            f"tensor maps with interleave {inter.name} are not modelled; use NONE", rule="tensormap"
        )
    if kind not in ELEMENT_BYTES:
        raise Unsupported(f"packed tensor type {kind.name} is not modelled", rule="tensormap")
    if swz not in SWIZZLE_PERIOD:
        raise Unsupported(f"swizzle {swz.name} is not modelled (its pattern is unverified)", rule="tensormap")
    pad = _MAX_RANK - rank
    body = _LAYOUT.pack(
        _MAGIC,
        kind,
        rank,
        swz,
        inter,
        promotion,
        fill,
        address,
        *(d - 1 for d in dims),
        *(0,) * pad,
        *strides,
        *(0,) * (4 - len(strides)),
        *box,
        *(0,) * pad,
        *steps,
        *(0,) * pad,
    )
    body = body.ljust(MAP_BYTES - 4, b"\0")
    return body + zlib.crc32(body).to_bytes(4, "little")


def _check_memory(
    kind: DataType, inter: Interleave, address: int, dims: Sequence[int], strides: Sequence[int]
) -> None:
    aligned = (
        32 if inter is Interleave.B32 or kind in (DataType.U4X16_ALIGN16B, DataType.U6X16_ALIGN16B) else 16
    )
    if address % aligned:
        raise _refuse(
            "address",
            f"the global address must be {aligned}-byte aligned (got 0x{address:x})",
            f"start the view at a multiple of {aligned} bytes",
        )
    for d, dim in enumerate(dims):
        if not 1 <= dim <= 1 << 32:
            raise _refuse(
                "dims", f"dimension {d} must be 1..2^32 (got {dim})", "an empty tensor needs no map"
            )
    for d, stride in enumerate(strides, start=1):
        if stride % aligned or not 0 <= stride < 1 << 40:
            raise _refuse(
                "strides",
                f"the stride of dimension {d} must be a multiple of {aligned} and below 2^40 bytes (got "
                f"{stride})",
                f"pad the rows to {-(-stride // aligned) * aligned} bytes",
            )


def _check_box(
    kind: DataType, inter: Interleave, swz: Swizzle, box: Sequence[int], steps: Sequence[int]
) -> None:
    for d, (extent, step) in enumerate(zip(box, steps, strict=True)):
        if not 1 <= extent <= 256:
            raise _refuse("box", f"box dimension {d} must be 1..256 elements (got {extent})", "split the box")
        if not 1 <= step <= 8:
            raise _refuse(
                "element_strides", f"element stride {d} must be 1..8 (got {step})", "use strides up to 8"
            )
    element = ELEMENT_BYTES.get(kind)
    if element is None or inter is not Interleave.NONE:
        return
    inner = box[0] * element
    if inner % 16:
        raise _refuse(
            "box",
            f"the inner box must be a multiple of 16 bytes (got {box[0]} x {element} = {inner})",
            f"use a multiple of {16 // element} elements",
        )
    span = SWIZZLE_SPAN.get(swz)
    if span is not None and inner > span:
        raise _refuse(
            "swizzle_span",
            f"the inner box of {inner} bytes exceeds the {span}-byte span of swizzle {swz.name}",
            f"use at most {span // element} elements in dimension 0, or several boxes",
        )


def decode(data: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
    """128 bytes -> map; CopyFault when they were not made by :func:`encode`, or were changed since."""
    raw = bytes(data)
    if len(raw) != MAP_BYTES or raw[:8] != _MAGIC:
        raise CopyFault(
            f"no tensor map lies here (first bytes {raw[:8].hex()}); pass a map from "
            "cuTensorMapEncodeTiled by value "
            "as a __grid_constant__ parameter, or its address in global memory",
            rule="tensormap.invalid",
        )
    if zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
        raise CopyFault(
            "the tensor map was edited by ordinary stores; use cuTensorMapReplaceAddress or "
            "tensormap.replace",
            rule="tensormap.damaged",
        )
    f = _LAYOUT.unpack(raw[: _LAYOUT.size])
    rank = f[2]
    return TensorMap(
        data_type=DataType(f[1]),
        address=f[7],
        dims=tuple(d + 1 for d in f[8 : 8 + rank]),
        strides=(ELEMENT_BYTES[DataType(f[1])], *f[13 : 13 + rank - 1]),
        box=f[17 : 17 + rank],
        element_strides=f[22 : 22 + rank],
        swizzle=Swizzle(f[3]),
        fill_nan=bool(f[6]),
    )


def replace_address(data: bytes | bytearray | memoryview | np.ndarray, address: int) -> bytes:
    """cuTensorMapReplaceAddress: the same map at another global address (16-byte aligned)."""
    decode(data)
    if address % 16:
        raise _refuse(
            "address", f"the global address must be 16-byte aligned (got 0x{address:x})", "align the view"
        )
    raw = bytearray(bytes(data))
    raw[16:24] = address.to_bytes(8, "little")
    return bytes(raw[:-4]) + zlib.crc32(raw[:-4]).to_bytes(4, "little")


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
    start = tensor.address + coords @ np.array(tensor.strides, np.int64)
    steps, offsets = tensor._row_steps
    addr = start[:, None] + offsets
    inside = np.ones(addr.shape, bool)
    for d in range(1, tensor.rank):
        if (coords[:, d] < 0).any() or (coords[:, d] + tensor.box[d] > tensor.dims[d]).any():
            at = coords[:, d, None] + steps[:, d - 1]
            inside &= (at >= 0) & (at < tensor.dims[d])
    return BoxRows(addr, inside, lo, hi, tensor.row_bytes)
