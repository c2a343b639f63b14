"""Element-wise reductions of asynchronous copies: which exist, and what they compute.

Sources: PTX ISA, "cp.reduce.async.bulk", "cp.reduce.async.bulk.tensor", "red.async", "min", "atom".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from smfree.emulator.tensor_types import DataType

_INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
_BITS = {"b32": np.uint32, "b64": np.uint64}
_FLOATS = {"f32": np.float32, "f64": np.float64, "f16": np.float16}

#: Types of each operation with global memory as destination, and with shared memory of the cluster.
GLOBAL_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}
CLUSTER_TYPES = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}
OPERATIONS = tuple(GLOBAL_TYPES)

#: PTX type of the elements of a tensor map that can be reduced into.
_OF_MAP = {
    DataType.UINT32: "u32", DataType.INT32: "s32", DataType.UINT64: "u64", DataType.INT64: "s64",
    DataType.FLOAT32: "f32", DataType.FLOAT16: "f16", DataType.BFLOAT16: "bf16",
}  # fmt: skip

Words = np.ndarray


@dataclass(frozen=True)
class Reduction:
    """``old = op(old, new)`` element by element; ``kind`` is a PTX type such as "bf16"."""

    op: str
    kind: str

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return int(self.kind.lstrip("busf")) // 8

    def __str__(self) -> str:
        return f"{self.op}.{self.kind}"

    def combine(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """uint8 arrays of one shape, whole elements along the last axis -> uint8 of that shape."""
        word = np.dtype(f"u{self.element_bytes}")
        a, b = np.ascontiguousarray(old).view(word), np.ascontiguousarray(new).view(word)
        with np.errstate(all="ignore"):
            result = self._words(a, b)
        return np.ascontiguousarray(result).view(np.uint8)

    def _words(self, a: Words, b: Words) -> Words:
        if self.kind in ("f16", "bf16"):
            return _add_half(a, b, self.kind) if self.op == "add" else _pick_half(a, b, self.op, self.kind)
        if self.kind in _FLOATS:
            return _add_float(a, b, self.kind)
        kind: Any = {**_INTEGERS, **_BITS}[self.kind]
        out = _INTEGER_OPERATIONS[self.op](a.view(kind), b.view(kind))
        return out.view(a.dtype)


def sum_wide(parts: list[np.ndarray], kind: str) -> np.ndarray:
    """The sum of 16-bit floats (words of any width, all of one shape) in float32, rounded once."""
    total: Any = np.float32(0.0)
    for part in parts:
        total = total + _widen(np.ascontiguousarray(part).view(np.uint16), kind)
    out = total.astype(np.float16).view(np.uint16) if kind == "f16" else _to_bf16(total)
    return np.where(np.isnan(total), np.uint16(0x7FFF), out).view(parts[0].dtype)


def of_map(op: str, kind: DataType) -> Reduction | None:
    """The reduction of a tensor whose map says ``kind``; None where the ISA has none."""
    name = _OF_MAP.get(kind)
    if name is None:
        return None
    if op in ("and", "or", "xor"):  # bits of integers
        name = f"b{name[1:]}" if name[0] in "us" else name
    return Reduction(op, name) if name in GLOBAL_TYPES[op] else None


def _inc(old: Words, limit: Words) -> Words:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _dec(old: Words, limit: Words) -> Words:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_INTEGER_OPERATIONS: dict[str, Callable[[Words, Words], Words]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": _inc,
    "dec": _dec,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _add_float(a: Words, b: Words, kind: str) -> Words:
    """``add.f32`` flushes subnormal inputs and results to zero of their sign; ``add.f64`` does not."""
    x, y = a.view(_FLOATS[kind]), b.view(_FLOATS[kind])
    if kind == "f64":
        return (x + y).view(a.dtype)
    total = _flush(_flush(x) + _flush(y)).view(a.dtype)
    return np.where(np.isnan(total.view(np.float32)), np.uint32(0x7FFFFFFF), total)


def _flush(x: np.ndarray) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    return np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)


def _add_half(a: Words, b: Words, kind: str) -> Words:
    """Sum in float32, then round to nearest even: 24 bits for 11 (8) round like the exact sum."""
    total = _widen(a, kind) + _widen(b, kind)
    out = total.astype(np.float16).view(np.uint16) if kind == "f16" else _to_bf16(total)
    return np.where(np.isnan(total), np.uint16(0x7FFF), out)


def _widen(x: Words, kind: str) -> np.ndarray:
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(x: np.ndarray) -> Words:
    """Round float32 to bf16, ties to even; not for NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def _pick_half(a: Words, b: Words, op: str, kind: str) -> Words:
    """Smaller or larger one: -0 below +0; of a number and a NaN the number; of two NaN the canonical one."""
    magnitude = np.uint16(0x7C00 if kind == "f16" else 0x7F80)
    sign = np.uint16(0x8000)
    # As unsigned integers these keys stand in the order of the numbers.
    key_a, key_b = (np.where(x & sign, ~x, x | sign) for x in (a, b))
    first = key_a <= key_b if op == "min" else key_a >= key_b
    nan_a, nan_b = ((x & np.uint16(0x7FFF)) > magnitude for x in (a, b))
    out = np.where((first & ~nan_a) | nan_b, a, b)
    return np.where(nan_a & nan_b, np.uint16(0x7FFF), out)
