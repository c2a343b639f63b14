"""Filing and comparing saved runs per device, through pytest-benchmark's own session."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from smfree.measure.records import Record
from smfree.results.compare import compare_runs
from smfree.results.report import comparison_text
from smfree.results.store import DeviceIdentity, Run, SplitStorage, run_of

Devices = Callable[[], Sequence[tuple[str, DeviceIdentity]]]


class Saving:
    """Puts a :class:`SplitStorage` into pytest-benchmark's session and loads comparisons per device.

    pytest-benchmark loads `--benchmark-compare` while it is configured, before any device is known; so the
    option is taken from it then and served once the devices are.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._compare: Any = None
        self._storage: SplitStorage | None = None
        self._compared: list[tuple[DeviceIdentity, Run]] = []
        self.notes: list[str] = []
        """What the reader should know about comparisons that were asked for."""

    def take_compare_option(self) -> None:
        """Hide `--benchmark-compare` from pytest-benchmark. Must run before its pytest_configure."""
        if hasattr(self._config.option, "benchmark_compare"):  # not under -p no:benchmark
            self._compare = self._config.option.benchmark_compare
            self._config.option.benchmark_compare = []

    def install(self, devices: Devices) -> None:
        """Replace the session's storage and load what `--benchmark-compare` asked for."""
        session = getattr(self._config, "_benchmarksession", None)
        if session is None:  # -p no:benchmark
            return
        self._config.option.benchmark_compare = session.compare = self._compare
        if not hasattr(session.storage, "default_machine_id") or not hasattr(session.storage, "get"):
            session.handle_loading()  # not a file storage: nothing is filed in folders
            return
        self._refuse_unwritable(session)
        self._storage = session.storage = SplitStorage(session.storage)
        if not self._compare:
            return
        mapping = self._histories(session, devices())
        if mapping:
            session.compared_mapping = mapping
        else:
            session.handle_loading()  # points of no device, or nothing to compare with

    def _refuse_unwritable(self, session: Any) -> None:
        """A run that is to be saved must not find out at its end that it cannot be."""
        option = self._config.option
        if (option.benchmark_save or option.benchmark_autosave) and not os.access(
            session.storage.path, os.W_OK
        ):
            raise pytest.UsageError(
                f"runs cannot be saved in {session.storage.path}; name a writable folder with "
                "--benchmark-storage"
            )

    def _histories(
        self, session: Any, devices: Sequence[tuple[str, DeviceIdentity]]
    ) -> dict[Path, dict[str, Any]]:
        """Saved points by file and full name, from the folders of all devices of this session."""
        assert self._storage is not None
        mapping: dict[Path, dict[str, Any]] = {}
        for spec, identity in devices:
            found = list(self._storage.history(identity.folder, self._compare))
            if not found:
                self.notes.append(
                    f"nothing saved for {spec} in {self._storage}/{identity.folder} to compare with"
                )
            for path, data in found:
                mapping[path] = {entry["fullname"]: entry for entry in data["benchmarks"]}
                self._compared.append((identity, run_of(path, data)))
        return mapping

    def verdicts(self, records: Sequence[Record]) -> list[str]:
        """One report for each saved run that this session is compared with."""
        reports = []
        for identity, old in self._compared:
            points = {
                record.name: {"extra_info": record.as_dict(), "stats": {"median": record.seconds}}
                for record in records
                if record.folder == identity.folder
            }
            if points:
                new = Run(Path("this run"), "", "", identity, points)
                reports.append(comparison_text(compare_runs(old, new)))
        return reports

    def files(self) -> list[Path]:
        """Files this session wrote."""
        written = list(self._storage.saved) if self._storage is not None else []
        json_path = self._config.getoption("benchmark_json")
        if json_path and Path(json_path).exists():
            written.insert(0, Path(json_path))
        return written
