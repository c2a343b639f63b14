"""Lines whose start-up and rate are known."""

from __future__ import annotations

import math

import pytest

from smfree.model.crossover import Curve
from smfree.model.hockney import hockney

SIZES = [1024 << i for i in range(0, 20, 2)]
ALPHA, BETA = 0.8e-6, 450e9
"""NVLink 4 as often quoted: 0.8 us, 450 GB/s one way, so S* is 360 KB."""


def test_a_line_gives_its_two_numbers_and_the_size_between_them() -> None:
    fit = hockney(Curve("push", {size: [ALPHA + size / BETA] for size in SIZES}))
    assert fit.alpha == pytest.approx(ALPHA)
    assert fit.beta == pytest.approx(BETA)
    assert fit.critical_bytes == pytest.approx(360e3)
    assert fit.time(fit.critical_bytes) == pytest.approx(2 * ALPHA)
    assert fit.worst < 1e-9
    assert fit.range_bytes == (SIZES[0], SIZES[-1])


def test_residuals_are_relative_and_every_size_counts_alike() -> None:
    """Absolute least squares would leave the small sizes to chance: their times vanish beside the largest."""
    noisy = {size: [(ALPHA + size / BETA) * (1.02 if i % 2 else 0.98)] for i, size in enumerate(SIZES)}
    fit = hockney(Curve("push", noisy))
    assert fit.alpha == pytest.approx(ALPHA, rel=0.05)
    assert fit.beta == pytest.approx(BETA, rel=0.05)
    assert set(fit.residuals) == set(SIZES)
    for size, residual in fit.residuals.items():
        assert fit.time(size) == pytest.approx((1 + residual) * noisy[size][0])
    assert 0.01 < fit.worst < 0.04


def test_a_bad_line_shows_itself() -> None:
    steps = Curve("lsu", {size: [100.0 * (1 + size // 65536)] for size in SIZES})
    assert hockney(steps).worst > 0.1


def test_the_range_can_be_chosen_and_is_told() -> None:
    """Two regimes: half the rate from 1 MiB on."""
    times = {size: [ALPHA + size / (BETA if size < 1 << 20 else BETA / 2)] for size in SIZES}
    small = hockney(Curve("push", times), high=(1 << 20) - 1)
    assert small.beta == pytest.approx(BETA)
    assert small.range_bytes == (1024, 256 * 1024)
    large = hockney(Curve("push", times), low=1 << 20)
    assert large.beta == pytest.approx(BETA / 2)
    assert large.range_bytes == (1 << 20, SIZES[-1])
    assert hockney(Curve("push", times)).worst > large.worst


def test_medians_are_fitted_not_means() -> None:
    times = {size: [ALPHA + size / BETA] * 2 + [1.0] for size in SIZES}
    assert hockney(Curve("push", times)).alpha == pytest.approx(ALPHA)


def test_what_does_not_grow_with_its_size_has_no_rate() -> None:
    fit = hockney(Curve("ce", {1024: [8.0], 2048: [7.9], 4096: [8.0], 8192: [7.8]}))
    assert fit.beta == math.inf
    assert fit.alpha == pytest.approx(7.925, rel=0.01)
    assert fit.critical_bytes == math.inf


def test_a_line_without_a_start_up_is_bound_by_its_rate_alone() -> None:
    assert hockney(Curve("copy", {1: [0.9], 2: [2.0], 4: [4.2]})).critical_bytes == 0.0


@pytest.mark.parametrize(("low", "count"), [(0, 1), (5000, 0)])
def test_one_size_makes_no_line(low: float, count: int) -> None:
    with pytest.raises(ValueError, match=rf"a line for push needs two sizes \(got {count}\)"):
        hockney(Curve("push", {4096: [1.0]}), low=low)
