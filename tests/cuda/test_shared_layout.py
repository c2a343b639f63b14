"""Where static shared variables lie, against what ptxas made of it."""

from __future__ import annotations

import re

import pytest

from smfree.cuda import compile_cuda
from smfree.cuda.shared_layout import name_barrier, shared_variables, window_base
from tests.cuda.sources import FACTS, source

VARIABLES = """
__shared__ unsigned few[3];
__shared__ unsigned long long full[4];
__shared__ unsigned long long empty[4];
__shared__ __attribute__((aligned(128))) unsigned char tile[200];
__shared__ unsigned char flag;
extern __shared__ unsigned char dynamic[];
#define ADDRESS(variable) (unsigned)__cvta_generic_to_shared(&variable)
#define TOUCH(variable) asm volatile("st.shared.u8 [%0], %1;" :: "r"(ADDRESS(variable)), "r"(x) : "memory")
extern "C" __global__ void touch(unsigned x) {
  __shared__ unsigned long long done;
  TOUCH(few); TOUCH(full); TOUCH(empty); TOUCH(tile); TOUCH(flag); TOUCH(done); TOUCH(dynamic);
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_offsets_are_those_of_the_stores_in_sass(arch: str) -> None:
    image = compile_cuda(source(VARIABLES), arch)
    found = shared_variables(image)
    assert [(v.name, v.size_bytes) for v in found] == [
        ("few", 12), ("full", 32), ("empty", 32), ("tile", 200), ("flag", 1), ("done", 8),
    ]  # fmt: skip
    end = -(-(found[-1].offset + found[-1].size_bytes) // 16) * 16  # where dynamic shared memory begins
    assert end == image.functions["touch"].static_shared_bytes
    stores = [i.operands for i in image.sass().instructions if i.stem == "STS"]
    displaced = [re.search(r"(0x[0-9a-f]+)\]", operands) for operands in stores]
    offsets = sorted(int(by[1], 16) if by else 0 for by in displaced)
    starts = sorted([*(v.offset for v in found), end])
    base = window_base(image, is_emulated=False)
    assert base == (0 if arch == "sm_80" else 1024)
    immediate = any(re.search(r"\b0x400\b", i.operands) for i in image.sass().instructions)
    assert immediate == bool(base), "the window's base is a constant that the stores are relative to"
    assert offsets == starts


def test_names_of_barriers() -> None:
    variables = shared_variables(compile_cuda(source(VARIABLES), "sm_90a"))
    by_name = {v.name: v.offset for v in variables}
    assert name_barrier(variables, by_name["full"] + 16) == "full[2]"
    assert name_barrier(variables, by_name["done"]) == "done"
    assert name_barrier(variables, 4096) == "shared+0x1000"


def test_a_module_with_several_kernels_has_no_common_layout() -> None:
    image = compile_cuda(source(FACTS), "sm_90a")
    assert len(image.functions) > 1 and shared_variables(image) == ()


def test_an_emulated_window_begins_at_zero() -> None:
    assert window_base(compile_cuda(source(VARIABLES), "sm_90a"), is_emulated=True) == 0
