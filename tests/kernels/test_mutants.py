"""Kernels with one line taken out must be caught by the emulated GPU, by name; their originals stay clean.

The mutants prove two things: that the barriers and waits in the kernels are needed, and that the emulated GPU
completes copies late. An engine that completes a copy when it is issued would pass the second group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kernels.engine import ENGINES
from kernels.lsu.copy_async import AsyncCopyConfig
from kernels.tma.bulk import BulkConfig
from kernels.tma.tensor2d import Tensor2dConfig
from smfree.cuda import Device, KernelFaultError
from tests.kernels.mutant_kit import mutated

TILE = 1024
LENGTH = 200 * TILE + 48


@dataclass(frozen=True)
class Mutant:
    """A configuration's source with ``line`` replaced; the report must contain all words of ``report``."""

    engine: str
    config: Any
    line: str
    replacement: str
    report: tuple[str, ...]

    @property
    def mutated(self) -> Any:
        return mutated(self.config, (self.line, self.replacement))


DEADLOCKS = {
    "bulk announces one tile too many": Mutant(
        "tma.bulk",
        BulkConfig(TILE, 2),
        "mbarrier_arrive_expect_tx(full_at(s), tile_bytes);",
        "mbarrier_arrive_expect_tx(full_at(s), tile_bytes + TILE_BYTES);",
        ("full", "1024 of 2048 bytes missing", "0 of 1 arrivals missing", "phase 0", "bulk.cu"),
    ),
    "tensor copy is never asked for": Mutant(
        "tma.tensor",
        Tensor2dConfig(TILE, 2),
        "cp_async_bulk_tensor_2d_shared_global(stage_at(s), &src_map, 0, (u32)tile * BOX_ROWS, full_at(s));",
        "",
        ("full", "1024 of 1024 bytes missing", "0 of 1 arrivals missing", "phase 0", "tensor2d.cu"),
    ),
    "bulk barrier counts two arrivals": Mutant(
        "tma.bulk",
        BulkConfig(TILE, 1),
        "mbarrier_init(full_at(s), 1);",
        "mbarrier_init(full_at(s), 2);",
        ("full", "1 of 2 arrivals missing", "0 of 1024 bytes missing", "phase 0", "bulk.cu"),
    ),
}
EARLY = {
    "bulk tile stored without waiting for it": Mutant(
        "tma.bulk",
        BulkConfig(TILE, 2),
        "wait_parity(full_at(s), phase);",
        "",
        ("cp.async.bulk", "bulk.cu"),
    ),
    "cp.async tile read without waiting for it": Mutant(
        "cp.async",
        AsyncCopyConfig(TILE, 2, 32),
        "cp_async_wait_group<NUM_STAGES - 1>();",
        "",
        ("cp.async", "copy_async.cu"),
    ),
    "stage refilled while the bulk store still reads it": Mutant(
        "tma.bulk",
        BulkConfig(TILE, 1),
        "cp_async_bulk_wait_group_read<0>();",
        "",
        ("bulk.cu",),
    ),
    "CTA leaves while the bulk store still reads its memory": Mutant(
        "tma.bulk",
        BulkConfig(TILE, 4),
        "cp_async_bulk_wait_group<0>();",
        "",
        ("tma_bulk",),
    ),
}


def run(mutant: Mutant, config: Any, schedule: str, length: int = LENGTH) -> bytes:
    with Device.open("emu:h100", schedule=schedule) as device:
        data = np.random.default_rng(3).integers(0, 256, length, dtype=np.uint8)
        src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
        ENGINES[mutant.engine].copy(dst, src, config=config)
        device.synchronize()
        assert dst.numpy().tobytes() == data.tobytes()
        return data.tobytes()


@pytest.mark.parametrize("schedule", ["timed", "min-pc", "async-latest"])
@pytest.mark.parametrize("name", list(DEADLOCKS))
def test_a_deadlock_is_reported_with_barrier_phase_bytes_and_arrivals(name: str, schedule: str) -> None:
    mutant = DEADLOCKS[name]
    with pytest.raises(KernelFaultError) as caught:
        run(mutant, mutant.mutated, schedule)
    for words in mutant.report:
        assert words in str(caught.value), str(caught.value)
    run(mutant, mutant.config, schedule)


@pytest.mark.parametrize("schedule", ["timed", "async-latest"])
@pytest.mark.parametrize("name", list(EARLY))
def test_using_bytes_of_a_copy_in_flight_is_reported(name: str, schedule: str) -> None:
    mutant = EARLY[name]
    with pytest.raises(KernelFaultError) as caught:
        run(mutant, mutant.mutated, schedule)
    for words in mutant.report:
        assert words in str(caught.value), str(caught.value)
    run(mutant, mutant.config, schedule)
