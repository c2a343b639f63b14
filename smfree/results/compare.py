"""Did a point change between two runs? SAME, FASTER, SLOWER or UNSURE.

A difference counts when it exceeds a relative limit *and* an absolute floor, and when the interval of the
difference
agrees: a percentage alone fails identical code on nanosecond results, an average alone misses a real change
that the
noise hides. Points of different clocks (modelled, measured) are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import numpy as np

from smfree.model.estimators import Interval, median, resamples
from smfree.results.store import Run

#: Measured points with fewer samples than this cannot be told from noise.
MIN_SAMPLES = 5


class Verdict(Enum):
    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNSURE = "UNSURE"


@dataclass(frozen=True, slots=True)
class Limits:
    """When a difference counts.

    ``relative``: fraction of the old time. ``floor_s``: seconds of a reading; smaller differences are SAME
    whatever their share.
    """

    relative: float = 0.05
    floor_s: float = 20e-9


@dataclass(frozen=True, slots=True)
class Comparison:
    """One point in two runs. Times in seconds; ``ratio`` = new / old with its 95 % interval."""

    name: str
    verdict: Verdict
    old_s: float
    new_s: float
    ratio: float
    interval: Interval
    reason: str


def compare_samples(
    name: str,
    old: Sequence[float],
    new: Sequence[float],
    limits: Limits = Limits(),
    *,
    exact: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare two series of samples (seconds). ``exact``: the times are deterministic (modelled), one
    sample is enough."""
    old_s, new_s = median(old), median(new)
    ratio = new_s / old_s if old_s else np.inf if new_s else 1.0
    rng = np.random.default_rng(seed)
    if exact or (len(old) == 1 and len(new) == 1):
        ratios, gaps = Interval(ratio, ratio), Interval(new_s - old_s, new_s - old_s)
    else:
        a = np.median(resamples(old, 1000, rng), axis=1)
        b = np.median(resamples(new, 1000, rng), axis=1)
        low, high = np.percentile(b / a, [2.5, 97.5])
        ratios = Interval(float(low), float(high))
        low, high = np.percentile(b - a, [2.5, 97.5])
        gaps = Interval(float(low), float(high))

    def result(verdict: Verdict, reason: str) -> Comparison:
        return Comparison(name, verdict, old_s, new_s, ratio, ratios, reason)

    if max(abs(gaps.low), abs(gaps.high)) <= limits.floor_s:
        return result(Verdict.SAME, f"difference below the floor of {limits.floor_s * 1e9:g} ns")
    if not exact and min(len(old), len(new)) < MIN_SAMPLES:
        return result(
            Verdict.UNSURE, f"{min(len(old), len(new))} samples, {MIN_SAMPLES} needed; use more --rounds"
        )
    if ratios.low > 1 + limits.relative and gaps.low > limits.floor_s:
        return result(Verdict.SLOWER, f"beyond the limit of {limits.relative:.0%}")
    if ratios.high < 1 - limits.relative and gaps.high < -limits.floor_s:
        return result(Verdict.FASTER, f"beyond the limit of {limits.relative:.0%}; save a new baseline")
    if ratios.low >= 1 - limits.relative and ratios.high <= 1 + limits.relative:
        return result(Verdict.SAME, f"within {limits.relative:.0%}")
    if abs(median(new) - median(old)) <= limits.floor_s:
        return result(Verdict.SAME, f"difference below the floor of {limits.floor_s * 1e9:g} ns")
    return result(Verdict.UNSURE, "the interval reaches across the limit; use more --rounds")


def samples_of(entry: Mapping[str, Any]) -> Sequence[float]:
    """Raw samples in seconds of one saved point; its median alone when the samples were not kept."""
    kept = entry["extra_info"].get("samples_s") or entry["stats"].get("data")
    return list(kept) if kept else [float(entry["stats"]["median"])]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All points two runs share, the points only one has, and what differs between the machines."""

    old: Run
    new: Run
    points: tuple[Comparison, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    machine_differences: tuple[str, ...]

    def count(self, verdict: Verdict) -> int:
        return sum(point.verdict is verdict for point in self.points)


def compare_runs(old: Run, new: Run, limits: Limits = Limits()) -> RunComparison:
    """Compare two runs point by point. Points of one name that were not the same work (a pipeline's FMAs are
    chosen by what the device's copies take) count as missing on either side.

    Raises ValueError when one is modelled and the other measured.
    """
    clocks = [
        {str(entry["extra_info"].get("clock_source")) for entry in run.points.values()} for run in (old, new)
    ]
    if clocks[0] and clocks[1] and clocks[0].isdisjoint(clocks[1]):
        raise ValueError(
            f"{old.path} is {'/'.join(sorted(clocks[0]))} and {new.path} is {'/'.join(sorted(clocks[1]))}; "
            "modelled and measured times are never compared: take two runs of one kind"
        )
    points = []
    mixed = []
    for name in sorted(set(old.points) & set(new.points)):
        a, b = old.points[name], new.points[name]
        sources = {entry["extra_info"].get("clock_source") for entry in (a, b)}
        if len(sources) > 1 or _key(a) != _key(b):
            mixed.append(name)
            continue
        points.append(
            compare_samples(name, samples_of(a), samples_of(b), _of(a, limits), exact=sources == {"modelled"})
        )
    differences: tuple[str, ...] = ()
    if old.identity and new.identity:
        differences = tuple(new.identity.differences(old.identity))
    return RunComparison(
        old,
        new,
        tuple(points),
        tuple(sorted(set(old.points) - set(new.points)) + mixed),
        tuple(sorted(set(new.points) - set(old.points)) + mixed),
        differences,
    )


def _of(entry: Mapping[str, Any], limits: Limits) -> Limits:
    """The limits of a point. The floor is one reading's; the time of a control operation, or of a step in a
    cluster, is a share of a reading, one of ``turns``."""
    return replace(limits, floor_s=limits.floor_s / entry["extra_info"].get("config", {}).get("turns", 1))


def _key(entry: Mapping[str, Any]) -> Any:
    """The axes of a saved point; None where they were not kept."""
    return entry["extra_info"].get("key")


def age_days(run: Run, now: datetime | None = None) -> float | None:
    """Age of a saved run in days; None when the file has no readable date."""
    try:
        made = datetime.fromisoformat(run.datetime)
    except ValueError:
        return None
    if made.tzinfo is None:
        made = made.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - made).total_seconds() / 86400.0
