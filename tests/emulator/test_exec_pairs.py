"""Arithmetic on pairs of float32 (.f32x2), which compilers emit for sm_100."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.exec_kit import Machine, kernel, report

LANES = 32
_LOAD = """
    mul.wide.u32 %rd10, %r1, 8;
    add.u64 %rd11, %rd1, %rd10;
    add.u64 %rd12, %rd2, %rd10;
    add.u64 %rd13, %rd0, %rd10;
    ld.global.b64 %rd14, [%rd11];
    ld.global.b64 %rd15, [%rd12];
    {body}
    st.global.b64 [%rd13], %rd16;
"""


def run(body: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Lane i gets pairs i of a and b in %rd14 and %rd15, and leaves a pair in %rd16."""
    machine = Machine(profile="b200")
    out = machine.empty(8 * LANES)
    params = struct.pack("<QQQI", out, machine.put(a), machine.put(b), 0)
    machine.launch(kernel(_LOAD.format(body=body), target="sm_100a"), params)
    return machine.get(out, 2 * LANES, np.float32)


def values(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(2 * LANES) * 10.0 ** rng.integers(-4, 5, 2 * LANES)).astype(np.float32)


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("add.rn.f32x2 %rd16, %rd14, %rd15;", lambda a, b: a + b),
        ("add.f32x2 %rd16, %rd14, %rd15;", lambda a, b: a + b),
        ("sub.rn.f32x2 %rd16, %rd14, %rd15;", lambda a, b: a - b),
        ("mul.rn.f32x2 %rd16, %rd14, %rd15;", lambda a, b: a * b),
        ("mov.b64 %rd17, 0x3fc000003f800000;\nmul.rn.f32x2 %rd16, %rd14, %rd17;", None),
    ],
)
def test_both_halves_are_computed_alike(instruction: str, wanted: object) -> None:
    a, b = values(1), values(2)
    scaled = a * np.tile(np.array([1, 1.5], np.float32), LANES)  # 0x3f800000 is 1, 0x3fc00000 is 1.5
    expected = scaled if wanted is None else wanted(a, b)  # type: ignore[operator]
    np.testing.assert_array_equal(run(instruction, a, b).view(np.uint32), expected.view(np.uint32))


def test_fma_rounds_once() -> None:
    """Held against exact fractions: the float32 found is the nearest one (half an ulp off at most)."""
    a, b = values(3), values(4)
    found = run("fma.rn.f32x2 %rd16, %rd14, %rd15, %rd14;", a, b)
    twice = a * b + a
    for x, y, z in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        error = abs(Fraction(x) * Fraction(y) + Fraction(x) - Fraction(z))
        assert error <= Fraction(float(np.spacing(np.float32(abs(z))))) / 2
    assert (found != twice).any(), "the values are such that rounding twice would show"


def test_a_pair_of_constants_is_one_for_all_lanes() -> None:
    body = "mov.b64 %rd17, 0x400000003f800000;\nfma.rn.f32x2 %rd16, %rd17, %rd17, %rd17;"
    assert run(body, values(5), values(6)).tolist() == [2.0, 6.0] * LANES


@pytest.mark.parametrize("instruction", ["add.rz.f32x2", "mul.rn.ftz.f32x2", "add.rm.f32x2"])
def test_other_roundings_are_refused_by_name(instruction: str) -> None:
    with report(instruction.split(".")[0], "not modelled"):
        run(f"{instruction} %rd16, %rd14, %rd15;", values(7), values(8))


def test_older_targets_have_no_pairs() -> None:
    with report("add.rn.f32x2 needs sm_100, the target is sm_90a"):
        kernel(_LOAD.format(body="add.rn.f32x2 %rd16, %rd14, %rd15;"), target="sm_90a")
