"""Costs of collectives: numbers that are often quoted, and what holds for all sizes and numbers of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smfree.model.collectives import (
    ACROSS,
    INSIDE,
    NVLINK_4,
    RDMA_400G,
    Algorithm,
    Cost,
    Link,
    Reign,
    all_gather,
    all_gather_sent_bytes,
    expected_sent_bytes,
    expected_steps,
    hierarchical,
    nvls,
    one_shot,
    part_count,
    reduce_scatter,
    reduce_scatter_sent_bytes,
    reigns,
    ring,
    tree,
    tree_depth,
    two_shot,
)

RANKS = st.integers(1, 64)
COUNTS = st.integers(0, 10_000)
SIZES = st.floats(1, 1e12)
LINKS = st.builds(Link, st.floats(1e-7, 1e-4), st.floats(1e9, 1e12))
ALGORITHMS: tuple[Algorithm, ...] = (*INSIDE, reduce_scatter, all_gather)


def name_of(algorithm: Algorithm) -> str:
    return algorithm(1, 2, NVLINK_4).algorithm


# ---- numbers often quoted ---------------------------------------------------------------------------


def test_gradients_of_140_gb_around_512_ranks() -> None:
    """bf16 gradients at 45 GB/s: 280 GB sent, 6.22 s."""
    cost = ring(140e9, 512, RDMA_400G)
    assert cost.steps == 1022
    assert cost.sent_bytes == pytest.approx(279.45e9, rel=1e-4)
    assert cost.seconds == pytest.approx(6.22, abs=0.005)
    assert cost.sent_bytes / RDMA_400G.bytes_per_s == pytest.approx(6.21, abs=0.005)


def test_a_tensor_parallel_layer_around_8_ranks() -> None:
    """134.2 MB at 450 GB/s and 0.8 us: 11.2 us of start-ups, 521.9 us of transfer. The notes round to 0.532
    ms."""
    cost = ring(134.2e6, 8, NVLINK_4)
    assert (cost.steps, cost.sent_bytes) == (14, 234.85e6)
    assert cost.seconds == pytest.approx(11.2e-6 + 521.89e-6, rel=1e-4)
    assert cost.seconds == pytest.approx(0.532e-3, rel=0.003)
    assert cost.bus_bytes_per_s == pytest.approx(450e9 * 521.89 / 533.09, rel=1e-4)


def test_where_latency_and_bandwidth_cost_alike() -> None:
    assert NVLINK_4.critical_bytes == pytest.approx(360e3)
    assert RDMA_400G.critical_bytes == pytest.approx(540e3)
    assert NVLINK_4.seconds(1, 360e3) == pytest.approx(2 * NVLINK_4.alpha_s)


def test_small_messages_are_all_start_up() -> None:
    """32 KB of a decode step on 8 ranks: faster links would not help, fewer steps do."""
    size = 32e3
    around = ring(size, 8, NVLINK_4)
    assert around.start_up_share(NVLINK_4) > 0.98
    assert one_shot(size, 8, NVLINK_4).seconds < around.seconds / 8
    assert ring(size, 8, Link(NVLINK_4.alpha_s, 2 * NVLINK_4.bytes_per_s)).seconds > 0.99 * around.seconds
    assert ring(1000 * NVLINK_4.critical_bytes, 8, NVLINK_4).start_up_share(NVLINK_4) < 0.01


def test_nodes_of_eight_send_an_eighth_across() -> None:
    cost = hierarchical(140e9, 64, 8, NVLINK_4, RDMA_400G)
    inside, across = 2 * 7 / 8 * 140e9, 2 * 63 / 64 * 140e9 / 8
    assert (cost.ranks, cost.steps) == (512, 2 * 7 + 2 * 63)
    assert cost.sent_bytes == pytest.approx(inside + across)
    assert cost.seconds == pytest.approx(
        inside / 450e9 + across / 45e9 + 14 * NVLINK_4.alpha_s + 126 * RDMA_400G.alpha_s
    )
    assert cost.seconds < ring(140e9, 512, RDMA_400G).seconds / 4
    assert hierarchical(140e9, 1, 8, NVLINK_4, RDMA_400G).seconds == pytest.approx(
        ring(140e9, 8, NVLINK_4).seconds
    )


# ---- times ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
@given(size=SIZES, factor=st.floats(1.001, 100), ranks=RANKS, link=LINKS)
def test_more_bytes_never_take_less_time(
    algorithm: Algorithm, size: float, factor: float, ranks: int, link: Link
) -> None:
    less, more = algorithm(size, ranks, link), algorithm(factor * size, ranks, link)
    assert less.seconds <= more.seconds * (1 + 1e-12)
    assert more.seconds <= factor * less.seconds * (1 + 1e-12)  # nor does a byte cost more in company
    assert more.sent_bytes == pytest.approx(factor * less.sent_bytes)


@pytest.mark.parametrize("algorithm", [*INSIDE], ids=name_of)
@given(size=SIZES, ranks=st.integers(2, 4096), link=LINKS)
def test_no_link_carries_more_than_it_can(algorithm: Algorithm, size: float, ranks: int, link: Link) -> None:
    cost = algorithm(size, ranks, link)
    assert cost.seconds >= cost.sent_bytes / link.bytes_per_s * (1 - 1e-12)
    assert cost.seconds >= link.alpha_s
    least = (ranks + 1) / ranks if algorithm is nvls else 2 * (ranks - 1) / ranks
    assert cost.sent_bytes >= least * size * (1 - 1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_one_rank_sends_nothing(algorithm: Algorithm) -> None:
    alone = algorithm(1e6, 1, NVLINK_4)
    assert (alone.steps, alone.sent_bytes, alone.seconds) == (0, 0, 0)


@given(size=SIZES, ranks=RANKS, link=LINKS)
def test_a_ring_is_its_two_halves(size: float, ranks: int, link: Link) -> None:
    halves = reduce_scatter(size, ranks, link), all_gather(size, ranks, link)
    whole = ring(size, ranks, link)
    assert whole.steps == sum(half.steps for half in halves)
    assert whole.seconds == pytest.approx(sum(half.seconds for half in halves))


@given(size=SIZES, ranks=st.integers(2, 4096), link=LINKS, pieces=st.integers(1, 1000))
def test_no_size_of_pieces_is_better_for_a_tree_than_the_one_it_takes(
    size: float, ranks: int, link: Link, pieces: int
) -> None:
    best = tree(size, ranks, link)
    given_pieces = tree(size, ranks, link, piece_bytes=size / 2 / pieces)
    assert best.seconds <= given_pieces.seconds * (1 + 1e-12)
    assert given_pieces.steps in (2 * tree_depth(ranks) + pieces - 1, 2 * tree_depth(ranks) + pieces)


def test_a_tree_in_pieces_by_hand() -> None:
    """8 ranks, depth 3, 1 us and 1 GB/s: of 10 pieces of 100 bytes in each tree, the first takes 6 steps of
    200 bytes, the other 9 a step of 400 bytes each."""
    cost = tree(2000, 8, Link(1e-6, 1e9), piece_bytes=100)
    assert cost.seconds == pytest.approx(6 * 1.2e-6 + 9 * 1.4e-6)
    assert (cost.steps, cost.sent_bytes, cost.piece_bytes) == (15, 4000, 100)
    assert tree(2000, 8, Link(1e-6, 1e9), piece_bytes=600).piece_bytes == 500  # equal ones


# ---- who is fastest ---------------------------------------------------------------------------------


def test_who_is_fastest_changes_where_two_lines_meet() -> None:
    """alpha + 7 S/beta = 2 alpha + 14/8 S/beta at S = alpha beta / 5.25."""
    met = NVLINK_4.critical_bytes / 5.25
    found = reigns((ring, one_shot, two_shot), 8, NVLINK_4, low=8, high=1 << 30)
    assert found == (
        Reign("one-shot", 8, pytest.approx(met)),
        Reign("two-shot", pytest.approx(met), 1 << 30),
    )


def test_trees_are_for_small_messages_and_rings_for_large_ones() -> None:
    for ranks, link in ((8, NVLINK_4), (512, RDMA_400G)):
        first, second = reigns(ACROSS, ranks, link, high=1e12)
        assert (first.algorithm, second.algorithm) == ("tree", "ring")
        assert first.high == second.low
        for size in (first.high / 1.01, first.high * 1.01):
            costs = [algorithm(size, ranks, link) for algorithm in ACROSS]
            winner = first if size < first.high else second
            assert min(costs, key=lambda cost: cost.seconds).algorithm == winner.algorithm
    assert reigns((ring,), 8, NVLINK_4, low=10, high=20) == (Reign("ring", 10, 20),)


# ---- exact counts -----------------------------------------------------------------------------------


@given(count=COUNTS, ranks=RANKS, width=st.sampled_from([2, 4]))
def test_the_ranks_of_a_ring_send_the_message_as_often_as_the_formula_says(
    count: int, ranks: int, width: int
) -> None:
    """2 (N - 1) S over all ranks, whatever the chunks; two-shot and copy engines alike."""
    for way in ("ring.sm", "ring.tma", "twoshot", "ce"):
        sent = [expected_sent_bytes(way, count, width, ranks, rank) for rank in range(ranks)]
        assert sum(sent) == 2 * (ranks - 1) * count * width
        if count % ranks == 0:
            assert set(sent) == {2 * (ranks - 1) * count * width // ranks}
        halves = [
            reduce_scatter_sent_bytes(count, width, ranks, rank)
            + all_gather_sent_bytes(count, width, ranks, rank)
            for rank in range(ranks)
        ]
        assert way[:4] != "ring" or sent == halves


@given(count=COUNTS, ranks=st.integers(2, 16))
def test_a_ring_sends_what_its_steps_say(count: int, ranks: int) -> None:
    """Chunk r - 1 - s in step s, over 2 (N - 1) steps."""
    for rank in range(ranks):
        steps = [(rank - 1 - step) % ranks for step in range(expected_steps("ring.sm", ranks))]
        elements = sum(part_count(count, ranks, chunk) for chunk in steps)
        assert expected_sent_bytes("ring.sm", count, 4, ranks, rank) == 4 * elements


@given(count=COUNTS, parts=st.integers(1, 100))
def test_parts_are_a_message(count: int, parts: int) -> None:
    sizes = [part_count(count, parts, index) for index in range(parts)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("way", "algorithm"),
    [("ring.sm", ring), ("ring.tma", ring), ("oneshot", one_shot), ("twoshot", two_shot), ("nvls", nvls)],
)
def test_counts_and_costs_agree(way: str, algorithm: Callable[..., Cost]) -> None:
    for ranks, count in itertools.product((1, 2, 3, 8), (24, 240)):
        cost = algorithm(4 * count, ranks, NVLINK_4)
        assert expected_steps(way, ranks) == cost.steps
        for rank in range(ranks):
            assert expected_sent_bytes(way, count, 4, ranks, rank) == cost.sent_bytes


def test_a_trees_rank_sends_its_half_to_each_neighbour() -> None:
    sent = partial(expected_sent_bytes, "tree", 7, 2, 4, 1)
    assert sent(neighbours=(3, 1)) == 2 * (3 * 4 + 1 * 3)
    with pytest.raises(
        ValueError, match=r"neighbours in both trees \(got \(3,\)\); count parent and children"
    ):
        sent(neighbours=(3,))
    assert expected_steps("tree", 8) == 6


def test_what_is_not_known_is_refused() -> None:
    for call in (partial(expected_steps, "star", 8), partial(expected_sent_bytes, "star", 8, 4, 8, 0)):
        with pytest.raises(ValueError, match=r"costs are known of ring, .* \(got 'star'\); name one of them"):
            call()
    with pytest.raises(ValueError, match=r"a start-up above 0, and a rate of .* \(got .*bytes_per_s=0"):
        Link(1e-6, 0)
