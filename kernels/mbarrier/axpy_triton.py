"""The Triton twins of the pipelines: a persistent loop with ``num_stages``, and the compiler makes one of it.

What Triton decides (3.9; tests/kernels/test_axpy_triton.py looks into the PTX):

* ``axpy_descriptor``, sm_90 and later: host tensor descriptors, loads by ``cp.async.bulk.tensor.2d``. At
  ``num_stages`` N of at least 2, N - 1 tiles of x and y are in flight, in N - 1 pairs of buffers with one
  mbarrier each. Both loads complete on it, one elected thread asks for them, every thread waits. There is no
  empty barrier: ``bar.sync`` says that a buffer has been read, so no warp runs ahead of the others. The
  result goes from registers to one more buffer, which one bulk store at a time reads. At 1 every load and
  store is waited for.
* ``axpy_pointer``, sm_80 and later: pointer loads become ``cp.async`` of 16 bytes with commit groups, without
  mbarriers; the result goes from registers to global memory. At 1 loads go to registers at once.

So a Triton pipeline has no producer warp and no barrier that the source names, and the result passes through
registers. FMAs are unrolled, because only innermost loops are pipelined.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from kernels.common import (
    MAX_STAGES,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_ctas,
    check_flag,
    check_float32,
    check_operands,
    check_stages,
    check_threads,
    check_tile,
    check_whole,
    launch,
    persistent_grid,
    plain_integers,
    require,
    tma_unavailable,
)
from smfree.cuda import (
    Capabilities,
    DeviceArray,
    Stream,
    TritonDescriptor,
    TritonSource,
    triton_unavailable,
)

ROW_ELEMENTS = 32
ROW_BYTES = 4 * ROW_ELEMENTS
MBARRIER_BYTES = 8
MAX_WORK = 64
MAX_ELEMENTS_PER_THREAD = 64


@triton.jit
def fma_work(x, y, alpha, WORK: tl.constexpr):
    """WORK times y = fma(alpha, x, y)."""
    for _ in tl.static_range(WORK):
        y = tl.fma(tl.full(x.shape, alpha, tl.float32), x, y)
    return y


@triton.jit
def axpy_tail(dst, x, y, alpha, begin, num_elements, WORK: tl.constexpr, ROW_ELEMENTS: tl.constexpr):
    """What fills no row: the last program, through registers."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        at = begin + tl.arange(0, ROW_ELEMENTS)
        mask = at < num_elements
        tl.store(dst + at, fma_work(tl.load(x + at, mask), tl.load(y + at, mask), alpha, WORK), mask)


@triton.jit
def axpy_descriptor(
    dst_rows,
    x_rows,
    y_rows,
    dst,
    x,
    y,
    alpha,
    num_rows,
    num_elements,
    TILE_ROWS: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr,
    WORK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """dst_rows, x_rows, y_rows: descriptors of num_rows x ROW_ELEMENTS floats of dst, x, y."""
    num_tiles = tl.cdiv(num_rows, TILE_ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tile * TILE_ROWS
        dst_rows.store([row, 0], fma_work(x_rows.load([row, 0]), y_rows.load([row, 0]), alpha, WORK))
    axpy_tail(dst, x, y, alpha, num_rows.to(tl.int64) * ROW_ELEMENTS, num_elements, WORK, ROW_ELEMENTS)


@triton.jit
def axpy_pointer(
    dst,
    x,
    y,
    alpha,
    bulk_elements,
    num_elements,
    TILE_ELEMENTS: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr,
    WORK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """bulk_elements: whole rows of ROW_ELEMENTS floats, so that loads under the mask stay 16 bytes wide."""
    num_tiles = tl.cdiv(bulk_elements, TILE_ELEMENTS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=NUM_STAGES):
        at = tile.to(tl.int64) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
        mask = at < bulk_elements
        tl.store(dst + at, fma_work(tl.load(x + at, mask), tl.load(y + at, mask), alpha, WORK), mask)
    axpy_tail(dst, x, y, alpha, bulk_elements, num_elements, WORK, ROW_ELEMENTS)


@dataclass(frozen=True)
class TritonAxpyConfig:
    """How a twin is compiled and launched; ``descriptors`` chooses which.

    ``tile_bytes`` of x, a power of two of at least 128 and at most 256 bytes per thread; ``num_stages`` as
    Triton counts them; ``work`` FMAs per element. Raises ConfigError.
    """

    tile_bytes: int = 4096
    num_stages: int = 2
    threads: int = 128
    work: int = 1
    descriptors: bool = True
    ctas_per_sm: int = 1
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        plain_integers(self)
        check_tile(self.tile_bytes, multiple_of=ROW_BYTES)
        check_stages(self.num_stages, at_most=MAX_STAGES)
        check_threads(self.threads)
        check_ctas(self.ctas_per_sm)
        check_flag("descriptors", self.descriptors)
        check_whole("work", self.work)
        require(0 <= self.work <= MAX_WORK, f"work must be 0 to {MAX_WORK} FMAs", self.work, "use 1")
        for name, value in (("tile_bytes", self.tile_bytes), ("threads", self.threads)):
            require(value & (value - 1) == 0, f"{name} must be a power of two for Triton", value, "round it")
        each = self.tile_bytes // 4 // self.threads
        require(
            each <= MAX_ELEMENTS_PER_THREAD,
            f"a thread holds at most {MAX_ELEMENTS_PER_THREAD} elements of a tile in registers",
            each,
            "use more threads or a smaller tile",
        )
        if self.max_ctas is not None:
            check_whole("max_ctas", self.max_ctas)
            require(self.max_ctas >= 1, "max_ctas must be at least 1", self.max_ctas, "leave it out")

    @property
    def buffers(self) -> int:
        """Tiles of x and y that Triton keeps in flight."""
        return self.num_stages - 1

    @property
    def shared_bytes(self) -> int:
        """What Triton takes, barriers included."""
        if not self.descriptors:
            return 2 * self.buffers * self.tile_bytes
        if self.num_stages == 1:
            return self.tile_bytes + MBARRIER_BYTES
        return (2 * self.buffers + 1) * self.tile_bytes + self.buffers * MBARRIER_BYTES

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes that the CTA has asked for when it waits for the oldest."""
        return 2 * max(1, self.buffers) * self.tile_bytes

    @property
    def source(self) -> TritonSource:
        """What Triton compiles."""
        constants = {"ROW_ELEMENTS": ROW_ELEMENTS, "WORK": self.work, "NUM_STAGES": self.num_stages}
        pointers = {"dst": "*fp32", "x": "*fp32", "y": "*fp32", "alpha": "fp32"}
        options = {"num_warps": self.threads // 32, "num_stages": self.num_stages}
        if not self.descriptors:
            return TritonSource(
                axpy_pointer,
                pointers | {"bulk_elements": "i64", "num_elements": "i64"},
                constants | {"TILE_ELEMENTS": self.tile_bytes // 4},
                ("dst", "x", "y", "bulk_elements"),
                **options,
            )
        rows = dict.fromkeys(("dst_rows", "x_rows", "y_rows"), "tensordesc<fp32[{}, {}]>".format(*self.block))
        return TritonSource(
            axpy_descriptor,
            rows | pointers | {"num_rows": "i32", "num_elements": "i64"},
            constants | {"TILE_ROWS": self.block[0]},
            ("dst", "x", "y"),
            **options,
        )

    @property
    def block(self) -> tuple[int, int]:
        """A descriptor's block, in rows and elements."""
        return self.tile_bytes // ROW_BYTES, ROW_ELEMENTS

    def unavailable(self, capabilities: Capabilities) -> str | None:
        """Why it cannot run, None when it can: without the TMA, Triton makes plain loads of descriptors."""
        return (tma_unavailable(capabilities) if self.descriptors else None) or triton_unavailable()

    def grid_for(self, num_bytes: int, capabilities: Capabilities) -> int:
        """CTAs for arrays of ``num_bytes``."""
        grid = persistent_grid(capabilities, -(-num_bytes // self.tile_bytes), self.ctas_per_sm)
        return grid if self.max_ctas is None else min(grid, self.max_ctas)


def axpy(
    dst: DeviceArray,
    x: DeviceArray,
    y: DeviceArray,
    *,
    alpha: float,
    config: TritonAxpyConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``: float32, any shape, one size,
    16-byte aligned, ``dst`` overlapping neither; at least 32 elements with descriptors.

    Queues on ``stream`` and returns; nothing is launched for zero elements. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, TritonAxpyConfig, x=x, y=y, dst=dst)
    check_available(config.unavailable(capabilities))
    for name, array in (("x", x), ("y", y)):
        check_operands("16-byte copies", dst, array, source=name)
    if dst.dtype != np.float32:
        raise OperandError(f"axpy computes in float32 (got {dst.dtype}); view or convert the arrays")
    factor = check_float32("alpha", alpha)
    elements = dst.nbytes // 4
    if elements == 0:
        return LaunchInfo(None)
    num_rows = elements // ROW_ELEMENTS
    flat = [array.view(np.float32) for array in (dst, x, y)]
    if config.descriptors:
        if num_rows == 0:
            raise OperandError(
                f"a tensor descriptor has at least one row of {ROW_ELEMENTS} elements (got {elements}); use "
                "descriptors=False"
            )
        rows = [
            TritonDescriptor(
                array[: num_rows * ROW_ELEMENTS].view(np.float32, (num_rows, ROW_ELEMENTS)), config.block
            )
            for array in flat
        ]
        args = (*rows, *flat, factor, np.int32(num_rows), np.int64(elements))
    else:
        args = (*flat, factor, np.int64(num_rows * ROW_ELEMENTS), np.int64(elements))
    grid = config.grid_for(dst.nbytes, capabilities)
    return launch(config.source, grid, config.threads, args, device_array=dst, shared_bytes=0, stream=stream)
