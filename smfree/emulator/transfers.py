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

    ``pace(nbytes, at_s)`` says when a piece that follows at ``at_s`` has landed. It is asked for a piece when
    the one before has landed, so that other traffic on its way comes in between.
    """

    polls = polls_host = False

    def __init__(
        self,
        ends: list[int],
        start_s: float,
        pace: Callable[[int, float], float],
        move: Callable[[int, int, float], None],
    ) -> None:
        self._ends, self._pace, self._move = ends, pace, move
        self._next = 0
        self.next_s = pace(ends[0], start_s)
        """When the next piece lands."""
        self.end_s = self.next_s

    def advance(self, limit_s: float) -> Progress:
        """Land what lands by then: one piece at a time, or all that is left when nothing else goes on."""
        lo = self._ends[self._next - 1] if self._next else 0
        self._follow()
        while limit_s == inf and self._next < len(self._ends):
            self._follow()
        self._move(lo, self._ends[self._next - 1], self.end_s)
        return Progress.DONE if self._next == len(self._ends) else Progress.RAN

    def _follow(self) -> None:
        """One piece has landed; the next one is on its way."""
        self.end_s, done = self.next_s, self._ends[self._next]
        self._next += 1
        if self._next < len(self._ends):
            self.next_s = self._pace(self._ends[self._next] - done, self.end_s)

    def look(self, now_s: float) -> None:
        """A copy looks at nothing."""

    def last_resort(self) -> bool:
        """A copy waits for nothing."""
        return False

    def stuck(self) -> list[str]:
        return []

    def drop(self) -> None:
        """What has landed stays."""
