"""What one pytest session gathers: points, skips, seconds, and where files went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smfree.measure.records import Record, SkipRecord


@dataclass(slots=True)
class Seconds:
    """Wall-clock seconds of the host by what they were spent on."""

    compile: float = 0.0
    run: float = 0.0
    verify: float = 0.0

    def add(self, other: Seconds) -> None:
        """Add what another process spent."""
        self.compile += other.compile
        self.run += other.run
        self.verify += other.verify

    @contextmanager
    def spend(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name`` ("compile", "run" or "verify")."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


@dataclass(slots=True)
class RunLog:
    """Everything the tables and the JSON need. One per session, in the config's stash."""

    records: list[Record] = field(default_factory=list)
    skips: list[SkipRecord] = field(default_factory=list)
    sensitivities: list[dict[str, Any]] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    jobs: int = 1
    """Processes that ran points."""
    devices: dict[str, str] = field(default_factory=dict)
    """Device spec -> one line about it."""

    def json(self) -> dict[str, Any]:
        """The "smfree" part of the run's JSON. Lists hold rows with a "folder", so that they split by
        device."""
        return {
            "skipped": [skip.as_dict() for skip in self.skips],
            "sensitivity": list(self.sensitivities),
            "host_seconds": {
                "compile": self.seconds.compile,
                "run": self.seconds.run,
                "verify": self.seconds.verify,
            },
        }
