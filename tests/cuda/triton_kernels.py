"""Small Triton kernels that the tests of the host side compile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pointers(dst, src, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy through pointers."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(dst + offsets, tl.load(src + offsets, mask=mask), mask=mask)


@triton.jit
def copy_descriptors(dst, src, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy through host tensor descriptors."""
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    dst.store([row, col], src.load([row, col]))


@triton.jit
def sum_descriptors(  # type: ignore[no-untyped-def]
    out, src, steps, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """Add up tiles in a loop that Triton pipelines."""
    total = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        total += src.load([step * ROWS, 0])
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(out + rows * COLS + cols, total)


@triton.jit
def device_descriptors(dst, src, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy through descriptors that the kernel makes itself."""
    source = tl.make_tensor_descriptor(src, [rows, cols], [cols, 1], [ROWS, COLS])
    target = tl.make_tensor_descriptor(dst, [rows, cols], [cols, 1], [ROWS, COLS])
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    target.store([row, col], source.load([row, col]))


@triton.jit
def broken(dst, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Does not compile: the shapes do not fit."""
    tl.store(dst + tl.arange(0, BLOCK), tl.zeros((3, 5), tl.float32))


@triton.jit
def add_scalars(dst, a, b, c, d):  # type: ignore[no-untyped-def]
    """Scalars of several types."""
    tl.store(dst, a + b + c.to(tl.float64) + d)


@triton.jit
def sum_specialised(  # type: ignore[no-untyped-def]
    out, src, steps, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """Add up tiles with producer and consumer warps."""
    total = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES, warp_specialize=True):
        total += src.load([step * ROWS, 0])
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(out + rows * COLS + cols, total)


@triton.jit
def product(  # type: ignore[no-untyped-def]
    a, b, c, columns, depth, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr
):
    """c = a @ b through pointers, a tile per program."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    at_a, at_b = a + i[:, None] * depth + k[None, :], b + k[:, None] * columns + j[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(0, depth, DEPTH):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total)
        at_a += DEPTH
        at_b += DEPTH * columns
    tl.store(c + i[:, None] * columns + j[None, :], total.to(c.dtype.element_ty))


@triton.jit
def product_specialised(  # type: ignore[no-untyped-def]
    out, a, b, steps, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr
):
    """One tile of a @ b, loads and products by different warps."""
    total = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES, warp_specialize=True):
        total = tl.dot(a.load([0, step * DEPTH]), b.load([step * DEPTH, 0]), total)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(out + rows * COLS + cols, total)
