"""Groups: which ranks fit together, what is left when they part, and what the host learns of a stuck rank."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kernels.common import ConfigError
from kernels.ipc import barrier, slabs
from kernels.ipc.allgather import WAYS, allgather, ways
from kernels.ipc.copy_engine import CopyEngineConfig
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.push import PushConfig
from kernels.ipc.slabs import Backing
from kernels.ipc.wait import CollectiveTimeout
from smfree.cuda import (
    CudaSource,
    Device,
    DeviceArray,
    DriverError,
    IpcError,
    KernelFaultError,
    Path,
    PeerError,
)
from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from smfree.ranks import PeerLost
from tests.kernels.group_kit import POOL_BYTES, joined, local_group, random_bytes

# --- who fits together -------------------------------------------------------------------------------


def test_a_group_has_devices() -> None:
    with pytest.raises(GroupError, match="a group has at least one rank"):
        Group.local([])
    with pytest.raises(GroupError, match=r"a rank has a Device \(got 'emu:h100'\)"):
        Group.local(["emu:h100"])  # type: ignore[list-item]


def test_devices_are_of_one_machine() -> None:
    words = r"are not on one machine; open them together"
    with (
        Device.open("emu:h100") as one,
        Device.open("emu:h100x2:1") as other,
        pytest.raises(PeerError, match=words),
    ):
        Group.local([one, other])


def test_d11_ranks_are_told_apart_by_uuid() -> None:
    """D11: two ranks with the same GPU are refused, whatever number it has; with the flag they work."""
    with Device.open("emu:h100") as device:
        with pytest.raises(GroupError, match=f"ranks 0 and 1 both have {device.uuid}"):
            Group.local([device, device])
        with Group.local([device, device], several_per_gpu=True, pool_bytes=POOL_BYTES) as group:
            assert group.path is Path.LOCAL
            assert group.multicast_reason == "the slabs are plain allocations (several ranks share a GPU)"
            buffer = group.symmetric(6, "buffer")
            sources = [device.asarray(np.full(3, rank, np.uint8)) for rank in (0, 1)]
            allgather(group, buffer, sources, way="ce")
            group.wait()
            for rank in (0, 1):
                assert buffer.array(rank).numpy().tolist() == [0, 0, 0, 1, 1, 1]


def test_processes_on_one_gpu_need_the_flag() -> None:
    def body(group: Group) -> str:
        return f"{group.path}; {group.multicast_reason}"

    refused = joined(["h100", "h100"], body, node=Node(["h100"]))
    assert [type(error) for error in refused] == [GroupError, GroupError]
    assert "ranks 0 and 1 both have" in str(refused[0])
    found = joined(
        ["h100", "h100"], body, node=Node(["h100"]), options=lambda rank: {"several_per_gpu": True}
    )
    assert found == ["inside the device; several ranks share a GPU"] * 2


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        (["h100", "a100"], lambda rank: {}, "architecture (rank 0: sm_90a, rank 1: sm_80)"),
        (["h100"] * 2, lambda rank: {"pool_bytes": 4096 << rank}, "pool_bytes (rank 0: 4096, rank 1: 8192)"),
        (["h100"] * 2, lambda rank: {"slots": 8 + rank}, "slots (rank 0: 8, rank 1: 9)"),
    ],
    ids=["architecture", "pool", "slots"],
)
def test_ranks_that_differ_are_told_on_every_rank(
    gpus: list[str], options: Callable[[int], dict[str, Any]], words: str
) -> None:
    for error in joined(gpus, lambda group: group, options=options):
        assert isinstance(error, GroupError) and f"all ranks have the same {words}" in str(error)


def test_a_rank_without_room_is_named_to_the_others() -> None:
    node = Node(["h100", "h100"])
    full = Device(Driver(node), 1, spec="emu:h100:1", is_emulated=True)
    taken = full.empty(full.capabilities.memory_bytes - (1 << 20))
    one, other = joined(
        ["h100", "h100"], lambda group: group, node=node, options=lambda rank: {"backing": Backing.IPC}
    )
    assert isinstance(one, GroupError) and isinstance(other, DriverError)
    assert "export of CUDA IPC handles failed on rank 1: DriverError: cuMemAlloc" in str(one)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(other)
    taken.free()


# --- reaching the peers ------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", [None, Backing.VMM, Backing.IPC])
def test_processes_know_their_link(backing: Backing | None) -> None:
    def body(group: Group) -> tuple[str, Path, str | None, bool]:
        group.symmetric(16, "buffer")
        return group.pool.backing, group.path, group.direct_reason, group.pool.open_seconds > 0

    for found in joined(["h100"] * 3, body, options=lambda rank: {"backing": backing}):
        how = "asked for" if backing else "the first choice"
        assert found == (f"{backing or Backing.VMM}: {how}", Path.NVLINK, None, True)


def test_processes_multicast_where_all_gpus_can() -> None:
    def body(group: Group) -> tuple[bool, str | None]:
        address = group.symmetric(16, "buffer").multicast(group.members[0].rank)
        return address is not None, group.multicast_reason

    assert joined(["h100"] * 2, body) == [(True, None)] * 2
    for has, reason in joined(["a100"] * 2, body):
        assert not has and reason == (
            "rank 0's GPU has no multicast (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)"
        )


def test_d05_handles_that_no_driver_opens_leave_the_way_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D05: the peers can reach each other, yet opening fails with 101: all ranks go ``staged``."""

    def refuse(device: Device, handle: object) -> Any:
        raise IpcError("cuIpcOpenMemHandle returned CUDA_ERROR_INVALID_DEVICE (101)")

    monkeypatch.setattr(slabs, "vmm_unavailable", lambda device: "no file descriptors here")
    monkeypatch.setattr(Device, "open_ipc", refuse)

    def body(group: Group) -> tuple[str, dict[str, str | None]]:
        rank = group.members[0].rank
        buffer = group.symmetric(64, "buffer")
        with pytest.raises(ConfigError, match=r"way 'ce' is not open to this group: .*; use one of staged"):
            allgather(group, buffer, way="ce")
        with pytest.raises(GroupError, match=r"no rank can use its peers' memory .*; use way='staged'"):
            buffer.pointers(rank)
        assert buffer.array(rank).nbytes == 64
        return str(group.direct_reason), ways(group)

    for reason, open_ways in joined(["h100"] * 2, body):
        assert "CUDA_ERROR_INVALID_DEVICE (101)" in reason
        assert [way for way in WAYS if open_ways[way] is None] == ["staged"]


# --- the end -----------------------------------------------------------------------------------------


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("backing", [Backing.PEER, Backing.VMM])
def test_groups_leave_nothing_behind_in_a_process(backing: Backing) -> None:
    devices = Device.open_all("emu:h100x3")
    process, before = devices[0].driver.process, None
    for _ in range(5):
        with Group.local(devices, pool_bytes=POOL_BYTES, backing=backing) as group:
            buffer = group.symmetric(99, "buffer")
            for way in ("ce", "staged"):
                for member in group.members:
                    buffer.array(member.rank).fill(1, stream=member.stream)
                allgather(group, buffer, way=way)
            group.wait()
        del group, buffer, member
        left = (descriptors(), len(process.objects), [device.calls("cuMemGetInfo") for device in devices])
        assert before in (None, left)
        before = left
    for device in devices:
        device.close()


@pytest.mark.parametrize("backing", [Backing.IPC, Backing.VMM])
def test_groups_leave_nothing_behind_between_processes(backing: Backing) -> None:
    node = Node(["h100"] * 2)

    def left() -> tuple[int, list[int]]:
        return descriptors(), [device.memory.allocated_bytes for device in node.devices]

    def body(group: Group) -> None:
        group.symmetric(99, "buffer")

    before = left()
    for _ in range(3):
        assert joined(["h100"] * 2, body, node=node, options=lambda rank: {"backing": backing}) == [None] * 2
        assert left() == before


def test_d08_peers_close_before_the_owner_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """D08, and CUDA's rule: freeing exported memory that an importer still has open is undefined."""
    order: list[str] = []
    for name in ("cuIpcOpenMemHandle", "cuIpcCloseMemHandle"):
        call = getattr(Driver, name)
        monkeypatch.setattr(Driver, name, lambda *args, c=call, n=name: (c(*args), order.append(n))[0])
    free = DeviceArray.free

    def freed(array: DeviceArray) -> None:
        if array.nbytes > POOL_BYTES and array.allocation.owner is None:
            order.append("free of a slab")
        free(array)

    monkeypatch.setattr(DeviceArray, "free", freed)
    joined(["h100"] * 3, lambda group: None, options=lambda rank: {"backing": Backing.IPC})
    assert order == ["cuIpcOpenMemHandle"] * 6 + ["cuIpcCloseMemHandle"] * 6 + ["free of a slab"] * 3


def test_a_closed_group_does_nothing_more(node: str) -> None:
    with local_group(2, node=node) as group:
        group.close()
        for use in (lambda: group.symmetric(8, "x"), lambda: group.wait(1), lambda: group.barrier()):
            with pytest.raises(GroupError, match="the group was closed; make a new one"):
                use()


# --- waiting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True])
def test_a_rank_that_does_not_come_is_named(batched: bool) -> None:
    """Rank 1 never calls: rank 0's copies wait for its entry. The time-out says so, and reaches rank 1 while
    rank 0 is still there."""
    told = threading.Event()

    def body(group: Group) -> Any:
        rank, buffer = group.members[0].rank, group.symmetric(64, "weights")
        if rank == 0:
            allgather(group, buffer, group.members[0].device.asarray(random_bytes(32, 0)), way="ce",
                      config=CopyEngineConfig(batched))  # fmt: skip
            start = time.monotonic()
            with pytest.raises(CollectiveTimeout) as late:
                group.wait(timeout_s=0.2)
            assert 0.2 <= time.monotonic() - start < 10
            with pytest.raises(GroupError, match="the group has failed, its ranks are out of step"):
                group.symmetric(8, "more")
            assert told.wait(10)
            return late.value
        while not isinstance(group.failed, PeerLost):
            time.sleep(0.01)
            with suppress(PeerLost):
                group.wait(timeout_s=5)
        told.set()
        return group.failed

    late, lost = joined(["h100"] * 2, body)
    assert [str(wait) for wait in late.waits] == [
        "rank 0 waits for rank 1 at the copies' entry barrier: epoch 2 wanted, 0 seen"
    ]
    assert str(late).startswith("allgather 'weights' (ce) did not end within 0.2 s: rank 0 waits for rank 1")
    assert isinstance(lost, PeerLost) and "did not end within 0.2 s" in str(lost)


def test_a_rank_that_dies_ends_the_wait_of_the_others() -> None:
    queued = threading.Barrier(3, timeout=20)

    def body(group: Group) -> Any:
        rank, buffer = group.members[0].rank, group.symmetric(96, "weights")
        if rank == 2:
            queued.wait()
            raise RuntimeError("this rank ends")
        allgather(group, buffer, group.members[0].device.asarray(random_bytes(32, 0)), way="ce")
        queued.wait()
        start = time.monotonic()
        with pytest.raises(PeerLost) as lost:
            group.wait(timeout_s=30)
        assert time.monotonic() - start < 10
        return lost.value

    one, other, dead = joined(["h100"] * 3, body)
    assert isinstance(dead, RuntimeError)
    for lost in (one, other):
        assert isinstance(lost, PeerLost)
        assert "allgather 'weights' (ce) was given up: rank" in str(lost)


def alone_at_the_barrier(group: Group) -> None:
    """Rank 0's kernel, and nobody else's."""
    member = group.member(0)
    kernel = member.device.compile(barrier.source(group.layout)).kernel()
    kernel.launch(1, barrier.THREADS, (group.lane.control(0), np.uint32(0)), stream=member.stream)
    group.calls.append("barrier")


@pytest.mark.parametrize("schedule", ["timed", "random"])
def test_a_kernel_that_waits_in_vain_gives_up_and_says_for_whom(schedule: str, node: str) -> None:
    with local_group(3, schedule=schedule, node=node) as group:
        alone_at_the_barrier(group)
        with pytest.raises(CollectiveTimeout) as late:
            group.wait(timeout_s=0.1)
        assert [str(wait) for wait in late.value.waits] == [
            f"rank 0 waits for rank {peer} at the entry barrier: CTA 0, epoch 1 wanted, 0 seen"
            for peer in (1, 2)
        ]
        assert str(late.value).startswith("barrier did not end within 0.1 s: rank 0 waits for rank 1")
        assert group.member(0).stream.query()
        with pytest.raises(GroupError, match="the group has failed, its ranks are out of step"):
            barrier.stream_barrier(group)


def test_without_a_time_limit_an_emulated_deadlock_is_a_report() -> None:
    with pytest.raises(KernelFaultError, match=r"deadlock") as fault, local_group(2) as group:
        alone_at_the_barrier(group)
        group.wait()
    assert "signals.cuh" in str(fault.value)


def test_a_report_names_who_called_the_groups_launch() -> None:
    text = 'extern "C" __global__ void wild(unsigned* word) { *word = 1; }'
    with local_group(2) as group, pytest.raises(KernelFaultError) as caught:
        group.launch("wild", CudaSource("wild.cu", text=text), 1, 1, lambda rank: [np.uint64(64)])
        group.wait(timeout_s=10)
    assert "kernel wild" in str(caught.value) and "launched at test_ipc_group.py" in str(caught.value)


def test_a_rank_between_processes_that_launches_nothing_is_named() -> None:
    """Three CTAs of ranks 0 and 2 wait for rank 1; whichever ends first tells the others."""

    def body(group: Group) -> None:
        member, dst = group.members[0], group.symmetric(6000, "dst")
        if member.rank != 1:
            src = member.device.asarray(random_bytes(2000, 0))
            allgather(group, dst, src, way="sm.push", config=PushConfig(ctas=3, threads=32))
            group.wait(timeout_s=0.3)
        while True:
            time.sleep(0.01)
            group.wait(timeout_s=5)

    errors = joined(["h100"] * 3, body)
    assert isinstance(errors[1], PeerLost)
    assert {type(errors[0]), type(errors[2])} <= {PeerLost, CollectiveTimeout}
    assert any(isinstance(error, CollectiveTimeout) for error in errors)
    for rank in (0, 2):
        words = f"rank {rank} waits for rank 1 at the entry barrier: CTA 0 and 2 more, epoch 1 wanted, 0 seen"
        assert words in str(errors[rank])


@pytest.mark.parametrize("schedule", ["timed", "random"])
def test_the_twins_whose_kernels_all_come_end_cleanly(schedule: str, node: str) -> None:
    with local_group(3, schedule=schedule, node=node) as group:
        for _ in range(3):
            barrier.stream_barrier(group)
        group.wait(timeout_s=30)
        assert group.failed is None and not group.calls
        for rank in range(3):
            epochs = group.lane.control(rank).bytes_view(group.layout.epochs_offset, 4).view(np.uint32)
            assert epochs.numpy()[0] == 3


def test_a_fault_of_one_rank_reaches_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()

    def body(group: Group) -> Any:
        member = group.members[0]
        if member.rank == 0:
            fault = KernelFaultError("cuStreamQuery", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
            monkeypatch.setattr(member.stream, "query", Mock(side_effect=fault))
            with pytest.raises(KernelFaultError):
                group.wait(timeout_s=5)
            assert group.failed is fault
            assert told.wait(10)
            return None
        while True:
            time.sleep(0.01)
            try:
                group.wait(timeout_s=5)
            except PeerLost as error:
                told.set()
                return error

    none, lost = joined(["h100"] * 2, body)
    assert none is None and isinstance(lost, PeerLost) and lost.ranks == (0,)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(lost)


def test_the_twin_in_which_all_ranks_come_ends_cleanly() -> None:
    def body(group: Group) -> bool:
        member, buffer = group.members[0], group.symmetric(96, "weights")
        time.sleep(0.05 * member.rank)
        allgather(group, buffer, member.device.asarray(random_bytes(32, member.rank)), way="ce")
        group.wait(timeout_s=20)
        assert group.failed is None
        wanted = np.concatenate([random_bytes(32, rank) for rank in range(3)])
        return bool((buffer.array(member.rank).numpy() == wanted).all())

    assert joined(["h100"] * 3, body) == [True] * 3
