"""Asynchronous copies: validation at issue, bookkeeping in flight, bytes moved at completion.

No scheduling here: the executor decides when, calls :meth:`PendingCopies.perform`, and hands the returned bytes
to :meth:`~smfree.emulator.barriers.MBarriers.complete_tx`. Source bytes are read and destination bytes written
at completion; until then a destination in shared memory is poisoned (a read is a fault that names the copy).
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from smfree.emulator.barriers import MBarriers
from smfree.emulator.memory import GlobalMemory, Report, SharedMemory
from smfree.emulator.tensormap import TensorMap


class CopyKind(Enum):
    CP_ASYNC = "cp.async"
    BULK_G2S = "cp.async.bulk.shared.global"
    BULK_S2G = "cp.async.bulk.global.shared"
    TENSOR_G2S = "cp.async.bulk.tensor.shared.global"
    TENSOR_S2G = "cp.async.bulk.tensor.global.shared"


class PendingCopies:
    """One batch: what one instruction issued for n lanes.

    Arrays of length n: ``issuer`` (opaque lane index given by the executor), ``dst``, ``src``, ``nbytes`` (bytes
    that complete_tx counts), ``key`` (mbarrier keys or None), ``group`` (group ids or None), ``complete_at`` and
    ``read_at`` float64 (the executor fills them in), ``read`` / ``done`` bool.
    """

    kind: CopyKind
    issuer: np.ndarray
    dst: np.ndarray
    src: np.ndarray
    nbytes: np.ndarray
    key: np.ndarray | None
    group: np.ndarray | None
    complete_at: np.ndarray
    read_at: np.ndarray
    read: np.ndarray
    done: np.ndarray
    label: str

    def __len__(self) -> int:
        return len(self.issuer)

    def read_sources(self, which: np.ndarray) -> None:
        """Stores: the source is read NOW and may be overwritten afterwards (``wait_group.read``)."""

    def perform(self, which: np.ndarray, *, publish: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Move the bytes of these elements NOW. Returns (mbarrier keys, bytes) to complete_tx, empty without.

        ``publish=False`` leaves shared destinations unreadable until :meth:`publish`.
        """
        raise NotImplementedError

    def publish(self, which: np.ndarray) -> None:
        """Make landed bytes readable (a wait that covers them has succeeded)."""


class CopyEngine:
    """Issues copies between one global memory and the shared memory of the resident CTAs."""

    def __init__(
        self,
        global_memory: GlobalMemory,
        shared: SharedMemory,
        barriers: MBarriers,
        *,
        report: Report | None = None,
    ) -> None: ...

    def cp_async(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        cp_bytes: int,
        src_bytes: np.ndarray | int | None = None,
        *,
        group: np.ndarray | None = None,
        cache: str = "ca",
        label: str = "",
    ) -> PendingCopies:
        """``cp.async``: dst flat shared int64[n], src global int64[n]; bytes past ``src_bytes`` become zero."""
        raise NotImplementedError

    def bulk_load(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: np.ndarray | int,
        key: np.ndarray,
        *,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes``."""
        raise NotImplementedError

    def bulk_store(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: np.ndarray | int,
        *,
        group: np.ndarray | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.global.shared::cta.bulk_group``."""
        raise NotImplementedError

    def tensor_load(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        map_addr: np.ndarray,
        coords: np.ndarray,
        key: np.ndarray,
        *,
        maps: TensorMap | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.tensor.Nd.shared.global.tile``: coords int64[n, rank], innermost first.

        ``map_addr`` int64[n] global (generic) addresses of the maps; or pass ``maps``, one decoded map for all
        lanes (a map in .param space), with ``map_addr`` kept for reports only.
        """
        raise NotImplementedError

    def tensor_store(
        self,
        issuer: np.ndarray,
        src: np.ndarray,
        map_addr: np.ndarray,
        coords: np.ndarray,
        *,
        group: np.ndarray | None = None,
        maps: TensorMap | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.tensor.Nd.global.shared::cta.tile.bulk_group``."""
        raise NotImplementedError

    def check_global(self, addr: np.ndarray, nbytes: int, *, write: bool) -> None:
        """A plain access to global bytes: fault if it reads or writes the destination, or writes the source, of a
        copy in flight. Cheap when nothing is in flight near it. (Shared accesses are checked by SharedMemory.)"""

    def pending_of_slot(self, slot: int) -> list[str]:
        """Descriptions of the copies that still use the shared memory of this slot (for CTA exit)."""
        raise NotImplementedError

    def release_slots(self, slots: np.ndarray, *, time: np.ndarray | None = None) -> None:
        """CTAs leave: bulk copies still reading or writing their shared memory are an error."""


class CopyGroups:
    """Commit groups per thread: cp.async groups, or bulk groups. Empty groups count.

    A copy issued now belongs to group ``current(lanes)``; ``commit`` closes it. ``wait_group N`` lets at most the
    N newest groups stay pending: everything with id <= ``upto(lanes, N)`` must be complete.
    """

    def __init__(self, lanes: int) -> None: ...

    def current(self, lanes: np.ndarray) -> np.ndarray:
        """Id of the open group of each lane -> int64[n]."""
        raise NotImplementedError

    def commit(self, lanes: np.ndarray) -> None:
        """Close the open group of each lane (also when it is empty)."""

    def upto(self, lanes: np.ndarray, pending: int) -> np.ndarray:
        """Newest group id that ``wait_group pending`` covers -> int64[n] (-1: none)."""
        raise NotImplementedError

    def upto_all(self, lanes: np.ndarray) -> np.ndarray:
        """Newest id that ``cp.async.wait_all`` covers: the open group too."""
        raise NotImplementedError

    def add(self, batch: PendingCopies) -> None:
        """Track a batch (its ``group`` array must be set)."""

    def blocked(self, lanes: np.ndarray, upto: np.ndarray, *, read: bool = False) -> np.ndarray:
        """bool[n]: does the lane still have a copy with group <= upto that is not done (``read``: not yet read)?"""
        raise NotImplementedError

    def ready_time(self, lanes: np.ndarray, upto: np.ndarray, *, read: bool = False) -> np.ndarray:
        """float64[n]: latest complete_at (read_at) of the copies covered; -inf where there is none."""
        raise NotImplementedError

    def covered(self, lanes: np.ndarray, upto: np.ndarray) -> list[tuple[PendingCopies, np.ndarray]]:
        """Batches and the element indices in them that such a wait covers and that are not done yet."""
        raise NotImplementedError

    def outstanding(self, lanes: np.ndarray) -> np.ndarray:
        """int64[n]: copies per lane not done yet (committed or not)."""
        raise NotImplementedError
