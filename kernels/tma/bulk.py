"""Copy with ``cp.async.bulk``, global to shared to global, no byte through registers (bulk.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.common import (
    KERNELS,
    LaunchInfo,
    check_available,
    check_call,
    tma_unavailable,
)
from kernels.staged import BarrierPlan, StagedConfig, placed, run_copy
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream

unavailable = tma_unavailable


@dataclass(frozen=True)
class BulkConfig(StagedConfig):
    """How ``tma_bulk`` is compiled and launched: ``num_stages`` tiles in flight, one of ``threads`` asking.
    Raises ConfigError.
    """

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the asking thread, and the tile; a shorter last one is announced as such."""
        return (BarrierPlan("full", {"asking thread": 1}, {"tile": self.tile_bytes}),)

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "bulk.cu",
            {"TILE_BYTES": self.tile_bytes, "NUM_STAGES": self.num_stages, "THREADS": self.threads},
        )


def throughput_config(
    capabilities: Capabilities,
    tile_bytes: int,
    *,
    bytes_in_flight_per_sm: int | None = None,
    threads: int | None = None,
) -> BulkConfig:
    """The configuration with exactly so many bytes in flight per SM, or the engine at its best when None
    (one warp, four stages if they fit, then CTAs up to ``BEST_BYTES_IN_FLIGHT_PER_SM``).

    Raises ConfigError with the reason when it cannot be done.
    """
    check_available(unavailable(capabilities))
    return placed(BulkConfig(tile_bytes, 1, threads or 32), capabilities, bytes_in_flight_per_sm)


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: BulkConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, BulkConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    return run_copy(dst, src, config=config, instruction="cp.async.bulk", stream=stream)
