"""Give every CTA of a cluster the same bytes with one multicast ``cp.async.bulk`` (multicast_bulk.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_aligned,
    check_alike,
    check_apart,
    check_available,
    check_call,
    check_tile,
    launch,
    tma_unavailable,
)
from kernels.tma.multicast import ClusterConfig
from smfree.cuda import CudaSource, DeviceArray, Stream


@dataclass(frozen=True, kw_only=True)
class MulticastBulkConfig(ClusterConfig):
    """How ``tma_multicast_bulk`` is compiled and launched. Raises ConfigError."""

    tile_bytes: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tile(self.tile_bytes, multiple_of=16 * self.cluster)

    @property
    def share_bytes(self) -> int:
        """Bytes of a tile that each CTA asks for."""
        return self.tile_bytes // self.cluster if self.multicast else self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        defines = self.cluster_defines | {"TILE_BYTES": self.tile_bytes}
        return CudaSource(KERNELS / "tma" / "multicast_bulk.cu", defines)


def broadcast(
    dst: DeviceArray, src: DeviceArray, *, config: MulticastBulkConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``dst[r] = src`` for each CTA r of a cluster: dst is (cluster, *src.shape), of src's dtype.

    src has a multiple of 16 bytes; both 16-byte aligned, not overlapping. Queues on ``stream`` and returns;
    nothing is launched for zero bytes. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, MulticastBulkConfig, src=src, dst=dst)
    check_available(tma_unavailable(capabilities))
    check_alike(dst, src)
    if dst.shape != (config.cluster, *src.shape):
        raise OperandError(
            f"dst has one copy of src per CTA, {(config.cluster, *src.shape)} (got {dst.shape}); allocate "
            "it so"
        )
    if src.nbytes % 16:
        raise OperandError(f"src has a multiple of 16 bytes (got {src.nbytes}); pad it")
    for name, array in (("dst", dst), ("src", src)):
        check_aligned("cp.async.bulk", name, array, 16)
    check_apart(dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    return launch(
        config.source,
        config.grid_for(-(-src.nbytes // config.tile_bytes), capabilities),
        32,
        (dst, src, np.uint64(src.nbytes), np.uint64(src.nbytes)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
