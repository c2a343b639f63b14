"""Bulk and tensor copies, prefetches, and the cache policies they may carry (PTX ISA, "Bulk copy",
"Tensor copy", "createpolicy")."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import CopyFault
from smfree.emulator.exec.destinations import Destinations, in_cluster, multicast, own
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import fill_columns, flat_addresses, resolve_generic
from smfree.emulator.exec.memory_unit import Naming, copied
from smfree.emulator.exec.sync_ops import _ints
from smfree.emulator.exec.table import Arithmetic, Visible, arithmetic, visible
from smfree.emulator.exec.values import UINT, WINDOW_BYTES, width
from smfree.emulator.ptx import ast
from smfree.emulator.reductions import OPERATIONS, Reduction

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

_MODIFIERS = (
    "async", "bulk", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group",
    "L2::cache_hint", "multicast::cluster",
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
    """ "load" (global to shared), "store" (shared to global) or "peer" (shared memory to another CTA's)."""
    spaces = tuple(m for m in dec.instr.modifiers if m.partition("::")[0] in ("shared", "global"))
    directions: dict[tuple[str, ...], str] = {
        ("shared::cta", "global"): "load", ("shared::cluster", "global"): "load",
        ("global", "shared::cta"): "store", ("shared::cluster", "shared::cta"): "peer",
    }  # fmt: skip
    if spaces not in directions:
        raise dec.refuse("this direction of a bulk copy")
    return directions[spaces]


def _destinations(
    dec: Decoder, dst: ast.Operand, barrier: ast.Operand, rest: list[ast.Operand]
) -> Callable[[Group, Any], Destinations]:
    """Where a load of so many bytes (None: a box) goes: this CTA, any of the cluster, or all of a mask."""
    launch: Launch = dec.launch
    d, b = dec.address(dst), dec.address(barrier)
    name = "cp.async.bulk.tensor" if "tensor" in dec.instr.modifiers else "cp.async.bulk"

    def operands(g: Group, sizes: Any) -> tuple[Any, Any, Naming]:
        return flat_addresses(g, *d), flat_addresses(g, *b), copied(name, "destination", sizes)

    if "multicast::cluster" in dec.instr.modifiers:
        mask = dec.src(rest[0], "b16")
        return lambda g, sizes: multicast(launch, g, *operands(g, sizes), _ints(g, mask))
    find = in_cluster if "shared::cluster" in dec.instr.modifiers else own
    return lambda g, sizes: find(launch, g, *operands(g, sizes))


def _bulk(dec: Decoder, operands: list[ast.Operand]) -> Visible:
    launch: Launch = dec.launch
    op = _operation(dec)
    if op is None:
        dec.only(*_MODIFIERS)
    else:
        dec.only(*_MODIFIERS, "reduce", "noftz", *OPERATIONS, dec.instr.modifiers[-1])
    reduction = None if op is None else Reduction(op, dec.instr.modifiers[-1])
    target, source, size, *rest = operands
    s = dec.address(source)
    nbytes = dec.src(size, "u32")
    direction = _direction(dec)
    if direction == "load":
        to = _destinations(dec, target, rest[0], rest[1:])

        def load(g: Group) -> bool:
            sizes = _ints(g, nbytes)
            launch.copy.bulk.load(g, to(g, sizes), flat_addresses(g, *s), sizes)
            return True

        return load
    d = dec.address(target)
    if direction == "peer":
        b = dec.address(rest[0])

        def to_peer(g: Group) -> bool:
            dst, src, barrier = (flat_addresses(g, *a) for a in (d, s, b))
            launch.copy.to_peers.bulk(g, dst, src, _ints(g, nbytes), barrier, reduction)
            return True

        return to_peer

    def store(g: Group) -> bool:
        launch.copy.bulk.store(g, flat_addresses(g, *d), flat_addresses(g, *s), _ints(g, nbytes), reduction)
        return True

    return store


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
    if _direction(dec) == "load":
        to = _destinations(dec, operands[0], operands[2], operands[3:])
        map_address, coords = _place(dec, operands[1])

        def load(g: Group) -> bool:
            maps, where = flat_addresses(g, *map_address), _coordinates(g, coords)
            launch.copy.bulk.tensor_load(g, to(g, None), maps, where)
            return True

        return load
    map_address, coords = _place(dec, operands[0])
    s = dec.address(operands[1])

    def store(g: Group) -> bool:
        maps, where = flat_addresses(g, *map_address), _coordinates(g, coords)
        launch.copy.bulk.tensor_store(g, flat_addresses(g, *s), maps, where, op)
        return True

    return store


def _prefetch_tensor(dec: Decoder, operands: list[ast.Operand]) -> Visible:
    dec.only(*_MODIFIERS, "prefetch", "tensor", "L2", "tile", *_RANKS)
    launch: Launch = dec.launch
    (m_base, m_off), coords = _place(dec, operands[0])

    def act(g: Group) -> bool:
        launch.copy.bulk.prefetch_tensor(g, flat_addresses(g, m_base, m_off), _coordinates(g, coords))
        return True

    return act


# ------------------------------------------------------------------------------------- stores to other CTAs

_VECTORS = {"v2": 2, "v4": 4}


@visible("st.async", "red.async")
def store_async(dec: Decoder, ins: ast.Instr) -> Visible:
    """st.async and red.async to shared memory of the cluster; those to global memory are refused."""
    ptx_type = ins.modifiers[-1]
    reduces = ins.opcode == "red"
    op = next((m for m in ins.modifiers if m in OPERATIONS), None) if reduces else None
    dec.only(
        "async", "weak", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes", *_VECTORS,
        ptx_type, *(() if op is None else (op,)),
    )  # fmt: skip
    launch: Launch = dec.launch
    target, source, barrier = ins.operands
    elems = source.elems if isinstance(source, ast.Vector) else (source,)
    registers = tuple(dec.src(e, ptx_type) for e in elems)
    d, b = dec.address(target), dec.address(barrier)
    kind = UINT[width(ptx_type)]
    reduction = None if op is None else Reduction(op, ptx_type)
    generic = "shared::cluster" not in ins.modifiers

    def window(g: Group, address: tuple[int | None, int]) -> Any:
        where = flat_addresses(g, *address)
        if not generic:
            return where
        space, where = resolve_generic(launch, g, where)
        if space not in ("shared", "cluster"):
            raise CopyFault(
                f"{ins.opcode}.async goes to shared memory of the cluster (the address is in {space} memory)",
                rule="copy.space",
                index=0,
            )
        return where

    def act(g: Group) -> bool:
        values = np.empty((g.lanes.n, len(registers)), kind)
        fill_columns(values, g, registers)
        launch.copy.to_peers.store(g, window(g, d), values.view(np.uint8), window(g, b), reduction)
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
    fraction, active = dec.src(ins.operands[1], "f32") if len(ins.operands) > 1 else None, dec.active()

    def fractional(regs: list[Any], g: Group) -> None:
        if fraction is not None:
            share = regs[fraction].view(np.float32)
            right = (share > 0) & (share <= 1) | ~active(regs)
            _require(g, right, share, "the fraction must be above 0 and at most 1")
        regs[d] = policy

    return fractional


def _range_policy(dec: Decoder, d: int, policy: np.uint64) -> Arithmetic:
    base, offset = dec.address(dec.instr.operands[1])
    primary, total = (dec.src(o, "u32") for o in dec.instr.operands[2:4])
    active = dec.active()

    def act(regs: list[Any], g: Group) -> None:
        start = flat_addresses(g, base, offset)
        sizes, off = regs[primary], ~active(regs)
        _require(g, (start < WINDOW_BYTES) | off, start, "the range must lie in global memory")
        _require(g, (sizes <= regs[total]) | off, sizes, "primary-size must not exceed total-size")
        regs[d] = policy

    return act


def _require(g: Group, holds: Any, value: Any, rule: str) -> None:
    bad = np.flatnonzero(~np.broadcast_to(holds, g.lanes.n))
    if len(bad):
        got = np.broadcast_to(value, g.lanes.n)[bad[0]]
        raise CopyFault(f"createpolicy: {rule} (got {got})", rule="policy.operand", index=int(bad[0]))
