"""Groups that fail: who is told what, what ends, what is freed. Ranks are processes of a node (threads)."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kernels.common import OperandError
from kernels.ipc.allgather import allgather
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
from smfree.cuda import DeviceArray
from smfree.cuda.errors import DeviceClosedError, DriverError, KernelFaultError
from smfree.emulator.node import Node
from smfree.ranks import PeerLost
from tests.kernels.group_kit import joined, local_group, random_bytes

GPUS = ["h100"] * 3


def own(group: Group, nbytes: int = 32) -> DeviceArray:
    """The shard of this process's rank."""
    member = group.members[0]
    return member.device.asarray(random_bytes(nbytes, member.rank))


@pytest.mark.parametrize("backing", [Backing.VMM, Backing.IPC])
@pytest.mark.parametrize("way", ["ce", "sm.push"])
def test_a_rank_that_raises_ends_its_own_work_and_tells_why(way: str, backing: Backing) -> None:
    """Rank 0 waits for rank 2, which never calls, and raises; nobody waits for its work in vain."""
    start, allocated = time.monotonic(), threading.Barrier(len(GPUS))

    def body(group: Group) -> Any:
        dst = group.symmetric(96, "weights")
        allocated.wait(timeout=20)
        if group.members[0].rank < 2:
            allgather(group, dst, own(group), way=way)
        if group.members[0].rank == 0:
            group.members[0].stream.query()
            raise ValueError("shard 7 is empty")
        group.wait(timeout_s=60)

    found = joined(GPUS, body, options=lambda rank: {"backing": backing})
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], PeerLost)
    assert "rank 0 failed: ValueError: shard 7 is empty" in str(found[1])
    assert "rank 1 waits for rank 2 at the" in str(found[1])
    assert time.monotonic() - start < 10


def test_memory_that_peers_may_use_is_not_freed_after_a_failure() -> None:
    """CUDA's rule: freeing exported memory that an importer has open is undefined. The twin is the end of a
    group that did not fail."""

    def allocated(fails: bool) -> list[int]:
        node, joined_all = Node(GPUS), threading.Barrier(len(GPUS))

        def body(group: Group) -> None:
            joined_all.wait(timeout=20)
            calls = group.members[0].device.calls
            driver = calls.driver
            calls.driver = Mock(wraps=driver)
            if fails and group.members[0].rank == 0:
                raise ValueError
            if fails:
                with pytest.raises(PeerLost):
                    while True:
                        group.wait(timeout_s=20)
            made = group.pool.check(group.pool.allocate(0, "x")).views[group.members[0].rank]
            frees.append((made[group.members[0].rank].ptr, calls.driver.cuMemFree))

        frees: list[tuple[int, Mock]] = []
        joined(GPUS, body, node=node, options=lambda rank: {"backing": Backing.IPC})
        return [sum(call.args == (ptr,) for call in free.call_args_list) for ptr, free in frees]

    assert allocated(fails=False) == [1, 1, 1]
    assert allocated(fails=True) == [0, 0]


def test_a_device_that_fails_because_a_peer_died_is_told_as_that_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The news of the death comes after what it does: a mapping is gone, say. The twin without a death is
    the fault itself."""

    def body(group: Group) -> Any:
        member = group.members[0]
        if member.rank != 0:
            time.sleep(0.2)
            raise RuntimeError("the end of this rank")
        fault = KernelFaultError("cuStreamQuery", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        monkeypatch.setattr(member.stream, "query", Mock(side_effect=fault))
        monkeypatch.setattr(member.control_stream, "query", Mock(side_effect=fault))
        with pytest.raises(PeerLost) as lost:
            group.wait(timeout_s=20)
        assert lost.value.__cause__ is fault
        return lost.value

    lost, _ = joined(GPUS[:2], body)
    assert isinstance(lost, PeerLost) and lost.ranks == (1,)
    assert "rank 1 failed: RuntimeError: the end of this rank" in str(lost)
    assert "rank 0's device has failed: cuStreamQuery() returned CUDA_ERROR_ILLEGAL_ADDRESS" in str(lost)


def test_a_collective_that_is_queued_in_part_has_failed_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(group: Group) -> Any:
        member, dst = group.members[0], group.symmetric(96, "weights")
        if member.rank == 1:
            refusal = DriverError("cuMemcpyBatchAsync", 2, "CUDA_ERROR_OUT_OF_MEMORY")
            monkeypatch.setattr(member.device, "copy_batch", Mock(side_effect=refusal))
            with pytest.raises(DriverError):
                allgather(group, dst, own(group), way="ce")
            with pytest.raises(GroupError, match=r"has failed, its ranks are out of step.*OUT_OF_MEMORY"):
                allgather(group, dst, own(group), way="ce")
            return None
        allgather(group, dst, own(group), way="ce")
        with pytest.raises(PeerLost) as lost:
            group.wait(timeout_s=60)
        return lost.value

    one, none, other = joined(GPUS, body)
    assert none is None
    for lost in (one, other):
        assert "rank 1 failed: DriverError: cuMemcpyBatchAsync() returned CUDA_ERROR_OUT_OF_MEMORY" in str(
            lost
        )


def test_a_source_in_a_peers_dst_is_refused_before_anything_is_queued() -> None:
    def body(group: Group) -> bool:
        member, dst = group.members[0], group.symmetric(96, "weights")
        peer = (member.rank + 1) % 3
        theirs = dst.peer(member.rank, peer).bytes_view(0, 32)
        with pytest.raises(OperandError, match=r"own part of dst or share nothing with dst \(they share 32"):
            allgather(group, dst, theirs, way="ce")
        allgather(group, dst, own(group), way="ce")
        group.wait(timeout_s=20)
        wanted = np.concatenate([random_bytes(32, rank) for rank in range(3)])
        return bool((dst.array(member.rank).numpy() == wanted).all())

    assert joined(GPUS, body) == [True] * 3


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_a_time_limit_is_a_number_of_seconds(timeout_s: float) -> None:
    with local_group(2) as group:
        with pytest.raises(
            GroupError, match=rf"timeout_s is 0 or more seconds \(got {timeout_s}\); None waits"
        ):
            group.wait(timeout_s)
        for fine in (0, 1e300, float("inf"), None):
            group.wait(fine)


def test_a_stream_of_a_closed_group_is_refused_here_not_by_the_driver() -> None:
    with local_group(2) as group:
        stream = group.members[0].stream
        stream.synchronize()
        group.close()
        with pytest.raises(
            DeviceClosedError, match=r"a stream of emu:h100x2:0 was destroyed; make a new one"
        ):
            stream.synchronize()
