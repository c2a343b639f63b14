"""Groups of real processes on the GPUs that --device names, which they may share: bytes, and a death."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kernels.ipc.allgather import WAYS
from smfree.ranks import PeerLost, RankFailed
from tests.kernels.group_kit import EMULATED
from tests.kernels.node_bodies import BACKINGS, die_while_others_gather, gather_each_way
from tests.nodes import spawn_ranks


def test_three_processes_gather_each_way_over_every_backing(node: str) -> None:
    """A way that is not open is an error, save multicast: it needs memory of VMM, and GPUs of their own."""
    each = [(backing.name, way) for backing in BACKINGS for way in WAYS]
    for rank, found in enumerate(spawn_ranks(node, gather_each_way, 3, timeout_s=120)):
        assert list(found) == each
        wrong = {place: said for place, said in found.items() if said is not True}
        assert str(wrong.pop(("IPC", "multicast"))).startswith("the slabs are plain allocations")
        if node != EMULATED and isinstance(wrong.get(("VMM", "multicast")), str):
            del wrong["VMM", "multicast"]
        assert not wrong, f"rank {rank}"


@pytest.mark.parametrize("way", ["ce", "sm.push"])
def test_a_killed_process_ends_the_others_within_seconds(way: str, node: str, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    with pytest.raises(RankFailed) as failed:
        spawn_ranks(node, die_while_others_gather, 3, way, clock, timeout_s=120)
    assert time.monotonic() - float(clock.read_text()) < 15  # the time limits are far above
    text = str(failed.value)
    assert text.startswith("rank 1 of 3 was killed by SIGKILL")
    for rank in (0, 2):
        assert f"then rank {rank} failed: {PeerLost.__module__}.PeerLost: rank {rank} waited in" in text
