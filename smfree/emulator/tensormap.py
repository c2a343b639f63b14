"""Tensor maps: encode and decode with every rule of cuTensorMapEncodeTiled, replace one field.

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
from typing import Any, TypeVar

import numpy as np

from smfree.emulator.errors import CopyFault, Unsupported
from smfree.emulator.tensor_rules import check, refuse, speaking
from smfree.emulator.tensor_types import (
    ELEMENT_BYTES,
    NAN_WORD,
    PTX_TYPES,
    SHARED_ALIGNMENT,
    SWIZZLE_FIELDS,
    SWIZZLE_PERIOD,
    SWIZZLE_SPAN,
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
    "DataType",
    "Interleave",
    "L2Promotion",
    "OutOfBoundsFill",
    "Swizzle",
    "TensorMap",
    "decode",
    "encode",
    "replace",
]

MAP_BYTES = 128
_MAGIC = b"SMFTMAP\x01"
# magic, type, rank, swizzle mode, its atomicity, interleave, promotion, fill, pad, address, dims - 1,
# strides, boxes, element strides
_LAYOUT = struct.Struct("<8s7BxQ5I4Q5H5B")
MAX_RANK = 5


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
    def rows_overlap(self) -> bool:
        """Whether rows of one box share bytes: a stride of 0, or one below the extent inside it."""
        offsets = np.sort(self._row_steps[1])
        return bool((np.diff(offsets) < self.row_bytes).any())

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
    raise refuse(what.replace(" ", "_"), f"unknown {what} {value!r}", f"use one of {known}")


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
    with speaking("cuTensorMapEncodeTiled"):
        kind = _enum(DataType, data_type, "data type")
        swz = _enum(Swizzle, swizzle, "swizzle")
        inter = _enum(Interleave, interleave, "interleave")
        promotion = _enum(L2Promotion, l2_promotion, "L2 promotion")
        fill = _enum(OutOfBoundsFill, oob_fill, "out-of-bounds fill")
        rank = len(dims)
        if map_address is not None and map_address % 64:
            raise refuse(
                "map_alignment",
                f"the map must be 64-byte aligned (got 0x{map_address:x})",
                "align its buffer",
            )
        if not 1 <= rank <= MAX_RANK:
            raise refuse("rank", f"rank must be 1..5 (got {rank})", "merge or split dimensions")
        steps = tuple(element_strides) if element_strides is not None else (1,) * rank
        for name, given, wanted in (
            ("strides", strides, rank - 1),
            ("box", box, rank),
            ("element strides", steps, rank),
        ):
            if len(given) != wanted:
                raise refuse(
                    "rank", f"rank {rank} needs {wanted} {name} (got {len(given)})", "give one per dimension"
                )
        check(kind, inter, swz, fill, address, dims, strides, box, steps)
    pad = MAX_RANK - rank
    body = _LAYOUT.pack(
        _MAGIC,
        kind,
        rank,
        *SWIZZLE_FIELDS[swz],
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
    return seal(body)


def seal(body: bytes) -> bytes:
    """The fields with padding and checksum: 128 bytes."""
    body = body.ljust(MAP_BYTES - 4, b"\0")[: MAP_BYTES - 4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def fields(data: bytes | bytearray | memoryview | np.ndarray) -> tuple[Any, ...]:
    """The packed fields of 128 bytes; CopyFault when they are no map, or were changed by ordinary stores."""
    raw = bytes(data)
    if len(raw) != MAP_BYTES or raw[:8] != _MAGIC:
        raise CopyFault(
            f"no tensor map lies here (first bytes {raw[:8].hex()}); pass a map from "
            "cuTensorMapEncodeTiled by value as a __grid_constant__ parameter, or its address in global "
            "memory",
            rule="tensormap.invalid",
        )
    if zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
        raise CopyFault(
            "the tensor map was edited by ordinary stores; use tensormap.replace, or encode it anew",
            rule="tensormap.damaged",
        )
    return _LAYOUT.unpack(raw[: _LAYOUT.size])


def decode(data: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
    """128 bytes -> map, after the rules of :func:`encode`: tensormap.replace can have broken any of them."""
    f = fields(data)
    rank, kind = f[2], DataType(f[1])
    dims, strides = tuple(d + 1 for d in f[9 : 9 + rank]), f[14 : 14 + rank - 1]
    box, steps = f[18 : 18 + rank], f[23 : 23 + rank]
    with speaking("the tensor map in use"):
        swz = _swizzle_of(f[3], f[4])
        check(kind, Interleave(f[5]), swz, OutOfBoundsFill(f[7]), f[8], dims, strides, box, steps)
    return TensorMap(
        data_type=kind,
        address=f[8],
        dims=dims,
        strides=(ELEMENT_BYTES[kind], *strides),
        box=box,
        element_strides=steps,
        swizzle=swz,
        fill_nan=bool(f[7]),
    )


def _swizzle_of(mode: int, atomicity: int) -> Swizzle:
    found = [s for s, stored in SWIZZLE_FIELDS.items() if stored == (mode, atomicity)]
    if not found:
        raise Unsupported(
            f"swizzle mode {mode} with atomicity {atomicity} is not modelled; use atomicity 0 (16 bytes)",
            rule="tensormap",
        )
    return found[0]


def replace(data: bytes, field: str, ordinal: int, value: int) -> bytes:
    """``tensormap.replace``: one field by its PTX name, in PTX's numbering (PTX ISA, "tensormap.replace").

    128 zero bytes are an empty map to start from. Whether the fields fit together is judged when a copy uses
    the map. Raises CopyFault.
    """
    f = list(fields(data if any(data) else _BLANK))
    if field == "elemtype":
        f[1] = PTX_TYPES[value]
    elif field == "rank":
        if not 0 <= value < MAX_RANK:
            raise CopyFault(
                f"tensormap.replace.rank takes the rank minus one, 0..4 (got {value}); subtract one",
                rule="tensormap.rank",
            )
        f[2] = value + 1
    elif field == "global_dim":
        f[9 + ordinal] = (value - 1) & 0xFFFFFFFF  # 2^32 elements come as 0
    elif field == "global_stride":
        if ordinal >= MAX_RANK - 1:
            raise CopyFault(
                f"tensormap.replace.global_stride: stride {ordinal} belongs to no dimension; ordinals 0..3 "
                "are the strides of dimensions 1..4",
                rule="tensormap.strides",
            )
        f[14 + ordinal] = value
    elif field == "box_dim":
        f[18 + ordinal] = min(value, 0xFFFF)  # both refused above 256 when the map is used
    elif field == "element_stride":
        f[23 + ordinal] = min(value, 0xFF)
    else:
        f[_SIMPLE_FIELDS[field]] = value
    return seal(_LAYOUT.pack(*f))


_SIMPLE_FIELDS = {
    "swizzle_mode": 3, "swizzle_atomicity": 4, "interleave_layout": 5, "fill_mode": 7, "global_address": 8,
}  # fmt: skip
_BLANK = seal(_LAYOUT.pack(_MAGIC, 0, 1, *(0,) * 25))
