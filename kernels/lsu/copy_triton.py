"""The Triton twin of copy.py: pointer loads and stores, specialised as Triton's JIT does.

Not the same path: Triton keeps the tile in registers, global -> registers -> global, and never goes through
shared memory, as copy.cu does. Tables mark it so. Loads are 16 bytes wide where the tile has 16 bytes per
thread, else narrower (``vector_bytes``).
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from kernels.common import (
    LaunchInfo,
    check_call,
    check_ctas,
    check_operands,
    check_threads,
    check_tile,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from kernels.occupancy import BEST_BYTES_IN_FLIGHT_PER_SM, most_ctas
from smfree.cuda import Capabilities, DeviceArray, Stream, TritonSource, triton_unavailable

WORD_BYTES = 4
MAX_WORDS_PER_THREAD = 128
WORDS_MULTIPLE = 16
"""Triton vectorises under a mask only when the bound is a known multiple of 16 elements."""


@triton.jit
def copy_triton(dst, src, num_words, num_bytes, TILE_WORDS: tl.constexpr, TAIL_BYTES: tl.constexpr):
    """num_words: whole groups of 16 four-byte words; the rest of num_bytes goes byte by byte."""
    for tile in range(tl.program_id(0), tl.cdiv(num_words, TILE_WORDS), tl.num_programs(0)):
        at = tile.to(tl.int64) * TILE_WORDS + tl.arange(0, TILE_WORDS)
        tl.store(dst + at, tl.load(src + at, mask=at < num_words), mask=at < num_words)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        at = num_words * 4 + tl.arange(0, TAIL_BYTES)
        src_bytes = src.to(tl.pointer_type(tl.uint8))
        dst_bytes = dst.to(tl.pointer_type(tl.uint8))
        tl.store(dst_bytes + at, tl.load(src_bytes + at, mask=at < num_bytes), mask=at < num_bytes)


@dataclass(frozen=True)
class TritonCopyConfig:
    """How ``copy_triton`` is compiled and launched; ``tile_bytes`` is a power of two. Raises ConfigError."""

    tile_bytes: int = 16384
    threads: int = 256
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        check_tile(self.tile_bytes)
        check_threads(self.threads)
        _check_power("tile_bytes", self.tile_bytes)
        _check_power("threads", self.threads)
        words = self.tile_bytes // (self.threads * WORD_BYTES)
        require(
            words <= MAX_WORDS_PER_THREAD,
            f"a thread holds at most {MAX_WORDS_PER_THREAD} words of the tile in registers",
            words,
            "use more threads or a smaller tile",
        )
        check_ctas(self.ctas_per_sm)

    @property
    def num_stages(self) -> int:
        """One tile at a time."""
        return 1

    @property
    def vector_bytes(self) -> int:
        """Bytes per load: what the tile gives each thread, at most 16."""
        return max(WORD_BYTES, min(16, self.tile_bytes // self.threads))

    @property
    def shared_bytes(self) -> int:
        """None: the tile stays in registers."""
        return 0

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Triton loads the whole tile before it stores any of it."""
        return self.tile_bytes

    @property
    def source(self) -> TritonSource:
        """What Triton compiles."""
        return TritonSource(
            copy_triton,
            {"dst": "*i32", "src": "*i32", "num_words": "i64", "num_bytes": "i64"},
            {"TILE_WORDS": self.tile_bytes // WORD_BYTES, "TAIL_BYTES": WORDS_MULTIPLE * WORD_BYTES},
            ("dst", "src", "num_words"),
            num_warps=self.threads // 32,
        )


def unavailable(capabilities: Capabilities) -> str | None:
    """Why the twin cannot be compiled here, None when it can."""
    del capabilities
    return triton_unavailable()


def throughput_config(
    capabilities: Capabilities,
    tile_bytes: int,
    *,
    bytes_in_flight_per_sm: int | None = None,
    threads: int | None = None,
) -> TritonCopyConfig:
    """The configuration with exactly so many bytes in flight per SM, or as many CTAs as fit when None.

    Triton decides the shared memory, so the CTAs per SM are held by the grid alone. Raises ConfigError.
    """
    check_tile(tile_bytes)
    _check_power("tile_bytes", tile_bytes)
    used = threads or min(256, max(32, tile_bytes // 64))
    config = TritonCopyConfig(tile_bytes, used)
    fit = most_ctas(capabilities, used, 0, registers=32 + tile_bytes // (used * WORD_BYTES))
    wanted = bytes_in_flight_per_sm or BEST_BYTES_IN_FLIGHT_PER_SM
    ctas, rest = divmod(wanted, tile_bytes)
    if bytes_in_flight_per_sm is not None:
        require(
            ctas > 0 and rest == 0 and ctas <= fit,
            f"{wanted} bytes in flight per SM must be 1 to {fit} tiles, of which each CTA loads one",
            f"tiles of {tile_bytes}",
            "use another tile",
        )
    require(
        fit > 0, "a tile must fit the registers of a CTA", tile_bytes, "use a smaller tile or more threads"
    )
    return TritonCopyConfig(config.tile_bytes, config.threads, max(1, min(ctas, fit)))


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: TritonCopyConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, TritonCopyConfig, src=src, dst=dst)
    check_operands("16-byte loads and stores", dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    num_words = src.nbytes // (WORDS_MULTIPLE * WORD_BYTES) * WORDS_MULTIPLE
    grid = persistent_grid(capabilities, -(-src.nbytes // config.tile_bytes), config.ctas_per_sm)
    args = (words_view(dst), words_view(src), np.int64(num_words), np.int64(src.nbytes))
    return launch(config.source, grid, config.threads, args, device_array=src, shared_bytes=0, stream=stream)


def words_view(array: DeviceArray) -> DeviceArray:
    """The array's whole 4-byte words as int32."""
    return array.bytes_view(0, array.nbytes // WORD_BYTES * WORD_BYTES).view(np.int32)


def _check_power(name: str, value: int) -> None:
    require(value & (value - 1) == 0, f"{name} must be a power of two for Triton", value, "round it")
