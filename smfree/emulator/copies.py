"""Asynchronous copies: checked at issue, tracked in flight, bytes moved at completion.

No scheduling here. The executor issues a batch through :class:`CopyEngine`, fills in ``complete_at`` (and
``read_at``), later calls :meth:`PendingCopies.perform` and hands the returned bytes to
:meth:`~smfree.emulator.barriers.MBarriers.complete_tx`. Source bytes are read and destination bytes written
at completion, never at issue. Meanwhile a destination in shared memory is closed (reading or writing it is
a fault that names the copy), and so are a store's source and the global ranges on either side.
"""

from __future__ import annotations

import numpy as np

from smfree.emulator.bytespace import as_addresses
from smfree.emulator.copy_kinds import CopyKind
from smfree.emulator.errors import CopyFault, MemoryFault
from smfree.emulator.groups import CopyGroups
from smfree.emulator.movers import BulkMover, LaneMover, ValueMover
from smfree.emulator.pending import PendingCopies, by_size
from smfree.emulator.reductions import Reduction
from smfree.emulator.tensor_copies import TensorCopies

__all__ = ["CopyEngine", "CopyGroups", "CopyKind", "PendingCopies"]


class CopyEngine(TensorCopies):
    """Issues copies between one global memory and the shared memory of the resident CTAs.

    ``name_issuer`` turns an issuer number into text for reports. ``flag_outside``: report (strict) tensor
    boxes that lie wholly outside their tensor, which are legal.
    """

    # --- cp.async ---

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
        """``cp.async``: dst flat shared int64[n], src global int64[n], 4, 8 or 16 bytes each (``cg``: 16
        only).

        Bytes past ``src_bytes`` (<= cp_bytes) become zero; with 0 the source address is not touched.
        """
        dst, src = as_addresses(dst), as_addresses(src)
        n = len(dst)
        if cp_bytes not in (4, 8, 16) or (cache == "cg" and cp_bytes != 16):
            allowed = "16 bytes" if cache == "cg" else "4, 8 or 16 bytes"
            raise CopyFault(
                f"cp.async.{cache} copies {allowed} (got {cp_bytes}); widen the access, or use .ca or ld "
                "+ st",
                rule="cp.async.size",
                index=0,
            )
        name = f"cp.async.{cache}"
        self._aligned(dst, cp_bytes, f"{name} destination", shared=True)
        sizes: np.ndarray | None = None
        if src_bytes is not None:
            sizes = np.broadcast_to(np.asarray(src_bytes).astype(np.int64), n)
            if ((sizes > cp_bytes) | (sizes < 0)).any():
                i = int(np.argmax((sizes > cp_bytes) | (sizes < 0)))
                raise CopyFault(
                    f"cp.async src-size must not exceed its cp-size {cp_bytes} (got {int(sizes[i])}); "
                    "clamp it to "
                    f"0..{cp_bytes}",
                    rule="cp.async.src_size",
                    index=i,
                )
            if (sizes == cp_bytes).all():
                sizes = None
        self._aligned(src if sizes is None else src[sizes > 0], cp_bytes, f"{name} source")
        self._open_destination(dst, cp_bytes, name, label)
        mover = LaneMover(self.memory, self.shared, dst, src, cp_bytes, sizes)
        try:
            mover.check_source(np.arange(n))
        except MemoryFault as fault:
            raise _renamed(fault, f"{name} source: ") from fault
        batch = PendingCopies(
            self, CopyKind.CP_ASYNC, issuer, dst, src, np.full(n, cp_bytes), mover, group=group, label=label
        )
        self._close(dst, cp_bytes)
        self._claim(batch, src, cp_bytes, writes=False)
        self._live.append(batch)
        return batch

    # --- bulk ---

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
        """``cp.async.bulk.shared.global.mbarrier``: dst flat shared, src global, both and the size
        multiples of 16."""
        dst, src = as_addresses(dst), as_addresses(src)
        sizes = self._bulk_sizes(dst, src, nbytes, "cp.async.bulk", to_shared=True, from_shared=False)
        home = self.memory.check_ranges(src, sizes, "cp.async.bulk source")
        self._live_barrier(key)
        self._unordered_source(src, sizes, "cp.async.bulk load")
        self._into_shared(dst, sizes, "cp.async.bulk", label)
        mover = BulkMover(self.memory, self.shared, dst, src, sizes)
        if home is None or not home.full:
            mover.check_global(self.report, "cp.async.bulk")
        batch = PendingCopies(self, CopyKind.BULK_G2S, issuer, dst, src, sizes, mover, key=key, label=label)
        self._claim(batch, src, sizes, writes=False)
        self._live.append(batch)
        return batch

    def bulk_store(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: np.ndarray | int,
        *,
        reduction: Reduction | None = None,
        group: np.ndarray | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.global.shared::cta.bulk_group``, or ``cp.reduce.async.bulk`` with ``reduction``:
        src flat shared, dst global."""
        dst, src = as_addresses(dst), as_addresses(src)
        kind = CopyKind.BULK_S2G if reduction is None else CopyKind.REDUCE_S2G
        name = "cp.async.bulk" if reduction is None else f"cp.reduce.async.bulk.{reduction}"
        sizes = self._bulk_sizes(dst, src, nbytes, name, to_shared=False, from_shared=True)
        home = self.memory.check_ranges(dst, sizes, f"{name} destination")
        self._unordered_target(dst, sizes, kind)
        for size, which in by_size(sizes):
            self._source_ready(src[which], size, kind.value, which)
            self.shared.use_source(src[which], size, +1)
        mover = BulkMover(self.shared, self.memory, dst, src, sizes, reduction)
        if reduction is not None and (home is None or not home.full):
            mover.check_global(self.report, name)
        batch = PendingCopies(self, kind, issuer, dst, src, sizes, mover, group=group, label=label)
        self._claim(batch, dst, sizes, writes=True)
        self._live.append(batch)
        return batch

    # --- between the CTAs of a cluster ---

    def bulk_to_peer(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: np.ndarray | int,
        key: np.ndarray,
        *,
        reduction: Reduction | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp{.reduce}.async.bulk.shared::cluster.shared::cta.mbarrier``: all addresses flat shared, ``key``
        in the destination's CTA."""
        dst, src = as_addresses(dst), as_addresses(src)
        kind = CopyKind.BULK_S2S if reduction is None else CopyKind.REDUCE_S2S
        name = "cp.async.bulk" if reduction is None else f"cp.reduce.async.bulk.{reduction}"
        sizes = self._bulk_sizes(dst, src, nbytes, name, to_shared=True, from_shared=True)
        self._live_barrier(key)
        for size, which in by_size(sizes):
            self._source_ready(src[which], size, kind.value, which)
        self._into_shared(dst, sizes, name, label, reduces=kind.reduces)
        for size, which in by_size(sizes):
            self.shared.use_source(src[which], size, +1)
        mover = BulkMover(self.shared, self.shared, dst, src, sizes, reduction)
        batch = PendingCopies(self, kind, issuer, dst, src, sizes, mover, key=key, label=label)
        self._live.append(batch)
        return batch

    def store_async(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        values: np.ndarray,
        key: np.ndarray,
        *,
        reduction: Reduction | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``st.async``, or ``red.async`` with ``reduction``: values uint8[n, 4, 8 or 16] to flat shared
        ``dst``."""
        dst = as_addresses(dst)
        n, nbytes = values.shape
        kind = CopyKind.ST_ASYNC if reduction is None else CopyKind.RED_ASYNC
        self._aligned(dst, nbytes, f"{kind.value} destination", shared=True)
        self._live_barrier(key, kind.value)
        sizes = np.full(n, nbytes)
        self._into_shared(dst, sizes, kind.value, label, reduces=kind.reduces)
        mover = ValueMover(self.shared, dst, values, reduction)
        batch = PendingCopies(self, kind, issuer, dst, dst, sizes, mover, key=key, label=label)
        batch.read[:] = True
        self._live.append(batch)
        return batch


def _renamed(fault: MemoryFault, prefix: str) -> MemoryFault:
    return MemoryFault(prefix + fault.message, rule=fault.rule, index=fault.index)
