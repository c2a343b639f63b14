"""A ring of stages, full and empty: one warp moves every byte, the others compute (ring.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.common import LaunchInfo
from kernels.mbarrier.pipeline import PipelineConfig, check_roles, run_axpy
from kernels.staged import BarrierPlan
from smfree.cuda import DeviceArray, Stream


@dataclass(frozen=True)
class RingConfig(PipelineConfig):
    """How ``mbarrier_ring`` is compiled and launched: of ``threads``, one warp moves and the others compute.
    Raises ConfigError.
    """

    file: ClassVar[str] = "ring.cu"

    num_stages: int = 4
    threads: int = 160

    def __post_init__(self) -> None:
        check_roles(self.threads)
        super().__post_init__()

    @property
    def consumer_warps(self) -> int:
        """All warps but the moving one."""
        return self.threads // 32 - 1

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the moving thread and both tiles; ``empty[s]``: each consumer warp."""
        return (
            BarrierPlan("full", {"moving thread": 1}, self.loads),
            BarrierPlan("empty", {"consumer warps": self.consumer_warps}),
        )


def axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: RingConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``; see
    :func:`kernels.mbarrier.pipeline.run_axpy` for the operands. Raises OperandError, ConfigError."""
    return run_axpy(dst, x, y, alpha=alpha, config=config, kind=RingConfig, stream=stream)
