"""Host memory that the devices know of: page-locked by the driver, or the program's own and registered.

Kernels read and write it at its host address with loads, stores, atomics, cp.async and bulk copies.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from smfree.emulator.bytespace import (
    SHIFT,
    WRITTEN,
    ByteSpace,
    TypedBytes,
    as_addresses,
    as_elements,
    as_words,
    fault,
)
from smfree.emulator.inflight import InFlight
from smfree.emulator.strong import StrongLog

_ALIGN = 32
"""The widest access; views start and end at multiples of it, which never leaves a page."""


@dataclass(eq=False)
class HostRange:
    """One range: allocated by the driver (``owner`` set) or registered."""

    address: int
    nbytes: int
    flags: int
    owner: object = None
    process: object = None
    """The process that did so; None: anybody may name it."""
    context: object = None
    """The context that was current then."""

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    @property
    def base(self) -> int:
        """Where :attr:`bytes` begins."""
        return self.address // _ALIGN * _ALIGN

    @cached_property
    def bytes(self) -> TypedBytes:
        """The memory itself, from :attr:`base` on."""
        length = -(-self.end // _ALIGN) * _ALIGN - self.base
        return TypedBytes(np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self.base)))

    @cached_property
    def window(self) -> HostWindow:
        """The range as an asynchronous copy sees it."""
        return HostWindow(self)

    def __str__(self) -> str:
        return f"host memory [0x{self.address:x}, 0x{self.end:x}) of {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class Whole:
    """A host range in the place of an allocation: every byte counts as written."""

    end: int
    full: bool = True


class HostWindow(ByteSpace):
    """One range as the global side of asynchronous copies: bytes at ``base``, ranges in flight."""

    def __init__(self, whole: HostRange) -> None:
        self.range = whole
        self.name = str(whole)
        self.base = whole.base
        self._bytes = whole.bytes
        self.data = whole.bytes.raw
        self.in_flight = InFlight()

    def allocation_of(self, address: int) -> Whole | None:
        """The whole range, where it contains the address."""
        return Whole(self.range.end) if self.range.address <= address < self.range.end else None

    def check_ranges(self, addr: np.ndarray, nbytes: np.ndarray, what: str) -> Whole:
        """The router has looked."""
        return Whole(self.range.end)

    def span(self, address: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of [address, address + nbytes) and of as many written marks."""
        at = address - self.base
        return self.data[at : at + nbytes], np.full(nbytes, WRITTEN, np.uint8)

    def load(self, addr: np.ndarray, elem_bytes: int, elems: int = 1) -> np.ndarray:
        size = elem_bytes * elems
        words = self._bytes.take((as_addresses(addr) - self.base) >> SHIFT[size], size)
        return as_elements(words, len(addr), elem_bytes, elems)


class HostMemory(ByteSpace):
    """All known host ranges of a node; every byte counts as written. ``ranges``: by start address."""

    name = "host memory"

    def __init__(self) -> None:
        self.ranges: dict[int, HostRange] = {}
        self.strong = StrongLog()
        self._placed: dict[tuple[object, int], tuple[int, int]] = {}

    def allocate(self, nbytes: int, flags: int, process: object = None) -> HostRange:
        """New page-locked memory, zeroed."""
        owner = mmap.mmap(-1, nbytes)
        found = HostRange(ctypes.addressof(ctypes.c_char.from_buffer(owner)), nbytes, flags, owner, process)
        self.ranges[found.address] = found
        return found

    def register(self, address: int, nbytes: int, flags: int, process: object = None) -> HostRange:
        """Take in memory of the program."""
        found = self.ranges[address] = HostRange(address, nbytes, flags, None, process)
        return found

    def drop(self, address: int) -> None:
        """Forget the range that starts there."""
        del self.ranges[address]

    def drop_all_of(self, process: object) -> None:
        """Forget everything that a process allocated or registered."""
        for found in [found for found in self.ranges.values() if found.process is process]:
            self.drop(found.address)
        self._placed = {key: value for key, value in self._placed.items() if key[0] is not process}

    def place(self, process: object, address: int, nbytes: int, numa_node: int | None) -> None:
        """Host memory of a process, pageable or locked, is on that NUMA node; None: forget it."""
        self._placed.pop((process, address), None)
        if numa_node is not None:
            self._placed[process, address] = nbytes, numa_node

    def numa_node_of(self, process: object, address: int) -> int | None:
        """The NUMA node that a process chose for the memory at ``address``; None when it chose none."""
        for (owner, start), (nbytes, numa_node) in self._placed.items():
            if owner is process and start <= address < start + nbytes:
                return numa_node
        return None

    def range_of(self, address: int, nbytes: int = 1) -> HostRange | None:
        """The range that contains all of [address, address + nbytes), if any."""
        for found in self.ranges.values():
            if found.address <= address and address + nbytes <= found.end:
                return found
        return None

    # --- accesses of kernels ---

    def load(self, addr: np.ndarray, elem_bytes: int, elems: int = 1) -> np.ndarray:
        storage, index = self._words(addr, elem_bytes * elems, "load")
        return as_elements(storage.take(index, elem_bytes * elems), len(index), elem_bytes, elems)

    def store(self, addr: np.ndarray, values: np.ndarray) -> None:
        words, size = as_words(values, len(addr))
        storage, index = self._words(addr, size, "store")
        storage.put(index, size, words)

    def _atomic_words(self, addr: np.ndarray, size: int) -> tuple[TypedBytes, np.ndarray]:
        return self._words(addr, size, "atomic")

    def _words(self, addr: np.ndarray, size: int, what: str) -> tuple[TypedBytes, np.ndarray]:
        """Storage and word indices of an access, checked: all lanes in one range, each aligned."""
        addr = as_addresses(addr)
        home = self.range_of(int(addr[0]))
        assert home is not None, "the caller looked"
        outside = (addr < home.address) | (addr + size > home.end)
        if outside.any():
            i = int(np.argmax(outside))
            raise fault(
                "memory.bounds",
                i,
                f"{what} of {size} bytes at 0x{int(addr[i]):x} is outside {home}, where other threads' go",
                "check index and size",
            )
        rel = addr - home.base
        if (rel & (size - 1)).any():
            i = int(np.argmax((rel & (size - 1)) != 0))
            raise fault(
                "memory.misaligned",
                i,
                f"{what} of {size} bytes must be {size}-byte aligned (got 0x{int(addr[i]):x} in {home})",
                "offset the pointer by a multiple of the vector or use a narrower access",
            )
        return home.bytes, rel >> SHIFT[size]
