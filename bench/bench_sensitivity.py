"""How far does a modelled crossover move when one parameter of the model is wrong by 20 %?

A modelled time has no sample noise. So for every crossover that the latency points of this run showed, the
chains of the
two engines run again, short, on the emulated device with one clock parameter scaled, at the sizes around
the crossover.
Nothing is computed from a parameter: every time here is what a kernel's clock said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from bench.axes import ENGINES, LATENCY
from bench.pools import long_buffers
from kernels.chain import Leg
from kernels.engine import engine
from smfree.cuda import Device
from smfree.measure.answers import BASE, curves
from smfree.measure.log import RunLog
from smfree.measure.options import Axes
from smfree.measure.records import Memory, Question
from smfree.measure.variants import clock_parameters, varied
from smfree.model.crossover import crossover, format_bytes
from smfree.model.sensitivity import as_record, describe, largest_first, shifts

#: Steps of the short chains. A deterministic clock needs no more than to get past the first ones.
STEPS = (2, 8)


@dataclass(frozen=True, slots=True)
class Regime:
    """One row of the table of crossovers."""

    challenger: str
    leg: Leg
    memory: Memory
    threads: int

    @property
    def id(self) -> str:
        return f"{self.challenger}-{self.threads}t-{self.leg}-{self.memory.value}"

    @property
    def key(self) -> dict[str, Any]:
        return {"threads": self.threads, "leg": self.leg.value, "memory": self.memory.value}


def regimes(axes: Axes, spec: str) -> Iterable[Regime]:
    """Latency regimes of an emulated device; a measured crossover has the uncertainty of its samples
    instead."""
    if not spec.startswith("emu:"):
        return
    chosen = LATENCY[axes]
    for memory in chosen.memories:
        for leg in chosen.legs:
            for threads in chosen.threads:
                for name in ENGINES:
                    if name != BASE:
                        yield Regime(name, leg, memory, threads)


class ShortChains:
    """Cycles of one tile by engine, size and variation of the model; each is run once."""

    def __init__(self, device: Device, regime: Regime) -> None:
        self._device = device
        self._regime = regime
        self._known: dict[tuple[Any, ...], float] = {}

    def pair(self, parameter: str | None, factor: float, tile_bytes: int) -> tuple[float, float]:
        """(cycles of the LSU, cycles of the challenger)."""
        return tuple(  # type: ignore[return-value]
            self._cycles(name, parameter, factor, tile_bytes) for name in (BASE, self._regime.challenger)
        )

    def _cycles(self, name: str, parameter: str | None, factor: float, tile_bytes: int) -> float:
        if parameter is not None and parameter not in clock_parameters(self._device, (name,)):
            parameter, factor = None, 1.0
        key = (name, parameter, factor, tile_bytes)
        if key not in self._known:
            with varied(self._device, parameter, factor):
                self._known[key] = self._run(name, tile_bytes)
        return self._known[key]

    def _run(self, name: str, tile_bytes: int) -> float:
        regime, device = self._regime, self._device
        mover = engine(name)
        config = mover.latency_config(device.capabilities, tile_bytes, regime.threads, regime.leg)
        buffers = long_buffers(device, tile_bytes, regime.memory)
        cycles = []
        for steps in (
            (max(STEPS), *STEPS) if regime.memory is Memory.L2 else STEPS
        ):  # the first walk warms the L2
            if regime.memory is Memory.DRAM:
                device.emulator.l2.flush()
            mover.chain(buffers.dst, buffers.pool, buffers.result, config=config, num_steps=steps)
            device.synchronize()
            cycles.append(buffers.read_result(steps)[0])
        return (cycles[-1] - cycles[-2]) / (STEPS[1] - STEPS[0])


@pytest.mark.points.with_args(regimes)
def bench_sensitivity(device: Device, point: Regime, run_log: RunLog) -> None:
    """Vary every clock parameter that these two engines can depend on, if their latency curves cross."""
    spec = device.spec
    records = [
        record
        for record in run_log.records
        if record.device == spec
        and record.question is Question.LATENCY
        and all(record.key[name] == value for name, value in point.key.items())
    ]
    found = curves(records)
    if BASE not in found or point.challenger not in found:
        return  # its points were not part of this run, or are not possible on this device
    crossing = crossover(found[BASE], found[point.challenger])
    if crossing.size_bytes is None:
        return
    sizes = sorted(set(found[BASE].samples) & set(found[point.challenger].samples))
    parameters = clock_parameters(device, (BASE, point.challenger))
    with run_log.seconds.spend("run"):
        nominal, moved = shifts(crossing, parameters, sizes, ShortChains(device, point).pair)
    ordered = largest_first(nominal, moved) if nominal is not None else []
    run_log.sensitivities.append(
        {
            "device": spec,
            "folder": records[0].folder,
            "challenger": point.challenger,
            "key": point.key,
            "crossover_bytes": crossing.size_bytes,
            "moved": [describe(shift, format_bytes) for shift in ordered],
            **as_record(nominal, ordered),
        }
    )
