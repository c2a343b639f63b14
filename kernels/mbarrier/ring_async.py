"""The ring without a TMA: cp.async in, mbarriers that it arrives on, plain stores out (ring_async.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.common import LaunchInfo, cp_async_unavailable
from kernels.mbarrier.pipeline import run_axpy
from kernels.mbarrier.ring import RingConfig
from kernels.staged import BarrierPlan
from smfree.cuda import Capabilities, DeviceArray, Stream


@dataclass(frozen=True)
class RingAsyncConfig(RingConfig):
    """How ``mbarrier_ring_async`` is compiled and launched: of ``threads``, one warp loads and the others
    compute and store. Raises ConfigError.
    """

    file: ClassVar[str] = "ring_async.cu"
    instruction: ClassVar[str] = "cp.async and 16-byte stores"

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: each loading lane, by its copies; ``empty[s]``: each consumer thread."""
        return (
            BarrierPlan("full", {"loading lanes": 32}),
            BarrierPlan("empty", {"consumer threads": 32 * self.consumer_warps}),
        )

    @classmethod
    def unavailable(cls, capabilities: Capabilities) -> str | None:
        """Why a device cannot run it, None when it can."""
        return cp_async_unavailable(capabilities)


def axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: RingAsyncConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``; see
    :func:`kernels.mbarrier.pipeline.run_axpy` for the operands. Raises OperandError, ConfigError."""
    return run_axpy(dst, x, y, alpha=alpha, config=config, kind=RingAsyncConfig, stream=stream)
