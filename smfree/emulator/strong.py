"""Strong accesses that running kernels of several devices make to one memory, exactly; loops of weak loads.

The memory model says nothing about a program with mixed-size data races (PTX ISA, "Limitations on Mixed-size
Data-races"), and two strong accesses order each other only if the scope of each includes the other's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from smfree.emulator.bytespace import fault


class Shape(NamedTuple):
    """What accesses of one entry have in common. A vector counts as its elements."""

    nbytes: int
    writes: bool
    scope: str


@dataclass(slots=True)
class Entry:
    """Where accesses of one shape went, ascending, and which of ``labels`` tells of each."""

    addr: Any = field(default_factory=lambda: np.empty(0, np.int64))
    which: Any = field(default_factory=lambda: np.empty(0, np.int64))
    labels: list[str] = field(default_factory=list)

    def add(self, addr: Any, label: str) -> None:
        fresh = np.unique(addr[~np.isin(addr, self.addr)])
        if not len(fresh):
            return
        self.labels.append(label)
        where = np.concatenate((self.addr, fresh))
        which = np.concatenate((self.which, np.full(len(fresh), len(self.labels) - 1)))
        order = np.argsort(where, kind="stable")
        self.addr, self.which = where[order], which[order]


@dataclass(slots=True)
class Accesses:
    """Those of one launch on ``device``."""

    device: int
    entries: dict[Shape, Entry] = field(default_factory=dict)


class StrongLog:
    """Those to one memory. A launch is taken out of it when it is over."""

    def __init__(self) -> None:
        self._launches: WeakKeyDictionary[Any, Accesses] = WeakKeyDictionary()

    def forget(self, launch: object) -> None:
        """The launch is over: what comes later is ordered after it, or is no concern of its."""
        self._launches.pop(launch, None)

    def note(self, launch: object, device: int, addr: Any, shape: Shape, label: str) -> None:
        """Take in accesses at ``addr`` int64[n]; a MemoryFault with the lane when one of them races with
        those of another device."""
        for other in self._launches.values():
            if other.device == device:
                continue
            for theirs, entry in other.entries.items():
                if (shape.writes or theirs.writes) and _wrong(shape, theirs):
                    self._check(addr, shape, label, theirs, entry)
        mine = self._launches.setdefault(launch, Accesses(device))
        mine.entries.setdefault(shape, Entry()).add(addr, label)

    @staticmethod
    def _check(addr: Any, shape: Shape, label: str, theirs: Shape, entry: Entry) -> None:
        unit = max(shape.nbytes, theirs.nbytes)  # naturally aligned: they overlap in one such unit or not
        met = np.flatnonzero(np.isin(addr // unit, entry.addr // unit))
        if not len(met):
            return
        i = int(met[0])
        at = int(np.argmax(entry.addr // unit == addr[i] // unit))
        one = f"{label} at 0x{int(addr[i]):x}"
        two = f"{entry.labels[int(entry.which[at])]} at 0x{int(entry.addr[at]):x}"
        if "weak" in (shape.scope, theirs.scope):
            raise fault(
                "race.weak_poll",
                i,
                f"a loop polls with weak loads what another device writes: {one}, and {two}: it may see old "
                "bytes of its L1 for ever",
                "poll with ld.relaxed.sys or ld.acquire.sys (volatile in C++)",
            )
        if shape.nbytes != theirs.nbytes:
            raise fault(
                "race.mixed_size",
                i,
                f"two devices use the same bytes in different sizes: {one}, and {two}: a mixed-size race of "
                "undefined outcome",
                "use one size for each word, best one 32-bit word per peer",
            )
        narrow = shape.scope if shape.scope != "sys" else theirs.scope
        raise fault(
            "scope.too_narrow",
            i,
            f"two devices use the same word, one with scope .{narrow}, which does not reach another device: "
            f"{one}, and {two}",
            "use .sys for both",
        )


def _wrong(one: Shape, other: Shape) -> bool:
    return one.nbytes != other.nbytes or (one.scope, other.scope) != ("sys", "sys")
