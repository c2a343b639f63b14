"""Combinations of a test's axes: every pair of values in some row, or with --full-product every row.

A kernel's axes (device, schedule, stages, size, ...) multiply to thousands of runs. Nearly every mistake
shows where two values meet, so `make test` runs rows in which each two values of different axes meet at least
once; `make test-full` runs all of them. With --device naming GPUs, the rows run there instead: a GPU has the
schedule that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
from allpairspy import AllPairs

from smfree.cuda import Device
from smfree.measure.options import device_specs

Row = dict[str, Any]

SCHEDULES = (
    ("timed", 0),
    ("min-pc", 0),
    ("producer-ahead", 0),
    ("async-earliest", 0),
    ("async-latest", 0),
    ("random", 1),
    ("random", 2),
    ("random", 3),
)
"""Schedules and seeds under which every kernel must be right."""


def rows(axes: Mapping[str, Sequence[Any]], config: pytest.Config) -> list[Row]:
    """The rows to run: a value for every axis. ``spec`` and ``schedule`` are those of emulated devices."""
    gpus = [spec for spec in device_specs(config) if spec.startswith("cuda")]
    if gpus and "spec" in axes:
        axes = {**axes, "spec": on_gpus(gpus, axes["spec"]), "schedule": [("timed", 0)]}
    return full_rows(axes) if config.getoption("--full-product") else pair_rows(axes)


def opened(row: Row) -> Device:
    """The device of a row, under its schedule."""
    schedule, seed = row["schedule"]
    return Device.open(row["spec"], schedule=schedule, seed=seed)


def on_gpus(gpus: Sequence[str], emulated: Sequence[str]) -> list[str]:
    """Those of ``gpus`` that have what the ``emulated`` devices have in common: a TMA, or just the LSU."""
    return [gpu for gpu in gpus if has_tma(gpu) or not all(has_tma(spec) for spec in emulated)]


@cache
def has_tma(spec: str) -> bool:
    """Whether a device has a TMA."""
    with Device.open(spec) as device:
        return device.capabilities.has_tma


def full_rows(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Every row."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pair_rows(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Few rows in which each two values of two axes meet."""
    if len(axes) < 2 or not all(axes.values()):
        return full_rows(axes)
    return [
        dict(zip(axes, values, strict=True)) for values in AllPairs([list(axis) for axis in axes.values()])
    ]
