"""Rows of any width to padded rows, zero-filled by ``cp.async`` itself (pad_async.cu)."""

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
    check_ctas,
    check_shared,
    check_stages,
    check_threads,
    check_whole,
    cp_async_unavailable,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from smfree.cuda import CudaSource, DeviceArray, Stream


@dataclass(frozen=True)
class PadConfig:
    """How ``lsu_pad_async`` is compiled and launched: rows of ``padded_bytes``, ``tile_rows`` of them per
    stage. Raises ConfigError."""

    padded_bytes: int = 256
    tile_rows: int = 16
    num_stages: int = 2
    threads: int = 128
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("padded_bytes", self.padded_bytes)
        require(
            self.padded_bytes > 0 and self.padded_bytes % 16 == 0,
            "padded_bytes must be a positive multiple of 16",
            self.padded_bytes,
            f"use {max(16, -(-self.padded_bytes // 16) * 16)}",
        )
        check_whole("tile_rows", self.tile_rows)
        require(self.tile_rows >= 1, "tile_rows must be at least 1", self.tile_rows, "use 16")
        check_stages(self.num_stages)
        check_threads(self.threads)
        check_ctas(self.ctas_per_sm)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a stage, zeros included."""
        return self.tile_rows * self.padded_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages."""
        return self.num_stages * self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "pad_async.cu",
            {
                "PADDED_BYTES": self.padded_bytes,
                "TILE_ROWS": self.tile_rows,
                "NUM_STAGES": self.num_stages,
                "THREADS": self.threads,
            },
        )


def pad(
    dst: DeviceArray,
    src: DeviceArray,
    *,
    row_bytes: int,
    config: PadConfig,
    src_pitch_bytes: int | None = None,
    stream: Stream | None = None,
) -> LaunchInfo:
    """Each row of ``dst`` (``config.padded_bytes``, without gaps) = ``row_bytes`` of ``src``, then zeros.

    Rows of ``src`` start ``src_pitch_bytes`` apart (None: ``row_bytes`` rounded up to 16), a multiple of 16;
    the last one may end with its ``row_bytes``. ``dst`` says how many rows there are. One dtype, 16-byte
    aligned, not overlapping. Queues on ``stream`` and returns; nothing is launched for zero rows.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, PadConfig, src=src, dst=dst)
    check_available(cp_async_unavailable(capabilities))
    check_shared(config.shared_bytes, capabilities)
    check_alike(dst, src)
    row_bytes = check_whole("row_bytes", row_bytes)
    require(
        0 <= row_bytes <= config.padded_bytes,
        f"row_bytes must be 0 to padded_bytes ({config.padded_bytes})",
        row_bytes,
        "use wider padded rows",
    )
    pitch = check_whole(
        "src_pitch_bytes", -(-row_bytes // 16) * 16 if src_pitch_bytes is None else src_pitch_bytes
    )
    require(
        pitch % 16 == 0 and pitch >= row_bytes,
        "src_pitch_bytes must be a multiple of 16, at least row_bytes",
        pitch,
        "store the rows 16-byte aligned",
    )
    num_rows, rest = divmod(dst.nbytes, config.padded_bytes)
    if rest:
        raise OperandError(
            f"dst must be whole rows of {config.padded_bytes} bytes (got {dst.nbytes} bytes); slice it"
        )
    needed = (num_rows - 1) * pitch + row_bytes if num_rows else 0
    if src.nbytes < needed:
        raise OperandError(
            f"{num_rows} rows of {row_bytes} bytes, {pitch} apart, need {needed} bytes of src "
            f"(got {src.nbytes}); shorten dst"
        )
    for name, array in (("dst", dst), ("src", src)):
        check_aligned("cp.async of 16 bytes", name, array, 16)
    check_apart(dst, src)
    if num_rows == 0:
        return LaunchInfo(None)
    grid = persistent_grid(capabilities, -(-num_rows // config.tile_rows), config.ctas_per_sm)
    args = (dst, src, np.uint64(num_rows), np.uint32(row_bytes), np.uint64(pitch))
    return launch(
        config.source,
        grid,
        config.threads,
        args,
        device_array=dst,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
