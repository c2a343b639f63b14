"""Robust estimators for small samples of times.

Device times have a hard lower edge and a long upper tail (throttling, refresh, other work), so the middle is
the median, the spread the median absolute deviation, and intervals come from resampling, never from a normal
law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: Makes the median absolute deviation of a normal sample equal its standard deviation.
MAD_TO_SIGMA = 1.4826


def median(samples: Sequence[float]) -> float:
    """Median of ``samples`` (any unit). Raises ValueError on an empty sequence."""
    if not len(samples):
        raise ValueError("median of no samples; record at least one sample")
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def spread(samples: Sequence[float]) -> float:
    """Robust standard deviation (scaled median absolute deviation), same unit; 0 for fewer than two
    samples."""
    if len(samples) < 2:
        return 0.0
    values = np.asarray(samples, dtype=np.float64)
    return float(MAD_TO_SIGMA * np.median(np.abs(values - np.median(values))))


@dataclass(frozen=True, slots=True)
class Interval:
    """Closed interval [low, high] in the unit of the statistic it encloses."""

    low: float
    high: float


def resamples(samples: Sequence[float], count: int, rng: np.random.Generator) -> np.ndarray:
    """Bootstrap resamples of ``samples``: float64 array of shape (count, len(samples))."""
    values = np.asarray(samples, dtype=np.float64)
    return values[rng.integers(0, len(values), size=(count, len(values)))]


def bootstrap_interval(
    samples: Sequence[float],
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    confidence: float = 0.95,
    count: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a statistic (default: the median).

    ``statistic`` maps an array of shape (count, n) to one of shape (count,). With one sample the interval
    is a point.
    """
    if not len(samples):
        raise ValueError("interval of no samples; record at least one sample")
    if statistic is None:
        values = np.median(resamples(samples, count, np.random.default_rng(seed)), axis=1)
    else:
        values = statistic(resamples(samples, count, np.random.default_rng(seed)))
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return Interval(float(low), float(high))


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Theil-Sen slope: the median of the slopes of all pairs; unit of y per unit of x. Needs two distinct
    x."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    i, j = np.triu_indices(len(xs), k=1)
    run = xs[j] - xs[i]
    keep = run != 0
    if not keep.any():
        raise ValueError(f"slope needs two distinct x values (got {len(xs)} points at one x)")
    return float(np.median((ys[j] - ys[i])[keep] / run[keep]))


@dataclass(frozen=True, slots=True)
class Drift:
    """How a series of samples moved from its first to its last sample.

    ``relative`` is the Theil-Sen trend over the whole series as a fraction of the median (+0.15 = 15 % slower
    at the end). ``significant`` says that the trend also exceeds what a random order of the same samples
    would show.
    """

    relative: float
    significant: bool


def drift(samples: Sequence[float], *, limit: float = 0.03, count: int = 400, seed: int = 0) -> Drift:
    """Detect a trend in a series of samples taken in time order (throttling, warm-up).

    A trend counts when it is larger than ``limit`` and larger than the trend in 99 % of random reorderings of
    the same samples. Fewer than eight samples never give a significant trend.
    """
    n = len(samples)
    if n < 2:
        return Drift(0.0, False)
    index = np.arange(n, dtype=np.float64)
    middle = median(samples)
    if middle == 0.0:
        return Drift(0.0, False)
    relative = slope(index, samples) * (n - 1) / middle
    if n < 8 or abs(relative) <= limit:
        return Drift(relative, False)
    rng = np.random.default_rng(seed)
    values = np.asarray(samples, dtype=np.float64)
    shuffled = [abs(slope(index, list(rng.permutation(values)))) * (n - 1) / middle for _ in range(count)]
    return Drift(relative, bool(abs(relative) > np.percentile(shuffled, 99.0)))
