"""Groups of real processes, on a served node or on GPUs: bytes, and the death of a rank."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from smfree.ranks import PeerLost, RankFailed
from tests.kernels.group_kit import EMULATED
from tests.kernels.process_bodies import MODES, die_before_the_call, gather_all
from tests.nodes import spawn_ranks


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


def test_three_processes_gather_over_every_backing_with_and_without_kernels(node: str) -> None:
    for rank, found in enumerate(spawn_ranks(node, gather_all, 3, timeout_s=120)):
        for (backing, way, _), result in zip(MODES, found, strict=True):
            if node != EMULATED and way == "multicast" and isinstance(result[1], str):
                continue  # not every GPU has it, nor can ranks that share one
            assert result == (f"{backing}: asked for", True), f"rank {rank}, {way}"


@pytest.mark.parametrize("way", ["ce", "sm.push"])
def test_a_killed_rank_ends_the_others_within_seconds_and_leaves_nothing(
    way: str, tmp_path: Path, node: str
) -> None:
    before, known, clock = shared_memory(), children(), tmp_path / "clock"
    with pytest.raises(RankFailed) as failed:
        spawn_ranks(node, die_before_the_call, 3, way, clock, timeout_s=120)
    assert time.monotonic() - float(clock.read_text()) < 15  # the time limits are far above
    text = str(failed.value)
    assert text.startswith("rank 1 of 3 was killed by SIGKILL")
    for rank in (0, 2):
        assert f"then rank {rank} failed: {PeerLost.__module__}.PeerLost: rank {rank} waited in" in text
    assert shared_memory() == before
    assert children() == known
