"""What reductions send, read off the counters of the emulated node, flags apart, and steps from the words of
the signals. That each rank sends what the model says, for any length, is in test_allreduce.py."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reduce import reduce_scatter
from kernels.reduce.allreduce import WAYS
from kernels.reduce.elements import Element
from kernels.reduce.message import chunk_of
from smfree.model.collectives import expected_steps, reduce_scatter_sent_bytes
from tests.kernels.reduce_kit import (
    CHANNELS,
    Operands,
    counted,
    epoch,
    inputs,
    reduce_group,
    sent_bytes,
    small_config,
)

RINGS = [way for way in WAYS if way.startswith("ring")]


@pytest.mark.parametrize("way", WAYS)
def test_equal_chunks_are_the_share_of_the_textbooks(way: str) -> None:
    """2 (N - 1)/N S for rings, two-shots and copies, (N - 1) S for a one-shot, 2 (N - 1) S over all ranks
    for trees, (N + 1)/N S for a switch that adds: what is loaded through a multicast address leaves every
    rank."""
    element, ranks, count = Element.F32, 4, 4 * 32
    nbytes = 4 * count
    with reduce_group(ranks) as (_, workspace):
        operands = Operands(workspace, inputs(ranks, count, element), element, "in place")
        found = counted(workspace, lambda: operands.reduce(way, small_config(workspace, way, element)))
    sent = [sent_bytes(way, counters) for counters in found]
    loaded = sum(counters.peer_load_bytes for counters in found)
    assert loaded == (nbytes if way == "nvls" else 0)
    match way:
        case "oneshot":
            assert sent == [(ranks - 1) * nbytes] * ranks
        case "tree":
            assert sum(sent) == 2 * (ranks - 1) * nbytes
        case "nvls":
            assert [own + loaded for own in sent] == [(ranks + 1) * nbytes / ranks] * ranks
        case _:
            assert sent == [2 * (ranks - 1) * nbytes / ranks] * ranks


@pytest.mark.parametrize("way", RINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_piece_goes_around_a_ring_in_twice_n_minus_1_steps(ranks: int, way: str) -> None:
    """The words of the data count sends, those of the room uses of scratch memory: N - 1 of each piece."""
    element, pieces = Element.F32, 3  # of every chunk: 2 for channel 0, 1 for channel 1
    with reduce_group(ranks) as (_, workspace):
        operands = Operands(workspace, inputs(ranks, ranks * pieces * 32, element), element, dst_shift=16)
        config = small_config(workspace, way, element, ctas=2, piece_bytes=128)
        found = counted(workspace, lambda: operands.reduce(way, config))
        for rank, counters in enumerate(found):
            for channel, mine in enumerate((2, 1)):
                assert epoch(workspace, rank, CHANNELS + channel) == mine * expected_steps(way, ranks)
                assert epoch(workspace, rank, 2 * CHANNELS + channel) == mine * (ranks - 1)
            assert counters.peer_signals == pieces * 3 * (ranks - 1)
        assert expected_steps(way, ranks) == 2 * (ranks - 1)


@pytest.mark.parametrize("way", reduce_scatter.WAYS)
def test_a_reduce_scatter_sends_all_chunks_but_its_own(way: str) -> None:
    """Around a ring and directly."""
    element, ranks, count = Element.F16, 3, 62
    with reduce_group(ranks) as (group, workspace):
        src = [member.device.asarray(bits) for member, bits in zip(
            group.members, inputs(ranks, count, element), strict=True)]  # fmt: skip
        bounds = [chunk_of(2 * count, element, ranks, rank) for rank in range(ranks)]
        dst = [
            member.device.empty(end - begin, np.uint8)
            for member, (begin, end) in zip(group.members, bounds, strict=True)
        ]
        config = small_config(workspace, {"direct": "twoshot"}.get(way, way), element)
        found = counted(
            workspace,
            lambda: reduce_scatter.reduce_scatter(workspace, dst, src, dtype=element, way=way, config=config),
        )
    for rank, counters in enumerate(found):
        assert sent_bytes(way, counters) == reduce_scatter_sent_bytes(count, 2, ranks, rank), f"rank {rank}"
