"""The checked configuration of a pipeline: every number of its barriers and its shared memory, derived once.

A pipeline streams tiles of x and y through stages in shared memory and computes axpy there: ``dst = y``, then
``work`` times ``dst = fmaf(alpha, x, dst)``. Its configuration knows who arrives on each barrier and which
copies complete there, and so derives arrival counts, bytes and layout, which NVRTC gets as ``-D``. A number
that the caller states and that does not follow from these roles and copies is refused before compiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_float32,
    check_operands,
    check_threads,
    check_whole,
    launch,
    persistent_grid,
    require,
    tma_unavailable,
)
from kernels.staged import STAGE_ALIGN, StagedConfig, round_up
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream

MAX_WORK = 4096


class Part(StrEnum):
    """Which half of a pipeline is compiled in: both, or one with the other's instructions left out."""

    BOTH = "both"
    COPY = "copy"
    COMPUTE = "compute"


@dataclass(frozen=True)
class RegisterPlan:
    """Registers per thread after setmaxnreg: ``roles`` maps a role to (threads, registers).

    A CTA starts with the same number for each thread; setmaxnreg moves registers between its warpgroups, so
    that the sum may not grow. Raises ConfigError. Source: PTX ISA, "setmaxnreg".
    """

    launch_registers: int
    roles: Mapping[str, tuple[int, int]]

    def __post_init__(self) -> None:
        for role, (threads, registers) in self.roles.items():
            require(
                threads % 128 == 0, f"setmaxnreg takes whole warpgroups of {role} threads", threads, "use 128"
            )
            require(
                24 <= registers <= 256 and registers % 8 == 0,
                f"{role} registers must be a multiple of 8, 24 to 256",
                registers,
                "use 40 for a producer, 232 for a consumer",
            )
        wanted = sum(threads * registers for threads, registers in self.roles.values())
        parts = " + ".join(f"{role} {t} x {r}" for role, (t, r) in self.roles.items())
        require(
            wanted <= self.pool,
            f"the CTA's pool holds {self.pool} registers, {self.launch_registers} for each thread at launch",
            f"{wanted}: {parts}",
            "give the producer or the consumers fewer",
        )

    @classmethod
    def of(cls, registers_per_block: int, roles: Mapping[str, tuple[int, int]]) -> RegisterPlan:
        """With as many registers at launch as ptxas gives a kernel with setmaxnreg: what its launch bounds
        allow, a multiple of 8, but no more than the largest role (tests/kernels/test_sass.py)."""
        threads = sum(count for count, _ in roles.values())
        largest = max(registers for _, registers in roles.values())
        return cls(min(largest, registers_per_block // threads // 8 * 8), roles)

    @property
    def pool(self) -> int:
        """Registers of the CTA."""
        return self.launch_registers * sum(threads for threads, _ in self.roles.values())

    @property
    def defines(self) -> dict[str, int]:
        """``PRODUCER_REGISTERS``, ``CONSUMER_REGISTERS``."""
        return {f"{role.upper()}_REGISTERS": registers for role, (_, registers) in self.roles.items()}


@dataclass(frozen=True)
class PipelineConfig(StagedConfig):
    """What all pipelines share; a kernel's own configuration derives from it and says what its barriers are.

    ``tile_bytes`` of x and as many of y in each of ``num_stages`` stages; ``threads`` of the CTA;
    ``work`` FMAs per element; at most ``max_ctas`` CTAs (None: ``ctas_per_sm`` on each SM).
    ``full_arrivals``, ``full_tx_bytes`` and ``empty_arrivals`` may state what the caller believes.
    Raises ConfigError.
    """

    file: ClassVar[str]
    """The kernel's file in this folder."""
    instruction: ClassVar[str] = "cp.async.bulk"
    """What demands the operands' alignment."""

    tile_bytes: int = 4096
    num_stages: int = 2
    threads: int = 128
    work: int = 1
    part: Part = Part.BOTH
    max_ctas: int | None = field(default=None, kw_only=True)
    full_arrivals: int | None = field(default=None, kw_only=True)
    full_tx_bytes: int | None = field(default=None, kw_only=True)
    empty_arrivals: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_ctas is not None:
            check_whole("max_ctas", self.max_ctas)
            require(self.max_ctas >= 1, "max_ctas must be at least 1", self.max_ctas, "leave it out")
        check_whole("work", self.work)
        require(0 <= self.work <= MAX_WORK, f"work must be 0 to {MAX_WORK} FMAs", self.work, "use 1")
        known = [part.value for part in Part]
        require(self.part in known, f"part must be one of {', '.join(known)}", self.part, "use Part.BOTH")
        object.__setattr__(self, "part", Part(self.part))
        self._check_statements()

    def _check_statements(self) -> None:
        plans = {plan.name: plan for plan in self.barriers}
        for name in ("full", "empty"):
            arrivals = getattr(self, f"{name}_arrivals")
            tx_bytes = getattr(self, f"{name}_tx_bytes", None)
            if name in plans:
                plans[name].check(arrivals, tx_bytes)
            else:
                require(
                    arrivals is None and tx_bytes is None,
                    f"{self.file} has barriers {', '.join(f'{known}[]' for known in plans)}",
                    f"{name}_arrivals={arrivals}",
                    "leave it out",
                )

    @property
    def loads(self) -> dict[str, int]:
        """The copies that fill a stage, in bytes; none where only the computation is compiled in."""
        return {} if self.part is Part.COMPUTE else {"x": self.tile_bytes, "y": self.tile_bytes}

    @property
    def registers(self) -> RegisterPlan | None:
        """How the warpgroups share the registers; None where every thread keeps what it was launched with."""
        return None

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages: the tile of x, then the tile of y, padded to ``STAGE_ALIGN``."""
        return round_up(2 * self.tile_bytes, STAGE_ALIGN)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes that the CTA has asked for before it uses the first."""
        return self.num_stages * sum(self.loads.values())

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with."""
        found: dict[str, object] = {
            "TILE_BYTES": self.tile_bytes,
            "NUM_STAGES": self.num_stages,
            "STAGE_BYTES": self.stage_bytes,
            "STAGE_ALIGN": STAGE_ALIGN,
            "THREADS": self.threads,
            "WORK": self.work,
            "PART": self.part.name,
        }
        for plan in self.barriers:
            found |= plan.defines
        return found | (self.registers.defines if self.registers else {})

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(KERNELS / "mbarrier" / Path(self.file), self.defines)

    @classmethod
    def unavailable(cls, capabilities: Capabilities) -> str | None:
        """Why a device cannot run it, None when it can."""
        return tma_unavailable(capabilities)

    def grid_for(self, num_bytes: int, capabilities: Capabilities) -> int:
        """CTAs for arrays of ``num_bytes``."""
        grid = persistent_grid(capabilities, -(-num_bytes // self.tile_bytes), self.ctas_per_sm)
        return grid if self.max_ctas is None else min(grid, self.max_ctas)


def check_roles(threads: int, *, producer_warps: int = 1) -> None:
    """Warps are left to compute beside those that move. Raises ConfigError."""
    check_threads(threads)
    least = 32 * (producer_warps + 1)
    require(
        threads >= least,
        f"threads must be at least {least}: warps that move and one more",
        threads,
        "use 160",
    )


def run_axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: PipelineConfig,
    kind: type[PipelineConfig],
    stream: Stream | None,
    more: tuple[object, ...] = (),
) -> LaunchInfo:
    """Check the operands of a pipeline of this ``kind`` and launch it; ``more`` are arguments of the kernel
    behind those that all have.

    ``dst``, ``x``, ``y``: float32, any shape, one size, 16-byte aligned, ``dst`` overlapping neither.
    ``alpha`` is rounded to float32. Queues on ``stream`` and returns; nothing is launched for zero elements.
    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, kind, x=x, y=y, dst=dst)
    check_available(config.unavailable(capabilities))
    config.check_fits(capabilities)
    for name, array in (("x", x), ("y", y)):
        check_operands(config.instruction, dst, array, source=name)
    if dst.dtype != np.float32:
        raise OperandError(f"axpy computes in float32 (got {dst.dtype}); view or convert the arrays")
    factor = check_float32("alpha", alpha)
    if dst.nbytes == 0:
        return LaunchInfo(None)
    return launch(
        config.source,
        config.grid_for(dst.nbytes, capabilities),
        config.threads,
        (dst, x, y, factor, np.uint64(dst.nbytes // 4), *more),
        device_array=dst,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
