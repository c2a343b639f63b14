"""Elements and their bits: held against the formats' definitions, on the host and in the kernels."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.reduce.elements import Element
from kernels.reduce.order import ORDERS, expected
from tests.kernels.reduce_kit import Bits, Operands, canonical, need, reduce_group, small_config

HALVES = (Element.F16, Element.BF16)
FRACTION_BITS = {Element.F32: 23, Element.F16: 10, Element.BF16: 7}


def exponent_bits(element: Element) -> int:
    return 8 * element.bytes - 1 - FRACTION_BITS[element]


def values_of(bits: Bits, element: Element) -> NDArray[np.float64]:
    """By the definition: sign, exponent, fraction. The largest exponent goes on as a number: where infinity
    stands is what would come after the largest element."""
    fraction_bits, bias = FRACTION_BITS[element], (1 << exponent_bits(element) - 1) - 1
    wide = bits.astype(np.int64)
    fraction = wide & (1 << fraction_bits) - 1
    exponent = wide >> fraction_bits & (1 << exponent_bits(element)) - 1
    significand = np.where(exponent > 0, fraction + (1 << fraction_bits), fraction).astype(np.float64)
    size = np.ldexp(significand, (np.maximum(exponent, 1) - bias - fraction_bits).astype(np.int32))
    return np.where(wide >> 8 * element.bytes - 1, -size, size)


def infinity(element: Element) -> int:
    return (1 << exponent_bits(element)) - 1 << FRACTION_BITS[element]


@pytest.mark.parametrize("element", HALVES)
def test_every_half_is_widened_exactly(element: Element) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    size = bits & 0x7FFF
    finite, nan = size < infinity(element), size > infinity(element)
    found = element.widen(bits)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[finite].astype(np.float64), values_of(bits[finite], element))
    np.testing.assert_array_equal(np.signbit(found[finite]), bits[finite] >> 15 == 1)
    assert np.isnan(found[nan]).all() and not np.isnan(found[~nan]).any()
    assert np.isinf(found[size == infinity(element)]).all()


@pytest.mark.parametrize("element", HALVES)
def test_every_half_comes_back(element: Element) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits[(bits & 0x7FFF) <= infinity(element)]
    np.testing.assert_array_equal(element.narrow(element.widen(numbers)), numbers)


@pytest.mark.parametrize("sign", [0, 1], ids=["positive", "negative"])
@pytest.mark.parametrize("element", HALVES)
def test_what_lies_between_two_halves_goes_to_the_nearest_a_tie_to_the_even(
    element: Element, sign: int
) -> None:
    """Between every two neighbours: from zero over subnormals to the largest and infinity."""
    below = np.arange(infinity(element), dtype=np.uint16) | np.uint16(sign << 15)
    above = below + np.uint16(1)
    middle = (values_of(below, element) + values_of(above, element)) / 2
    tie = middle.astype(np.float32)
    np.testing.assert_array_equal(tie.astype(np.float64), middle)  # float32 has it
    toward = np.float32(np.inf * (-1 if sign else 1))
    np.testing.assert_array_equal(element.narrow(np.nextafter(tie, np.float32(0))), below)
    np.testing.assert_array_equal(element.narrow(tie), np.where(below & 1, above, below))
    np.testing.assert_array_equal(element.narrow(np.nextafter(tie, toward)), above)


@pytest.mark.parametrize("element", Element)
def test_a_nan_stays_one_whatever_its_payload(element: Element) -> None:
    """Also one whose payload is in the bits that a half lacks: cut off, it would be an infinity."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    found = element.narrow(bits.view(np.float32))
    assert np.isnan(element.widen(found)).all()


def test_float32_keeps_its_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1000, dtype=np.uint32)
    np.testing.assert_array_equal(Element.F32.narrow(Element.F32.widen(bits)), bits)


@pytest.mark.parametrize("element", Element)
def test_the_unit_roundoff_is_the_largest_error_of_a_rounding(element: Element) -> None:
    """It is reached between 1 and the next element."""
    one = int(element.narrow(np.ones(1, np.float32))[0])
    first, following = values_of(np.array([one, one + 1], element.bits), element)
    assert element.unit_roundoff == (following - first) / 2


def cases(element: Element) -> tuple[Bits, Bits, Bits]:
    """Two terms, and the bits of their sum: what an addition can meet, by the definition of the format and of
    rounding to nearest, ties to even."""
    top, inf = infinity(element) - 1, infinity(element)
    bias, fraction_bits = (1 << exponent_bits(element) - 1) - 1, FRACTION_BITS[element]
    minus = 1 << 8 * element.bytes - 1

    def power(exponent: int) -> int:
        return exponent + bias << fraction_bits

    one, half_step, normal = power(0), power(-fraction_bits - 1), 1 << fraction_bits
    top_half_step = power(bias - fraction_bits - 1)
    table = [
        (one, half_step, one),  # a tie: down to the even
        (one + 1, half_step, one + 2),  # up to the even
        (one, half_step + 1, one + 1),  # above a tie
        (one + 2, half_step - 1, one + 2),  # below one
        (one + 1, half_step | minus, one),
        (one, one, power(1)),
        (one, one | minus, 0),  # +0
        (0, minus, 0),
        (minus, minus, minus),  # -0 + -0 = -0
        (1, 1, 2),  # subnormals are not flushed
        (1, 1 | minus, 0),
        (normal - 1, 1, normal),  # a sum that is normal again
        (normal, 1 | minus, normal - 1),
        (3, 4 | minus, 1 | minus),
        (top, top_half_step, inf),  # a tie between the largest and infinity
        (top, top_half_step - 1, top),
        (top, top, inf),
        (top | minus, top | minus, inf | minus),
        (top, top | minus, 0),
        (inf, one, inf),
        (inf, top | minus, inf),
        (inf | minus, inf | minus, inf | minus),
        (inf, inf | minus, inf + 1),  # a NaN, any
        (inf + 1, one, inf + 1),
        (one, minus | inf + 1, inf + 1),
    ]
    first, second, total = np.array(table, np.int64).T.astype(element.bits)
    return first, second, total


@pytest.mark.parametrize("element", Element)
def test_the_oracle_adds_as_the_formats_say(element: Element) -> None:
    first, second, total = cases(element)
    for way in ORDERS:
        found = canonical(expected(way, [first, second], element), element)
        np.testing.assert_array_equal(found, canonical(total, element), err_msg=way)


SUMS = ("ring.sm", "ring.tma", "oneshot")
"""Ways that differ in where a sum is made: all add by the same lines of reduce.cuh."""


@pytest.mark.parametrize("src_shift", [0, 1], ids=["vectors", "single-elements"])
@pytest.mark.parametrize("element", Element)
def test_the_kernels_do_too(element: Element, src_shift: int, node: str) -> None:
    """By threads and the TMA, one after the other. A NaN is a NaN, whichever. Three times each case: some in
    vectors, some at the ends."""
    first, second, total = (np.tile(bits, 3) for bits in cases(element))
    with reduce_group(2, node=node) as (group, workspace):
        each = {way: Operands(workspace, [first, second], element, src_shift=src_shift) for way in SUMS}
        for way, operands in each.items():
            need(way, group, element, node)
            operands.reduce(way, small_config(workspace, way, element, ctas=1))
        group.wait(60)
        for way, operands in each.items():
            for rank in range(2):
                found = canonical(operands.found(rank), element)
                np.testing.assert_array_equal(found, canonical(total, element), err_msg=f"{way}, rank {rank}")


def test_a_ring_rounds_at_every_hop_and_direct_ways_once() -> None:
    """2048 + 1 is a tie in float16: around the ring it loses each 1 apart, unless they meet first."""
    data = [np.full(3, value, np.float16).view(np.uint16) for value in (2048, 1, 1)]
    assert Element.F16.widen(expected("oneshot", data, Element.F16)).tolist() == [2050, 2050, 2050]
    assert Element.F16.widen(expected("ring.sm", data, Element.F16)).tolist() == [2050, 2048, 2048]
