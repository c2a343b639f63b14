"""Shared memory and mbarriers of the other CTAs of a cluster: whose an address is, whether it may be touched,
what it costs (PTX ISA, "mapa", "mbarrier support with shared memory")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.barrier_table import sparse_zeros
from smfree.emulator.bytespace import WORDS, Report
from smfree.emulator.errors import BarrierFault, MemoryFault, Severity
from smfree.emulator.exec.accesses import Issue
from smfree.emulator.exec.lanes import Group, LaneSet
from smfree.emulator.exec.memory_unit import Naming, access
from smfree.emulator.exec.values import CLUSTER_OFFSET, CLUSTER_SHIFT, RANK_BEYOND

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

_PHASE, _RANKS, _BEFORE = range(3)
"""Columns of the arrival table: a phase, ranks that arrived in it, ranks that arrived in the one before."""


class ClusterUnit:
    """What the CTAs of each cluster know and have of each other.

    ``started``: bit mask, per CTA slot, of the ranks that are proven to have started: all once some thread of
    the CTA has passed a cluster barrier, one once the CTA has seen an mbarrier phase it arrived in complete.
    ``unpublished``: mbarriers whose initialisation no other CTA can rely on yet, with the lane that did it.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.report: Report = launch.report
        self.size = launch.cluster_size
        self.started = np.zeros(launch.geometry.slots, np.int64)
        self.unpublished: dict[int, int] = {}
        words = launch.geometry.slots * launch.memory.pitch // 8 if self.size > 1 else 0
        self._arrivals = sparse_zeros(words, 3) if words else np.zeros((0, 3), np.int64)

    def reset(self, slots: Any) -> None:
        """New CTAs move into these slots."""
        self.started[slots] = 0
        if self.unpublished:
            words, taken = self.launch.memory.pitch // 8, set(slots.tolist())
            self.unpublished = {k: v for k, v in self.unpublished.items() if k // words not in taken}

    def all_started(self, slots: Any) -> None:
        """These CTAs have passed a cluster barrier."""
        self.started[slots] = -1

    # ---------------------------------------------------------------- addresses

    def slots_of(self, lanes: LaneSet, addr: Any) -> Any:
        """The slot whose shared memory each window offset names: the lane's own, or one that mapa chose."""
        rank = (addr >> CLUSTER_SHIFT) - 1
        own = lanes.slot
        outside = np.flatnonzero(rank >= self.size)
        if len(outside):
            i = int(outside[0])
            named = int(rank[i]) if rank[i] < RANK_BEYOND else f"above {RANK_BEYOND - 1}"
            raise MemoryFault(
                f"the shared address 0x{int(addr[i]):x} is mapped to CTA rank {named} of a cluster of "
                f"{self.size}; mapa takes ranks below %cluster_nctarank",
                rule="cluster.rank",
                index=i,
            )
        return np.where(rank < 0, own, own - own % self.size + rank)

    def flat(self, lanes: LaneSet, addr: Any, nbytes: int, what: Naming | None = None) -> Any:
        """Window offsets of any CTA of the cluster -> flat addresses over all slots."""
        slot = self.slots_of(lanes, addr)
        offset = addr & CLUSTER_OFFSET
        limit = self.launch.shared_bytes
        beyond = np.flatnonzero((addr < 0) | (offset + nbytes > limit))
        if len(beyond):
            i = int(beyond[0])
            name = what(i) if what else access(nbytes)
            raise MemoryFault(
                f"{name} at offset 0x{int(offset[i]):x} of {self.name(slot[i])} "
                f"leaves the {limit} bytes a CTA has; check the index, or launch with more dynamic shared "
                "memory",
                rule="shared.bounds",
                index=i,
            )
        self._check_present(lanes, slot)
        return slot * self.launch.memory.pitch + offset

    def flat_own(
        self, lanes: LaneSet, addr: Any, nbytes: int, remedy: str, what: Naming | None = None
    ) -> Any:
        """The same where the address must be the executing CTA's; ``remedy`` if it is not."""
        slot = self.slots_of(lanes, addr)
        foreign = np.flatnonzero(slot != lanes.slot)
        if len(foreign):
            i = int(foreign[0])
            raise MemoryFault(
                f"address belongs to {self.name(slot[i])} of the cluster (rank {int(slot[i]) % self.size}), "
                f"{self.name(lanes.slot[i])} executes; {remedy}",
                rule="cluster.own",
                index=i,
            )
        return self.flat(lanes, addr, nbytes, what)

    def _check_present(self, lanes: LaneSet, slot: Any) -> None:
        """Peers have started and have not exited."""
        remote = np.flatnonzero(slot != lanes.slot)
        if not len(remote):
            return
        launch, own, peer = self.launch, lanes.slot[remote], slot[remote]
        gone = np.flatnonzero(launch.live[peer] == 0)
        if len(gone):
            i = int(gone[0])
            raise MemoryFault(
                f"{self.name(own[i])} touches the shared memory of {self.name(peer[i])}, which has exited; "
                f"{self.name(peer[i])} must stay until its peers are done with it (a closing "
                "barrier.cluster, or a wait for the last arrival)",
                rule="cluster.exited",
                index=int(remote[i]),
            )
        unproven = np.flatnonzero(self.started[own] >> (peer % self.size) & 1 == 0)
        if len(unproven):
            i = int(unproven[0])
            self.started[own[unproven]] = -1  # told once
            self.report(
                MemoryFault(
                    f"{self.name(own[i])} touches the shared memory of {self.name(peer[i])} before anything "
                    "has proven that it has started; pass a cluster barrier (barrier.cluster.arrive and "
                    ".wait) first",
                    rule="cluster.not_started",
                    severity=Severity.STRICT,
                    index=int(remote[i]),
                )
            )

    def name(self, slot: Any) -> str:
        """ "CTA 3" """
        return self.launch.name_cta(int(slot))

    # ---------------------------------------------------------------- loads, stores, atomics

    def load(self, at: Issue, addr: Any, size: int, count: int) -> tuple[Any, Any]:
        """(uint[n, count] loaded from the cluster's shared memory, when each warp's registers are filled)."""
        memory, nbytes = self.launch.memory, size * count
        flat = self.flat(at.lanes, addr, nbytes)
        remote = self._elsewhere(at.lanes, flat)
        if not remote.any():
            return memory.load_shared(at, addr & CLUSTER_OFFSET, size, count)
        if not remote.all():
            return self._load_mixed(at.group, remote, addr, size, count)
        counters = self.launch.counters
        counters.cluster_load_requests += len(at.lanes.warps)
        counters.cluster_load_bytes += at.lanes.n * nbytes
        return memory.shared.load(flat, size, count), self.arrival(at.group, flat, nbytes, write=False)

    def store(self, at: Issue, addr: Any, values: Any) -> None:
        """Store uint[n, k] to the cluster's shared memory."""
        memory, nbytes = self.launch.memory, values.shape[1] * values.itemsize
        flat = self.flat(at.lanes, addr, nbytes)
        remote = self._elsewhere(at.lanes, flat)
        if not remote.any():
            memory.store_shared(at, addr & CLUSTER_OFFSET, values)
            return
        if not remote.all():
            for part, index in self._split(at.group, remote):
                self.store(Issue(part), addr[index], values[index])
            return
        memory.shared.store(flat, values)
        counters = self.launch.counters
        counters.cluster_store_requests += len(at.lanes.warps)
        counters.cluster_store_bytes += at.lanes.n * nbytes
        self._performed(at.group, self.arrival(at.group, flat, nbytes, write=True))

    def atomic(self, g: Group, op: str, addr: Any, value: Any, compare: Any, *, waits: bool) -> Any:
        """Read-modify-write in the cluster's shared memory -> the old values; ``waits`` for them (atom)."""
        launch = self.launch
        flat = self.flat(g.lanes, addr, value.itemsize)
        old = launch.memory.shared.atomic(op, flat, value, compare)
        if not self._elsewhere(g.lanes, flat).any():
            return old
        if waits and launch.clock is not None:
            launch.time[g.lanes.warp_slice] = self.arrival(g, flat, value.itemsize, write=False)
        else:
            self._performed(g, self.arrival(g, flat, value.itemsize, write=True))
        return old

    def release(self, g: Group) -> None:
        """A release whose scope is the cluster: what the threads did before reaches every SM first.

        On sm_90 ptxas makes it a MEMBAR.ALL.GPU.
        """
        self.publish(g)
        if self.size == 1 or self.launch.clock is None:
            return
        self.launch.memory.settle_stores(g, "cluster")
        self.launch.spend(g, self.launch.clock.fence_cycles["cluster"])

    def _elsewhere(self, lanes: LaneSet, flat: Any) -> Any:
        """bool[n]: is the address another CTA's?"""
        return flat // self.launch.memory.pitch != lanes.slot

    def _split(self, g: Group, remote: Any) -> list[tuple[Group, Any]]:
        """The lanes that go to other CTAs and those that stay, each with its places in the group."""
        self.launch.settle(g)
        far, near, there, here = g.lanes.split(remote)
        return [(g.part(far, there, (), g.pc), there), (g.part(near, here, (), g.pc), here)]

    def _load_mixed(self, g: Group, remote: Any, addr: Any, size: int, count: int) -> tuple[Any, Any]:
        out = np.empty((g.lanes.n, count), WORDS[size])
        ready = None if self.launch.clock is None else np.zeros(len(g.lanes.warps))
        for part, index in self._split(g, remote):
            out[index], times = self.load(Issue(part), addr[index], size, count)
            if ready is not None:
                w = np.searchsorted(g.lanes.warps, part.lanes.warps)
                ready[w] = np.maximum(ready[w], times)
        return out, ready

    def arrival(self, g: Group, flat: Any, nbytes: int, *, write: bool) -> Any:
        """When each warp's request has been to all the CTAs it touches; None without a clock."""
        launch, lanes = self.launch, g.lanes
        if launch.clock is None:
            return None
        slots = launch.geometry.slots
        pairs, counts = np.unique(lanes.warp_index * slots + flat // launch.memory.pitch, return_counts=True)
        warp, peer = pairs // slots, pairs % slots
        t = launch.settle(g)
        sms = launch.geometry.sm_of_slot
        done = launch.clock.cluster(lanes.sm[warp], sms[peer], t[warp], counts * nbytes, write=write)
        return np.maximum.reduceat(done, np.flatnonzero(np.diff(warp, prepend=-1)))

    def _performed(self, g: Group, times: Any) -> None:
        """The group's stores are visible to their CTAs at these times."""
        if times is None:
            self.launch.did_something()
            return
        w, performed = g.lanes.warp_slice, self.launch.memory.performed
        performed[w] = np.maximum(performed[w], times)
        self.launch.did_something(float(times.max()))

    # ---------------------------------------------------------------- mbarriers

    def delay(self, lanes: LaneSet, keys: Any) -> Any:
        """Cycles until an operation on the mbarriers ``keys`` is there, for each lane; under a clock."""
        clock = self.launch.clock
        assert clock is not None
        return np.where(self._remote(lanes, keys), clock.cluster_store_cycles, 0.0)

    def initialised(self, lanes: LaneSet, keys: Any) -> None:
        """mbarrier.init: no other CTA can rely on it until its thread has released it."""
        if self.size > 1:
            self._arrivals[keys] = 0
            self.unpublished.update(zip(keys.tolist(), lanes.ids.tolist(), strict=True))

    def publish(self, g: Group) -> None:
        """fence.mbarrier_init, or another release of cluster scope, by the threads that initialised."""
        if self.unpublished:
            lanes = set(g.lanes.ids.tolist())
            self.unpublished = {k: v for k, v in self.unpublished.items() if v not in lanes}

    def touched(self, lanes: LaneSet, keys: Any, *, narrow: bool) -> None:
        """An operation on mbarriers of the cluster, ``narrow``: of scope .cta. Findings of remote ones."""
        if self.size == 1:
            return
        remote = np.flatnonzero(self._remote(lanes, keys))
        if not len(remote):
            return
        i = next((i for i in remote.tolist() if int(keys[i]) in self.unpublished), None)
        if i is not None:
            key = int(keys[i])
            maker = self.launch.name_lane(self.unpublished.pop(key))
            self._report(
                "mbarrier.init_fence",
                f"{self.name(lanes.slot[i])} uses an {self.launch.sync.mbarriers.place(key)}, which {maker} "
                "initialised without making that visible to the cluster; before the cluster barrier that "
                "thread must execute fence.mbarrier_init.release.cluster or another release of cluster scope",
                i,
            )
        if narrow:
            i = int(remote[0])
            self._report(
                "mbarrier.scope",
                f"{self.name(lanes.slot[i])} operates on an {self.launch.sync.mbarriers.place(int(keys[i]))} "
                "with scope .cta (the default), which does not reach another CTA; write .release.cluster or "
                ".relaxed.cluster",
                i,
            )

    def arrived(self, lanes: LaneSet, keys: Any) -> None:
        """Keep which CTAs arrive in the running phase of these barriers; call it before they do."""
        if self.size == 1:
            return
        rows, phase = self._arrivals, self.launch.sync.mbarriers.phase(keys)
        old = np.flatnonzero(rows[keys, _PHASE] != phase)
        if len(old):
            stale = keys[old]
            follows = rows[stale, _PHASE] == phase[old] - 1
            rows[stale, _BEFORE] = np.where(follows, rows[stale, _RANKS], 0)
            rows[stale, _PHASE] = phase[old]
            rows[stale, _RANKS] = 0
        np.bitwise_or.at(rows[:, _RANKS], keys, np.left_shift(1, lanes.slot % self.size))

    def ranks_in(self, keys: Any, phase: Any) -> Any:
        """Bit mask of the CTA ranks that arrived in this phase (the running or the preceding one)."""
        rows = self._arrivals[keys]
        now, before = rows[:, _PHASE] == phase, rows[:, _PHASE] == phase + 1
        return np.where(now, rows[:, _RANKS], np.where(before, rows[:, _BEFORE], 0))

    def who_arrived(self, key: int, phase: int) -> list[str]:
        """The CTAs that arrived in this phase, by name; empty where nobody else could."""
        if self.size == 1:
            return []
        ranks = int(self.ranks_in(np.array([key]), phase)[0])
        first = key * 8 // self.launch.memory.pitch // self.size * self.size
        return [self.name(first + r) for r in range(self.size) if ranks >> r & 1]

    def saw_phase(self, lanes: LaneSet, keys: Any, done: Any, *, narrow: bool) -> None:
        """Waits have seen a phase complete, where ``done``: its arrivals prove that peers have started."""
        if self.size == 1:
            return
        ranks = np.where(done, self.ranks_in(keys, self.launch.sync.mbarriers.phase(keys) - 1), 0)
        np.bitwise_or.at(self.started, lanes.slot, ranks)
        if not narrow:
            return
        foreign = np.flatnonzero(ranks & ~np.left_shift(1, lanes.slot % self.size))
        if len(foreign):
            i = int(foreign[0])
            place = self.launch.sync.mbarriers.place(int(keys[i]))
            self._report(
                "mbarrier.scope",
                f"a wait with scope .cta (the default) on an {place}, at which other CTAs arrived: what they "
                "did before is not ordered; write .acquire.cluster",
                i,
            )

    def _remote(self, lanes: LaneSet, keys: Any) -> Any:
        return keys // (self.launch.memory.pitch // 8) != lanes.slot

    def _report(self, rule: str, text: str, index: int) -> None:
        self.report(BarrierFault(text, rule=rule, severity=Severity.STRICT, index=index))
