"""Who goes next where there is no clock: the schedule and the seed of the node choose among all that could.

As inside a kernel, each choice is legal and shows another kind of mistake. The same seed gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smfree.emulator.streams import Operation

_PATIENCE = 64


class Order:
    """Chooses among operations that could start, or go on for a slice.

    ``min-pc``: in turn, the oldest first. ``producer-ahead``: one goes on for as long as it can.
    ``async-earliest``: copies first, then kernels in turn, the newest first. ``async-latest``: as that,
    copies last. ``random``: at random. Nobody waits for more than 64 slices of each of the others.
    """

    def __init__(self, schedule: str, seed: int) -> None:
        self._rank: Callable[[Operation], tuple[float, ...]] | None = {
            "producer-ahead": self._stay,
            "async-earliest": lambda o: (not _is_copy(o), o.slices, -o.serial),
            "async-latest": lambda o: (o.slices + _is_copy(o) * _PATIENCE * (o.slices + 1), -o.serial),
            "random": None,
        }.get(schedule, lambda o: (o.slices, o.serial))
        self._rng = np.random.default_rng([seed, 0x54757273])
        self._latest: Operation | None = None

    def _stay(self, operation: Operation) -> tuple[float, ...]:
        stays = operation is self._latest and operation.slices % _PATIENCE != 0
        return not stays, operation.slices, operation.serial

    def choose(self, ready: list[Operation]) -> Operation:
        """One of them."""
        if self._rank is None:
            return ready[int(self._rng.integers(len(ready)))] if len(ready) > 1 else ready[0]
        self._latest = min(ready, key=self._rank)
        return self._latest


def _is_copy(operation: Operation) -> bool:
    return operation.unit is not None
