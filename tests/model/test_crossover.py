"""Crossovers of curves whose crossing is known."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.model.crossover import (
    Curve,
    Outcome,
    crossover,
    format_bytes,
    sample_uncertainty,
)

SIZES = [128 << i for i in range(10)]


def line(name: str, start: float, rate: float) -> Curve:
    return Curve(name, {size: [start + size / rate] for size in SIZES})


def test_two_lines_cross_where_algebra_says() -> None:
    # 100 + S/8 = 300 + S/64: S = 200 / (1/8 - 1/64) = 1828.6
    found = crossover(line("lsu", 100, 8), line("tma", 300, 64))
    assert found.outcome is Outcome.CROSSES
    assert found.bracket == (1024, 2048)
    assert found.size_bytes == pytest.approx(1828.6, rel=0.03)
    assert found.text() == "from 1.77 KiB"


def test_power_laws_cross_exactly() -> None:
    a = Curve("a", {size: [size**0.9] for size in SIZES})
    b = Curve("b", {size: [2.0 * size**0.8] for size in SIZES})
    assert crossover(a, b).size_bytes == pytest.approx(2.0**10)


def test_no_crossing_is_an_answer_in_words() -> None:
    never = crossover(line("lsu", 100, 8), line("tma", 300, 8))
    assert never.outcome is Outcome.NEVER_FASTER
    assert never.text() == "never faster (128 B to 64 KiB)"
    always = crossover(line("lsu", 100, 8), line("tma", 50, 16))
    assert always.outcome is Outcome.ALWAYS_FASTER
    assert always.size_bytes is None
    assert always.text() == "never slower (128 B to 64 KiB)"
    assert crossover(line("lsu", 100, 8), line("tma", 100, 8)).text() == "tie (128 B to 64 KiB)"


def test_only_the_last_lead_counts_but_all_crossings_are_kept() -> None:
    base = Curve("lsu", {1: [1.0], 2: [1.0], 4: [1.0], 8: [1.0]})
    found = crossover(base, Curve("x", {1: [2.0], 2: [0.5], 4: [2.0], 8: [0.5]}))
    assert found.bracket == (4, 8)
    assert len(found.crossings) == 3
    assert "last of 3" in found.text()


def test_faster_only_for_small_tiles_says_below_which_size() -> None:
    # 300 + S/64 = 100 + S/8 the other way round
    found = crossover(line("lsu", 300, 64), line("tma", 100, 8))
    assert found.outcome is Outcome.OVERTAKEN
    assert found.size_bytes == pytest.approx(1828.6, rel=0.03)
    assert found.text() == "only below 1.77 KiB"


def test_a_tie_between_two_leads_does_not_hide_the_crossing() -> None:
    base = Curve("lsu", {1: [1.0], 2: [1.0], 4: [1.0]})
    found = crossover(base, Curve("x", {1: [2.0], 2: [1.01], 4: [0.5]}))
    assert found.outcome is Outcome.CROSSES
    assert found.size_bytes is not None
    assert 1 < found.size_bytes < 4


def test_only_sizes_that_both_have_are_compared() -> None:
    with pytest.raises(ValueError, match=r"two sizes that both measured \(got 1\)"):
        crossover(Curve("a", {1: [1.0], 2: [1.0]}), Curve("b", {2: [1.0], 4: [1.0]}))


def test_noise_widens_the_interval_and_loses_some_crossovers() -> None:
    rng = np.random.default_rng(3)

    def noisy(curve: Curve, share: float) -> Curve:
        return Curve(
            curve.name,
            {s: list(t[0] * (1 + share * rng.standard_normal(15))) for s, t in curve.samples.items()},
        )

    a, b = line("lsu", 100, 8), line("tma", 300, 64)
    calm = sample_uncertainty(noisy(a, 0.002), noisy(b, 0.002), count=200)
    wild = sample_uncertainty(noisy(a, 0.1), noisy(b, 0.1), count=200)
    assert calm.interval is not None and wild.interval is not None
    assert calm.found == 1.0
    assert calm.interval.low < 1900 < calm.interval.high * 1.1
    assert wild.interval.high - wild.interval.low > calm.interval.high - calm.interval.low


def test_no_crossover_in_any_resample_has_no_interval() -> None:
    found = sample_uncertainty(line("lsu", 100, 8), line("tma", 300, 8), count=20)
    assert found.interval is None
    assert found.found == 0.0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (128, "128 B"),
        (1000.4, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (65536, "64 KiB"),
        (1 << 20, "1 MiB"),
    ],
)
def test_bytes_are_written_in_powers_of_two(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_a_tie_that_becomes_a_lead_is_said_with_its_place() -> None:
    base = Curve("lsu", {1: [1.0], 2: [1.0], 4: [1.0], 8: [1.0]})
    found = crossover(base, Curve("x", {1: [1.0], 2: [0.99], 4: [0.8], 8: [0.6]}))
    assert (found.outcome, found.bracket, found.tie) == (Outcome.CROSSES, (2, 4), True)
    assert found.text() == "from 2.06 B (a tie below)"


def test_a_lead_that_becomes_a_tie_is_said_with_its_place() -> None:
    base = Curve("lsu", {1: [1.0], 2: [1.0], 4: [1.0]})
    found = crossover(base, Curve("x", {1: [0.5], 2: [1.0], 4: [1.0]}))
    assert (found.outcome, found.bracket, found.tie) == (Outcome.OVERTAKEN, (1, 2), True)
    assert found.text().startswith("only below 1.9") and found.text().endswith("(a tie above)")
