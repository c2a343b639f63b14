"""How far does a modelled crossover move when one parameter of the model is wrong by 20 %?

A modelled time has no sample noise. So for every crossover that the points of this run showed, the two
engines run again, short, on the emulated device with one clock parameter scaled, at the sizes around the
crossover. Nothing is computed from a parameter: every time here is what the emulated device's clock said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest

from bench.axes import ENGINES, LATENCY, THROUGHPUT
from bench.bench_throughput import buffers_for
from bench.pools import long_buffers
from bench.reruns import Reruns
from kernels.chain import Leg
from kernels.engine import engine
from smfree.cuda import Device
from smfree.measure.answers import BASE, curves
from smfree.measure.log import RunLog
from smfree.measure.options import Axes
from smfree.measure.queue import DeviceQueue
from smfree.measure.records import Memory, Question
from smfree.measure.timer import DeviceTimer
from smfree.measure.variants import clock_parameters, varied
from smfree.model.crossover import crossover, format_bytes

#: Steps of the short chains. A deterministic clock needs no more than to get past the first ones.
STEPS = (2, 8)

#: Bytes of the short copies.
COPY_BYTES = 8 << 20


@lru_cache(maxsize=2)
def timer_for(device: Device) -> DeviceTimer:
    return DeviceTimer(DeviceQueue(device, device.stream()))


@dataclass(frozen=True, slots=True)
class Chains:
    """A latency regime: one leg, memory and thread count."""

    challenger: str
    leg: Leg
    memory: Memory
    threads: int

    question = Question.LATENCY

    @property
    def id(self) -> str:
        return f"{self.challenger}-{self.threads}t-{self.leg}-{self.memory.value}"

    @property
    def key(self) -> Mapping[str, Any]:
        return {"threads": self.threads, "leg": self.leg.value, "memory": self.memory.value}

    def run(self, device: Device, name: str, tile_bytes: int) -> float:
        """SM cycles of one tile."""
        mover = engine(name)
        config = mover.latency_config(device.capabilities, tile_bytes, self.threads, self.leg)
        buffers = long_buffers(device, tile_bytes, self.memory)
        cycles = []
        warm = (max(STEPS),) if self.memory is Memory.L2 else ()  # the first walk fills it
        for steps in (*warm, *STEPS):
            if self.memory is Memory.DRAM:
                device.emulator.l2.flush()
            mover.chain(buffers.dst, buffers.pool, buffers.result, config=config, num_steps=steps)
            device.synchronize()
            cycles.append(buffers.read_result(steps)[0])
        return (cycles[-1] - cycles[-2]) / (STEPS[1] - STEPS[0])


@dataclass(frozen=True, slots=True)
class Copies:
    """A throughput regime: so many bytes in flight per SM, None = each engine at its best."""

    challenger: str
    bytes_in_flight: int | None
    threads: int

    question = Question.THROUGHPUT

    @property
    def id(self) -> str:
        flight = self.bytes_in_flight
        how = "best" if flight is None else f"{format_bytes(flight)}-in-flight".replace(" ", "")
        return f"{self.challenger}-{how}"

    @property
    def key(self) -> Mapping[str, Any]:
        return {"bytes_in_flight": self.bytes_in_flight, "memory": Memory.DRAM.value}

    def run(self, device: Device, name: str, tile_bytes: int) -> float:
        """Seconds of a short copy."""
        mover = engine(name)
        config = mover.throughput_config(
            device.capabilities,
            tile_bytes,
            bytes_in_flight_per_sm=self.bytes_in_flight,
            threads=self.threads if self.bytes_in_flight is not None else None,
        )
        buffers = buffers_for(device, COPY_BYTES)
        device.compile(config.source).kernel().occupancy(config.threads, config.shared_bytes)
        device.emulator.l2.flush()
        return (
            timer_for(device)
            .batch(
                lambda _, stream: mover.copy(buffers.dst, buffers.src, config=config, stream=stream),
                1,
                count=False,
            )
            .seconds
        )


Regime = Chains | Copies


def regimes(axes: Axes, spec: str) -> Iterable[Regime]:
    """Regimes of an emulated device; a measured crossover has the uncertainty of its samples instead."""
    if not spec.startswith("emu:"):
        return
    latency, throughput = LATENCY[axes], THROUGHPUT[axes]
    challengers = [name for name in ENGINES if name != BASE]
    for memory in latency.memories:
        for leg in latency.legs:
            for threads in latency.threads:
                for name in challengers:
                    yield Chains(name, leg, memory, threads)
    for flight in (*throughput.bytes_in_flight, None):
        for name in challengers:
            yield Copies(name, flight, throughput.threads)


@pytest.mark.points.with_args(regimes)
def bench_uncertainty(device: Device, point: Regime, run_log: RunLog) -> None:
    """Vary every clock parameter that these two engines can depend on, if their curves cross."""
    records = [
        record
        for record in run_log.records
        if record.device == device.spec
        and record.question is point.question
        and all(record.key[name] == value for name, value in point.key.items())
    ]
    found = curves(records)
    if BASE not in found or point.challenger not in found:
        return  # its points were not part of this run, or are not possible on this device
    sizes = sorted(set(found[BASE].samples) & set(found[point.challenger].samples))
    if len(sizes) < 2:
        return
    crossing = crossover(found[BASE], found[point.challenger])
    if crossing.size_bytes is None or crossing.tie:  # where a lead of TIE begins is no change of leader
        return
    reruns = Reruns(
        BASE, point.challenger, partial(point.run, device), partial(varied, device),
        partial(clock_parameters, device),
    )  # fmt: skip
    with run_log.seconds.spend("run"):
        moved = reruns.sensitivity(crossing, sizes, reruns.parameters, run_log.jobs)
    run_log.sensitivities.append(
        {
            "device": device.spec,
            "folder": records[0].folder,
            "question": point.question.value,
            "challenger": point.challenger,
            "key": dict(point.key),
            **moved,
        }
    )
