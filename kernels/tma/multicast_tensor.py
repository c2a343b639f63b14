"""Give every CTA of a cluster the same boxes with one multicast tensor copy (multicast_tensor.cu)."""

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
    launch,
    require,
    tma_unavailable,
)
from kernels.tma.multicast import ClusterConfig
from kernels.tma.ring import BoxConfig
from smfree.cuda import CudaSource, DeviceArray, Stream


@dataclass(frozen=True, kw_only=True)
class MulticastTensorConfig(ClusterConfig, BoxConfig):
    """How ``tma_multicast_tensor`` is compiled and launched. Raises ConfigError."""

    def __post_init__(self) -> None:
        super().__post_init__()
        share = f"{self.box_rows} rows of {self.tile_bytes // self.box_rows} bytes for {self.cluster} CTAs"
        require(
            self.box_rows % self.cluster == 0 and self.tile_bytes // self.cluster % 128 == 0,
            "each CTA's share of a box is whole rows and a multiple of 128 bytes",
            share,
            "use 64 rows",
        )

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(KERNELS / "tma" / "multicast_tensor.cu", self.box_defines | self.cluster_defines)


def broadcast(
    dst: DeviceArray, src: DeviceArray, *, config: MulticastTensorConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``dst[r] = src`` for each CTA r of a cluster: src (rows, cols), dst (cluster, rows, cols).

    Rows a multiple of 16 bytes, both 16-byte aligned, of one dtype, not overlapping. Queues on ``stream``
    and returns; nothing is launched for an empty matrix. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, MulticastTensorConfig, src=src, dst=dst)
    check_available(tma_unavailable(capabilities))
    check_alike(dst, src)
    config.check_rows("src", src)
    config.check_rows("dst", dst, rank=3)
    if dst.shape != (config.cluster, *src.shape):
        raise OperandError(
            f"dst has one copy of src per CTA, {(config.cluster, *src.shape)} (got {dst.shape}); allocate "
            "it so"
        )
    for name, array in (("dst", dst), ("src", src)):
        check_aligned("cp.async.bulk.tensor", name, array, 16)
    check_apart(dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    down, across = config.tiles(*src.shape)
    if down * across >= 2**32:
        raise OperandError(f"there are fewer than 2^32 tiles (got {down * across}); use a larger box")
    rows, cols = config.box_rows, config.box_cols
    maps = (
        dst.device.tensor_map(dst, (1, rows, cols)),
        src.device.tensor_map(src, (rows // config.cluster, cols)),
    )
    return launch(
        config.source,
        config.grid_for(down * across, capabilities),
        32,
        (*maps, np.uint32(across), np.uint32(down)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
