"""Copy with ``cp.async.bulk``, tiles prefetched into the L2 (prefetch_bulk.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    check_available,
    check_call,
    check_operands,
    check_tile,
    launch,
    tma_unavailable,
)
from kernels.tma.prefetch import Policy, check_ahead
from kernels.tma.ring import RingConfig
from smfree.cuda import CudaSource, DeviceArray, Stream

unavailable = tma_unavailable


@dataclass(frozen=True, kw_only=True)
class PrefetchBulkConfig(RingConfig):
    """How ``tma_prefetch_bulk`` is compiled and launched: each tile is prefetched ``ahead`` tiles of its CTA
    before it is loaded (0: never). Raises ConfigError."""

    tile_bytes: int = 16384
    ahead: int = 8
    policy: Policy = Policy.NORMAL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tile(self.tile_bytes)
        check_ahead(self.ahead, self.num_stages, self.policy)

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages in shared memory."""
        return self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "prefetch_bulk.cu",
            {
                "TILE_BYTES": self.tile_bytes,
                "NUM_STAGES": self.num_stages,
                "AHEAD": self.ahead,
                "POLICY": self.policy.name,
            },
        )


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: PrefetchBulkConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, PrefetchBulkConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    check_operands("cp.async.bulk", dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    return launch(
        config.source,
        config.grid_for(-(-src.nbytes // config.tile_bytes), capabilities),
        32,
        (dst, src, np.uint64(src.nbytes)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
