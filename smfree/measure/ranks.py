"""Benchmarks as one process per GPU, under torchrun or with our own variables (smfree.ranks).

Every process runs the same points in the same order: those marked ``collective``, with as many ranks as there
are processes. A point of one GPU is left out. Rank 0 prints and saves.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

COLLECTIVE = "collective"
"""The marker of benchmarks whose ranks may be processes."""


def place() -> tuple[int, int]:
    """(rank, number of processes that run the benchmarks together): (0, 1) alone."""
    for rank, size in (("SMFREE_RANK", "SMFREE_WORLD_SIZE"), ("RANK", "WORLD_SIZE")):
        if os.environ.get(size, "").isdecimal() and os.environ.get(rank, "").isdecimal():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def several() -> bool:
    return place()[1] > 1


def join(spec: str) -> Any:
    """Become a rank, with the GPU of its number; an emulated machine has one for each. The RankContext."""
    from smfree.cuda.choose import Kind, parse_spec
    from smfree.ranks import join as join_ranks
    from smfree.ranks.environment import local_ranks

    asked = parse_spec(spec)
    return join_ranks(f"emu:{asked.profile}x{local_ranks()[1]}" if asked.kind is Kind.EMULATED else "cuda")


def reason_to_leave_out(item: Any, context: Any) -> str:
    """Why a benchmark cannot run in these processes; empty when it can."""
    if item.get_closest_marker(COLLECTIVE) is not None:
        return ""
    return (
        f"these are {context.world_size} processes with a GPU each: what one process measures, on one GPU or "
        "on several, runs without them"
    )


class QuietHooks:
    """The reporter of ranks above 0 writes nowhere; what fails is told on stderr."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  until the process ends

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"rank {place()[0]}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr)


def save_nothing(config: pytest.Config) -> None:
    """Ranks above 0 save nothing."""
    for name in ("benchmark_autosave", "benchmark_save", "benchmark_json"):
        if hasattr(config.option, name):
            setattr(config.option, name, None)
