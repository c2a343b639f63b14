"""Copies, stores and reductions into the shared memory of another CTA that complete on its mbarrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import CopyFault
from smfree.emulator.exec.destinations import Destinations, in_cluster
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_unit import OWN_CTA_ONLY, copied
from smfree.emulator.reductions import Reduction

if TYPE_CHECKING:
    from smfree.emulator.exec.copy_unit import CopyUnit


class PeerCopies:
    """``cp{.reduce}.async.bulk`` from shared to shared memory, ``st.async``, ``red.async`` of one launch."""

    def __init__(self, copies: CopyUnit) -> None:
        self.copies, self.launch, self.engine = copies, copies.launch, copies.engine

    def bulk(
        self, g: Group, dst: Any, src: Any, nbytes: Any, barrier: Any, reduction: Reduction | None
    ) -> None:
        """``cp{.reduce}.async.bulk.shared::cluster.shared::cta``; always to another CTA."""
        launch, lanes = self.launch, g.lanes
        name = "cp.async.bulk" if reduction is None else "cp.reduce.async.bulk"
        flat_src = launch.memory.flat_shared(lanes, src, 1, OWN_CTA_ONLY, copied(name, "source", nbytes))
        to = in_cluster(launch, g, dst, barrier, copied(name, "destination", nbytes))
        self._elsewhere(g, to, name)
        batch = self.engine.bulk_to_peer(
            lanes.ids, to.flat, flat_src, nbytes, to.keys, reduction=reduction, label=launch.here(g)
        )
        launch.counters.tma_requests += len(batch)
        launch.counters.cluster_async_bytes += int(batch.nbytes.sum())
        if launch.clock is not None:
            index = lanes.warp_index
            geometry = launch.geometry
            sm, peer = lanes.sm[index], geometry.sm_of_slot[to.flat // launch.memory.pitch]
            batch.read_at[:], batch.complete_at[:] = launch.clock.bulk_cluster(
                sm, peer, launch.settle(g)[index], batch.nbytes
            )
        self.copies.issued(g, batch)

    def store(self, g: Group, dst: Any, values: Any, barrier: Any, reduction: Reduction | None) -> None:
        """``st.async`` or ``red.async`` of uint8[n, nbytes]."""
        launch, lanes = self.launch, g.lanes
        name = "st.async" if reduction is None else "red.async"
        if launch.cluster_size == 1:
            raise CopyFault(
                f"{name} needs a cluster of more than one CTA; use st.shared, or launch a cluster",
                rule="copy.no_cluster",
                index=0,
            )
        to = in_cluster(launch, g, dst, barrier, copied(name, "destination", values.shape[1]))
        if reduction is not None:
            self._elsewhere(g, to, name)
        batch = self.engine.store_async(
            lanes.ids, to.flat, values, to.keys, reduction=reduction, label=launch.here(g)
        )
        launch.counters.cluster_async_bytes += values.size
        if launch.clock is not None:
            done = launch.peers.arrival(g, to.flat, values.shape[1], write=True)
            batch.complete_at[:] = done[lanes.warp_index]
        self.copies.issued(g, batch)

    def _elsewhere(self, g: Group, to: Destinations, name: str) -> None:
        here = np.flatnonzero(to.flat // self.launch.memory.pitch == g.lanes.slot)
        if len(here):
            i = int(here[0])
            raise CopyFault(
                f"{name} to .shared::cluster must go to another CTA, the destination is in the executing one "
                f"({self.launch.name_cta(int(g.lanes.slot[i]))}); mapa the addresses of destination and "
                "mbarrier to a peer",
                rule="copy.own_cta",
                index=i,
            )
