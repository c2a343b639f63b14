"""Clusters: which CTA a shared address belongs to, and whether it may be touched (PTX ISA, "mapa")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import MemoryFault
from smfree.emulator.exec.lanes import LaneSet
from smfree.emulator.exec.values import CLUSTER_OFFSET, CLUSTER_SHIFT

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.exec.memory_unit import Issue


class ClusterUnit:
    """The clusters of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.size = launch.cluster_size

    # ---------------------------------------------------------------- accesses

    def load(self, at: Issue, addr: Any, size: int, count: int) -> tuple[Any, Any]:
        """(uint[n, count] loaded from the cluster's shared memory, when each warp's registers are filled)."""
        flat = self.flat(at.lanes, addr, size * count)
        return self.launch.memory.shared.load(flat, size, count), None

    def store(self, at: Issue, addr: Any, values: Any) -> None:
        """Store uint[n, k] to shared memory of the cluster."""
        flat = self.flat(at.lanes, addr, values.shape[1] * values.itemsize)
        self.launch.memory.shared.store(flat, values)
        self.launch.did_something()

    # ---------------------------------------------------------------- addresses

    def slots_of(self, lanes: LaneSet, addr: Any) -> Any:
        """The slot whose shared memory each window offset names: the lane's own, or one that mapa chose."""
        rank = (addr >> CLUSTER_SHIFT) - 1
        own = lanes.slot
        outside = np.flatnonzero(rank >= self.size)
        if len(outside):
            i = int(outside[0])
            raise MemoryFault(
                f"the shared address 0x{int(addr[i]):x} is mapped to CTA rank {int(rank[i])} of a cluster of "
                f"{self.size}; mapa takes ranks below %cluster_nctarank",
                rule="cluster.rank",
                index=i,
            )
        return np.where(rank < 0, own, own - own % self.size + rank)

    def flat(self, lanes: LaneSet, addr: Any, nbytes: int) -> Any:
        """Window offsets of any CTA of the cluster -> flat addresses over all slots."""
        slot = self.slots_of(lanes, addr)
        offset = addr & CLUSTER_OFFSET
        limit = self.launch.shared_bytes
        beyond = np.flatnonzero((addr < 0) | (offset + nbytes > limit))
        if len(beyond):
            i = int(beyond[0])
            raise MemoryFault(
                f"shared access of {nbytes} bytes at offset 0x{int(offset[i]):x} of {self.name(slot[i])} "
                f"leaves the {limit} bytes a CTA has; check the index, or launch with more dynamic shared "
                "memory",
                rule="shared.bounds",
                index=i,
            )
        self._check_present(lanes, slot)
        return slot * self.launch.memory.pitch + offset

    def flat_own(self, lanes: LaneSet, addr: Any, nbytes: int) -> Any:
        """The same where the instruction says that the address is the executing CTA's."""
        slot = self.slots_of(lanes, addr)
        foreign = np.flatnonzero(slot != lanes.slot)
        if len(foreign):
            i = int(foreign[0])
            raise MemoryFault(
                f"address belongs to {self.name(slot[i])}, rank {int(slot[i]) % self.size} of the cluster; "
                f"needs .shared::cluster ({self.name(lanes.slot[i])} executes; .shared alone means "
                ".shared::cta)",
                rule="cluster.own",
                index=i,
            )
        return self.flat(lanes, addr, nbytes)

    def _check_present(self, lanes: LaneSet, slot: Any) -> None:
        gone = np.flatnonzero((slot != lanes.slot) & (self.launch.live[slot] == 0))
        if len(gone):
            i = int(gone[0])
            raise MemoryFault(
                f"{self.name(lanes.slot[i])} touches the shared memory of {self.name(slot[i])}, which has "
                "exited; a CTA stays (barrier.cluster, or a wait for the last arrival) until its peers are "
                "done with it",
                rule="cluster.exited",
                index=i,
            )

    def name(self, slot: Any) -> str:
        """ "CTA 3" """
        return self.launch.name_cta(int(slot))
