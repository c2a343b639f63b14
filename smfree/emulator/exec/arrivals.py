"""Arrivals that cp.async triggers when it is complete (PTX ISA, "cp.async.mbarrier.arrive")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.pending import PendingCopies

if TYPE_CHECKING:
    from smfree.emulator.exec.copy_unit import CopyUnit


@dataclass(slots=True)
class Deferred:
    """Arrivals of ``lanes`` (ascending) on ``keys``, not before ``times``; each waits for its own thread's
    elements of ``copies``."""

    lanes: Any
    keys: Any
    times: Any
    copies: list[tuple[PendingCopies, Any]]


class Arrivals:
    """Those that have not happened yet."""

    def __init__(self, copies: CopyUnit) -> None:
        self.copies = copies
        self._waiting: list[Deferred] = []

    def add(self, arrivals: Deferred) -> None:
        """Arrive as soon as the copies are complete, which may be now."""
        self._waiting.append(arrivals)
        self.trigger()

    def trigger(self) -> None:
        """Let those arrive whose copies have completed."""
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            ready = _ready(item)
            if not ready.any():
                self._waiting.append(item)
                continue
            self._arrive(item, ready)
            if not ready.all():
                late = ~ready
                self._waiting.append(
                    Deferred(item.lanes[late], item.keys[late], item.times[late], _of(item, late))
                )

    def retire(self, slots: Any) -> None:
        """CTAs have exited: nobody waits for their barriers."""
        threads = self.copies.launch.geometry.threads
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            stay = ~np.isin(item.lanes // threads, slots)
            if stay.any():
                self._waiting.append(
                    Deferred(item.lanes[stay], item.keys[stay], item.times[stay], _of(item, stay))
                )

    def _arrive(self, item: Deferred, ready: Any) -> None:
        barriers = self.copies.launch.sync.mbarriers
        lanes, keys, times = item.lanes[ready], item.keys[ready], item.times[ready].copy()
        phase = barriers.phase(keys)
        for batch, which in _of(item, ready):
            at = np.searchsorted(lanes, batch.issuer[which])
            done = batch.complete_at[which]
            np.maximum.at(times, at, np.where(np.isfinite(done), done, -np.inf))
            self.copies.land(batch, which, keys[at], phase[at])
        barriers.arrive(keys, 1, times)
        self.copies.launch.did_something(float(times.max()))


def _ready(item: Deferred) -> Any:
    """bool[lanes]: all copies of the lane are complete. Those that are not move to the front of
    ``item.copies``, so that an arrival that waits for many is looked at in a few steps."""
    ready = np.ones(len(item.lanes), np.bool_)
    first_late = None
    for at, (batch, which) in enumerate(item.copies):
        late = which[~batch.done[which]]
        if len(late):
            first_late = at if first_late is None else first_late
            ready[np.searchsorted(item.lanes, batch.issuer[late])] = False
            if not ready.any():
                item.copies = item.copies[first_late:] + item.copies[:first_late]
                break
    return ready


def _of(item: Deferred, mask: Any) -> list[tuple[PendingCopies, Any]]:
    """The copies of some of the lanes."""
    parts = ((batch, which[mask[np.searchsorted(item.lanes, batch.issuer[which])]])
             for batch, which in item.copies)  # fmt: skip
    return [(batch, which) for batch, which in parts if len(which)]
