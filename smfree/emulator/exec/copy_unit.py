"""The one place every asynchronous copy is issued, timed, waited for and completed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.copies import CopyEngine, CopyGroups, PendingCopies
from smfree.emulator.copy_kinds import CopyKind
from smfree.emulator.exec.accesses import Issue
from smfree.emulator.exec.arrivals import Arrivals, Deferred
from smfree.emulator.exec.bulk_unit import BulkUnit
from smfree.emulator.exec.flights import Flights
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_unit import OWN_CTA_ONLY
from smfree.emulator.exec.peer_copies import PeerCopies

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


@dataclass(slots=True)
class Landed:
    """Elements of a batch whose bytes are there, but nobody has waited for them: reading them is a fault.

    ``phase`` is the phase of their barrier that the bytes count in.
    """

    batch: PendingCopies
    which: Any
    keys: Any
    phase: Any

    def part(self, mask: Any) -> Landed:
        return Landed(self.batch, self.which[mask], self.keys[mask], self.phase[mask])


class CopyUnit:
    """Copies of one launch. ``pending`` holds the batches that have elements not yet complete, oldest
    first."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        lanes = launch.geometry.slots * launch.geometry.threads
        self.engine: CopyEngine = CopyEngine(
            launch.device.memory, launch.memory.shared, launch.sync.mbarriers, report=launch.report,
            name_issuer=self._name_issuer,
        )  # fmt: skip
        self.cp_groups = CopyGroups(lanes)
        self.bulk_groups = CopyGroups(lanes)
        self.pending: list[PendingCopies] = []
        self.landed: list[Landed] = []
        self.issuing = np.zeros(launch.geometry.num_warps, np.bool_)  # warps that have issued copies
        self._due = np.inf  # not later than the earliest completion among the pending copies
        self.arrivals = Arrivals(self)
        self.flights = Flights(self)
        self.bulk = BulkUnit(self)
        self.to_peers = PeerCopies(self)

    def _name_issuer(self, lane: int) -> str:
        """ "CTA 3 thread 17", and of which device where there are several."""
        name = self.launch.name_lane(lane)
        others = self.launch.memory.router.others
        return f"{name} of device {self.launch.device.ordinal}" if others else name

    # ---------------------------------------------------------------- issue

    def cp_async(self, at: Issue, dst: Any, src: Any, nbytes: int, src_bytes: Any, cache: str) -> None:
        """``cp.async`` of one instruction, or of several at once."""
        launch, lanes = self.launch, at.lanes
        flat = launch.memory.flat_shared(lanes, dst, nbytes, OWN_CTA_ONLY)
        group = self.cp_groups.current(lanes.ids)
        if not launch.memory.router.local(src, nbytes):
            self._cp_async_away(at, flat, src, nbytes, src_bytes, cache, group)
            return
        batch = self.engine.cp_async(
            lanes.ids, flat, src, nbytes, src_bytes, group=group, cache=cache, label=launch.here(at.group)
        )
        self.cp_groups.add(batch)
        pattern = launch.memory.pattern(at, src, nbytes)
        sectors, total = pattern.sectors
        counters = launch.counters
        counters.cp_async_requests += len(lanes.warps)
        counters.cp_async_sectors += total
        if src_bytes is None:
            counters.bytes_async += lanes.n * nbytes
        else:
            src_bytes = np.broadcast_to(src_bytes, lanes.n)
            counters.bytes_async += int(src_bytes.sum())
        if launch.clock is None:
            self._remember_issuers(at.group)
            self.pending.append(batch)
            return
        # Under the clock only a wait completes it: nobody else may look at the bytes earlier.
        t = at.times(launch)
        if src_bytes is None:
            hits, per_warp = launch.memory.l2_hits(pattern, src, write=False)
        else:
            per_warp = np.add.reduceat(src_bytes, lanes.warp_starts)
            held = np.zeros(lanes.n, np.int64)
            reading = np.flatnonzero(src_bytes > 0)
            if len(reading):
                held[reading] = launch.memory.range_hits(src[reading], src_bytes[reading], write=False)
            hits = np.add.reduceat(held, lanes.warp_starts)
        done = launch.clock.global_load(lanes.sm, t, per_warp, sectors, hits, path="cp.async")
        batch.complete_at[:] = batch.read_at[:] = done[lanes.warp_index]
        if launch.trace is not None:
            launch.trace.issued(at.group, batch)

    def _cp_async_away(
        self, at: Issue, flat: Any, src: Any, nbytes: int, src_bytes: Any, cache: str, group: Any
    ) -> None:
        """The same from several places, one batch for each."""
        launch, lanes, away = self.launch, at.lanes, self.launch.memory.away
        sizes = np.broadcast_to(np.asarray(nbytes if src_bytes is None else src_bytes, np.int64), lanes.n)
        src = np.where(sizes > 0, src, launch.device.memory.base)  # nothing is read there
        counters = launch.counters
        counters.cp_async_requests += len(lanes.warps)
        counters.bytes_async += int(sizes.sum())
        t = None if launch.clock is None else at.times(launch)
        for part in away.router.ranges(src, sizes, f"cp.async.{cache} source"):
            index = part.index
            self.flights.settle(part.memory, part.addr, sizes[index], lanes.ids[index])
            with part.positions(), self.engine.copying(part.far_memory):
                batch = self.engine.cp_async(
                    lanes.ids[index], flat[index], part.addr, nbytes,
                    None if src_bytes is None else sizes[index], group=group[index], cache=cache,
                    label=launch.here(at.group),
                )  # fmt: skip
            self.cp_groups.add(batch)
            piece, sectors, done = away.async_load(at, part, sizes[index], t)
            counters.cp_async_sectors += sectors
            if done is None:
                self._remember_issuers(at.group)
                self.pending.append(batch)
                continue
            batch.complete_at[:] = batch.read_at[:] = done[piece.of_lane]
            if launch.trace is not None:
                launch.trace.issued(at.group, batch)

    def arrive_when_copied(self, g: Group, keys: Any, *, raise_pending: bool) -> None:
        """``cp.async.mbarrier.arrive``: arrive when all cp.async of the thread so far are complete."""
        launch, lanes = self.launch, g.lanes
        barriers = launch.sync.mbarriers
        launch.counters.mbarrier_arrivals += lanes.n
        barriers._need_live(keys, "cp.async.mbarrier.arrive")
        if raise_pending:
            barriers.raise_pending(keys)
        if launch.clock is not None:
            launch.spend(g, launch.clock.mbarrier_arrive_cycles)
        if launch.trace is not None:
            launch.trace.bound(g, keys)
        found = self.cp_groups.covered(lanes.ids, self.cp_groups.upto_all(lanes.ids))
        for batch, which in found:
            if launch.clock is not None and not batch.done[which].all() and batch not in self.pending:
                self.pending.append(batch)
                self._due = min(self._due, float(batch.complete_at.min()))
        self.arrivals.add(Deferred(lanes.ids, keys, launch.lane_times(g), found))
        launch.sync.wake_mbarriers()

    def _remember_issuers(self, g: Group) -> None:
        self.issuing[g.lanes.warp_slice] = True

    def issued(self, g: Group, batch: PendingCopies) -> None:
        """A batch that the schedule completes some time from now on."""
        self._remember_issuers(g)
        self.pending.append(batch)
        if self.launch.clock is not None:
            self._due = min(self._due, float(batch.complete_at.min()))
        if not batch.kind.of_threads:
            if self.launch.trace is not None:
                self.launch.trace.issued(g, batch)
            self.launch.did_something()

    # ---------------------------------------------------------------- completion

    def wait_group(self, g: Group, number: int | None, *, bulk: bool, read: bool) -> None:
        """cp.async[.bulk].wait_group N / wait_all: what it covers completes now, and the warp's time moves
        on."""
        launch, lanes = self.launch, g.lanes
        groups = self.bulk_groups if bulk else self.cp_groups
        upto = groups.upto_all(lanes.ids) if number is None else groups.upto(lanes.ids, number)
        found = groups.covered(lanes.ids, upto, read=read)
        if launch.clock is not None:
            times = groups.ready_time(lanes.ids, upto, read=read, found=found)
            ready = np.maximum.reduceat(times, lanes.warp_starts)
            before = launch.settle(g)
            after = np.maximum(before, ready)
            if launch.trace is not None:
                launch.trace.waited(g, _wait_name(number, bulk, read), before, after)
            launch.time[lanes.warp_slice] = after
        for batch, which in found:
            if read:
                batch.read_sources(which)
            else:
                self.finish(batch, which)
                batch.publish(which)
        launch.sync.wake_mbarriers()

    def finish(self, batch: PendingCopies, which: Any) -> None:
        """These elements of a batch are complete now."""
        which = which[~batch.done[which]]
        if not len(which):
            return
        times = batch.complete_at[which]
        keys, nbytes = batch.perform(which, publish=False)
        if len(keys):
            barriers = self.launch.sync.mbarriers
            self.land(batch, which, keys, barriers.phase(keys))
            barriers.complete_tx(keys, nbytes, times)
        latest = float(times.max())
        self.launch.end_time = max(self.launch.end_time, latest)
        self.launch.did_something(latest)
        if batch.away is not None:
            self.launch.memory.away.landed(batch.away, *batch.landing(which), latest)
        if batch.kind is CopyKind.CP_ASYNC:
            self.arrivals.trigger()

    def land(self, batch: PendingCopies, which: Any, keys: Any, phase: Any) -> None:
        """The bytes become readable when a wait sees this phase of their barrier complete."""
        self.landed.append(Landed(batch, which, keys, phase))

    def waited(self, keys: Any) -> None:
        """A wait has seen the phase of these barriers complete: bytes that landed in it may now be read."""
        phase = self.launch.sync.mbarriers.phase

        def readable(item: Landed) -> Any:
            seen = item.keys == keys[0] if len(keys) == 1 else np.isin(item.keys, keys)
            return seen & (phase(item.keys) > item.phase)

        self._publish(readable)

    def _publish(self, readable: Callable[[Landed], Any]) -> None:
        """Make the landed elements readable that ``readable`` marks; the others stay as they are."""
        kept: list[Landed] = []
        for item in self.landed:
            now = readable(item)
            if not now.any():
                kept.append(item)
                continue
            item.batch.publish(item.which[now])
            if not now.all():
                kept.append(item.part(~now))
        self.landed = kept

    def complete(self, batch: PendingCopies, which: Any) -> None:
        """Complete these elements of a batch and wake whoever waited for them."""
        self.finish(batch, which)
        if batch.done.all():
            self.pending.remove(batch)
        self.launch.sync.wake_mbarriers()

    def complete_due(self, limit: float) -> None:
        """Timed: everything whose modelled completion is not later than ``limit``."""
        self.bulk.prefetches.settle(limit)
        if limit < self._due:
            return
        for batch in self.pending:
            if batch.kind.from_shared:
                batch.read_sources(np.flatnonzero(~batch.read & (batch.read_at <= limit)))
            which = np.flatnonzero(~batch.done & (batch.complete_at <= limit))
            if len(which):
                self.finish(batch, which)
        self.forget_done()
        self.launch.sync.wake_mbarriers()

    def next_time(self) -> float:
        """A time not later than the earliest completion among the pending copies; infinite without any."""
        return self._due

    def forget_done(self) -> None:
        """What is complete is pending no more."""
        self.pending = [b for b in self.pending if not b.done.all()]
        if self.launch.clock is None:
            return
        self._due = min((float(b.complete_at[~b.done].min()) for b in self.pending), default=np.inf)

    def retire(self, slots: Any) -> None:
        """CTAs have exited: bulk copies must not use their shared memory any more; cp.async is dropped."""
        if self.launch.clock is not None:
            self.complete_due(float(self.launch.time.reshape(self.launch.geometry.slots, -1)[slots].max()))
        self.engine.check_exit(slots)
        self.arrivals.retire(slots)
        self.bulk.maps.retire(slots)
        self.engine.abandon(slots)
        keys_per_slot = self.launch.memory.pitch // 8
        self._publish(lambda item: np.isin(item.keys // keys_per_slot, slots))  # nobody is left to read them


def _wait_name(number: int | None, bulk: bool, read: bool) -> str:
    """The instruction, as a trace names it."""
    name = "cp.async.bulk.wait_group" if bulk else "cp.async.wait_group"
    if number is None:
        return "cp.async.wait_all"
    return f"{name}.read {number}" if read else f"{name} {number}"
