"""How well a pipeline overlaps copy and computation, from times of runs with the other half removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: A pipeline is as good as another when it takes at most this share longer.
CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Halves:
    """Seconds of launches of one kernel: whole, with the computation removed, with the copies removed.

    Each CTA takes ``tiles`` tiles, in the ``one_`` runs a single one. All of them contain a launch.
    """

    tiles: int
    both: float
    copy: float
    one_copy: float
    compute: float
    one_compute: float

    @property
    def tile_copy(self) -> float:
        """One tile more, copied."""
        return (self.copy - self.one_copy) / (self.tiles - 1)

    @property
    def tile_compute(self) -> float:
        """One tile more, computed on."""
        return (self.compute - self.one_compute) / (self.tiles - 1)

    @property
    def serial(self) -> float:
        """Nothing overlaps: all copies and all computation, one after the other."""
        return self.copy + self.tiles * self.tile_compute

    @property
    def all_computation(self) -> float:
        """The computation without a gap, between the first tile's way in and the last one's way out."""
        return self.one_copy + self.tiles * self.tile_compute

    @property
    def all_copies(self) -> float:
        """The copies without a gap, and the computation on the last tile."""
        return self.copy + self.tile_compute

    @property
    def ideal(self) -> float:
        """max(copy, computation) + fill + drain: no pipeline of these halves can be faster."""
        return max(self.all_copies, self.all_computation)

    @property
    def overlap(self) -> float | None:
        """(serial - both) / (serial - ideal): 0 when nothing overlaps, 1 when all does that can. None when
        there is next to nothing to hide."""
        hidden = self.serial - self.ideal
        return (self.serial - self.both) / hidden if hidden > CLOSE * self.serial else None

    @property
    def ratio(self) -> float:
        """Computation to copy, per tile."""
        return self.tile_compute / self.tile_copy if self.tile_copy > 0 else float("inf")

    @property
    def hidden(self) -> bool:
        """Whether the copies cost nothing beyond their fill and drain."""
        return self.both <= (1 + CLOSE) * self.all_computation


def enough_stages(both: Mapping[int, float]) -> int:
    """The fewest stages that come within ``CLOSE`` of the fastest; ``both``: stages -> seconds."""
    limit = (1 + CLOSE) * min(both.values())
    return min(stages for stages, seconds in both.items() if seconds <= limit)
