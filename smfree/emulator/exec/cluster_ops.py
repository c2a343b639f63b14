"""Addresses of a cluster's CTAs (PTX ISA, "mapa", "getctarank")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic, arithmetic
from smfree.emulator.exec.values import CLUSTER_SHIFT, RANK_BEYOND, SHARED_WINDOW, storage
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch


@arithmetic("mapa")
def mapa(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """The rank goes into the high bits of the window offset; it is checked when the address is used."""
    dec.only("shared::cluster", "u32", "u64")
    kind = storage(ins.modifiers[-1])
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ins.modifiers[-1])
    b = dec.src(ins.operands[2], "u32")
    keep = kind(~(0xFF << CLUSTER_SHIFT) & np.iinfo(kind).max)

    def act(regs: list[Any], g: Group) -> None:
        rank = np.minimum(regs[b].astype(kind), kind(RANK_BEYOND)) + kind(1)
        regs[d] = regs[a] & keep | rank << kind(CLUSTER_SHIFT)

    return act


def in_shared(launch: Launch, d: int, s: int, *, any_cta: bool) -> Arithmetic:
    """isspacep.shared::cluster (``any_cta``) and .shared::cta of the generic address in register ``s``."""

    def act(regs: list[Any], g: Group) -> None:
        address = regs[s]
        inside = address >> np.uint64(48) == np.uint64(SHARED_WINDOW >> 48)
        mapped = address >> np.uint64(CLUSTER_SHIFT) & np.uint64(0xFF)
        if not any_cta and mapped.any():
            own = g.lanes.slot % launch.cluster_size + 1
            inside = inside & ((mapped == 0) | (mapped == own.astype(np.uint64)))
        regs[d] = inside

    return act


@arithmetic("getctarank")
def getctarank(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    dec.only("shared::cluster", "u32", "u64")
    kind = storage(ins.modifiers[-1])
    d, a, launch = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ins.modifiers[-1]), dec.launch

    def act(regs: list[Any], g: Group) -> None:
        mapped = (regs[a] >> kind(CLUSTER_SHIFT) & kind(0xFF)).astype(np.uint32)
        own = (g.lanes.slot % launch.cluster_size).astype(np.uint32)
        regs[d] = np.where(mapped > 0, mapped - np.uint32(1), own)

    return act
