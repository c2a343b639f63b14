"""How far does a modelled "who should gather" move when one parameter of the model is wrong by 20 %?

As bench_uncertainty.py, for the AllGathers of this run: where two ways change the lead, both run again on the
emulated node with one parameter of all its GPUs and links scaled, at the sizes around the crossover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bench.bench_allgather import COPY_ENGINES, SLACK_BYTES, place
from bench.groups import finish
from bench.peer_axes import ALLGATHER
from kernels.ipc.allgather import allgather, prepare, throughput_config
from kernels.ipc.group import Group
from smfree.cuda import Device
from smfree.measure.allgather import by_machine, comparisons
from smfree.measure.collective import Lineup
from smfree.measure.helpers import share
from smfree.measure.log import RunLog
from smfree.measure.nodes import Node, open_node
from smfree.measure.options import Axes
from smfree.measure.ranks import several
from smfree.measure.records import Question
from smfree.measure.sizes import Comparison
from smfree.measure.variants import gather_parameters, varied_node
from smfree.model.sensitivity import Shift, as_record, largest_first, shifts

#: Larger shards take the emulator minutes: crossovers above are not varied.
LARGEST_BYTES = 1 << 20


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


class Reruns:
    """Seconds of two ways by size and variation of the model; each is run once."""

    def __init__(self, node: Node, group: Group, pair: Comparison) -> None:
        self._devices, self._group, self._pair = node.devices, group, pair
        self._lineup = Lineup(group.members, node.blocker, partial(finish, group))
        self._known: dict[tuple[Any, ...], float] = {}

    def pair(self, parameter: str | None, factor: float, shard_bytes: int) -> tuple[float, float]:
        base, challenger = self._pair.base.name, self._pair.challenger.name
        return (
            self._time(base, parameter, factor, shard_bytes),
            self._time(challenger, parameter, factor, shard_bytes),
        )

    def _time(self, way: str, parameter: str | None, factor: float, shard_bytes: int) -> float:
        if parameter is not None and parameter not in gather_parameters(self._devices[0], (way,)):
            parameter, factor = None, 1.0
        key = (way, parameter, factor, shard_bytes)
        if key not in self._known:
            with varied_node(self._devices, parameter, factor):
                self._known[key] = self._seconds(way, shard_bytes)
        return self._known[key]

    def _seconds(self, way: str, shard_bytes: int) -> float:
        """Of one gather, the second on its buffers."""
        group = self._group
        config = COPY_ENGINES.get(way) or throughput_config(group, way, shard_bytes)
        way = "ce" if way in COPY_ENGINES else way
        dst = group.symmetric(group.world_size * shard_bytes, "varied")
        try:
            prepare(group, dst, way=way, config=config)
            place(group, dst, shard_bytes)
            launch = partial(allgather, group, dst, way=way, config=config)
            return [self._lineup.run(lambda _: launch(), 1).seconds for _ in range(2)][-1]
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
    crossing = [
        pair
        for pair in (comparisons(mine[0]) if mine else [])
        if pair.result.bracket is not None and not pair.result.tie and pair.result.bracket[1] <= LARGEST_BYTES
    ]
    if not crossing or several():
        return
    node = open_node(device.spec, point.ranks)
    pool_bytes = point.ranks * LARGEST_BYTES + SLACK_BYTES
    try:
        with run_log.seconds.spend("run"), Group.local(node.devices, pool_bytes=pool_bytes) as group:
            for pair in crossing:
                ways = pair.base.name, pair.challenger.name
                parameters = gather_parameters(device, ways)
                run_log.sensitivities.append(sensitivity(node, group, pair, parameters, run_log.jobs))
    finally:
        node.close()


def sensitivity(
    node: Node, group: Group, pair: Comparison, parameters: Sequence[str], jobs: int
) -> dict[str, Any]:
    """A row of the run's file."""
    sizes = [
        size
        for size in sorted(set(pair.base.samples) & set(pair.challenger.samples))
        if size <= LARGEST_BYTES
    ]

    def each(vary: Callable[[str], Shift | None], names: Sequence[str]) -> list[Shift | None]:
        return share(jobs, lambda number: vary(names[number]), len(names))

    nominal, moved = shifts(pair.result, parameters, sizes, Reruns(node, group, pair).pair, each)
    ordered = largest_first(nominal, moved) if nominal is not None else []
    return {
        "device": pair.record.device,
        "folder": pair.record.folder,
        "question": Question.ALLGATHER.value,
        "challenger": pair.challenger.name,
        "key": pair.regime,
        "crossover_bytes": pair.result.size_bytes,
        **as_record(nominal, ordered),
    }
