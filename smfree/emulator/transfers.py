"""A copy under way: its bytes land piece by piece, none of them when it starts."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from smfree.emulator.streams import Progress

_PIECES = 16
_LEAST_BYTES = 4096
_ALIGN = 128


def piece_ends(nbytes: int) -> list[int]:
    """Where the pieces of a copy end, up to ``nbytes``: at most 16, whole lines, none very small."""
    step = max(_LEAST_BYTES, -(-nbytes // (_PIECES * _ALIGN)) * _ALIGN)
    return [*range(step, nbytes, step), nbytes]


class Transfer:
    """A copy of ``ends[-1]`` bytes: ``move(lo, hi, time_s)`` lands bytes lo to hi at their time.

    ``times_s``: when each piece has landed; the last one is the end.
    """

    polls_host = False

    def __init__(
        self, ends: list[int], times_s: list[float], move: Callable[[int, int, float], None]
    ) -> None:
        self._ends, self._times_s, self._move = ends, times_s, move
        self._next = 0
        self.end_s = times_s[-1]

    @property
    def next_s(self) -> float:
        """When the next piece lands."""
        return self._times_s[self._next]

    def advance(self, limit_s: float) -> Progress:
        """Land what lands by then: one piece at a time, or all that is left when nothing else goes on."""
        first = self._next
        lo = self._ends[first - 1] if first else 0
        self._next = len(self._ends) if limit_s == inf else first + 1
        self._move(lo, self._ends[self._next - 1], self._times_s[self._next - 1])
        return Progress.DONE if self._next == len(self._ends) else Progress.RAN

    def look(self, now_s: float) -> None:
        """A copy looks at nothing."""

    def last_resort(self) -> bool:
        """A copy waits for nothing."""
        return False

    def stuck(self) -> list[str]:
        return []

    def drop(self) -> None:
        """What has landed stays."""
