"""Where bulk copies, tensor copies and prefetches are issued, counted and timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.destinations import Destinations, positions
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.map_unit import MapUnit
from smfree.emulator.exec.memory_unit import OWN_CTA_ONLY, copied
from smfree.emulator.exec.prefetches import Prefetches
from smfree.emulator.exec.routing import Part
from smfree.emulator.pending import PendingCopies
from smfree.emulator.reductions import Reduction
from smfree.emulator.tensor_boxes import box_rows
from smfree.emulator.tensormap import TensorMap

if TYPE_CHECKING:
    from smfree.emulator.exec.copy_unit import CopyUnit

_ALL = slice(None)


class BulkUnit:
    """The TMA of every SM: bulk and tensor copies of one launch."""

    def __init__(self, copies: CopyUnit) -> None:
        self.copies, self.launch, self.engine = copies, copies.launch, copies.engine
        self.maps = MapUnit(copies.launch)
        self.prefetches = Prefetches()

    # ---------------------------------------------------------------- one range per thread

    def load(self, g: Group, to: Destinations, src: Any, nbytes: Any) -> None:
        """``cp.async.bulk`` from global to shared memory, of one CTA or of several."""
        launch, lanes = self.launch, g.lanes
        sizes = np.broadcast_to(np.asarray(nbytes, np.int64), lanes.n)
        for part in self._routed(src, sizes, "cp.async.bulk source"):
            mine = to.of_lanes(part.index)
            which, where = mine.which, _placed(src, part)
            self.copies.flights.settle(part.memory, part.addr, sizes[part.index], lanes.ids[part.index])
            with positions(self.engine, which), self.engine.copying(part.far_memory):
                batch = self.engine.bulk_load(
                    lanes.ids[which], mine.flat, where[which], sizes[which], mine.keys, label=launch.here(g)
                )
            moved = sizes[part.index]
            hits = self._hits(part, part.addr, moved, write=False)
            ready = self.prefetches.ready(part.addr, moved) if launch.clock is not None else None
            self._time_load(g, part, batch, part.index, which, moved, hits, ready, tensor=False)
            self._issued(g, batch, len(moved))

    def store(self, g: Group, dst: Any, src: Any, nbytes: Any, reduction: Reduction | None = None) -> None:
        """``cp.async.bulk`` or ``cp.reduce.async.bulk`` from shared to global memory."""
        launch, lanes = self.launch, g.lanes
        name = "cp.async.bulk" if reduction is None else "cp.reduce.async.bulk"
        sizes = np.broadcast_to(np.asarray(nbytes, np.int64), lanes.n)
        flat = launch.memory.flat_shared(lanes, src, 1, OWN_CTA_ONLY, copied(name, "source", nbytes))
        group = self.copies.bulk_groups.current(lanes.ids)
        for part in self._routed(dst, sizes, f"{name} destination"):
            which, moved = part.index, sizes[part.index]
            self.copies.flights.settle(part.memory, part.addr, moved, now=True)
            with positions(self.engine, which), self.engine.copying(part.far_memory):
                batch = self.engine.bulk_store(
                    lanes.ids[which], part.addr, flat[which], moved, reduction=reduction, group=group[which],
                    label=launch.here(g),
                )  # fmt: skip
            self.copies.bulk_groups.add(batch)
            misses = moved - self._hits(part, part.addr, moved, write=True)
            self._time_store(g, part, batch, which, misses, tensor=False)
            self._issued(g, batch, len(batch))

    def prefetch(self, g: Group, src: Any, nbytes: Any) -> None:
        """``cp.async.bulk.prefetch.L2``; what lies in no allocation is left out."""
        sizes = self.engine.prefetch_sizes(src, nbytes)
        self._prefetch(g, src, sizes, np.arange(len(src)), sizes, tensor=False)

    # ---------------------------------------------------------------- one box per thread

    def tensor_load(self, g: Group, to: Destinations, maps: Any, coords: Any) -> None:
        """``cp.async.bulk.tensor`` from global to shared memory, of one CTA or of several."""
        launch, lanes = self.launch, g.lanes
        for part, tensor, in_memory in self._tensors(g, maps):
            mine = to.of_lanes(part.index)
            which = mine.which
            with positions(self.engine, which), self.engine.copying(part.far_memory):
                batch = self.engine.tensor_load(
                    lanes.ids[which], mine.flat, maps[which], coords[which], mine.keys,
                    maps=tensor, in_memory=in_memory, label=launch.here(g),
                )  # fmt: skip
            requests = lanes.n if isinstance(part.index, slice) else len(part.index)
            misses, ready = self._boxes(part, tensor, coords[part.index], write=False)
            sizes = np.full(requests, tensor.box_bytes)
            self._time_load(g, part, batch, part.index, which, sizes, sizes - misses, ready, tensor=True)
            self._issued(g, batch, requests)

    def tensor_store(self, g: Group, src: Any, maps: Any, coords: Any, op: str | None = None) -> None:
        """``cp.async.bulk.tensor`` or ``cp.reduce.async.bulk.tensor`` from shared to global memory."""
        launch, lanes = self.launch, g.lanes
        name = "cp.async.bulk.tensor" if op is None else "cp.reduce.async.bulk.tensor"
        flat = launch.memory.flat_shared(lanes, src, 1, OWN_CTA_ONLY, copied(name, "source", None))
        group = self.copies.bulk_groups.current(lanes.ids)
        for part, tensor, in_memory in self._tensors(g, maps):
            which = part.index
            with positions(self.engine, which), self.engine.copying(part.far_memory):
                batch = self.engine.tensor_store(
                    lanes.ids[which], flat[which], maps[which], coords[which], op=op, group=group[which],
                    maps=tensor, in_memory=in_memory, label=launch.here(g),
                )  # fmt: skip
            self.copies.bulk_groups.add(batch)
            misses, _ = self._boxes(part, tensor, coords[which], write=True)
            self._time_store(g, part, batch, which, misses, tensor=True)
            self._issued(g, batch, len(batch))

    def prefetch_tensor(self, g: Group, maps: Any, coords: Any) -> None:
        """``cp.async.bulk.prefetch.tensor``: the part of the box that lies in the tensor."""
        for part, tensor, _ in self._tensors(g, maps):
            which = part.index
            with positions(self.engine, which):
                self.engine.check_coordinates(tensor, coords[which])
            if part.device is not self.launch.device:
                continue  # the own L2 keeps nothing of other memory
            box, start, sizes = _rows(tensor, coords[which])
            lanes = np.arange(g.lanes.n)[which]
            per_box = np.bincount(box, sizes, len(lanes)).astype(np.int64)
            self._prefetch(g, start, sizes, lanes[box], per_box, tensor=True, issuers=lanes)

    def _routed(self, addr: Any, sizes: Any, what: str) -> list[Part]:
        """The places that these ranges lie in."""
        router = self.launch.memory.router
        top = int(sizes.max()) if len(sizes) else 0
        return [router.all_own(addr)] if router.local(addr, top) else router.ranges(addr, sizes, what)

    def _tensors(self, g: Group, maps: Any) -> Iterator[tuple[Part, TensorMap, bool]]:
        """The lanes of each map and where its tensor lies; the map, with the tensor's address there; whether
        the map is in global memory."""
        self.maps.check_window(maps)
        for lanes, tensor, in_memory in self.maps.parts(g, maps):
            region = self.launch.memory.router.region_of(tensor.address, "tensor copy")
            if region.shift:
                tensor = replace(tensor, address=tensor.address + region.shift)
            yield Part(lanes, region, None), tensor, in_memory

    # ---------------------------------------------------------------- time and counters

    def _hits(self, part: Part, addr: Any, sizes: Any, *, write: bool) -> Any:
        """Bytes of each range that the owner's L2 holds; zeros without a clock and for host memory."""
        if self.launch.clock is None or part.device is None:
            return np.zeros(len(sizes), np.int64)
        owner = self.launch.memory.router.peer_of(part.region)
        return self.launch.memory.range_hits(addr, sizes, write=write, owner=owner)

    def _boxes(self, part: Part, tensor: TensorMap, coords: Any, *, write: bool) -> tuple[Any, Any]:
        """Per box: bytes inside the tensor that L2 lacks; when prefetches of its rows are complete."""
        ready = np.full(len(coords), -np.inf)
        none = np.zeros(len(coords), np.int64)
        if self.launch.clock is None:
            return none, ready
        box, start, sizes = _rows(tensor, coords)
        if not len(box):
            return none, ready
        misses = sizes - self._hits(part, start, sizes, write=write)
        np.maximum.at(ready, box, self.prefetches.ready(start, sizes))
        return np.bincount(box, misses, len(coords)).astype(np.int64), ready

    def _start(self, g: Group, which: Any) -> tuple[Any, Any, Any]:
        """SM and time of each element's issue, and one request each."""
        index = g.lanes.warp_index[which]
        return g.lanes.sm[index], self.launch.settle(g)[index], np.ones(len(index), np.int64)

    def _time_load(
        self, g: Group, part: Part, batch: PendingCopies, lanes: Any, which: Any, sizes: Any, hits: Any,
        ready: Any, *, tensor: bool,
    ) -> None:  # fmt: skip
        """One request per lane of ``lanes``; its destinations (``which``: their lanes) get the bytes then."""
        clock, away = self.launch.clock, self.launch.memory.away
        if away.crossing(part) is not None:
            timed = clock is not None
            sm, t, _ = self._start(g, lanes) if timed else (None, None, None)
            done_here = away.bulk(part, sm, t, sizes, sizes - hits, write=False, tensor=tensor)
            if not timed:
                return
        elif clock is None:
            return
        else:
            sm, t, ones = self._start(g, lanes)
            done_here = np.maximum(clock.bulk_load(sm, t, sizes, hits, ones, tensor=tensor), ready)
        done = np.empty(g.lanes.n)
        done[lanes] = done_here
        batch.complete_at[:] = batch.read_at[:] = done[which]

    def _time_store(
        self, g: Group, part: Part, batch: PendingCopies, which: Any, misses: Any, *, tensor: bool
    ) -> None:
        clock, away = self.launch.clock, self.launch.memory.away
        reduces, sizes = batch.kind.reduces, batch.nbytes
        peer = away.router.peer_of(part.region)
        batch.away = peer
        if reduces and clock is not None:
            counters = self.launch.counters if peer is None else peer.counters
            counters.dram_read_bytes += int(misses.sum())
        if away.crossing(part) is not None:
            sm, t, _ = self._start(g, which) if clock is not None else (None, None, None)
            times = away.bulk(part, sm, t, sizes, misses, write=True, tensor=tensor)
            if times is not None:
                batch.read_at[:], batch.complete_at[:] = times.accepted, times.performed
                batch.ack_cycles = float((times.acknowledged - times.performed).max())
                self.launch.end_time = max(self.launch.end_time, float(times.acknowledged.max()))
            return
        if clock is None:
            return
        sm, t, ones = self._start(g, which)
        batch.read_at[:], batch.complete_at[:] = clock.bulk_store(
            sm, t, sizes, misses, ones, tensor=tensor, reduces=reduces
        )

    def _issued(self, g: Group, batch: PendingCopies, requests: int) -> None:
        counters, delivered = self.launch.counters, int(batch.nbytes.sum())
        counters.tma_requests += requests
        if batch.kind.reduces:
            counters.bytes_reduced += delivered
        elif len(batch) == requests:
            counters.bytes_async += delivered
        else:
            _, first = np.unique(batch.issuer, return_index=True)
            counters.bytes_async += int(batch.nbytes[first].sum())
            counters.bytes_multicast += delivered
        self.copies.issued(g, batch)

    def _allocated(self, start: int, nbytes: int) -> bool:
        home = self.launch.device.memory.allocation_of(start)
        return nbytes > 0 and home is not None and start + nbytes <= home.end

    def _prefetch(
        self,
        g: Group,
        src: Any,
        sizes: Any,
        lane: Any,
        per_issuer: Any,
        *,
        tensor: bool,
        issuers: Any = _ALL,
    ) -> None:
        """Ranges ``src``, ``sizes`` of the issuing lanes ``lane``; ``issuers``: one request each."""
        launch = self.launch
        counters = launch.counters
        counters.tma_requests += len(per_issuer)
        counters.bytes_prefetched += int(per_issuer.sum())
        if launch.clock is None or not len(src):
            return
        real = np.array([self._allocated(*one) for one in zip(src.tolist(), sizes.tolist(), strict=True)])
        src, sizes, lane = src[real], sizes[real], lane[real]
        if not len(src):
            return
        hits = np.bincount(lane, launch.memory.range_hits(src, sizes, write=False), g.lanes.n)[issuers]
        sm, t, ones = self._start(g, issuers)
        done = launch.clock.bulk_load(sm, t, per_issuer, hits.astype(np.int64), ones, tensor=tensor)
        of_lane = np.zeros(g.lanes.n)
        of_lane[issuers] = done
        self.prefetches.add(src, sizes, of_lane[lane])


def _placed(addr: Any, part: Part) -> Any:
    """The lanes' addresses, those of the part where they really are."""
    if isinstance(part.index, slice):
        return part.addr
    where = addr.copy()
    where[part.index] = part.addr
    return where


def _rows(tensor: TensorMap, coords: Any) -> tuple[Any, Any, Any]:
    """(box, global address, bytes) of each row that lies in the tensor, at least in part."""
    rows = box_rows(tensor, coords)
    box, row = np.nonzero(rows.inside & (rows.hi > rows.lo)[:, None])
    lo = rows.lo[box]
    return box, rows.addr[box, row] + lo, rows.hi[box] - lo
