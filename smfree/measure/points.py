"""What is measured at a point, and what a kernel's own clock said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smfree.measure.records import CacheState, Cost, Memory, Question, Traffic


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: the axes that name it and what a reader needs to judge the number.

    ``traffic`` is per launch for ``measure.launches``, per tile for ``measure.chain``, of one rank for
    ``measure.collective``.
    ``launch_cancels``: only a difference to another point is of interest, so being launch-bound is no flaw.
    """

    question: Question
    key: Mapping[str, Any]
    traffic: Traffic
    memory: Memory
    cache: CacheState
    working_set_bytes: int
    config: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    launch_cancels: bool = False


@dataclass(frozen=True, slots=True)
class ChainReading:
    """One run of a chain kernel at two lengths: slope of the SM's own clock.

    ``cycles_per_tile`` = (long - short) / (tiles_long - tiles_short). ``cycles`` and ``nanoseconds`` are
    those of the long run, for the clock's frequency; ``tiles`` its length.

    ``method`` says how the cycles were read. ``held``: no host gap can lie inside them. ``counters``: those
    of ``tiles`` tiles; None: the latest launch's.
    """

    cycles_per_tile: float
    cycles: float
    nanoseconds: float
    tiles: int
    method: str = "clock64 inside one CTA, slope over the chain's length"
    held: bool = True
    counters: Mapping[str, int] | None = None
