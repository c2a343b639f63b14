"""Groups of real processes on a served node: bytes, the death of a rank, leaks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kernels.ipc.slabs import Backing
from smfree.ranks import PeerLost, RankFailed, spawn
from tests.kernels import process_bodies as bodies


def shared_memory() -> set[str]:
    """Names in /dev/shm, which nobody here should use."""
    return set(os.listdir("/dev/shm"))


def children() -> set[int]:
    """Processes whose parent is this one, save multiprocessing's own, which stays."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            own = f"PPid:\t{os.getpid()}\n" in status.read_text()
            if own and b"resource_tracker" not in (status.parent / "cmdline").read_bytes():
                found.add(int(status.parent.name))
    return found


def test_three_processes_gather_in_every_way_over_every_backing() -> None:
    found = spawn(bodies.gather_all, 3, device="emu:h100x3", timeout_s=120)
    assert found == [[(f"{backing}: asked for", way, True) for backing, way, _ in bodies.MODES]] * 3


def test_two_processes_that_share_a_gpu_gather_at_random() -> None:
    how: dict[str, Any] = {"several_per_gpu": True, "schedule": "random", "seed": 4}
    found = spawn(bodies.gather_all, 2, device="emu:h100", timeout_s=120, **how)
    modes = [(f"{backing}: asked for", way, True) for backing, way, _ in bodies.MODES if way != "multicast"]
    assert found == [modes] * 2


@pytest.mark.parametrize(
    ("die", "backing", "way"),
    [
        (bodies.die_before_the_call, Backing.VMM, "ce"),
        (bodies.die_at_some_time, Backing.IPC, "sm.push"),
        (bodies.die_while_opening, Backing.IPC, ""),
    ],
    ids=["before-VMM-ce", "during-IPC-sm.push", "opening-IPC"],
)
def test_a_killed_rank_ends_the_others_within_seconds_and_leaves_nothing(
    die: Callable[..., None], backing: Backing, way: str, tmp_path: Path
) -> None:
    """Its memory stays as long as others have it open, so that they are told of the death, not of a fault."""
    before, known, clock = shared_memory(), children(), tmp_path / "clock"
    with pytest.raises(RankFailed) as failed:
        spawn(die, 3, backing, way, clock, device="emu:h100x3", timeout_s=120)
    assert time.monotonic() - float(clock.read_text()) < 15  # the time limits are far above
    text = str(failed.value)
    assert text.startswith("rank 1 of 3 was killed by SIGKILL")
    for rank in (0, 2):
        assert f"then rank {rank} failed: {PeerLost.__module__}.PeerLost: rank {rank} waited in" in text
    assert shared_memory() == before
    assert children() == known


def test_nothing_grows() -> None:
    """Once per round, that is; a thread may open a second connection at any time. By hand: 10,000 pool
    allocations, 1,000 opens and imports, 300 groups."""
    for found in spawn(bodies.grow, 2, device="emu:h100x2", timeout_s=120):
        for task, rounds, growth in found:
            assert growth.pop("device bytes") == growth.pop("imports") == 0, task
            assert max(growth.values()) < rounds, (task, rounds, growth)
