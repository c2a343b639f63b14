"""Lanes, and the workspaces on them: how they begin and end, what runs at the same time, who is told what."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kernels.common import OperandError
from kernels.ipc import barrier
from kernels.ipc.allgather import allgather
from kernels.ipc.errors import GroupError, PoolError
from kernels.ipc.group import Group
from kernels.ipc.lane import Lane
from kernels.ipc.push import PushConfig
from kernels.ipc.symmetric import Symmetric
from kernels.ipc.wait import CollectiveTimeout
from kernels.reduce.allreduce import allreduce
from kernels.reduce.elements import Element
from kernels.reduce.order import expected
from kernels.reduce.ring import RingConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device, DriverError
from tests.kernels.group_kit import joined, local_group, random_bytes
from tests.nodes import is_emulated

GPUS = ["h100"] * 3
COUNT = 150
RING = RingConfig(ctas=2, threads=64, unroll=1, piece_bytes=128)


def workspace(group: Group, label: str = "workspace", **options: Any) -> Workspace:
    """A small one."""
    return Workspace(
        group, label=label, **{"scratch_bytes": 1024, "oneshot_bytes": 256, "channels": 2, **options}
    )


def terms(rank: int, seed: int = 0) -> Any:
    """The bits that a rank gives: uint32[COUNT]."""
    return np.random.default_rng([rank, seed]).standard_normal(COUNT, np.float32).view(np.uint32)


def reduce(space: Workspace, dst: Symmetric, seed: int = 0) -> None:
    """Queue an AllReduce in place."""
    for member in space.group.members:
        own = dst.array(member.rank).view(np.uint32)
        own.copy_from(terms(member.rank, seed), stream=space.stream(member.rank))
    allreduce(space, dst, dtype="float32", way="ring.sm", config=RING)


def is_sum(group: Group, dst: Symmetric, seed: int = 0) -> bool:
    """Whether every local rank has the sum."""
    wanted = expected("ring.sm", [terms(rank, seed) for rank in range(group.world_size)], Element.F32)
    return all((dst.array(member.rank).numpy().view(np.uint32) == wanted).all() for member in group.members)


# --- the end -----------------------------------------------------------------------------------------


def test_a_closed_workspace_is_refused_and_its_memory_is_free(node: str) -> None:
    with local_group(2, node) as group:
        dst, free = group.symmetric(4 * COUNT, "dst"), group.pool.free_bytes
        space = workspace(group, own_streams=True)
        reduce(space, dst)
        space.close()
        space.close()
        assert is_sum(group, dst) and group.pool.free_bytes == free and group.lanes == [group.lane]
        words = r"Lane\('workspace', 2 CTAs\) was closed; open another"
        for use in (lambda: space.stream(0), lambda: space.control(group.member(0))):
            with pytest.raises(GroupError, match=words):
                use()
        with pytest.raises(GroupError, match="'workspace' was closed; make a new Workspace"):
            allreduce(space, dst, dtype="float32", way="ring.sm")
        with pytest.raises(PoolError, match=r"'scratch of workspace' .* was freed"):
            space.scratch.pointers(0)


def test_a_workspace_ends_with_its_group(node: str) -> None:
    with local_group(2, node) as group:
        dst, space = group.symmetric(4 * COUNT, "dst"), workspace(group, own_streams=True)
        group.close()
        with pytest.raises(GroupError, match="the group was closed; make a new one"):
            allreduce(space, dst, dtype="float32", way="ring.sm")
        space.close()
    with pytest.raises(GroupError, match="the group was closed"):
        workspace(group)


def test_lanes_are_closed_once_and_by_their_group(node: str) -> None:
    with local_group(2, node) as group:
        lane = group.open_lane(3, "mine", own_streams=False)
        group.close_lane(lane)
        for wrong in (lane, group.lane, Lane("another's", group.layout, 8, group.lane.signals)):
            with pytest.raises(GroupError, match=rf"Lane\('{wrong.label}', .* close each lane once"):
                group.close_lane(wrong)
        barrier.stream_barrier(group)
        group.wait(timeout_s=20)


def test_a_workspace_works_on_memory_of_its_own_group(node: str) -> None:
    with local_group(2, node) as group, local_group(2, node) as other, workspace(group) as space:
        dst = other.symmetric(4 * COUNT, "dst")
        with pytest.raises(OperandError, match=r"dst must be symmetric memory of the group \(got ano"):
            allreduce(space, dst, dtype="float32", way="ring.sm")


def test_workspaces_leave_nothing_behind(node: str) -> None:
    """By hand: 300 of them."""
    with local_group(2, node) as group:
        left: list[Any] = []
        for i in range(6):
            with workspace(group, f"workspace {i}", own_streams=i % 2 == 0):
                barrier.stream_barrier(group)
            devices = {member.device.spec: member.device for member in group.members}
            left.append([device.calls("cuMemGetInfo") for device in devices.values()])
            if is_emulated(node):
                left[-1].append(len(group.members[0].device.driver.process.objects))
        assert all(found == left[0] for found in left)


# --- the beginning -----------------------------------------------------------------------------------


def state(group: Group) -> tuple[Any, ...]:
    """What opening a lane makes."""
    device = group.members[0].device
    objects = len(device.driver.process.objects)
    return group.pool.free_bytes, objects, device.emulator.memory.allocated_bytes, len(group.lanes)


@pytest.mark.parametrize("refused", ["empty", "pinned", "stream"])
def test_a_rank_that_cannot_open_is_told_to_the_others_and_all_is_given_back(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: Group) -> str:
        rank, before = group.members[0].rank, state(group)
        if rank == 1:
            error = DriverError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
            monkeypatch.setattr(
                group.members[0].device, refused, lambda *_, **__: (_ for _ in ()).throw(error)
            )
        with pytest.raises(DriverError if rank == 1 else GroupError) as caught:
            workspace(group, own_streams=True)
        group.barrier()
        assert state(group) == before
        monkeypatch.undo()
        group.barrier()
        dst = group.symmetric(4 * COUNT, "dst")
        with workspace(group, own_streams=True) as space:
            reduce(space, dst)
            group.wait(timeout_s=20)
            assert is_sum(group, dst)
        return str(caught.value)

    one, two, three = joined(GPUS, body)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in two
    for text in (one, three):
        assert text.startswith("opening of workspace failed on rank 1: DriverError: cuMemAlloc")


def test_what_one_device_lacks_ends_all_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(3) as group:
        before = state(group)
        error = DriverError("cuMemHostAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        monkeypatch.setattr(Device, "pinned", Mock(side_effect=error))
        with pytest.raises(DriverError):
            workspace(group, own_streams=True)
        assert state(group) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda rank: {"channels": 2 + rank}, "one-shots of 256, 2 channels"),
        (lambda rank: {"oneshot_bytes": 256 - 128 * rank}, "one-shots of 256, 2 channels"),
        (lambda rank: {"label": f"of {rank}"}, "2 channels for 'of 0'"),
    ],
    ids=["channels", "one-shots", "label"],
)
def test_ranks_whose_workspaces_differ_are_told(options: Any, words: str) -> None:
    def body(group: Group) -> str:
        free = group.pool.free_bytes
        with pytest.raises(GroupError, match="making of a workspace: every rank makes") as caught:
            workspace(group, **options(group.members[0].rank))
        assert group.pool.free_bytes == free
        return str(caught.value)

    one, other = joined(GPUS[:2], body)
    assert one == other and words in one


def test_a_pool_without_room_takes_nothing(node: str) -> None:
    with local_group(2, node, pool_bytes=1 << 14) as group:
        free = group.pool.free_bytes
        with pytest.raises(PoolError, match="in one piece for 'signals of workspace'"):
            workspace(group, scratch_bytes=free - 1024 - 256, channels=64)
        assert group.pool.free_bytes == free


def test_a_lane_begins_behind_all_work_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was freed, and where its signals may lie now, is used by nobody then. Rank 0's stream waits for a
    word that rank 1 writes when both are opening a lane."""
    idle: list[bool] = []
    opening = Lane.open

    def watched(lane: Lane, members: Any, **options: Any) -> None:
        idle.extend(member.stream.query() for member in members)
        opening(lane, members, **options)

    def body(group: Group) -> None:
        (member,), word = group.members, group.symmetric(4, "word")
        word.array(member.rank).fill(0, stream=member.stream)
        group.wait(timeout_s=20)
        group.barrier()
        write = threading.Timer(0.2, member.stream.write_value, [word.peer(member.rank, 0).ptr, 1])
        if member.rank == 0:
            member.stream.wait_value(word.array(0).ptr, 1)
        else:
            write.start()
        with workspace(group, own_streams=True):
            pass

    monkeypatch.setattr(Lane, "open", watched)
    assert joined(GPUS[:2], body) == [None, None]
    assert idle == [True] * 4


# --- at the same time --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["timed", "producer-ahead", "random"])
def test_two_workspaces_and_the_group_work_at_once(schedule: str, node: str) -> None:
    with (
        local_group(2, node, schedule=schedule, seed=3) as group,
        workspace(group, "one", own_streams=True) as one,
        workspace(group, "two", own_streams=True) as two,
    ):
        gathered = group.symmetric(200, "gathered")
        sums = {space: group.symmetric(4 * COUNT, "sums") for space in (one, two)}
        shards = [member.device.asarray(random_bytes(100, member.rank)) for member in group.members]
        for turn in range(2):
            for seed, space in enumerate(sums):
                reduce(space, sums[space], seed + 2 * turn)
            allgather(group, gathered, shards, way="sm.push", config=PushConfig(ctas=2, threads=32))
        group.wait(timeout_s=60)
        for seed, space in enumerate(sums):
            assert is_sum(group, sums[space], seed + 2)
        for rank in range(2):
            wanted = np.concatenate([random_bytes(100, owner) for owner in range(2)])
            assert (gathered.array(rank).numpy() == wanted).all()


def queue_alone(group: Group, *places: tuple[int, Lane]) -> None:
    """The barrier of one rank only, each on its lane. All are loaded first: that may wait for a device."""
    sources = [barrier.source(lane.layout) for _, lane in places]
    loaded = [
        group.member(rank).device.compile(source).kernel()
        for (rank, _), source in zip(places, sources, strict=True)
    ]
    for (rank, lane), kernel in zip(places, loaded, strict=True):
        kernel.launch(1, barrier.THREADS, (lane.control(rank), np.uint32(rank)), stream=lane.stream(rank))


def test_a_stuck_lane_holds_up_no_other_and_is_named(node: str) -> None:
    """Lane "one" waits for rank 1 for ever; "two" and the group go on. At the end only "one" is told of."""
    with local_group(2, node) as group:
        one, two = (workspace(group, label, own_streams=True) for label in ("one", "two"))
        dst = group.symmetric(4 * COUNT, "dst")
        reduce(two, dst, seed=1)  # all that goes on is loaded before anything is stuck
        barrier.stream_barrier(group)
        queue_alone(group, (0, one.lane))
        reduce(two, dst)
        barrier.stream_barrier(group)
        goes_on, deadline = [*two.lane.streams, *group.lane.streams], time.monotonic() + 20
        while not all(stream.query() for stream in goes_on):
            assert time.monotonic() < deadline
        assert not one.stream(0).query()
        own = [dst.array(rank).numpy(stream=two.stream(rank)).view(np.uint32) for rank in range(2)]
        assert all((bits == expected("ring.sm", [terms(0), terms(1)], Element.F32)).all() for bits in own)
        with pytest.raises(CollectiveTimeout) as late:
            group.wait(timeout_s=0.1)
        assert [str(each) for each in late.value.waits] == [
            "rank 0 waits for rank 1 at the entry barrier: CTA 0 in 'one', epoch 1 wanted, 0 seen"
        ]
        assert "; rank 1 waits for nobody: not called yet, late, or failed. Look at" in str(late.value)


def test_an_abort_reaches_every_lane_and_their_records_do_not_mix(node: str) -> None:
    with local_group(3, node) as group:
        spaces = [workspace(group, label, own_streams=True) for label in ("one", "two")]
        queue_alone(group, (0, spaces[0].lane), (1, spaces[1].lane), (2, group.lane))
        with pytest.raises(CollectiveTimeout) as late:
            group.wait(timeout_s=0.1)
        assert sorted(map(str, late.value.waits)) == [
            f"rank {rank} waits for rank {peer} at the entry barrier: CTA 0{where}, epoch 1 wanted, 0 seen"
            for rank, where in enumerate([" in 'one'", " in 'two'", ""])
            for peer in range(3)
            if peer != rank
        ]
        assert "; all wait for each other: their calls differ, or need more time. Look" in str(late.value)
        assert all(stream.query() for stream in group.streams)
        dst = group.symmetric  # of a group that has failed nothing works, and its workspaces end quietly
        for use in (lambda: dst(8, "x"), spaces[0].check, lambda: workspace(group, "three")):
            with pytest.raises(GroupError, match="the group has failed, its ranks are out of step"):
                use()
        for space in spaces:
            space.close()
