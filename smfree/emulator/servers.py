"""Banks of servers with first-come-first-served queues, vectorised over requests.

A server does one cycle of work per cycle. Requests reach it in the order in which the scheduler runs warps,
which is not the order of their arrival times, so a plain "free at" time would let a late request block an
earlier one. The bank keeps a calendar instead: how much of each bin of time is already taken. A batch of
requests is served first come, first served in the time that is still free: arrival times are mapped to
"free time so far", the queue is solved there with a cumulative maximum, and the finish times are mapped back.

Exact to one bin: inside a bin the taken part counts as lying at its beginning. No work is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.floating[Any]]
I8 = NDArray[np.int64]

_SMALL = 12  # below this many requests a loop over Python floats is faster than numpy
_HISTORY = 512  # bins kept behind the earliest request of a batch


class ServerBank:
    """``count`` equal servers. Times and work in cycles; ``bin_cycles`` is the calendar's resolution."""

    def __init__(self, count: int, *, bin_cycles: int = 32, bins: int = 2048) -> None:
        self.count = count
        self.bin = float(bin_cycles)
        self._initial_bins = bins
        self._allocate(bins)

    def _allocate(self, bins: int) -> None:
        self._bins = bins
        self._used = np.zeros((self.count, bins))
        self._flat = memoryview(self._used.reshape(-1))
        self._origin = 0  # bin number of column 0
        self._top = 0  # first column that no request has touched

    def reset(self) -> None:
        """Forget all work."""
        if self._bins != self._initial_bins:
            self._allocate(self._initial_bins)
        else:
            self._used[:, : self._top] = 0.0
            self._origin = self._top = 0

    def serve(self, server: I8, t: F8, work: F8) -> F8:
        """When requests finish that arrive at ``t`` and need ``work`` cycles of ``server`` (all length n).

        Ties are served in the order given. The result is never below ``t + work``.
        """
        n = len(t)
        if n <= _SMALL:
            times, works, servers = t.tolist(), work.tolist(), server.tolist()
            out = [0.0] * n
            for i in sorted(range(n), key=times.__getitem__) if n > 1 else range(n):
                out[i] = self._serve_one(servers[i], times[i], works[i])
            return np.array(out)
        return self._serve_many(server, t, work)

    def _reserve(self, first: int, last: int) -> None:
        """Make the calendar hold bin numbers ``first`` .. ``last``, forgetting bins well before ``first``."""
        if last - self._origin < self._bins:
            return
        drop = max(0, min(first - _HISTORY - self._origin, self._bins))
        kept = self._used[:, drop : self._top].copy() if self._top > drop else self._used[:, :0].copy()
        bins = self._bins
        while last - self._origin - drop >= bins:
            bins *= 2
        origin = self._origin + drop if drop < self._bins else max(first - _HISTORY, 0)
        while last - origin >= bins:
            bins *= 2
        if bins != self._bins:
            self._used = np.zeros((self.count, bins))
            self._flat = memoryview(self._used.reshape(-1))
            self._bins = bins
        else:
            self._used[:, kept.shape[1] : self._top] = 0.0
        self._used[:, : kept.shape[1]] = kept
        self._origin, self._top = origin, kept.shape[1]

    def _serve_one(self, server: int, t: float, work: float) -> float:
        width = self.bin
        number = max(int(t / width), self._origin)
        position = max(t - number * width, 0.0)
        base = server * self._bins - self._origin
        flat, top = self._flat, self._top + self._origin
        left = work
        while True:
            if number >= top:  # free from here on
                return self._append(server, number, position, left, t + work)
            used = flat[base + number]
            begin = position if position > used else used
            room = width - begin
            if left <= room:
                flat[base + number] = used + left
                return max(number * width + begin + left, t + work)
            if room > 0.0:
                flat[base + number] = used + room
                left -= room
            number += 1
            position = 0.0

    def _append(self, server: int, number: int, position: float, work: float, earliest: float) -> float:
        """Serve ``work`` from ``position`` in bin ``number``; that bin and all later ones are untouched."""
        width = self.bin
        end = number * width + position + work
        last = int(end / width)
        self._reserve(number, last)
        row = self._used[server]
        first = number - self._origin
        if last == number:
            row[first] += work
        else:
            row[first] += width - position
            row[first + 1 : last - self._origin] = width
            row[last - self._origin] += end - last * width
        self._top = max(self._top, last - self._origin + 1)
        return max(end, earliest)

    def _serve_many(self, server: I8, t: F8, work: F8) -> F8:
        width = self.bin
        order = np.lexsort((t, server)) if self.count > 1 else np.argsort(t, kind="stable")
        s, arrive, w = server[order], t[order], work[order]
        begins = np.empty(len(s), dtype=bool)
        begins[0] = True
        np.not_equal(s[1:], s[:-1], out=begins[1:])
        group = np.cumsum(begins) - 1
        heads = np.flatnonzero(begins)
        rows = s[heads]

        low = max(int(arrive.min() / width), self._origin)
        x = np.maximum(arrive - low * width, 0.0)
        columns = max(self._top + self._origin - low, 0)
        taken = self._used[rows, low - self._origin : self._top] if columns else np.zeros((len(rows), 0))
        free = np.zeros((len(rows), columns + 1))
        np.cumsum(width - taken, axis=1, out=free[:, 1:])

        # Arrival in free time, queue there, finish in free time.
        column = np.minimum((x / width).astype(np.int64), columns)
        inside = column < columns
        spare = x - column * width
        if columns:
            spare -= np.where(inside, taken[group, np.minimum(column, columns - 1)], 0.0)
        u = free[group, column] + np.maximum(spare, 0.0)
        total = np.cumsum(w)
        total -= (total[heads] - w[heads])[group]
        slack = u - (total - w)
        if len(heads) > 1:
            shift = group * (slack.max() - slack.min() + 1.0)
            slack = np.maximum.accumulate(slack + shift) - shift
        else:
            slack = np.maximum.accumulate(slack)
        end = slack + total
        begin = end - w

        # Back to time, and mark what was taken.
        end_column = self._locate(free, group, end, "left")
        begin_column = np.minimum(self._locate(free, group, begin, "right"), end_column)
        beyond = free[:, -1]
        edge_end = self._edge(free, beyond, group, end_column)
        offset = end - edge_end
        if columns:
            known = end_column < columns
            offset += np.where(known, taken[group, np.minimum(end_column, columns - 1)], 0.0)
        finish = np.maximum(end_column * width + offset, x + w)
        self._mark(rows, low, group, begin, end, begin_column, end_column, free, beyond)
        out = np.empty_like(finish)
        out[order] = finish + low * width
        return np.maximum(out, t + work)

    def _locate(self, free: F8, group: I8, u: F8, side: str) -> I8:
        """Column whose free time holds ``u``; columns past the known ones are wholly free."""
        columns = free.shape[1] - 1
        beyond = free[:, -1]
        past = columns + np.maximum((u - beyond[group]) / self.bin, 0.0).astype(np.int64)
        if not columns:
            return past
        shift = float(max(u.max(), beyond.max())) + 1.0
        flat = (free[:, 1:] + np.arange(len(beyond))[:, None] * shift).reshape(-1)
        found = flat.searchsorted(u + group * shift, side=side) - group * columns  # type: ignore[call-overload]
        return np.where(found < columns, np.maximum(found, 0), past)

    def _edge(self, free: F8, beyond: F8, group: I8, column: I8) -> F8:
        columns = free.shape[1] - 1
        return free[group, np.minimum(column, columns)] + np.maximum(column - columns, 0) * self.bin

    def _mark(
        self,
        rows: I8,
        low: int,
        group: I8,
        begin: F8,
        end: F8,
        begin_column: I8,
        end_column: I8,
        free: F8,
        beyond: F8,
    ) -> None:
        span = int(end_column.max()) + 2
        self._reserve(low, low + span)
        first = low - self._origin
        size = len(rows) * span
        one = begin_column == end_column
        at_end = group * span + end_column
        at_begin = group * span + begin_column
        added = np.bincount(
            at_end,
            np.where(one, end - begin, end - self._edge(free, beyond, group, end_column)),
            minlength=size,
        )
        if not one.all():
            many = ~one
            g, b = group[many], begin_column[many]
            head = self._edge(free, beyond, g, b + 1) - begin[many]
            added += np.bincount(at_begin[many], head, minlength=size)
            cover = np.bincount(at_begin[many] + 1, minlength=size) - np.bincount(
                at_end[many], minlength=size
            )
            full = np.cumsum(cover).reshape(len(rows), span) > 0
        else:
            full = None
        block = self._used[rows, first : first + span] + added.reshape(len(rows), span)
        if full is not None:
            block[full] = self.bin
        self._used[rows, first : first + span] = np.minimum(block, self.bin)
        self._top = max(self._top, first + span)
