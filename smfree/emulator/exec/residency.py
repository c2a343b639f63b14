"""Which CTAs of a launch are resident, in which slots, and which of their threads are alive.

Slots are dealt to SMs in turn; a cluster takes neighbouring ones, and leaves them together.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import EmulationError, Unsupported
from smfree.emulator.exec.lanes import Geometry, LaneSet
from smfree.emulator.exec.report import xyz
from smfree.emulator.occupancy import footprint, occupancy, resident_clusters
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.node import DeviceState

Extent = tuple[int, int, int]


class Residency:
    """``cta`` is the linear number of the CTA in each slot, ``live`` how many of its threads have not exited,
    ``alive`` which. ``next_cta`` of ``num_ctas`` start when slots are free and the device has room."""

    def __init__(
        self, device: DeviceState, grid: Extent, block: Extent, cluster: Extent | None, shared_bytes: int,
        registers: int | None,
    ) -> None:  # fmt: skip
        profile = device.profile
        self.residents = device.residents
        self.explicit_cluster = cluster is not None
        self.grid, self.block, self.cluster = grid, block, cluster or (1, 1, 1)
        self.cluster_size = prod(self.cluster)
        if self.cluster_size > 1 and profile.cluster is None:
            raise Unsupported(
                f"{profile.device.name} has no clusters (got {cluster}): they need compute capability 9.0",
                rule="cluster.absent",
            )
        spec = profile.device
        threads = prod(block)
        self.num_ctas = prod(grid)
        self.ctas_per_sm = resident_ctas(spec, threads, shared_bytes, registers)
        room = resident_clusters(spec, self.ctas_per_sm, self.cluster_size) * self.cluster_size
        slots = min(self.num_ctas, room)
        self.footprint = footprint(spec, threads, registers, shared_bytes)
        self.geometry = Geometry(threads, slots, spec.num_sms, self.cluster_size)
        self.cta = np.full(slots, -1, np.int64)
        self.live = np.zeros(slots, np.int64)
        self.alive = np.zeros(slots * threads, np.bool_)
        self.next_cta = 0
        self._free_slots: list[int] = list(range(slots))
        self._dealt = False  # whether slots have other SMs than those they get on an empty device
        self.lacks_room = False  # CTAs have found no room beside other launches
        self._tried = -1  # the state of the device in which that was

    def enter(self) -> Any:
        """Waiting CTAs move into free slots, cluster by cluster: these slots, or None."""
        if not self._free_slots or self.next_cta >= self.num_ctas:
            return None
        slots = np.array(sorted(self._free_slots)[: self.num_ctas - self.next_cta], np.int64)
        if self._dealt or self.residents.shared:
            if self._tried == self.residents.version:
                return None
            slots = self._deal(slots)
            if not len(slots):
                return None
        taken = set(slots.tolist())
        self._free_slots = [s for s in self._free_slots if s not in taken]
        self.cta[slots] = self._in_launch_order(self.next_cta + np.arange(len(slots)))
        self.next_cta += len(slots)
        self.live[slots] = self.geometry.threads
        self.alive[self.geometry.of_slots(slots).ids] = True
        return slots

    def _deal(self, slots: Any) -> Any:
        """Give slots an SM that has room beside other launches; those of whole clusters that get one."""
        sms = self.residents.room(self.footprint, self.ctas_per_sm, self)[: len(slots)]
        slots = slots[: len(sms) // self.cluster_size * self.cluster_size]
        if len(slots):
            self.geometry.deal(slots, sms[: len(slots)])
            self._dealt = True
        self.lacks_room = len(slots) < min(len(self._free_slots), self.num_ctas - self.next_cta)
        self._tried = self.residents.version
        return slots

    def exit(self, lanes: LaneSet) -> Any:
        """These threads are no more: the slots of CTAs that went with their last one."""
        self.alive[lanes.ids] = False
        self.live[lanes.slots] -= lanes.slot_counts
        return lanes.slots[self.live[lanes.slots] == 0]

    def vacate(self, retired: Any) -> None:
        """New CTAs may take the slots of clusters of which nobody is left."""
        size = self.cluster_size
        if size > 1:
            clusters = np.unique(retired // size)
            over = clusters[~self.live.reshape(-1, size)[clusters].any(axis=1)]
            retired = (over[:, None] * size + np.arange(size)).ravel()
        self._free_slots.extend(retired.tolist())
        self._tried = -1

    @property
    def dispatched(self) -> bool:
        """Whether every CTA has started."""
        return self.next_cta == self.num_ctas

    @property
    def sms(self) -> Any:
        """The SM of each resident CTA."""
        held = (self.live.reshape(-1, self.cluster_size) > 0).any(axis=1)
        return self.geometry.sm_of_slot[np.repeat(held, self.cluster_size)]

    def _in_launch_order(self, nth: Any) -> Any:
        """Linear numbers in the grid of the nth CTAs to start: whole clusters, in the order of their ids."""
        cx, cy, cz = self.cluster
        if cy == cz == 1:
            return nth
        gx, gy, _ = self.grid
        which, rank = nth // self.cluster_size, nth % self.cluster_size
        x = which % (gx // cx) * cx + rank % cx
        y = which // (gx // cx) % (gy // cy) * cy + rank // cx % cy
        z = which // (gx // cx * (gy // cy)) * cz + rank // (cx * cy)
        return (z * gy + y) * gx + x

    def cta_coordinate(self, slots: Any, axis: int) -> Any:
        """%ctaid along one axis of the CTAs in these slots."""
        stride = (1, self.grid[0], self.grid[0] * self.grid[1])[axis]
        return self.cta[slots] // stride % self.grid[axis]

    def live_mask(self, warps: Any) -> Any:
        """Bit mask of the lanes of each warp that have not exited."""
        return (self.live_lanes(warps).astype(np.int64) << np.arange(WARP_SIZE)).sum(axis=1)

    def live_lanes(self, warps: Any) -> Any:
        """bool[n, 32]: which lanes of each warp have not exited."""
        wpc, threads = self.geometry.warps_per_cta, self.geometry.threads
        lane = np.arange(WARP_SIZE)
        tid = (warps % wpc)[:, None] * WARP_SIZE + lane
        ids = (warps // wpc)[:, None] * threads + np.minimum(tid, threads - 1)
        return self.alive[ids] & (tid < threads)

    def name_lane(self, lane: int) -> str:
        """ "CTA 3 thread 17" """
        slot, tid = divmod(lane, self.geometry.threads)
        return f"{self.name_cta(slot)} thread {xyz(tid, self.block)}"

    def name_cta(self, slot: int) -> str:
        """ "CTA 3", or "CTA (3,1)" of a 2-D grid."""
        return f"CTA {xyz(int(self.cta[slot]), self.grid)}"


def resident_ctas(spec: Any, threads: int, shared_bytes: int, registers: int | None) -> int:
    """CTAs that fit on one SM: slots, threads, shared memory and (where known) registers."""
    fit = occupancy(spec, threads, registers or None, shared_bytes).ctas
    if fit < 1:
        raise EmulationError(
            f"a CTA of {threads} threads with {shared_bytes} bytes of shared memory and "
            f"{registers or 'unknown'} "
            "registers per thread does not fit on an SM; reduce one of them",
            rule="launch.resources",
        )
    return fit
