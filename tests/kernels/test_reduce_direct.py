"""Direct reductions: one-shots whose sides, turns and grids change from call to call, two-shots of several
turns. Every way's sums, lengths, types and places are in test_allreduce.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError
from kernels.ipc.wait import CollectiveTimeout
from kernels.reduce import allreduce
from kernels.reduce.config import KernelWay
from kernels.reduce.direct import ONESHOT, OneshotConfig, TwoshotConfig
from kernels.reduce.direct import TWOSHOT as TWOSHOT_WAY
from kernels.reduce.elements import Element
from kernels.reduce.message import all_reduce_message
from kernels.reduce.workspace import Workspace
from tests.kernels.mutant_kit import edited
from tests.kernels.reduce_kit import (
    Operands,
    check_sums,
    counted,
    inputs,
    reduce_group,
    set_epochs,
    small_config,
)

ONE: Any = {"threads": 32, "piece_bytes": 128}
WIDE, NARROW = OneshotConfig(ctas=4, **ONE), OneshotConfig(ctas=1, **ONE)
TWOSHOT = TwoshotConfig(ctas=2, **ONE)


def run_calls(workspace: Workspace, plan: Sequence[tuple[str, Any, int]], element: Element) -> list[bool]:
    """AllReduces by (way, config, count) into one dst, none waited for before the next, each copied away at
    once; whether each was right."""
    group = workspace.group
    dst = group.symmetric(max(count for *_, count in plan) * element.bytes, "dst")
    kept: dict[tuple[int, int], Any] = {}
    given = []
    for call, (way, config, count) in enumerate(plan):
        data, part = inputs(group.world_size, count, element, call), dst.bytes_view(0, count * element.bytes)
        given.append(data)
        src = [
            member.device.empty(part.nbytes).copy_from(
                data[member.rank].view(np.uint8), stream=workspace.stream(member.rank)
            )
            for member in group.members
        ]
        config = config or small_config(workspace, way, element)
        allreduce.allreduce(workspace, part, src, dtype=element, way=way, config=config)
        for member in group.members:
            kept[call, member.rank] = copy = member.device.empty(part.nbytes)
            copy.copy_from_device(part.array(member.rank), stream=workspace.stream(member.rank))
    group.wait(60)
    right = []
    for call, (way, _, _) in enumerate(plan):
        found = [kept[call, rank].numpy().view(element.bits) for rank in range(group.world_size)]
        try:
            check_sums(way, found, given[call], element)
        except AssertionError:
            right.append(False)
        else:
            right.append(True)
    return right


MIXED = [
    ("oneshot", WIDE, 90), ("oneshot", NARROW, 90), ("oneshot", WIDE, 33), ("ring.sm", None, 40),
    ("oneshot", NARROW, 1), ("twoshot", TWOSHOT, 700), ("oneshot", WIDE, 300), ("oneshot", NARROW, 20),
    ("oneshot", WIDE, 129),
]  # fmt: skip
"""Grids of 4 CTAs and 1; messages of one turn, of several, and of fewer pieces than CTAs."""


@pytest.mark.parametrize(
    ("ranks", "schedule", "element"),
    [
        (2, ("producer-ahead", 0), Element.F32),
        (3, ("async-latest", 0), Element.BF16),
        (5, ("async-earliest", 0), Element.F16),
        (8, ("min-pc", 0), Element.BF16),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(getattr(value, "value", value)),
)
def test_sides_alternate_whatever_grids_turns_and_ways_come_in_between(
    ranks: int, schedule: tuple[str, int], element: Element, node: str
) -> None:
    """Across the wrap of every epoch, which the count of turns is one of."""
    with reduce_group(ranks, *schedule, node=node, scratch_bytes=1 << 15) as (_, workspace):
        set_epochs(workspace, -5)
        plan = MIXED[-5:] if ranks > 3 else MIXED
        assert run_calls(workspace, plan, element) == [True] * len(plan)


COUNT_ALL = "c < SIGNAL_SLOTS - SIGNAL_ONESHOT; c += step"


def test_a_count_of_turns_for_each_channel_alone_takes_a_side_that_is_read() -> None:
    """Channel 1 has no part in every second call, falls behind, and takes the side that the last call, of one
    CTA, may still be reading."""
    plan = [
        ("oneshot", config, 128)
        for config in (WIDE, OneshotConfig(ctas=1, threads=32, piece_bytes=512), WIDE)
    ]
    with reduce_group(2, "min-pc") as (_, workspace):
        assert run_calls(workspace, plan, Element.F32) == [True, True, True]
    with (
        edited("oneshot", (COUNT_ALL, "c < gridDim.x; c += step")),
        reduce_group(2, "min-pc") as (_, workspace),
    ):
        assert run_calls(workspace, plan, Element.F32) == [True, False, True]


@pytest.mark.parametrize(
    ("way", "config", "count", "turns"),
    [
        ("oneshot", WIDE, 4 * 32, 1),
        ("oneshot", WIDE, 4 * 32 + 1, 2),
        ("oneshot", NARROW, 4 * 32, 4),
        ("twoshot", TWOSHOT, 3 * 2 * 32, 1),
        ("twoshot", TWOSHOT, 3 * 4 * 32, 2),
    ],
    ids=lambda value: str(value) if isinstance(value, int | str) else f"{value.ctas}-ctas",
)
def test_a_turn_has_one_barrier_and_a_two_shot_one_more(
    way: str, config: Any, count: int, turns: int
) -> None:
    """dst begins a line: pieces are whole."""
    with reduce_group(3) as (_, workspace):
        operands = Operands(workspace, inputs(3, count, Element.F32), Element.F32, dst_shift=16)
        found = counted(workspace, lambda: operands.reduce(way, config))
        operands.check(way)
    assert {one.peer_signals for one in found} == {2 * config.ctas * (turns + (way == "twoshot"))}


@pytest.mark.parametrize(
    ("way", "config"), [(ONESHOT, WIDE), (TWOSHOT_WAY, TWOSHOT)], ids=["oneshot", "twoshot"]
)
def test_a_rank_that_never_calls_is_named_with_the_turn(way: KernelWay, config: Any) -> None:
    with (
        pytest.raises(CollectiveTimeout, match=r"rank 0 waits for rank 1 at the terms of turn 1"),
        reduce_group(2) as (group, workspace),
    ):
        message = all_reduce_message(workspace, group.symmetric(80, "dst"), None, Element.F32)
        member = group.members[0]
        message.target(0).fill(0, stream=workspace.stream(0))
        way.launch(member, message, config, way.prepare(member, message, config))
        group.wait(0.2)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "oneshot", "twoshot"),
    [
        (4, 8, (1, 4096), (1, 1024)),
        (4, 4096, (1, 4096), (1, 1024)),
        (8, 65536, (16, 4096), (8, 1024)),
        (8, 262144, (32, 8192), (32, 1024)),
        (3, 3 * 1024, (1, 4096), (1, 1024)),
        (3, 3 * 1024 + 4, (1, 4096), (2, 1024)),
    ],
)
def test_default_grids_are_small_for_small_messages_and_take_one_turn(
    ranks: int, nbytes: int, oneshot: tuple[int, int], twoshot: tuple[int, int]
) -> None:
    sizes: Any = {"scratch_bytes": 1 << 20, "oneshot_bytes": 1 << 18, "channels": 64, "pool_bytes": 8 << 20}
    with reduce_group(ranks, **sizes) as (_, workspace):
        for way, wanted in (("oneshot", oneshot), ("twoshot", twoshot)):
            config: Any = allreduce.throughput_config(workspace, way, nbytes)
            assert (config.ctas, config.piece_bytes) == wanted
            assert config.unroll == min(4, 16 // ranks)


def test_what_has_no_room_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"piece_bytes must be a positive multiple of 128 \(got 100\)"):
        OneshotConfig(piece_bytes=100)
    with reduce_group(2) as (_, workspace):
        operands = Operands(workspace, inputs(2, 20, Element.F32), Element.F32)
        with pytest.raises(
            ConfigError, match=r"one-shots have 1024 bytes per turn \(got 1152 bytes needed by"
        ):
            operands.reduce("oneshot", OneshotConfig(ctas=3, threads=32, piece_bytes=384))
        with pytest.raises(ConfigError, match=r"16384 bytes of scratch memory \(got 32768 bytes needed by"):
            operands.reduce("twoshot", TwoshotConfig(ctas=2, threads=32, piece_bytes=4096))
        with pytest.raises(ConfigError, match=r"the config of way 'oneshot' is a OneshotConfig"):
            operands.reduce("oneshot", TWOSHOT)
        operands.reduce("oneshot", OneshotConfig(ctas=2, threads=32, piece_bytes=512))
        workspace.group.wait(60)
        operands.check("oneshot")
