"""``barrier.cluster``: all threads of a cluster meet, in split phases (PTX ISA, "barrier.cluster").

A thread arrives, may do other work, and waits. The phase completes when every thread of the cluster that has
not exited has arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import BarrierFault
from smfree.emulator.exec.lanes import Group
from smfree.emulator.ptx.ast import Instr

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

AWAY, ARRIVED, COMPLETE = range(3)
"""A thread's place in the barrier: not arrived, arrived in the running phase, its phase has completed."""


class ClusterBarrier:
    """The cluster barriers of one launch, one per resident cluster."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        geometry = launch.geometry
        self.size = geometry.cluster_size
        clusters = geometry.slots // self.size
        self.place = np.zeros(geometry.slots * geometry.threads, np.int8)
        self.arrived = np.zeros(clusters, np.int64)  # living threads in the running phase
        self.phase = np.zeros(clusters, np.int64)
        self.latest = np.zeros(clusters)  # time of the newest arrival
        self.completed_at = np.zeros(clusters)
        self.parked: list[Group] = []
        self.used = False

    def reset(self, slots: Any) -> None:
        """New clusters move into these slots."""
        clusters = np.unique(slots // self.size)
        self.phase[clusters] = 0
        self.latest[clusters] = 0.0

    def absent(self, slots: range) -> Any:
        """bool[len(slots), threads]: who has not arrived in the running phase."""
        return self.place.reshape(self.launch.geometry.slots, -1)[slots] == AWAY

    # ---------------------------------------------------------------- arrive and wait

    def arrive(self, g: Group, *, release: bool) -> None:
        """barrier.cluster.arrive of whole warps."""
        launch, lanes = self.launch, g.lanes
        self.used = True
        launch.counters.barriers += len(lanes.warps)
        if release:
            launch.peers.release(g)
        self.place[lanes.ids] = ARRIVED
        clusters = lanes.slots // self.size
        np.add.at(self.arrived, clusters, lanes.slot_counts)
        if launch.clock is not None:
            np.maximum.at(self.latest, self._of_warps(g), launch.settle(g))
        self._complete(np.unique(clusters))

    def wait(self, g: Group) -> bool:
        """barrier.cluster.wait of whole warps: True when the group may go on, False when it was parked."""
        launch = self.launch
        done = self.place[g.lanes.ids] == COMPLETE
        if done.all():
            self._pass(g)
            return True
        yes, no = launch.flow.part_mask(g, done)
        assert no is not None
        self.parked.append(no)
        if yes is not None:
            self._pass(yes)
            launch.flow.resume([yes])
        return False

    def lanes_left(self, g: Group) -> None:
        """Threads exited: nobody waits for them any more."""
        if self.size == 1 and not self.used:
            return
        lanes = g.lanes
        gone = np.flatnonzero(self.place[lanes.ids] == ARRIVED)
        np.subtract.at(self.arrived, lanes.slot[gone] // self.size, 1)
        self.place[lanes.ids] = AWAY
        if self.launch.clock is not None:  # what waited only for them goes on from here
            np.maximum.at(self.latest, self._of_warps(g), self.launch.settle(g))
        self._complete(np.unique(lanes.slots // self.size))

    def check(self, g: Group, *, arrives: bool) -> None:
        """Arrivals and waits alternate; the lanes of a warp execute the same ``.aligned`` instruction."""
        away = self.place[g.lanes.ids] == AWAY
        wrong = np.flatnonzero(away != arrives)
        if len(wrong) and arrives:
            raise BarrierFault(
                "barrier.cluster.arrive a second time without barrier.cluster.wait in between; each thread "
                "arrives once per phase and waits for it before it arrives again",
                rule="cluster.arrive_twice",
                index=int(wrong[0]),
            )
        if len(wrong):
            raise BarrierFault(
                "barrier.cluster.wait without barrier.cluster.arrive before it: the barrier cannot complete "
                "without this thread; arrive first",
                rule="cluster.wait_first",
                index=int(wrong[0]),
            )
        self._check_aligned(g)

    def _check_aligned(self, g: Group) -> None:
        launch = self.launch
        mine = launch.kernel.instrs[g.pc]
        for other in launch.warps.parked:
            theirs = launch.kernel.instrs[other.pc]
            if other.pc == g.pc or not is_cluster_barrier(theirs):
                continue
            both = np.flatnonzero(np.isin(g.lanes.warp, other.lanes.warps))
            if len(both) and "aligned" in (*mine.modifiers, *theirs.modifiers):
                raise BarrierFault(
                    "lanes of one warp reached different barrier.cluster instructions: "
                    f"{launch.line_of(other.pc)} and {launch.line_of(g.pc)}; an aligned one must be executed "
                    "by the whole warp together (leave .aligned out, or move it out of the branch)",
                    rule="bar.divergent",
                    index=int(both[0]),
                )

    def _of_warps(self, g: Group) -> Any:
        """The cluster of each warp."""
        return g.lanes.warps // (self.launch.geometry.warps_per_cta * self.size)

    def _complete(self, clusters: Any) -> None:
        """Complete the phase of those clusters of which every living thread has arrived."""
        launch = self.launch
        arrived = self.arrived[clusters]
        done = clusters[(arrived > 0) & (arrived == launch.live.reshape(-1, self.size)[clusters].sum(axis=1))]
        if not len(done):
            return
        places = self.place.reshape(len(self.arrived), -1)
        places[done] = np.where(places[done] == ARRIVED, COMPLETE, places[done])
        self.arrived[done] = 0
        self.phase[done] += 1
        self.completed_at[done] = self.latest[done]
        launch.did_something(float(self.latest[done].max()))
        open_slots = np.zeros(launch.geometry.slots, np.bool_)
        open_slots.reshape(-1, self.size)[done] = True
        parts = [launch.flow.part_slots(g, open_slots) for g in self.parked]
        self.parked = [no for _, no in parts if no is not None]
        released = [yes for yes, _ in parts if yes is not None]
        for g in released:
            self._pass(g)
        launch.flow.resume(released)

    def _pass(self, g: Group) -> None:
        """The group has seen its phase complete."""
        launch, lanes = self.launch, g.lanes
        self.place[lanes.ids] = AWAY
        launch.peers.all_started(lanes.slots)
        if launch.clock is None:
            return
        before = launch.settle(g)
        after = np.maximum(before, self.completed_at[self._of_warps(g)] + launch.clock.cluster_barrier_cycles)
        launch.time[lanes.warp_slice] = after
        if launch.trace is not None:
            launch.trace.waited(g, "barrier.cluster", before, after)


def is_cluster_barrier(instr: Instr) -> bool:
    """Is it barrier.cluster.arrive or .wait?"""
    return instr.opcode == "barrier" and "cluster" in instr.modifiers
