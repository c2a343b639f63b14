"""One batch of asynchronous copies in flight, and the tracker of all batches."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np

from smfree.emulator.barriers import MBarriers
from smfree.emulator.bytespace import Report, as_addresses, raise_finding
from smfree.emulator.errors import CopyFault
from smfree.emulator.inflight import Claim
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.movers import Mover, TensorMover
from smfree.emulator.shared import SharedMemory
from smfree.emulator.tensormap import MAP_BYTES, TensorMap


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
    addresses (for tensor copies the global side is the map's address), ``nbytes`` (what complete_tx
    counts), ``key`` (mbarrier keys or None), ``group`` (group ids or None), ``complete_at`` and ``read_at``
    float64 cycles (+inf until the executor fills them in), ``read`` and ``done`` bool. ``coords`` int64[n,
    rank] for tensor copies.
    """

    def __init__(
        self,
        engine: CopyTracker,
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


class CopyTracker:
    """Which copies are in flight, on which bytes, and who is told when they meet another access."""

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

        span = mover.envelope()
        if span is not None:
            self._add_claim(batch, *span, ranges, writes)
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
            for size, part in by_size(batch.nbytes[which]):
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
            left &= batch.nbytes > 0
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


def by_size(sizes: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(size, positions) per distinct size."""
    if not len(sizes):
        return []
    first = int(sizes[0])
    if len(sizes) == 1 or (sizes == first).all():
        return [(first, np.arange(len(sizes)))]
    return [(int(s), np.flatnonzero(sizes == s)) for s in np.unique(sizes)]
