"""Transpose by staging tiles in shared memory, with three layouts of the tile (transpose.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_call,
    check_ctas,
    check_operands,
    check_threads,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from smfree.cuda import CudaSource, DeviceArray, Stream

TILE = 32


class Layout(StrEnum):
    """Where a tile's elements lie in shared memory."""

    PLAIN = "plain"
    PADDED = "padded"
    SWIZZLED = "swizzled"


@dataclass(frozen=True)
class TransposeConfig:
    """How ``lsu_transpose`` is compiled and launched. Raises ConfigError."""

    layout: Layout = Layout.SWIZZLED
    threads: int = 256
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        known = [layout.value for layout in Layout]
        require(
            self.layout in known, f"layout must be one of {', '.join(known)}", self.layout, "use swizzled"
        )
        object.__setattr__(self, "layout", Layout(self.layout))
        check_threads(self.threads)
        check_ctas(self.ctas_per_sm)

    @property
    def static_shared_bytes(self) -> int:
        """The tile."""
        return TILE * (TILE + (self.layout is Layout.PADDED)) * 4

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "transpose.cu", {"LAYOUT": self.layout.name, "THREADS": self.threads}
        )


def transpose(
    dst: DeviceArray, src: DeviceArray, *, config: TransposeConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``dst[c, r] = src[r, c]``: two dimensions, one 4-byte dtype, any extents, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for an empty matrix.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, TransposeConfig, src=src, dst=dst)
    check_operands("4-byte loads and stores", dst, src, align=4)
    if len(src.shape) != 2 or dst.shape != src.shape[::-1]:
        raise OperandError(
            f"src must be a matrix and dst its transposed shape (got {src.shape} and {dst.shape}); "
            "reshape them"
        )
    if max(src.shape) >= 2**32:
        raise OperandError(f"an extent must be below 2^32 (got {src.shape}); transpose parts of the matrix")
    if src.dtype.itemsize != 4:
        raise OperandError(f"transpose moves 4-byte elements (got {src.dtype}); view or convert the matrix")
    if src.nbytes == 0:
        return LaunchInfo(None)
    num_rows, num_columns = src.shape
    tiles = -(-num_rows // TILE) * -(-num_columns // TILE)
    grid = persistent_grid(capabilities, tiles, config.ctas_per_sm)
    args = (dst, src, np.uint32(num_rows), np.uint32(num_columns))
    return launch(config.source, grid, config.threads, args, device_array=src, shared_bytes=0, stream=stream)
