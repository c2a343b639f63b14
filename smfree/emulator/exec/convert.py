"""Moves and conversions (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec import cluster_ops, half
from smfree.emulator.exec.arith import instruction_type
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic, arithmetic
from smfree.emulator.exec.values import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    SINT,
    UINT,
    is_type,
    storage,
    typed,
    width,
)
from smfree.emulator.ptx import ast, effects

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

Regs = list[Any]
WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}


@arithmetic("mov")
def mov(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    target, source = ins.operands
    if isinstance(source, ast.Vector):
        return _pack(dec, target, source, ptx_type)
    if isinstance(target, ast.Vector):
        return _unpack(dec, target, source, ptx_type)
    d, s = dec.dst(target), dec.src(source, ptx_type)
    return lambda r, g: r.__setitem__(d, r[s])


def _pack(dec: Decoder, target: ast.Operand, source: ast.Vector, ptx_type: str) -> Arithmetic:
    if ptx_type == "b128":
        raise dec.refuse("128-bit registers")
    part = width(ptx_type) // len(source.elems)
    d = dec.dst(target)
    parts = [
        (dec.src(e, f"b{part}"), i * part)
        for i, e in enumerate(source.elems)
        if not _nobody_cares(dec, target, i, e)
    ]
    kind = storage(ptx_type)

    def act(r: Regs, g: Group) -> None:
        out: Any = kind(0)
        for p, shift in parts:
            out = out | (r[p].astype(kind) << kind(shift))
        r[d] = out

    return act


def _nobody_cares(dec: Decoder, target: ast.Operand, index: int, element: ast.Operand) -> bool:
    """Whether part ``index`` of a pack is a register that nothing ever writes, and all who read the pack drop
    that part. Compilers fill a pair so that has one value only."""
    if not isinstance(element, ast.Reg) or not isinstance(target, ast.Reg) or element.name in dec.written:
        return False
    readers = [ins for ins in dec.kernel.instrs if target.name in effects.reads(ins)]
    return all(
        ins.opcode == "mov"
        and isinstance(ins.operands[0], ast.Vector)
        and isinstance(ins.operands[0].elems[index], ast.Sink)
        for ins in readers
    )


def _unpack(dec: Decoder, target: ast.Vector, source: ast.Operand, ptx_type: str) -> Arithmetic:
    part = width(ptx_type) // len(target.elems)
    s = dec.src(source, ptx_type)
    outs = [None if isinstance(e, ast.Sink) else dec.dst(e) for e in target.elems]
    kind, small = storage(ptx_type), UINT[part]

    def act(r: Regs, g: Group) -> None:
        whole = r[s]
        for i, d in enumerate(outs):
            if d is not None:
                r[d] = (whole >> kind(i * part)).astype(small)

    return act


@arithmetic("cvt")
def cvt(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    types = [m for m in ins.modifiers if is_type(m) or m in half.HALVES]
    if len(types) != 2:
        raise dec.refuse("this conversion")
    to, source_type = types
    floats = (*half.HALVES, "f32", "f64")
    if to in floats and source_type in floats and not {to, source_type}.isdisjoint(half.HALVES):
        return half.convert(dec, ins, to, source_type)
    dec.only("rn", "rz", "rzi", "rni", "rmi", "rpi", "sat", *types)
    d, s = dec.dst(ins.operands[0]), dec.src(ins.operands[1], source_type)
    kind, narrow = typed(source_type), storage(source_type)
    out, final = typed(to), storage(dec.dst_type(ins.operands[0]))
    convert = _conversion(dec, source_type, to, out)
    bits = storage(to)

    def act(r: Regs, g: Group) -> None:
        x = r[s]
        r[d] = convert((x if x.dtype.type is narrow else x.astype(narrow)).view(kind)).view(bits)

    if final is bits:
        return act
    extended = SINT[np.dtype(final).itemsize * 8] if to[0] == "s" else final

    def act_extending(r: Regs, g: Group) -> None:
        """A wider destination register is sign- or zero-extended."""
        act(r, g)
        r[d] = r[d].view(out).astype(extended).view(final)

    return act_extending


def _conversion(dec: Decoder, source: str, to: str, out: Any) -> Any:
    mods = dec.instr.modifiers
    if source[0] != "f" and to[0] != "f":
        if "sat" in mods:
            mine, theirs = np.iinfo(typed(source)), np.iinfo(out)
            low = typed(source)(max(int(mine.min), int(theirs.min)))
            high = typed(source)(min(int(mine.max), int(theirs.max)))
            return lambda x: np.minimum(np.maximum(x, low), high).astype(out)
        return lambda x: x.astype(out)
    if "sat" in mods:
        raise dec.refuse("a saturating floating point conversion")
    if to[0] == "f":
        if "rz" in mods:
            raise dec.refuse("rounding toward zero to a float")
        if source[0] == "f" and any(m in mods for m in ("rzi", "rni", "rmi", "rpi")):
            raise dec.refuse("rounding to an integral float")
        return lambda x: x.astype(out)
    round_to: Any = next(
        (
            f
            for m, f in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil))
            if m in mods
        ),
        None,
    )
    if round_to is None:
        raise dec.wrong("a conversion from float to integer needs .rzi, .rni, .rmi or .rpi")
    info = np.iinfo(out)
    low, high = out(info.min), out(info.max)
    # 0 from .f32 to at most 32 bits, else the pattern of the sign bit alone (PTX ISA, cvt)
    not_a_number = storage(to)(0 if source != "f64" and info.bits < 64 else 1 << (info.bits - 1)).view(out)

    def clamp(x: Any) -> Any:
        """Out of range goes to the nearest limit."""
        v = round_to(np.atleast_1d(x).astype(np.float64))
        below, above, nan = v <= float(info.min), v >= float(info.max), np.isnan(v)
        y = np.where(below | above | nan, 0.0, v).astype(out)
        y = np.where(nan, not_a_number, np.where(above, high, np.where(below, low, y)))
        return y if type(x) is np.ndarray else y[0]

    return clamp


@arithmetic("cvta")
def cvta(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """Generic addresses are the window's base plus the offset; device memory has window 0."""
    dec.only(
        "to", "shared", "shared::cta", "shared::cluster", "local", "global", "const", "param", "u32", "u64"
    )
    space = next((m.partition("::")[0] for m in ins.modifiers if m.partition("::")[0] in WINDOWS), None)
    if space is None or "u64" not in ins.modifiers:
        raise dec.refuse("this address conversion")
    window = WINDOWS[space]
    base = np.uint64(window if "to" not in ins.modifiers else -window & (1 << 64) - 1)
    d, s = dec.dst(ins.operands[0]), dec.src(ins.operands[1], "u64")
    if window == 0:
        return lambda r, g: r.__setitem__(d, r[s])
    return lambda r, g: r.__setitem__(d, r[s] + base)


@arithmetic("isspacep")
def isspacep(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    dec.only("shared", "shared::cta", "shared::cluster", "local", "global", "const", "param")
    space = ins.modifiers[0].partition("::")[0]
    window = WINDOWS[space]
    if window == 0:
        raise dec.refuse(f"isspacep.{space}")
    d, s = dec.dst(ins.operands[0]), dec.src(ins.operands[1], "u64")
    if space == "shared":
        return cluster_ops.in_shared(dec.launch, d, s, any_cta="shared::cluster" in ins.modifiers)
    return lambda r, g: r.__setitem__(d, (r[s] >> np.uint64(48)) == np.uint64(window >> 48))
