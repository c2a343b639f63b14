"""Read swizzled tiles: transpose a matrix through them, or show how they lie (swizzle.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
    check_threads,
    check_whole,
    launch,
    require,
    tma_unavailable,
)
from kernels.tma.ring import RingConfig
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream, Swizzle

ELEMENT_BYTES = 4
MAX_BOX = 256
ATOMS = (Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_64B)
SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128, *ATOMS)


class Output(Enum):
    """What dst gets."""

    AS_STORED = "as stored"
    TRANSPOSED = "transposed"


@dataclass(frozen=True)
class SwizzleConfig(RingConfig):
    """How ``tma_swizzle`` is compiled and launched.

    ``row_bytes`` is the box's width, the swizzle's span (0: that, or 128 without a swizzle); ``box_rows`` a
    multiple of 32. All ``threads`` read. Raises ConfigError.
    """

    stage_align = 1024
    """The longest pattern (PTX ISA, "Swizzling Modes")."""

    swizzle: Swizzle = Swizzle.B128
    output: Output = Output.TRANSPOSED
    box_rows: int = 64
    row_bytes: int = 0
    threads: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ", ".join(known.name for known in SWIZZLES)
        known = isinstance(self.swizzle, Swizzle) and self.swizzle in SWIZZLES
        require(known, f"swizzle is one of {names}", repr(self.swizzle), "use Swizzle.B128")
        require(isinstance(self.output, Output), "output is an Output", self.output, "use Output.TRANSPOSED")
        span = self.swizzle.span_bytes
        if self.row_bytes == 0:
            object.__setattr__(self, "row_bytes", span or 128)
        check_whole("row_bytes", self.row_bytes)
        if span is not None:
            require(
                self.row_bytes == span,
                f"under swizzle {self.swizzle.name} a tile's row is its span of {span} bytes (how "
                "narrower rows lie is undocumented)",
                self.row_bytes,
                "use 0",
            )
        require(
            0 < self.row_bytes <= MAX_BOX * ELEMENT_BYTES and self.row_bytes % 16 == 0,
            f"row_bytes is a multiple of 16, at most {MAX_BOX * ELEMENT_BYTES}",
            self.row_bytes,
            "use 128",
        )
        check_whole("box_rows", self.box_rows)
        require(
            0 < self.box_rows <= MAX_BOX and self.box_rows % 32 == 0,
            f"box_rows is a multiple of 32, at most {MAX_BOX}",
            self.box_rows,
            "use 64",
        )
        check_threads(self.threads)

    @property
    def row_elements(self) -> int:
        """Elements of a tile's row."""
        return self.row_bytes // ELEMENT_BYTES

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.box_rows * self.row_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "swizzle.cu",
            {
                "SWIZZLE": int(self.swizzle),
                "OUTPUT": self.output.name,
                "ROW_BYTES": self.row_bytes,
                "BOX_ROWS": self.box_rows,
                "NUM_STAGES": self.num_stages,
                "THREADS": self.threads,
            },
        )

    def tiles(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Tiles of a matrix: down and across."""
        return -(-num_rows // self.box_rows), -(-num_cols // self.row_elements)


def unavailable(capabilities: Capabilities, swizzle: Swizzle = Swizzle.NONE) -> str | None:
    """Why a swizzle cannot be used on a device, None when it can.

    Atoms other than 16 bytes: PTX ISA, "tensormap.replace" (.swizzle_atomicity needs sm_100a) and
    "Restriction on Tensor Copy instructions" (loads on sm_120a have none).
    """
    if swizzle in ATOMS and not (10, 0) <= capabilities.compute_capability < (12, 0):
        major, minor = capabilities.compute_capability
        return (
            f"swizzle {swizzle.name} needs compute capability 10.0 to 11.x; {capabilities.name} has "
            f"{major}.{minor}"
        )
    return tma_unavailable(capabilities)


def read_tiles(
    dst: DeviceArray, src: DeviceArray, *, config: SwizzleConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Load ``src`` (rows, cols), 4-byte elements, cols a multiple of 4, in swizzled tiles; write ``dst``.

    Output TRANSPOSED: dst (cols, rows) is src's transpose. AS_STORED: dst (tiles, box_rows, row_elements) is
    shared memory as it lies, tiles row by row, zeros outside src. Both 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for an empty src.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, SwizzleConfig, src=src, dst=dst)
    check_available(unavailable(capabilities, config.swizzle))
    check_alike(dst, src)
    if len(src.shape) != 2 or src.dtype.itemsize != ELEMENT_BYTES or src.shape[1] % 4:
        raise OperandError(
            f"src is a matrix of 4-byte elements whose rows are multiples of 16 bytes (got {src.shape} "
            f"{src.dtype}); pad its rows"
        )
    num_rows, num_cols = src.shape
    down, across = config.tiles(num_rows, num_cols)
    transposed = config.output is Output.TRANSPOSED
    wanted = (num_cols, num_rows) if transposed else (down * across, config.box_rows, config.row_elements)
    if dst.shape != wanted:
        raise OperandError(
            f"dst must have the shape {wanted} for output {config.output.name} of {src.shape} (got "
            f"{dst.shape}); allocate it so"
        )
    if max(src.nbytes, dst.nbytes) >= 2**32:
        raise OperandError(
            f"src and dst have less than 2^32 bytes (got {src.nbytes} and {dst.nbytes}); slice"
        )
    check_aligned("cp.async.bulk.tensor", "src", src, 16)
    check_aligned("a 16-byte store", "dst", dst, 16)
    check_apart(dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    box = (config.box_rows, config.row_elements)
    src_map = src.device.tensor_map(src, box, swizzle=config.swizzle)
    return launch(
        config.source,
        config.grid_for(down * across, capabilities),
        config.threads,
        (src_map, dst, np.uint32(num_rows), np.uint32(num_cols)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
