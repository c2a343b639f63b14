"""At which size does one engine overtake another?

Two curves of time against size are compared at the sizes both have (matched work only). Between two
neighbouring sizes the logarithm of the time ratio is taken as linear in the logarithm of the size, which is
exact for two power laws and needs no assumption about the shape over the whole range. Why curves cross, a
Hockney line says (smfree.model.hockney).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from smfree.model.estimators import Interval, median, resamples

#: The size range, in bytes, that talks and posts often quote for the point where TMA starts to pay.
OFTEN_QUOTED_BYTES = (1024, 2048)

#: Two times closer than this fraction are a tie: no engine is said to win there.
TIE = 0.02


class Outcome(Enum):
    """What the comparison of two curves over a range says about the challenger."""

    CROSSES = "faster from"
    OVERTAKEN = "faster below"
    ALWAYS_FASTER = "never slower"
    NEVER_FASTER = "never faster"
    TIE = "tie"


@dataclass(frozen=True, slots=True)
class Curve:
    """Time against size of one engine: ``samples[size_bytes]`` = raw samples (seconds or cycles, any one
    unit)."""

    name: str
    samples: Mapping[int, Sequence[float]]

    def medians(self) -> dict[int, float]:
        return {size: median(values) for size, values in self.samples.items()}


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where ``challenger`` becomes and stays faster than ``base`` (CROSSES), or stops being so (OVERTAKEN).

    ``size_bytes``: the last change of leader, None for the other outcomes. ``crossings`` lists every change,
    in either direction, as interpolated sizes in bytes. ``bracket`` holds the measured sizes around
    ``size_bytes``. ``tie``: beyond ``size_bytes`` nobody leads, the two are within TIE of each other.
    """

    base: str
    challenger: str
    outcome: Outcome
    size_bytes: float | None
    crossings: tuple[float, ...]
    bracket: tuple[int, int] | None
    range_bytes: tuple[int, int]
    tie: bool = False

    def text(self) -> str:
        """One phrase for a table cell."""
        if self.size_bytes is not None:
            extra = "" if len(self.crossings) == 1 else f" (last of {len(self.crossings)} crossings)"
            crosses = self.outcome is Outcome.CROSSES
            if self.tie:
                extra = f" (a tie {'below' if crosses else 'above'})"
            return f"{'from' if crosses else 'only below'} {format_bytes(self.size_bytes)}{extra}"
        low, high = (format_bytes(size) for size in self.range_bytes)
        return f"{self.outcome.value} ({low} to {high})"


_UNITS = (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def format_bytes(size: float) -> str:
    """Bytes in powers of two with at most three digits: 128 B, 1.5 KiB, 64 KiB."""
    unit, scale = next((one for one in _UNITS if size >= one[1]), _UNITS[-1])
    amount = size / scale
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"


def crossover(base: Curve, challenger: Curve, *, tie: float = TIE) -> Crossover:
    """Compare two curves at the sizes they share. Times within the fraction ``tie`` have no leader.

    Raises ValueError when the curves share fewer than two sizes.
    """
    return _crossover(base.name, challenger.name, base.medians(), challenger.medians(), tie)


def _crossover(
    base: str, challenger: str, a: Mapping[int, float], b: Mapping[int, float], tie: float
) -> Crossover:
    sizes = sorted(set(a) & set(b))
    if len(sizes) < 2:
        raise ValueError(
            f"crossover of {base} and {challenger} needs two sizes that both measured (got {len(sizes)}); "
            "run both engines over the same sizes"
        )
    lead = [math.log(a[size] / b[size]) for size in sizes]  # positive: the challenger is faster
    least = math.log1p(tie)
    led = [index for index, value in enumerate(lead) if abs(value) > least]
    span = (sizes[0], sizes[-1])
    if not led:
        return Crossover(base, challenger, Outcome.TIE, None, (), None, span)
    changes = [
        (left, right) for left, right in itertools.pairwise(led) if (lead[left] > 0) != (lead[right] > 0)
    ]
    wins = lead[led[-1]] > 0
    if not changes:
        end = _end_of_tie(sizes, lead, led, least) if wins else None
        if end is not None:
            place, bracket, outcome = end
            return Crossover(base, challenger, outcome, place, (place,), bracket, span, tie=True)
        outcome = Outcome.ALWAYS_FASTER if wins else Outcome.NEVER_FASTER
        return Crossover(base, challenger, outcome, None, (), None, span)
    crossings = tuple(_zero(sizes, lead, left, right) for left, right in changes)
    left, right = changes[-1]
    outcome = Outcome.CROSSES if wins else Outcome.OVERTAKEN
    return Crossover(base, challenger, outcome, crossings[-1], crossings, (sizes[left], sizes[right]), span)


def _end_of_tie(
    sizes: Sequence[int], lead: Sequence[float], led: Sequence[int], least: float
) -> tuple[float, tuple[int, int], Outcome] | None:
    """Where a challenger that is never slower parts from a tie, or meets it, if it does so just once."""
    leads = [index in led for index in range(len(sizes))]
    changes = [i for i in range(len(sizes) - 1) if leads[i] != leads[i + 1]]
    if len(changes) != 1:
        return None
    i = changes[0]
    share = (least - lead[i]) / (lead[i + 1] - lead[i])
    place = math.exp(math.log(sizes[i]) + share * math.log(sizes[i + 1] / sizes[i]))
    return place, (sizes[i], sizes[i + 1]), Outcome.OVERTAKEN if leads[i] else Outcome.CROSSES


def _zero(sizes: Sequence[int], lead: Sequence[float], left: int, right: int) -> float:
    """Size at which ``lead`` crosses zero between two indices, linear in log size on the interval that
    holds it."""
    for i in range(left, right):
        y0, y1 = lead[i], lead[i + 1]
        if y0 == y1 or (y0 > 0) == (y1 > 0):
            continue
        x0, x1 = math.log(sizes[i]), math.log(sizes[i + 1])
        return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
    return math.sqrt(sizes[left] * sizes[right])


@dataclass(frozen=True, slots=True)
class SampleUncertainty:
    """Spread of a crossover over bootstrap resamples of the raw samples of every point.

    ``interval`` encloses 95 % of the sizes found; ``found`` is the fraction of resamples that had a
    crossover at all.
    """

    interval: Interval | None
    found: float


def sample_uncertainty(
    base: Curve, challenger: Curve, *, count: int = 500, seed: int = 0
) -> SampleUncertainty:
    """Bootstrap the crossover. Meant for measured samples; modelled times have no sample noise."""
    sizes = sorted(set(base.samples) & set(challenger.samples))
    rng = np.random.default_rng(seed)
    a = {size: np.median(resamples(base.samples[size], count, rng), axis=1) for size in sizes}
    b = {size: np.median(resamples(challenger.samples[size], count, rng), axis=1) for size in sizes}
    found: list[float] = []
    for draw in range(count):
        result = _crossover(
            base.name,
            challenger.name,
            {s: float(a[s][draw]) for s in sizes},
            {s: float(b[s][draw]) for s in sizes},
            TIE,
        )
        if result.size_bytes is not None:
            found.append(result.size_bytes)
    if not found:
        return SampleUncertainty(None, 0.0)
    low, high = np.percentile(found, [2.5, 97.5])
    return SampleUncertainty(Interval(float(low), float(high)), len(found) / count)
