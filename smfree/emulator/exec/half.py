"""16-bit floats, .f16 and .bf16, alone and in pairs (PTX ISA, "Half Precision Floating Point Instructions").

Values are worked on as float64, where sums and products of two of them and the operands of a conversion are
exact or, where they cannot be, rounded to odd: then the one rounding that follows is the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic
from smfree.emulator.exec.values import storage
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

Regs = list[Any]
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_NAN = np.uint16(0x7FFF)  # the canonical one of both formats (PTX ISA, cvt)
_TF32_BITS = np.uint32(0xFFFFE000)


def half_type(ins: ast.Instr) -> str | None:
    """The 16-bit float type an instruction computes in, if it is one of these."""
    last = ins.modifiers[-1] if ins.modifiers else ""
    return last if last in HALVES else None


# -------------------------------------------------------------------------------------------------- rounding


def odd_sum(p: Any, c: Any) -> Any:
    """float64 arrays: p + c, rounded to odd where it is not exact."""
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    if not error.any():
        return s
    bits = s.view(np.int64)
    nudge = np.where((error > 0) == (s > 0), 1, -1)
    return np.where((error != 0) & np.isfinite(s) & (bits & 1 == 0), bits + nudge, bits).view(np.float64)


def _odd_float32(x: Any) -> Any:
    """float64 -> float32, rounded to odd where it is not exact."""
    y = x.astype(np.float32)
    back = y.astype(np.float64)
    bits = y.view(np.uint32)
    toward = np.where(np.abs(back) > np.abs(x), bits - 1, bits)  # toward zero
    return np.where((back != x) & ~np.isnan(x), toward | 1, bits).astype(np.uint32).view(np.float32)


def from_half(bits: Any, kind: str) -> Any:
    """uint16 patterns -> float64, exact."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def from_tf32(bits: Any) -> Any:
    """uint32 patterns -> float64. The 13 low bits are dropped; the ISA leaves the layout open."""
    return (bits & _TF32_BITS).view(np.float32).astype(np.float64)


def to_half(x: Any, kind: str, *, toward_zero: bool = False) -> Any:
    """float64 -> uint16 patterns, to nearest even or toward zero; NaN becomes the canonical one."""
    if kind == "f16":
        near = x.astype(np.float16)
        out = near.view(np.uint16)
        if toward_zero:
            out = np.where(np.abs(near.astype(np.float64)) > np.abs(x), out - np.uint16(1), out)
    else:
        bits = _odd_float32(x).view(np.uint32)
        up = np.uint32(0) if toward_zero else np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        out = ((bits + up) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), _NAN, out)


# -------------------------------------------------------------------------------------------- instructions


def halves(column: Any) -> Any:
    """The uint16 patterns in a column of registers, low half first."""
    return np.ascontiguousarray(column).view(np.uint16)


def _columns(r: Regs, sources: tuple[int, ...], kind: Any) -> tuple[Sequence[Any], bool]:
    """Source registers as columns of one length, and whether all of them are uniform."""
    uniform = not any(type(r[s]) is np.ndarray for s in sources)
    return np.broadcast_arrays(*(np.atleast_1d(r[s]).astype(kind, copy=False) for s in sources)), uniform


def _put(r: Regs, d: int, column: Any, uniform: bool) -> None:
    r[d] = column[0] if uniform else column


def _computed(dec: Decoder, ins: ast.Instr, kind: str, fn: Any) -> Arithmetic:
    """``fn`` maps the sources' float64 values to the result, exact or rounded to odd."""
    base, register = kind.removesuffix("x2"), np.uint32 if kind.endswith("x2") else np.uint16
    d, *operands = ins.operands
    di, sources = dec.dst(d), tuple(dec.src(x, "b32" if kind.endswith("x2") else "b16") for x in operands)

    def act(r: Regs, g: Group) -> None:
        columns, uniform = _columns(r, sources, register)
        out = to_half(fn(*(from_half(halves(c), base) for c in columns)), base)
        _put(r, di, out.view(register), uniform)

    return act


def add_sub(dec: Decoder, ins: ast.Instr, kind: str) -> Arithmetic:
    dec.only("rn", kind)
    minus = ins.opcode == "sub"
    return _computed(dec, ins, kind, lambda x, y: odd_sum(x, -y if minus else y))


def mul(dec: Decoder, ins: ast.Instr, kind: str) -> Arithmetic:
    dec.only("rn", kind)
    return _computed(dec, ins, kind, lambda x, y: x * y)


def fma(dec: Decoder, ins: ast.Instr, kind: str) -> Arithmetic:
    dec.only("rn", kind)
    return _computed(dec, ins, kind, lambda x, y, z: odd_sum(x * y, z))


def min_max(dec: Decoder, ins: ast.Instr, kind: str) -> Arithmetic:
    """A number beats a NaN unless ``.NaN`` says otherwise; +0 is above -0 (PTX ISA, min and max)."""
    dec.only("NaN", kind)
    least = ins.opcode == "min"
    strict = "NaN" in ins.modifiers
    pick: Any = (np.minimum if strict else np.fmin) if least else (np.maximum if strict else np.fmax)
    sign: Any = np.logical_or if least else np.logical_and

    def fn(x: Any, y: Any) -> Any:
        zero = np.where(sign(np.signbit(x), np.signbit(y)), -0.0, 0.0)
        return np.where((x == 0) & (y == 0), zero, pick(x, y))

    return _computed(dec, ins, kind, fn)


def neg_abs(dec: Decoder, ins: ast.Instr, kind: str) -> Arithmetic:
    dec.only(kind)
    sign = np.uint32(0x80008000) if kind.endswith("x2") else np.uint16(0x8000)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], "b32" if kind.endswith("x2") else "b16")
    if ins.opcode == "neg":
        return lambda r, g: r.__setitem__(d, r[a] ^ sign)
    return lambda r, g: r.__setitem__(d, r[a] & ~sign)


_FLOATS: dict[str, Any] = {"f32": (np.uint32, np.float32), "f64": (np.uint64, np.float64)}


def convert(dec: Decoder, ins: ast.Instr, to: str, source: str) -> Arithmetic:
    """cvt from or to a 16-bit float, or two float32 into a pair (the first operand becomes the high half)."""
    base = to.removesuffix("x2")
    if (to in _FLOATS) == (base in HALVES) or source not in (*_FLOATS, "f16", "bf16"):
        raise dec.refuse("this conversion")
    dec.only("rn", "rz", "sat", to, source)
    toward_zero, saturate = "rz" in ins.modifiers, "sat" in ins.modifiers
    d, *operands = ins.operands
    di, sources = (
        dec.dst(d),
        tuple(dec.src(x, source.replace("bf", "b").replace("f16", "b16")) for x in operands),
    )
    register = _FLOATS[source][0] if source in _FLOATS else np.uint16
    wide = storage(dec.dst_type(d))  # a wider destination register is zero-extended

    def values(column: Any) -> Any:
        x = (
            column.view(_FLOATS[source][1]).astype(np.float64)
            if source in _FLOATS
            else from_half(column, source)
        )
        return np.where(x > 0, np.minimum(x, 1.0), 0.0) if saturate else x

    def act(r: Regs, g: Group) -> None:
        columns, uniform = _columns(r, sources, register)
        found = [values(np.ascontiguousarray(c)) for c in columns]
        if to in _FLOATS:
            bits, kind = _FLOATS[to]
            _put(r, di, found[0].astype(kind).view(bits).astype(wide, copy=False), uniform)
            return
        out = [to_half(x, base, toward_zero=toward_zero) for x in found]
        if to.endswith("x2"):
            high, low = (x.astype(np.uint32) for x in out)
            _put(r, di, high << np.uint32(16) | low, uniform)
        else:
            _put(r, di, out[0].astype(wide, copy=False), uniform)

    return act
