"""Lanes (threads), the groups that run together, and the joins where divergent groups meet again.

A launch numbers the threads of its resident CTAs 0..N-1: lane = slot * threads_per_cta + thread. A
:class:`LaneSet` is an immutable, ascending set of them with everything that can be derived from it cached;
the :class:`Geometry` interns them, so that a loop that splits the same way a thousand times derives it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smfree.emulator.specs import WARP_SIZE

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_CACHE_LIMIT = 4096


@dataclass(frozen=True)
class Geometry:
    """How one launch lays its threads out over resident slots and SMs."""

    threads: int  # per CTA
    slots: int
    num_sms: int
    cluster_size: int = 1  # CTAs in consecutive slots; slot % cluster_size is %cluster_ctarank
    sm_of_slot: Ints = field(init=False)
    _interned: dict[bytes, LaneSet] = field(default_factory=dict)
    _unions: dict[tuple[int, ...], tuple[LaneSet, list[Ints], list[LaneSet]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sm_of_slot", np.arange(self.slots) % self.num_sms)

    def deal(self, slots: Ints, sms: Ints) -> None:
        """Put free slots on other SMs; lane sets that know the old ones are forgotten."""
        self.sm_of_slot[slots] = sms
        self._interned.clear()
        self._unions.clear()

    @property
    def warps_per_cta(self) -> int:
        return -(-self.threads // WARP_SIZE)

    @property
    def num_warps(self) -> int:
        return self.slots * self.warps_per_cta

    def lane_set(self, ids: Ints) -> LaneSet:
        """The interned set of these ascending lane numbers."""
        key = ids.tobytes()
        found = self._interned.get(key)
        if found is None:
            if len(self._interned) >= _CACHE_LIMIT:
                self._interned.clear()
            found = self._interned[key] = LaneSet(self, ids)
        return found

    def of_slots(self, slots: Ints) -> LaneSet:
        """All lanes of whole CTAs."""
        return self.lane_set((slots[:, None] * self.threads + np.arange(self.threads)).ravel())

    def union(self, parts: list[LaneSet]) -> tuple[LaneSet, list[Ints]]:
        """The union of disjoint sets, and where each part's lanes stand in it."""
        key = tuple(id(part) for part in parts)
        found = self._unions.get(key)
        if found is None:
            if len(self._unions) >= _CACHE_LIMIT:
                self._unions.clear()
            ids = np.concatenate([part.ids for part in parts])
            order = np.argsort(ids, kind="stable")
            position = np.empty(len(ids), np.int64)
            position[order] = np.arange(len(ids))
            ends = np.cumsum([part.n for part in parts])
            places = np.split(position, ends[:-1])
            found = self._unions[key] = (self.lane_set(ids[order]), places, parts)  # parts keep ids alive
        return found[0], found[1]


class LaneSet:
    """An ascending set of lanes. ``n`` lanes of ``len(warps)`` warps of ``len(slots)`` CTAs."""

    def __init__(self, geometry: Geometry, ids: Ints) -> None:
        self.geometry = geometry
        self.ids = ids
        self.n = len(ids)
        self._repeats: dict[int, RepeatedLanes] = {}
        self._splits: dict[bytes, tuple[LaneSet, LaneSet, Any, Any]] = {}

    @cached_property
    def slot(self) -> Ints:
        """CTA slot of each lane."""
        return self.ids // self.geometry.threads

    @cached_property
    def tid(self) -> Ints:
        """Linear thread index in the CTA of each lane."""
        return self.ids - self.slot * self.geometry.threads

    @cached_property
    def laneid(self) -> Ints:
        return self.tid % WARP_SIZE

    @cached_property
    def warp(self) -> Ints:
        """Warp number of each lane, over all slots."""
        return self.slot * self.geometry.warps_per_cta + self.tid // WARP_SIZE

    @cached_property
    def _warp_runs(self) -> tuple[Ints, Ints]:
        warp = self.warp
        starts = np.flatnonzero(np.concatenate(([True], warp[1:] != warp[:-1])))
        return starts, warp[starts]

    @property
    def warp_starts(self) -> Ints:
        """First position of each warp's run of lanes."""
        return self._warp_runs[0]

    @property
    def warps(self) -> Ints:
        """The warps present, ascending."""
        return self._warp_runs[1]

    @cached_property
    def warp_index(self) -> Ints:
        """Which entry of ``warps`` each lane belongs to."""
        return np.repeat(np.arange(len(self.warps)), self.warp_counts)

    @cached_property
    def warp_counts(self) -> Ints:
        return np.diff(np.append(self.warp_starts, self.n))

    @cached_property
    def sm(self) -> Ints:
        """SM of each warp."""
        return self.geometry.sm_of_slot[self.warps // self.geometry.warps_per_cta]

    @cached_property
    def full_warps(self) -> bool:
        return self.n % WARP_SIZE == 0 and bool((self.warp_counts == WARP_SIZE).all())

    @cached_property
    def _slot_runs(self) -> tuple[Ints, Ints, Ints]:
        slot = self.slot
        starts = np.flatnonzero(np.concatenate(([True], slot[1:] != slot[:-1])))
        return slot[starts], np.diff(np.append(starts, self.n)), starts

    @property
    def slots(self) -> Ints:
        """The CTA slots present, ascending."""
        return self._slot_runs[0]

    @property
    def slot_counts(self) -> Ints:
        """Lanes of each of ``slots``."""
        return self._slot_runs[1]

    @cached_property
    def one_slot(self) -> int | None:
        """The slot, when all lanes are of one CTA."""
        return int(self.slots[0]) if len(self.slots) == 1 else None

    @cached_property
    def warp_slice(self) -> slice | Ints:
        """``warps`` as a slice where it is one, which reads and writes faster."""
        first, last = int(self.warps[0]), int(self.warps[-1])
        return slice(first, last + 1) if last - first + 1 == len(self.warps) else self.warps

    def repeated(self, times: int) -> RepeatedLanes:
        """These lanes ``times`` times over, one copy after the other."""
        found = self._repeats.get(times)
        if found is None:
            found = self._repeats[times] = RepeatedLanes(self, times)
        return found

    def split(self, mask: Bools) -> tuple[LaneSet, LaneSet, Any, Any]:
        """Lanes where ``mask`` holds and the rest, with the index (slice or array) of each in this set."""
        key = mask.tobytes()
        found = self._splits.get(key)
        if found is None:
            if len(self._splits) >= 256:
                self._splits.clear()
            yes, no = _index(mask), _index(~mask)
            intern = self.geometry.lane_set
            found = self._splits[key] = (intern(self.ids[yes]), intern(self.ids[no]), yes, no)
        return found


class RepeatedLanes(LaneSet):
    """The same lanes several times over: what several accesses of a group are, issued as one."""

    def __init__(self, base: LaneSet, times: int) -> None:
        super().__init__(base.geometry, np.tile(base.ids, times))
        self.base, self.times = base, times

    @cached_property
    def _warp_runs(self) -> tuple[Ints, Ints]:
        starts = np.arange(self.times)[:, None] * self.base.n + self.base.warp_starts
        return starts.ravel(), np.tile(self.base.warps, self.times)

    @cached_property
    def one_slot(self) -> int | None:
        return self.base.one_slot


def _index(mask: Bools) -> slice | Ints:
    where = np.flatnonzero(mask)
    if len(where) and where[-1] - where[0] + 1 == len(where):
        return slice(int(where[0]), int(where[-1]) + 1)
    return where


class Join:
    """Where the parts of a divergent branch meet again: its immediate post-dominator.

    Waiting there is a courtesy that lets lanes run together; the scheduler breaks it whenever nothing else
    can run, so every thread makes progress by itself.
    """

    __slots__ = ("arrived", "base", "missing", "outer", "pc")

    def __init__(self, pc: int, group: Group) -> None:
        self.pc = pc
        self.missing = group.lanes.n
        self.arrived: list[Group] = []
        self.outer = group.join
        self.base = group


@dataclass(slots=True)
class Block:
    """Registers that one load filled: storing them again needs no gathering."""

    registers: tuple[int, ...]
    values: Any
    columns: list[Any]


class Group:
    """Lanes at one program counter. ``regs`` holds a numpy scalar where all lanes agree by construction."""

    __slots__ = (
        "blocks",
        "entry",
        "join",
        "lanes",
        "num_registers",
        "origin",
        "outstanding",
        "pc",
        "pending",
        "polls",
        "regs",
        "wait",
    )

    def __init__(self, lanes: LaneSet, pc: int, regs: list[Any], join: Join | None = None) -> None:
        self.lanes = lanes
        self.pc = pc
        self.regs = regs
        self.num_registers = len(regs)
        self.join = join
        self.pending = 0.0  # instructions executed since time was last settled
        self.outstanding: set[int] = set()  # registers that a load may still be filling
        self.origin: Join | None = None  # the split that made this group, with the registers it got then
        self.entry: list[Any] | None = None
        self.wait: Any = None  # what a parked group waits for
        self.polls = False  # the latest look at an mbarrier was a miss
        self.blocks: dict[int, Block] = {}  # by first register: the array a load left them in

    def remember(self, registers: tuple[int, ...], values: Any) -> None:
        """The load of ``values`` [n, k] has just filled these registers, column by column."""
        self.blocks[registers[0]] = Block(registers, values, [self.regs[r] for r in registers])

    def block(self, registers: tuple[int, ...], rows: int) -> Any:
        """The array of ``rows`` x k that holds just these registers, if one load (or run of loads) left them
        so: a row per lane and access."""
        block = self.blocks.get(registers[0])
        if block is None or block.registers != registers or len(block.values) != rows:
            return None
        regs = self.regs
        for r, column in zip(registers, block.columns, strict=True):
            if regs[r] is not column:
                return None
        return block.values

    def constants(self) -> list[Any]:
        """A register list with nothing in it but the constants, which stand behind the registers."""
        n = self.num_registers
        return [None] * n + self.regs[n:]

    def part(self, lanes: LaneSet, index: Any, live: tuple[int, ...], pc: int) -> Group:
        """A group of some of these lanes with the registers that are ``live`` at ``pc``."""
        regs = self.constants()
        mine = self.regs
        for r in live:
            value = mine[r]
            regs[r] = value[index] if type(value) is np.ndarray else value
        group = Group(lanes, pc, regs, self.join)
        group.num_registers = self.num_registers
        group.pending = self.pending
        group.outstanding = set(self.outstanding)
        return group


def merge(groups: list[Group], pc: int, live: tuple[int, ...], join: Join | None) -> Group:
    """One group of several at ``pc``. Registers that no part changed since the split are taken from before
    it."""
    geometry = groups[0].lanes.geometry
    lanes, places = geometry.union([g.lanes for g in groups])
    origin = groups[0].origin
    base = origin.base if origin is not None and all(g.origin is origin for g in groups) else None
    if base is not None and base.lanes is not lanes:
        base = None
    regs = groups[0].constants()
    changed: Iterable[int] = live
    if base is not None:
        changed = set()
        for g in groups:
            now, then = g.regs, g.entry
            assert then is not None
            changed.update([r for r in live if now[r] is not then[r]])
        for r in live:
            regs[r] = base.regs[r]
    for r in changed:
        regs[r] = _gather([g.regs[r] for g in groups], places, lanes.n)
    merged = Group(lanes, pc, regs, join)
    merged.num_registers = groups[0].num_registers
    if base is not None:
        merged.origin, merged.entry = base.origin, base.entry
    merged.pending = max(g.pending for g in groups)
    merged.outstanding = set().union(*(g.outstanding for g in groups))
    return merged


def _gather(parts: list[Any], places: list[Ints], n: int) -> Any:
    known = next((p for p in parts if p is not None), None)
    if known is None:
        return None
    if type(known) is not np.ndarray and all(type(p) is type(known) and p == known for p in parts):
        return known
    out = np.zeros(n, known.dtype)
    for part, place in zip(parts, places, strict=True):
        if part is not None:
            out[place] = part
    return out
