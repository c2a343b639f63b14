"""Prefetches into L2 that are still under way, under the clock."""

from __future__ import annotations

from typing import Any

import numpy as np


class Prefetches:
    """A bulk copy that hits a line which a prefetch is still bringing completes no earlier than that.

    The lines count as resident from issue on. For ld, st and cp.async they are at once: not modelled.
    """

    def __init__(self) -> None:
        self._flying: list[tuple[Any, Any, Any]] = []  # lo, hi, done

    def add(self, addr: Any, nbytes: Any, done: Any) -> None:
        """Ranges int64[n], complete at ``done`` float64[n]."""
        self._flying.append((addr, addr + nbytes, done))

    def ready(self, addr: Any, nbytes: Any) -> Any:
        """float64[n]: when the prefetches that touch these ranges are complete; -inf without any."""
        latest = np.full(len(addr), -np.inf)
        end = addr + nbytes
        for lo, hi, done in self._flying:
            meets = (addr[:, None] < hi) & (end[:, None] > lo)
            latest = np.maximum(latest, np.where(meets, done, -np.inf).max(axis=1))
        return latest

    def settle(self, now: float) -> None:
        """Forget what is complete at ``now``."""
        if self._flying:
            self._flying = [p for p in self._flying if p[2].max() > now]
