"""Allocations of one device: a lazily committed arena, red zones, quarantine of freed ranges."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from smfree.emulator.bytespace import ByteSpace, Report, TypedBytes, fault, raise_finding
from smfree.emulator.host_memory import HostMemory
from smfree.emulator.inflight import InFlight
from smfree.emulator.strong import StrongLog

_GRANULE = 256
RED_ZONE_BYTES = 256
DEVICE_SPACE_BYTES = 1 << 40
"""Addresses of one device."""


@dataclass(slots=True)
class Allocation:
    """One live or freed range of global memory; ``full``: every byte has been written."""

    start: int
    nbytes: int
    label: str = ""
    freed: bool = False
    full: bool = False
    until_check: int = 0
    owner: object = None
    """The process that allocated it; None: anybody may name it."""
    bytes: TypedBytes | None = field(default=None, repr=False)
    shadow: TypedBytes | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def __str__(self) -> str:
        name = f" '{self.label}'" if self.label else ""
        state = "freed allocation" if self.freed else "allocation"
        return f"{state}{name} [0x{self.start:x}, 0x{self.end:x}) of {self.nbytes} bytes"


class Reserve:
    """Zero bytes that cost nothing until touched, and again nothing once given up."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)

    def give_up(self, lo: int, hi: int) -> None:
        """Whole pages of [lo, hi) go back to the system and read as zero; the rest is zeroed."""
        page = mmap.PAGESIZE
        first, last = -(-lo // page) * page, hi // page * page
        if first >= last or not hasattr(mmap, "MADV_DONTNEED"):
            self.bytes[lo:hi] = 0
            return
        self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.bytes[lo:first] = 0
        self.bytes[last:hi] = 0


class Allocator(ByteSpace):
    """Address ranges of one device; GlobalMemory adds the accesses.

    Addresses start at (ordinal + 1) TiB. Freed ranges are remembered (use after free, double free) and
    reused, oldest first, only when the address space is used up; their pages go back to the system at once.
    ``host``: the memory outside that the node's devices may use.
    """

    def __init__(
        self,
        ordinal: int = 0,
        capacity_bytes: int = 80 << 30,
        *,
        report: Report = raise_finding,
        host: HostMemory | None = None,
    ) -> None:
        self.name = f"global memory of device {ordinal}"
        self.base = (ordinal + 1) * DEVICE_SPACE_BYTES
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self.report = report
        self.in_flight = InFlight()
        self.strong = StrongLog()
        self.host = host or HostMemory()
        reserve = -(-(capacity_bytes + (64 << 20)) // (1 << 20)) << 20
        while True:
            try:
                self._stores = Reserve(reserve), Reserve(reserve)
                break
            except (OSError, ValueError):
                if reserve <= 64 << 20:
                    raise
                reserve //= 2
        self.data, self.written = (store.bytes for store in self._stores)
        self._bytes, self._shadow = TypedBytes(self.data), TypedBytes(self.written)
        self._top = self.base + RED_ZONE_BYTES
        self._starts: list[int] = []
        self._by_start: dict[int, Allocation] = {}
        self._quarantine: list[Allocation] = []
        self._arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._nothing = Allocation(0, -64)
        self._recent_load = self._recent_store = self._nothing

    def alloc(self, nbytes: int, align: int = 256, label: str = "", *, owner: object = None) -> int:
        """Address of a new, never-written allocation. MemoryError when the device is full."""
        if nbytes <= 0 or align & (align - 1):
            raise ValueError(
                f"an allocation has at least 1 byte and a power-of-two alignment ({nbytes}, {align})"
            )
        if self.allocated_bytes + nbytes > self.capacity_bytes:
            raise MemoryError(
                f"{self.name} is full: {nbytes} bytes asked, {self.allocated_bytes} of "
                f"{self.capacity_bytes} in use"
            )
        start = -(-self._top // max(align, _GRANULE)) * max(align, _GRANULE)
        span = -(-nbytes // _GRANULE) * _GRANULE + RED_ZONE_BYTES
        if start + span > self.base + len(self.data):
            start = self._reuse(span, max(align, _GRANULE))
        else:
            self._top = start + span
        lo = start - self.base
        padded = slice(lo, lo + span - RED_ZONE_BYTES)
        made = Allocation(
            start,
            nbytes,
            label,
            until_check=nbytes,
            owner=owner,
            bytes=TypedBytes(self.data[padded]),
            shadow=TypedBytes(self.written[padded]),
        )
        insort(self._starts, start)
        self._by_start[start] = made
        self._arrays = None
        self.allocated_bytes += nbytes
        return start

    def _reuse(self, span: int, align: int) -> int:
        for i, old in enumerate(self._quarantine):
            room = -(-old.nbytes // _GRANULE) * _GRANULE + RED_ZONE_BYTES
            if room >= span and old.start % align == 0:
                del self._quarantine[i]
                self._starts.remove(old.start)
                del self._by_start[old.start]
                return old.start
        raise MemoryError(f"{self.name}: no address range of {span} bytes left; free larger allocations")

    def free(self, addr: int) -> None:
        """Give an allocation back; its bytes stay out of use as long as possible."""
        found = self._by_start.get(addr)
        if found is None:
            raise fault(
                "memory.free",
                None,
                f"free of 0x{addr:x}, which is not the start of an allocation of "
                f"{self.name}{self._near(addr)}",
                "pass the pointer that alloc returned",
            )
        if found.freed:
            raise fault("memory.double_free", None, f"second free of {found}", "free each allocation once")
        found.freed = True
        found.full = False
        self.allocated_bytes -= found.nbytes
        self._quarantine.append(found)
        for store in self._stores:  # the shadow becomes zero, that is never written
            store.give_up(found.start - self.base, found.end - self.base)
        self._arrays = None
        self._recent_load = self._recent_store = self._nothing

    def allocation_of(self, addr: int) -> Allocation | None:
        """The live allocation that contains ``addr``."""
        found = self._at_or_before(addr)
        return found if found is not None and not found.freed and addr < found.end else None

    def _at_or_before(self, addr: int) -> Allocation | None:
        i = bisect_right(self._starts, addr)
        return self._by_start[self._starts[i - 1]] if i else None

    def _near(self, addr: int) -> str:
        before = self._at_or_before(addr)
        i = bisect_right(self._starts, addr)
        after = self._by_start[self._starts[i]] if i < len(self._starts) else None
        near = [
            (addr - before.end, f"{addr - before.end} bytes past the end of {before}") if before else None,
            (after.start - addr, f"{after.start - addr} bytes before {after}") if after else None,
        ]
        best = min((n for n in near if n is not None), default=None)
        return f" ({best[1]})" if best else " (nothing is allocated)"
