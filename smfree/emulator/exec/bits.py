"""Bits and bytes: shifts of two words, look-up tables, fields, permutations, counts, dot products of bytes
(PTX ISA, "Integer Arithmetic", "Logic and Shift", "prmt")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import EmulationError
from smfree.emulator.exec.arith import instruction_type
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic, arithmetic
from smfree.emulator.exec.values import SINT, select, storage, width
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

Regs = list[Any]
_NOT_FOUND = np.uint32(0xFFFFFFFF)


@arithmetic("shf")
def funnel_shift(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    dec.only("l", "r", "wrap", "clamp", "b32")
    d = dec.dst(ins.operands[0])
    a, b, c = (dec.src(x, "b32") for x in ins.operands[1:])
    left, wrap = "l" in ins.modifiers, "wrap" in ins.modifiers

    def act(r: Regs, g: Group) -> None:
        by = (r[c] & np.uint32(31) if wrap else np.minimum(r[c], np.uint32(32))).astype(np.uint64)
        both = (r[b].astype(np.uint64) << np.uint64(32)) | r[a].astype(np.uint64)
        moved = both << by if left else both >> by
        r[d] = ((moved >> np.uint64(32)) if left else moved & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return act


@arithmetic("lop3")
def lop3(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    dec.only("b32")
    d = dec.dst(ins.operands[0])
    a, b, c = (dec.src(x, "b32") for x in ins.operands[1:4])
    table = dec.constant_value(ins.operands[4])
    if table is None:
        raise dec.wrong("lop3 needs an immediate look-up table")

    def act(r: Regs, g: Group) -> None:
        out: Any = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                x = r[a] if row & 4 else ~r[a]
                y = r[b] if row & 2 else ~r[b]
                z = r[c] if row & 1 else ~r[c]
                out = out | (x & y & z)
        r[d] = out

    return act


@arithmetic("bfe")
def bit_field_extract(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    pos, length = (dec.src(x, "u32") for x in ins.operands[2:])
    kind, bits, signed = storage(ptx_type), width(ptx_type), ptx_type[0] == "s"
    top, one = np.uint32(bits - 1), kind(1)

    def act(r: Regs, g: Group) -> None:
        p = r[pos] & np.uint32(0xFF)
        n = np.minimum(r[length] & np.uint32(0xFF), np.uint32(bits))
        x = select(p < bits, r[a] >> np.minimum(p, top).astype(kind), kind(0))
        below = np.minimum(n, top).astype(kind)
        field = select(n >= bits, x, x & ((one << below) - one))
        if not signed:
            r[d] = field
            return
        last = np.minimum((r[pos] & np.uint32(0xFF)) + (r[length] & np.uint32(0xFF)) - np.uint32(1), top)
        negative = (n > 0) & ((r[a] >> last.astype(kind)) & one != 0)
        kept = np.minimum(n, np.uint32(bits) - np.minimum(p, np.uint32(bits)))  # bits that come from a
        ones = select(kept > top, kind(0), ~((one << np.minimum(kept, top).astype(kind)) - one))
        r[d] = select(negative, field | ones, field)

    return act


@arithmetic("bfi")
def bit_field_insert(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d = dec.dst(ins.operands[0])
    a, b = dec.src(ins.operands[1], ptx_type), dec.src(ins.operands[2], ptx_type)
    pos, length = (dec.src(x, "u32") for x in ins.operands[3:])
    kind, bits = storage(ptx_type), width(ptx_type)

    def act(r: Regs, g: Group) -> None:
        p, n = r[pos] & np.uint32(0xFF), r[length] & np.uint32(0xFF)
        top = np.uint32(bits - 1)
        by = np.minimum(p, top).astype(kind)
        below = (kind(1) << np.minimum(n, top).astype(kind)) - kind(1)
        ones = select(n >= bits, kind((1 << bits) - 1), below)
        mask = select(p >= bits, kind(0), ones << by)
        r[d] = ((r[a] << by) & mask) | (r[b] & ~mask)

    return act


_PERMUTE_MODES = {  # the default mode's selector for each value of the two low bits of c
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@arithmetic("prmt")
def permute_bytes(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    dec.only("b32", *_PERMUTE_MODES)
    d = dec.dst(ins.operands[0])
    a, b, c = (dec.src(x, "b32") for x in ins.operands[1:])
    mode = next((np.array(_PERMUTE_MODES[m], np.uint32) for m in ins.modifiers if m in _PERMUTE_MODES), None)

    def act(r: Regs, g: Group) -> None:
        both = (r[b].astype(np.uint64) << np.uint64(32)) | r[a].astype(np.uint64)
        selector = (r[c] if mode is None else mode[r[c] & np.uint32(3)]).astype(np.uint64)
        out: Any = np.uint64(0)
        for i in range(4):
            nibble = (selector >> np.uint64(4 * i)) & np.uint64(15)
            byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
            sign = select(byte >> np.uint64(7) != 0, np.uint64(0xFF), np.uint64(0))
            byte = select(nibble >> np.uint64(3) != 0, sign, byte)
            out = out | (byte << np.uint64(8 * i))
        r[d] = out.astype(np.uint32)

    return act


def _planes(x: Any, bits: int) -> Any:
    """bool[n, bits] of unsigned values, least significant first."""
    kind = np.dtype(f"u{bits // 8}").type
    return (np.atleast_1d(x)[:, None] >> np.arange(bits, dtype=kind)) & kind(1) != 0


@arithmetic("popc", "clz", "brev")
def bit_count(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    dec.only(ptx_type)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    bits, kind = width(ptx_type), storage(ptx_type)

    def act(r: Regs, g: Group) -> None:
        p = _planes(r[a], bits)
        if ins.opcode == "popc":
            out = p.sum(axis=1).astype(np.uint32)
        elif ins.opcode == "clz":
            high = p[:, ::-1]
            out = np.where(high.any(axis=1), high.argmax(axis=1), bits).astype(np.uint32)
        else:
            out = (p[:, ::-1].astype(kind) << np.arange(bits, dtype=kind)).sum(axis=1, dtype=kind)
        r[d] = out if type(r[a]) is np.ndarray else out[0]

    return act


@arithmetic("bfind")
def find_leading(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """Position of the highest bit that is not the sign."""
    ptx_type = instruction_type(dec)
    dec.only("shiftamt", ptx_type)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    bits, amount, signed = width(ptx_type), "shiftamt" in ins.modifiers, SINT[width(ptx_type)]

    def act(r: Regs, g: Group) -> None:
        x = r[a]
        if ptx_type[0] == "s":
            x = select(x.view(signed) < 0, ~x, x)
        from_top = _planes(x, bits)[:, ::-1]
        first = from_top.argmax(axis=1)
        found = np.where(from_top.any(axis=1), first if amount else bits - 1 - first, _NOT_FOUND)
        out = found.astype(np.uint32)
        r[d] = out if type(r[a]) is np.ndarray else out[0]

    return act


@arithmetic("fns")
def find_nth_set(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """The |offset|-th set bit from base on, upwards or downwards; offset 0 asks for the bit at base."""
    dec.only("b32")
    d = dec.dst(ins.operands[0])
    mask, base, offset = (dec.src(x, "b32") for x in ins.operands[1:])
    active = dec.active()

    def act(r: Regs, g: Group) -> None:
        beyond = np.flatnonzero(np.broadcast_to((r[base] > 31) & active(r), (g.lanes.n,)))
        if len(beyond):
            got = np.broadcast_to(r[base], g.lanes.n)[beyond[0]]
            raise EmulationError(
                f"the base of fns is a bit from 0 to 31 (got {got}), else its result is undefined; mask it",
                rule="alu.fns_base",
                index=int(beyond[0]),
            )
        words = np.broadcast_arrays(*(np.atleast_1d(r[i]) for i in (mask, base, offset)))
        bits = _planes(words[0], 32)
        start, steps = words[1].astype(np.int64)[:, None], words[2].view(np.int32).astype(np.int64)[:, None]
        at = np.arange(32)
        reach = np.where(steps == 0, at == start, np.where(steps > 0, at >= start, at <= start)) & bits
        upward = reach.cumsum(axis=1)
        nth = np.where(steps < 0, reach[:, ::-1].cumsum(axis=1)[:, ::-1], upward)
        hit = reach & (nth == np.maximum(np.abs(steps), 1))
        out = np.where(hit.any(axis=1), hit.argmax(axis=1), _NOT_FOUND).astype(np.uint32)
        r[d] = out if any(type(r[i]) is np.ndarray for i in (mask, base, offset)) else out[0]

    return act


@arithmetic("dp4a")
def dot_of_bytes(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    dec.only("u32", "s32")
    kinds = [np.int8 if m == "s32" else np.uint8 for m in ins.modifiers]
    d = dec.dst(ins.operands[0])
    sources = [dec.src(x, "b32") for x in ins.operands[1:]]

    def act(r: Regs, g: Group) -> None:
        columns = [
            np.ascontiguousarray(c) for c in np.broadcast_arrays(*(np.atleast_1d(r[s]) for s in sources))
        ]
        a, b = (c.view(k).reshape(-1, 4).astype(np.int64) for c, k in zip(columns, kinds, strict=False))
        out = (columns[2].astype(np.int64) + (a * b).sum(axis=1)).astype(np.uint32)
        r[d] = out if any(type(r[s]) is np.ndarray for s in sources) else out[0]

    return act
