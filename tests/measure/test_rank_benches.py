"""Benchmarks under torchrun or our own variables: a process per GPU, each times itself, rank 0 tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from smfree.measure.collective import agreed
from smfree.measure.ranks import place

ROOT = Path(__file__).parents[2]


def run_ranks(name: str, *options: str) -> list[subprocess.CompletedProcess[str]]:
    """Two processes that run the same points."""
    usual = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "bench/", "-q", "-p", "no:cacheprovider", *options]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**usual, "SMFREE_RANK": rank, "SMFREE_WORLD_SIZE": "2", "SMFREE_RENDEZVOUS": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        done = [child.communicate(timeout=120) for child in started]
    finally:
        for child in started:
            child.kill()
    return [
        subprocess.CompletedProcess(command, child.returncode, *texts)
        for child, texts in zip(started, done, strict=True)
    ]


def test_every_process_times_its_rank_and_rank_0_tells_and_saves(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    chosen = (
        "(push-1MiB-2ranks-16ctas) or sm.push-1KiB-4ranks or 0B-released-2ranks "
        "or twoshot-256KiB-bfloat16-2ranks-16ctas"
    )
    first, second = run_ranks(
        f"benches-{os.getpid()}", "--device=emu:h100", "-k", chosen, f"--benchmark-json={out}"
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stderr
    assert "AllGather, how many SMs: emu:h100 (modelled)" in first.stdout
    assert "AllReduce, how many SMs: emu:h100 (modelled)" in first.stdout
    assert "3 passed, 2 skipped" in first.stdout
    assert (second.stdout, second.stderr) == ("", "")
    data = json.loads(out.read_text())
    ways = {entry["extra_info"]["key"]["way"] for entry in data["benchmarks"]}
    assert ways == {"sm.push", "tma.push", "twoshot"}
    for entry in data["benchmarks"]:
        (both,) = entry["extra_info"]["timing"]["ranks_s_per_sample"]
        assert len(both) == 2 and entry["extra_info"]["samples_s"] == [max(both)]
        assert min(both) > 1e-6 and max(both) < 1e-4
    reasons = {row["reason"].split(":")[0] for row in data["smfree"]["skipped"]}
    assert reasons == {"4 ranks are needed, these are 2 processes", "these are 2 processes with a GPU each"}


# --- what ranks agree on ------------------------------------------------------------------------------------


def test_what_one_rank_finds_wrong_fails_on_all() -> None:
    told: list[bytes] = []

    def exchange(data: bytes, what: str) -> Sequence[bytes]:
        told.append(data)
        return [data, b"3 wrong bytes"]

    def wrong() -> None:
        raise AssertionError("5 wrong bytes")

    with pytest.raises(AssertionError, match=r"^rank 1 has found: 3 wrong bytes$"):
        agreed(lambda: None, exchange)
    with pytest.raises(AssertionError, match=r"^5 wrong bytes$"):
        agreed(wrong, exchange)
    assert told == [b"", b"5 wrong bytes"]
    agreed(lambda: None, lambda data, what: [data, b""])
    agreed(lambda: None, None)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "4", "SMFREE_RANK": "0", "SMFREE_WORLD_SIZE": "2"}, (0, 2)),
        ({"WORLD_SIZE": "4"}, (0, 1)),
    ],
    ids=["alone", "torchrun", "ours-first", "incomplete"],
)
def test_the_place_of_a_process(
    variables: dict[str, str], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SMFREE_RANK", "SMFREE_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place() == found
