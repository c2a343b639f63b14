"""Cycles of one step of a kernel that does not read its clock: the slope between launches of two lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smfree.measure.fixture import ChainReading, Measure

#: Launches per sample on a real clock, so that the resolution of its events is far below the slope.
LAUNCHES = 16

METHOD = "events around launches of two lengths, slope: launch, fill and drain cancel"


def slope(measure: Measure, launch: Callable[[int, Any], object], short: int, long: int) -> ChainReading:
    """What one step more takes, and what it counts; ``launch(steps, stream)`` queues a launch.

    The long launch is the last one, so its outcome is what there is to verify. Counters are the difference of
    the two launches. Everything that a launch needs must be compiled and loaded.
    """
    samples, counted = [], []
    for steps in (short, long):
        samples.append(
            measure.timer.batch(
                lambda _, stream, steps=steps: launch(steps, stream),  # type: ignore[misc]
                1 if measure.deterministic else LAUNCHES,
                count=False,
            )
        )
        counted.append(measure.counters())
    nominal = float(measure.device.capabilities.sm_clock_mhz)
    mhz = nominal if measure.deterministic else measure.instruments.sm_clock_mhz() or nominal
    one_ms = mhz * 1e3  # a launch can be too short for the timer's tick, so the probe tells the clock
    return ChainReading(
        (samples[1].seconds - samples[0].seconds) * mhz * 1e6 / (long - short),
        one_ms,
        1e6,
        long - short,
        METHOD,
        all(sample.held for sample in samples),
        {name: amount - counted[0].get(name, 0) for name, amount in counted[1].items()},
    )
