"""The AllGather kernels: every way, schedule, number of ranks; any size and alignment; call after call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from kernels.ipc import push
from kernels.ipc.allgather import allgather, ways
from kernels.ipc.group import Group
from kernels.ipc.symmetric import Symmetric
from smfree.cuda import Device, DeviceArray
from smfree.measure.collective import Lineup
from smfree.measure.queue import Blocker
from tests.kernels.group_kit import EMULATED, need
from tests.kernels.ipc_kit import CONFIGS, epochs, filled, opened_group, set_epochs, shard_bytes
from tests.kernels.pairwise import SCHEDULES, rows

TILE_BYTES = 256
ROUND_TRIP_S = 826e-9
"""Of a load from a peer, over the links of an H100 (smfree/emulator/profiles/h100.toml)."""
SIZES = {
    "1": lambda rank: 1,
    "17": lambda rank: 17,
    "tile": lambda rank: TILE_BYTES,
    "several-passes": lambda rank: 9 * TILE_BYTES + 5,
    "ragged": lambda rank: (700, 0, 33, 1025, 3, 128, 0, 511)[rank],
    "one-rank-only": lambda rank: 1500 if rank == 1 else 0,
}
AXES = {
    "way": tuple(CONFIGS),
    "schedule": SCHEDULES,
    "size": tuple(SIZES),
    "src_shift": ("in place", 0, 1, 2, 4),
    "dst_shift": (0, 1, 100),
    "ranks": (2, 3, 4),
}
EIGHT = [
    dict(zip(AXES, values, strict=True))
    for values in (
        ("sm.pull", ("random", 1), "ragged", 2, 100, 8),
        ("sm.push", ("timed", 0), "several-passes", "in place", 1, 8),
        ("tma.pull", ("async-latest", 0), "ragged", "in place", 0, 8),
        ("tma.push", ("min-pc", 0), "several-passes", 1, 0, 8),
        ("multicast", ("producer-ahead", 0), "ragged", 4, 1, 8),
        ("sm.push", ("random", 2), "one-rank-only", 0, 0, 8),
    )
]
"""A whole node: few rows, for eight devices take their time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        found = rows(AXES, metafunc.config) + EIGHT
        metafunc.parametrize("row", found, ids=["-".join(map(_name, row.values())) for row in found])


def _name(value: object) -> str:
    return "".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "-")


def place_shards(
    group: Group, dst: Symmetric, counts: Sequence[int], shift: int | str, call: int = 0
) -> list[DeviceArray] | None:
    """The shards of all ranks, in their places in dst (None) or ``shift`` bytes into arrays of their own."""
    offsets = [0, *accumulate(counts)]
    shards = []
    for member in group.members:
        data = shard_bytes(member.rank, counts[member.rank], call)
        if shift == "in place":
            if len(data):
                place = dst.array(member.rank).bytes_view(offsets[member.rank], len(data))
                place.copy_from(data, stream=member.stream)
        else:
            shards.append(filled(group, member.rank, data, int(shift)))
    return None if shift == "in place" else shards


def wanted(counts: Sequence[int], call: int = 0) -> Any:
    """What every dst holds afterwards."""
    return np.concatenate([shard_bytes(rank, count, call) for rank, count in enumerate(counts)])


def test_every_rank_has_every_shard_and_nothing_else_is_touched(row: dict[str, Any], node: str) -> None:
    way, guard = row["way"], 64
    counts = [SIZES[row["size"]](rank) for rank in range(row["ranks"])]
    with opened_group(row["ranks"], *row["schedule"], node=node) as group:
        need(way, group, node)
        whole = group.symmetric(sum(counts) + row["dst_shift"] + guard, "dst")
        for member in group.members:
            whole.array(member.rank).fill(0xA5, stream=member.stream)
        dst = whole.bytes_view(row["dst_shift"], sum(counts))
        src = place_shards(group, dst, counts, row["src_shift"])
        allgather(group, dst, src, way=way, counts=counts, config=CONFIGS[way])
        group.wait(60)
        for member in group.members:
            got = whole.array(member.rank).numpy()
            begin, end = row["dst_shift"], row["dst_shift"] + sum(counts)
            np.testing.assert_array_equal(got[begin:end], wanted(counts))
            assert (got[:begin] == 0xA5).all() and (got[end:] == 0xA5).all()
            assert set(epochs(group, member.rank)) == {0, 2}


def test_what_python_frees_between_two_launches_is_freed_after_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuMemFree waits for the device: for a kernel that waits for one which is not launched yet."""
    counts = [100, 100]
    with opened_group(2) as group:
        dst = group.symmetric(200, "dst")
        garbage = [member.device.empty(64) for member in group.members]
        before = [device_bytes(member.device) for member in group.members]
        real = push.launch

        def launch(*args: Any) -> Any:
            queued = real(*args)
            garbage.clear()
            return queued

        monkeypatch.setattr(push, "launch", launch)
        place_shards(group, dst, counts, "in place")
        allgather(group, dst, way="sm.push", config=CONFIGS["sm.push"])
        group.wait(60)
        for member, held in zip(group.members, before, strict=True):
            np.testing.assert_array_equal(dst.array(member.rank).numpy(), wanted(counts))
            assert device_bytes(member.device) > held


def device_bytes(device: Device) -> int:
    """Free ones."""
    return int(device.calls("cuMemGetInfo")[0])


@pytest.mark.parametrize("way", ["tma.pull", "tma.push"])
@pytest.mark.parametrize("num_stages", [1, 3, 8])
def test_a_ring_of_any_depth_wraps(way: str, num_stages: int, node: str) -> None:
    counts = [2000, 1100, 0]
    config = replace(CONFIGS[way], ctas=1, tile_bytes=80, num_stages=num_stages)
    with opened_group(3, "random", num_stages, node=node) as group:
        need(way, group, node)
        dst = group.symmetric(sum(counts), "dst")
        allgather(group, dst, place_shards(group, dst, counts, 0), way=way, counts=counts, config=config)
        group.wait(60)
        for member in group.members:
            np.testing.assert_array_equal(dst.array(member.rank).numpy(), wanted(counts))


@pytest.mark.parametrize("way", [way for way in CONFIGS if way != "multicast"])
@pytest.mark.parametrize("shift", ["in place", 0, 3])
def test_one_rank_has_only_its_own_shard_to_place(way: str, shift: int | str, node: str) -> None:
    """The kernels themselves: ``allgather`` launches none for one rank."""
    from kernels.ipc.allgather import _launch
    from kernels.ipc.shards import make_shards

    counts = [1000]
    with opened_group(1, node=node) as group:
        need(way, group, node)
        dst = group.symmetric(1000, "dst")
        src = place_shards(group, dst, counts, shift)
        _launch(group, make_shards(group, dst, src, counts), way, CONFIGS[way], way)
        group.wait(60)
        np.testing.assert_array_equal(dst.array(0).numpy(), wanted(counts))
        assert epochs(group, 0)[:3] == [2, 2, 0]


@pytest.mark.parametrize(
    "schedule", [("timed", 0), ("min-pc", 0), ("async-latest", 0), ("random", 1)], ids=_name
)
def test_calls_in_a_row_of_other_sizes_grids_and_ways_share_the_pads(
    schedule: tuple[str, int], node: str
) -> None:
    """One dst, no wait in between: the exit barrier of a call and the entry barrier of the next keep them
    apart, across the wrap of the epochs (D23)."""
    calls = [("sm.push", 1, 48), ("sm.pull", 3, 700), ("tma.push", 2, 260), ("tma.pull", 3, 33),
             ("multicast", 1, 500), ("sm.push", 3, 700)]  # fmt: skip
    with opened_group(3, *schedule, node=node) as group:
        if node != EMULATED and ways(group)["multicast"] is not None:
            calls = [call for call in calls if call[0] != "multicast"]
        set_epochs(group, -3)
        dst = group.symmetric(3 * 700, "dst")
        kept = {}
        for call, (way, ctas, nbytes) in enumerate(calls):
            counts = [nbytes, nbytes + call, nbytes // 2]
            part = dst.bytes_view(0, sum(counts)) if sum(counts) <= dst.nbytes else None
            assert part is not None
            src = place_shards(group, part, counts, 0, call)
            allgather(group, part, src, way=way, counts=counts, config=replace(CONFIGS[way], ctas=ctas))
            for member in group.members:
                kept[call, member.rank] = member.device.empty(part.nbytes, np.uint8)
                kept[call, member.rank].copy_from_device(part.array(member.rank), stream=member.stream)
        group.wait(60)
        for (call, rank), array in kept.items():
            nbytes = calls[call][2]
            want = wanted([nbytes, nbytes + call, nbytes // 2], call)
            np.testing.assert_array_equal(array.numpy(), want, err_msg=f"call {call}, rank {rank}")
        barriers = [2 * sum(ctas > slot for _, ctas, _ in calls) for slot in range(4)]
        assert epochs(group, 0)[:4] == [(count - 3) % 2**32 for count in barriers]


def test_two_groups_on_the_same_devices_do_not_meet(node: str) -> None:
    with opened_group(2, "random", 1, node=node) as one:
        devices = [member.device for member in one.members]
        shared = len(set(devices)) < 2
        with Group.local(devices, pool_bytes=1 << 16, slots=4, several_per_gpu=shared) as other:
            counts, filled_dst = [300, 500], {}
            for call, group in enumerate((one, other)):
                dst = filled_dst[group] = group.symmetric(800, "dst")
                src = place_shards(group, dst, counts, 0, call)
                allgather(group, dst, src, way="sm.push", counts=counts, config=CONFIGS["sm.push"])
            for call, (group, dst) in enumerate(filled_dst.items()):
                group.wait(60)
                for rank in range(2):
                    np.testing.assert_array_equal(dst.array(rank).numpy(), wanted(counts, call))


@pytest.mark.parametrize("way", CONFIGS)
def test_a_captured_graph_is_replayed_with_new_data(way: str, node: str) -> None:
    """The epochs go on in device memory: nothing in the graph knows how often it has run (D23). The peers'
    pointers are those of symmetric memory, known before the capture (D27)."""
    counts = [100, 700]
    with opened_group(2, node=node) as group:
        need(way, group, node)
        dst = group.symmetric(sum(counts), "dst")
        allgather(
            group, dst, place_shards(group, dst, counts, 0), way=way, counts=counts, config=CONFIGS[way]
        )
        group.wait(60)  # compiled and loaded
        src = [filled(group, rank, shard_bytes(rank, count)) for rank, count in enumerate(counts)]
        with ExitStack() as stack:
            graphs = [stack.enter_context(member.stream.capture()) for member in group.members]
            allgather(group, dst, src, way=way, counts=counts, config=CONFIGS[way])
        for replay in (1, 2):
            for member, array in zip(group.members, src, strict=True):
                array.copy_from(shard_bytes(member.rank, array.nbytes, replay), stream=member.stream)
            for graph in graphs:
                graph.launch()
            group.wait(60)
            for member in group.members:
                np.testing.assert_array_equal(dst.array(member.rank).numpy(), wanted(counts, replay))
        assert epochs(group, 1)[0] == 2 * (1 + 2)


@pytest.mark.parametrize("way", ["sm.pull", "tma.pull"])
def test_a_pull_of_small_shards_waits_one_round_trip_however_many_peers(way: str) -> None:
    """What is asked of all peers is under way together."""

    def seconds(ranks: int) -> float:
        with opened_group(ranks) as group:
            dst = group.symmetric(ranks * 1024, "dst")
            place_shards(group, dst, [1024] * ranks, "in place")
            lineup = Lineup(group.members, Blocker(group.members[0].device), lambda: group.wait(60))
            launch = partial(allgather, group, dst, way=way)
            return [lineup.run(lambda _: launch(), 1).seconds for _ in range(2)][-1]

    two, four = seconds(2), seconds(4)
    assert two < four < two + ROUND_TRIP_S
