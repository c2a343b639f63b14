"""Two trees over the ranks, and the AllReduce that goes up and down them. Its sums among those of other ways:
test_allreduce.py; one line of it wrong: test_reduce_mutants.py."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.common import ConfigError
from kernels.ipc.wait import CollectiveTimeout
from kernels.reduce.elements import Element
from kernels.reduce.message import all_reduce_message, pieces_of
from kernels.reduce.tree import TREE, TreeConfig
from kernels.reduce.trees import two_trees
from smfree.model.collectives import NVLINK_4, expected_sent_bytes, expected_steps, tree, tree_depth
from tests.kernels.reduce_kit import Operands, inputs, need, reduce_group, set_epochs

WAY = "tree"


def small(**values: Any) -> TreeConfig:
    """Pieces of a line."""
    return TreeConfig(**{"ctas": 4, "threads": 64, "unroll": 1, "piece_bytes": 128, **values})


# ---- the trees --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 33))
def test_all_ranks_hang_from_one_root_by_the_least_depth_there_is(ranks: int) -> None:
    for branches in two_trees(ranks):
        assert branches.parents.count(None) == 1
        reached = [branches.root]
        for rank in reached:  # grows: a rank that hangs from itself is never reached
            assert len(branches.children(rank)) <= 2
            assert list(branches.children(rank)) == sorted(branches.children(rank))
            reached += branches.children(rank)
        assert sorted(reached) == list(range(ranks))
        assert 2**branches.depth <= ranks < 2 ** (branches.depth + 1)
        assert branches.depth == tree_depth(ranks)


@pytest.mark.parametrize("ranks", range(1, 33))
def test_who_adds_in_one_tree_is_a_leaf_in_the_other(ranks: int) -> None:
    one, other = two_trees(ranks)
    adds = [bool(one.children(rank)) + bool(other.children(rank)) for rank in range(ranks)]
    assert adds.count(0) == ranks % 2
    assert adds.count(1) == ranks - ranks % 2
    sends = [one.neighbours(rank) + other.neighbours(rank) for rank in range(ranks)]
    assert sum(sends) == 4 * (ranks - 1)
    if ranks > 1:
        assert max(sends) * 50 == tree(100, ranks, NVLINK_4).sent_bytes  # who sends most, as the model has it


# ---- the kernel -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "element", "schedule", "src"),
    [
        (4, Element.F16, ("min-pc", 0), "in place"),
        (5, Element.BF16, ("random", 5), "in place"),
        (7, Element.F32, ("async-earliest", 0), "in place"),
        (8, Element.F16, ("async-latest", 0), "apart"),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "value", None),
)
def test_calls_of_other_grids_and_lengths_follow_each_other_without_a_wait(
    ranks: int, element: Element, schedule: tuple[str, int], src: str, node: str
) -> None:
    """Across the wrap of the epochs; a channel of the first call gets more pieces than it has slots."""
    configs = (small(num_slots=2), small(ctas=8, piece_bytes=256), small(num_slots=3))
    with reduce_group(ranks, *schedule, node=node) as (group, workspace):
        need(WAY, group, element, node)
        set_epochs(workspace, -3)
        all_operands = [
            Operands(
                workspace,
                inputs(ranks, count, element, seed),
                element,
                src,
                dst_shift=seed,
                label=f"dst {seed}",
            )
            for seed, count in enumerate((801 // element.bytes, 1, 103))
        ]
        for operands, config in zip(all_operands, configs, strict=True):
            operands.reduce(WAY, config)
        group.wait(60)
        for operands in all_operands:
            operands.check(WAY)


@pytest.mark.parametrize(("ranks", "count"), [(3, 200), (5, 100)])
def test_every_rank_sends_its_half_once_to_each_neighbour(ranks: int, count: int) -> None:
    """By counters, also where the halves are uneven. Per edge and piece: data and room up, data down."""
    element, config = Element.F32, small()
    with reduce_group(ranks) as (group, workspace):
        operands = Operands(workspace, inputs(ranks, count, element), element)
        operands.reduce(WAY, config)
        group.wait(60)
        counted = [member.device.emulator.last_launch.counters for member in group.members]
        origin = operands.dst.offset_bytes % 128
    sent = [counters.peer_store_bytes - counters.peer_signal_bytes for counters in counted]
    neighbours = [[branches.neighbours(rank) for branches in two_trees(ranks)] for rank in range(ranks)]
    assert sent == [
        expected_sent_bytes(WAY, count, element.bytes, ranks, rank, neighbours=neighbours[rank])
        for rank in range(ranks)
    ]
    assert sum(sent) == 2 * (ranks - 1) * count * element.bytes
    middle, end = (count + 1) // 2 * element.bytes, count * element.bytes
    pieces = pieces_of(origin, 0, middle, 128) + pieces_of(origin, middle, end, 128)
    assert sum(counters.peer_signals for counters in counted) == 3 * (ranks - 1) * pieces
    assert all(counters.peer_load_bytes == 0 for counters in counted)


def test_the_longest_way_is_as_many_steps_as_the_model_says() -> None:
    assert [expected_steps(WAY, ranks) for ranks in range(1, 33)] == [
        2 * max(branches.depth for branches in two_trees(ranks)) for ranks in range(1, 33)
    ]


def test_a_rank_that_never_calls_is_named_with_the_tree() -> None:
    """Of 4 ranks, rank 2 is a leaf below 3 in tree 0 and the root of tree 1."""
    element, config = Element.F32, small()
    with pytest.raises(CollectiveTimeout) as late, reduce_group(4) as (group, workspace):
        operands = Operands(workspace, inputs(4, 400, element), element)
        message = all_reduce_message(workspace, operands.dst, operands.src, element)
        for member in group.members:
            kernel = TREE.prepare(member, message, config)
            if member.rank != 2:
                TREE.launch(member, message, config, kernel)
        group.wait(0.1)
    waits = {str(wait).split(":")[0] for wait in late.value.waits if wait.peer == 2}
    assert waits == {
        "rank 3 waits for rank 2 at the reduction up tree 0",
        "rank 0 waits for rank 2 at the room up tree 1",
        "rank 3 waits for rank 2 at the room up tree 1",
        "rank 0 waits for rank 2 at the broadcast down tree 1",
        "rank 3 waits for rank 2 at the broadcast down tree 1",
    }


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"ctas": 6}, r"ctas must be a multiple of 4.*\(got 6\); use 16"),
        ({"piece_bytes": 100}, r"piece_bytes must be a positive multiple of 128 \(got 100\)"),
    ],
    ids=["ctas", "piece"],
)
def test_configurations_that_are_refused(values: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        TreeConfig(**values)
    assert small()
