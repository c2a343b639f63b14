"""Combinations of a test's axes: every pair of values in some row, or with --full-product every row.

A kernel's axes (device, schedule, stages, size, ...) multiply to thousands of runs. Nearly every mistake
shows where two values meet, so `make test` runs rows in which each two values of different axes meet at least
once; `make test-full` runs all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from allpairspy import AllPairs

Row = dict[str, Any]


def rows(axes: Mapping[str, Sequence[Any]], config: pytest.Config) -> list[Row]:
    """The rows to run: a value for every axis."""
    return full_rows(axes) if config.getoption("--full-product") else pair_rows(axes)


def full_rows(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Every row."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pair_rows(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Few rows in which each two values of two axes meet."""
    if len(axes) < 2:
        return full_rows(axes)
    return [
        dict(zip(axes, values, strict=True)) for values in AllPairs([list(axis) for axis in axes.values()])
    ]
