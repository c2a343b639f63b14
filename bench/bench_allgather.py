"""Who should gather the shards of all ranks: copy engines, threads, the TMA, or the switch?

Ways        copy engines, with all copies of a rank in one call (ce.batch) or a stream per peer (ce.streams);
            stores and loads of threads (sm.push, sm.pull); bulk copies of the TMA (tma.push, tma.pull);
            stores that the switch copies (multicast); through host memory (staged); NCCL where it is
Grid        CTAs of the kernels, at most one per SM: the way's own choice, and a sweep for the SMs that
            saturate

Time        of a whole AllGather: it begins when all ranks' streams are let go at once, and ends on the
            slowest rank. Launch, both barriers and the wait for the slowest are part of it
Bytes       shards of S bytes from each of N ranks, in place: rank r's is in its part of dst already.
            Algorithm bandwidth N S / t, bus bandwidth (N - 1) S / t, as NCCL's tests have it
L2          as the same gather on the same buffers left it; counted bytes are those of a cold one
Verified    every byte of every rank's dst, before a number exists
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench import nccl
from bench.cost import resources
from bench.groups import finish, group_for
from bench.peer_axes import NCCL, AllgatherPoint, allgather_points
from kernels.common import ConfigError
from kernels.ipc.allgather import Config, GatherInfo, allgather, prepare, throughput_config, ways
from kernels.ipc.copy_engine import CopyEngineConfig
from kernels.ipc.gather import GatherConfig
from kernels.ipc.group import Group
from kernels.ipc.symmetric import Symmetric
from smfree.cuda import CopyWay
from smfree.cuda.peers import takes_batches
from smfree.measure.fixture import Measure, Point
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Cost, Memory, Question, Traffic

SEED = 11
APART_BYTES = 4096
"""Between the beginnings of two ranks' shards in the same random bytes: no two shards are alike."""
SLACK_BYTES = 1 << 16
"""Symmetric memory beside the destination."""
EMPTY = 0xA5

COPY_ENGINES = {"ce.batch": CopyEngineConfig(batched=True), "ce.streams": CopyEngineConfig(batched=False)}


def points(axes: Axes, spec: str) -> Iterable[AllgatherPoint]:
    del spec
    return allgather_points(axes)


@pytest.mark.collective
@pytest.mark.points.with_args(points)
def bench_allgather(measure: Measure, point: AllgatherPoint) -> None:
    """Seconds of one AllGather."""
    group = group_for(measure, point.ranks, point.ranks * point.largest_bytes + SLACK_BYTES)
    shard, total = point.shard_bytes, point.ranks * point.shard_bytes
    dst = group.symmetric(total, point.id)
    try:
        if point.way == NCCL:
            launch, config, cost = nccl_launch(measure, group, dst)
        else:
            launch, config, cost = our_launch(measure, group, dst, point)
        place(group, dst, shard)
        measure.collective(
            Point(
                question=Question.ALLGATHER,
                key={
                    "way": point.way,
                    "ranks": point.ranks,
                    "shard_bytes": shard,
                    "ctas": point.ctas,
                },
                traffic=Traffic(total, total - shard, total - shard),
                memory=Memory.PEER,
                cache=CacheState.REPEATED,
                working_set_bytes=total,
                config={**config, "in_place": True, "counted": point.counted},
                cost=cost,
            ),
            group.members,
            launch,
            lambda: verify(group, dst, shard),
            wait=lambda: finish(group),
            cold_counters=point.counted,
        )
    finally:
        dst.free()


Launch = Callable[[int], object]


def our_launch(
    measure: Measure, group: Group, dst: Symmetric, point: AllgatherPoint
) -> tuple[Launch, dict[str, Any], Cost]:
    """What queues the gather, what a reader needs to know of it, and what it needs of an SM."""
    way = "ce" if point.way in COPY_ENGINES else point.way
    reason = ways(group)[way]
    if reason is not None:
        measure.skip(f"{point.way}: {reason}")
    config = COPY_ENGINES.get(point.way) or throughput_config(group, way, point.shard_bytes)
    if point.ctas is not None:
        assert isinstance(config, GatherConfig)
        config = replace(config, ctas=point.ctas)
    try:
        with measure.compiling():
            prepare(group, dst, way=way, config=config)
    except ConfigError as error:
        measure.skip(f"{point.way}: {error}")

    def launch(_: int) -> GatherInfo:
        return allgather(group, dst, way=way, config=config)

    cost = Cost()
    if isinstance(config, GatherConfig):
        device = group.members[0].device
        kernel = device.compile(config.source(group.layout)).kernel()
        cost = resources(kernel, config.threads, config.shared_bytes, device.capabilities)
    return launch, described(group, way, config, point.shard_bytes), cost


def described(group: Group, way: str, config: Config | None, shard_bytes: int) -> dict[str, Any]:
    """The parts of a configuration that a reader compares, and how the bytes go (cases D15, D30).

    ``bytes_in_flight_per_sm``: of loads, at most; a CTA cannot have more than its slice of a shard.
    """
    said: dict[str, Any] = {
        "path": "staged through the host" if way == "staged" else group.path.value,
        "copies": copies(group, config) if way == "ce" else None,
        "backing": group.pool.backing,
        "num_sms": group.capabilities.num_sms,
        "ctas": 0,
    }
    if isinstance(config, GatherConfig):
        per_sm = -(-config.ctas // group.capabilities.num_sms)
        names = ("ctas", "threads", "unroll", "tile_bytes", "num_stages", "shared_bytes")
        said |= {name: getattr(config, name, None) for name in names}
        slice_bytes = -(-shard_bytes // config.ctas)
        said["bytes_in_flight_per_sm"] = min(config.bytes_in_flight_per_sm, slice_bytes) * per_sm
    return said


def copies(group: Group, config: Config | None) -> str:
    """How the driver gets the copies of a rank."""
    batched = isinstance(config, CopyEngineConfig) and config.batched
    member = group.members[0]
    known = takes_batches(member.device, member.stream)
    return (CopyWay.BATCH if batched and known else CopyWay.ONE_BY_ONE).value


def nccl_launch(measure: Measure, group: Group, dst: Symmetric) -> tuple[Launch, dict[str, Any], Cost]:
    """NCCL's AllGather on the same memory and streams. Skips where torch cannot."""
    reason = nccl.unavailable(group)
    if reason is not None:
        measure.skip(f"nccl: {reason}")
    said = {"path": group.path.value, "version": nccl.version(), "ctas": 0}
    return nccl.allgather(group, dst), said, Cost()


# --- bytes --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def random_bytes(num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(SEED).bytes(num_bytes), np.uint8)


def shard_of(group: Group, rank: int, shard_bytes: int) -> NDArray[np.uint8]:
    """What a rank contributes."""
    whole = random_bytes(shard_bytes + group.world_size * APART_BYTES)
    return whole[rank * APART_BYTES :][:shard_bytes]


def place(group: Group, dst: Symmetric, shard_bytes: int) -> None:
    """Every rank's shard in its place, and nothing of the others'."""
    for member in group.members:
        array = dst.array(member.rank)
        array.fill(EMPTY, stream=member.stream)
        own = array.bytes_view(member.rank * shard_bytes, shard_bytes)
        own.copy_from(shard_of(group, member.rank, shard_bytes), stream=member.stream)
    finish(group)


def verify(group: Group, dst: Symmetric, shard_bytes: int) -> None:
    """Raise AssertionError unless every local rank has every shard."""
    for member in group.members:
        for rank in range(group.world_size):
            found = dst.array(member.rank).bytes_view(rank * shard_bytes, shard_bytes)
            has, wanted = found.numpy(stream=member.stream), shard_of(group, rank, shard_bytes)
            if np.array_equal(has.view(np.uint64), wanted.view(np.uint64)):
                continue
            wrong = np.flatnonzero(has != wanted)
            raise AssertionError(
                f"rank {member.rank} has {len(wrong)} wrong bytes of rank {rank}'s shard, from {wrong[0]} on"
            )
