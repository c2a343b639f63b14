"""Stores and reductions of threads on their way to the memory of another device.

They land when the schedule says, in any order, with three exceptions (PTX ISA, "Memory Consistency Model"):
writes to the same bytes land in the order in which they were issued; a release or fence of scope .sys waits
for everything its cluster has written before, and for what any CTA has released at scope .gpu; who reads back
what its own cluster wrote, or another has released, finds it there. A release of scope .gpu is for threads of
the own device alone: another device may still see a later flag before the data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.copy_kinds import CopyKind
from smfree.emulator.exec.lanes import Group
from smfree.emulator.movers import LandingMover
from smfree.emulator.pending import PendingCopies

if TYPE_CHECKING:
    from smfree.emulator.crossing import Written
    from smfree.emulator.exec.copy_unit import CopyUnit
    from smfree.emulator.exec.lanes import LaneSet
    from smfree.emulator.exec.routing import Part
    from smfree.emulator.memory import GlobalMemory
    from smfree.emulator.reductions import Reduction

_MOST = 512  # batches under way without a clock; the oldest ones land then, which is always legal


class Flight(PendingCopies):
    """One batch of them; ``released``: elements that a release of scope .gpu or .sys has covered."""

    memory: GlobalMemory
    released: Any
    low: int
    high: int

    def meets(self, addr: Any, nbytes: Any) -> Any:
        """The elements that have not landed and write bytes of the ranges [addr, addr + nbytes)."""
        left = np.flatnonzero(~self.done)
        start, end = self.dst[left], self.dst[left] + self.nbytes[left]
        if (
            not len(left)
            or int(start.min()) >= int((addr + nbytes).max())
            or int(end.max()) <= int(addr.min())
        ):
            return left[:0]
        order = np.argsort(addr, kind="stable")
        low = addr[order]
        reach = np.maximum.accumulate((addr + nbytes)[order])
        at = np.searchsorted(low, end, side="left") - 1
        return left[(at >= 0) & (reach[np.maximum(at, 0)] > start)]


class Flights:
    """Those of one launch that have not landed, oldest first. ``known``: by when, in cycles, each CTA slot
    knows that all it wrote has arrived."""

    def __init__(self, copies: CopyUnit) -> None:
        self.copies, self.launch = copies, copies.launch
        self.flying: list[Flight] = []
        self.known = np.zeros(copies.launch.geometry.slots)

    def send(
        self,
        g: Group,
        lanes: LaneSet,
        part: Part,
        values: Any,
        times: Written | None,
        rows: Any,
        op: str | Reduction | None,
    ) -> None:
        """Issue the stores of one part: values [n, k]; ``op``: a reduction. ``times`` per warp, ``rows``: the
        warp of each lane among them."""
        memory: Any = part.memory
        n, nbytes = len(part.addr), values.shape[1] * values.itemsize
        memory.check_write(part.addr, nbytes, "store" if op is None else "red")
        latest = self.settle(memory, part.addr, nbytes)
        ids = lanes.ids[part.index]
        kind = CopyKind.STORE if op is None else CopyKind.RED
        mover = LandingMover(memory, part.addr, np.ascontiguousarray(values), op)
        flight = Flight(
            self.copies.engine, kind, ids, part.addr, part.addr, np.full(n, nbytes), mover,
            label=self.launch.here(g),
        )  # fmt: skip
        flight.memory, flight.away = memory, part.device
        flight.low, flight.high = int(part.addr.min()), int(part.addr.max()) + nbytes
        flight.released = np.zeros(n, np.bool_)
        flight.read[:] = True
        if times is not None:
            flight.complete_at[:] = np.maximum(times.performed[rows], latest)
            np.maximum.at(self.known, ids // self.launch.geometry.threads, times.acknowledged[rows])
        self.flying.append(flight)
        self.copies.issued(g, flight)
        if times is None and len(self.flying) > _MOST:
            self._land(self.flying[0], np.flatnonzero(~self.flying[0].done))
            self._forget()

    def settle(self, memory: Any, addr: Any, nbytes: Any, readers: Any = None, *, now: bool = False) -> float:
        """What is under way to [addr, addr + nbytes) of ``memory`` goes before an access to them.

        Without a clock, or if it must be ``now``, it lands; else the time of the last is returned, and a
        write keeps behind it. ``readers``: lanes that read, who find what their own cluster wrote or somebody
        released.
        """
        latest = -np.inf
        if not self.flying:
            return latest
        low, high = int(addr.min()), int((addr + nbytes).max())
        met = [f for f in self.flying if f.low < high and f.high > low and f.memory is memory]
        for flight in met:
            which = flight.meets(addr, nbytes)
            if readers is not None and len(which):
                mine = np.isin(self._clusters(flight.issuer[which]), self._clusters(readers))
                which = which[mine | flight.released[which]]
            if not len(which):
                continue
            latest = max(latest, float(flight.complete_at[which].max()))
            if now or self.launch.clock is None or readers is not None:
                self._land(flight, which)
        if met:
            self._forget()
        return latest

    def release(self, g: Group, scope: str) -> None:
        """A release or fence of scope "gpu" or "sys": what the clusters of these threads wrote is there for
        the own device, with "sys" for every device, what was released before included.

        Where several kernels share the device, .gpu is as .sys: what they hand each other is not followed.
        """
        clusters = np.unique(self._clusters(g.lanes.ids))
        latest = -np.inf
        for flight in list(self.flying):
            mine = np.isin(self._clusters(flight.issuer), clusters)
            handed_on = flight.released & ~mine & ~flight.done
            flight.released[mine] = True
            if scope == "gpu" and not self.launch.device.residents.shared:
                continue
            if self.launch.clock is not None and handed_on.any():
                latest = max(latest, float(flight.complete_at[handed_on].max()))
            # Now, also with a clock: the flag behind a release may be written at once, by an atomic, or in
            # own memory.
            self._land(flight, np.flatnonzero(flight.released & ~flight.done))
        self._forget()
        if self.launch.clock is not None and (self.known.any() or latest > 0):
            t, size = self.launch.settle(g), self.launch.cluster_size
            of_cluster = self.known.reshape(-1, size).max(axis=1)
            warps = self._clusters(g.lanes.ids[g.lanes.warp_starts])
            self.launch.time[g.lanes.warp_slice] = np.maximum(t, np.maximum(of_cluster[warps], latest))

    def _clusters(self, lanes: Any) -> Any:
        geometry = self.launch.geometry
        return lanes // (geometry.threads * geometry.cluster_size)

    def _land(self, flight: Flight, which: Any) -> None:
        self.copies.finish(flight, which)

    def _forget(self) -> None:
        if any(f.open == 0 for f in self.flying):
            self.flying = [f for f in self.flying if f.open]
            self.copies.forget_done()
