"""What mbarrier operations say and cost, beside bar.sync and a flag in shared memory (phases.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kernels.common import (
    KERNELS,
    check_available,
    check_clock,
    check_whole,
    plain_integers,
    require,
)
from smfree.cuda import Capabilities, CudaSource, Device, ModuleImage

THREADS = 64


class Lesson(StrEnum):
    """A question to test_wait, in the order in which ``phases.cu`` asks them of one barrier of 2 arrivals."""

    FRESH_PARITY_1 = "fresh barrier, parity 1"
    FRESH_PARITY_0 = "fresh barrier, parity 0"
    ONE_ARRIVED = "1 of 2 arrived, parity 0"
    PHASE_0_COMPLETE = "phase 0 complete, parity 0"
    PHASE_1_PENDING = "phase 0 complete, parity 1"
    PHASE_1_COMPLETE = "phase 1 complete, parity 1"
    PARITY_WRAPPED = "phase 1 complete, parity 0"
    BYTES_MISSING = "2 of 2 arrived, 16 bytes missing, parity 0"
    BYTES_LANDED = "2 of 2 arrived, 16 bytes landed, parity 0"


class Operation(StrEnum):
    """What is timed, in the order of the kernel's results."""

    NOTHING = "nothing"
    TEST_WAIT_MISS = "test_wait, phase pending"
    ARRIVE = "arrive"
    TEST_WAIT_HIT = "test_wait, phase complete"
    TRY_WAIT_HIT = "try_wait, phase complete"
    ARRIVE_EXPECT_TX = "arrive.expect_tx"
    BAR_SYNC = "bar.sync"
    MBARRIER_HANDOVER = "handover by mbarrier"
    BAR_HANDOVER = "handover by bar.arrive and bar.sync"
    FLAG_HANDOVER = "handover by a volatile flag"


TX_ONLY: frozenset[StrEnum] = frozenset(
    {Lesson.BYTES_MISSING, Lesson.BYTES_LANDED, Operation.TRY_WAIT_HIT, Operation.ARRIVE_EXPECT_TX}
)
"""What exists from sm_90 on."""
_HANDOVERS = frozenset({Operation.MBARRIER_HANDOVER, Operation.BAR_HANDOVER, Operation.FLAG_HANDOVER})


@dataclass(frozen=True)
class PhasesConfig:
    """``turns`` operations between two reads of the clock, unrolled. Raises ConfigError."""

    turns: int = 16

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("turns", self.turns)
        require(
            2 <= self.turns <= 64 and self.turns % 2 == 0,
            "turns must be even, 2 to 64",
            self.turns,
            "use 16: each pass begins with parity 0 again",
        )

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(KERNELS / "mbarrier" / "phases.cu", {"TURNS": self.turns})


@dataclass(frozen=True)
class PhaseCosts:
    """``cycles``: SM cycles of one operation of one warp, of a handover those from the arrival of one warp to
    the return of the other; what reading the clock costs is taken off. ``answers``: what test_wait said.
    ``clock_source``: ``measured`` or ``modelled``. What the device lacks is not there.
    """

    cycles: dict[Operation, float]
    answers: dict[Lesson, bool]
    clock_source: str


def unavailable(capabilities: Capabilities) -> str | None:
    """Why a device cannot run it, None when it can."""
    major, minor = capabilities.compute_capability
    if major >= 8:
        return None
    return f"needs mbarriers (compute capability 8.0 or higher); {capabilities.name} has {major}.{minor}"


def measure(device: Device, config: PhasesConfig | None = None) -> PhaseCosts:
    """Run the lesson and the timings with one CTA of two warps, and wait for them. Raises ConfigError.

    On an emulated device the schedule must be ``timed``: no other has a clock.
    """
    check_available(unavailable(device.capabilities))
    check_clock(device)
    used = config or PhasesConfig()
    cycles = device.asarray(np.zeros(len(Operation), np.uint64))
    seen = device.asarray(np.zeros(len(Lesson), np.uint32))
    src = device.asarray(np.zeros(16, np.uint8))
    device.compile(used.source).kernel().launch(1, THREADS, (cycles, seen, src))
    device.synchronize()
    missing: frozenset[StrEnum] = frozenset() if device.capabilities.has_tma else TX_ONLY
    return PhaseCosts(
        _per_operation(dict(zip(Operation, cycles.numpy().tolist(), strict=True)), used.turns, missing),
        {
            lesson: bool(answer)
            for lesson, answer in zip(Lesson, seen.numpy().tolist(), strict=True)
            if lesson not in missing
        },
        "modelled" if device.is_emulated else "measured",
    )


def sass_instructions(image: ModuleImage, config: PhasesConfig | None = None) -> dict[Operation, float]:
    """SASS instructions of one operation, by counting between the clock reads of a compiled ``config``.

    Of a handover: one arrival and one wait that finds its phase complete or its flag set at the first look
    (a loop counts once). Raises ToolMissingError without a disassembler.
    """
    used = config or PhasesConfig()
    found = image.sass().instructions
    reads = [at for at, one in enumerate(found) if "SR_CLOCK" in one.operands]
    between = [end - begin - 1 for begin, end in zip(reads[::2], reads[1::2], strict=True)]
    has_tx = len(between) == len(Operation)
    timed = [one for one in Operation if has_tx or one not in TX_ONLY]
    counts = dict(zip(timed, between, strict=True))
    return {one: (count - counts[Operation.NOTHING]) / used.turns for one, count in counts.items()}


def _per_operation(
    cycles: dict[Operation, int], turns: int, missing: frozenset[StrEnum]
) -> dict[Operation, float]:
    return {
        one: (took - cycles[Operation.NOTHING]) / (turns * (2 if one in _HANDOVERS else 1))
        for one, took in cycles.items()
        if one not in missing
    }
