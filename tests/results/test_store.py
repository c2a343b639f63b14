"""Filing runs per device, and what counts as the same machine (case G10)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.storage.file import FileStorage

from smfree.results.store import (
    DeviceIdentity,
    SplitStorage,
    load_run,
    split_by_device,
    stable_machine_info,
)

H100 = DeviceIdentity("hopper", "NVIDIA H100 80GB HBM3", "measured", "GPU-1", "13.0")
EMULATED = DeviceIdentity("hopper", "H100", "modelled", model_version="h100:abc")
A100 = DeviceIdentity("ampere", "A100", "modelled", model_version="a100:def")


class Quiet:
    def info(self, *args: Any, **kwargs: Any) -> None: ...

    warning = info


def entry(name: str, identity: DeviceIdentity | None, seconds: float = 1e-6) -> dict[str, Any]:
    extra = (
        {} if identity is None else {"identity": identity.as_dict(), "clock_source": identity.clock_source}
    )
    stats = {
        "median": seconds,
        "mean": seconds,
        "min": seconds,
        "max": seconds,
        "ops": 1.0,
        "data": [seconds],
    }
    return {"fullname": name, "name": name, "extra_info": extra, "stats": stats}


def run(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "machine_info": {},
        "commit_info": {"id": "0123456789abcdef", "dirty": True},
        "datetime": "2026-01-01T00:00:00+00:00",
        "benchmarks": list(entries),
        **more,
    }


def test_folder_names_generation_gpu_and_clock() -> None:
    assert H100.folder == "hopper-h100-80gb-hbm3"
    assert EMULATED.folder == "hopper-h100-modelled"
    assert replace(EMULATED, gpu="NVIDIA H100 (emulated)").folder == "hopper-h100-modelled"


def test_modelled_and_measured_never_share_a_folder() -> None:
    assert replace(H100, clock_source="modelled").folder != H100.folder


def test_momentary_cpu_frequency_is_no_identity() -> None:
    def info(hertz: str) -> dict[str, Any]:
        return {"node": "n", "cpu": {"brand_raw": "X", "hz_actual": [hertz], "hz_actual_friendly": hertz}}

    assert info("2.1 GHz") != info("3.7 GHz")
    assert stable_machine_info(info("2.1 GHz")) == stable_machine_info(info("3.7 GHz"))
    assert stable_machine_info(info("2.1 GHz"))["cpu"] == {"brand_raw": "X"}


def test_differences_name_what_changed() -> None:
    assert H100.differences(H100) == []
    newer = replace(H100, driver="13.1")
    assert newer.differences(H100) == ["driver: 13.0 -> 13.1"]


def test_one_session_on_two_devices_becomes_two_files(tmp_path: Path) -> None:
    storage = SplitStorage(FileStorage(tmp_path, Quiet(), default_machine_id="Linux-here"))
    skipped = [{"folder": A100.folder, "reason": "no TMA"}, {"folder": EMULATED.folder, "reason": "x"}]
    data = run(
        entry("p[emu:a100]", A100),
        entry("p[emu:h100]", EMULATED),
        entry("plain", None),
        smfree={"skipped": skipped},
    )
    storage.save(data, "mine")
    storage.save(data, "again")
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    assert names == [
        "Linux-here/0001_mine.json",
        "Linux-here/0002_again.json",
        "ampere-a100-modelled/0001_mine.json",
        "ampere-a100-modelled/0002_again.json",
        "hopper-h100-modelled/0001_mine.json",
        "hopper-h100-modelled/0002_again.json",
    ]
    saved = json.loads((tmp_path / "ampere-a100-modelled" / "0001_mine.json").read_text())
    assert [row["fullname"] for row in saved["benchmarks"]] == ["p[emu:a100]"]
    assert [row["reason"] for row in saved["smfree"]["skipped"]] == ["no TMA"]
    assert len(storage.saved) == 6
    assert storage.default_machine_id == "Linux-here"


def test_history_gives_the_latest_run_of_that_device_only(tmp_path: Path) -> None:
    storage = SplitStorage(FileStorage(tmp_path, Quiet(), default_machine_id="Linux-here"))
    storage.save(run(entry("p", A100, 1e-6)), "a")
    storage.save(run(entry("p", A100, 2e-6)), "b")
    storage.save(run(entry("p", EMULATED, 9e-6)), "c")
    ((path, data),) = storage.history(A100.folder, True)
    assert path.name == "0002_b.json"
    assert data["benchmarks"][0]["stats"]["median"] == 2e-6
    ((path, _),) = storage.history(A100.folder, "0001")
    assert path.name == "0001_a.json"
    assert list(storage.history("ada-l40", True)) == []


def test_points_without_a_device_stay_together() -> None:
    parts = split_by_device(run(entry("a", None), entry("b", None)))
    assert [(folder, len(part["benchmarks"])) for folder, part in parts] == [(None, 2)]


def test_loaded_run_knows_its_device_commit_and_date(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run(entry("p", H100))))
    loaded = load_run(path)
    assert loaded.identity == H100
    assert loaded.commit == "0123456789ab (dirty)"
    assert list(loaded.points) == ["p"]


def test_a_file_that_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"other\.json is not a saved benchmark run"):
        load_run(path)
