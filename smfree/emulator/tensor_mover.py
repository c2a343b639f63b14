"""How tensor copies and reductions move their bytes: boxes of a tensor map, row by row."""

from __future__ import annotations

import numpy as np

from smfree.emulator.bytespace import WRITTEN, Report
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.movers import Mover, unwritten
from smfree.emulator.reductions import Reduction
from smfree.emulator.shared import SharedMemory
from smfree.emulator.tensor_boxes import BoxRows, swizzle
from smfree.emulator.tensormap import TensorMap


class TensorMover(Mover):
    """Boxes of one tensor map; ``base`` int64[n] shared address of each.

    A store with ``reduction`` combines what lies in the tensor with the box instead of overwriting it.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        shared: SharedMemory,
        tensor: TensorMap,
        rows: BoxRows,
        base: np.ndarray,
        *,
        loads: bool,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        self.memory, self.shared, self.reduction = memory, shared, reduction
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

    def check_global(self, report: Report, what: str) -> None:
        """Loads and reductions: somebody has written every byte inside the tensor."""
        span = self.envelope()
        home = self.memory.allocation_of(span[0]) if span else None
        if span is None or (home is not None and home.full and span[1] <= home.end):
            return
        lo, hi = self.row_ranges(np.arange(self.boxes))
        for start, end in zip(lo.tolist(), hi.tolist(), strict=True):
            missing = end - start - int(np.count_nonzero(self.memory.span(start, end - start)[1] == WRITTEN))
            if missing:
                report(unwritten(what, end - start, start, missing, None))

    def _shared_granules(self, which: np.ndarray) -> np.ndarray:
        addr = self.base[which][:, None] + 16 * np.arange(self.tensor.box_bytes >> 4)
        return swizzle(addr, self.tensor.swizzle) >> 4

    def _global_granules(self, which: np.ndarray) -> np.ndarray:
        rows = self.rows.addr[which] - self.memory.base >> 4
        return (rows[:, :, None] + np.arange(self.rows.row_bytes >> 4)).reshape(len(which), -1)

    def _move(self, which: np.ndarray) -> None:
        if self.reduction is not None:
            self._put(which, self._fetch(which))
            return
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
            if self.reduction is not None:
                self._combine(start + lo, block[inside, lo:hi], home.end)
                continue
            index = start[:, None] + np.arange(lo, hi)
            keep = index < home.end
            index = index[keep] - self.memory.base
            self.memory.data[index] = block[inside, lo:hi][keep]
            self.memory.written[index] = WRITTEN
            self.memory.note_written(home, len(index))

    def _combine(self, starts: np.ndarray, rows: np.ndarray, end: int) -> None:
        """Reduce one box; row after row where rows of the tensor overlap, or at the allocation's end."""
        assert self.reduction is not None
        if not self.tensor.rows_overlap and int(starts[-1]) + rows.shape[1] <= end:
            index = (starts - self.memory.base)[:, None] + np.arange(rows.shape[1])
            self.memory.data[index] = self.reduction.combine(self.memory.data[index], rows)
            return
        for start, row in zip(starts.tolist(), rows, strict=True):
            place = self.memory.span(start, min(rows.shape[1], end - start))[0]
            place[:] = self.reduction.combine(place, row[: len(place)])

    def publish(self, which: np.ndarray) -> None:
        if self.loads:
            self.shared.mark(self.base[which], self.tensor.box_bytes, WRITTEN)
