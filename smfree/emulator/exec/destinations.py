"""Which CTAs of a cluster an asynchronous copy writes to, and the mbarriers that count its bytes there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from smfree.emulator.bytespace import Report
from smfree.emulator.errors import CopyFault, EmulationError
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_unit import Naming
from smfree.emulator.exec.values import CLUSTER_OFFSET, CLUSTER_SHIFT

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

MASK_BITS = 16


@dataclass(frozen=True, slots=True)
class Destinations:
    """One element per destination: flat address, mbarrier key, and the position of the issuing lane in its
    group (a slice when every lane has one destination)."""

    flat: Any
    keys: Any
    which: Any

    def of_lanes(self, lanes: Any) -> Destinations:
        """Those of some of the lanes (positions, or a slice for all)."""
        if isinstance(lanes, slice):
            return self
        if isinstance(self.which, slice):
            return Destinations(self.flat[lanes], self.keys[lanes], lanes)
        mine = np.isin(self.which, lanes)
        return Destinations(self.flat[mine], self.keys[mine], self.which[mine])


@dataclass(frozen=True, slots=True)
class _Senders:
    """The slots of the issuing lanes, once for each destination: what address checks ask of a LaneSet."""

    slot: Any


class _Reporter(Protocol):
    report: Report


@contextmanager
def positions(reporter: _Reporter, which: Any) -> Iterator[None]:
    """Findings about elements ``which`` of the lanes carry the lane's position."""
    if isinstance(which, slice):
        yield
        return
    report = reporter.report
    told: list[EmulationError] = []  # a reported finding may come back as an exception

    def among(finding: EmulationError) -> EmulationError:
        if finding.index is not None and not any(finding is f for f in told):
            finding.index = int(which[finding.index])
            told.append(finding)
        return finding

    reporter.report = lambda finding: report(among(finding))
    try:
        yield
    except EmulationError as fault:
        raise among(fault) from None
    finally:
        reporter.report = report


def own(launch: Launch, g: Group, dst: Any, barrier: Any, what: Naming) -> Destinations:
    """``.shared::cta``: the executing CTA's. ``what``: the destination, for reports."""
    flat = launch.memory.flat_shared(g.lanes, dst, 1, what=what)
    keys = launch.sync.mbarriers.keys(launch.memory.flat_shared(g.lanes, barrier, 8))
    return Destinations(flat, keys, slice(None))


def in_cluster(launch: Launch, g: Group, dst: Any, barrier: Any, what: Naming) -> Destinations:
    """``.shared::cluster``: any one CTA's; the mbarrier lies in the same."""
    if not ((dst | barrier) >> CLUSTER_SHIFT).any():
        return own(launch, g, dst, barrier, what)
    return _checked(launch, g.lanes, dst, barrier, slice(None), what)


def multicast(launch: Launch, g: Group, dst: Any, barrier: Any, what: Naming, mask: Any) -> Destinations:
    """``.multicast::cluster``: the same offsets in every CTA of the mask, bit r for rank r."""
    masks = np.broadcast_to(mask, g.lanes.n).astype(np.int64) & ((1 << MASK_BITS) - 1)
    empty = np.flatnonzero(masks == 0)
    if len(empty):
        raise CopyFault(
            "a multicast copy with an empty CTA mask has no destination; set a bit for each rank",
            rule="multicast.mask",
            index=int(empty[0]),
        )
    beyond = np.flatnonzero(masks >> launch.cluster_size)
    if len(beyond):
        i = int(beyond[0])
        raise CopyFault(
            f"the CTA mask 0x{int(masks[i]):x} names rank {int(masks[i]).bit_length() - 1}, the cluster has "
            f"{launch.cluster_size} CTAs; use bits 0 to {launch.cluster_size - 1}",
            rule="multicast.mask",
            index=i,
        )
    which, rank = np.nonzero(masks[:, None] >> np.arange(MASK_BITS) & 1)
    high = (rank + 1) << CLUSTER_SHIFT
    senders = _Senders(g.lanes.slot[which])
    there, counting = ((a & CLUSTER_OFFSET)[which] | high for a in (dst, barrier))
    with positions(launch.peers, which):
        return _checked(launch, senders, there, counting, which, lambda row: what(int(which[row])))


def _checked(launch: Launch, senders: Any, dst: Any, barrier: Any, which: Any, what: Naming) -> Destinations:
    flat = launch.peers.flat(senders, dst, 1, what)
    keys = launch.sync.mbarriers.keys(launch.peers.flat(senders, barrier, 8))
    pitch = launch.memory.pitch
    apart = np.flatnonzero(flat // pitch != keys * 8 // pitch)
    if len(apart):
        i = int(apart[0])
        raise CopyFault(
            f"the mbarrier is in {launch.name_cta(int(keys[i]) * 8 // pitch)}, the destination in "
            f"{launch.name_cta(int(flat[i]) // pitch)}; both must be in the same CTA (mapa both addresses)",
            rule="copy.barrier_cta",
            index=i,
        )
    launch.peers.touched(senders, keys, narrow=False)
    return Destinations(flat, keys, which)
