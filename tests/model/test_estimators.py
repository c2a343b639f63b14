"""Robust estimators on series whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.model.estimators import bootstrap_interval, drift, median, slope, spread


def test_median_and_spread_ignore_one_wild_sample() -> None:
    assert median([10.0, 11.0, 12.0, 1000.0, 11.0]) == 11.0
    assert spread([10.0, 11.0, 12.0, 1000.0, 11.0]) == pytest.approx(1.4826)


def test_spread_of_one_sample_is_zero() -> None:
    assert spread([3.0]) == 0.0


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="median of no samples"):
        median([])
    with pytest.raises(ValueError, match="interval of no samples"):
        bootstrap_interval([])


def test_interval_of_one_sample_is_a_point() -> None:
    interval = bootstrap_interval([7.0])
    assert (interval.low, interval.high) == (7.0, 7.0)


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(100):
        found = bootstrap_interval(list(rng.normal(100.0, 5.0, 25)), count=400, seed=trial)
        hits += found.low <= 100.0 <= found.high
    assert 85 <= hits <= 100


def test_theil_sen_slope_survives_an_outlier() -> None:
    x = [0, 1, 2, 3, 4, 5, 6]
    y = [0.0, 2.0, 4.0, 600.0, 8.0, 10.0, 12.0]
    assert slope(x, y) == pytest.approx(2.0)


def test_slope_needs_two_places() -> None:
    with pytest.raises(ValueError, match="two distinct x"):
        slope([1, 1], [2.0, 3.0])


def test_throttling_series_drifts() -> None:
    rng = np.random.default_rng(0)
    falling = 1e-4 * np.linspace(1.0, 1.15, 20) * (1 + rng.normal(0, 0.003, 20))
    found = drift(list(falling))
    assert found.significant
    assert found.relative == pytest.approx(0.15, abs=0.03)


def test_noise_and_short_series_do_not_drift() -> None:
    rng = np.random.default_rng(1)
    assert not drift(list(1e-4 * (1 + rng.normal(0, 0.01, 20)))).significant
    assert not drift([1.0, 2.0, 3.0]).significant
    assert not drift([1.0]).significant
