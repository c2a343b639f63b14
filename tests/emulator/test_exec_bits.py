"""Bits, bytes, roots and reductions of a warp or a CTA, against plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import BarrierFault, Deadlock
from tests.emulator.exec_kit import every_schedule, execute, report
from tests.emulator.test_exec_arith import Case, check, read, signed, wrap

RNG = np.random.default_rng(3)

# ---------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("bits", [32, 64])
def test_signed_bit_field(bits: int) -> None:
    def answer(a: int, b: int, c: int) -> int:
        pos, length = b & 0xFF, c & 0xFF
        sign = a >> min(pos + length - 1, bits - 1) & 1 if length else 0
        return sum((a >> pos + i & 1 if i < length and pos + i < bits else sign) << i for i in range(bits))

    check(Case(f"bfe.s{bits} {{d}}, {{a}}, {{b}}, {{c}};", f"b{bits}", (f"s{bits}", "u32", "u32"), answer))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("amount", [False, True])
def test_bfind(kind: str, amount: bool) -> None:
    bits = int(kind[1:])

    def answer(a: int) -> int:
        x = ~a & (1 << bits) - 1 if kind[0] == "s" and a >> bits - 1 else a
        if not x:
            return 0xFFFFFFFF
        return bits - x.bit_length() if amount else x.bit_length() - 1

    check(Case(f"bfind{'.shiftamt' if amount else ''}.{kind} {{d}}, {{a}};", "b32", (kind,), answer))


def test_fns() -> None:
    def answer(mask: int, base: int, offset: int) -> int:
        n = signed(offset, 32)
        if n == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        order = range(base, 32) if n > 0 else range(base, -1, -1)
        found = [i for i in order if mask >> i & 1]
        return found[abs(n) - 1] if len(found) >= abs(n) else 0xFFFFFFFF

    check(Case("fns.b32 {d}, {a}, {b}, {c};", "b32", ("b32", "b32", "s32"), answer,
               lambda mask, base, offset: base < 32))  # fmt: skip


def test_the_base_of_fns_is_a_bit_of_the_mask() -> None:
    body = "mov.b32 %r10, 0xf0;\nadd.u32 %r11, %r2, {first};\n{guard}fns.b32 %r12, %r10, %r11, 1;\n{out}"
    out = "mov.u32 %r13, 0;\nst.global.u32 [%rd3], %r13;"
    with report("a bit from 0 to 31 (got 32)", "thread 31", rule="alu.fns_base"):
        execute(body.format(first=1, guard="", out=out))
    execute(body.format(first=0, guard="", out=out))
    guard = "setp.lt.u32 %p1, %r11, 32;\n@%p1 "
    execute(body.format(first=1, guard=guard, out=out))


MODES = {
    "f4e": ["0123", "1234", "2345", "3456"],
    "b4e": ["0765", "1076", "2107", "3210"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["0123", "1123", "2223", "3333"],
    "ecr": ["0000", "0111", "0122", "0123"],
    "rc16": ["0101", "2323", "0101", "2323"],
}
"""The source byte of each byte of the result, lowest first (PTX ISA, table of prmt)."""


@pytest.mark.parametrize("mode", MODES)
def test_prmt_modes(mode: str) -> None:
    def answer(a: int, b: int, c: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(source[int(i)] for i in MODES[mode][c & 3]), "little")

    check(Case(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};", "b32", ("b32", "b32", "b32"), answer))


@pytest.mark.parametrize("a_kind", ["u32", "s32"])
@pytest.mark.parametrize("b_kind", ["u32", "s32"])
def test_dp4a(a_kind: str, b_kind: str) -> None:
    def bytes_of(x: int, kind: str) -> list[int]:
        return [signed(v, 8) if kind[0] == "s" else v for v in x.to_bytes(4, "little")]

    def answer(a: int, b: int, c: int) -> int:
        return wrap(c + sum(x * y for x, y in zip(bytes_of(a, a_kind), bytes_of(b, b_kind), strict=True)), 32)

    check(Case(f"dp4a.{a_kind}.{b_kind} {{d}}, {{a}}, {{b}}, {{c}};", "b32", ("b32", "b32", "b32"), answer))


# --------------------------------------------------------------------------------------------------- roots


def _rounded(fn: Callable[[float], float], *, ftz: bool = False) -> Callable[[int], int]:
    """The float32 pattern nearest to what ``fn`` of float64 says."""

    def flush(x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x

    def answer(a: int) -> int:
        x = float(read(a, "f32"))
        y = flush(fn(flush(x))) if ftz else fn(x)
        with np.errstate(over="ignore"):
            return int(np.float32(y).view(np.uint32))

    return answer


def _rcp(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1.0 / x


def _sqrt(x: float) -> float:
    return math.nan if x < 0 else math.sqrt(x)


def _log(x: float) -> float:
    return math.nan if x < 0 else -math.inf if x == 0 else math.log2(x)


def _exp(x: float) -> float:
    return math.inf if x >= 1024 else 2.0**x


FUNCTIONS = {
    "rcp": _rcp,
    "sqrt": _sqrt,
    "rsqrt": lambda x: _rcp(_sqrt(x)),
    "lg2": _log,
    "ex2": _exp,
    "tanh": math.tanh,
}


@pytest.mark.parametrize(
    ("name", "ftz"), [(n, f) for n in FUNCTIONS for f in (False, True) if (n, f) != ("tanh", True)]
)
def test_approximations_are_the_rounded_value(name: str, ftz: bool) -> None:
    answer = _rounded(FUNCTIONS[name], ftz=ftz)
    check(Case(f"{name}.approx{'.ftz' if ftz else ''}.f32 {{d}}, {{a}};", "f32", ("f32",), answer))


@pytest.mark.parametrize("name", ["rcp", "sqrt"])
def test_the_rounded_ones(name: str) -> None:
    check(Case(f"{name}.rn.f32 {{d}}, {{a}};", "f32", ("f32",), _rounded(FUNCTIONS[name])))


def test_the_full_range_quotient_is_the_rounded_one() -> None:
    def answer(a: int, b: int) -> int:
        with np.errstate(all="ignore"):
            return int((np.float32(read(a, "f32")) / np.float32(read(b, "f32"))).view(np.uint32))

    check(Case("div.full.f32 {d}, {a}, {b};", "f32", ("f32", "f32"), answer))


# ---------------------------------------------------------------------------------------- over warps and CTAs

_REDUCE: dict[str, Callable[[Any], int]] = {
    "add.u32": lambda v: wrap(sum(map(int, v)), 32),
    "min.u32": lambda v: int(v.min()),
    "max.s32": lambda v: wrap(int(v.view(np.int32).max()), 32),
    "min.s32": lambda v: wrap(int(v.view(np.int32).min()), 32),
    "and.b32": lambda v: int(np.bitwise_and.reduce(v)),
    "or.b32": lambda v: int(np.bitwise_or.reduce(v)),
    "xor.b32": lambda v: int(np.bitwise_xor.reduce(v)),
}
_LOAD = "add.s64 %rd20, %rd1, %rd39;\nld.global.u32 %r10, [%rd20];\n"


@every_schedule
@pytest.mark.parametrize("operation", _REDUCE)
def test_redux_over_the_lanes_of_each_mask(schedule: str, operation: str) -> None:
    data = RNG.integers(0, 1 << 32, 64, dtype=np.uint32)
    body = (
        f"{_LOAD}and.b32 %r11, %r2, 16;\nsetp.eq.u32 %p1, %r11, 0;\n"
        "selp.b32 %r12, 0x0000ffff, 0xffff0000, %p1;\n"
        f"redux.sync.{operation} %r13, %r10, %r12;\nst.global.u32 [%rd3], %r13;"
    )
    got = execute(body, a=data, block=64, schedule=schedule).out
    want = [_REDUCE[operation](data[i // 16 * 16 : i // 16 * 16 + 16]) for i in range(64)]
    assert got.tolist() == want


def test_redux_without_exited_lanes_and_with_a_missing_one() -> None:
    data = np.arange(1, 33, dtype=np.uint32)
    leave = "setp.eq.u32 %p1, %r2, 31;\n@%p1 exit;\n"
    redux = "redux.sync.add.u32 %r13, %r10, 0xffffffff;\nst.global.u32 [%rd3], %r13;\n"
    got = execute(_LOAD + leave + redux, a=data, zero_out=True).out
    assert got.tolist() == [sum(range(1, 32))] * 31 + [0]
    stay = "setp.eq.u32 %p1, %r2, 31;\n@%p1 bra WAIT;\n"
    with report("waits for lanes 31 of warp 0", kind=Deadlock):
        execute(_LOAD + stay + redux + "bra DONE;\nWAIT:\nbar.warp.sync 0xffffffff;\nDONE:\n", a=data)


@every_schedule
@pytest.mark.parametrize("mode", ["popc", "and", "or"])
@pytest.mark.parametrize("form", ["bar.red", "barrier.red"])
def test_barrier_reductions_per_cta(schedule: str, mode: str, form: str) -> None:
    """CTA i of four: i x 25 of 96 predicates are true; negated they are the others."""
    kind = "u32" if mode == "popc" else "pred"
    first, second = ("%r12", "%r13") if mode == "popc" else ("%p2", "%p3")
    body = (
        "mul.lo.u32 %r10, %r3, 25;\nsetp.lt.u32 %p1, %r2, %r10;\n"
        f"{form}.{mode}.{kind} {first}, 1, %p1;\n{form}.{mode}.{kind} {second}, 2, 96, !%p1;\n"
    )
    if mode != "popc":
        body += "selp.u32 %r12, 1, 0, %p2;\nselp.u32 %r13, 1, 0, %p3;\n"
    body += "shl.b32 %r13, %r13, 16;\nor.b32 %r12, %r12, %r13;\nst.global.u32 [%rd3], %r12;"
    got = execute(body, grid=4, block=96, schedule=schedule, strict="off").out.reshape(4, 96)
    for cta, row in enumerate(got):
        true = min(25 * cta, 96)
        want = {"popc": (true, 96 - true), "and": (true == 96, true == 0), "or": (true > 0, true < 96)}[mode]
        assert (row == int(want[0]) | int(want[1]) << 16).all()


def test_a_reduction_counts_the_threads_that_are_there() -> None:
    body = (
        "setp.ge.u32 %p1, %r2, 40;\n@%p1 exit;\n"
        "setp.ge.u32 %p2, %r2, 0;\nbar.red.and.pred %p3, 0, %p2;\nbar.red.popc.u32 %r10, 0, %p2;\n"
        "selp.u32 %r11, 1000, 0, %p3;\nadd.u32 %r10, %r10, %r11;\nst.global.u32 [%rd3], %r10;"
    )
    got = execute(body, block=64, zero_out=True).out
    assert got.tolist() == [1040] * 40 + [0] * 24


def test_a_reduction_mixed_with_a_plain_barrier_is_unpredictable() -> None:
    body = (
        "setp.lt.u32 %p1, %r2, 32;\n@%p1 bra RED;\nbarrier.sync 0;\nbra DONE;\n"
        "RED:\nbarrier.red.popc.u32 %r10, 0, %p1;\nDONE:\n"
    )
    with report("barrier 0", "no reduction, popc", rule="bar.mixed", kind=BarrierFault):
        execute(body, block=64)
    execute(body.replace("barrier.sync 0;", "barrier.red.popc.u32 %r10, 0, %p1;"), block=64)
