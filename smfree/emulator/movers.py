"""How the bytes of an asynchronous copy move, one class per shape; addresses were checked at issue."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from smfree.emulator.bytespace import SHIFT, WRITTEN, Report, blocks
from smfree.emulator.errors import MemoryFault
from smfree.emulator.host_memory import HostWindow
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.reductions import Reduction
from smfree.emulator.shared import SharedMemory

FarMemory = GlobalMemory | HostWindow
"""The global side of an asynchronous copy."""


class Mover(ABC):
    """Elements 0..n-1 of one batch. ``read`` takes a snapshot of sources; ``write`` puts the bytes down."""

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray] = {}

    @abstractmethod
    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        """Source bytes now: one array per element."""

    @abstractmethod
    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        """Write the fetched bytes of these elements."""

    def _move(self, which: np.ndarray) -> None:
        """Read and write in one go."""
        self._put(which, self._fetch(which))

    @abstractmethod
    def publish(self, which: np.ndarray) -> None:
        """Loads: the shared destination becomes readable."""

    def source_addresses(self) -> np.ndarray:
        """Global addresses that are really read (cp.async with src-size 0 reads none)."""
        raise NotImplementedError

    def read(self, which: np.ndarray) -> None:
        for i, block in zip(which.tolist(), self._fetch(which), strict=True):
            self._held[i] = block.copy()

    def write(self, which: np.ndarray, fresh: np.ndarray) -> None:
        """``fresh`` bool[len(which)]: the source is read now, not before."""
        if not self._held:
            self._move(which)
            return
        if fresh.any():
            self._move(which[fresh])
        held = which[~fresh]
        if len(held):
            self._put(held, [self._held.pop(i) for i in held.tolist()])


class LaneMover(Mover):
    """cp.async: 4, 8 or 16 bytes per lane, the tail past ``sizes`` zero-filled."""

    def __init__(
        self,
        memory: FarMemory,
        shared: SharedMemory,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: int,
        sizes: np.ndarray | None,
    ) -> None:
        super().__init__()
        self.memory, self.shared = memory, shared
        self.dst, self.src, self.nbytes, self.sizes = dst, src, nbytes, sizes

    def source_addresses(self) -> np.ndarray:
        return self.src if self.sizes is None else self.src[self.sizes > 0]

    def check_source(self, which: np.ndarray) -> None:
        """Bounds, written bytes, copies in flight: what a load would check."""
        if self.sizes is None:
            self.memory.load(self.src, min(self.nbytes, 8), max(1, self.nbytes // 8))
            return
        full = np.flatnonzero(self.sizes == self.nbytes)
        try:
            self.memory.load(self.src[full], min(self.nbytes, 8), max(1, self.nbytes // 8))
        except MemoryFault as fault:
            fault.index = int(full[fault.index or 0])
            raise
        for i in np.flatnonzero((self.sizes > 0) & (self.sizes < self.nbytes)).tolist():
            try:
                self.memory.load(self.src[i] + np.arange(self.sizes[i]), 1)
            except MemoryFault as fault:
                fault.index = i
                raise

    def _words(self, which: np.ndarray) -> np.ndarray:
        storage = self.memory._bytes
        if self.sizes is None:
            return storage.take((self.src[which] - self.memory.base) >> SHIFT[self.nbytes], self.nbytes)
        sizes = self.sizes[which]
        words = np.zeros(len(which), storage.views[self.nbytes].dtype)
        full = sizes == self.nbytes
        words[full] = storage.take(
            (self.src[which[full]] - self.memory.base) >> SHIFT[self.nbytes], self.nbytes
        )
        cells = words.view(np.uint8).reshape(len(which), self.nbytes)
        for row in np.flatnonzero((sizes > 0) & ~full).tolist():
            part = self.memory.span(int(self.src[which[row]]), int(sizes[row]))[0]
            cells[row, : len(part)] = part
        return words

    def _move(self, which: np.ndarray) -> None:
        self.shared._bytes.put(self.dst[which] >> SHIFT[self.nbytes], self.nbytes, self._words(which))

    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        return list(self._words(which).view(np.uint8).reshape(len(which), self.nbytes))

    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        self.shared.data[self.dst[which][:, None] + np.arange(self.nbytes)] = np.stack(blocks)

    def publish(self, which: np.ndarray) -> None:
        self.shared.mark(self.dst[which], self.nbytes, WRITTEN)


class BulkMover(Mover):
    """Bulk copies: one contiguous range per element, multiples of 16 bytes at multiples of 16.

    Between global and shared memory, or between the shared memories of two CTAs. With ``reduction`` the
    destination is combined with the source instead of overwritten.
    """

    def __init__(
        self,
        source: FarMemory | SharedMemory,
        target: FarMemory | SharedMemory,
        dst: np.ndarray,
        src: np.ndarray,
        sizes: np.ndarray,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        self.source, self.target, self.reduction = source, target, reduction
        self.dst, self.src, self.sizes = dst, src, sizes
        same = len(sizes) > 1 and bool((sizes == sizes[0]).all())
        self._even = same and int(sizes[0]) > 0 and reduction is None
        self._snapshot: np.ndarray | None = None

    def source_addresses(self) -> np.ndarray:
        return self.src

    def check_global(self, report: Report, what: str) -> None:
        """Somebody has written every global byte that the copy reads."""
        memory, start_of = (self.source, self.src) if self.reduction is None else (self.target, self.dst)
        assert not isinstance(memory, SharedMemory)
        for i, (start, size) in enumerate(zip(start_of.tolist(), self.sizes.tolist(), strict=True)):
            home = memory.allocation_of(start)
            if home is not None and not home.full:
                missing = size - int(np.count_nonzero(memory.span(start, size)[1] == WRITTEN))
                if missing:
                    report(unwritten(what, size, start, missing, i))

    def read(self, which: np.ndarray) -> None:
        if not self._even:
            super().read(which)
            return
        if self._snapshot is None:
            self._snapshot = np.empty((len(self.src), int(self.sizes[0])), np.uint8)
        self._snapshot[which] = self._rows(which)

    def write(self, which: np.ndarray, fresh: np.ndarray) -> None:
        if self._snapshot is None:
            super().write(which, fresh)
            return
        if fresh.any():
            self._move(which[fresh])
        if not fresh.all():
            held = which[~fresh]
            self._place(held, self._snapshot if len(held) == len(self._snapshot) else self._snapshot[held])

    def _move(self, which: np.ndarray) -> None:
        if self._even:
            self._place(which, self._rows(which))
        else:
            super()._move(which)

    def _rows(self, which: np.ndarray) -> np.ndarray | list[np.ndarray]:
        """Source bytes, one row per element."""
        rows = blocks(self.source.data, self.src[which] - self.source.base, int(self.sizes[0]))
        return rows[0] if len(rows) < len(which) else rows

    def _place(self, which: np.ndarray, rows: np.ndarray | list[np.ndarray]) -> None:
        size = int(self.sizes[0])
        target = self.dst[which] - self.target.base
        places = blocks(self.target.data, target, size)
        if len(places) < len(which):
            places[0][...] = rows
        else:
            for place, row in zip(places, rows, strict=True):
                place[...] = row
        if isinstance(self.target, GlobalMemory):
            self._mark_global(self.target, target, size)

    @staticmethod
    def _mark_global(memory: GlobalMemory, target: np.ndarray, size: int) -> None:
        home = memory.allocation_of(int(target.min()) + memory.base)
        one = home is not None and int(target.max()) + memory.base < home.end
        if one and home is not None and home.full:
            return
        for cells in blocks(memory.written, target, size):
            cells[...] = WRITTEN
        if one and home is not None:
            memory.note_written(home, size * len(target))

    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        data, starts = self.source.data, self.src[which] - self.source.base
        pairs = zip(starts.tolist(), self.sizes[which].tolist(), strict=True)
        return [data[start : start + size] for start, size in pairs]

    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        data, base = self.target.data, self.target.base
        for start, block in zip(self.dst[which].tolist(), blocks, strict=True):
            if not len(block):
                continue
            place = data[start - base : start - base + len(block)]
            place[:] = block if self.reduction is None else self.reduction.combine(place, block)
            if isinstance(self.target, GlobalMemory):
                home = self.target.allocation_of(start)
                if home is not None and not home.full:
                    self.target.span(start, len(block))[1][:] = WRITTEN
                    self.target.note_written(home, len(block))

    def publish(self, which: np.ndarray) -> None:
        if not isinstance(self.target, SharedMemory):
            return
        sizes = self.sizes[which]
        for size in np.unique(sizes).tolist():
            if size:
                self.target.mark(self.dst[which[sizes == size]], size, WRITTEN)


class ValueMover(Mover):
    """st.async and red.async: values that were in registers at issue, uint8[n, nbytes], to shared memory."""

    def __init__(
        self, shared: SharedMemory, dst: np.ndarray, values: np.ndarray, reduction: Reduction | None
    ) -> None:
        super().__init__()
        self.shared, self.dst, self.values, self.reduction = shared, dst, values, reduction

    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        return list(self.values[which])

    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        for start, block in zip(self.dst[which].tolist(), blocks, strict=True):
            place = self.shared.data[start : start + len(block)]
            place[:] = block if self.reduction is None else self.reduction.combine(place, block)

    def publish(self, which: np.ndarray) -> None:
        self.shared.mark(self.dst[which], self.values.shape[1], WRITTEN)


class LandingMover(Mover):
    """Stores of threads on their way to other memory: values [n, k]; with ``op`` combined there."""

    def __init__(
        self, memory: GlobalMemory, dst: np.ndarray, values: np.ndarray, op: str | Reduction | None = None
    ) -> None:
        super().__init__()
        self.memory, self.dst, self.values, self.op = memory, dst, values, op

    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        return list(self.values[which])

    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        self._move(which)

    def _move(self, which: np.ndarray) -> None:
        dst, values = self.dst[which], self.values[which]
        if self.op is None:
            self.memory.store(dst, values)
        elif isinstance(self.op, str):
            self.memory.atomic(self.op, dst, values.reshape(-1))
        elif len(np.unique(dst)) == len(dst):
            self._combine(self.op, dst, values)
        else:
            for i in range(len(dst)):
                self._combine(self.op, dst[i : i + 1], values[i : i + 1])

    def _combine(self, reduction: Reduction, dst: np.ndarray, values: np.ndarray) -> None:
        old = self.memory.load(dst, values.itemsize, values.shape[1])
        new = reduction.combine(old.view(np.uint8), values.view(np.uint8))
        self.memory.store(dst, new.view(values.dtype))

    def publish(self, which: np.ndarray) -> None:
        """The bytes were readable when they landed."""


def unwritten(what: str, nbytes: int, start: int, missing: int, index: int | None) -> MemoryFault:
    """The finding of a copy that reads bytes nobody wrote."""
    return MemoryFault(
        f"{what} of {nbytes} bytes from 0x{start:x} reads {missing} bytes nobody has written; "
        "write the source first",
        rule="memory.uninitialized",
        index=index,
    )
