"""Reductions in which a rank is late, never comes, dies or calls something else: who is told what, and that
all ends. One process has all ranks, or each rank is a process of an emulated node (a thread), or a real
process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.wait import CollectiveTimeout
from kernels.reduce.allreduce import WAYS, prepare
from kernels.reduce.elements import Element
from kernels.reduce.workspace import Workspace
from smfree.cuda import KernelFaultError
from smfree.ranks import PeerLost, RankFailed
from tests.kernels.group_kit import joined
from tests.kernels.reduce_bodies import die_in_the_middle
from tests.kernels.reduce_kit import CHANNELS, Operands, check_sums, inputs, need, reduce_group, small_config
from tests.nodes import spawn_ranks

COUNT = 90
GPUS = ["h100"] * 3
BY_KERNEL = [way for way in WAYS if way != "ce"]
"""The epochs of copies are the process's: there its ranks call together."""
LATE = "; rank 2 waits for nobody: not called yet, late, or failed. Look at what the ranks that"
WAITS = {
    "ring.sm": {(0, 2, "reduce-scatter step 1"), (1, 0, "reduce-scatter step 2")},
    "ring.tma": {(0, 2, "reduce-scatter step 1"), (1, 0, "reduce-scatter step 2")},
    "tree": {
        (0, 2, "room up tree 1"), (0, 1, "broadcast down tree 0"), (0, 2, "broadcast down tree 1"),
        (1, 2, "reduction up tree 0"), (1, 2, "room up tree 1"), (1, 2, "broadcast down tree 1"),
    },
    "oneshot": {(0, 2, "terms of turn 1"), (1, 2, "terms of turn 1")},
    "twoshot": {(0, 2, "terms of turn 1"), (1, 2, "terms of turn 1")},
    "nvls": {(0, 2, "entry barrier"), (1, 2, "entry barrier")},
    "ce": {(0, 2, "copies' terms"), (1, 2, "copies' terms")},
}  # fmt: skip
"""Rank, peer and step of all waits, when rank 2 of 3 never calls."""


@contextmanager
def only(group: Group, *ranks: int) -> Iterator[None]:
    """Meanwhile the calls of the group are those of these ranks."""
    everybody = group.members
    group.members = tuple(member for member in everybody if member.rank in ranks)
    try:
        yield
    finally:
        group.members = everybody


def operands_in(space: Workspace) -> Operands:
    """Of all its ranks, in place."""
    return Operands(space, inputs(space.group.world_size, COUNT, Element.F32), Element.F32, "in place")


def call(operands: Operands, way: str, **values: Any) -> None:
    """Queue an AllReduce by two CTAs per rank, with ``values`` of the configuration."""
    operands.reduce(way, small_config(operands.workspace, way, Element.F32, **values))


def load(operands: Operands, *ways: str) -> None:
    """What :func:`call` will queue, on every device: beside a kernel that waits it may have to wait, too."""
    space = operands.workspace
    for way in ways:
        config = small_config(space, way, Element.F32)
        prepare(space, operands.dst, operands.src, dtype=Element.F32, way=way, config=config)


# --- all ranks in one process ------------------------------------------------------------------------


@pytest.mark.parametrize("way", BY_KERNEL)
def test_a_rank_that_never_calls_is_named(way: str, node: str) -> None:
    with reduce_group(3, node=node) as (group, space):
        need(way, group, Element.F32, node)
        operands, start = operands_in(space), time.monotonic()
        with only(group, 0, 1):
            call(operands, way)
        with pytest.raises(CollectiveTimeout) as late:
            group.wait(timeout_s=0.1)
        assert time.monotonic() - start < 20
        assert {(each.rank, each.peer, each.step) for each in late.value.waits} == WAITS[way]
        text = str(late.value)
        assert text.startswith(
            f"allreduce 'dst' ({way}) did not end within 0.1 s: rank 0 waits for rank 2 at "
        )
        assert " in 'workspace', epoch 1 wanted, 0 seen; " in text and LATE in text
        assert all(stream.query() for stream in group.streams)
        with pytest.raises(GroupError, match="the group has failed, its ranks are out of step"):
            call(operands, way)


@pytest.mark.parametrize("way", BY_KERNEL)
def test_the_twin_that_is_late_gets_and_gives_the_right_sums(way: str, node: str) -> None:
    with reduce_group(3, node=node) as (group, space):
        need(way, group, Element.F32, node)
        operands = operands_in(space)
        load(operands, way)
        with only(group, 0, 1):
            call(operands, way)
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            assert not space.stream(0).query()
        with only(group, 2):
            call(operands, way)
        group.wait(timeout_s=20)
        operands.check(way)


@pytest.mark.parametrize(("way", "other"), [("ring.sm", "twoshot"), ("tree", "ring.tma")])
def test_ranks_that_go_different_ways_wait_for_each_other(way: str, other: str, node: str) -> None:
    with reduce_group(3, node=node) as (group, space):
        for name in (way, other):
            need(name, group, Element.F32, node)
        operands = operands_in(space)
        load(operands, way, other)
        for name, ranks in ((way, (0, 1)), (other, (2,))):
            with only(group, *ranks):
                call(operands, name)
        with pytest.raises(CollectiveTimeout) as late:
            group.wait(timeout_s=0.1)
        text = str(late.value)
        assert text.startswith(f"allreduce 'dst' ({way}), allreduce 'dst' ({other}) did not end within 0.1 s")
        assert {each.rank for each in late.value.waits} == {0, 1, 2}
        assert "; all wait for each other: their calls differ, or need more time. Look" in text


def test_a_rank_with_fewer_ctas_is_waited_for(node: str) -> None:
    """CTA 1 of the others has nobody to speak with. Its own CTA does not get the pieces that it expects."""
    with reduce_group(3, node=node) as (group, space):
        operands = operands_in(space)
        load(operands, "ring.sm")
        for ranks, ctas in (((0, 1), 2), ((2,), 1)):
            with only(group, *ranks):
                call(operands, "ring.sm", ctas=ctas)
        with pytest.raises(CollectiveTimeout) as late:
            group.wait(timeout_s=0.1)
        assert any(each.ctas == (1,) and each.peer == 2 for each in late.value.waits)


def test_an_emulated_deadlock_is_told_by_ranks() -> None:
    with pytest.raises(KernelFaultError, match="deadlock") as fault, reduce_group(3) as (group, space):
        operands = operands_in(space)
        with only(group, 0, 1):
            call(operands, "ring.sm", ctas=1)
        group.wait()
    *waits, cause = fault.value.__notes__
    data = space.channels  # the first slot of a ring's data
    assert [each.partition(": ")[2] for each in waits] == [
        f"rank 0 waits for rank 2, CTA 0, slot {data} of 'workspace'",
        f"rank 1 waits for rank 0, CTA 0, slot {data} of 'workspace'",
    ]
    assert all(each.partition(": ")[0] in str(fault.value) for each in waits)  # the addresses
    assert cause == "rank 2 waits for nobody: not called yet, late, or failed"


# --- processes ---------------------------------------------------------------------------------------


def between(body: Any, **options: Any) -> list[Any]:
    """``body(group, workspace)`` as each of three processes."""

    def rank(group: Group) -> Any:
        sizes: dict[str, Any] = {"scratch_bytes": 1 << 13, "oneshot_bytes": 1 << 10, "channels": CHANNELS}
        with Workspace(group, **sizes, **options) as space:
            return body(group, space)

    return joined(GPUS, rank, options=lambda rank: {"pool_bytes": 1 << 17})


def until_lost(group: Group) -> None:
    """Raises the PeerLost."""
    while True:
        time.sleep(0.01)
        group.wait(timeout_s=20)


@pytest.mark.parametrize("way", ["ring.sm", "ce"])
def test_between_processes_a_rank_that_never_calls_is_named(way: str) -> None:
    def body(group: Group, space: Workspace) -> None:
        operands = operands_in(space)
        if group.members[0].rank != 2:
            call(operands, way)
            group.wait(timeout_s=0.5)
        until_lost(group)

    errors = between(body)
    assert isinstance(errors[2], PeerLost)
    assert {type(errors[0]), type(errors[1])} <= {CollectiveTimeout, PeerLost}
    for rank, peer, step in WAITS[way]:
        assert f"rank {rank} waits for rank {peer} at the {step}: " in str(errors[rank])
    late = next(error for error in errors if isinstance(error, CollectiveTimeout))
    assert str(late).startswith(f"allreduce 'dst' ({way}) did not end within 0.5 s: rank ")


def test_between_processes_late_ranks_give_right_sums_each_way() -> None:
    """Another one is late each time."""

    def body(group: Group, space: Workspace) -> None:
        operands = operands_in(space)
        for turn, way in enumerate(WAYS):
            operands.fill(inputs(3, COUNT, Element.F32, turn))
            group.barrier()
            time.sleep(0.05 * (group.members[0].rank == turn % 3))
            call(operands, way)
            group.wait(timeout_s=20)
            check_sums(way, [operands.found(group.members[0].rank)], operands.data, Element.F32)

    assert between(body) == [None] * 3


@pytest.mark.parametrize(
    ("way", "count", "values", "words"),
    [
        ("nvls", COUNT, {}, "90 of float32 at byte 64 of 'dst', nvls, NvlsConfig(ctas=2,"),
        ("oneshot", COUNT - 1, {}, "89 of float32 at byte 64 of 'dst', oneshot, OneshotConfig(ctas=2,"),
        ("oneshot", COUNT, {"ctas": 1}, "90 of float32 at byte 64 of 'dst', oneshot, OneshotConfig(ctas=1,"),
    ],
    ids=["way", "count", "configuration"],
)
def test_hosts_that_compare_their_calls_see_what_the_signals_do_not(
    way: str, count: int, values: dict[str, int], words: str
) -> None:
    """Rank 2's call differs; the words that it signals are those that the others wait for."""

    def body(group: Group, space: Workspace) -> str:
        operands, differs = operands_in(space), group.members[0].rank == 2
        call(operands, "oneshot")
        if differs:
            operands.dst = operands.dst.bytes_view(0, 4 * count)
        with pytest.raises(
            GroupError, match="an AllReduce: every rank makes the same call in the s"
        ) as caught:
            call(operands, way if differs else "oneshot", **(values if differs else {}))
        group.wait(timeout_s=20)
        return str(caught.value)

    told = between(body, compare_calls=True)
    assert told[0] == told[1] == told[2] and f"; rank 2: {words}" in told[0]


@pytest.mark.parametrize("way", ["ring.tma", "tree", "twoshot", "ce"])
def test_a_rank_that_fails_ends_the_others_at_once(way: str) -> None:
    queued = threading.Barrier(3, timeout=20)

    def body(group: Group, space: Workspace) -> None:
        operands = operands_in(space)
        if group.members[0].rank == 2:
            queued.wait()
            raise ValueError("batch 7 is empty")
        call(operands, way)
        queued.wait()
        group.wait(timeout_s=60)

    start = time.monotonic()
    errors = between(body)
    assert time.monotonic() - start < 20 and isinstance(errors[2], ValueError)
    for error in errors[:2]:
        assert isinstance(error, PeerLost) and "rank 2 failed: ValueError: batch 7 is empty" in str(error)
        assert f"; allreduce 'dst' ({way}) was given up: rank" in str(error)


def test_a_killed_process_ends_the_others_within_seconds(node: str, tmp_path: Path) -> None:
    """Rank 1 dies while all reduce again and again."""
    clock = tmp_path / "clock"
    with pytest.raises(RankFailed) as failed:
        spawn_ranks(node, die_in_the_middle, 3, "ring.sm", clock, timeout_s=120)
    assert time.monotonic() - float(clock.read_text()) < 15  # the time limits are far above
    text = str(failed.value)
    assert text.startswith("rank 1 of 3 was killed by SIGKILL")
    for rank in (0, 2):
        assert f"then rank {rank} failed: {PeerLost.__module__}.PeerLost: rank {rank} waited in" in text
