"""Byte-addressed memory of the emulated GPU: global and shared, checked on every access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smfree.emulator.errors import EmulationError

#: Receives a finding that execution could survive. Raises it by default; may record it and return.
Report = Callable[[EmulationError], None]
POISON = 0xFF


def raise_finding(finding: EmulationError) -> None:
    """The default :data:`Report`."""
    raise finding


class ByteSpace:
    """``data`` uint8 bytes and ``written`` uint8 shadow (0 never written, 1 written, 2 = awaits an async copy)."""

    name: str
    data: np.ndarray
    written: np.ndarray

    def load(self, addr: np.ndarray, elem_bytes: int, elems: int = 1) -> np.ndarray:
        """addr int64[n] -> uint{8*elem_bytes}[n, elems], C-contiguous."""
        raise NotImplementedError

    def store(self, addr: np.ndarray, values: np.ndarray) -> None:
        """values: any 1/2/4/8-byte dtype, [n, elems] (or [n]); duplicates: the last lane wins."""
        raise NotImplementedError

    def atomic(
        self, op: str, addr: np.ndarray, value: np.ndarray, compare: np.ndarray | None = None
    ) -> np.ndarray:
        """Old values. op: add min max and or xor exch cas inc dec; the type is ``value.dtype``. Lane order."""
        raise NotImplementedError


@dataclass(slots=True)
class Allocation:
    """One live or freed range of global memory."""

    start: int
    nbytes: int
    label: str
    freed: bool = False
    full: bool = False

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class GlobalMemory(ByteSpace):
    def __init__(
        self, ordinal: int = 0, capacity_bytes: int = 80 << 30, *, report: Report = raise_finding
    ) -> None: ...

    def alloc(self, nbytes: int, align: int = 256, label: str = "") -> int:
        """Address of a new, unwritten allocation; MemoryError when the device is full."""
        raise NotImplementedError

    def free(self, addr: int) -> None: ...

    def allocation_of(self, addr: int) -> Allocation | None:
        """The live allocation that contains addr."""
        raise NotImplementedError

    def read(self, addr: int, nbytes: int) -> np.ndarray:
        """Host read -> uint8[nbytes] copy; never-written bytes read as poison."""
        raise NotImplementedError

    def write(self, addr: int, data: bytes | bytearray | memoryview | np.ndarray) -> None: ...

    def fill(self, addr: int, nbytes: int, pattern: bytes | int) -> None: ...


class SharedMemory(ByteSpace):
    """``slots`` x ``pitch`` bytes; flat address = slot * pitch + offset; pitch a multiple of 1024."""

    def __init__(self, slots: int, pitch: int, limit: int, *, report: Report = raise_finding) -> None: ...

    def reset(self, slots: np.ndarray, limit: int | None = None) -> None:
        """New CTAs move into these slots: everything unwritten again."""
