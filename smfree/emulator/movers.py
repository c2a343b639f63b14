"""How the bytes of an asynchronous copy move, one class per shape; addresses were checked at issue."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from smfree.emulator.bytespace import SHIFT, WRITTEN, Report, blocks
from smfree.emulator.errors import MemoryFault
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.shared import SharedMemory
from smfree.emulator.tensormap import BoxRows, TensorMap, swizzle


class Mover(ABC):
    """Elements 0..n-1 of one batch. ``read`` takes a snapshot of sources; ``write`` puts the bytes down."""

    def __init__(self, memory: GlobalMemory, shared: SharedMemory) -> None:
        self.memory, self.shared = memory, shared
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
        memory: GlobalMemory,
        shared: SharedMemory,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: int,
        sizes: np.ndarray | None,
    ) -> None:
        super().__init__(memory, shared)
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
    """cp.async.bulk: one contiguous range per element, multiples of 16 bytes at multiples of 16."""

    def __init__(
        self,
        memory: GlobalMemory,
        shared: SharedMemory,
        dst: np.ndarray,
        src: np.ndarray,
        sizes: np.ndarray,
        *,
        loads: bool,
    ) -> None:
        super().__init__(memory, shared)
        self.dst, self.src, self.sizes, self.loads = dst, src, sizes, loads
        same = len(sizes) > 1 and bool((sizes == sizes[0]).all())
        self._even = same and int(sizes[0]) > 0
        self._snapshot: np.ndarray | None = None

    def source_addresses(self) -> np.ndarray:
        return self.src

    def check_source(self, report: Report) -> None:
        """Loads: somebody has written every source byte."""
        for i, (start, size) in enumerate(zip(self.src.tolist(), self.sizes.tolist(), strict=True)):
            home = self.memory.allocation_of(start)
            if home is not None and not home.full:
                missing = size - int(np.count_nonzero(self.memory.span(start, size)[1] == WRITTEN))
                if missing:
                    report(_unwritten("cp.async.bulk", size, start, missing, i))

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
        size = int(self.sizes[0])
        if self.loads:
            rows = blocks(self.memory.data, self.src[which] - self.memory.base, size)
        else:
            rows = blocks(self.shared.data, self.src[which], size)
        return rows[0] if len(rows) < len(which) else rows

    def _place(self, which: np.ndarray, rows: np.ndarray | list[np.ndarray]) -> None:
        size = int(self.sizes[0])
        target = self.dst[which] - (0 if self.loads else self.memory.base)
        space = self.shared.data if self.loads else self.memory.data
        places = blocks(space, target, size)
        if len(places) < len(which):
            places[0][...] = rows
        else:
            for place, row in zip(places, rows, strict=True):
                place[...] = row
        if not self.loads:
            self._mark_global(target, size)

    def _mark_global(self, target: np.ndarray, size: int) -> None:
        home = self.memory.allocation_of(int(target.min()) + self.memory.base)
        one = home is not None and int(target.max()) + self.memory.base < home.end
        if one and home is not None and home.full:
            return
        for cells in blocks(self.memory.written, target, size):
            cells[...] = WRITTEN
        if one and home is not None:
            self.memory.note_written(home, size * len(target))

    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        pairs = zip(self.src[which].tolist(), self.sizes[which].tolist(), strict=True)
        if self.loads:
            return [self.memory.span(start, size)[0] for start, size in pairs]
        return [self.shared.data[start : start + size] for start, size in pairs]

    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        for start, block in zip(self.dst[which].tolist(), blocks, strict=True):
            if self.loads:
                self.shared.data[start : start + len(block)] = block
            elif len(block):
                data, written = self.memory.span(start, len(block))
                data[:] = block
                home = self.memory.allocation_of(start)
                if home is not None and not home.full:
                    written[:] = WRITTEN
                    self.memory.note_written(home, len(block))

    def publish(self, which: np.ndarray) -> None:
        if not self.loads:
            return
        sizes = self.sizes[which]
        for size in np.unique(sizes).tolist():
            if size:
                self.shared.mark(self.dst[which[sizes == size]], size, WRITTEN)


class TensorMover(Mover):
    """Boxes of one tensor map; ``base`` int64[n] shared address of each."""

    def __init__(
        self,
        memory: GlobalMemory,
        shared: SharedMemory,
        tensor: TensorMap,
        rows: BoxRows,
        base: np.ndarray,
        *,
        loads: bool,
    ) -> None:
        super().__init__(memory, shared)
        self.tensor, self.rows, self.base, self.loads = tensor, rows, base, loads
        self.boxes = len(base)
        edge = (rows.lo > 0) | (rows.hi < rows.row_bytes) | ~rows.inside.all(axis=1)
        self._whole = ~edge & ((rows.addr & 15) == 0).all(axis=1)

    def wholly_outside(self) -> np.ndarray:
        """bool[n]: no element of the box lies in the tensor."""
        return (self.rows.hi <= self.rows.lo) | ~self.rows.inside.any(axis=1)

    def envelope(self) -> tuple[int, int] | None:
        """Global [lo, hi) around everything inside the tensor; None when nothing is."""
        if self._whole.all():  # strides are not negative: first row first
            return int(self.rows.addr[:, 0].min()), int(self.rows.addr[:, -1].max()) + self.rows.row_bytes
        lo, hi = self.row_ranges(np.arange(self.boxes))
        return (int(lo.min()), int(hi.max())) if len(lo) else None

    def row_ranges(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Global [lo, hi) of every row that lies in the tensor."""
        lo, hi = self.rows.lo[which, None], self.rows.hi[which, None]
        real = self.rows.inside[which] & (hi > lo)
        addr = self.rows.addr[which]
        return (addr + lo)[real], (addr + hi)[real]

    def check_source(self, report: Report) -> None:
        """Loads: somebody has written every source byte inside the tensor."""
        span = self.envelope()
        home = self.memory.allocation_of(span[0]) if span else None
        if span is None or (home is not None and home.full and span[1] <= home.end):
            return
        lo, hi = self.row_ranges(np.arange(self.boxes))
        for start, end in zip(lo.tolist(), hi.tolist(), strict=True):
            missing = end - start - int(np.count_nonzero(self.memory.span(start, end - start)[1] == WRITTEN))
            if missing:
                report(_unwritten("cp.async.bulk.tensor", end - start, start, missing, None))

    def _shared_granules(self, which: np.ndarray) -> np.ndarray:
        addr = self.base[which][:, None] + 16 * np.arange(self.tensor.box_bytes >> 4)
        return swizzle(addr, self.tensor.swizzle) >> 4

    def _global_granules(self, which: np.ndarray) -> np.ndarray:
        rows = self.rows.addr[which] - self.memory.base >> 4
        return (rows[:, :, None] + np.arange(self.rows.row_bytes >> 4)).reshape(len(which), -1)

    def _move(self, which: np.ndarray) -> None:
        whole = which[self._whole[which]]
        if len(whole):
            near, far = self._shared_granules(whole).reshape(-1), self._global_granules(whole).reshape(-1)
            if self.loads:
                self.shared._bytes.put(near, 16, self.memory._bytes.take(far, 16))
            else:
                self.memory._bytes.put(far, 16, self.shared._bytes.take(near, 16))
                self._mark_global(far, len(whole) * self.tensor.box_bytes)
        edge = which[~self._whole[which]]
        if len(edge):
            self._put(edge, self._fetch(edge))

    def _mark_global(self, granules: np.ndarray, nbytes: int) -> None:
        home = self.memory.allocation_of(int(granules[0] << 4) + self.memory.base)
        if home is not None and not home.full:
            self.memory._shadow.put_constant(granules, 16, WRITTEN)
            self.memory.note_written(home, nbytes)

    def _fetch(self, which: np.ndarray) -> list[np.ndarray]:
        if not self.loads:
            words = self.shared._bytes.take(self._shared_granules(which).reshape(-1), 16)
            return list(words.view(np.uint8).reshape(len(which), self.tensor.rows, self.rows.row_bytes))
        return [self._filled(i) for i in which.tolist()]

    def _filled(self, i: int) -> np.ndarray:
        word = np.frombuffer(self.tensor.fill_word, np.uint8)
        block = np.tile(word, (self.tensor.rows, self.tensor.box[0]))
        lo, hi = int(self.rows.lo[i]), int(self.rows.hi[i])
        inside = self.rows.inside[i]
        if hi > lo and inside.any():
            starts = self.rows.addr[i][inside] - self.memory.base
            block[inside, lo:hi] = self.memory.data[starts[:, None] + np.arange(lo, hi)]
        return block

    def _put(self, which: np.ndarray, blocks: list[np.ndarray]) -> None:
        if self.loads:
            words = np.ascontiguousarray(np.stack(blocks)).reshape(-1).view(np.complex128)
            self.shared._bytes.put(self._shared_granules(which).reshape(-1), 16, words)
            return
        for i, block in zip(which.tolist(), blocks, strict=True):
            lo, hi = int(self.rows.lo[i]), -(-int(self.rows.hi[i]) // 16) * 16
            inside = self.rows.inside[i]
            if hi <= lo or not inside.any():
                continue
            start = self.rows.addr[i][inside]
            home = self.memory.allocation_of(int(start[0]) + lo)
            assert home is not None
            index = start[:, None] + np.arange(lo, hi)
            keep = index < home.end
            index = index[keep] - self.memory.base
            self.memory.data[index] = block[inside, lo:hi][keep]
            self.memory.written[index] = WRITTEN
            self.memory.note_written(home, len(index))

    def publish(self, which: np.ndarray) -> None:
        if self.loads:
            self.shared.mark(self.base[which], self.tensor.box_bytes, WRITTEN)


def _unwritten(what: str, nbytes: int, start: int, missing: int, index: int | None) -> MemoryFault:
    return MemoryFault(
        f"{what} of {nbytes} bytes from 0x{start:x} reads {missing} bytes nobody has written; "
        "write the source first",
        rule="memory.uninitialized",
        index=index,
    )
