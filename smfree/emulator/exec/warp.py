"""Instructions in which the lanes of a warp act together: elect, vote, shuffle, warp barrier.

The lanes named by the member mask must be in the group; a lane that is elsewhere makes the others wait for it
(``WarpUnit.gather`` parks them and calls the action once all members are there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import BarrierFault
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Visible, visible
from smfree.emulator.exec.values import typed
from smfree.emulator.ptx import ast
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder


@visible("activemask")
def activemask(dec: Decoder, ins: ast.Instr) -> Visible:
    """Visible, so that a guard really splits: lanes that do not execute it are not active."""
    dec.only("b32")
    d = dec.dst(ins.operands[0])

    def act(g: Group) -> bool:
        g.regs[d] = _present(g)
        return True

    return act


def _sync(dec: Decoder, mask: int, act: Any) -> Visible:
    """Run ``act(group)`` when every live member of each warp's mask is in the group."""
    launch = dec.launch

    def run(g: Group) -> bool:
        return launch.warps.gather(g, mask, act)

    return run


@visible("elect")
def elect(dec: Decoder, ins: ast.Instr) -> Visible:
    """The lowest member that has not exited: one lane for one mask, as hardware is seen to do."""
    dec.only("sync")
    target, member = ins.operands
    if not isinstance(target, ast.Pair):
        raise dec.wrong("elect.sync writes d|p")
    d = None if isinstance(target.first, ast.Sink) else dec.dst(target.first)
    p = dec.dst(target.second)
    mask = dec.src(member, "b32")

    def act(g: Group) -> None:
        leader = lowest_bit(per_lane(g.regs[mask], g) & _present(g))
        if d is not None:
            g.regs[d] = leader
        g.regs[p] = g.lanes.laneid == leader

    return _sync(dec, mask, act)


@visible("vote")
def vote(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("sync", "all", "any", "uni", "ballot", "pred", "b32")
    d = dec.dst(ins.operands[0])
    source = ins.operands[1]
    negated = isinstance(source, ast.Not)
    p = dec.src(source.reg if isinstance(source, ast.Not) else source, "pred")
    mask = dec.src(ins.operands[2], "b32")
    mode = next(m for m in ins.modifiers if m in ("all", "any", "uni", "ballot"))

    def act(g: Group) -> None:
        mine = per_lane(g.regs[p], g)
        mine = ~mine if negated else mine
        bit = np.left_shift(np.uint32(1), g.lanes.laneid.astype(np.uint32))
        ballot = np.bitwise_or.reduceat(np.where(mine, bit, np.uint32(0)), g.lanes.warp_starts)[
            g.lanes.warp_index
        ]
        members = per_lane(g.regs[mask], g) & _present(g)  # exited members have no say
        if mode == "ballot":
            g.regs[d] = ballot & members
        elif mode == "all":
            g.regs[d] = ballot & members == members
        elif mode == "any":
            g.regs[d] = ballot & members != 0
        else:
            g.regs[d] = (ballot & members == members) | (ballot & members == 0)

    return _sync(dec, mask, act)


@visible("shfl")
def shuffle(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("sync", "up", "down", "bfly", "idx", "b32")
    target, value, lane, clamp, member = ins.operands
    first, second = (target.first, target.second) if isinstance(target, ast.Pair) else (target, None)
    d = dec.dst(first)
    p = None if second is None or isinstance(second, ast.Sink) else dec.dst(second)
    a, b, c, mask = dec.src(value, "b32"), dec.src(lane, "b32"), dec.src(clamp, "b32"), dec.src(member, "b32")
    mode = next(m for m in ins.modifiers if m in ("up", "down", "bfly", "idx"))

    def act(g: Group) -> None:
        me = g.lanes.laneid
        control = per_lane(g.regs[c], g).astype(np.int64)
        segment, limit = control >> 8 & 31, control & 31
        by = per_lane(g.regs[b], g).astype(np.int64) & 31
        highest = (me & segment) | (limit & ~segment)
        if mode == "up":
            source, ok = me - by, me - by >= highest
        elif mode == "down":
            source, ok = me + by, me + by <= highest
        elif mode == "bfly":
            source, ok = me ^ by, (me ^ by) <= highest
        else:
            source = (me & segment) | (by & ~segment)
            ok = source <= highest
        source = np.where(ok, source, me)
        where = np.full(len(g.lanes.warps) * WARP_SIZE, -1)
        where[g.lanes.warp_index * WARP_SIZE + me] = np.arange(g.lanes.n)
        position = where[g.lanes.warp_index * WARP_SIZE + source]
        absent = (position < 0) | (per_lane(g.regs[mask], g) >> source.astype(np.uint32) & 1 == 0)
        if absent.any():
            bad = int(np.argmax(absent))
            raise BarrierFault(
                f"shfl.sync reads lane {int(source[bad])}, which does not take part; the value is undefined",
                rule="warp.absent_source",
                index=bad,
            )
        g.regs[d] = per_lane(g.regs[a], g)[position]
        if p is not None:
            g.regs[p] = ok

    return _sync(dec, mask, act)


_REDUCE: dict[str, tuple[Any, Any]] = {  # the function and what it starts from, by type where it matters
    "add": (np.add, lambda kind: kind(0)),
    "min": (np.minimum, lambda kind: np.iinfo(kind).max),
    "max": (np.maximum, lambda kind: np.iinfo(kind).min),
    "and": (np.bitwise_and, lambda kind: np.iinfo(kind).max),
    "or": (np.bitwise_or, lambda kind: kind(0)),
    "xor": (np.bitwise_xor, lambda kind: kind(0)),
}


@visible("redux")
def redux(dec: Decoder, ins: ast.Instr) -> Visible:
    """Over the lanes with the same member mask (PTX ISA, "redux.sync")."""
    ptx_type = ins.modifiers[-1]
    dec.only("sync", *_REDUCE, "u32", "s32", "b32")
    d, a, member = ins.operands
    di, ai, mask = dec.dst(d), dec.src(a, ptx_type), dec.src(member, "b32")
    fn, start = _REDUCE[next(m for m in ins.modifiers if m in _REDUCE)]
    kind = typed(ptx_type)

    def act(g: Group) -> None:
        team = g.lanes.warp_index.astype(np.int64) << 32 | per_lane(g.regs[mask], g).astype(np.int64)
        teams, mine = np.unique(team, return_inverse=True)
        total = np.full(len(teams), start(kind), kind)
        fn.at(total, mine, per_lane(g.regs[ai], g).view(kind))
        g.regs[di] = total[mine].view(np.uint32)

    return _sync(dec, mask, act)


def _present(g: Group) -> Any:
    """uint32[n]: the lanes of each lane's warp that are here, as a mask."""
    bit = np.left_shift(np.uint32(1), g.lanes.laneid.astype(np.uint32))
    return np.bitwise_or.reduceat(bit, g.lanes.warp_starts)[g.lanes.warp_index]


def per_lane(value: Any, g: Group) -> Any:
    """A column of this value, also when it is uniform."""
    return value if type(value) is np.ndarray else np.full(g.lanes.n, value)


def lowest_bit(masks: Any) -> Any:
    """Index of the lowest set bit of each uint32 (32 where there is none)."""
    low = masks & (~masks + np.uint32(1))
    return np.where(masks == 0, np.uint32(32), np.log2(np.maximum(low, 1)).astype(np.uint32))
