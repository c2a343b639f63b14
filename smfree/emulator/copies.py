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
from smfree.emulator.copy_rules import CopyRules, strict
from smfree.emulator.errors import CopyFault, MemoryFault, Unsupported
from smfree.emulator.groups import CopyGroups
from smfree.emulator.movers import BulkMover, LaneMover, TensorMover
from smfree.emulator.pending import CopyKind, PendingCopies, by_size
from smfree.emulator.tensormap import MAP_BYTES, TensorMap, box_rows, decode

__all__ = ["CopyEngine", "CopyGroups", "CopyKind", "PendingCopies"]


class CopyEngine(CopyRules):
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
        sizes = self._bulk_sizes(dst, src, nbytes, "load", loads=True)
        home = self.memory.check_ranges(src, sizes, "cp.async.bulk source")
        self._live_barrier(key)
        self._unordered_source(src, sizes, "cp.async.bulk load")
        for size, which in by_size(sizes):
            self._open_destination(dst[which], size, "cp.async.bulk", label, which)
            self._close(dst[which], size)
        mover = BulkMover(self.memory, self.shared, dst, src, sizes, loads=True)
        if home is None or not home.full:
            mover.check_source(self.report)
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
        group: np.ndarray | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.global.shared::cta.bulk_group``: src flat shared, dst global."""
        dst, src = as_addresses(dst), as_addresses(src)
        sizes = self._bulk_sizes(dst, src, nbytes, "store", loads=False)
        self.memory.check_ranges(dst, sizes, "cp.async.bulk destination")
        for size, which in by_size(sizes):
            self._source_ready(src[which], size, "cp.async.bulk store", which)
            self.shared.use_source(src[which], size, +1)
        mover = BulkMover(self.memory, self.shared, dst, src, sizes, loads=False)
        batch = PendingCopies(
            self, CopyKind.BULK_S2G, issuer, dst, src, sizes, mover, group=group, label=label
        )
        self._claim(batch, dst, sizes, writes=True)
        self._live.append(batch)
        return batch

    # --- tensor ---

    def tensor_map(self, data: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
        """Decode with a cache (a map is read by every copy)."""
        raw = bytes(data)
        found = self._maps.get(raw)
        if found is None:
            found = self._maps[raw] = decode(raw)
        return found

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
        """``cp.async.bulk.tensor.Nd.shared.global.tile``: dst flat shared, coords int64[n, rank], innermost
        first.

        ``map_addr`` int64[n]: global addresses of the maps, all with the same content; or pass ``maps``,
        the decoded map (one in .param space), and ``map_addr`` serves reports only. Elements outside the
        tensor are filled and count in complete_tx.
        """
        dst, map_addr = as_addresses(dst), as_addresses(map_addr)
        coords = np.asarray(coords, np.int64)
        tensor = maps if maps is not None else self._map_in_memory(map_addr)
        self._tensor_rules(tensor, dst, coords, "destination", store=False)
        self._live_barrier(key)
        self._open_destination(dst, tensor.box_bytes, "cp.async.bulk.tensor", label)
        mover = TensorMover(self.memory, self.shared, tensor, box_rows(tensor, coords), dst, loads=True)
        self._tensor_bounds(mover)
        mover.check_source(self.report)
        span = mover.envelope()
        flying = self.memory.in_flight
        if span is not None and span[0] < flying.write_hi and span[1] > flying.write_lo:
            lo, hi = mover.row_ranges(np.arange(len(dst)))
            self._unordered_source(lo, hi - lo, "cp.async.bulk.tensor load")
        self._close(dst, tensor.box_bytes)
        sizes = np.full(len(dst), tensor.box_bytes)
        batch = PendingCopies(
            self,
            CopyKind.TENSOR_G2S,
            issuer,
            dst,
            map_addr,
            sizes,
            mover,
            key=key,
            coords=coords,
            label=label,
        )
        self._claim_rows(batch, mover, writes=False, in_memory=maps is None)
        self._live.append(batch)
        return batch

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
        """``cp.async.bulk.tensor.Nd.global.shared::cta.tile.bulk_group``: src flat shared.

        Elements outside the tensor are dropped; where a row of the tensor ends inside a 16-byte unit,
        hardware is reported to write the whole unit: a strict finding.
        """
        src, map_addr = as_addresses(src), as_addresses(map_addr)
        coords = np.asarray(coords, np.int64)
        tensor = maps if maps is not None else self._map_in_memory(map_addr)
        self._tensor_rules(tensor, src, coords, "source", store=True)
        self._source_ready(src, tensor.box_bytes, "cp.async.bulk.tensor store")
        rows = box_rows(tensor, coords)
        ragged = (rows.hi % 16 != 0) & (rows.hi > rows.lo)
        if ragged.any():
            i = int(np.argmax(ragged))
            self.report(
                strict(
                    "tensor.store_tail",
                    f"tensor store at {tuple(coords[i].tolist())} ends {int(rows.hi[i]) % 16} bytes into "
                    "a 16-byte unit "
                    f"of the row ({tensor}): hardware is reported to write the whole unit, past dimension "
                    "0; make "
                    "its extent a multiple of 16 bytes or store the tail with ordinary stores",
                    i,
                )
            )
        mover = TensorMover(self.memory, self.shared, tensor, rows, src, loads=False)
        self._tensor_bounds(mover)
        self.shared.use_source(src, tensor.box_bytes, +1)
        sizes = np.full(len(src), tensor.box_bytes)
        batch = PendingCopies(
            self,
            CopyKind.TENSOR_S2G,
            issuer,
            map_addr,
            src,
            sizes,
            mover,
            group=group,
            coords=coords,
            label=label,
        )
        self._claim_rows(batch, mover, writes=True, in_memory=maps is None)
        self._live.append(batch)
        return batch

    def _map_in_memory(self, map_addr: np.ndarray) -> TensorMap:
        self._aligned(map_addr, 64, "tensor map")
        starts = np.unique(map_addr).tolist()
        for start in starts:
            self.memory.check_range(start, MAP_BYTES, "tensor map")
        found = [self.tensor_map(self.memory.read(start, MAP_BYTES)) for start in starts]
        if any(other != found[0] for other in found[1:]):
            raise Unsupported(
                "lanes of one instruction use different tensor maps; split the issue", rule="tensormap"
            )
        return found[0]


def _renamed(fault: MemoryFault, prefix: str) -> MemoryFault:
    return MemoryFault(prefix + fault.message, rule=fault.rule, index=fault.index)
