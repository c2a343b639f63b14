"""Where runs are filed and how they are read back.

A run on several devices is one pytest session and one `--benchmark-json` file, but it is *filed* as one file
per device, in ``<storage>/GENERATION-GPU[-modelled]/``. So a later run on any of these devices compares with
that device's own history, and a modelled time never lies in one folder with a measured one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Parts of pytest-benchmark's machine_info that change from minute to minute on one machine.
_MOMENTARY = ("hz_actual", "hz_actual_friendly")


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """What makes two runs comparable. Nothing in it changes while a machine stays the same.

    ``uuid`` is empty for an emulated device. ``clock_source`` is "modelled" or "measured". ``model_version``
    names the emulator's profile and its content, empty on a real GPU.
    """

    generation: str
    gpu: str
    clock_source: str
    uuid: str = ""
    driver: str = ""
    model_version: str = ""

    @property
    def folder(self) -> str:
        """``GENERATION-GPU[-modelled]``, letters, digits and hyphens only."""
        name = _slug(self.gpu)
        if name.startswith(f"{self.generation}-"):
            name = name[len(self.generation) + 1 :]
        tail = "-modelled" if self.clock_source == "modelled" else ""
        return f"{self.generation}-{name}{tail}"

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceIdentity:
        return cls(**{name: str(data.get(name, "")) for name in cls.__dataclass_fields__})

    def differences(self, other: DeviceIdentity) -> list[str]:
        """Human-readable differences from ``other`` (the older run), most important first; empty = same
        machine."""
        return [
            f"{name.replace('_', ' ')}: {getattr(other, name) or 'unknown'} -> "
            f"{getattr(self, name) or 'unknown'}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def _slug(text: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    for noise in ("nvidia-", "geforce-", "-emulated", "-modelled"):
        words = words.replace(noise, "")
    return words or "gpu"


def stable_machine_info(machine_info: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of pytest-benchmark's ``machine_info`` without momentary values (the current CPU frequency)."""
    info = dict(machine_info)
    cpu = info.get("cpu")
    if isinstance(cpu, Mapping):
        info["cpu"] = {key: value for key, value in cpu.items() if key not in _MOMENTARY}
    return info


@dataclass(frozen=True, slots=True)
class Run:
    """One saved file: its path, when and from which commit it came, and its benchmark entries by full
    name."""

    path: Path
    datetime: str
    commit: str
    identity: DeviceIdentity | None
    points: Mapping[str, Mapping[str, Any]]


def load_run(path: Path) -> Run:
    """Read one of pytest-benchmark's JSON files.

    Raises ValueError when the file is no such JSON, or not there.
    """
    try:
        return run_of(path, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a saved benchmark run ({type(error).__name__}: {error}); "
            "make one with --benchmark-json or --benchmark-autosave"
        ) from error


def run_of(path: Path, data: Mapping[str, Any]) -> Run:
    """A :class:`Run` from the content of pytest-benchmark's JSON. Raises KeyError or TypeError for anything
    else."""
    points = {entry["fullname"]: entry for entry in data["benchmarks"]}
    identities = [
        entry["extra_info"]["identity"] for entry in points.values() if "identity" in entry["extra_info"]
    ]
    unique = {json.dumps(identity, sort_keys=True) for identity in identities}
    identity = DeviceIdentity.from_dict(json.loads(unique.pop())) if len(unique) == 1 else None
    commit = data.get("commit_info") or {}
    name = str(commit.get("id") or "unknown")[:12] + (" (dirty)" if commit.get("dirty") else "")
    return Run(path, str(data.get("datetime", "")), name, identity, points)


class SplitStorage:
    """pytest-benchmark's file storage, filing each device's points in that device's folder.

    Wraps the storage object of a session and hands every other attribute through. ``saved`` lists the files
    written.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.saved: list[Path] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __str__(self) -> str:
        return str(self._inner)

    def save(self, output_json: Mapping[str, Any], save: str) -> None:
        """File ``output_json`` under the tag ``save``: one file per device; points without a device as
        before."""
        before = self._inner.default_machine_id
        try:
            for folder, part in split_by_device(output_json):
                self._inner.default_machine_id = folder or before
                target = Path(self._inner.get(f"{self._inner._next_num}_{save}.json"))
                self._inner.save(part, save)
                self.saved.append(target)
        finally:
            self._inner.default_machine_id = before

    def history(self, folder: str, wanted: str | bool) -> Iterable[tuple[Path, Mapping[str, Any]]]:
        """Saved runs of one device: the latest one (``wanted`` True) or those that match a number or
        pattern."""
        before = self._inner.default_machine_id
        self._inner.default_machine_id = folder
        try:
            found = list(self._inner.load() if wanted is True else self._inner.load(wanted))
        finally:
            self._inner.default_machine_id = before
        return found[-1:] if wanted is True else found


def split_by_device(output_json: Mapping[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
    """Split a run's JSON by the folder of each point's device; None collects the points of no device."""
    parts: dict[str | None, list[Mapping[str, Any]]] = {}
    for entry in output_json["benchmarks"]:
        identity = entry["extra_info"].get("identity")
        folder = DeviceIdentity.from_dict(identity).folder if identity else None
        parts.setdefault(folder, []).append(entry)
    shared = output_json.get("smfree", {})
    result = []
    for folder, entries in parts.items():
        part = {**output_json, "benchmarks": entries}
        if folder is not None:
            part["smfree"] = {
                key: [row for row in value if row.get("folder") == folder]
                if isinstance(value, list)
                else value
                for key, value in shared.items()
            }
        result.append((folder, part))
    return result
