"""What showed a crossover runs again, with one parameter of the emulated device or node scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from bench.groups import finish
from kernels.ipc.group import Group
from smfree.measure.collective import Lineup
from smfree.measure.helpers import share
from smfree.measure.log import RunLog
from smfree.measure.nodes import Node
from smfree.measure.sizes import Comparison
from smfree.measure.variants import gather_parameters, varied_node
from smfree.model.crossover import Crossover
from smfree.model.sensitivity import Shift, as_record, largest_first, shifts

#: Larger messages take the emulator minutes: crossovers above are not varied.
LARGEST_BYTES = 1 << 20


class Reruns:
    """Times of two contenders by size and variation of the model; each is run once.

    ``run(name, size)``: the time of one; ``vary(parameter, factor)``: a block in which the model is another;
    ``parameters(names)``: those that the times of contenders may depend on.
    """

    def __init__(
        self,
        base: str,
        challenger: str,
        run: Callable[[str, int], float],
        vary: Callable[[str | None, float], AbstractContextManager[None]],
        parameters: Callable[[tuple[str, ...]], Sequence[str]],
    ) -> None:
        self._names = base, challenger
        self._run, self._vary, self._parameters = run, vary, parameters
        self._known: dict[tuple[Any, ...], float] = {}

    @property
    def parameters(self) -> Sequence[str]:
        """That may move the crossover."""
        return self._parameters(self._names)

    def pair(self, parameter: str | None, factor: float, size: int) -> tuple[float, float]:
        """The times of the base and of the challenger."""
        base, challenger = (self._time(name, parameter, factor, size) for name in self._names)
        return base, challenger

    def _time(self, name: str, parameter: str | None, factor: float, size: int) -> float:
        if parameter is not None and parameter not in self._parameters((name,)):
            parameter, factor = None, 1.0
        key = (name, parameter, factor, size)
        if key not in self._known:
            with self._vary(parameter, factor):
                self._known[key] = self._run(name, size)
        return self._known[key]

    def sensitivity(
        self, found: Crossover, sizes: Iterable[int], parameters: Sequence[str], jobs: int
    ) -> dict[str, Any]:
        """The crossover, and what moves it how far: for the run's file."""

        def each(vary: Callable[[str], Shift | None], names: Sequence[str]) -> list[Shift | None]:
            return share(jobs, lambda number: vary(names[number]), len(names))

        nominal, moved = shifts(found, parameters, sorted(sizes), self.pair, each)
        ordered = largest_first(nominal, moved) if nominal is not None else []
        return {"crossover_bytes": found.size_bytes, **as_record(nominal, ordered)}


# --- collectives --------------------------------------------------------------------------------------------

Seconds = Callable[[Lineup, str, int], float]
"""Of a way at a size, as the node is now."""


def node_reruns(node: Node, group: Group, base: str, challenger: str, seconds: Seconds) -> Reruns:
    """Of two ways on all GPUs of a node."""
    lineup = Lineup(group.members, node.blocker, partial(finish, group))
    run, vary = partial(seconds, lineup), partial(varied_node, node.devices)
    return Reruns(base, challenger, run, vary, partial(gather_parameters, node.devices[0]))


def crossing(pairs: Sequence[Comparison]) -> list[Comparison]:
    """Those with a crossover that can be varied."""
    return [
        pair
        for pair in pairs
        if pair.result.bracket is not None and not pair.result.tie and pair.result.bracket[1] <= LARGEST_BYTES
    ]


def vary_pairs(
    run_log: RunLog, node: Node, group: Group, pairs: Sequence[Comparison], seconds: Seconds
) -> None:
    """Log for every pair what moves its crossover."""
    for pair in pairs:
        reruns = node_reruns(node, group, pair.base.name, pair.challenger.name, seconds)
        sizes = {n for n in set(pair.base.samples) & set(pair.challenger.samples) if n <= LARGEST_BYTES}
        run_log.sensitivities.append(
            {
                "device": pair.record.device,
                "folder": pair.record.folder,
                "question": pair.record.question.value,
                "challenger": pair.challenger.name,
                "key": pair.regime,
                **reruns.sensitivity(pair.result, sizes, reruns.parameters, run_log.jobs),
            }
        )
