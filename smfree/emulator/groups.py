"""Commit groups of asynchronous copies, kept per thread (PTX ISA, "Async-group mechanism")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from smfree.emulator.bytespace import as_addresses

if TYPE_CHECKING:
    from smfree.emulator.pending import PendingCopies


class CopyGroups:
    """One thread's cp.async groups, or its bulk groups (keep one object for each kind); empty groups count.

    ``lanes`` threads, numbered like the batches' ``issuer``. A copy issued now belongs to group
    ``current(lanes)``; ``commit`` closes it. ``wait_group N`` lets the N newest groups stay pending:
    everything with an id up to ``upto(lanes, N)`` must be complete.
    """

    def __init__(self, lanes: int) -> None:
        self._open = np.zeros(lanes, np.int64)
        self._limit = np.full(lanes, -1, np.int64)
        self._batches: list[tuple[PendingCopies, int, int]] = []  # with their lowest and highest issuer

    def reset(self, lanes: np.ndarray) -> None:
        """New threads take these numbers."""
        self._open[lanes] = 0

    def current(self, lanes: np.ndarray) -> np.ndarray:
        """Id of the open group of each lane -> int64[n]."""
        return self._open[lanes]

    def commit(self, lanes: np.ndarray) -> None:
        """Close the open group of each lane, also when it is empty."""
        self._open[lanes] += 1

    def upto(self, lanes: np.ndarray, pending: int) -> np.ndarray:
        """Newest group id that ``wait_group pending`` covers -> int64[n]; negative: none."""
        return self._open[lanes] - (1 + pending)

    def upto_all(self, lanes: np.ndarray) -> np.ndarray:
        """As :meth:`upto`, with the copies not committed yet (``cp.async.mbarrier.arrive``).

        ``cp.async.wait_all`` is ``commit`` followed by ``wait_group 0``.
        """
        return self._open[lanes]

    def add(self, batch: PendingCopies) -> None:
        """Track a batch; its ``group`` array must be set."""
        if batch.group is None:
            raise ValueError("a tracked batch needs its group ids")
        self._batches.append((batch, int(batch.issuer.min()), int(batch.issuer.max())))

    def covered(
        self, lanes: np.ndarray, upto: np.ndarray, *, read: bool = False
    ) -> list[tuple[PendingCopies, np.ndarray]]:
        """Batches, and their elements with group <= upto not yet readable (``read``: sources not read)."""
        self._batches = [item for item in self._batches if item[0].open]
        if not self._batches or not len(lanes):
            return []
        lanes = as_addresses(lanes)
        self._limit[lanes] = upto
        found = []
        first, last = int(lanes.min()), int(lanes.max())
        for batch, low, high in self._batches:
            if high < first or low > last:
                continue
            assert batch.group is not None
            hit = (batch.group <= self._limit[batch.issuer]) & ~(batch.read if read else batch.published)
            if hit.any():
                found.append((batch, np.flatnonzero(hit)))
        self._limit[lanes] = -1
        return found

    def blocked(self, lanes: np.ndarray, upto: np.ndarray, *, read: bool = False) -> np.ndarray:
        """bool[n]: does the lane still have such a copy?"""
        found = self.covered(lanes, upto, read=read)
        if not found:
            return np.zeros(len(lanes), bool)
        mask = np.zeros(len(self._open), bool)
        for batch, which in found:
            mask[batch.issuer[which]] = True
        return mask[lanes]

    def ready_time(
        self,
        lanes: np.ndarray,
        upto: np.ndarray,
        *,
        read: bool = False,
        found: list[tuple[PendingCopies, np.ndarray]] | None = None,
    ) -> np.ndarray:
        """float64[n]: latest ``complete_at`` (``read_at``) of such copies, by when their issuer knows.

        -inf where there is none.

        ``found``: what :meth:`covered` answers, where it was asked already.
        """
        found = self.covered(lanes, upto, read=read) if found is None else found
        if not found:
            return np.full(len(lanes), -np.inf)
        if len(lanes) == 1:
            latest_of_all = [
                b.read_at[which].max() if read else b.complete_at[which].max() + b.ack_cycles
                for b, which in found
            ]
            return np.array([max(latest_of_all)])
        latest = np.full(len(self._open), -np.inf)
        for batch, which in found:
            times = batch.read_at[which] if read else batch.complete_at[which] + batch.ack_cycles
            np.maximum.at(latest, batch.issuer[which], times)
        return latest[lanes]

    def outstanding(self, lanes: np.ndarray) -> np.ndarray:
        """int64[n]: copies per lane that are not done, committed or not."""
        count = np.zeros(len(self._open), np.int64)
        for batch, which in self.covered(lanes, self._open[lanes]):
            np.add.at(count, batch.issuer[which], 1)
        return count[lanes]
