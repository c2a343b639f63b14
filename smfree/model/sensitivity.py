"""How much a modelled crossover moves when one parameter of the model is wrong by 20 %.

A modelled time has no sample noise; its uncertainty is that of the parameters. So the same kernels run again
on a device whose parameter was scaled, at the two sizes around the crossover (and further out while the
crossover lies outside), and the crossover is read from those runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from smfree.model.crossover import Crossover, Curve, Outcome, crossover

#: The change applied to each parameter, as factors.
FACTORS = (0.8, 1.2)

#: A ratio of two times that moves less than this did not move.
UNCHANGED = 0.001

#: (parameter name or None for the unchanged model, factor, size in bytes) -> (base time, challenger time)
Rerun = Callable[[str | None, float, int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Shift:
    """Crossover in bytes with ``parameter`` scaled down and up; None = no crossover within the sizes
    tried."""

    parameter: str
    down_bytes: float | None
    up_bytes: float | None

    def moves(self, size_bytes: float, *, at_least: float = 0.01) -> bool:
        """Whether either run moved the crossover by more than ``at_least`` (a fraction) or lost it."""
        return any(
            value is None or abs(value / size_bytes - 1.0) > at_least
            for value in (self.down_bytes, self.up_bytes)
        )


def shifts(
    found: Crossover,
    parameters: Sequence[str],
    sizes: Sequence[int],
    rerun: Rerun,
    each: Callable[[Callable[[str], Shift | None], Sequence[str]], Iterable[Shift | None]] = map,
) -> tuple[float | None, tuple[Shift, ...]]:
    """Crossover of the unchanged model and its shift for each parameter, all from ``rerun``.

    ``found.bracket`` says where to start; the search widens by one size at a time towards the end that the
    leader at the bracket points to. Returns (crossover of the unchanged model with these runs in bytes,
    shifts that moved it). ``each`` maps over the parameters; another map may use several processes.
    """
    if found.bracket is None:
        raise ValueError(
            f"no crossover between {found.base} and {found.challenger} to vary ({found.outcome.value})"
        )
    ordered = sorted(sizes)
    nominal = _search(found, ordered, lambda size: rerun(None, 1.0, size))
    if nominal is None:
        return None, ()
    upper = found.bracket[1]

    def vary(parameter: str) -> Shift | None:
        if not _matters(rerun, parameter, upper):
            return None
        down, up = (_search(found, ordered, partial(rerun, parameter, factor)) for factor in FACTORS)
        return Shift(parameter, down, up)

    moved = [shift for shift in each(vary, parameters) if shift is not None and shift.moves(nominal)]
    return nominal, tuple(moved)


def _matters(rerun: Rerun, parameter: str, size: int) -> bool:
    """Whether scaling the parameter changes the ratio of the two times at the upper end of the bracket at
    all."""
    a, b = rerun(None, 1.0, size)
    up, down = rerun(parameter, FACTORS[1], size)
    return abs((up / down) / (a / b) - 1.0) > UNCHANGED


def _search(
    found: Crossover, sizes: Sequence[int], run: Callable[[int], tuple[float, float]]
) -> float | None:
    assert found.bracket is not None
    low, high = (sizes.index(size) for size in found.bracket)
    base: dict[int, Sequence[float]] = {}
    challenger: dict[int, Sequence[float]] = {}

    def measure(index: int) -> None:
        a, b = run(sizes[index])
        base[sizes[index]], challenger[sizes[index]] = (a,), (b,)

    for index in range(low, high + 1):
        measure(index)
    above = found.outcome is Outcome.CROSSES
    while True:
        # No ties here: how far the place of equal times moves is the question, not who leads beyond doubt.
        result = crossover(Curve(found.base, base), Curve(found.challenger, challenger), tie=0.0)
        if result.outcome is found.outcome:
            return result.size_bytes
        wins = result.outcome in (Outcome.ALWAYS_FASTER, Outcome.CROSSES)
        down, up = (wins, not wins) if above else (not wins, wins)
        if down and low > 0:
            low -= 1
            measure(low)
        elif up and high + 1 < len(sizes):
            high += 1
            measure(high)
        else:
            return None


def largest_first(size_bytes: float, found: Sequence[Shift]) -> list[Shift]:
    """Shifts ordered by how far they move the crossover; a lost crossover comes first."""

    def distance(shift: Shift) -> float:
        values = (shift.down_bytes, shift.up_bytes)
        if None in values:
            return float("inf")
        return max(abs(value / size_bytes - 1.0) for value in values if value is not None)

    return sorted(found, key=distance, reverse=True)


def as_record(nominal: float | None, found: Sequence[Shift]) -> Mapping[str, object]:
    """JSON form for the run's file."""
    return {
        "nominal_bytes": nominal,
        "factors": list(FACTORS),
        "shifts": {shift.parameter: [shift.down_bytes, shift.up_bytes] for shift in found},
    }
