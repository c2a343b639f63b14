"""How far does a modelled "who should reduce" move when one parameter of the model is wrong by 20 %?

As bench_gather_uncertainty.py, for the AllReduces of bfloat16 of this run on a few ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from bench.bench_gather_uncertainty import Ranks
from bench.reductions import ALL, ONESHOT_BYTES, SCRATCH_BYTES, Job, place, pool_bytes
from bench.reruns import LARGEST_BYTES, crossing, vary_pairs
from kernels.ipc.group import Group
from kernels.reduce.allreduce import allreduce, prepare
from kernels.reduce.elements import Element
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device
from smfree.measure.allreduce import SIZE, by_machine, comparisons
from smfree.measure.collective import Lineup
from smfree.measure.log import RunLog
from smfree.measure.nodes import open_node
from smfree.measure.options import Axes
from smfree.measure.ranks import several
from smfree.measure.records import Question
from smfree.measure.sizes import by_way, changes_of_lead

RANKS = 4
ELEMENT = Element.BF16


def machines(axes: Axes, spec: str) -> Iterable[Ranks]:
    """Emulated ones, on full axes: it takes minutes."""
    if axes is Axes.FULL and spec.startswith("emu:"):
        yield Ranks(RANKS)


def seconds(workspace: Workspace, lineup: Lineup, way: str, message_bytes: int) -> float:
    """Of one AllReduce, the second on its buffers."""
    group = workspace.group
    with group.symmetric(message_bytes, "src") as src, group.symmetric(message_bytes, "dst") as dst:
        prepare(workspace, dst, src, dtype=ELEMENT, way=way)
        place(Job(ALL, workspace, src, dst, ELEMENT))
        launch = partial(allreduce, workspace, dst, src, dtype=ELEMENT, way=way)
        return [lineup.run(lambda _: launch(), 1).seconds for _ in range(2)][-1]


@pytest.mark.points.with_args(machines)
def bench_reduce_uncertainty(device: Device, point: Ranks, run_log: RunLog) -> None:
    """Vary every parameter that a change of the lead can depend on."""
    here = device.spec, point.ranks, ELEMENT.value, Question.ALLREDUCE
    mine = [
        records
        for records in by_machine(run_log.records)
        if (records[0].device, records[0].key["ranks"], records[0].key["dtype"], records[0].question) == here
    ]
    if not mine or several():
        return
    changes = [set(pair) for pair in changes_of_lead(by_way(mine[0], SIZE))]
    pairs = [
        pair for pair in crossing(comparisons(mine[0])) if {pair.base.name, pair.challenger.name} in changes
    ]
    node = open_node(device.spec, point.ranks)
    room = pool_bytes(point.ranks, LARGEST_BYTES)
    try:
        with (
            run_log.seconds.spend("run"),
            Group.local(node.devices, pool_bytes=room) as group,
            Workspace(group, scratch_bytes=SCRATCH_BYTES, oneshot_bytes=ONESHOT_BYTES) as workspace,
        ):
            vary_pairs(run_log, node, group, pairs, partial(seconds, workspace))
    finally:
        node.close()
