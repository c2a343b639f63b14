"""AllReduce: the bits that each way's order of summation gives, on every rank; any number of ranks, length,
type, place and schedule; call after call, side by side, and out of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, repeat
from typing import Any

import numpy as np
import pytest

from kernels.reduce import allreduce, direct, message, tree
from kernels.reduce.allreduce import WAYS
from kernels.reduce.elements import Element
from kernels.reduce.message import AllReduceMessage, pieces_of
from kernels.reduce.order import ORDERS, error_bound, expected, true_sum
from kernels.reduce.workspace import Workspace
from smfree.emulator.counters import Counters
from smfree.measure.queue import Blocker
from tests.kernels.group_kit import EMULATED
from tests.kernels.pairwise import SCHEDULES, rows
from tests.kernels.reduce_kit import (
    CHANNELS,
    Operands,
    check_sums,
    counted,
    epoch,
    inputs,
    model_bytes,
    need,
    reduce_group,
    sent_bytes,
    set_epochs,
    small_config,
)

LENGTHS = {
    "0": lambda n: 0,
    "1": lambda n: 1,
    "N-1": lambda n: n - 1,
    "N": lambda n: n,
    "N+1": lambda n: n + 1,
    "piece": lambda n: 29 * n + 1,
    "rounds": lambda n: 130 * n + n // 2,  # several pieces per channel, of every type; the last one ragged
}
AXES = {
    "way": WAYS,
    "length": tuple(LENGTHS),
    "schedule": (*SCHEDULES[:5], ("random", 1)),
    "ranks": (1, 2, 3, 4),
    "dtype": tuple(element.value for element in Element),
    "src": ("in place", "apart", "symmetric"),
    "src_shift": (0, 1),
    "dst_shift": (0, 1, 37),
}
MANY = [
    dict(zip(AXES, values, strict=True))
    for values in zip(
        WAYS,
        cycle(("N+1", "N-1", "piece")),
        cycle((("random", 2), ("async-earliest", 0), ("min-pc", 0), ("random", 3))),
        cycle((8, 7, 5)),
        cycle(("bfloat16", "float32", "float16")),
        cycle(("in place", "apart")),
        repeat(1),
        cycle((1, 0)),
    )
]
"""More ranks: a row for each way, for many devices take their time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        many = {"ranks": (1, 2, 3, 4, 5, 7, 8)} if metafunc.config.getoption("--full-product") else {}
        found = rows({**AXES, **many}, metafunc.config) + MANY
        metafunc.parametrize("row", found, ids=["-".join(map(_name, row.values())) for row in found])


def _name(value: object) -> str:
    return "".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "-")


def test_every_rank_has_the_bits_of_the_stated_order_and_nothing_else_is_touched(
    row: dict[str, Any], node: str
) -> None:
    element, ranks = Element.of(row["dtype"]), row["ranks"]
    data = inputs(ranks, LENGTHS[row["length"]](ranks), element, seed=row["dst_shift"])
    with reduce_group(ranks, *row["schedule"], node=node) as (group, workspace):
        need(row["way"], group, element, node)
        operands = Operands(
            workspace, data, element, row["src"], src_shift=row["src_shift"], dst_shift=row["dst_shift"]
        )
        config = small_config(workspace, row["way"], element, **({"ctas": 1} if ranks > 4 else {}))
        if node == EMULATED:
            check_sent(
                row["way"], counted(workspace, lambda: operands.reduce(row["way"], config)), data, element
            )
        else:
            operands.reduce(row["way"], config)
            group.wait(60)
        operands.check(row["way"])


def check_sent(way: str, found: Sequence[Counters], data: Sequence[Any], element: Element) -> None:
    """Every rank sends what the model says. What the switch loads is not in a rank's counters, and a group of
    one has a copy engine move its message."""
    ranks = len(data)
    if way != "nvls" and ranks > 1:
        for rank, counters in enumerate(found):
            said = model_bytes(way, len(data[0]), element, ranks, rank)
            assert (sent_bytes(way, counters), counters.peer_load_bytes) == (said, 0), f"rank {rank}"


@pytest.mark.parametrize(
    ("calls", "start", "schedule"),
    [([way for way in WAYS for _ in range(2)], -2, ("producer-ahead", 0)), (WAYS[::-1], -1, ("random", 1))],
    ids=["each-twice", "backwards"],
)
def test_calls_in_a_row_of_any_ways_share_scratch_memory_and_dst(
    calls: Sequence[str], start: int, schedule: tuple[str, int], node: str
) -> None:
    """One dst and no wait in between, across the wrap of the epochs (D23), of other lengths, grids and
    places. Every rank copies its sum away at once."""
    element, ranks = Element.F16, 3
    with reduce_group(ranks, *schedule, node=node) as (group, workspace):
        reasons = allreduce.ways(group)
        calls = [way for way in calls if node == EMULATED or reasons[way] is None]
        set_epochs(workspace, start)
        dst = group.symmetric(2 * 100, "dst")
        seen, given = {}, []
        for call, way in enumerate(calls):
            count = (40, 7, 100, 1, 33)[call % 5]
            data, part = inputs(ranks, count, element, seed=call), dst.bytes_view(0, 2 * count)
            given.append(data)
            in_place = call % 3 == 0
            src = []
            for member in group.members:
                own = part.array(member.rank) if in_place else member.device.empty(2 * count)
                stream = workspace.stream(member.rank)
                src.append(own.copy_from(data[member.rank].view(np.uint8), stream=stream))
            config = small_config(workspace, way, element, ctas=1 + call % 2)
            allreduce.allreduce(
                workspace, part, None if in_place else src, dtype=element, way=way, config=config
            )
            for member in group.members:
                seen[call, member.rank] = kept = member.device.empty(2 * count)
                kept.copy_from_device(part.array(member.rank), stream=workspace.stream(member.rank))
        group.wait(60)
        for call, way in enumerate(calls):
            found = [seen[call, rank].numpy().view(element.bits) for rank in range(ranks)]
            check_sums(way, found, given[call], element)
        # the epochs of barriers, a ring's data and room, trees and one-shots have wrapped
        for kind in range(5):
            assert min(epoch(workspace, rank, kind * CHANNELS) for rank in range(ranks)) < 100


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ce"])
def test_more_pieces_and_any_origin_do_no_harm(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels' headers say of their launch, also for the call behind it."""
    ranks, element = 3, Element.F32
    data = inputs(ranks, 50 * ranks + 1, element)
    with reduce_group(ranks, "random", 1) as (group, workspace):
        operands = Operands(workspace, data, element, dst_shift=1)
        asked: list[int] = []

        def more(*args: int) -> int:
            asked.append(pieces_of(*args))
            return asked[-1] + 3

        with monkeypatch.context() as patched:
            for module in (message, direct, tree):
                patched.setattr(module, "pieces_of", more)
            patched.setattr(AllReduceMessage, "origin", 4 * 9)
            operands.reduce(way, small_config(workspace, way, element))
        group.wait(60)
        assert asked
        operands.check(way)
        operands.fill(inputs(ranks, 50 * ranks + 1, element, seed=1))
        operands.reduce(way, small_config(workspace, way, element))
        group.wait(60)
        operands.check(way)


@pytest.mark.parametrize(
    ("own_streams", "way"),
    [*((True, way) for way in WAYS), (False, WAYS[0])],
    ids=[*WAYS, f"{WAYS[0]}-on-one-stream"],
)
def test_two_workspaces_run_at_the_same_time_if_they_have_streams_of_their_own(
    own_streams: bool, way: str, node: str
) -> None:
    """Rank 0's events say when each ran. On a GPU two short calls may miss each other."""
    element = Element.F32
    with two_workspaces(2, node=node, own_streams=own_streams) as both:
        group = both[0].group
        need(way, group, element, node)
        config = small_config(both[0], way, element, ctas=1)
        pair = [Operands(each, inputs(2, 50, element, seed), element) for seed, each in enumerate(both)]
        for each in pair:
            allreduce.prepare(each.workspace, each.dst, each.src, dtype=element, way=way, config=config)
        group.wait(60)
        blocker = Blocker(group.members[0].device)
        blocker.hold(*(stream for workspace in both for stream in workspace.lane.streams))
        times = []
        for each in pair:
            begin = each.workspace.stream(0).record()
            each.reduce(way, config)
            times.append((begin, each.workspace.stream(0).record()))
        blocker.release()
        group.wait(60)
        for each in pair:
            each.check(way)
        (begin, end), (other_begin, other_end) = times
        if node == EMULATED:
            together = end.elapsed_us(other_begin) > 0 and other_end.elapsed_us(begin) > 0
            assert together == own_streams


@pytest.mark.parametrize("schedule", [("min-pc", 0), ("async-latest", 0), ("random", 1)], ids=_name)
def test_two_workspaces_do_not_meet(schedule: tuple[str, int]) -> None:
    element, ways = Element.BF16, (WAYS[0], WAYS[-1])
    with two_workspaces(2, *schedule, own_streams=True) as both:
        pair = [Operands(each, inputs(2, 50, element, seed), element) for seed, each in enumerate(both)]
        for each, way in zip(pair, ways, strict=True):
            each.reduce(way, small_config(each.workspace, way, element))
        both[0].group.wait(60)
        for each, way in zip(pair, ways, strict=True):
            each.check(way)


@contextmanager
def two_workspaces(*args: Any, **options: Any) -> Iterator[tuple[Workspace, Workspace]]:
    """Of one group, both with ``own_streams`` or none."""
    with (
        reduce_group(*args, **options) as (group, one),
        Workspace(
            group, scratch_bytes=1 << 13, oneshot_bytes=256, channels=4, own_streams=options["own_streams"]
        ) as other,
    ):
        yield one, other


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ce"])
def test_a_captured_graph_is_replayed_with_new_data(way: str, node: str) -> None:
    """The epochs go on in device memory: nothing in the graph knows how often it has run (D23). By the way's
    default configuration."""
    element = Element.F32
    with reduce_group(2, node=node) as (group, workspace):
        need(way, group, element, node)
        operands = Operands(workspace, inputs(2, 60, element), element)
        allreduce.prepare(workspace, operands.dst, operands.src, dtype=element, way=way)
        group.wait(60)
        with ExitStack() as stack:
            graphs = [stack.enter_context(workspace.stream(rank).capture()) for rank in range(2)]
            operands.reduce(way)
        for replay in (1, 2):
            operands.fill(inputs(2, 60, element, seed=replay))
            for graph in graphs:
                graph.launch()
            group.wait(60)
            operands.check(way)


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("way", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_stated_order_is_near_the_true_sum(ranks: int, way: str, element: Element) -> None:
    """What the kernels are held against, held against float64. The bound is no wider than it must be: some
    sums come to a tenth of it."""
    data = inputs(ranks, 2000, element, seed=1)
    error = np.abs(element.widen(expected(way, data, element)).astype(np.float64) - true_sum(data, element))
    bound = error_bound(way, data, element)
    assert (error <= bound).all()
    assert ranks == 1 or (error > 0.1 * bound).any()


@pytest.mark.parametrize("element", Element)
def test_another_order_gives_other_bits(element: Element) -> None:
    """Else no test could tell the orders apart."""
    data = inputs(3, 500, element)
    by_rank = expected("oneshot", data, element)
    assert (by_rank != expected("ring.sm", data, element)).any()
    assert (by_rank != expected("oneshot", data[::-1], element)).any()
