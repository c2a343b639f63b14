"""Add arrays with ``cp.reduce.async.bulk``: the TMA adds on the way out of shared memory (reduce_bulk.cu)."""

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
from kernels.tma.ring import RingConfig
from smfree.cuda import CudaSource, DeviceArray, Stream

unavailable = tma_unavailable


@dataclass(frozen=True, kw_only=True)
class ReduceBulkConfig(RingConfig):
    """How ``tma_reduce_bulk`` is compiled and launched. Raises ConfigError."""

    tile_bytes: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tile(self.tile_bytes)

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages in shared memory."""
        return self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        defines = {"TILE_BYTES": self.tile_bytes, "NUM_STAGES": self.num_stages}
        return CudaSource(KERNELS / "tma" / "reduce_bulk.cu", defines)


def add_parts(
    dst: DeviceArray, parts: DeviceArray, *, config: ReduceBulkConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``dst += parts[0] + parts[1] + ...``: dst (n,), parts (p, pitch), float32, n <= pitch.

    dst is not cleared. The order of the additions is free, each rounds to nearest even and flushes
    subnormals. Both 16-byte aligned, not overlapping; with several parts, pitch a multiple of 4. Queues on
    ``stream`` and returns; nothing is launched for no parts or n = 0.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, ReduceBulkConfig, parts=parts, dst=dst)
    check_available(unavailable(capabilities))
    check_alike(dst, parts, "parts")
    if dst.dtype != np.float32 or len(dst.shape) != 1 or len(parts.shape) != 2:
        raise OperandError(
            f"dst is (n,) and parts (p, pitch), float32 (got {dst.shape} and {parts.shape} {dst.dtype}); "
            "reshape or view them, or use reduce_tensor for other types"
        )
    num_parts, pitch = parts.shape
    if dst.size > pitch:
        raise OperandError(f"dst is no longer than a part (got {dst.size} and {pitch}); slice dst")
    if num_parts > 1 and pitch % 4:
        raise OperandError(
            f"each part must be 16-byte aligned for cp.async.bulk (got a pitch of {pitch} floats); pad it "
            "to a multiple of 4"
        )
    for name, array in (("dst", dst), ("parts", parts)):
        check_aligned("cp.reduce.async.bulk", name, array, 16)
    check_apart(dst, parts, "parts")
    if num_parts == 0 or dst.size == 0:
        return LaunchInfo(None)
    num_tiles = max(-(-(dst.size // 4 * 16) // config.tile_bytes), 1) * num_parts
    if num_tiles >= 2**32:
        raise OperandError(f"there are fewer than 2^32 tiles (got {num_tiles}); use a larger tile")
    return launch(
        config.source,
        config.grid_for(num_tiles, capabilities),
        32,
        (dst, parts, np.uint64(dst.size), np.uint64(pitch), np.uint32(num_parts)),
        device_array=parts,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
