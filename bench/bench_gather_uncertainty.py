"""How far does a modelled "who should gather" move when one parameter of the model is wrong by 20 %?

As bench_uncertainty.py, for the AllGathers of this run: where two ways change the lead, both run again on the
emulated node with one parameter of all its GPUs and links scaled, at the sizes around the crossover.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import pytest

from bench.bench_allgather import COPY_ENGINES, SLACK_BYTES, place
from bench.peer_axes import ALLGATHER
from bench.reruns import LARGEST_BYTES, crossing, vary_pairs
from kernels.ipc.allgather import allgather, prepare, throughput_config
from kernels.ipc.group import Group
from smfree.cuda import Device
from smfree.measure.allgather import by_machine, comparisons
from smfree.measure.collective import Lineup
from smfree.measure.log import RunLog
from smfree.measure.nodes import open_node
from smfree.measure.options import Axes
from smfree.measure.ranks import several


@dataclass(frozen=True, slots=True)
class Ranks:
    """All comparisons of so many ranks."""

    ranks: int

    @property
    def id(self) -> str:
        return f"{self.ranks}ranks"


def machines(axes: Axes, spec: str) -> Iterable[Ranks]:
    """Emulated ones, on full axes: it takes minutes."""
    if axes is Axes.FULL and spec.startswith("emu:"):
        chosen = ALLGATHER[axes]
        yield from map(Ranks, sorted({chosen.ranks, *chosen.other_ranks}))


def seconds(group: Group, lineup: Lineup, way: str, shard_bytes: int) -> float:
    """Of one gather, the second on its buffers."""
    config = COPY_ENGINES.get(way) or throughput_config(group, way, shard_bytes)
    way = "ce" if way in COPY_ENGINES else way
    dst = group.symmetric(group.world_size * shard_bytes, "varied")
    try:
        prepare(group, dst, way=way, config=config)
        place(group, dst, shard_bytes)
        launch = partial(allgather, group, dst, way=way, config=config)
        return [lineup.run(lambda _: launch(), 1).seconds for _ in range(2)][-1]
    finally:
        dst.free()


@pytest.mark.points.with_args(machines)
def bench_gather_uncertainty(device: Device, point: Ranks, run_log: RunLog) -> None:
    """Vary every parameter that a change of the lead can depend on."""
    mine = [
        records
        for records in by_machine(run_log.records)
        if (records[0].device, records[0].key["ranks"]) == (device.spec, point.ranks)
    ]
    pairs = crossing(comparisons(mine[0])) if mine else []
    if not pairs or several():
        return
    node = open_node(device.spec, point.ranks)
    pool_bytes = point.ranks * LARGEST_BYTES + SLACK_BYTES
    try:
        with run_log.seconds.spend("run"), Group.local(node.devices, pool_bytes=pool_bytes) as group:
            vary_pairs(run_log, node, group, pairs, partial(seconds, group))
    finally:
        node.close()
