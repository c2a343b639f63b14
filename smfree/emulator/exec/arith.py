"""Integer, logic, comparison and floating point arithmetic (PTX ISA, "Integer Arithmetic" and following)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import EmulationError
from smfree.emulator.exec import half, pairs
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic, arithmetic
from smfree.emulator.exec.values import SINT, UINT, is_type, select, storage, typed, width
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

Regs = list[Any]


def instruction_type(dec: Decoder) -> str:
    """The last fundamental type among the modifiers; refused when there is none that we model."""
    for modifier in reversed(dec.instr.modifiers):
        if is_type(modifier):
            return modifier
    raise dec.refuse("this type")


def _binary(dec: Decoder, ptx_type: str) -> tuple[int, int, int]:
    d, a, b = dec.instr.operands  # the decoder refuses forms with more or fewer
    return dec.dst(d), dec.src(a, ptx_type), dec.src(b, ptx_type)


def _float(dec: Decoder, ptx_type: str) -> None:
    """Only round-to-nearest-even without flushing is modelled; the rest is refused by name."""
    if ptx_type == "f16":
        raise dec.refuse(f"{dec.instr.opcode}.f16")
    for modifier in dec.instr.modifiers:
        if modifier in ("rz", "rm", "rp", "ftz", "sat", "approx", "full"):
            raise dec.refuse(f"modifier .{modifier} on floating point")


@arithmetic("add", "sub")
def add_sub(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    if short := half.half_type(ins):
        return half.add_sub(dec, ins, short)
    if pairs.PAIR in ins.modifiers:
        return pairs.computed(dec, ins)
    ptx_type = instruction_type(dec)
    dec.only("rn", ptx_type)
    d, a, b = _binary(dec, ptx_type)
    minus = ins.opcode == "sub"
    if ptx_type[0] == "f":
        _float(dec, ptx_type)
        kind, bits = typed(ptx_type), storage(ptx_type)

        def act_float(r: Regs, g: Group) -> None:
            x, y = r[a].view(kind), r[b].view(kind)
            r[d] = (x - y if minus else x + y).view(bits)

        return act_float
    if minus:

        def act_sub(r: Regs, g: Group) -> None:
            r[d] = r[a] - r[b]

        return act_sub

    def act_add(r: Regs, g: Group) -> None:
        r[d] = r[a] + r[b]

    return act_add


def _product(dec: Decoder, ptx_type: str, a: int, b: int) -> tuple[Any, int]:
    """(function of regs giving the product part asked for, bits of its result)."""
    mode = next((m for m in dec.instr.modifiers if m in ("lo", "hi", "wide")), "lo")
    bits = width(ptx_type)
    if mode == "lo":
        return (lambda r: r[a] * r[b]), bits
    kind = typed(ptx_type)
    if mode == "wide":
        wide = (SINT if ptx_type[0] == "s" else UINT)[bits * 2]
        out = UINT[bits * 2]
        return (lambda r: (r[a].view(kind).astype(wide) * r[b].view(kind).astype(wide)).view(out)), bits * 2
    if bits == 64:
        return (lambda r: _high_64(r[a], r[b], signed=ptx_type[0] == "s")), bits
    wide, out = SINT[bits * 2] if ptx_type[0] == "s" else UINT[bits * 2], UINT[bits]
    shift = wide(bits)
    return (
        lambda r: ((r[a].view(kind).astype(wide) * r[b].view(kind).astype(wide)) >> shift).astype(out)
    ), bits


def _high_64(a: Any, b: Any, *, signed: bool) -> Any:
    """The upper 64 bits of a 64 x 64-bit product, from 32-bit halves."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & low)
    high = a1 * b1 + (middle >> half) + (other >> half)
    if signed:
        top = np.uint64(63)
        high = high - (a >> top) * b - (b >> top) * a
    return high


@arithmetic("mul", "mul24")
def mul(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    if ins.opcode == "mul24":
        raise dec.refuse("mul24")
    if short := half.half_type(ins):
        return half.mul(dec, ins, short)
    if pairs.PAIR in ins.modifiers:
        return pairs.computed(dec, ins)
    ptx_type = instruction_type(dec)
    dec.only("lo", "hi", "wide", "rn", ptx_type)
    d, a, b = _binary(dec, ptx_type)
    if ptx_type[0] == "f":
        _float(dec, ptx_type)
        kind, bits = typed(ptx_type), storage(ptx_type)

        def act_float(r: Regs, g: Group) -> None:
            r[d] = (r[a].view(kind) * r[b].view(kind)).view(bits)

        return act_float
    product, _ = _product(dec, ptx_type, a, b)

    def act(r: Regs, g: Group) -> None:
        r[d] = product(r)

    return act


@arithmetic("mad")
def mad(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    if ptx_type[0] == "f":
        return fma(dec, ins)
    dec.only("lo", "hi", "wide", ptx_type)
    d, a, b, c = ins.operands
    di, ai, bi = dec.dst(d), dec.src(a, ptx_type), dec.src(b, ptx_type)
    product, bits = _product(dec, ptx_type, ai, bi)
    ci = dec.src(c, f"u{bits}")

    def act(r: Regs, g: Group) -> None:
        r[di] = product(r) + r[ci]

    return act


@arithmetic("fma")
def fma(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """f32 exactly: the product is exact in double, the sum is rounded to odd there and then to f32."""
    if short := half.half_type(ins):
        return half.fma(dec, ins, short)
    if pairs.PAIR in ins.modifiers:
        return pairs.computed(dec, ins)
    ptx_type = instruction_type(dec)
    dec.only("rn", ptx_type)
    if ptx_type != "f32":
        raise dec.refuse(f"fma.{ptx_type}")
    d, *abc = ins.operands
    di = dec.dst(d)
    ai, bi, ci = (dec.src(x, ptx_type) for x in abc)

    def act(r: Regs, g: Group) -> None:
        p = np.atleast_1d(r[ai]).view(np.float32).astype(np.float64) * np.atleast_1d(r[bi]).view(np.float32)
        c = np.atleast_1d(r[ci]).view(np.float32).astype(np.float64)
        out = half.odd_sum(p, c).astype(np.float32).view(np.uint32)
        scalar = not any(type(r[i]) is np.ndarray for i in (ai, bi, ci))
        r[di] = out[0] if scalar else out

    return act


@arithmetic("div", "rem")
def div_rem(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    full = "full" in ins.modifiers  # at most 2 ulp off (PTX ISA, div): the rounded quotient will do
    dec.only("full" if full else "rn", ptx_type)
    d, a, b = _binary(dec, ptx_type)
    kind, bits = typed(ptx_type), storage(ptx_type)
    if ptx_type[0] == "f":
        if not full:
            _float(dec, ptx_type)

        def act_float(r: Regs, g: Group) -> None:
            with np.errstate(divide="ignore", invalid="ignore"):
                r[d] = (r[a].view(kind) / r[b].view(kind)).view(bits)

        return act_float
    remainder = ins.opcode == "rem"
    active = dec.active()

    def act(r: Regs, g: Group) -> None:
        x, y = r[a].view(kind), r[b].view(kind)
        zero = y == 0
        if np.any(zero):
            bad = np.flatnonzero(np.broadcast_to(zero & active(r), (g.lanes.n,)))
            if len(bad):
                raise EmulationError(
                    "integer division by zero, whose result PTX leaves unspecified; guard it",
                    rule="alu.divide_by_zero",
                    index=int(bad[0]),
                )
            y = select(zero, kind(1), y)
        if ptx_type[0] == "u":
            r[d] = (x % y if remainder else x // y).view(bits)
            return
        m = np.fmod(x, y)
        r[d] = (m if remainder else (x - m) // y).view(bits)

    return act


@arithmetic("neg", "abs")
def neg_abs(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    if short := half.half_type(ins):
        return half.neg_abs(dec, ins, short)
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    kind, bits, absolute = typed(ptx_type), storage(ptx_type), ins.opcode == "abs"

    def act(r: Regs, g: Group) -> None:
        x = r[a].view(kind)
        r[d] = (np.abs(x) if absolute else -x).view(bits)

    return act


@arithmetic("min", "max")
def min_max(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    if short := half.half_type(ins):
        return half.min_max(dec, ins, short)
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a, b = _binary(dec, ptx_type)
    kind, bits = typed(ptx_type), storage(ptx_type)
    least = ins.opcode == "min"
    fn: Any = np.minimum if least else np.maximum
    if ptx_type[0] == "f":
        return _float_min_max(d, a, b, kind, bits, least=least)

    def act(r: Regs, g: Group) -> None:
        r[d] = fn(r[a].view(kind), r[b].view(kind)).view(bits)

    return act


def _float_min_max(d: int, a: int, b: int, kind: Any, bits: Any, *, least: bool) -> Arithmetic:
    """A number beats a NaN, and +0 is above -0 (PTX ISA, min and max)."""
    fn: Any = np.fmin if least else np.fmax
    zeros: Any = np.bitwise_or if least else np.bitwise_and  # of the patterns of two zeros

    def act(r: Regs, g: Group) -> None:
        x, y = r[a].view(kind), r[b].view(kind)
        r[d] = select((x == 0) & (y == 0), zeros(r[a], r[b]), fn(x, y).view(bits))

    return act


@arithmetic("and", "or", "xor")
def logic(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a, b = _binary(dec, ptx_type)
    fn: Any = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.opcode]

    def act(r: Regs, g: Group) -> None:
        r[d] = fn(r[a], r[b])

    return act


@arithmetic("not", "cnot")
def invert(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    if ins.opcode == "cnot":
        kind = storage(ptx_type)
        return lambda r, g: r.__setitem__(d, (r[a] == 0).astype(kind))
    return lambda r, g: r.__setitem__(d, np.invert(r[a]))


@arithmetic("shl", "shr")
def shift(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """Amounts above the width are clamped to it (PTX ISA, shl and shr)."""
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    amount = ins.operands[2]
    b = dec.src(amount, "u32")
    bits, kind, out = width(ptx_type), typed(ptx_type), storage(ptx_type)
    left, signed = ins.opcode == "shl", ptx_type[0] == "s"
    fixed = dec.constant_value(amount)
    if fixed is not None and 0 <= fixed < bits:
        by = kind(fixed)
        if left:
            return lambda r, g: r.__setitem__(d, (r[a].view(kind) << by).view(out))
        return lambda r, g: r.__setitem__(d, (r[a].view(kind) >> by).view(out))

    def act(r: Regs, g: Group) -> None:
        by = np.minimum(r[b], np.uint32(bits - 1)).astype(kind)
        x = r[a].view(kind)
        y = (x << by if left else x >> by).view(out)
        r[d] = y if signed and not left else select(r[b] >= bits, out(0), y)

    return act


_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@arithmetic("setp")
def set_predicate(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(*_COMPARE, *_COMBINE, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", ptx_type)
    comparison = ins.modifiers[0]
    target, a_op, b_op, *extra = ins.operands
    first, second = (target.first, target.second) if isinstance(target, ast.Pair) else (target, None)
    d = None if isinstance(first, ast.Sink) else dec.dst(first)
    q = None if second is None or isinstance(second, ast.Sink) else dec.dst(second)
    a, b = dec.src(a_op, ptx_type), dec.src(b_op, ptx_type)
    kind = typed(ptx_type)
    compare = _comparison(dec, comparison, ptx_type)
    if not extra and q is None and d is not None:
        return lambda r, g: r.__setitem__(d, compare(r[a].view(kind), r[b].view(kind)))
    combine = _COMBINE[next(m for m in ins.modifiers[1:] if m in _COMBINE)] if extra else None
    negated = bool(extra) and isinstance(extra[0], ast.Not)
    c = dec.src(extra[0].reg if isinstance(extra[0], ast.Not) else extra[0], "pred") if extra else None

    def act(r: Regs, g: Group) -> None:
        p = compare(r[a].view(kind), r[b].view(kind))
        other = np.logical_not(p)
        if c is not None and combine is not None:
            third = np.logical_not(r[c]) if negated else r[c]
            p, other = combine(p, third), combine(other, third)
        if d is not None:
            r[d] = p
        if q is not None:
            r[q] = other

    return act


def _comparison(dec: Decoder, name: str, ptx_type: str) -> Any:
    if ptx_type[0] != "f":
        if name not in _COMPARE:
            raise dec.refuse(f"comparison .{name} on {ptx_type}")
        return _COMPARE[name]
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name == "ne":  # ordered: false with a NaN, unlike IEEE's
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    if name.endswith("u"):
        ordered = _COMPARE[name[:-1]]
        return lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)
    return _COMPARE[name]


@arithmetic("selp")
def select_by_predicate(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a, b, p = ins.operands
    di, ai, bi, pi = dec.dst(d), dec.src(a, ptx_type), dec.src(b, ptx_type), dec.src(p, "pred")
    return lambda r, g: r.__setitem__(di, select(r[pi], r[ai], r[bi]))
