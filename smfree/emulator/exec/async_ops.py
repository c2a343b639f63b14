"""Asynchronous copies: cp.async and the groups of all (PTX ISA, "Asynchronous copy"); see also bulk_ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smfree.emulator.exec import bulk_ops
from smfree.emulator.exec.accesses import Issue
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import flat_addresses
from smfree.emulator.exec.sync_ops import _ints, shared_keys
from smfree.emulator.exec.table import Access, AccessKind, Visible, visible
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

_L2_HINTS = ("L2::64B", "L2::128B", "L2::256B", "L2::cache_hint")


@visible("cp")
def copy(dec: Decoder, ins: ast.Instr) -> Visible:
    mods = ins.modifiers
    if mods[:1] == ("reduce",):
        return bulk_ops.bulk(dec, ins)
    if mods[:1] != ("async",):
        raise dec.refuse("this cp form")
    if "mbarrier" in mods:
        return _mbarrier_arrive(dec, ins)
    in_bulk = "bulk" in mods
    if "commit_group" in mods:
        dec.only("async", "bulk", "commit_group")
        return _commit(dec, in_bulk)
    if "wait_group" in mods or "wait_all" in mods:
        dec.only("async", "bulk", "wait_group", "wait_all", "read")
        return _wait_group(dec, ins, in_bulk)
    if not in_bulk:
        return _cp_async(dec, ins)
    return bulk_ops.bulk(dec, ins)


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
    if "L2::cache_hint" in ins.modifiers:
        dec.src(rest.pop(), "b64")
    d_base, d_off = dec.address(dst)
    s_base, s_off = dec.address(src)
    nbytes = dec.constant_value(size)
    if nbytes is None:
        raise dec.wrong("the size of cp.async must be an immediate: 4, 8 or 16")
    limit, negated = rest[0] if rest else None, False
    if isinstance(limit, ast.Not):
        limit, negated = limit.reg, True
    ignores = limit is not None and _is_predicate(dec, limit)
    src_size = None if limit is None else dec.src(limit, "pred" if ignores else "u32")
    cache = "cg" if "cg" in ins.modifiers else "ca"

    def act(g: Group) -> bool:
        read: Any = None if src_size is None else _ints(g, src_size)
        if ignores:  # where the predicate holds, nothing is read and zeros are written
            read = nbytes * (read if negated else 1 - read)
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
    dec.only("async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64")
    remedy = "cp.async.mbarrier.arrive works on a barrier of its own CTA"
    keys, launch = shared_keys(dec, ins.operands[0], own_only=remedy), dec.launch
    counted = "noinc" in ins.modifiers

    def act(g: Group) -> bool:
        launch.copy.arrive_when_copied(g, keys(g), raise_pending=not counted)
        return True

    return act
