"""Byte-addressed memory of the emulated GPU, checked on every access: global memory and its allocations."""

from __future__ import annotations

import numpy as np

from smfree.emulator.allocations import Allocation, Allocator
from smfree.emulator.bytespace import (
    POISON,
    SHIFT,
    WORDS,
    WRITTEN,
    ByteSpace,
    Report,
    TypedBytes,
    as_addresses,
    as_elements,
    as_words,
    fault,
    max_reduce,
    min_reduce,
    or_reduce,
    raise_finding,
    shown,
)
from smfree.emulator.errors import Unsupported
from smfree.emulator.shared import LocalMemory, SharedMemory

__all__ = [
    "POISON",
    "Allocation",
    "ByteSpace",
    "GlobalMemory",
    "LocalMemory",
    "Report",
    "SharedMemory",
    "raise_finding",
]

_U64 = np.uint64


class GlobalMemory(Allocator):
    """Memory of one device: ``GlobalMemory(ordinal=0, capacity_bytes=80 << 30, *, report=raise_finding)``.

    256-byte red zones part the allocations; the pages of the arena cost nothing until touched. ``in_flight``
    holds the ranges of asynchronous copies; plain accesses to them are faults.
    """

    _flush_subnormal_adds = True

    # --- device accesses ---

    def load(self, addr: np.ndarray, elem_bytes: int, elems: int = 1) -> np.ndarray:
        addr = as_addresses(addr)
        n = addr.shape[0]
        size = elem_bytes * elems
        if n == 0:
            return np.empty((0, elems), WORDS[elem_bytes])
        home = self._recent_load
        rel = addr - home.start
        if int(max_reduce(rel.view(_U64))) > home.nbytes - size:
            found = self._home(addr, size, write=False)
            if found is None:
                return self._load_scattered(addr, elem_bytes, elems)
            home = self._recent_load = found
            rel = addr - home.start
        if int(or_reduce(rel)) & (size - 1):
            self._misaligned(addr, size, "load")
        if self.in_flight.write_hi > home.start:
            self.in_flight.check(addr, size, write=False, what="load")
        index = rel >> SHIFT[size]
        assert home.bytes is not None and home.shadow is not None
        words = home.bytes.take(index, size)
        if not home.full and not home.shadow.all_equal(index, size, WRITTEN):
            self._never_written(addr, size, words, home)
        return as_elements(words, n, elem_bytes, elems)

    def store(self, addr: np.ndarray, values: np.ndarray) -> None:
        addr = as_addresses(addr)
        n = addr.shape[0]
        if n == 0:
            return
        words, size = as_words(values, n)
        home = self._recent_store
        rel = addr - home.start
        if int(max_reduce(rel.view(_U64))) > home.nbytes - size:
            found = self._home(addr, size, write=True)
            if found is None:
                self._store_scattered(addr, size, words)
                return
            home = self._recent_store = found
            rel = addr - home.start
        if int(or_reduce(rel)) & (size - 1):
            self._misaligned(addr, size, "store")
        if self.in_flight.hi > home.start:
            self.in_flight.check(addr, size, write=True, what="store")
        index = rel >> SHIFT[size]
        assert home.bytes is not None
        home.bytes.put(index, size, words)
        if not home.full:
            self._mark(home, index, size)

    def check_write(self, addr: np.ndarray, nbytes: int, what: str) -> None:
        """Everything but the bounds of a write of ``nbytes`` per address that comes later."""
        if int(or_reduce(addr)) & (nbytes - 1):
            self._misaligned(addr, nbytes, what)
        if self.in_flight.hi > self.base:
            self.in_flight.check(addr, nbytes, write=True, what=what)

    def _mark(self, home: Allocation, index: np.ndarray, size: int) -> None:
        assert home.shadow is not None
        home.shadow.put_constant(index, size, WRITTEN)
        self._count(home, len(index) * size)

    def _count(self, home: Allocation, nbytes: int) -> None:
        """Look whether ``home`` is full, at most about once per byte stored."""
        home.until_check -= nbytes
        if home.until_check > 0:
            return
        lo = home.start - self.base
        missing = home.nbytes - int(np.count_nonzero(self.written[lo : lo + home.nbytes]))
        home.full = missing == 0
        home.until_check = max(missing, home.nbytes >> 2)

    def _atomic_words(self, addr: np.ndarray, size: int) -> tuple[TypedBytes, np.ndarray]:
        home = self._recent_store
        rel = addr - home.start
        if int(max_reduce(rel.view(_U64))) > home.nbytes - size:
            self._home(addr, size, write=True)
        rel = addr - self.base
        if int(or_reduce(rel)) & (size - 1):
            self._misaligned(addr, size, "atomic")
        if self.in_flight.hi > self.base:
            self.in_flight.check(addr, size, write=True, what="atomic", atomic=True, report=self.report)
        index = rel >> SHIFT[size]
        if not self._shadow.all_equal(index, size, WRITTEN):
            self._never_written(addr, size, None, None)
        return self._bytes, index

    def _home(self, addr: np.ndarray, size: int, *, write: bool) -> Allocation | None:
        """The one allocation all lanes fall into, None when they spread over several; else a fault."""
        lo, hi = int(min_reduce(addr)), int(max_reduce(addr))
        home = self._at_or_before(lo)
        if home is not None and not home.freed and hi + size <= home.end:
            return home
        if self._arrays is None:
            live = [self._by_start[s] for s in self._starts if not self._by_start[s].freed]
            self._arrays = (
                np.array([a.start for a in live], np.int64),
                np.array([a.end for a in live], np.int64),
                np.array([a.full for a in live], bool),
            )
        starts, ends, _ = self._arrays
        if not len(starts):
            bad = np.ones(len(addr), bool)
        else:
            at = np.searchsorted(starts, addr, side="right") - 1
            bad = (at < 0) | (addr > ends[np.maximum(at, 0)] - size)  # addr + size may wrap
        if bad.any():
            self._out_of_bounds(addr, size, int(np.argmax(bad)), "store" if write else "load")
        return None

    def _load_scattered(self, addr: np.ndarray, elem_bytes: int, elems: int) -> np.ndarray:
        size = elem_bytes * elems
        rel = addr - self.base
        if int(or_reduce(rel)) & (size - 1):
            self._misaligned(addr, size, "load")
        if self.in_flight.write_hi > self.base:
            self.in_flight.check(addr, size, write=False, what="load")
        index = rel >> SHIFT[size]
        words = self._bytes.take(index, size)
        if not self._shadow.all_equal(index, size, WRITTEN):
            self._never_written(addr, size, words, None)
        return as_elements(words, len(addr), elem_bytes, elems)

    def _store_scattered(self, addr: np.ndarray, size: int, words: np.ndarray) -> None:
        rel = addr - self.base
        if int(or_reduce(rel)) & (size - 1):
            self._misaligned(addr, size, "store")
        if self.in_flight.hi > self.base:
            self.in_flight.check(addr, size, write=True, what="store")
        index = rel >> SHIFT[size]
        self._bytes.put(index, size, words)
        self._shadow.put_constant(index, size, WRITTEN)

    # --- whole ranges: asynchronous copies and the host ---

    def check_range(self, addr: int, nbytes: int, what: str, index: int | None = None) -> Allocation:
        """The live allocation that holds [addr, addr + nbytes); a fault that says ``what`` otherwise."""
        home = self._at_or_before(addr)
        if home is None or home.freed or addr + nbytes > home.end:
            self._out_of_bounds(np.array([addr]), nbytes, 0, what, index)
        assert home is not None
        return home

    def check_ranges(self, addr: np.ndarray, nbytes: np.ndarray, what: str) -> Allocation | None:
        """:meth:`check_range` for n ranges; the allocation when one holds them all."""
        used = nbytes > 0
        if not used.all():
            addr, nbytes = addr[used], nbytes[used]
        if not len(addr):
            return None
        low, last, high = int(addr.min()), int(addr.max()), int((addr + nbytes).max())
        home = self._at_or_before(low)
        wraps = last > high  # past 63 bits
        if home is not None and not home.freed and not wraps and high <= home.end:
            return home
        index = np.flatnonzero(used).tolist()
        for i, start, size in zip(index, addr.tolist(), nbytes.tolist(), strict=True):
            self.check_range(start, size, what, i)
        return None

    def span(self, addr: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Unchecked views (data, shadow) of [addr, addr + nbytes)."""
        lo = addr - self.base
        return self.data[lo : lo + nbytes], self.written[lo : lo + nbytes]

    def note_written(self, home: Allocation, nbytes: int) -> None:
        """The shadow of ``nbytes`` bytes of ``home`` was set through :meth:`span`."""
        if not home.full:
            self._count(home, nbytes)

    def read(self, addr: int, nbytes: int) -> np.ndarray:
        """Host read -> uint8[nbytes], a copy; never-written bytes read as :data:`POISON`."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        home = self.check_range(addr, nbytes, "host read")
        data, written = self.span(addr, nbytes)
        out = data.copy()
        if not home.full:
            out[written != WRITTEN] = POISON
        return out

    def write(self, addr: int, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Host write of all bytes of ``data``."""
        if isinstance(data, np.ndarray):
            source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        else:
            source = np.frombuffer(data, np.uint8)
        if len(source):
            home = self.check_range(addr, len(source), "host write")
            self.span(addr, len(source))[0][:] = source
            self._host_wrote(home, addr, len(source))

    def fill(self, addr: int, nbytes: int, pattern: bytes | int) -> None:
        """Host fill (memset): ``pattern`` is one byte value or a word that divides ``nbytes``."""
        if nbytes == 0:
            return
        word = bytes([pattern]) if isinstance(pattern, int) else bytes(pattern)
        if nbytes % len(word):
            raise ValueError(f"fill of {nbytes} bytes with a {len(word)}-byte pattern; use a multiple")
        home = self.check_range(addr, nbytes, "host fill")
        self.span(addr, nbytes)[0].reshape(-1, len(word))[:] = np.frombuffer(word, np.uint8)
        self._host_wrote(home, addr, nbytes)

    def copy(self, dst: int, source: GlobalMemory, src: int, nbytes: int) -> None:
        """Device-to-device copy; never-written bytes stay never written."""
        if nbytes == 0:
            return
        source.check_range(src, nbytes, "device-to-device copy (source)")
        home = self.check_range(dst, nbytes, "device-to-device copy (destination)")
        data, written = source.span(src, nbytes)
        out, out_written = self.span(dst, nbytes)
        out[:] = data
        out_written[:] = written
        unwritten = nbytes - int(np.count_nonzero(written == WRITTEN))
        if unwritten:
            home.full = False
            home.until_check = max(home.until_check, unwritten)
        else:
            self.note_written(home, nbytes)

    def _host_wrote(self, home: Allocation, addr: int, nbytes: int) -> None:
        if home.full:
            return
        self.span(addr, nbytes)[1][:] = WRITTEN
        if nbytes == home.nbytes:
            home.full = True
        else:
            self._count(home, nbytes)

    # --- faults ---

    def _out_of_bounds(
        self, addr: np.ndarray, size: int, index: int, what: str, report_index: int | None = None
    ) -> None:
        where = int(addr[index])
        inside = self._at_or_before(where)
        at = report_index if report_index is not None else index
        head = f"{what} of {size} bytes at {shown(where)} in {self.name}"
        on_host = self.host.range_of(where)
        if on_host is not None:
            raise Unsupported(
                f"{what} of {size} bytes at 0x{where:x} in {on_host}: only loads, stores and atomics of "
                "threads that all go there are modelled; copy it to the device first",
                rule="unsupported.host_memory",
                index=at,
            )
        if inside is not None and inside.freed and where < inside.end:
            raise fault("memory.use_after_free", at, f"{head} touches {inside}", "free it after its last use")
        if inside is not None and where < inside.end:
            over = where + size - inside.end
            raise fault(
                "memory.bounds",
                at,
                f"{head} runs {over} bytes past the end of {inside}",
                "check the tail's bound",
            )
        raise fault(
            "memory.bounds",
            at,
            f"{head} is outside every allocation{self._near(where)}",
            "check index and size",
        )

    def _misaligned(self, addr: np.ndarray, size: int, what: str) -> None:
        index = int(np.argmax((addr & (size - 1)) != 0))
        where = int(addr[index])
        raise fault(
            "memory.misaligned",
            index,
            f"{what} of {size} bytes must be {size}-byte aligned (got {shown(where)}, which is "
            f"{where % size} past)",
            "offset the pointer by a multiple of the vector or use a narrower access",
        )

    def _never_written(
        self, addr: np.ndarray, size: int, words: np.ndarray | None, home: Allocation | None
    ) -> None:
        seen = self.written[(addr - self.base)[:, None] + np.arange(size)] == WRITTEN
        index = int(np.argmax(~seen.all(axis=1)))
        where = int(addr[index])
        self.report(
            fault(
                "memory.uninitialized",
                index,
                f"load of {size} bytes at 0x{where:x} reads {size - int(seen[index].sum())} bytes nobody has "
                f"written, in {home or self._at_or_before(where)}",
                "write them first, or check that the copy that should have is complete",
            )
        )
        if words is None:
            self.data[((addr - self.base)[:, None] + np.arange(size))[~seen]] = POISON
        else:
            words.view(np.uint8).reshape(len(addr), size)[~seen] = POISON
