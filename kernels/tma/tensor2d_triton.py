"""The Triton twin of tensor2d.py: host tensor descriptors, load and store.

The same path, global -> shared -> global by tensor copies, one tile at a time per CTA: with ``num_stages=1``
Triton waits for each load and each store, and the store reads the buffer that the load wrote. (With more,
Triton 3.9 pipelines the stores through a second buffer and carries the tile there through registers.) The
arrays are seen as rows of 128 bytes, a tile is a power of two of them. The last bytes that fill no row go
global -> registers -> global.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from kernels.common import (
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_ctas,
    check_operands,
    check_threads,
    check_tile,
    launch,
    persistent_grid,
    plain_integers,
    require,
    tma_unavailable,
)
from kernels.occupancy import BEST_BYTES_IN_FLIGHT_PER_SM, most_ctas
from smfree.cuda import (
    Capabilities,
    DeviceArray,
    Stream,
    TritonDescriptor,
    TritonSource,
    triton_unavailable,
)

ROW_BYTES = 128
ROW_WORDS = 32
MBARRIER_BYTES = 8


@triton.jit
def tensor2d_triton(
    dst, src, dst_bytes, src_bytes, num_rows, num_bytes, TILE_ROWS: tl.constexpr, ROW_WORDS: tl.constexpr
):
    """dst, src: descriptors of num_rows x ROW_WORDS words; what is left of num_bytes goes byte by byte."""
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, TILE_ROWS), tl.num_programs(0)):
        dst.store([tile * TILE_ROWS, 0], src.load([tile * TILE_ROWS, 0]))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        at = num_rows.to(tl.int64) * (ROW_WORDS * 4) + tl.arange(0, ROW_WORDS * 4)
        tl.store(dst_bytes + at, tl.load(src_bytes + at, mask=at < num_bytes), mask=at < num_bytes)


@dataclass(frozen=True)
class TritonTensorConfig:
    """How ``tensor2d_triton`` is compiled and launched; ``tile_bytes`` is a power of two, at least 128.

    Raises ConfigError.
    """

    tile_bytes: int = 16384
    threads: int = 32
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        check_tile(self.tile_bytes, multiple_of=ROW_BYTES)
        check_threads(self.threads)
        for name, value in (("tile_bytes", self.tile_bytes), ("threads", self.threads)):
            require(value & (value - 1) == 0, f"{name} must be a power of two for Triton", value, "round it")
        check_ctas(self.ctas_per_sm)

    @property
    def num_stages(self) -> int:
        """One tile at a time."""
        return 1

    @property
    def block(self) -> tuple[int, int]:
        """The descriptor's block, in rows and words."""
        return self.tile_bytes // ROW_BYTES, ROW_WORDS

    @property
    def shared_bytes(self) -> int:
        """What Triton takes: the tile and its barrier."""
        return self.tile_bytes + MBARRIER_BYTES

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """One tile."""
        return self.tile_bytes

    @property
    def source(self) -> TritonSource:
        """What Triton compiles."""
        descriptor = "tensordesc<i32[{}, {}]>".format(*self.block)
        return TritonSource(
            tensor2d_triton,
            {
                "dst": descriptor,
                "src": descriptor,
                "dst_bytes": "*u8",
                "src_bytes": "*u8",
                "num_rows": "i32",
                "num_bytes": "i64",
            },
            {"TILE_ROWS": self.block[0], "ROW_WORDS": ROW_WORDS},
            ("dst_bytes", "src_bytes"),
            num_warps=self.threads // 32,
            num_stages=1,
        )


def unavailable(capabilities: Capabilities) -> str | None:
    """Why the twin cannot run, None when it can. Without the TMA Triton would turn it into plain loads."""
    return tma_unavailable(capabilities) or triton_unavailable()


def throughput_config(
    capabilities: Capabilities,
    tile_bytes: int,
    *,
    bytes_in_flight_per_sm: int | None = None,
    threads: int | None = None,
) -> TritonTensorConfig:
    """The configuration with exactly so many bytes in flight per SM, or as many CTAs as fit up to
    ``BEST_BYTES_IN_FLIGHT_PER_SM`` when None.

    Triton decides the shared memory, so the CTAs per SM are held by the grid alone. Raises ConfigError.
    """
    check_available(unavailable(capabilities))
    used = threads or 32
    config = TritonTensorConfig(tile_bytes, used)
    fit = most_ctas(capabilities, used, config.shared_bytes)
    wanted = bytes_in_flight_per_sm or BEST_BYTES_IN_FLIGHT_PER_SM
    ctas, rest = divmod(wanted, tile_bytes)
    if bytes_in_flight_per_sm is not None:
        require(
            ctas > 0 and rest == 0 and ctas <= fit,
            f"{wanted} bytes in flight per SM must be 1 to {fit} tiles, of which each CTA loads one",
            f"tiles of {tile_bytes}",
            "use another tile",
        )
    require(fit > 0, "a tile must fit the shared memory of a CTA", tile_bytes, "use a smaller tile")
    return TritonTensorConfig(tile_bytes, used, max(1, min(ctas, fit)))


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: TritonTensorConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length from 128 bytes on, both alike, 16-byte aligned,
    not overlapping. Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, TritonTensorConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    check_operands("cp.async.bulk.tensor", dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    num_rows = src.nbytes // ROW_BYTES
    if num_rows == 0:
        raise OperandError(
            f"a tensor descriptor has at least one row of {ROW_BYTES} bytes (got {src.nbytes} bytes); use "
            "kernels.tma.tensor2d"
        )
    grid = persistent_grid(capabilities, -(-src.nbytes // config.tile_bytes), config.ctas_per_sm)
    rows = [
        TritonDescriptor(
            array.bytes_view(0, num_rows * ROW_BYTES).view(np.int32, (num_rows, ROW_WORDS)), config.block
        )
        for array in (dst, src)
    ]
    args = (*rows, dst.bytes_view(), src.bytes_view(), np.int32(num_rows), np.int64(src.nbytes))
    return launch(config.source, grid, config.threads, args, device_array=src, shared_bytes=0, stream=stream)
