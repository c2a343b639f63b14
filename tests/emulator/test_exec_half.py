"""16-bit floats: every operation and conversion against fractions, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.exec.half import from_half, from_tf32, odd_sum, to_half
from tests.emulator.exec_kit import execute
from tests.emulator.test_exec_arith import Case, check, nearest, read

NAN = 0x7FFF
# precision in bits, exponent of the smallest subnormal, the largest number
FORMATS = {
    "f16": (11, -24, Fraction(65504)),
    "bf16": (8, -133, (2 - Fraction(1, 128)) * Fraction(2) ** 127),
}

BITS = st.integers(0, 0xFFFF)


def value(pattern: int, kind: str) -> float:
    """A 16-bit pattern as a Python float."""
    return float(read(pattern, "f16")) if kind == "f16" else float(read(pattern << 16, "f32"))


def pattern_of(
    exact: Fraction | float, kind: str, *, toward_zero: bool = False, negative: bool = False
) -> int:
    """The pattern nearest to ``exact`` (ties to even), or the next toward zero; ``negative``: the sign of a
    zero."""
    if isinstance(exact, float) and not math.isfinite(exact):
        if math.isnan(exact):
            return NAN
        return (0x7C00 if kind == "f16" else 0x7F80) | (0x8000 if exact < 0 else 0)
    precision, least, biggest = FORMATS[kind]
    exact = Fraction(exact)
    sign = 0x8000 if exact < 0 or (exact == 0 and negative) else 0
    size = abs(exact)
    exponent = least
    while size / Fraction(2) ** exponent >= 1 << precision:
        exponent += 1
    count = (
        math.floor(size / Fraction(2) ** exponent) if toward_zero else round(size / Fraction(2) ** exponent)
    )
    rounded = count * Fraction(2) ** exponent
    if rounded > biggest:
        if not toward_zero:
            return sign | (0x7C00 if kind == "f16" else 0x7F80)
        rounded = biggest
    if kind == "f16":
        return sign | nearest(rounded, 16)
    return sign | nearest(rounded, 32) >> 16


def combined(kind: str, fn: Callable[..., Fraction], special: Callable[..., float]) -> Callable[..., int]:
    """The answer of an operation on patterns: exact where all are finite, else Python's float arithmetic."""

    def answer(*patterns: int) -> int:
        x = [value(p, kind) for p in patterns]
        if not all(map(math.isfinite, x)):
            return pattern_of(special(*x), kind)
        negative = math.copysign(1.0, special(*x)) < 0
        return pattern_of(fn(*map(Fraction, x)), kind, negative=negative)

    return answer


OPERATIONS: dict[str, tuple[int, Callable[..., Fraction], Callable[..., float]]] = {
    "add": (2, lambda x, y: x + y, lambda x, y: x + y),
    "sub": (2, lambda x, y: x - y, lambda x, y: x - y),
    "mul": (2, lambda x, y: x * y, lambda x, y: x * y),
    "fma.rn": (3, lambda x, y, z: x * y + z, lambda x, y, z: x * y + z),
}


def _least(x: float, y: float, sign: int) -> float:
    """min (sign 1) or max (sign -1): a number beats a NaN, +0 is above -0."""
    if math.isnan(x) or math.isnan(y):
        return y if math.isnan(x) else x
    return sorted((x, y), key=lambda v: (v, math.copysign(1.0, v)))[0 if sign > 0 else 1]


def _in_both_halves(answer: Callable[..., int]) -> Callable[..., int]:
    return lambda *x: answer(*(v & 0xFFFF for v in x)) | answer(*(v >> 16 for v in x)) << 16


@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("operation", [*OPERATIONS, "min", "max", "min.NaN", "neg", "abs"])
def test_operations_round_once(operation: str, kind: str, pair: bool) -> None:
    if operation in OPERATIONS:
        arity, fn, special = OPERATIONS[operation]
        answer = combined(kind, fn, special)
    elif operation in ("neg", "abs"):
        arity = 1
        answer = (lambda a: a ^ 0x8000) if operation == "neg" else (lambda a: a & 0x7FFF)
    else:
        arity, sign = 2, 1 if "min" in operation else -1

        def answer(a: int, b: int) -> int:
            x, y = value(a, kind), value(b, kind)
            if operation.endswith("NaN") and (math.isnan(x) or math.isnan(y)):
                return NAN
            least = _least(x, y, sign)
            return pattern_of(least, kind, negative=math.copysign(1.0, least) < 0)

    names = ", ".join("{" + "abc"[i] + "}" for i in range(arity))
    size = "b32" if pair else "b16"
    check(
        Case(
            f"{operation}.{kind}{'x2' if pair else ''} {{d}}, {names};",
            size, (size,) * arity, _in_both_halves(answer) if pair else answer,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("f16", "rn"), ("f16", "rz"), ("f16", "rn.sat"), ("f16", "rz.sat"), ("bf16", "rn"), ("bf16", "rz")],
)
def test_float32_to_a_half(kind: str, mode: str) -> None:
    def answer(a: int) -> int:
        x = float(read(a, "f32"))
        if "sat" in mode:
            x = min(max(x, 0.0), 1.0) if x > 0 else 0.0
        negative = math.copysign(1.0, x) < 0
        return pattern_of(x, kind, toward_zero=mode.startswith("rz"), negative=negative)

    check(Case(f"cvt.{mode}.{kind}.f32 {{d}}, {{a}};", "b16", ("f32",), answer))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_two_float32_into_a_pair_the_first_high(kind: str, mode: str) -> None:
    def half(a: int) -> int:
        x = float(read(a, "f32"))
        negative = math.copysign(1.0, x) < 0
        return pattern_of(x, kind, toward_zero=mode == "rz", negative=negative)

    check(Case(f"cvt.{mode}.{kind}x2.f32 {{d}}, {{a}}, {{b}};", "b32", ("f32", "f32"),
               lambda a, b: half(a) << 16 | half(b)))  # fmt: skip


def test_a_half_to_float32_is_exact() -> None:
    check(Case("cvt.f32.f16 {d}, {a};", "f32", ("b16",), lambda a: read_bits(value(a, "f16"))))
    check(Case("cvt.f32.bf16 {d}, {a};", "f32", ("b16",), lambda a: a << 16))
    check(Case("cvt.rn.bf16.f16 {d}, {a};", "b16", ("b16",),
               lambda a: pattern_of(value(a, "f16"), "bf16", negative=bool(a >> 15))))  # fmt: skip


def test_wider_registers_take_and_give_the_low_half() -> None:
    check(Case("cvt.f32.f16 {d}, {a};", "f32", ("b32",), lambda a: read_bits(value(a & 0xFFFF, "f16"))))
    body = """
    cvt.rn.f32.u32 %r11, %r2;
    cvt.rn.f16.f32 %r12, %r11;
    cvt.rn.f16.f32 %rd12, %r11;
    shl.b32 %r13, %r12, 16;
    cvt.u32.u64 %r14, %rd12;
    or.b32 %r13, %r13, %r14;
    st.global.u32 [%rd3], %r13;
    """
    got = execute(body).view(np.float16).reshape(32, 2)
    assert np.array_equal(got, np.repeat(np.arange(32), 2).reshape(32, 2))


def read_bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def test_a_uniform_and_a_varying_pair() -> None:
    body = """
    mov.b32 %r10, 0x3C004000;
    cvt.rn.f32.u32 %r11, %r2;
    cvt.rn.f16x2.f32 %r12, %r11, %r11;
    fma.rn.f16x2 %r13, %r12, %r10, %r10;
    st.global.u32 [%rd3], %r13;
    """
    got = execute(body).view(np.float16).reshape(32, 2)
    assert np.array_equal(got[:, 0], np.arange(32) * 2.0 + 2.0)
    assert np.array_equal(got[:, 1], np.arange(32) + 1.0)


# -------------------------------------------------------------------------------------------- the rounding


@settings(max_examples=400)
@given(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3)
def test_a_sum_rounded_to_odd_then_to_float32_is_the_rounded_sum(a: float, b: float, c: float) -> None:
    """What fma.rn.f32 does."""
    product = np.array([a], np.float64) * b
    with np.errstate(over="ignore"):
        got = odd_sum(product, np.array([c])).astype(np.float32)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    zero_sign = math.copysign(1.0, product[0] + c) < 0
    assert int(got.view(np.uint32)[0]) == nearest(exact, 32, zero_sign=int(zero_sign))


@settings(max_examples=400)
@given(st.floats(), st.sampled_from(["f16", "bf16"]), st.booleans())
def test_float64_to_a_half_rounds_once(x: float, kind: str, toward_zero: bool) -> None:
    with np.errstate(over="ignore"):
        got = int(to_half(np.array([x]), kind, toward_zero=toward_zero)[0])
    negative = math.copysign(1.0, x) < 0
    assert got == pattern_of(x, kind, toward_zero=toward_zero, negative=negative)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_pattern_survives_the_way_to_float64_and_back(kind: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        x = from_half(patterns, kind)
        back = to_half(x, kind)
    assert np.array_equal(back[~np.isnan(x)], patterns[~np.isnan(x)])
    assert (back[np.isnan(x)] == NAN).all()


def test_tf32_keeps_ten_bits_of_the_fraction() -> None:
    x = np.array([1 + 2.0**-10, 1 + 2.0**-11, -3.5, np.inf], np.float32)
    assert from_tf32(x.view(np.uint32)).tolist() == [1 + 2.0**-10, 1.0, -3.5, np.inf]
