"""Add matrices with ``cp.reduce.async.bulk.tensor``, in the type of the tensor map (reduce_tensor.cu)."""

from __future__ import annotations

import math
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
    tma_unavailable,
)
from kernels.tma.ring import BoxConfig
from smfree.cuda import CudaSource, DeviceArray, Stream

ADDABLE = tuple(np.dtype(name) for name in ("u4", "i4", "u8", "f4", "f2"))
"""Types that ``.add`` knows (PTX ISA, "cp.reduce.async.bulk.tensor"); bfloat16 has no numpy dtype."""
unavailable = tma_unavailable


@dataclass(frozen=True, kw_only=True)
class ReduceTensorConfig(BoxConfig):
    """How ``tma_reduce_tensor`` is compiled and launched. Raises ConfigError."""

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(KERNELS / "tma" / "reduce_tensor.cu", self.box_defines)


def add_parts(
    dst: DeviceArray, parts: DeviceArray, *, config: ReduceTensorConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``dst += parts[0] + parts[1] + ...``: dst (rows, cols), parts (p, rows, cols), of a type in ADDABLE.

    dst is not cleared. The order of the additions is free: exact for integers (they wrap), for floats each
    addition rounds. Rows a multiple of 16 bytes, both 16-byte aligned, not overlapping. Queues on ``stream``
    and returns; nothing is launched for empty arrays.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, ReduceTensorConfig, parts=parts, dst=dst)
    check_available(unavailable(capabilities))
    check_alike(dst, parts, "parts")
    if dst.dtype not in ADDABLE:
        known = ", ".join(str(dtype) for dtype in ADDABLE)
        raise OperandError(f"a tensor reduction adds {known} (got {dst.dtype}); convert the arrays")
    config.check_rows("dst", dst)
    config.check_rows("parts", parts, rank=3)
    if parts.shape[1:] != dst.shape:
        raise OperandError(f"every part has dst's shape {dst.shape} (got {parts.shape}); slice or pad them")
    for name, array in (("dst", dst), ("parts", parts)):
        check_aligned("cp.reduce.async.bulk.tensor", name, array, 16)
    check_apart(dst, parts, "parts")
    if parts.size == 0:
        return LaunchInfo(None)
    down, across = config.tiles(*dst.shape)
    num_tiles = math.prod((down, across, parts.shape[0]))
    if num_tiles >= 2**32:
        raise OperandError(f"there are fewer than 2^32 tiles (got {num_tiles}); use a larger box")
    box = (config.box_rows, config.box_cols)
    maps = dst.device.tensor_map(dst, box), parts.device.tensor_map(parts, (1, *box))
    return launch(
        config.source,
        config.grid_for(num_tiles, capabilities),
        32,
        (*maps, np.uint32(across), np.uint32(down), np.uint32(parts.shape[0])),
        device_array=parts,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
