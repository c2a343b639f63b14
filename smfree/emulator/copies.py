"""Asynchronous copies: checked at issue, tracked in flight, bytes moved at completion.

No scheduling here. The executor issues a batch through :class:`CopyEngine`, fills in ``complete_at`` (and
``read_at``), later calls :meth:`PendingCopies.perform` and hands the returned bytes to
:meth:`~smfree.emulator.barriers.MBarriers.complete_tx`. Source bytes are read and destination bytes written
at
completion, never at issue. Meanwhile a destination in shared memory is closed (reading or writing it is a
fault
that names the copy), and so are a store's source and the global ranges on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np

from smfree.emulator.barriers import MBarriers
from smfree.emulator.bytespace import (
    AWAITS_COPY,
    BARRIER,
    WRITTEN,
    Report,
    as_addresses,
    or_reduce,
    raise_finding,
)
from smfree.emulator.errors import CopyFault, MemoryFault, Severity, Unsupported
from smfree.emulator.groups import CopyGroups
from smfree.emulator.inflight import Claim
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.movers import BulkMover, LaneMover, Mover, TensorMover
from smfree.emulator.shared import SharedMemory
from smfree.emulator.tensormap import (
    MAP_BYTES,
    SHARED_ALIGNMENT,
    SWIZZLE_PERIOD,
    SWIZZLE_SPAN,
    Swizzle,
    TensorMap,
    box_rows,
    decode,
)

__all__ = ["CopyEngine", "CopyGroups", "CopyKind", "PendingCopies"]


class CopyKind(Enum):
    """What was issued; ``loads`` go to shared memory."""

    CP_ASYNC = "cp.async"
    BULK_G2S = "cp.async.bulk load"
    BULK_S2G = "cp.async.bulk store"
    TENSOR_G2S = "cp.async.bulk.tensor load"
    TENSOR_S2G = "cp.async.bulk.tensor store"

    @property
    def loads(self) -> bool:
        return self not in (CopyKind.BULK_S2G, CopyKind.TENSOR_S2G)


class PendingCopies:
    """One batch: what one instruction issued for n lanes.

    Arrays of length n: ``issuer`` (opaque lane numbers given by the executor), ``dst`` and ``src``
    addresses (for
    tensor copies the global side is the map's address), ``nbytes`` (what complete_tx counts), ``key``
    (mbarrier keys
    or None), ``group`` (group ids or None), ``complete_at`` and ``read_at`` float64 cycles (+inf until the
    executor
    fills them in), ``read`` and ``done`` bool. ``coords`` int64[n, rank] for tensor copies.
    """

    def __init__(
        self,
        engine: CopyEngine,
        kind: CopyKind,
        issuer: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: np.ndarray,
        mover: Mover,
        *,
        key: np.ndarray | None = None,
        group: np.ndarray | None = None,
        coords: np.ndarray | None = None,
        label: str = "",
    ) -> None:
        n = len(dst)
        self.kind, self.issuer, self.dst, self.src, self.nbytes = kind, issuer, dst, src, nbytes
        self.key, self.group, self.coords, self.label = key, group, coords, label
        self.complete_at = np.full(n, np.inf)
        self.read_at = np.full(n, np.inf)
        self.read = np.zeros(n, bool)
        self.done = np.zeros(n, bool)
        self.published = np.zeros(n, bool)
        self.open = n
        self._engine, self._mover = engine, mover
        self._claims: list[Claim] = []

    def __len__(self) -> int:
        return len(self.dst)

    def describe(self, i: int) -> str:
        """'cp.async.bulk store of 1024 bytes to 0x10000000100 (issued by lane 3 at copy.cu:12)'."""
        if self.kind.loads:
            where = f"to {self._engine.shared.place(int(self.dst[i]))} from 0x{int(self.src[i]):x}"
        else:
            where = f"to 0x{int(self.dst[i]):x} from {self._engine.shared.place(int(self.src[i]))}"
        if self.coords is not None:
            where += f", coordinates {tuple(self.coords[i].tolist())}"
        by = f"issued by {self._engine.name_issuer(int(self.issuer[i]))}" + (
            f" at {self.label}" if self.label else ""
        )
        return f"the {self.kind.value} of {int(self.nbytes[i])} bytes {where} ({by})"

    def read_sources(self, which: np.ndarray) -> None:
        """The sources are read NOW and may be overwritten from here on (``wait_group.read``)."""
        which = which[~self.read[which]]
        if len(which):
            self._mover.read(which)
            self.read[which] = True
            self._engine._sources_read(self, which)

    def perform(self, which: np.ndarray, *, publish: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Move the bytes of these elements NOW -> (mbarrier keys, bytes) to complete_tx; empty without
        mbarrier.

        ``publish=False`` leaves shared destinations unreadable until :meth:`publish` (a wait that covers
        them).
        """
        which = which[~self.done[which]]
        if not len(which):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        self._mover.write(which, ~self.read[which])
        unread = which[~self.read[which]]
        self.read[which] = True
        self.done[which] = True
        if len(unread):
            self._engine._sources_read(self, unread)
        if publish or not self.kind.loads:
            self.publish(which)
        if self.key is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return self.key[which], self.nbytes[which]

    def publish(self, which: np.ndarray) -> None:
        """Landed bytes become readable."""
        which = which[self.done[which] & ~self.published[which]]
        if len(which):
            self.published[which] = True
            self.open -= len(which)
            self._mover.publish(which)
            self._engine._finished(self)


class CopyEngine:
    """Issues copies between one global memory and the shared memory of the resident CTAs.

    ``name_issuer`` turns an issuer number into text for reports. ``flag_outside``: report (strict) tensor
    boxes
    that lie wholly outside their tensor, which are legal.
    """

    def __init__(
        self,
        global_memory: GlobalMemory,
        shared: SharedMemory,
        barriers: MBarriers,
        *,
        report: Report = raise_finding,
        name_issuer: Callable[[int], str] = lambda issuer: f"lane {issuer}",
        flag_outside: bool = False,
    ) -> None:
        self.memory, self.shared, self.barriers, self.report = global_memory, shared, barriers, report
        self.name_issuer, self.flag_outside = name_issuer, flag_outside
        self._live: list[PendingCopies] = []
        self._maps: dict[bytes, TensorMap] = {}
        shared.copy_at = self._copy_at

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
        for size, which in _by_size(sizes):
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
        for size, which in _by_size(sizes):
            self._source_ready(src[which], size, "cp.async.bulk store", which)
            self.shared.use_source(src[which], size, +1)
        mover = BulkMover(self.memory, self.shared, dst, src, sizes, loads=False)
        batch = PendingCopies(
            self, CopyKind.BULK_S2G, issuer, dst, src, sizes, mover, group=group, label=label
        )
        self._claim(batch, dst, sizes, writes=True)
        self._live.append(batch)
        return batch

    def _bulk_sizes(
        self, dst: np.ndarray, src: np.ndarray, nbytes: np.ndarray | int, what: str, *, loads: bool
    ) -> np.ndarray:
        sizes = np.empty(len(dst), np.int64)
        sizes[:] = nbytes
        self._aligned(dst, 16, "cp.async.bulk destination", shared=loads)
        self._aligned(src, 16, "cp.async.bulk source", shared=not loads)
        if int(or_reduce(sizes)) & 15:
            i = int(np.argmax((sizes & 15) != 0))
            raise CopyFault(
                f"cp.async.bulk size must be a multiple of 16 bytes (got {int(sizes[i])}); copy the tail "
                "with ordinary "
                "loads and stores, or pad the tile",
                rule="bulk.size",
                index=i,
            )
        return sizes

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
        the decoded
        map (one in .param space), and ``map_addr`` serves reports only. Elements outside the tensor are
        filled and
        count in complete_tx.
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
        hardware is
        reported to write the whole unit: a strict finding.
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
                _strict(
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

    def _tensor_rules(
        self, tensor: TensorMap, shared_addr: np.ndarray, coords: np.ndarray, side: str, *, store: bool
    ) -> None:
        if coords.ndim != 2 or coords.shape[1] != tensor.rank:
            raise CopyFault(
                f"a {tensor.rank}-D tensor map needs {tensor.rank} coordinates (got {coords.shape[-1]}): use "
                f"cp.async.bulk.tensor.{tensor.rank}d",
                rule="tensor.rank",
                index=0,
            )
        self._aligned(shared_addr, SHARED_ALIGNMENT, f"cp.async.bulk.tensor shared {side}", shared=True)
        span = SWIZZLE_SPAN.get(tensor.swizzle)
        if span is not None and tensor.row_bytes < span and tensor.rows > 1:
            raise Unsupported(
                f"inner box of {tensor.row_bytes} bytes narrower than the {span}-byte swizzle: hardware's "
                "row pitch is "
                "undocumented; make the inner box as wide as the swizzle",
                rule="tensor.narrow_swizzle",
            )
        period = SWIZZLE_PERIOD[tensor.swizzle]
        if tensor.swizzle is not Swizzle.NONE:
            off = shared_addr % period != 0
            if off.any():
                i = int(np.argmax(off))
                self.report(
                    _strict(
                        "tensor.swizzle_base",
                        f"shared {side} {self.shared.place(int(shared_addr[i]))} is not aligned to "
                        f"{period}: swizzle "
                        f"{tensor.swizzle.name} works on absolute shared addresses, so a formula relative "
                        "to the "
                        f"tile reads other bytes; align the tile to {period} bytes",
                        i,
                    )
                )
        inner = coords[:, 0] * tensor.element_bytes % 16 != 0
        if inner.any():
            i = int(np.argmax(inner))
            self.report(
                _strict(
                    "tensor.inner_start",
                    "the box must start at a multiple of 16 bytes in dimension 0 (coordinate "
                    f"{int(coords[i, 0])} x "
                    f"{tensor.element_bytes} bytes); step by {16 // tensor.element_bytes} elements",
                    i,
                )
            )
        if store and (coords < 0).any():
            i = int(np.argmax((coords < 0).any(axis=1)))
            self.report(
                _strict(
                    "tensor.store_negative",
                    "a tensor store's coordinates must not be negative (got "
                    f"{tuple(coords[i].tolist())}); only "
                    "loads fill what lies outside",
                    i,
                )
            )

    def _tensor_bounds(self, mover: TensorMover) -> None:
        """The bytes inside the tensor must be allocated memory."""
        lo, hi = mover.row_ranges(np.arange(mover.boxes))
        if len(lo):
            low, high = int(lo.min()), int(hi.max())
            home = self.memory.allocation_of(low)
            if home is None or high > home.end:
                for start, end in zip(lo.tolist(), hi.tolist(), strict=True):
                    self.memory.check_range(start, end - start, f"tensor copy through {mover.tensor}")
        if self.flag_outside:
            outside = mover.wholly_outside()
            if outside.any():
                i = int(np.argmax(outside))
                self.report(
                    _strict(
                        "tensor.outside", f"box {i} lies wholly outside {mover.tensor}; bound the loop", i
                    )
                )

    # --- common checks ---

    def _aligned(self, addr: np.ndarray, to: int, operand: str, *, shared: bool = False) -> None:
        if int(or_reduce(addr)) & (to - 1):
            i = int(np.argmax((addr & (to - 1)) != 0))
            where = int(addr[i])
            place = self.shared.place(where) if shared else f"0x{where:x}"
            raise CopyFault(
                f"{operand} must be {to}-byte aligned (got {place}, {where % to} past); move it by a "
                f"multiple of {to} "
                "bytes, or make the stage pitch one",
                rule="copy.misaligned",
                index=i,
            )

    def _live_barrier(self, key: np.ndarray) -> None:
        self.barriers._need_live(as_addresses(key), "cp.async.bulk with mbarrier completion")

    def _open_destination(
        self, dst: np.ndarray, nbytes: int, what: str, label: str, which: np.ndarray | None = None
    ) -> None:
        """The destination lies in its CTA, holds no barrier, no copy in flight touches it, no two lanes
        share it."""
        try:
            self.shared.check_range(dst, nbytes, f"{what} destination")
            if self.shared.busy(dst, nbytes):
                self.shared.judge_range(dst, nbytes, f"{what} ({label})" if label else what)
        except (CopyFault, MemoryFault) as fault:
            if which is not None and fault.index is not None:
                fault.index = int(which[fault.index])
            raise
        if len(dst) > 1 and (dst[1:] - dst[:-1] < nbytes).any():
            line = np.sort(dst)
            if (line[1:] - line[:-1] < nbytes).any():
                order = np.argsort(dst, kind="stable")
                i = int(np.argmax(dst[order][1:] - dst[order][:-1] < nbytes))
                raise CopyFault(
                    f"two {what} copies of one instruction write "
                    f"{self.shared.place(int(dst[order[i + 1]]))}: copies "
                    "are unordered, the result is undefined; give each its own destination",
                    rule="copy.overlap",
                    index=int(order[i + 1]),
                )

    def _close(self, dst: np.ndarray, nbytes: int) -> None:
        if nbytes:
            self.shared.mark(dst, nbytes, AWAITS_COPY)

    def _source_ready(self, src: np.ndarray, nbytes: int, what: str, which: np.ndarray | None = None) -> None:
        """A store's source: in its CTA, every byte written, no copy still landing in it, no barrier."""
        self.shared.check_range(src, nbytes, f"{what} source")
        if not nbytes or not self.shared.unreadable(src, nbytes):
            return
        for i, start in enumerate(src.tolist()):
            cells = self.shared.written[start : start + nbytes]
            if (cells == WRITTEN).all():
                continue
            at = int(np.argmax(cells != WRITTEN))
            index = i if which is None else int(which[i])
            where = self.shared.place(start + at)
            if cells[at] == AWAITS_COPY:
                raise CopyFault(
                    f"{what} reads {where}, the destination of {self._copy_at(start + at, True)}, which is "
                    "not complete; wait for that first",
                    rule="copy.destination_read",
                    index=index,
                )
            content = "a live mbarrier" if cells[at] == BARRIER else "bytes nobody has written"
            missing = int((cells != WRITTEN).sum())
            self.report(
                CopyFault(
                    f"{what} of {nbytes} bytes reads {content} ({missing} bytes from {where}); fill the "
                    "tile first",
                    rule="copy.source_unwritten",
                    index=index,
                )
            )

    def _unordered_source(self, src: np.ndarray, sizes: np.ndarray, what: str) -> None:
        """A load must not read what a copy in flight has yet to write."""
        flying = self.memory.in_flight
        if len(src) and int(src.min()) < flying.write_hi and int((src + sizes).max()) > flying.write_lo:
            for size, which in _by_size(sizes):
                if size:
                    flying.check(src[which], size, write=False, what=what)

    # --- in flight ---

    def _claim(
        self, batch: PendingCopies, addr: np.ndarray, nbytes: np.ndarray | int, *, writes: bool
    ) -> None:
        if not len(addr):
            return
        sizes = nbytes if isinstance(nbytes, np.ndarray) else np.full(len(addr), nbytes)
        used = addr if batch.kind is not CopyKind.CP_ASYNC else batch._mover.source_addresses()
        if not len(used):
            return
        top = int((used + (sizes if len(used) == len(sizes) else int(sizes.max()))).max())

        def ranges() -> tuple[np.ndarray, np.ndarray]:
            left = ~(batch.done if writes else batch.read)
            return addr[left], addr[left] + sizes[left]

        self._add_claim(batch, int(used.min()), top, ranges, writes)

    def _claim_rows(self, batch: PendingCopies, mover: TensorMover, *, writes: bool, in_memory: bool) -> None:
        def ranges() -> tuple[np.ndarray, np.ndarray]:
            return mover.row_ranges(np.flatnonzero(~(batch.done if writes else batch.read)))

        lo, hi = ranges()
        if len(lo):
            self._add_claim(batch, int(lo.min()), int(hi.max()), ranges, writes)
        if in_memory:
            maps = batch.dst if writes else batch.src

            def map_ranges() -> tuple[np.ndarray, np.ndarray]:
                left = maps[~batch.read]
                return left, left + MAP_BYTES

            claim = Claim(int(maps.min()), int(maps.max()) + MAP_BYTES, map_ranges, False, lambda _: "")
            claim.name = lambda _: (
                f"the tensor map of {int((~batch.read).sum())} copies in flight, one of them "
                f"{batch.describe(int(np.argmin(batch.read)))},"
            )
            self.memory.in_flight.add(claim)
            batch._claims.append(claim)

    def _add_claim(
        self,
        batch: PendingCopies,
        lo: int,
        hi: int,
        ranges: Callable[[], tuple[np.ndarray, np.ndarray]],
        writes: bool,
    ) -> None:
        def name(start: int) -> str:
            starts = batch.dst if writes else batch.src
            exact = np.flatnonzero((starts == start) & ~batch.done)
            return batch.describe(int(exact[0]) if len(exact) else int(np.argmin(batch.done)))

        claim = Claim(lo, hi, ranges, writes, name)
        self.memory.in_flight.add(claim)
        batch._claims.append(claim)

    def _sources_read(self, batch: PendingCopies, which: np.ndarray) -> None:
        if not batch.kind.loads:
            for size, part in _by_size(batch.nbytes[which]):
                self.shared.use_source(batch.src[which[part]], size, -1)
        if batch.read.all():
            for claim in [c for c in batch._claims if not c.writes]:
                self._drop(batch, claim)
        for claim in batch._claims:
            claim.changed()

    def _finished(self, batch: PendingCopies) -> None:
        if batch.done.all():
            for claim in list(batch._claims):
                self._drop(batch, claim)
        for claim in batch._claims:
            claim.changed()
        if batch.open == 0 and batch in self._live:
            self._live.remove(batch)

    def _drop(self, batch: PendingCopies, claim: Claim) -> None:
        batch._claims.remove(claim)
        self.memory.in_flight.remove(claim)

    def _copy_at(self, addr: int, writing: bool) -> str:
        """The copy in flight that writes (or reads) the shared byte at ``addr``."""
        for batch in self._live:
            if batch.kind.loads is not writing:
                continue
            start = batch.dst if writing else batch.src
            left = ~(batch.published if writing else batch.read)
            hit = np.flatnonzero(left & (start <= addr) & (addr < start + batch.nbytes))
            if len(hit):
                return batch.describe(int(hit[0]))
        return "an asynchronous copy"

    def pending(self) -> list[PendingCopies]:
        """Batches with elements not complete (or landed but unpublished), oldest first."""
        return list(self._live)

    def pending_of_slots(self, slots: np.ndarray) -> list[tuple[PendingCopies, np.ndarray]]:
        """Batches and elements that still use the shared memory of these slots."""
        wanted = np.zeros(self.shared.slots, bool)
        wanted[as_addresses(slots)] = True
        found = []
        for batch in self._live:
            side, left = (batch.dst, ~batch.done) if batch.kind.loads else (batch.src, ~batch.read)
            which = np.flatnonzero(left & wanted[side // self.shared.pitch])
            if len(which):
                found.append((batch, which))
        return found

    def check_exit(self, slots: np.ndarray) -> None:
        """CTAs leave: a bulk copy that still uses their shared memory is an error (cp.async: nothing)."""
        for batch, which in self.pending_of_slots(slots):
            if batch.kind is not CopyKind.CP_ASYNC:
                i = int(which[0])
                cure = (
                    "wait on its mbarrier"
                    if batch.kind.loads
                    else "cp.async.bulk.wait_group.read 0 by its issuer"
                )
                raise CopyFault(
                    f"the CTA exits while {batch.describe(i)} still uses its shared memory ({len(which)} "
                    "such copies); "
                    f"{cure} before returning",
                    rule="copy.exit",
                    index=0,
                )

    def abandon(self, slots: np.ndarray) -> None:
        """Drop what is left of cp.async of CTAs that left; their slots are about to be reset."""
        for batch, which in self.pending_of_slots(slots):
            batch.read[which] = batch.done[which] = batch.published[which] = True
            batch.open -= len(which)
            self._finished(batch)


def _strict(rule: str, message: str, index: int) -> CopyFault:
    return CopyFault(message, rule=rule, index=index, severity=Severity.STRICT)


def _renamed(fault: MemoryFault, prefix: str) -> MemoryFault:
    return MemoryFault(prefix + fault.message, rule=fault.rule, index=fault.index)


def _by_size(sizes: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(size, positions) per distinct size."""
    if not len(sizes):
        return []
    first = int(sizes[0])
    if len(sizes) == 1 or (sizes == first).all():
        return [(first, np.arange(len(sizes)))]
    return [(int(s), np.flatnonzero(sizes == s)) for s in np.unique(sizes)]
