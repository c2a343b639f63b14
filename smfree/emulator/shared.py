"""Shared memory of every resident CTA: one flat space of slots, checked on every access."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smfree.emulator.bytespace import (
    AWAITS_COPY,
    BARRIER,
    POISON,
    SHIFT,
    UNWRITTEN,
    WORDS,
    WRITTEN,
    ByteSpace,
    Report,
    TypedBytes,
    as_addresses,
    as_elements,
    as_words,
    blocks,
    fault,
    or_reduce,
    raise_finding,
)
from smfree.emulator.errors import BarrierFault, CopyFault

#: Guard bits, one byte per 16-byte granule: what an access must look at more closely.
_NEW, _OUTSIDE, _BARRIER, _DST, _SRC = 1, 2, 4, 8, 16
_STOPS_LOAD = _OUTSIDE | _BARRIER | _DST
_STOPS_STORE = _STOPS_LOAD | _SRC


class SharedMemory(ByteSpace):
    """``slots`` CTAs of ``pitch`` bytes (a multiple of 1024); flat address = slot * pitch + offset.

    Only ``limit`` bytes of each slot belong to its CTA. One guard byte per 16 bytes answers every check at
    once: zero means inside, written, no barrier, no copy in flight. ``copy_at(addr, writing)`` names the
    copy in flight at an address, for reports, ``barrier_at(addr)`` the mbarrier,
    ``cure_at(addr, usual)`` what to do about a copy in flight that writes there.
    """

    name = "shared memory"
    base = 0

    def __init__(self, slots: int, pitch: int, limit: int, *, report: Report = raise_finding) -> None:
        if pitch % 1024 or limit > pitch:
            raise ValueError(
                f"pitch must be a multiple of 1024 and at least limit (pitch {pitch}, limit {limit})"
            )
        self.slots, self.pitch, self.report = slots, pitch, report
        self.nbytes = slots * pitch
        self.data = np.zeros(self.nbytes, np.uint8)
        self.written = np.zeros(self.nbytes, np.uint8)
        self._bytes, self._shadow = TypedBytes(self.data), TypedBytes(self.written)
        self._limit = np.full(slots, limit, np.int64)
        self._range = 1 << max(self.nbytes - 1, 15).bit_length()
        self._guard = np.full(self._range >> 4, _OUTSIDE, np.uint8)
        self._guard2 = self._guard.view(np.uint16)
        self._source_uses = np.zeros(self.nbytes >> 4, np.uint16)
        self.copy_at: Callable[[int, bool], str] = lambda addr, writing: "an asynchronous copy"
        self.cure_at: Callable[[int, str], str] = lambda addr, usual: usual
        self.barrier_at: Callable[[int], str] = lambda addr: "a live mbarrier"
        self.name_slot: Callable[[int], str] = lambda slot: f"CTA slot {slot}"
        self._guard[: self.nbytes >> 4].reshape(slots, -1)[:, : limit >> 4] = _NEW
        self._guard[: self.nbytes >> 4] |= np.uint8(_NEW)

    def reset(self, slots: np.ndarray, limit: int | None = None) -> None:
        """New CTAs move into these slots (with ``limit`` bytes each): everything is unwritten again."""
        slots = as_addresses(slots)
        if limit is not None:
            if limit > self.pitch:
                raise ValueError(f"a CTA's {limit} bytes exceed the slot pitch {self.pitch}")
            self._limit[slots] = limit
        guard = self._guard[: self.nbytes >> 4].reshape(self.slots, -1)
        for slot in slots.tolist():
            end = int(self._limit[slot])
            self.written[slot * self.pitch : (slot + 1) * self.pitch] = UNWRITTEN
            guard[slot, : end >> 4] = _NEW
            guard[slot, end >> 4 :] = _OUTSIDE | _NEW
            self._source_uses[slot * self.pitch >> 4 : (slot + 1) * self.pitch >> 4] = 0

    # --- device accesses ---

    def _guards(self, addr: np.ndarray, size: int) -> int:
        """OR of the guard bits under an access; -1 when alignment or range is broken."""
        mixed = int(or_reduce(addr))
        if mixed & (size - 1) or not 0 <= mixed < self._range:
            return -1
        if size <= 16:
            return int(or_reduce(self._guard.take(addr >> 4, mode="clip")))
        pair = int(or_reduce(self._guard2.take(addr >> 5, mode="clip")))
        return (pair | pair >> 8) & 0xFF

    def load(self, addr: np.ndarray, elem_bytes: int, elems: int = 1) -> np.ndarray:
        addr = as_addresses(addr)
        n = addr.shape[0]
        size = elem_bytes * elems
        if n == 0:
            return np.empty((0, elems), WORDS[elem_bytes])
        bits = self._guards(addr, size)
        if bits & _STOPS_LOAD:
            self._judge(addr, size, write=False)
        index = addr >> SHIFT[size]
        words = self._bytes.take(index, size)
        if bits & _NEW and not self._shadow.all_equal(index, size, WRITTEN):
            self._never_written(addr, size, words)
        return as_elements(words, n, elem_bytes, elems)

    def store(self, addr: np.ndarray, values: np.ndarray) -> None:
        addr = as_addresses(addr)
        n = addr.shape[0]
        if n == 0:
            return
        words, size = as_words(values, n)
        bits = self._guards(addr, size)
        if bits & _STOPS_STORE:
            self._judge(addr, size, write=True)
        index = addr >> SHIFT[size]
        self._bytes.put(index, size, words)
        if bits & _NEW:
            self._shadow.put_constant(index, size, WRITTEN)
            if size == 16:
                self._guard[index] = self._guard.take(index, mode="clip") & (_OUTSIDE | _SRC)
            else:
                self._refresh(addr, size)

    def _atomic_words(self, addr: np.ndarray, size: int) -> tuple[TypedBytes, np.ndarray]:
        bits = self._guards(addr, size)
        if bits & _STOPS_STORE:
            self._judge(addr, size, write=True)
        index = addr >> SHIFT[size]
        if bits & _NEW and not self._shadow.all_equal(index, size, WRITTEN):
            self._never_written(addr, size, None)
        return self._bytes, index

    # --- the shadow and its guard ---

    def _refresh(self, addr: np.ndarray, size: int) -> None:
        """Recompute the guard of the granules that these accesses touched (after the shadow changed)."""
        granule = addr >> 4
        if size > 16:
            granule = np.concatenate((granule, granule + 1))
        words = self._shadow.views[16].take(granule, mode="clip").view(np.uint64)
        low, high = words[0::2], words[1::2]
        whole = np.uint64(0x0101010101010101)
        full = (low == whole) & (high == whole)
        guard = self._guard.take(granule, mode="clip")
        if full.all():
            self._guard[granule] = guard & (_OUTSIDE | _SRC)
            return
        cells = words.view(np.uint8).reshape(-1, 16)
        fresh = guard & (_OUTSIDE | _SRC)
        fresh |= np.where((cells == UNWRITTEN).any(axis=1), _NEW, 0).astype(np.uint8)
        fresh |= np.where((cells == AWAITS_COPY).any(axis=1), _DST, 0).astype(np.uint8)
        fresh |= np.where((cells == BARRIER).any(axis=1), _BARRIER, 0).astype(np.uint8)
        self._guard[granule] = fresh

    def mark(self, addr: np.ndarray, nbytes: int, state: int) -> None:
        """Set the shadow of [addr, addr + nbytes) of n ranges to ``state`` (in range, by the caller's check).

        Ranges are 4, 8 or 16 bytes and aligned, or multiples of 16 at multiples of 16.
        """
        if nbytes < 16:
            self._shadow.put_constant(addr >> SHIFT[nbytes], nbytes, state)
            self._refresh(addr, nbytes)
            return
        flag = {UNWRITTEN: _NEW, WRITTEN: 0, AWAITS_COPY: _DST, BARRIER: _BARRIER}[state]
        keep = _OUTSIDE | _SRC
        if nbytes == 16:
            granule = addr >> 4
            self._shadow.put_constant(granule, 16, state)
            self._guard[granule] = self._guard[granule] & keep | np.uint8(flag)
            return
        for cells in blocks(self.written, addr, nbytes):
            cells[...] = state
        for guard in blocks(self._guard, addr >> 4, nbytes >> 4):
            np.bitwise_and(guard, keep, out=guard)
            if flag:
                np.bitwise_or(guard, flag, out=guard)

    def state(self, addr: np.ndarray, nbytes: int) -> np.ndarray:
        """Shadow of [addr, addr + nbytes) -> uint8[n, nbytes] (a copy)."""
        return self.written[addr[:, None] + np.arange(nbytes)]

    def busy(self, addr: np.ndarray, nbytes: int) -> bool:
        """Quick: may a barrier or a copy in flight lie in these ranges?"""
        return bool(nbytes and self._range_bits(addr, nbytes) & (_BARRIER | _DST | _SRC))

    def unreadable(self, addr: np.ndarray, nbytes: int) -> bool:
        """Quick: may some byte of these ranges be other than plain written data?"""
        return bool(nbytes and self._range_bits(addr, nbytes) & (_NEW | _BARRIER | _DST))

    def judge_range(self, addr: np.ndarray, nbytes: int, what: str) -> None:
        """Exact version of :meth:`busy` for a copy ``what`` that will write these ranges: fault or return."""
        for index, start in enumerate(addr.tolist()):
            cells = self.written[start : start + nbytes]
            for state in (BARRIER, AWAITS_COPY):
                if (cells == state).any():
                    self._object_fault(
                        state, what, nbytes, start + int(np.argmax(cells == state)), index, True
                    )
            uses = self._source_uses[start >> 4 : (start + nbytes + 15) >> 4]
            if uses.any():
                self._source_fault(what, nbytes, start + 16 * int(np.argmax(uses > 0)), index)

    def _range_bits(self, addr: np.ndarray, nbytes: int) -> int:
        if nbytes <= 16:
            return int(or_reduce(self._guard.take(addr >> 4, mode="clip")))
        bits = 0
        for guard in blocks(self._guard, addr >> 4, nbytes >> 4):
            bits |= int(or_reduce(guard, axis=None))
        return bits

    def use_source(self, addr: np.ndarray, nbytes: int, delta: int) -> None:
        """A copy that reads [addr, addr + nbytes) was issued (+1) or has read it (-1); multiples of 16."""
        if not nbytes:
            return
        granules = addr >> 4, nbytes >> 4
        for uses, guard in zip(
            blocks(self._source_uses, *granules), blocks(self._guard, *granules), strict=True
        ):
            if delta > 0:
                uses += np.uint16(1)
                guard |= np.uint8(_SRC)
            else:
                uses -= np.uint16(1)
                np.bitwise_and(guard, 0xFF ^ _SRC, out=guard, where=uses == 0)

    def check_range(self, addr: np.ndarray, nbytes: int, what: str) -> None:
        """Fault unless every [addr, addr + nbytes) lies inside its CTA's shared memory."""
        if len(addr) == 1:
            one, offset = divmod(int(addr[0]), self.pitch)
            if not 0 <= one < self.slots or offset + nbytes > self._limit[one]:
                self._out_of_bounds(addr, nbytes, 0, what)
            return
        slot = addr // self.pitch
        inside = (addr >= 0) & (slot < self.slots)
        inside &= addr - slot * self.pitch + nbytes <= self._limit[np.where(inside, slot, 0)]
        if not inside.all():
            self._out_of_bounds(addr, nbytes, int(np.argmin(inside)), what)

    def check_write(self, addr: np.ndarray, size: int) -> None:
        """The checks of a store of ``size`` bytes, without storing."""
        if self._guards(addr, size) & _STOPS_STORE:
            self._judge(addr, size, write=True)

    # --- faults ---

    def place(self, addr: int) -> str:
        """'shared+0x40 (CTA slot 3)'."""
        return f"shared+0x{addr % self.pitch:x} ({self.name_slot(addr // self.pitch)})"

    def _out_of_bounds(self, addr: np.ndarray, size: int, index: int, what: str) -> None:
        where = int(addr[index])
        slot, offset = divmod(where, self.pitch)
        limit = int(self._limit[slot]) if 0 <= slot < self.slots else 0
        over = (
            f"{offset + size - limit} bytes past its end" if 0 <= slot < self.slots else "outside every CTA"
        )
        raise fault(
            "memory.bounds",
            index,
            f"{what} of {size} bytes at {self.place(where)}: the CTA has {limit} bytes of shared memory, "
            f"{over}",
            "check the index, or ask for more dynamic shared memory at launch",
        )

    def _judge(self, addr: np.ndarray, size: int, *, write: bool) -> None:
        """Exact checks where the guard was not clean; returns when the access is innocent after all."""
        what = "store" if write else "load"
        crooked = (addr & (size - 1)) != 0
        if crooked.any():
            index = int(np.argmax(crooked))
            raise fault(
                "memory.misaligned",
                index,
                f"{what} of {size} bytes must be {size}-byte aligned (got {self.place(int(addr[index]))})",
                "offset the pointer by a multiple of the vector or use a narrower access",
            )
        self.check_range(addr, size, what)
        cells = self.state(addr, size)
        for state in (BARRIER, AWAITS_COPY):
            hit = (cells == state).any(axis=1)
            if hit.any():
                index = int(np.argmax(hit))
                where = int(addr[index]) + int(np.argmax(cells[index] == state))
                self._object_fault(state, what, size, where, index)
        if not write:
            return
        uses = self._source_uses[addr >> 4] > 0
        if size > 16:
            uses |= self._source_uses[(addr >> 4) + 1] > 0
        if uses.any():
            index = int(np.argmax(uses))
            self._source_fault("store", size, int(addr[index]), index)

    def _source_fault(self, what: str, size: int, where: int, index: int) -> None:
        raise CopyFault(
            f"{what} of {size} bytes at {self.place(where)} overwrites the source of "
            f"{self.copy_at(where, False)}, which has not been read yet; wait first "
            "(cp.async.bulk.wait_group.read by the thread that issued the copy, then a barrier)",
            rule="copy.source_modified",
            index=index,
        )

    def _object_fault(
        self, state: int, what: str, size: int, where: int, index: int, copy: bool = False
    ) -> None:
        if state == BARRIER:
            raise BarrierFault(
                f"{'' if copy else 'plain '}{what} of {size} bytes at {self.place(where)} touches "
                f"{self.barrier_at(where)}; only mbarrier instructions may, until mbarrier.inval",
                rule="mbarrier.plain_access",
                index=index,
            )
        writes = copy or what == "store"
        verb = "overwrites" if writes else "reads"
        cure = (
            "wait for it (mbarrier wait, or wait_group / wait_all by the thread that issued it and a barrier "
            "for the others)"
        )
        raise CopyFault(
            f"{what} of {size} bytes at {self.place(where)} {verb} the destination of "
            f"{self.copy_at(where, True)}, "
            f"which is not complete; {self.cure_at(where, cure)}",
            rule="copy.overlap" if copy else "copy.destination_" + ("overwritten" if writes else "read"),
            index=index,
        )

    def _never_written(self, addr: np.ndarray, size: int, words: np.ndarray | None) -> None:
        seen = self.state(addr, size) == WRITTEN
        index = int(np.argmax(~seen.all(axis=1)))
        self.report(
            fault(
                "memory.uninitialized",
                index,
                f"load of {size} bytes at {self.place(int(addr[index]))} reads "
                f"{size - int(seen[index].sum())} "
                "bytes nobody has written",
                "write them first, or check that the copy that should have is complete",
            )
        )
        if words is None:
            self.data[(addr[:, None] + np.arange(size))[~seen]] = POISON
        else:
            words.view(np.uint8).reshape(len(addr), size)[~seen] = POISON


class LocalMemory(SharedMemory):
    """Local memory: the same checks with a slot per thread."""

    name = "local memory"

    def place(self, addr: int) -> str:
        """'local+0x40 of the thread'; the report says which."""
        return f"local+0x{addr % self.pitch:x} of the thread"
