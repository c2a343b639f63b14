"""The real benchmarks on emulated devices: what is measured, and what the user is promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.axes import ENGINES, TILE_BYTES, latency_points, throughput_points
from smfree.cuda.choose import real_devices
from smfree.measure.options import Axes
from smfree.measure.records import Memory

ROOT = Path(__file__).parents[2]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "bench/", "-q", "-p", "no:cacheprovider", *options]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False, timeout=300
    )


def test_quick_axes_cover_every_engine_and_size_in_both_regimes() -> None:
    every = {(engine, tile) for engine in ENGINES for tile in TILE_BYTES}
    assert {(p.engine, p.tile_bytes) for p in latency_points(Axes.QUICK)} == every
    best = {(p.engine, p.tile_bytes) for p in throughput_points(Axes.QUICK) if p.bytes_in_flight is None}
    assert best >= every
    full = {(p.engine, p.tile_bytes, p.memory) for p in latency_points(Axes.FULL)}
    assert full == {(engine, tile, memory) for engine, tile in every for memory in (Memory.L2, Memory.DRAM)}
    assert TILE_BYTES[0] == 128
    assert TILE_BYTES[-1] == 64 * 1024


def test_a_run_without_a_gpu_has_at_least_160_points_that_can_run() -> None:
    on_h100 = [*latency_points(Axes.QUICK), *throughput_points(Axes.QUICK)]
    on_a100 = [p for p in on_h100 if "tma" not in p.engine and "descriptor" not in p.engine]
    assert len(on_h100) + len(on_a100) >= 160


@pytest.mark.parametrize("axes", list(Axes))
def test_ids_are_unique_and_no_tile_exceeds_its_bytes_in_flight(axes: Axes) -> None:
    copies = list(throughput_points(axes))
    ids = [point.id for point in [*latency_points(axes), *copies]]
    assert len(ids) == len(set(ids))
    assert all(p.bytes_in_flight is None or p.tile_bytes <= p.bytes_in_flight for p in copies)


def test_tma_on_ampere_is_skipped_with_the_reason_in_the_record_too(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = bench("--device=emu:a100", "-k", "128B and L2 and not uncertainty", f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    assert "skipped 1: emu:a100: tma.bulk needs the TMA (compute capability 9.0 or higher)" in done.stdout
    data = json.loads(out.read_text())
    assert [entry["extra_info"]["key"]["engine"] for entry in data["benchmarks"]] == ["lsu", "cp.async"]
    skipped = {row["name"].split("-")[1]: row["reason"] for row in data["smfree"]["skipped"]}
    assert set(skipped) == {"tma.bulk", "tma.tensor"}
    assert all("needs the TMA" in reason for reason in skipped.values())
    point = data["benchmarks"][0]["extra_info"]
    assert point["clock_source"] == "modelled"
    assert point["verified"] is True
    assert point["payload_bytes"] == 128
    assert point["cycles"] > 0
    assert point["cost"]["registers"] > 0
    assert point["counters"]["bytes_through_registers"] > 0
    assert point["timing"]["tiles"] >= 1024


@pytest.mark.skipif(not real_devices()[0], reason="this machine has a GPU, so cuda:0 is there")
def test_a_gpu_that_is_not_there_ends_in_one_sentence() -> None:
    done = bench("--device=cuda:0")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("ERROR: cuda:0 was asked for, but this machine has no NVIDIA")


def test_a_pipeline_is_measured_whole_and_in_halves_without_a_tma_too(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = bench("--device=emu:a100", "-k", "ring_async-4KiB-2stage", f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    points = [entry["extra_info"] for entry in json.loads(out.read_text())["benchmarks"]]
    assert [point["key"]["part"] for point in points] == [
        "copy", "one copy", "compute", "one compute", "both"
    ]  # fmt: skip
    both = points[-1]
    assert both["key"] | {"work": 0} == {
        "pipeline": "ring_async", "tile_bytes": 4096, "num_stages": 2, "part": "both", "ratio": 1.0, "work": 0
    }  # fmt: skip
    assert both["question"] == "pipeline"
    assert both["verified"] is True
    assert both["read_bytes"] == 2 * both["written_bytes"] > 0
    assert points[2]["read_bytes"] == points[2]["written_bytes"] == 0
    assert both["cost"]["ctas_per_sm"] > 0
    took = [point["seconds"] for point in points]
    assert max(took[0], took[2]) < took[4] < took[0] + took[2]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ring_async"))
    assert 0.8 < float(line.split()[5]) < 1.25, "the ratio that was asked for is 1"
