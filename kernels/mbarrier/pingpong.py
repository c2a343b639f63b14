"""Two buffers, one barrier each: copy the next tile while computing on this one (pingpong.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.common import LaunchInfo
from kernels.mbarrier.pipeline import PipelineConfig, run_axpy
from kernels.staged import BarrierPlan
from smfree.cuda import DeviceArray, Stream


@dataclass(frozen=True)
class PingpongConfig(PipelineConfig):
    """How ``mbarrier_pingpong`` is compiled and launched. ``num_stages`` is 2, or 1 for no overlap."""

    file: ClassVar[str] = "pingpong.cu"
    max_stages: ClassVar[int] = 2

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the asking thread arrives, both tiles complete on it."""
        return (BarrierPlan("full", {"asking thread": 1}, self.loads),)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """One tile of x and y, with one buffer as with two."""
        return sum(self.loads.values())


def axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: PingpongConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``; see
    :func:`kernels.mbarrier.pipeline.run_axpy` for the operands. Raises OperandError, ConfigError."""
    return run_axpy(dst, x, y, alpha=alpha, config=config, kind=PingpongConfig, stream=stream)
