"""One batch of asynchronous copies in flight, and the tracker of all batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from smfree.emulator.barriers import MBarriers
from smfree.emulator.bytespace import AWAITS_COPY, Report, as_addresses, raise_finding
from smfree.emulator.copy_kinds import CopyKind
from smfree.emulator.errors import CopyFault
from smfree.emulator.inflight import Claim
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.movers import FarMemory, Mover
from smfree.emulator.shared import SharedMemory
from smfree.emulator.tensor_mover import TensorMover
from smfree.emulator.tensormap import MAP_BYTES, TensorMap

if TYPE_CHECKING:
    from smfree.emulator.node import DeviceState


_NAMED = 6  # CTAs that one finding names


class PendingCopies:
    """One batch: what one instruction issued for n lanes.

    Arrays of length n: ``issuer`` (opaque lane numbers given by the executor), ``dst`` and ``src``
    addresses (for tensor copies the global side is the map's address, ``maps``), ``nbytes`` (what complete_tx
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
        self.away: DeviceState | None = None  # the other device whose memory the destination is
        self.ack_cycles = 0.0  # from then on until the issuer knows
        self._engine, self._mover = engine, mover
        if key is not None:
            self._phase = engine.barriers.phase(key)  # at issue
            self._late = np.zeros(n, bool)  # that phase had completed when the bytes landed
        self._claims: list[tuple[FarMemory, Claim]] = []

    def __len__(self) -> int:
        return len(self.dst)

    @property
    def maps(self) -> np.ndarray:
        """Tensor copies: the addresses of their maps."""
        return self.src if self.kind.to_shared else self.dst

    def describe(self, i: int) -> str:
        """'cp.async.bulk store of 1024 bytes to 0x10000000100 (issued by lane 3 at copy.cu:12)'."""
        near, far = self._engine.shared.place, "0x{:x}".format
        where = f"to {(near if self.kind.to_shared else far)(int(self.dst[i]))}"
        if not self.kind.from_registers:
            where += f" from {(near if self.kind.from_shared else far)(int(self.src[i]))}"
        if self.coords is not None:
            where += f", coordinates {tuple(self.coords[i].tolist())}"
        by = f"issued by {self._engine.name_issuer(int(self.issuer[i]))}" + (
            f" at {self.label}" if self.label else ""
        )
        return f"the {self.kind.value} of {int(self.nbytes[i])} bytes {where} ({by})"

    def landing(self, which: np.ndarray) -> tuple[int, int]:
        """[lo, hi) around the global bytes that these elements write."""
        if self.coords is not None:
            assert isinstance(self._mover, TensorMover)
            lo, hi = self._mover.row_ranges(which)
            return (int(lo.min()), int(hi.max())) if len(lo) else (0, 0)
        start = self.dst[which]
        return int(start.min()), int((start + self.nbytes[which]).max())

    def left_out(self, i: int) -> str | None:
        """That the barrier has completed the phase in which the copy was issued without its bytes, if so."""
        if self.key is None or not (self._late[i] if self.done[i] else self._overtaken(np.array([i]))[0]):
            return None
        name = self._engine.barriers.name(int(self.key[i]))
        return (
            f"phase {int(self._phase[i])} of {name}, in which it was issued, has completed without its "
            "bytes: fewer were announced than the copies bring; expect_tx the bytes of all of them"
        )

    def _overtaken(self, which: np.ndarray) -> np.ndarray:
        """bool[n]: has the barrier completed the phase in which these were issued?"""
        assert self.key is not None
        return self._engine.barriers.phase(self.key[which]) > self._phase[which]

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
        if self.key is not None:
            self._late[which] = self._overtaken(which)
        if len(unread):
            self._engine._sources_read(self, unread)
        if publish or not self.kind.to_shared:
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
        self.memory: FarMemory = global_memory
        self.maps_memory = global_memory
        self.shared, self.barriers, self.report = shared, barriers, report
        self.name_issuer, self.flag_outside = name_issuer, flag_outside
        self._live: list[PendingCopies] = []
        self._maps: dict[bytes, TensorMap] = {}
        shared.copy_at, shared.cure_at = self._copy_at, self._cure_at

    @contextmanager
    def copying(self, memory: FarMemory) -> Iterator[None]:
        """What is issued meanwhile has its global side in this memory instead of the device's own."""
        own, self.memory = self.memory, memory
        try:
            yield
        finally:
            self.memory = own

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
            maps = batch.maps

            def map_ranges() -> tuple[np.ndarray, np.ndarray]:
                left = maps[~batch.read]
                return left, left + MAP_BYTES

            def verdict() -> str:
                first = batch.describe(int(np.argmin(batch.read)))
                return (
                    f"descriptor modified while {int((~batch.read).sum())} copies in flight still use it, "
                    f"one of them {first}; wait until they have read it (their mbarrier, or "
                    "cp.async.bulk.wait_group.read), or build the next descriptor in another slot"
                )

            lo, hi = int(maps.min()), int(maps.max()) + MAP_BYTES
            claim = Claim(lo, hi, map_ranges, False, lambda _: "", verdict=verdict)
            self._enter(batch, claim, self.maps_memory)

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

        claim = Claim(lo, hi, ranges, writes, name, reduces=batch.kind.reduces)
        self._enter(batch, claim, self.memory)

    @staticmethod
    def _enter(batch: PendingCopies, claim: Claim, memory: FarMemory) -> None:
        memory.in_flight.add(claim)
        batch._claims.append((memory, claim))

    def _sources_read(self, batch: PendingCopies, which: np.ndarray) -> None:
        if batch.kind.from_shared:
            for size, part in by_size(batch.nbytes[which]):
                self.shared.use_source(batch.src[which[part]], size, -1)
        if batch.read.all():
            self._drop(batch, [c for c in batch._claims if not c[1].writes])
        for _, claim in batch._claims:
            claim.changed()

    def _finished(self, batch: PendingCopies) -> None:
        if batch.kind.reduces and batch.kind.to_shared:
            self._close_again()
        if batch.done.all():
            self._drop(batch, list(batch._claims))
        for _, claim in batch._claims:
            claim.changed()
        if batch.open == 0 and batch in self._live:
            self._live.remove(batch)

    @staticmethod
    def _drop(batch: PendingCopies, entries: list[tuple[FarMemory, Claim]]) -> None:
        for entry in entries:
            batch._claims.remove(entry)
            entry[0].in_flight.remove(entry[1])

    def _close_again(self) -> None:
        """Reductions in flight may share bytes: those that another one still writes stay closed."""
        for batch in self._live:
            if batch.kind.reduces and batch.kind.to_shared:
                left = np.flatnonzero(~batch.published)
                for size, part in by_size(batch.nbytes[left]):
                    if size:
                        self.shared.mark(batch.dst[left[part]], size, AWAITS_COPY)

    def _copies_at(self, addr: int, nbytes: int, writing: bool) -> Iterator[tuple[PendingCopies, int]]:
        """The copies in flight that write (or read) shared bytes of [addr, addr + nbytes), one per batch."""
        for batch in self._live:
            if not (batch.kind.to_shared if writing else batch.kind.from_shared):
                continue
            start = batch.dst if writing else batch.src
            left = ~(batch.published if writing else batch.read)
            hit = np.flatnonzero(left & (start < addr + nbytes) & (addr < start + batch.nbytes))
            if len(hit):
                yield batch, int(hit[0])

    def _copy_at(self, addr: int, writing: bool) -> str:
        """The copy in flight that writes (or reads) the shared byte at ``addr``, for reports."""
        for batch, i in self._copies_at(addr, 1, writing):
            return batch.describe(i)
        return "an asynchronous copy"

    def _cure_at(self, addr: int, usual: str) -> str:
        """What to do about the copy in flight that writes the shared byte at ``addr``."""
        for batch, i in self._copies_at(addr, 1, True):
            return batch.left_out(i) or usual
        return usual

    def pending(self) -> list[PendingCopies]:
        """Batches with elements not complete (or landed but unpublished), oldest first."""
        return list(self._live)

    def pending_of_slots(self, slots: np.ndarray) -> list[tuple[PendingCopies, np.ndarray]]:
        """Batches and elements that still use the shared memory of these slots."""
        wanted = np.zeros(self.shared.slots, bool)
        wanted[as_addresses(slots)] = True
        found = []
        for batch in self._live:
            use = np.zeros(len(batch), bool)
            if batch.kind.to_shared:
                use |= ~batch.done & wanted[batch.dst // self.shared.pitch]
            if batch.kind.from_shared:
                use |= ~batch.read & wanted[batch.src // self.shared.pitch]
            which = np.flatnonzero(use & (batch.nbytes > 0))
            if len(which):
                found.append((batch, which))
        return found

    def check_exit(self, slots: np.ndarray) -> None:
        """CTAs leave: a copy that still uses their shared memory is an error (cp.async: nothing)."""
        for batch, which in self.pending_of_slots(slots):
            if batch.kind is not CopyKind.CP_ASYNC:
                i = int(which[0])
                cure = (
                    "wait on its mbarrier"
                    if batch.key is not None
                    else "cp.async.bulk.wait_group.read 0 by its issuer"
                )
                sides = (batch.dst if batch.kind.to_shared else batch.src, batch.src)
                used = np.array([side[which] // self.shared.pitch for side in sides]).T
                gone = used[np.arange(len(which)), np.isin(used, slots).argmax(axis=1)]
                raise CopyFault(
                    f"{self.shared.name_slot(int(gone[0]))} exits while {batch.describe(i)} still uses its "
                    f"shared memory ({self._so_many(gone)}); {cure} before returning",
                    rule="copy.exit",
                    index=0,
                )

    def _so_many(self, gone: np.ndarray) -> str:
        """'2 such copies, of CTA 0, CTA 1': how many copies use CTAs that exit, one slot for each copy."""
        if len(gone) == 1:
            return "one such copy"
        names = [self.shared.name_slot(slot) for slot in np.unique(gone).tolist()]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"{len(gone)} such copies, of {', '.join(names[:_NAMED])}{more}"

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
