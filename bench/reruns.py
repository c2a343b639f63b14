"""Collectives of a run again, on the emulated node with one parameter of all its GPUs and links scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.groups import finish
from kernels.ipc.group import Group
from smfree.measure.collective import Lineup
from smfree.measure.helpers import share
from smfree.measure.nodes import Node
from smfree.measure.sizes import Comparison
from smfree.measure.variants import gather_parameters, varied_node
from smfree.model.sensitivity import Shift, as_record, largest_first, shifts

#: Larger messages take the emulator minutes: crossovers above are not varied.
LARGEST_BYTES = 1 << 20

Seconds = Callable[[Lineup, str, int], float]
"""Of a way at a size, as the node is now."""


class Reruns:
    """Seconds of two ways by size and variation of the model; each is run once."""

    def __init__(self, node: Node, group: Group, pair: Comparison, seconds: Seconds) -> None:
        self._devices, self._pair, self._seconds = node.devices, pair, seconds
        self._lineup = Lineup(group.members, node.blocker, partial(finish, group))
        self._known: dict[tuple[Any, ...], float] = {}

    def pair(self, parameter: str | None, factor: float, size: int) -> tuple[float, float]:
        base, challenger = self._pair.base.name, self._pair.challenger.name
        return self._time(base, parameter, factor, size), self._time(challenger, parameter, factor, size)

    def _time(self, way: str, parameter: str | None, factor: float, size: int) -> float:
        if parameter is not None and parameter not in gather_parameters(self._devices[0], (way,)):
            parameter, factor = None, 1.0
        key = (way, parameter, factor, size)
        if key not in self._known:
            with varied_node(self._devices, parameter, factor):
                self._known[key] = self._seconds(self._lineup, way, size)
        return self._known[key]


def crossing(pairs: Sequence[Comparison]) -> list[Comparison]:
    """Those with a crossover that can be varied."""
    return [
        pair
        for pair in pairs
        if pair.result.bracket is not None and not pair.result.tie and pair.result.bracket[1] <= LARGEST_BYTES
    ]


def sensitivity(reruns: Reruns, pair: Comparison, parameters: Sequence[str], jobs: int) -> dict[str, Any]:
    """A row of the run's file."""
    sizes = [
        size
        for size in sorted(set(pair.base.samples) & set(pair.challenger.samples))
        if size <= LARGEST_BYTES
    ]

    def each(vary: Callable[[str], Shift | None], names: Sequence[str]) -> list[Shift | None]:
        return share(jobs, lambda number: vary(names[number]), len(names))

    nominal, moved = shifts(pair.result, parameters, sizes, reruns.pair, each)
    ordered = largest_first(nominal, moved) if nominal is not None else []
    return {
        "device": pair.record.device,
        "folder": pair.record.folder,
        "question": pair.record.question.value,
        "challenger": pair.challenger.name,
        "key": pair.regime,
        "crossover_bytes": pair.result.size_bytes,
        **as_record(nominal, ordered),
    }
