"""Copy with ``cp.async`` into shared memory and plain stores out of it (copy_async.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.common import (
    KERNELS,
    LaunchInfo,
    check_available,
    check_call,
    check_tile,
    check_unroll,
    cp_async_unavailable,
    require,
)
from kernels.staged import StagedConfig, placed, run_copy
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream

VECTOR_BYTES = (4, 8, 16)
BEST_UNROLL = 4
unavailable = cp_async_unavailable


class CacheOperator(StrEnum):
    """Where ``cp.async`` caches: ``CA`` in L1 and L2 (4, 8 or 16 bytes), ``CG`` in L2 only (16 bytes)."""

    CA = "ca"
    CG = "cg"


@dataclass(frozen=True)
class AsyncCopyConfig(StagedConfig):
    """How ``lsu_copy_async`` is compiled and launched.

    ``num_stages`` tiles in flight, ``vector_bytes`` per copy, ``unroll`` vectors per thread between two loop
    tests. Raises ConfigError.
    """

    num_stages: int = 2
    threads: int = 128
    vector_bytes: int = 16
    cache: CacheOperator = CacheOperator.CG
    unroll: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.vector_bytes in VECTOR_BYTES, "vector_bytes must be 4, 8 or 16", self.vector_bytes, "use 16"
        )
        require(
            self.cache is CacheOperator.CA or self.vector_bytes == 16,
            "cp.async.cg copies 16 bytes",
            self.vector_bytes,
            "use CacheOperator.CA or vector_bytes=16",
        )
        check_unroll(self.unroll)

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "copy_async.cu",
            {
                "TILE_BYTES": self.tile_bytes,
                "NUM_STAGES": self.num_stages,
                "THREADS": self.threads,
                "VECTOR_BYTES": self.vector_bytes,
                "BYPASS_L1": self.cache is CacheOperator.CG,
                "UNROLL": self.unroll,
            },
        )


def throughput_config(
    capabilities: Capabilities,
    tile_bytes: int,
    *,
    bytes_in_flight_per_sm: int | None = None,
    threads: int | None = None,
) -> AsyncCopyConfig:
    """The configuration with exactly so many bytes in flight per SM, or the engine at its best when None
    (four stages if they fit, then CTAs up to ``BEST_BYTES_IN_FLIGHT_PER_SM``).

    Raises ConfigError with the reason when it cannot be done.
    """
    check_available(unavailable(capabilities))
    check_tile(tile_bytes)
    used = threads or 32 * max(1, min(8, tile_bytes // (32 * 16 * BEST_UNROLL)))
    unroll = next(k for k in (BEST_UNROLL, 2, 1) if k == 1 or tile_bytes % (used * k * 16) == 0)
    return placed(AsyncCopyConfig(tile_bytes, 1, used, unroll=unroll), capabilities, bytes_in_flight_per_sm)


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: AsyncCopyConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, AsyncCopyConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    return run_copy(dst, src, config=config, instruction="cp.async and 16-byte stores", stream=stream)
