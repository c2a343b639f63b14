"""Banks of servers with first-come-first-served queues, vectorised over requests.

A server does one cycle of work per cycle. Requests reach it in the order in which the scheduler runs warps,
which is not the order of their arrival times, so a plain "free at" time would let a late request block an
earlier one. The bank keeps a calendar instead: how much of each bin of time is already taken. A batch of
requests is served first come, first served in the time that is still free: arrival times are mapped to
"free time so far", the queue is solved there with a cumulative maximum, and the finish times are mapped back.

While the requests of a server come in order, a plain queue is exact and cheap; they enter the calendar when
the first one comes that does not.

Inside a bin the taken part counts as lying at its beginning, so two calls can err by a bin against each
other; within one call the queue is exact. Work longer than a bin also takes what was idle in its first bin:
otherwise a short request behind it could slip in there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.floating[Any]]
I8 = NDArray[np.int64]

_SMALL = 24  # below this many requests a loop over Python floats is faster than numpy
_FEW = 64  # the same for a plain queue
_ROUNDING = 1e-4  # cycles; above the error of a cumulative maximum over shifted groups
_DEFERRED = 256  # batches served in order and not yet in the calendar; older ones are forgotten
_HISTORY = 512  # bins kept behind the earliest request of a batch, unless asked for more


class ServerBank:
    """``count`` equal servers. Times and work in cycles; ``bin_cycles`` is the calendar's resolution.

    A request from before the last ``history`` bins waits until there.
    """

    def __init__(
        self, count: int, *, bin_cycles: int = 32, bins: int = 2048, history: int = _HISTORY
    ) -> None:
        self.count = count
        self._history = history
        self.bin = float(bin_cycles)
        self._initial_bins = bins
        self._latest = np.zeros(count)  # latest arrival at each server
        self._until = np.zeros(count)  # busy until
        self._deferred: deque[tuple[int, Any, Any]] = deque(maxlen=_DEFERRED)
        self._allocate(bins)

    def _allocate(self, bins: int) -> None:
        self._bins = bins
        self._used = np.zeros((self.count, bins))
        self._flat = self._used.reshape(-1).data
        self._origin = 0  # bin number of column 0
        self._top = 0  # first column that no request has touched

    def reset(self) -> None:
        """Forget all work."""
        self._latest[:] = self._until[:] = 0.0
        self._deferred.clear()
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
        if n == 0:
            return np.empty(0)
        if self.count == 1 or n == 1 or bool((server == server[0]).all()):
            one = int(server[0])
            finish = self._in_order(one, t, work) if n > _FEW else self._few_in_order(one, t, work)
            if finish is not None:
                return finish
        if self._deferred:
            self._enter_deferred()
        finish = self._calendar(server, t, work)
        np.maximum.at(self._latest, server, t)
        np.maximum.at(self._until, server, finish)
        return finish

    def _few_in_order(self, server: int, t: F8, work: F8) -> F8 | None:
        """Like :meth:`_in_order`, faster for a few."""
        times, works = t.tolist(), work.tolist()
        n = len(times)
        order = sorted(range(n), key=times.__getitem__) if n > 1 else (0,)
        if times[order[0]] < self._latest[server]:
            return None
        free = float(self._until[server])
        begins, out = [0.0] * n, [0.0] * n
        for i in order:
            arrive = times[i]
            begins[i] = begin = free if free > arrive else arrive
            out[i] = free = begin + works[i]
        self._latest[server], self._until[server] = times[order[-1]], free
        self._deferred.append((server, begins, works))
        return np.array(out)

    def _in_order(self, server: int, t: F8, work: F8) -> F8 | None:
        """The plain queue of one server, None if some request arrives before one served earlier."""
        order: Any = slice(None) if bool((t[1:] >= t[:-1]).all()) else np.argsort(t, kind="stable")
        arrive, w = t[order], work[order]
        if arrive[0] < self._latest[server]:
            return None
        total = np.cumsum(w)
        begin = np.maximum(np.maximum.accumulate(arrive - (total - w)), self._until[server]) + (total - w)
        finish = np.empty_like(begin)
        finish[order] = begin + w
        self._latest[server], self._until[server] = arrive[-1], begin[-1] + w[-1]
        self._deferred.append((server, begin, w))
        return finish

    def _enter_deferred(self) -> None:
        """Put what was served in order into the calendar, now that a request wants an earlier time."""
        for server, begin, work in self._deferred:
            self._calendar(np.full(len(begin), server), np.asarray(begin), np.asarray(work))
        self._deferred.clear()

    def _calendar(self, server: I8, t: F8, work: F8) -> F8:
        n = len(t)
        if n > _SMALL:
            return self._serve_many(server, t, work)
        times, works, servers = t.tolist(), work.tolist(), server.tolist()
        out = [0.0] * n
        for i in sorted(range(n), key=times.__getitem__) if n > 1 else range(n):
            out[i] = self._serve_one(servers[i], times[i], works[i])
        return np.array(out)

    def _reserve(self, first: int, last: int) -> None:
        """Make the calendar hold bin numbers ``first`` .. ``last``, forgetting bins well before ``first``."""
        if last - self._origin < self._bins:
            return
        drop = max(0, first - self._history - self._origin)
        kept = self._used[:, drop : self._top].copy() if self._top > drop else self._used[:, :0].copy()
        origin, bins = self._origin + drop, self._bins
        while last - origin >= bins:
            bins *= 2
        if bins != self._bins:
            self._used = np.zeros((self.count, bins))
            self._flat = self._used.reshape(-1).data
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
        flat: Any = self._flat
        top = self._top + self._origin
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
                left -= room
                flat[base + number] = used + room if left <= width else width
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
            row[first] = width if last > number + 1 else row[first] + width - position
            row[first + 1 : last - self._origin] = width
            row[last - self._origin] += end - last * width
        self._top = max(self._top, last - self._origin + 1)
        return max(end, earliest)

    def _serve_many(self, server: I8, t: F8, work: F8) -> F8:
        width = self.bin
        first = float(t.min())
        key = server * (float(t.max()) - first + 1.0) + (t - first) if self.count > 1 else t
        order = np.argsort(key, kind="stable")
        s, arrive, w = server.take(order), t.take(order), work.take(order)
        begins = np.ones(len(s), dtype=bool)
        np.not_equal(s[1:], s[:-1], out=begins[1:])
        heads = np.flatnonzero(begins)
        group = np.cumsum(begins) - 1
        rows = s.take(heads)

        # taken[g, c]: time taken in column c of server g; free[g, c]: time free before column c. Columns
        # count from the bin of the earliest arrival; the last one stands for all later, wholly free bins.
        low = max(int(first / width), self._origin)
        columns = max(self._top + self._origin - low, 0)
        stride = columns + 1
        taken = np.zeros((len(rows), stride))
        free = np.zeros((len(rows), stride))
        if columns:
            taken[:, :-1] = self._used[rows, low - self._origin : self._top]
            np.cumsum(width - taken[:, :-1], axis=1, out=free[:, 1:])
        beyond = free[:, -1]
        cells = group * stride

        # Arrival in free time; the queue there.
        x = np.maximum(arrive - low * width, 0.0)
        arrival = (x / width).astype(np.int64)
        known = np.minimum(arrival, columns)
        at = cells + known
        u = free.take(at) + np.maximum(x - known * width - taken.take(at), 0.0)
        total = np.cumsum(w)
        total -= (total.take(heads) - w.take(heads)).take(group)
        own = u - (total - w)
        if len(heads) > 1:
            shift = group * (float(own.max()) - float(own.min()) + 1.0)
            slack = np.maximum.accumulate(own + shift) - shift
        else:
            slack = np.maximum.accumulate(own)
        end = slack + total
        begin = end - w

        # Back to time: the column in which each request ends, and the offset in it.
        ends = columns + np.maximum((end - beyond.take(group)) / width, 0.0).astype(np.int64)
        if columns:
            apart = max(float(end.max()), float(beyond.max())) + 1.0
            edges = (free[:, 1:] + np.arange(len(rows))[:, None] * apart).reshape(-1)
            found = edges.searchsorted(end + group * apart) - group * columns
            ends = np.where(found < columns, np.maximum(found, 0), ends)
        at = cells + np.minimum(ends, columns)
        into = end - free.take(at) - np.maximum(ends - columns, 0) * width
        finish = np.maximum(ends * width + into + taken.take(at), x + w) + low * width

        # A request starts where it arrived or, when it had to queue, where the one before it ended.
        starts = np.empty_like(ends)
        starts[0] = arrival[0]
        starts[1:] = np.where(slack[1:] > own[1:] + _ROUNDING, ends[:-1], arrival[1:])
        self._mark(rows, low, group, np.minimum(starts, ends), ends, begin, end, into, free)
        out = np.empty_like(finish)
        out[order] = finish
        return np.maximum(out, t + work)

    def _mark(
        self, rows: I8, low: int, group: I8, starts: I8, ends: I8, begin: F8, end: F8, into: F8, free: F8
    ) -> None:
        """Enter requests into the calendar; they take all free time from ``begin`` to ``end``."""
        width = self.bin
        columns = free.shape[1] - 1
        span = int(ends.max()) + 2
        self._reserve(low, low + span)
        first = low - self._origin
        size = len(rows) * span
        one = starts == ends
        cell = group * span + ends
        added = np.bincount(cell, np.where(one, end - begin, into), minlength=size)
        view = self._used[rows, first : first + span]
        if not one.all():
            many = np.flatnonzero(~one)
            g, after = group.take(many), starts.take(many) + 1
            edge = free.take(g * (columns + 1) + np.minimum(after, columns))
            edge = edge + np.maximum(after - columns, 0) * width
            start = g * span + after - 1
            head = np.maximum(edge - begin.take(many), 0.0)
            head[ends.take(many) > after] += width  # long work fills its first bin, see the module's text
            added += np.bincount(start, head, minlength=size)
            cover = np.bincount(start + 1, minlength=size) - np.bincount(cell.take(many), minlength=size)
            view[np.cumsum(cover).reshape(len(rows), span) > 0] = width
        view += added.reshape(len(rows), span)
        self._used[rows, first : first + span] = np.minimum(view, width)
        self._top = max(self._top, first + span)
