"""A ring that never drains, fed by a counter that CTAs take their tiles from (persistent.cu)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kernels.common import LaunchInfo, OperandError, check_call, check_whole, require
from kernels.mbarrier.counter import counter_of
from kernels.mbarrier.pipeline import PipelineConfig, check_roles, run_axpy
from kernels.staged import MBARRIER_BYTES, STAGE_ALIGN, BarrierPlan
from smfree.cuda import Capabilities, DeviceArray, Stream

MAX_BATCH = 1024
MAX_TILES = 2**31
SLOT_BYTES = 4


@dataclass(frozen=True)
class PersistentConfig(PipelineConfig):
    """How ``mbarrier_persistent`` is compiled and launched: warp 0 of ``threads`` produces, the others
    consume.

    CTAs take ``batch_tiles`` tiles at a time: 1 spreads the work best, more spare atomics. Raises
    ConfigError.
    """

    file: ClassVar[str] = "persistent.cu"

    num_stages: int = 4
    threads: int = 160
    batch_tiles: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_whole("batch_tiles", self.batch_tiles)
        require(
            1 <= self.batch_tiles <= MAX_BATCH, f"batch_tiles is 1 to {MAX_BATCH}", self.batch_tiles, "use 1"
        )
        check_roles(self.threads)
        super().__post_init__()

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the producer arrives, both tiles complete on it. ``empty[s]``: the storing thread
        arrives."""
        return BarrierPlan("full", {"producer": 1}, self.loads), BarrierPlan("empty", {"storing thread": 1})

    @property
    def static_shared_bytes(self) -> int:
        """Barriers and slots of all stages, padded to the alignment of the stages."""
        used = self.num_stages * (len(self.barriers) * MBARRIER_BYTES + SLOT_BYTES)
        return -(-used // STAGE_ALIGN) * STAGE_ALIGN

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with."""
        return super().defines | {"BATCH_TILES": self.batch_tiles}

    def grid_for(self, num_bytes: int, capabilities: Capabilities) -> int:
        """No more CTAs than batches, nor than are resident at once."""
        return min(
            super().grid_for(num_bytes, capabilities), -(-num_bytes // (self.tile_bytes * self.batch_tiles))
        )


def axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: PersistentConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``; see
    :func:`kernels.mbarrier.pipeline.run_axpy` for the operands. The counter that CTAs take tiles from
    belongs to the stream. Raises OperandError, ConfigError."""
    check_call(config, PersistentConfig, x=x, y=y, dst=dst)
    tiles = -(-dst.nbytes // config.tile_bytes)
    if tiles > MAX_TILES:
        raise OperandError(f"tiles are numbered below {MAX_TILES} (got {tiles}); use larger tiles")
    return run_axpy(
        dst,
        x,
        y,
        alpha=alpha,
        config=config,
        kind=PersistentConfig,
        stream=stream,
        more=(counter_of(dst.device, stream),),
    )
