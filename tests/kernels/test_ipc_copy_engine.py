"""AllGather without kernels: by copy engines, batched or a stream per peer, and through host memory.

Every case is held against numpy's concatenation, bit by bit, and against the bytes around dst.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.ipc import staged
from kernels.ipc.allgather import WAYS, allgather, prepare, throughput_config, ways
from kernels.ipc.copy_engine import CopyEngineConfig, place_own
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.member import Member
from kernels.ipc.push import PushConfig
from kernels.ipc.shards import Shards
from kernels.ipc.slabs import Backing
from kernels.ipc.staged import reserve
from smfree.cuda import CopyWay, Device, Path
from smfree.emulator.driver import Driver
from tests.kernels.group_kit import joined, local_group, random_bytes

MODES = {
    "batched": ("ce", CopyEngineConfig(batched=True)),
    "streams": ("ce", CopyEngineConfig(batched=False)),
    "staged": ("staged", None),
}
MARGIN = 37
"""Bytes before and after, which must stay as they are; odd, so that nothing is aligned."""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> tuple[str, CopyEngineConfig | None]:
    return MODES[request.param]


def check_gather(
    group: Group, mode: tuple[str, Any], counts: Sequence[int], *, in_place: bool, seed: int = 0
) -> Any:
    """One AllGather of random shards; everything around them must stay."""
    way, config = mode
    total = sum(counts)
    shards = [random_bytes(count, seed + rank) for rank, count in enumerate(counts)]
    wanted = np.concatenate(shards) if shards else np.empty(0, np.uint8)
    starts = np.cumsum([0, *counts])
    around = group.symmetric(total + 2 * MARGIN, "around")
    dst = around.bytes_view(MARGIN, total)
    sources = []
    for member in group.members:
        rank = member.rank
        around.array(rank).fill(0xEE, stream=member.stream)
        if in_place:
            place = dst.array(rank).bytes_view(int(starts[rank]), counts[rank])
            place.copy_from(shards[rank], stream=member.stream)
        else:
            padded = member.device.empty(counts[rank] + 2 * MARGIN).fill(0xDD, stream=member.stream)
            sources.append(padded.bytes_view(MARGIN, counts[rank]))
            sources[-1].copy_from(shards[rank], stream=member.stream)
    info = allgather(group, dst, None if in_place else sources, way=way, counts=counts, config=config)
    group.wait(timeout_s=30)
    for member in group.members:
        found = around.array(member.rank).numpy()
        assert (found[MARGIN : MARGIN + total] == wanted).all(), f"rank {member.rank}"
        assert (np.delete(found, np.s_[MARGIN : MARGIN + total]) == 0xEE).all(), f"around rank {member.rank}"
    around.free()
    return info


# --- right, in one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_has_all_shards(mode: Any, world_size: int, in_place: bool, node: str) -> None:
    with local_group(world_size, node=node) as group:
        check_gather(group, mode, [4096] * world_size, in_place=in_place)
        check_gather(group, mode, [3] * world_size, in_place=in_place, seed=10)


def test_eight_ranks(mode: Any, node: str) -> None:
    with local_group(8, node=node) as group:
        check_gather(group, mode, [1000, 0, 1, 300, 16, 17, 2000, 5], in_place=False)


@pytest.mark.parametrize(
    "counts",
    [(0, 1, 4099), (5000, 0, 0), (0, 0, 0), (16, 4096, 15)],
    ids=lambda value: "-".join(map(str, value)),
)
def test_ragged_shards_and_empty_ones(mode: Any, counts: tuple[int, ...], node: str) -> None:
    with local_group(3, node=node) as group:
        for in_place in (False, True):
            check_gather(group, mode, counts, in_place=in_place)


@pytest.mark.parametrize("schedule", ["min-pc", "async-latest", "random"])
def test_under_other_schedules(mode: Any, schedule: str) -> None:
    """Copies of different streams complete in other orders; three calls in a row reuse the same words."""
    for seed in range(2 if schedule == "random" else 1):
        with local_group(3, schedule=schedule, seed=seed) as group:
            for call in range(3):
                check_gather(group, mode, (100, 2000, 7), in_place=call == 1, seed=10 * call)


@pytest.mark.parametrize("backing", [Backing.PEER, Backing.VMM])
def test_over_every_backing(mode: Any, backing: Backing, node: str) -> None:
    with local_group(2, backing=backing, node=node) as group:
        check_gather(group, mode, (1000, 24), in_place=False)


@pytest.mark.parametrize("schedule", ["timed", "async-latest", "random"])
def test_calls_follow_each_other_without_a_wait(mode: Any, schedule: str, node: str) -> None:
    """Six calls into one dst, each with other shards; every rank keeps what it got in its own stream, and
    the host waits once. A fast rank must not overwrite what a slow one has not kept, nor the host buffer."""
    way, config = mode
    counts, calls = (300, 5, 1000), 6
    for seed in range(2 if schedule == "random" else 1):
        with local_group(3, schedule=schedule, seed=seed, node=node) as group:
            dst = group.symmetric(sum(counts), "dst")
            shards = [
                [random_bytes(n, 10 * call + rank) for rank, n in enumerate(counts)] for call in range(calls)
            ]
            kept = {m.rank: m.device.empty((calls, dst.nbytes)) for m in group.members}
            for call in range(calls):
                sources = [m.device.asarray(shards[call][m.rank]) for m in group.members]
                allgather(group, dst, sources, way=way, counts=counts, config=config)
                for m in group.members:
                    kept[m.rank][call : call + 1].bytes_view().copy_from_device(
                        dst.array(m.rank), stream=m.stream
                    )
            group.wait(timeout_s=60)
            for rank, got in kept.items():
                for call, row in enumerate(got.numpy()):
                    assert (row == np.concatenate(shards[call])).all(), (rank, call)


def test_a_late_rank_holds_the_others_and_keeps_its_dst(mode: Any, node: str) -> None:
    """Rank 1 comes late: until then nothing changes its dst, and nobody leaves without its shard."""
    way, config = mode
    with local_group(3, schedule="async-earliest", node=node) as group:
        dst = group.symmetric(300, "dst")
        late = group.member(1)
        gate = late.device.empty(1, np.uint32).fill(0)
        reserve(group, 300)  # would wait for rank 1 else
        dst.array(1).fill(0xEE)
        old = late.device.empty(300)
        shards = [random_bytes(100, rank) for rank in range(3)]
        sources = [m.device.asarray(shard) for m, shard in zip(group.members, shards, strict=True)]
        late.device.synchronize()  # from here on a call that waits for the device would wait for the gate
        late.stream.wait_value(gate.ptr, 1)
        old.copy_from_device(dst.array(1), stream=late.stream)
        allgather(group, dst, sources, way=way, config=config)
        for _ in range(200):
            assert not any(group.member(rank).stream.query() for rank in range(3))
        late.control_stream.write_value(gate.ptr, 1)
        group.wait(timeout_s=30)
        assert (old.numpy() == 0xEE).all()
        for rank in range(3):
            assert (dst.array(rank).numpy() == np.concatenate(shards)).all()


def test_a_source_may_be_overwritten_behind_the_call(node: str) -> None:
    """The copy to one peer is late, all that others send has come: the member's stream waits for the copy."""
    with local_group(3, schedule="async-earliest", node=node) as group:
        first, dst = group.member(0), group.symmetric(300, "dst")
        gate = first.device.empty(1, np.uint32).fill(0)
        shards = [random_bytes(100, rank) for rank in range(3)]
        sources = [m.device.asarray(shard) for m, shard in zip(group.members, shards, strict=True)]
        first.device.synchronize()
        first.stream_to(1).wait_value(gate.ptr, 1)
        allgather(group, dst, sources, way="ce", config=CopyEngineConfig(batched=False))
        sources[0].fill(0xDD, stream=first.stream)
        assert not any([first.stream.query() for _ in range(200)])
        first.control_stream.write_value(gate.ptr, 1)
        group.wait(timeout_s=30)
        for rank in range(3):
            assert (dst.array(rank).numpy() == np.concatenate(shards)).all()


def test_the_host_buffer_is_not_refilled_before_a_slow_rank_has_read_it(
    monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """Rank 1 stops between the two halves of a call; the others must not start the next one's first half."""
    with local_group(3, schedule="async-earliest", node=node) as group:
        dst, slow = group.symmetric(300, "dst"), group.member(1)
        gate = slow.device.empty(1, np.uint32).fill(0)
        reserve(group, 300)
        slow.device.synchronize()
        waited: list[int] = []

        def stop(shards: Shards, member: Member) -> None:
            if member is slow and not waited:
                waited.append(0)
                member.stream.wait_value(gate.ptr, 1)
            place_own(shards, member)

        monkeypatch.setattr(staged, "place_own", stop)
        shards = [[random_bytes(100, 3 * call + rank) for rank in range(3)] for call in range(2)]
        sources = [
            [m.device.asarray(shard) for m, shard in zip(group.members, call, strict=True)] for call in shards
        ]
        kept = slow.device.empty((2, 300))
        for call in range(2):
            allgather(group, dst, sources[call], way="staged")
            kept[call : call + 1].bytes_view().copy_from_device(dst.array(1), stream=slow.stream)
        for _ in range(200):
            assert not any(group.member(rank).stream.query() for rank in range(3))
        slow.control_stream.write_value(gate.ptr, 1)
        group.wait(timeout_s=30)
        assert (kept.numpy() == np.array([np.concatenate(call) for call in shards])).all()


def test_the_count_of_barriers_wraps(mode: Any, node: str) -> None:
    """2^32 barriers later: 0 comes after 2^32 - 1."""
    way, config = mode
    with local_group(2, node=node) as group:
        if way == "ce":
            group.lane.host_epoch = 2**32 - 4
            for rank in (0, 1):
                word = group.layout.word(group.layout.host_slot, 1 - rank)
                group.lane.pad(rank).bytes_view(word, 4).copy_from(
                    np.full(1, 2**32 - 4, np.uint32).view(np.uint8)
                )
        else:
            staging = reserve(group, 64)
            staging.epoch = 2**32 - 4
            staging.words[...] = 2**32 - 4
        for call in range(5):
            check_gather(group, (way, config), (40, 24), in_place=False, seed=call)
        assert (group.lane.host_epoch if way == "ce" else staging.epoch) == 6


def test_shards_may_be_symmetric_and_of_any_dtype(node: str) -> None:
    with local_group(2, node=node) as group:
        dst, src = group.symmetric(80, "dst"), group.symmetric(40, "src")
        for rank in (0, 1):
            src.array(rank).fill(rank + 1, stream=group.member(rank).stream)
        allgather(group, dst, src, way="ce")
        group.wait()
        assert dst.array(1).numpy().tolist() == [1] * 40 + [2] * 40
        floats = [m.device.asarray(np.full((2, 5), m.rank, np.float32)) for m in group.members]
        allgather(group, dst, floats, way="ce")
        group.wait()
        assert dst.array(0).view(np.float32).numpy().tolist() == [0.0] * 10 + [1.0] * 10


@pytest.mark.parametrize("way", ["ce", "staged", "sm.push"])
def test_preparing_moves_nothing_and_leaves_nothing_to_do_but_copies(way: str) -> None:
    """Afterwards a call neither loads a module nor allocates: a real GPU would wait in both."""
    with local_group(2) as group:
        dst = group.symmetric(64, "dst")
        for member in group.members:
            dst.array(member.rank).fill(member.rank, stream=member.stream)
            member.stream.synchronize()
        prepare(group, dst, way=way)
        assert dst.array(1).numpy().tolist() == [1] * 64
        process = group.member(0).device.driver.process
        loaded = [len(process.contexts[rank].modules) for rank in (0, 1)]
        free = [member.device.calls("cuMemGetInfo") for member in group.members]
        host = len(process.node.host.ranges)
        allgather(group, dst, way=way)
        assert [len(process.contexts[rank].modules) for rank in (0, 1)] == loaded
        assert [member.device.calls("cuMemGetInfo") for member in group.members] == free
        assert len(process.node.host.ranges) == host
        group.wait()
        assert dst.array(1).numpy().tolist() == [0] * 32 + [1] * 32


def test_the_host_buffer_grows_with_the_shards(node: str) -> None:
    with local_group(2, pool_bytes=4 << 20, node=node) as group:
        small = reserve(group, 100)
        assert reserve(group, 1 << 20) is small
        check_gather(group, MODES["staged"], (600_000, 600_000), in_place=False)
        assert group.staging is not small and group.staging is not None
        assert group.staging.nbytes == 2 << 20
        check_gather(group, MODES["staged"], (10, 20), in_place=False)


# --- right, between processes ------------------------------------------------------------------------


@pytest.mark.parametrize("backing", [Backing.VMM, Backing.IPC])
def test_between_processes(mode: Any, backing: Backing) -> None:
    def body(group: Group) -> Path:
        for call in range(3):
            info = check_gather(group, mode, (100, 0, 999), in_place=call == 1, seed=call)
        return info.path

    way = mode[0]
    found = joined(["h100"] * 3, body, options=lambda rank: {"backing": backing})
    assert found == [Path.STAGED if way == "staged" else Path.NVLINK] * 3


# --- what it tells -----------------------------------------------------------------------------------


def test_d15_d30_the_result_tells_path_and_way(mode: Any) -> None:
    """D15, D30: what went through the host, or not in a batch, is in the result; on streams of its own."""
    way, config = mode
    with local_group(2) as group:
        info = check_gather(group, mode, (64, 64), in_place=False)
        assert info.way == way
        assert info.path is (Path.STAGED if way == "staged" else Path.NVLINK)
        assert info.copies is (CopyWay.BATCH if config and config.batched else CopyWay.ONE_BY_ONE)
        assert info.launches == ()
        streams = {stream.handle for m in group.members for stream in m.streams}
        assert not streams & {m.device.default_stream.handle for m in group.members}


def test_batches_are_taken_where_the_driver_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(2) as group:
        dst = group.symmetric(64, "dst")
        for member in group.members:
            dst.array(member.rank).fill(1, stream=member.stream)
        assert allgather(group, dst, way="ce").copies is CopyWay.BATCH
        monkeypatch.setattr(Device, "driver_version", (12, 4))
        assert allgather(group, dst, way="ce").copies is CopyWay.ONE_BY_ONE
        group.wait()


def test_waits_flush_remote_writes_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    call = Driver.cuStreamWaitValue32

    def recorded(driver: Driver, stream: Any, addr: Any, value: Any, flag: int) -> Any:
        flags.append(flag)
        return call(driver, stream, addr, value, flag & ~(1 << 30))  # emulated GPUs have it not

    monkeypatch.setattr(Driver, "cuStreamWaitValue32", recorded)
    with local_group(2) as group:
        check_gather(group, MODES["batched"], (64, 64), in_place=False)
        group.member(1).flushes = True
        check_gather(group, MODES["batched"], (64, 64), in_place=False)
    assert flags == [0] * 4 + [0, 1 << 30] * 2


def test_every_way_says_whether_it_is_open() -> None:
    with local_group(2) as group:
        assert ways(group) == dict.fromkeys(WAYS)
        assert throughput_config(group, "ce", 1) == CopyEngineConfig()
        assert throughput_config(group, "staged", 1) is None
        assert isinstance(throughput_config(group, "sm.push", 1), PushConfig)
    with local_group(2, "emu:a100") as group:
        reasons = ways(group)
        assert [way for way in WAYS if reasons[way] is None] == ["ce", "sm.pull", "sm.push", "staged"]
        assert "needs the TMA" in str(reasons["tma.push"])
        assert "has no multicast" in str(reasons["multicast"])


# --- what it refuses ---------------------------------------------------------------------------------


@pytest.fixture
def pair() -> AbstractContextManager[Group]:
    return local_group(2)


def test_a_captured_stream_is_refused(pair: Any, mode: Any) -> None:
    way, config = mode
    with pair as group:
        dst = group.symmetric(64, "dst")
        words = f"way '{way}' cannot be captured in a graph: its epochs are the host's"
        with group.member(0).stream.capture(), pytest.raises(ConfigError, match=words):
            allgather(group, dst, way=way, config=config)
        for rank in (0, 1):
            dst.array(rank).fill(rank, stream=group.member(rank).stream)
        allgather(group, dst, way=way, config=config)
        group.wait()
        assert dst.array(0).numpy().tolist() == [0] * 32 + [1] * 32


def test_operands_are_checked_before_anything_is_queued(pair: Any) -> None:
    with pair as group, local_group(2) as stranger:
        dst = group.symmetric(64, "dst")
        a, b = (member.device for member in group.members)
        good = [a.empty(32), b.empty(32)]
        refused: list[tuple[dict[str, Any], type[Exception], str]] = [
            (
                {"dst": stranger.symmetric(64, "x")},
                OperandError,
                r"symmetric memory of the group \(got another",
            ),
            ({"dst": a.empty(64)}, OperandError, r"symmetric memory of the group \(got DeviceArray"),
            ({"dst": dst.bytes_view(0, 63)}, OperandError, r"2 equal shards \(got 63 bytes\); pass counts"),
            (
                {"counts": (32, 31)},
                OperandError,
                r"got 64, the counts sum up to 63\); take dst.bytes_view\(0, 63",
            ),
            ({"counts": (64,)}, OperandError, r"bytes of each of the 2 ranks \(got \[64\]\)"),
            ({"counts": (65, -1)}, OperandError, r"bytes of each of the 2 ranks \(got \[65, -1\]\)"),
            ({"src": good[:1]}, OperandError, r"one array per rank of this process, 2 \(got 1\)"),
            ({"src": good[::-1]}, OperandError, r"rank 0's src must be an array of its device emu:h100x2:0"),
            (
                {"src": [a.empty(32), b.empty(31)]},
                OperandError,
                r"rank 1's src must have the 32 bytes .*got 31",
            ),
            (
                {"src": [dst.array(0).bytes_view(1, 32), good[1]]},
                OperandError,
                r"rank 0's src must be its own part of dst or share nothing with dst \(they share 32 bytes, "
                r"1 bytes into dst instead of 0\)",
            ),
            ({"way": "nccl"}, GroupError, r"one of the ways ce, sm.pull, .*staged \(got 'nccl'\)"),
            (
                {"config": PushConfig()},
                ConfigError,
                r"the config of way 'ce' is a CopyEngineConfig \(got Push",
            ),
        ]
        for changed, kind, words in refused:
            call = {"dst": dst, "src": good, "way": "ce", **changed}
            with pytest.raises(kind, match=words):
                allgather(group, call.pop("dst"), call.pop("src"), **call)
        assert not group.calls and group.lane.host_epoch == 0
