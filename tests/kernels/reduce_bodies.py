"""What the ranks of test_reduce_processes.py and test_reduce_failures.py do, each in a process of its own;
several may share a GPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.elements import Element
from kernels.reduce.message import chunk_of
from kernels.reduce.workspace import Workspace
from smfree.ranks import RankContext
from tests.kernels.reduce_kit import CHANNELS, Operands, check_sums, inputs, small_config

COUNT = 110
Case = tuple[str, str, Element]
CASES: list[Case] = [
    *zip(["allreduce"] * len(allreduce.WAYS), allreduce.WAYS, cycle(Element), strict=False),
    *zip(["reduce_scatter"] * len(reduce_scatter.WAYS), reduce_scatter.WAYS, cycle(Element), strict=False),
]
"""Collective, way, element: every way once, and every element by several."""


@contextmanager
def workspace(context: RankContext, **options: Any) -> Iterator[Workspace]:
    """That of the rank's new group."""
    with (
        Group.join(
            context.device, context.rendezvous, pool_bytes=1 << 18, several_per_gpu=True, **options
        ) as group,
        Workspace(group, scratch_bytes=1 << 14, oneshot_bytes=1 << 10, channels=CHANNELS) as made,
    ):
        yield made


def reduce_each_way(context: RankContext, backing: Backing, cases: list[Case]) -> dict[tuple[str, str], str]:
    """By collective and way: "right" when the rank has the bits that it must, and all ranks the same; else
    what was wrong, or why these GPUs cannot. One workspace has them all, one after the other."""
    with workspace(context, backing=backing) as space:
        return {
            (collective, way): _reduce(space, collective, way, element, call)
            for call, (collective, way, element) in enumerate(cases)
        }


def _reduce(space: Workspace, collective: str, way: str, element: Element, call: int) -> str:
    group = space.group
    interface: Any = allreduce if collective == "allreduce" else reduce_scatter
    reason = interface.ways(group)[way]
    if reason is not None:
        return reason
    like = {"direct": "twoshot"}.get(way, way)
    """The AllReduce with its configuration and its order of summation."""
    config = small_config(space, like, element)
    data = inputs(group.world_size, COUNT, element, call)
    bits = (_summed if interface is allreduce else _scattered)(space, way, element, data, config)
    told = group.exchange.gather([bits.tobytes()], "sums")
    if interface is allreduce and set(told) != {told[0]}:
        return "the ranks have different bits"
    whole = bits if interface is allreduce else np.frombuffer(b"".join(told), element.bits)
    try:
        check_sums(like, [whole], data, element)
    except AssertionError as error:
        return str(error)
    return "right"


def _summed(space: Workspace, way: str, element: Element, data: Any, config: Any) -> Any:
    """What an AllReduce gives to the own rank."""
    operands = Operands(space, data, element, "apart")
    operands.reduce(way, config)
    space.group.wait(timeout_s=60)
    return operands.found(space.group.members[0].rank)


def _scattered(space: Workspace, way: str, element: Element, data: Any, config: Any) -> Any:
    """The chunk that a ReduceScatter gives to the own rank."""
    (member,) = space.group.members
    begin, end = chunk_of(COUNT * element.bytes, element, space.group.world_size, member.rank)
    src, dst = member.device.asarray(data[member.rank]), member.device.empty(end - begin, np.uint8)
    reduce_scatter.reduce_scatter(space, dst, src, dtype=element, way=way, config=config)
    space.group.wait(timeout_s=60)
    return dst.numpy().view(element.bits)


def die_in_the_middle(context: RankContext, way: str, clock: Path) -> None:
    """Rank 1 is killed while all reduce again and again, and leaves the time of it in the file ``clock``."""

    def die() -> None:
        clock.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    with workspace(context) as space:
        element = Element.F32
        operands = Operands(space, inputs(context.world_size, COUNT, element), element, "in place")
        config = small_config(space, way, element)
        operands.reduce(way, config)
        space.group.wait(timeout_s=100)
        if context.rank == 1:
            threading.Timer(0.2, die).start()
        while True:
            operands.reduce(way, config)
            space.group.wait(timeout_s=100)
