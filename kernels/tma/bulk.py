"""Copy with ``cp.async.bulk``, global to shared to global, no byte through registers (bulk.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    check_available,
    check_call,
    check_ctas,
    check_operands,
    check_shared,
    check_stages,
    check_threads,
    check_tile,
    launch,
    persistent_grid,
    tma_unavailable,
)
from kernels.occupancy import place_stages
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream

STATIC_SHARED_BYTES = 128
"""full[], padded to the alignment of the stages."""
unavailable = tma_unavailable


@dataclass(frozen=True)
class BulkConfig:
    """How ``tma_bulk`` is compiled and launched: ``num_stages`` tiles in flight, one of ``threads`` asking.

    ``min_shared_bytes`` limits the CTAs per SM. Raises ConfigError.
    """

    tile_bytes: int = 16384
    num_stages: int = 4
    threads: int = 32
    ctas_per_sm: int = 1
    min_shared_bytes: int = 0

    def __post_init__(self) -> None:
        check_tile(self.tile_bytes)
        check_stages(self.num_stages)
        check_threads(self.threads)
        check_ctas(self.ctas_per_sm)

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete a phase of ``full[s]``: the asking thread's."""
        return 1

    @property
    def expect_tx_bytes(self) -> int:
        """Bytes that complete a phase of ``full[s]``, for every tile but a shorter last one."""
        return self.tile_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages. The barriers are static."""
        return max(self.num_stages * self.tile_bytes, self.min_shared_bytes)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes that the CTA has asked for when it waits for the oldest."""
        return self.num_stages * self.tile_bytes

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
    check_tile(tile_bytes)
    used = threads or 32
    placed = place_stages(
        capabilities,
        tile_bytes,
        used,
        stage_bytes=tile_bytes,
        static_bytes=STATIC_SHARED_BYTES,
        bytes_in_flight_per_sm=bytes_in_flight_per_sm,
    )
    return BulkConfig(tile_bytes, placed.num_stages, used, placed.ctas_per_sm, placed.min_shared_bytes)


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: BulkConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, BulkConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    check_shared(config.shared_bytes + STATIC_SHARED_BYTES, capabilities)
    check_operands("cp.async.bulk", dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    grid = persistent_grid(capabilities, -(-src.nbytes // config.tile_bytes), config.ctas_per_sm)
    args = (dst, src, np.uint64(src.nbytes))
    return launch(
        config.source,
        grid,
        config.threads,
        args,
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
