"""How long does a flag take from one GPU to another, and what do a fence and data in front of it cost?

Relaxed    the flag alone, nothing ordered
Released   the flag with release semantics, which first waits until all earlier writes have arrived: here none
Data       bytes by the threads of a CTA, a release, then the flag: what a signal behind a tile costs

One way    half of a round trip between two kernels that poll: clocks of two GPUs cannot be compared. Slope
           between two numbers of rounds, so that start and end cancel
L2         a flag lies in the memory of the GPU that polls it, and stays in its L2: a peer's write lands
           there, a poll reads it there, no turn goes to DRAM. So do the data, which nobody reads here
Verified   the words of the last message in the landing place, and that both sides counted all rounds
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from bench.cost import resources
from bench.groups import finish, group_for
from bench.peer_axes import PeerFlagPoint, peer_flag_points
from kernels.ipc.flag_latency import RESULT_WORDS, FlagLatencyConfig, ping_pong
from kernels.ipc.group import Group
from kernels.ipc.symmetric import Symmetric
from smfree.cuda import DeviceArray
from smfree.measure.fixture import ChainReading, Measure, Point
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Memory, Question, Traffic

ROUNDS = (64, 1088)
MODELLED_ROUNDS = (2, 6)
FIRST, SECOND = 0, 1
"""The ranks that play."""
METHOD = "clock64 of one side around round trips, slope over their number, halved"
POOL_BYTES = 1 << 17
EMPTY = 0xA5


def points(axes: Axes, spec: str) -> Iterable[PeerFlagPoint]:
    del spec
    return peer_flag_points(axes)


@pytest.mark.points.with_args(points)
def bench_flag(measure: Measure, point: PeerFlagPoint) -> None:
    """One way of one message."""
    group = group_for(measure, point.ranks, POOL_BYTES)
    if group.direct_reason is not None:
        measure.skip(f"flags: {group.direct_reason}")
    config = FlagLatencyConfig(data_bytes=point.data_bytes, release=point.release)
    players = group.members[FIRST], group.members[SECOND]
    with measure.compiling():
        kernels = [member.device.compile(config.source(group.layout)).kernel() for member in group.members]
    results = {member.rank: member.device.empty(RESULT_WORDS, np.uint64) for member in group.members}
    landing = group.symmetric(max(point.data_bytes, 16), point.id)
    short, long = MODELLED_ROUNDS if measure.deterministic else ROUNDS

    def play(rounds: int) -> tuple[float, float]:
        for member in players:
            results[member.rank].fill(0, stream=member.stream)
            landing.array(member.rank).fill(EMPTY, stream=member.stream)
        ping_pong(group, results, landing, first=FIRST, second=SECOND, config=config, num_rounds=rounds)
        finish(group)
        cycles, nanoseconds = results[FIRST].numpy(stream=players[0].stream)
        return float(cycles), float(nanoseconds)

    def run() -> ChainReading:
        first, _ = play(short)
        tally = measure.node_of(players[0].device).tally()
        cycles, nanoseconds = play(long)
        one_way = (cycles - first) / (2 * (long - short))
        return ChainReading(one_way, cycles, nanoseconds, 2 * long, METHOD, counters=tally.since()[FIRST])

    try:
        measure.chain(
            Point(
                question=Question.PEER_FLAG,
                key={"data_bytes": point.data_bytes, "release": point.release, "ranks": point.ranks},
                traffic=Traffic(point.data_bytes, 0, point.data_bytes),
                memory=Memory.PEER,
                cache=CacheState.REPEATED,
                working_set_bytes=landing.nbytes,
                config={
                    "path": group.path.value,
                    "backing": group.pool.backing,
                    "threads": config.threads,
                    "rounds": [short, long],
                },
                cost=resources(kernels[0], config.threads, 0, group.capabilities),
            ),
            run,
            lambda: verify(group, results, landing, point.data_bytes),
        )
    finally:
        landing.free()


def verify(group: Group, results: dict[int, DeviceArray], landing: Symmetric, data_bytes: int) -> None:
    """Raise AssertionError unless both sides have played to the end, and the last message has arrived whole:
    vectors of (epoch, place, sender, receiver), the epoch of all the same."""
    for rank, other in ((FIRST, SECOND), (SECOND, FIRST)):
        stream = group.member(rank).stream
        cycles, nanoseconds = results[rank].numpy(stream=stream)
        assert cycles > 0, f"rank {rank} has not played to the end"
        assert nanoseconds > 0, f"rank {rank} has not played to the end"
        if not data_bytes:
            continue
        found = landing.array(rank).numpy(stream=stream)[:data_bytes].view(np.uint32).reshape(-1, 4)
        place = np.arange(0, data_bytes, 16).astype(np.uint32)
        wanted = np.stack(
            [np.full_like(place, found[0, 0]), place, np.full_like(place, other), np.full_like(place, rank)],
            1,
        )
        np.testing.assert_array_equal(found, wanted, f"the last message to rank {rank}")
