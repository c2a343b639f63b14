"""Command-line options, and what becomes of pytest-benchmark's own under ``pytest bench/``.

json, save, autosave, save-data, storage, compare, compare-fail
    Work. Saved runs are filed per device.
sort, columns, group-by, name, time-unit, verbose, histogram
    Work. One of them also brings back pytest-benchmark's own table, which is left out otherwise: a line for
    each
    point hides the answer.
disable, only, skip, disable-gc
    Work. ``disable`` runs and verifies every point once and times none.
min-rounds
    Stands for ``--rounds``.
min-time, max-time, precision, confidence, timer, warmup, warmup-iterations, calibration-precision
    Refused: they steer a calibration by host time, which device time does not have.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from smfree.measure.helpers import cores

#: Refused options -> what to use instead.
REFUSED = {
    "--benchmark-min-time": (
        "the timer batches launches until events resolve them; use --rounds for more samples"
    ),
    "--benchmark-max-time": "use --rounds to choose the number of samples",
    "--benchmark-precision": "use --rounds to choose the number of samples",
    "--benchmark-confidence": (
        "intervals are bootstrapped from the raw samples; use --rounds for more of them"
    ),
    "--benchmark-timer": "benchmarks on a device are timed by the device",
    "--benchmark-warmup": "every point runs once for verification before it is timed",
    "--benchmark-warmup-iterations": "every point runs once for verification before it is timed",
    "--benchmark-calibration-precision": (
        "there is no calibration; use --rounds to choose the number of samples"
    ),
}

#: Options that ask for pytest-benchmark's own table.
TABLE_OPTIONS = (
    "--benchmark-sort",
    "--benchmark-columns",
    "--benchmark-group-by",
    "--benchmark-name",
    "--benchmark-time-unit",
    "--benchmark-verbose",
    "--benchmark-histogram",
    "--benchmark-compare",
    "--benchmark-compare-fail",
    "--benchmark-cprofile",
)

DEFAULT_ROUNDS_MEASURED = 20


class Axes(Enum):
    """How many points: QUICK answers the question in a minute on the emulator, FULL is every axis."""

    QUICK = "quick"
    FULL = "full"


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("smfree", "smfree: data movement on real and emulated GPUs")
    group.addoption(
        "--device",
        action="append",
        default=None,
        metavar="SPEC[,SPEC]",
        help="auto (default: GPU 0 if there is one, else --fallback), cuda:N, emu:a100, emu:h100, "
        "emu:h200, emu:b200; may be repeated. SMFREE_DEVICE sets the default.",
    )
    group.addoption(
        "--fallback",
        default="emu:h100",
        metavar="SPEC[,SPEC]",
        help="devices that 'auto' stands for without a GPU. Default: %(default)s",
    )
    group.addoption(
        "--axes",
        choices=[axes.value for axes in Axes],
        default=None,
        help="quick or full set of points. Default: quick on an emulated GPU, full on a real one",
    )
    group.addoption(
        "--jobs",
        type=_positive,
        default=None,
        metavar="N",
        help="processes that run points of emulated devices. Default: one per core",
    )
    group.addoption(
        "--rounds",
        type=_positive,
        default=None,
        metavar="N",
        help=f"samples per point. Default: {DEFAULT_ROUNDS_MEASURED} on a GPU, 1 on an emulated one "
        "(deterministic)",
    )


def jobs(config: pytest.Config, specs: Sequence[str]) -> int:
    """Processes that may run points: --jobs, else one per core; always one when a real GPU takes part."""
    if any(not spec.startswith("emu:") for spec in specs) or config.getoption("benchmark_disable"):
        return 1
    return int(config.getoption("jobs") or cores())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed (got {text!r})")
    return int(text)


@dataclass(frozen=True, slots=True)
class Given:
    """The options that were really written somewhere: command line, PYTEST_ADDOPTS or the ini file."""

    names: frozenset[str]

    @classmethod
    def of(cls, config: pytest.Config) -> Given:
        words = [str(word) for word in config.invocation_params.args]
        words += shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
        addopts = config.getini("addopts")
        words += [str(word) for word in addopts] if isinstance(addopts, list) else shlex.split(str(addopts))
        return cls(frozenset(word.split("=", 1)[0] for word in words if word.startswith("--")))

    def refused(self) -> list[str]:
        """One sentence for each given option that cannot be honoured."""
        return [
            f"{name} does not apply to device benchmarks: {why}"
            for name, why in REFUSED.items()
            if name in self.names
        ]

    def wants_table(self) -> bool:
        return any(name in self.names for name in TABLE_OPTIONS)


def device_specs(config: pytest.Config) -> list[str]:
    """The requested device strings in order, without repeats; ["auto"] when nothing was asked for."""
    given = config.getoption("device") or [os.environ.get("SMFREE_DEVICE") or "auto"]
    return unique(part for text in given for part in text.split(","))


def impossible(config: pytest.Config) -> str | None:
    """What cannot work whatever is run, in one sentence: said before the first point, not after the last."""
    if not device_specs(config) or not fallback_specs(config):
        return "--device and --fallback name at least one device each (got nothing); leave them out for auto"
    path = config.getoption("benchmark_json", None)
    if path is not None and not Path(path).parent.is_dir():
        return f"--benchmark-json: there is no folder {Path(path).parent}; make it first"
    return None


def fallback_specs(config: pytest.Config) -> list[str]:
    return unique(config.getoption("fallback").split(","))


def unique(parts: object) -> list[str]:
    """Stripped, non-empty, first occurrence of each."""
    found: dict[str, None] = {}
    for part in parts:  # type: ignore[attr-defined]
        if part.strip():
            found[part.strip()] = None
    return list(found)


def rounds(config: pytest.Config, given: Given, *, deterministic: bool) -> int:
    """Samples per point: --rounds, else an explicit --benchmark-min-rounds, else the default of the clock."""
    chosen = config.getoption("rounds")
    if chosen is None and "--benchmark-min-rounds" in given.names:
        chosen = config.getoption("benchmark_min_rounds")
    if chosen is not None:
        return int(chosen)
    return 1 if deterministic else DEFAULT_ROUNDS_MEASURED


def axes_for(config: pytest.Config, spec: str) -> Axes:
    """--axes, else QUICK for an emulated device and FULL for a real one."""
    chosen = config.getoption("axes")
    if chosen is not None:
        return Axes(chosen)
    return Axes.QUICK if spec.startswith("emu:") else Axes.FULL
