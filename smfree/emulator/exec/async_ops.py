"""Asynchronous copies: cp.async, bulk and tensor copies and their groups (PTX ISA, "Asynchronous copy")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import CopyFault
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import flat_addresses
from smfree.emulator.exec.memory_unit import Issue
from smfree.emulator.exec.sync_ops import _ints
from smfree.emulator.exec.table import Access, AccessKind, Visible, visible
from smfree.emulator.exec.values import LOCAL_WINDOW, PARAM_WINDOW, WINDOW_BYTES
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

_L2_HINTS = ("L2::64B", "L2::128B", "L2::256B")


@visible("cp")
def copy(dec: Decoder, ins: ast.Instr) -> Visible:
    mods = ins.modifiers
    if mods[:1] != ("async",):
        raise dec.refuse("this cp form")
    if "mbarrier" in mods:
        return _mbarrier_arrive(dec, ins)
    bulk = "bulk" in mods
    if "commit_group" in mods:
        dec.only("async", "bulk", "commit_group")
        return _commit(dec, bulk)
    if "wait_group" in mods or "wait_all" in mods:
        dec.only("async", "bulk", "wait_group", "wait_all", "read")
        return _wait_group(dec, ins, bulk)
    if not bulk:
        return _cp_async(dec, ins)
    if "tensor" in mods:
        return _tensor(dec, ins)
    return _bulk(dec, ins)


def _commit(dec: Decoder, bulk: bool) -> Visible:
    launch = dec.launch

    def act(g: Group) -> bool:
        (launch.copy.bulk_groups if bulk else launch.copy.cp_groups).commit(g.lanes.ids)
        return True

    return act


def _wait_group(dec: Decoder, ins: ast.Instr, bulk: bool) -> Visible:
    launch = dec.launch
    number = dec.constant_value(ins.operands[0]) if ins.operands else None
    if ins.operands and number is None:
        raise dec.wrong("the number of groups that may stay pending is an immediate")
    read = "read" in ins.modifiers

    def act(g: Group) -> bool:
        launch.copy.wait_group(g, number, bulk=bulk, read=read)
        return True

    return act


def _cp_async(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("async", "ca", "cg", "shared", "shared::cta", "global", *_L2_HINTS)
    launch: Launch = dec.launch
    dst, src, size, *rest = ins.operands
    d_base, d_off = dec.address(dst)
    s_base, s_off = dec.address(src)
    nbytes = dec.constant_value(size)
    if nbytes is None:
        raise dec.wrong("the size of cp.async must be an immediate: 4, 8 or 16")
    ignores = bool(rest) and _is_predicate(dec, rest[0])
    src_size = dec.src(rest[0], "pred" if ignores else "u32") if rest else None
    cache = "cg" if "cg" in ins.modifiers else "ca"

    def act(g: Group) -> bool:
        read: Any = None if src_size is None else _ints(g, src_size)
        if ignores:  # where the predicate holds, nothing is read and zeros are written
            read = nbytes * (1 - read)
        launch.copy.cp_async(
            Issue(g), flat_addresses(g, d_base, d_off), flat_addresses(g, s_base, s_off), nbytes, read, cache
        )
        return True

    if src_size is None:
        addresses = ((d_base, d_off), (s_base, s_off))
        return Access(AccessKind.CP_ASYNC, "shared", nbytes, 1, addresses, (), act, cache)
    return act


def _is_predicate(dec: Decoder, operand: ast.Operand) -> bool:
    return isinstance(operand, ast.Reg) and dec.dst_type(operand) == "pred"


def _mbarrier_arrive(dec: Decoder, ins: ast.Instr) -> Visible:
    raise dec.refuse("cp.async.mbarrier.arrive")


def _direction(dec: Decoder) -> str:
    """ "load" (global to shared) or "store" (shared to global); other directions are refused."""
    spaces = [m for m in dec.instr.modifiers if m.partition("::")[0] in ("shared", "global")]
    if spaces[0].startswith("shared") and spaces[1:2] == ["global"]:
        return "load"
    if spaces[0] == "global" and spaces[1:2] == ["shared::cta"]:
        return "store"
    raise dec.refuse("this direction of a bulk copy")


_BULK_MODIFIERS = (
    "async", "bulk", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group",
)  # fmt: skip


def _bulk(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only(*_BULK_MODIFIERS)
    launch: Launch = dec.launch
    dst, src, size, *rest = ins.operands
    d_base, d_off = dec.address(dst)
    s_base, s_off = dec.address(src)
    nbytes = dec.src(size, "u32")
    if _direction(dec) == "load":
        bar_base, bar_off = dec.address(rest[0])

        def act_load(g: Group) -> bool:
            launch.copy.bulk_load(
                g, flat_addresses(g, d_base, d_off), flat_addresses(g, s_base, s_off), _ints(g, nbytes),
                flat_addresses(g, bar_base, bar_off),
            )  # fmt: skip
            return True

        return act_load

    def act_store(g: Group) -> bool:
        launch.copy.bulk_store(
            g, flat_addresses(g, d_base, d_off), flat_addresses(g, s_base, s_off), _ints(g, nbytes)
        )
        return True

    return act_store


def _tensor(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only(*_BULK_MODIFIERS, "tensor", "tile", "1d", "2d", "3d", "4d", "5d")
    launch: Launch = dec.launch
    rank = next(int(m[0]) for m in ins.modifiers if m in ("1d", "2d", "3d", "4d", "5d"))
    load = _direction(dec) == "load"
    tensor = ins.operands[1] if load else ins.operands[0]
    if not isinstance(tensor, ast.TensorAddress) or len(tensor.coords) != rank:
        raise dec.wrong(f"a {rank}-d tensor copy needs [map, {{{rank} coordinates}}]")
    m_base, m_off = dec.address(tensor.map)
    coords = [dec.src(c, "s32") for c in tensor.coords]
    s_base, s_off = dec.address(ins.operands[0] if load else ins.operands[1])
    bar = dec.address(ins.operands[2]) if load else None

    def act(g: Group) -> bool:
        where = np.empty((g.lanes.n, rank), np.int64)
        for i, c in enumerate(coords):
            value = g.regs[c]
            where[:, i] = value.view(np.int32)
        maps = flat_addresses(g, m_base, m_off)
        shared = flat_addresses(g, s_base, s_off)
        if bar is not None:
            launch.copy.tensor_load(g, shared, maps, where, flat_addresses(g, *bar))
        else:
            launch.copy.tensor_store(g, shared, maps, where)
        return True

    return act


def map_in_params(addresses: Any) -> int | None:
    """Offset of the tensor map in the argument block, None for a map in device memory.

    A map in local memory means that the compiler copied a by-value parameter: case E14.
    """
    window = int(addresses[0]) // WINDOW_BYTES
    if window == LOCAL_WINDOW // WINDOW_BYTES:
        raise CopyFault(
            "the tensor map lies in local memory: the compiler copied a by-value parameter there, and "
            "the copy is "
            "not visible to the TMA; declare the kernel parameter `const __grid_constant__`",
            rule="tensormap.local",
            index=0,
        )
    if window != PARAM_WINDOW // WINDOW_BYTES:
        return None
    if (addresses != addresses[0]).any():
        raise CopyFault(
            "one tensor copy uses several maps at once, which is not modelled", rule="tensormap.mixed"
        )
    return int(addresses[0]) - PARAM_WINDOW
