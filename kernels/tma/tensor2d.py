"""Copy with ``cp.async.bulk.tensor.2d``, global to shared to global, no byte through registers (tensor2d.cu).

The arrays are seen as rows of ``row_bytes``, made of 4-byte elements; a tile is ``box_rows`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_tile,
    require,
    tma_unavailable,
)
from kernels.staged import BarrierPlan, StagedConfig, placed, round_up, run_copy
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream, Swizzle, TensorMap
from smfree.cuda.tensormap import DataType, TensorMapSpec, encode

ELEMENT_BYTES = 4
MAX_BOX = 256
MAX_ROWS = 2**31
SWIZZLES = {Swizzle.NONE: 128, Swizzle.B32: 256, Swizzle.B64: 512, Swizzle.B128: 1024}
"""Swizzle to the alignment of a stage in bytes: the pattern's period (PTX ISA, "Swizzling modes")."""
unavailable = tma_unavailable


@dataclass(frozen=True)
class Tensor2dConfig(StagedConfig):
    """How ``tma_tensor2d`` is compiled and launched: ``num_stages`` tiles in flight, one thread asking.

    ``row_bytes`` is the box's width (0: chosen by :func:`row_bytes_for`). Load and store use the same
    ``swizzle``, so that the data passes unchanged. Raises ConfigError.
    """

    row_bytes: int = 0
    swizzle: Swizzle = Swizzle.NONE

    def __post_init__(self) -> None:
        super().__post_init__()
        swizzles = ", ".join(swizzle.name for swizzle in SWIZZLES)
        require(self.swizzle in SWIZZLES, f"swizzle must be one of {swizzles}", self.swizzle.name, "use NONE")
        if self.row_bytes == 0:
            object.__setattr__(self, "row_bytes", row_bytes_for(self.tile_bytes, self.swizzle))
        span = self.swizzle.span_bytes or MAX_BOX * ELEMENT_BYTES
        require(
            0 < self.row_bytes <= span and self.row_bytes % 16 == 0,
            f"row_bytes must be a multiple of 16, at most {span} under swizzle {self.swizzle.name}",
            self.row_bytes,
            "use 0 to have it chosen",
        )
        check_tile(self.tile_bytes, multiple_of=self.row_bytes)
        require(
            self.box_rows <= MAX_BOX,
            f"a box has at most {MAX_BOX} rows",
            f"{self.box_rows} of {self.row_bytes} bytes",
            "use a smaller tile or wider rows",
        )

    @property
    def box_rows(self) -> int:
        """Rows of a tile."""
        return self.tile_bytes // self.row_bytes

    @property
    def stage_align(self) -> int:
        """Alignment of the stages: the swizzle's period."""
        return SWIZZLES[self.swizzle]

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages in shared memory."""
        return round_up(self.tile_bytes, self.stage_align)

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the asking thread, and the tile; rows past the end are filled and count."""
        return (BarrierPlan("full", {"asking thread": 1}, {"tile": self.tile_bytes}),)

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "tensor2d.cu",
            {
                "ROW_BYTES": self.row_bytes,
                "BOX_ROWS": self.box_rows,
                "STAGE_ALIGN": self.stage_align,
                "NUM_STAGES": self.num_stages,
                "THREADS": self.threads,
            },
        )


def row_bytes_for(tile_bytes: int, swizzle: Swizzle = Swizzle.NONE) -> int:
    """The box's width for a tile: 128 bytes or the swizzle's span, wider where the box would get more than
    256 rows, otherwise the widest that divides the tile. Raises ConfigError."""
    span = swizzle.span_bytes or MAX_BOX * ELEMENT_BYTES
    widths = [width for width in range(16, span + 1, 16) if tile_bytes % width == 0]
    usual = [width for width in widths if width <= 128 and tile_bytes // width <= MAX_BOX]
    wide = [width for width in widths if width > 128 and tile_bytes // width <= MAX_BOX]
    require(
        bool(usual or wide),
        f"a box has at most {MAX_BOX} rows of at most {span} bytes under swizzle {swizzle.name}",
        f"a tile of {tile_bytes} bytes",
        "use a smaller tile, or a multiple of 128 bytes",
    )
    return max(usual) if usual else min(wide)


def throughput_config(
    capabilities: Capabilities,
    tile_bytes: int,
    *,
    bytes_in_flight_per_sm: int | None = None,
    threads: int | None = None,
) -> Tensor2dConfig:
    """The configuration with exactly so many bytes in flight per SM, or the engine at its best when None
    (one warp, four stages if they fit, then CTAs up to ``BEST_BYTES_IN_FLIGHT_PER_SM``).

    Raises ConfigError with the reason when it cannot be done.
    """
    check_available(unavailable(capabilities))
    return placed(Tensor2dConfig(tile_bytes, 1, threads or 32), capabilities, bytes_in_flight_per_sm)


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: Tensor2dConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, Tensor2dConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    box = (config.row_bytes, config.box_rows, config.swizzle)
    return run_copy(
        dst,
        src,
        config=config,
        instruction="cp.async.bulk.tensor",
        stream=stream,
        maps=lambda: (rows_map(dst, *box), rows_map(src, *box)),
    )


def rows_map(array: DeviceArray, row_bytes: int, box_rows: int, swizzle: Swizzle = Swizzle.NONE) -> TensorMap:
    """The tensor map of an array seen as rows of ``row_bytes``, box ``{row_bytes, box_rows}``.

    An array shorter than a row gets a map of one row, which the kernel never uses: a map cannot be empty.
    """
    num_rows = max(array.nbytes // row_bytes, 1)
    if num_rows > MAX_ROWS:
        raise OperandError(
            f"a tensor copy's row coordinate is below 2^31 (got {num_rows} rows of {row_bytes} bytes); use a "
            "larger tile, whose rows are wider, or split the array"
        )
    spec = TensorMapSpec(
        address=array.ptr,
        data_type=DataType.UINT32,
        dims=(row_bytes // ELEMENT_BYTES, num_rows),
        strides_bytes=(row_bytes,),
        box=(row_bytes // ELEMENT_BYTES, box_rows),
        element_strides=(1, 1),
        swizzle=swizzle,
    )
    return encode(array.device.calls, spec, array.allocation)
