"""What does control cost: an mbarrier's arrival and wait, beside bar.sync and polling a flag?

One CTA of two warps repeats each operation between two reads of its clock. A handover is one warp arriving
and the other one returning from its wait.

Cycles        of one operation; the read of the clock taken off
Instructions  SASS between the two reads, per operation, from the cubin; a waiting loop counts once
Verified      what test_wait answers in each state of a barrier, against the PTX ISA
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from kernels.mbarrier.phases import (
    TX_ONLY,
    Lesson,
    Operation,
    PhaseCosts,
    PhasesConfig,
    sass_instructions,
    unavailable,
)
from kernels.mbarrier.phases import measure as measure_phases
from smfree.cuda import Kernel, ToolMissingError
from smfree.measure.fixture import ChainReading, Measure, Point
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Cost, Memory, Question, Traffic

COMPLETE = {Lesson.FRESH_PARITY_1, Lesson.PHASE_0_COMPLETE, Lesson.PHASE_1_COMPLETE, Lesson.BYTES_LANDED}
"""The states in which the phase of the asked parity is complete (PTX ISA, "mbarrier.test_wait")."""


@dataclass(frozen=True, slots=True)
class ControlPoint:
    """One operation."""

    operation: Operation

    @property
    def id(self) -> str:
        return self.operation.name.lower()


def points(axes: Axes, spec: str) -> Iterable[ControlPoint]:
    del axes, spec
    return [ControlPoint(operation) for operation in Operation if operation is not Operation.NOTHING]


@pytest.mark.points.with_args(points)
def bench_control(measure: Measure, point: ControlPoint) -> None:
    """Cycles of one operation."""
    device, config, operation = measure.device, PhasesConfig(), point.operation
    reason = unavailable(device.capabilities)
    if reason:
        measure.skip(f"mbarrier {reason}")
    if operation in TX_ONLY and not device.capabilities.has_tma:
        measure.skip(f"{operation} needs compute capability 9.0 or higher")
    with measure.compiling():
        kernel = device.compile(config.source).kernel()
    seen: list[PhaseCosts] = []

    def run() -> ChainReading:
        seen.append(measure_phases(device, config))
        mhz = measure.instruments.sm_clock_mhz() or device.capabilities.sm_clock_mhz
        one_ms = mhz * 1e3  # these turns are too short for the timer's tick, so the probe tells the clock
        return ChainReading(seen[-1].cycles[operation], one_ms, 1e6, config.turns)

    def verify() -> None:
        wrong = {
            lesson.value: said for lesson, said in seen[-1].answers.items() if said != (lesson in COMPLETE)
        }
        assert not wrong, f"test_wait answered wrongly: {wrong}"

    measure.chain(
        Point(
            question=Question.CONTROL,
            key={"operation": operation.value},
            traffic=Traffic(0, 0, 0),
            memory=Memory.L2,
            cache=CacheState.HOT,
            working_set_bytes=0,
            config={"turns": config.turns, "sass_per_operation": sass_of(kernel, config, operation)},
            cost=Cost(registers=kernel.registers, local_bytes=kernel.local_bytes),
        ),
        run,
        verify,
    )


def sass_of(kernel: Kernel, config: PhasesConfig, operation: Operation) -> float | None:
    """SASS instructions of one operation; None without a disassembler."""
    try:
        return sass_instructions(kernel.module.image, config)[operation]
    except ToolMissingError:
        return None
