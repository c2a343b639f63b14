"""The command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smfree.cli import BROKEN_PIPE, main
from tests.results.test_store import EMULATED, H100, entry, run


def write(path: Path, seconds: float, identity=EMULATED) -> str:
    path.write_text(json.dumps(run(entry("bench[emu:h100-lsu]", identity, seconds))))
    return str(path)


def test_compare_says_slower_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write(tmp_path / "old.json", 1e-6), write(tmp_path / "new.json", 2e-6)
    assert main(["compare", old, new]) == 1
    text = capsys.readouterr().out
    assert "bench[emu:h100-lsu]  SLOWER     1 us" in text
    assert main(["compare", new, old]) == 0
    assert "FASTER" in capsys.readouterr().out


def test_compare_of_the_same_run_is_good_and_lists_points_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", 1e-6)
    assert main(["compare", old, old]) == 0
    assert "bench[" not in capsys.readouterr().out
    assert main(["compare", old, old, "--all"]) == 0
    assert "bench[emu:h100-lsu]  SAME" in capsys.readouterr().out


def test_limits_are_options(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old.json", 1e-6), write(tmp_path / "new.json", 1.08e-6)
    assert main(["compare", old, new]) == 1
    assert main(["compare", old, new, "--limit", "10"]) == 0
    assert main(["compare", old, new, "--floor-ns", "100"]) == 0


def test_modelled_against_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write(tmp_path / "old.json", 1e-6), write(tmp_path / "new.json", 1e-6, H100)
    assert main(["compare", old, new]) == 2
    assert "modelled and measured times are never compared" in capsys.readouterr().err


def test_runs_without_a_common_point_are_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write(tmp_path / "old.json", 1e-6), tmp_path / "new.json"
    new.write_text(json.dumps(run(entry("bench[emu:h100-other]", EMULATED, 1e-6))))
    assert main(["compare", old, str(new)]) == 2
    assert "have no point in common" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["nan", "-1", "inf", "x"])
def test_a_limit_that_would_pass_everything_is_refused(tmp_path: Path, limit: str) -> None:
    old, new = write(tmp_path / "old.json", 1e-6), write(tmp_path / "new.json", 2e-6)
    with pytest.raises(SystemExit):
        main(["compare", old, new, "--limit", limit])


def test_a_baseline_of_zero_seconds_hides_nothing(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old.json", 0.0), write(tmp_path / "new.json", 1e-6)
    assert main(["compare", old, new]) == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "no.json"), str(tmp_path / "no.json")]) == 2
    assert "no.json: no such file\n" in capsys.readouterr().err


def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    """As in `smfree devices | head -1`: the pipe is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "smfree.cli", "devices"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_devices_lists_what_can_be_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for spec in ("emu:a100", "emu:h100"):
        (line,) = [line for line in lines if line.startswith(spec)]
        assert "times modelled" in line
    assert lines[-1].startswith("several: cuda is all real GPUs, emu:h100x8 a node of eight")
