"""PTX that Triton emits: pointers, tensor descriptors, reductions, matrix products on each architecture."""

# mypy: allow-untyped-defs

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # silences a notice of Triton 3.9

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from smfree.emulator.ptx.ast import TensorAddress
from smfree.emulator.ptx.check import load
from smfree.emulator.ptx.flow import analyse

_DIVISIBLE = [["tt.divisibility", 16]]


@triton.jit
def copy_pointers(dst, src, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < n), mask=at < n)


@triton.jit
def copy_descriptors(dst, src, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    dst.store([i, j], src.load([i, j]))


@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * n + lane, mask=lane < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + lane, e / tl.sum(e, 0), mask=lane < n)
    tl.atomic_add(y + lane, e, mask=lane < n)
    tl.device_assert(n > 0)


@triton.jit
def product(a, b, c, N, K, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK)
    at_a = a + rows[:, None] * K + depth[None, :]
    at_b = b + depth[:, None] * N + columns[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, K, BLOCK):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total)
        at_a += BLOCK
        at_b += BLOCK * N
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))


def _ptx(kernel: object, signature: dict[str, str], constants: dict[str, int], architecture: int) -> str:
    names = list(signature)
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(len(names) + i,): value for i, value in enumerate(constants.values())},
        attrs={(i,): _DIVISIBLE for i, name in enumerate(names) if "tensordesc" not in signature[name]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    text = compiled.asm["ptx"]
    assert isinstance(text, str)
    return text


CASES = {
    "pointers": (copy_pointers, {"dst": "*i32", "src": "*i32", "n": "i32"}, {"BLOCK": 1024}),
    "softmax": (softmax, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BLOCK": 1024}),
    "product": (
        product,
        {"a": "*fp16", "b": "*fp16", "c": "*fp16", "N": "i32", "K": "i32"},
        {"BLOCK": 64},
    ),
}


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
@pytest.mark.parametrize("case", CASES)
def test_what_triton_emits_parses_and_breaks_no_rule(case: str, architecture: int) -> None:
    kernel, signature, constants = CASES[case]
    module = load(_ptx(kernel, signature, constants, architecture))
    (k,) = module.kernels.values()
    assert k.reqntid == (128, 1, 1)
    assert len(k.params) == len(signature) + 2  # two hidden scratch pointers
    assert analyse(k).live_in[0] == frozenset()
    assert all(i.source is None or "test_ptx_triton.py" in _outermost(i.source) for i in k.instrs)
    if case == "product":
        matrix = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}[architecture]
        assert any(i.opcode == matrix for i in k.instrs)


def _outermost(source: object) -> str:
    return str(source).split(" (inlined", 1)[0]


def test_tensor_descriptors_of_the_host() -> None:
    signature = {"dst": "tensordesc<i32[64,64]>", "src": "tensordesc<i32[64,64]>"}
    module = load(_ptx(copy_descriptors, signature, {"ROWS": 64, "COLUMNS": 64}, 90))
    k = module.kernels["copy_descriptors"]
    assert [p.size_bytes for p in k.params if p.align == 64] == [128, 128]
    copies = [i for i in k.instrs if i.opcode == "cp" and "tensor" in i.modifiers]
    maps = [o for i in copies for o in i.operands if isinstance(o, TensorAddress)]
    assert len(copies) == 2 and [len(m.coords) for m in maps] == [2, 2]
    assert any(label.startswith("waitLoop") for label in k.labels)
