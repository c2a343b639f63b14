"""One warpgroup copies, the others compute, registers follow the work (specialised.cu)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kernels.common import (
    LaunchInfo,
    check_whole,
    plain_integers,
    require,
)
from kernels.mbarrier.pipeline import PipelineConfig, RegisterPlan, run_axpy
from kernels.staged import BarrierPlan
from smfree.cuda import Capabilities, DeviceArray, Stream

WARPGROUP = 128
REGISTERS_PER_SM = 65536
"""Of every device with setmaxnreg (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""
MOST_REGISTERS = 240
"""What a consumer is given at most when its registers are derived."""


@dataclass(frozen=True)
class SpecialisedConfig(PipelineConfig):
    """How ``mbarrier_specialised`` is compiled and launched: warpgroup 0 of ``threads`` produces, the others
    consume.

    ``producer_registers`` per thread stay with the producers, the consumers take ``consumer_registers`` (0:
    all that they can have). ``producer_registers=0`` leaves setmaxnreg out. Raises ConfigError.
    """

    file: ClassVar[str] = "specialised.cu"

    num_stages: int = 4
    threads: int = 3 * WARPGROUP
    producer_registers: int = field(default=40, kw_only=True)
    consumer_registers: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        plain_integers(self)
        for name in ("threads", "producer_registers", "consumer_registers"):
            check_whole(name, getattr(self, name))
        require(
            self.threads % WARPGROUP == 0 and self.threads >= 2 * WARPGROUP,
            f"threads must be whole warpgroups of {WARPGROUP}, a producer and at least one consumer",
            self.threads,
            "use 384",
        )
        super().__post_init__()
        if self.producer_registers == 0:
            require(
                self.consumer_registers == 0,
                "without setmaxnreg all threads have the same registers",
                f"consumer_registers={self.consumer_registers}",
                "leave it out",
            )
            return
        if self.consumer_registers == 0:
            object.__setattr__(self, "consumer_registers", self._registers_left())
        require(
            self.registers is not None and self.producer_registers <= self.consumer_registers,
            "the producers give registers to the consumers, not the other way round",
            f"producer {self.producer_registers}, consumer {self.consumer_registers}",
            "use 40 and 232",
        )

    @property
    def consumer_groups(self) -> int:
        """Warpgroups that compute."""
        return self.threads // WARPGROUP - 1

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the producer arrives, both tiles complete on it. ``empty[s]``: the storing thread of
        each consumer group arrives."""
        return (
            BarrierPlan("full", {"producer": 1}, self.loads),
            BarrierPlan("empty", {"consumer group": self.consumer_groups}),
        )

    @property
    def registers(self) -> RegisterPlan | None:
        """How the warpgroups share the registers, None without setmaxnreg."""
        if self.producer_registers == 0:
            return None
        roles = {
            "producer": (WARPGROUP, self.producer_registers),
            "consumer": (self.consumer_groups * WARPGROUP, self.consumer_registers),
        }
        return RegisterPlan.of(REGISTERS_PER_SM // self.ctas_per_sm, roles)

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with."""
        off = {"PRODUCER_REGISTERS": 0, "CONSUMER_REGISTERS": 0}
        more = {"CONSUMER_GROUPS": self.consumer_groups, "CTAS_PER_SM": self.ctas_per_sm}
        return off | super().defines | more

    def check_fits(self, capabilities: Capabilities) -> None:
        """As for every pipeline; and ``ctas_per_sm`` CTAs fit an SM, or ptxas ignores the launch bounds that
        the registers are derived from. Raises ConfigError."""
        super().check_fits(capabilities)
        require(
            self.ctas_per_sm * self.threads <= capabilities.max_threads_per_sm,
            f"an SM of {capabilities.name} holds {capabilities.max_threads_per_sm} threads",
            f"{self.ctas_per_sm} CTAs of {self.threads}",
            "use fewer CTAs per SM",
        )

    def _registers_left(self) -> int:
        """A multiple of 8 for each consumer, of what the producers leave of the CTA's share."""
        each = REGISTERS_PER_SM // self.ctas_per_sm // self.threads // 8 * 8
        left = each * self.threads - self.producer_registers * WARPGROUP
        return max(0, min(MOST_REGISTERS, left // (self.consumer_groups * WARPGROUP) // 8 * 8))


def axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: SpecialisedConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``; see
    :func:`kernels.mbarrier.pipeline.run_axpy` for the operands. Raises OperandError, ConfigError."""
    return run_axpy(dst, x, y, alpha=alpha, config=config, kind=SpecialisedConfig, stream=stream)
