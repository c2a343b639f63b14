"""Neighbouring accesses of one shape, executed as one.

An unrolled copy loop is a run of loads with the addresses' arithmetic in between. None of the arithmetic
reads what the loads bring, so it may go first, and the loads act together on the group's lanes repeated.
Times, counters and faults stay those of the single instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import EmulationError
from smfree.emulator.exec.accesses import Issue
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import fill_columns, flat_addresses
from smfree.emulator.exec.table import Access, AccessKind, Arithmetic
from smfree.emulator.exec.values import UINT

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

MAX_ACCESSES = 16
MAX_LANES = 1 << 15  # beyond this many lanes at once the columns leave the cache


@dataclass(frozen=True, slots=True)
class Plain:
    """Decoded arithmetic."""

    action: Arithmetic
    sources: frozenset[int]
    destinations: frozenset[int]


@dataclass(frozen=True, slots=True)
class Member:
    """A decoded access at its program counter; ``sources`` are all registers it reads."""

    pc: int
    access: Access
    sources: frozenset[int]

    @property
    def loaded(self) -> frozenset[int]:
        return frozenset(self.access.registers if self.access.kind is AccessKind.LOAD else ())


def find_run(items: list[Any], start: int, leaders: set[int]) -> tuple[list[Plain], list[Member]]:
    """The longest run from ``start`` (a Member) that may act as one: its arithmetic and its accesses."""
    first: Member = items[start]
    arithmetic: list[Plain] = []
    waiting: list[Plain] = []  # arithmetic after the latest access, part of the run only if another follows
    members = [first]
    loaded, read = set(first.loaded), set(first.sources)
    for pc in range(start + 1, len(items)):
        item = items[pc]
        if pc in leaders or len(members) == MAX_ACCESSES:
            break
        if isinstance(item, Plain):
            if item.sources & loaded or item.destinations & (loaded | read):
                break
            waiting.append(item)
        elif isinstance(item, Member):
            if item.access.shape != first.access.shape or (item.sources | item.loaded) & loaded:
                break
            members.append(item)
            arithmetic += waiting
            waiting = []
            loaded |= item.loaded
            read |= item.sources
        else:
            break
    return arithmetic, members


def _registers(part: Sequence[Member]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(m.access.registers for m in part))


class FusedAccess:
    """The action of a run. ``delays``: instructions from the first access to each."""

    def __init__(self, launch: Launch, arithmetic: list[Plain], members: list[Member]) -> None:
        self.launch = launch
        self.arithmetic = tuple(item.action for item in arithmetic)
        self.members = members
        self.count = members[-1].pc - members[0].pc + 1
        self.delays = np.array([m.pc - members[0].pc for m in members], np.float64)

    def __call__(self, g: Group) -> bool:
        for action in self.arithmetic:
            action(g.regs, g)
        at_once = max(1, MAX_LANES // g.lanes.n)
        for begin in range(0, len(self.members), at_once):
            part = self.members[begin : begin + at_once]
            delays = self.delays[begin : begin + at_once] - self.delays[begin] if len(part) > 1 else None
            try:
                self._act(g, part, Issue(g, len(part), delays))
            except EmulationError as error:
                which, error.index = divmod(error.index or 0, g.lanes.n)
                g.pc = part[min(which, len(part) - 1)].pc
                raise
            if not self._waits_for_acceptance:
                g.pending += part[-1].pc - part[0].pc
            if part[-1] is not self.members[-1]:
                g.pending += self.members[begin + at_once].pc - part[-1].pc
        return True

    @property
    def _waits_for_acceptance(self) -> bool:
        """A global store moves its warps' time past the issue of all of them itself."""
        access = self.members[0].access
        return access.kind is AccessKind.STORE and access.space == "global"

    def _act(self, g: Group, part: list[Member], at: Issue) -> None:
        access = part[0].access
        memory = self.launch.memory
        addr = self._addresses(g, part, 0)
        if access.kind is AccessKind.CP_ASYNC:
            source = self._addresses(g, part, 1)
            self.launch.copy.cp_async(at, addr, source, access.size, None, access.cache)
        elif access.kind is AccessKind.STORE:
            values = self._gather(g, part, access)
            (memory.store_global if access.space == "global" else memory.store_shared)(at, addr, values)
        else:
            load = memory.load_global if access.space == "global" else memory.load_shared
            values, ready = load(at, addr, access.size, access.count)
            self._scatter(g, part, values, ready)

    @staticmethod
    def _addresses(g: Group, part: list[Member], operand: int) -> Any:
        if len(part) == 1:
            return flat_addresses(g, *part[0].access.addresses[operand])
        return np.concatenate([flat_addresses(g, *m.access.addresses[operand]) for m in part])

    @staticmethod
    def _gather(g: Group, part: list[Member], access: Access) -> Any:
        registers = _registers(part)
        block = g.block(registers, len(part) * g.lanes.n)
        kind = UINT[access.size * 8]
        if block is not None and block.dtype == kind:
            return block
        out = np.empty((len(part), g.lanes.n, access.count), kind)
        for rows, m in zip(out, part, strict=True):
            fill_columns(rows, g, m.access.registers)
        return out.reshape(-1, access.count)

    def _scatter(self, g: Group, part: list[Member], values: Any, ready: Any) -> None:
        n, warps = g.lanes.n, len(g.lanes.warps)
        for j, m in enumerate(part):
            rows = values[j * n : (j + 1) * n]
            for i, r in enumerate(m.access.registers):
                g.regs[r] = rows[:, i]
            if ready is not None:
                self.launch.memory.until(g, m.access.registers, ready[j * warps : (j + 1) * warps])
        g.remember(_registers(part), values)
