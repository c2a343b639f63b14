"""Bulk and tensor copies, prefetches, and the cache policies they may carry (PTX ISA, "Bulk copy",
"Tensor copy", "createpolicy")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import CopyFault
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import flat_addresses
from smfree.emulator.exec.sync_ops import _ints
from smfree.emulator.exec.table import Arithmetic, Visible, arithmetic
from smfree.emulator.exec.values import WINDOW_BYTES
from smfree.emulator.ptx import ast
from smfree.emulator.reductions import OPERATIONS, Reduction

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

_MODIFIERS = (
    "async", "bulk", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group",
    "L2::cache_hint",
)  # fmt: skip
_RANKS = ("1d", "2d", "3d", "4d", "5d")


def bulk(dec: Decoder, ins: ast.Instr) -> Visible:
    """``cp{.reduce}.async.bulk`` in the forms that move or prefetch bytes."""
    operands = list(ins.operands)
    if "L2::cache_hint" in ins.modifiers:
        dec.src(operands.pop(), "b64")
    if "prefetch" in ins.modifiers:
        return _prefetch_tensor(dec, operands) if "tensor" in ins.modifiers else _prefetch(dec, operands)
    return _tensor(dec, operands) if "tensor" in ins.modifiers else _bulk(dec, operands)


def _operation(dec: Decoder) -> str | None:
    """The operation of cp.reduce, None for a copy."""
    if "reduce" not in dec.instr.modifiers:
        return None
    return next(m for m in dec.instr.modifiers if m in OPERATIONS)


def _direction(dec: Decoder) -> str:
    """ "load" (global to shared) or "store" (shared to global); other directions are refused."""
    spaces = [m for m in dec.instr.modifiers if m.partition("::")[0] in ("shared", "global")]
    if spaces[0].startswith("shared") and spaces[1:2] == ["global"]:
        return "load"
    if spaces[0] == "global" and spaces[1:2] == ["shared::cta"]:
        return "store"
    raise dec.refuse("this direction of a bulk copy")


def _bulk(dec: Decoder, operands: list[ast.Operand]) -> Visible:
    launch: Launch = dec.launch
    op = _operation(dec)
    if op is None:
        dec.only(*_MODIFIERS)
    else:
        dec.only(*_MODIFIERS, "reduce", "noftz", *OPERATIONS, dec.instr.modifiers[-1])
    reduction = None if op is None else Reduction(op, dec.instr.modifiers[-1])
    dst, src, size, *rest = operands
    d_base, d_off = dec.address(dst)
    s_base, s_off = dec.address(src)
    nbytes = dec.src(size, "u32")
    if _direction(dec) == "load":
        bar_base, bar_off = dec.address(rest[0])

        def act_load(g: Group) -> bool:
            launch.copy.bulk.load(
                g, flat_addresses(g, d_base, d_off), flat_addresses(g, s_base, s_off), _ints(g, nbytes),
                flat_addresses(g, bar_base, bar_off),
            )  # fmt: skip
            return True

        return act_load

    def act_store(g: Group) -> bool:
        launch.copy.bulk.store(
            g, flat_addresses(g, d_base, d_off), flat_addresses(g, s_base, s_off), _ints(g, nbytes), reduction
        )
        return True

    return act_store


def _prefetch(dec: Decoder, operands: list[ast.Operand]) -> Visible:
    dec.only(*_MODIFIERS, "prefetch", "L2")
    launch: Launch = dec.launch
    base, offset = dec.address(operands[0])
    nbytes = dec.src(operands[1], "u32")

    def act(g: Group) -> bool:
        launch.copy.bulk.prefetch(g, flat_addresses(g, base, offset), _ints(g, nbytes))
        return True

    return act


# -------------------------------------------------------------------------------------------- tensor copies


def _place(dec: Decoder, operand: ast.Operand) -> tuple[tuple[int | None, int], list[int]]:
    """[map, {coordinates}] -> the map's address, the coordinates' registers."""
    rank = next(int(m[0]) for m in dec.instr.modifiers if m in _RANKS)
    if not isinstance(operand, ast.TensorAddress) or len(operand.coords) != rank:
        raise dec.wrong(f"a {rank}-d tensor copy needs [map, {{{rank} coordinates}}]")
    return dec.address(operand.map), [dec.src(c, "s32") for c in operand.coords]


def _coordinates(g: Group, registers: list[int]) -> Any:
    """int64[n, rank], innermost first."""
    where = np.empty((g.lanes.n, len(registers)), np.int64)
    for i, register in enumerate(registers):
        where[:, i] = g.regs[register].view(np.int32)
    return where


def _tensor(dec: Decoder, operands: list[ast.Operand]) -> Visible:
    op = _operation(dec)
    dec.only(*_MODIFIERS, "tensor", "tile", *_RANKS, *(() if op is None else ("reduce", op)))
    launch: Launch = dec.launch
    load = _direction(dec) == "load"
    (m_base, m_off), coords = _place(dec, operands[1] if load else operands[0])
    s_base, s_off = dec.address(operands[0] if load else operands[1])
    bar = dec.address(operands[2]) if load else None

    def act(g: Group) -> bool:
        maps, shared = flat_addresses(g, m_base, m_off), flat_addresses(g, s_base, s_off)
        where = _coordinates(g, coords)
        if bar is not None:
            launch.copy.bulk.tensor_load(g, shared, maps, where, flat_addresses(g, *bar))
        else:
            launch.copy.bulk.tensor_store(g, shared, maps, where, op)
        return True

    return act


def _prefetch_tensor(dec: Decoder, operands: list[ast.Operand]) -> Visible:
    dec.only(*_MODIFIERS, "prefetch", "tensor", "L2", "tile", *_RANKS)
    launch: Launch = dec.launch
    (m_base, m_off), coords = _place(dec, operands[0])

    def act(g: Group) -> bool:
        launch.copy.bulk.prefetch_tensor(g, flat_addresses(g, m_base, m_off), _coordinates(g, coords))
        return True

    return act


# ------------------------------------------------------------------------------------------- cache policies

_PRIORITIES = {"L2::evict_normal": 0, "L2::evict_first": 2, "L2::evict_last": 4, "L2::evict_unchanged": 6}


@arithmetic("createpolicy")
def createpolicy(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """An opaque 64-bit policy. Its effect is not modelled; any 64-bit value is accepted as one."""
    kind = ins.modifiers[0]
    dec.only(kind, "global", "L2", "b64", *_PRIORITIES)
    d = dec.dst(ins.operands[0])
    if kind == "cvt":
        s = dec.src(ins.operands[1], "b64")

        def convert(regs: list[Any], g: Group) -> None:
            regs[d] = regs[s]

        return convert
    levels = [_PRIORITIES[m] for m in ins.modifiers if m in _PRIORITIES]
    secondary = levels[1] if len(levels) > 1 else _PRIORITIES["L2::evict_unchanged"]
    policy = np.uint64(1 << 60 | levels[0] << 56 | secondary << 52)
    if kind == "range":
        return _range_policy(dec, d, policy)
    fraction = dec.src(ins.operands[1], "f32") if len(ins.operands) > 1 else None

    def fractional(regs: list[Any], g: Group) -> None:
        if fraction is not None:
            share = regs[fraction].view(np.float32)
            _require(g, (share > 0) & (share <= 1), share, "the fraction must be above 0 and at most 1")
        regs[d] = policy

    return fractional


def _range_policy(dec: Decoder, d: int, policy: np.uint64) -> Arithmetic:
    base, offset = dec.address(dec.instr.operands[1])
    primary, total = (dec.src(o, "u32") for o in dec.instr.operands[2:4])

    def act(regs: list[Any], g: Group) -> None:
        start = flat_addresses(g, base, offset)
        _require(g, start < WINDOW_BYTES, start, "the range must lie in global memory")
        sizes = regs[primary]
        _require(g, sizes <= regs[total], sizes, "primary-size must not exceed total-size")
        regs[d] = policy

    return act


def _require(g: Group, holds: Any, value: Any, rule: str) -> None:
    bad = np.flatnonzero(~np.broadcast_to(holds, g.lanes.n))
    if len(bad):
        got = np.broadcast_to(value, g.lanes.n)[bad[0]]
        raise CopyFault(f"createpolicy: {rule} (got {got})", rule="policy.operand", index=int(bad[0]))
