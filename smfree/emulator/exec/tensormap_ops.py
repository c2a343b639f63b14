"""Tensor maps edited and published by the kernel itself (PTX ISA, "tensormap.replace", "membar/fence")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import flat_addresses, resolve_generic
from smfree.emulator.exec.table import Visible, visible
from smfree.emulator.exec.warp import per_lane
from smfree.emulator.ptx import ast
from smfree.emulator.tensormap import MAP_BYTES

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

_FIELDS = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity",
           "fill_mode")  # fmt: skip
_FIELDS_OF_A_DIMENSION = ("box_dim", "global_dim", "global_stride", "element_stride")
_ALL_FIELDS = (*_FIELDS, *_FIELDS_OF_A_DIMENSION)
_SCOPES = ("cta", "cluster", "gpu", "sys")


@visible("tensormap")
def tensormap(dec: Decoder, ins: ast.Instr) -> Visible:
    return _replace(dec, ins) if ins.modifiers[0] == "replace" else _copy_and_release(dec, ins)


def _replace(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("replace", "tile", *_ALL_FIELDS, "global", "shared::cta", "b1024", "b32", "b64")
    launch: Launch = dec.launch
    field = next(m for m in ins.modifiers if m in _ALL_FIELDS)
    operands = list(ins.operands)
    base, offset = dec.address(operands[0])
    ordinal = dec.constant_value(operands.pop(1)) if field in _FIELDS_OF_A_DIMENSION else 0
    if ordinal is None:
        raise dec.wrong("the ordinal of a field must be an immediate")
    value = dec.src(operands[1], ins.modifiers[-1])
    named = next((m.partition("::")[0] for m in ins.modifiers if m in ("global", "shared::cta")), None)

    def act(g: Group) -> bool:
        space, addr = named, flat_addresses(g, base, offset)
        if space is None:
            space, addr = resolve_generic(launch, g, addr)
        values: Any = per_lane(g.regs[value], g)
        launch.copy.bulk.maps.replace(g, space, addr, field, ordinal, values)
        return True

    return act


def _copy_and_release(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only(
        "cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "release", *_SCOPES, "sync", "aligned"
    )
    launch: Launch = dec.launch
    dst, src = dec.address(ins.operands[0]), dec.address(ins.operands[1])
    whole_warp = dec.constant(np.uint32(0xFFFFFFFF))
    scope = _scope(ins)

    def publish(g: Group) -> None:
        launch.copy.bulk.maps.copy_and_release(g, flat_addresses(g, *dst), flat_addresses(g, *src))
        launch.sync.fence(g, scope)

    return lambda g: bool(launch.warps.gather(g, whole_warp, publish))


def fence(dec: Decoder, ins: ast.Instr) -> Visible:
    """``fence.proxy.tensormap::generic`` in both directions."""
    dec.only("proxy", "tensormap::generic", "acquire", "release", *_SCOPES)
    launch: Launch = dec.launch
    scope = _scope(ins)
    if "release" in ins.modifiers:

        def release(g: Group) -> bool:
            launch.copy.bulk.maps.release(g)
            launch.sync.fence(g, scope)
            return True

        return release
    base, offset = dec.address(ins.operands[0])
    if dec.constant_value(ins.operands[1]) != MAP_BYTES:
        raise dec.wrong(f"the size of a tensor map is {MAP_BYTES}")

    def acquire(g: Group) -> bool:
        launch.copy.bulk.maps.acquire(g, flat_addresses(g, base, offset))
        launch.sync.fence(g, scope)
        return True

    return acquire


def _scope(ins: ast.Instr) -> str:
    """As the clock prices fences: a cluster's costs what a CTA's does."""
    scope = next(m for m in ins.modifiers if m in _SCOPES)
    return "cta" if scope == "cluster" else scope
