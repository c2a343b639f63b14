"""Latency of a signal, by the modelled clock: what a release costs, and who keeps step."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.ipc.barrier import stream_barrier
from kernels.ipc.flag_latency import FlagLatencyConfig, one_way_ns, ping_pong
from tests.kernels.group_kit import EMULATED
from tests.kernels.ipc_kit import epochs, opened_group

ROUNDS = 10
LANDING_BYTES = 16384


def one_ways(
    config: FlagLatencyConfig, num_ranks: int = 3, first: int = 0, second: int = 2, node: str = EMULATED
) -> list[float]:
    """Both players' one-way latency in ns; checks that every rank's epochs went on alike."""
    with opened_group(num_ranks, node=node) as group:
        results = {m.rank: m.device.empty(2, np.uint64).fill(0, stream=m.stream) for m in group.members}
        landing = group.symmetric(LANDING_BYTES, "landing")
        for member in group.members:
            landing.array(member.rank).fill(0, stream=member.stream)
        ping_pong(group, results, landing, first=first, second=second, config=config, num_rounds=ROUNDS)
        stream_barrier(group)
        group.wait(60)
        assert [epochs(group, rank)[0] for rank in range(num_ranks)] == num_ranks * [1 + ROUNDS + 1]
        assert not any(results[r].numpy().any() for r in range(num_ranks) if r not in (first, second))
        if config.data_bytes:
            words = landing.array(second).bytes_view(0, config.data_bytes).numpy().view(np.uint32)
            assert words.reshape(-1, 4)[:, 0].tolist() == [1 + ROUNDS] * (config.data_bytes // 16)
        return [one_way_ns(results[rank], ROUNDS) for rank in (first, second)]


@pytest.mark.parametrize(("data_bytes", "release"), [(0, False), (0, True), (2048, True)])
def test_both_players_see_every_message_and_a_time(data_bytes: int, release: bool, node: str) -> None:
    """Also where they share a GPU, whose time then says nothing."""
    assert min(one_ways(FlagLatencyConfig(data_bytes=data_bytes, release=release), node=node)) > 0


def test_a_relaxed_flag_is_fastest_a_release_costs_a_round_trip_and_data_more() -> None:
    relaxed, released, with_data, with_more = (
        one_ways(FlagLatencyConfig(data_bytes=nbytes, release=release))
        for nbytes, release in ((0, False), (0, True), (2048, True), (LANDING_BYTES, True))
    )
    assert relaxed[0] < released[0] < with_data[0] < with_more[0]
    for one in (relaxed, released, with_data, with_more):
        assert one[0] == pytest.approx(one[1], rel=0.05), "both players see the same round trips"


def test_any_two_of_the_ranks_can_play() -> None:
    config = FlagLatencyConfig(release=False)
    assert one_ways(config, 4, 3, 1)[0] == pytest.approx(one_ways(config, 2, 0, 1)[0], rel=0.05)
