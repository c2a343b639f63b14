"""SAME, FASTER, SLOWER, UNSURE (cases G15, G18)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smfree.results.compare import Limits, Verdict, age_days, compare_runs, compare_samples, samples_of
from smfree.results.report import comparison_text
from smfree.results.store import DeviceIdentity, Run

NOW = datetime(2026, 1, 11, tzinfo=UTC)


def noisy(middle: float, share: float, seed: int, count: int = 20) -> list[float]:
    return list(middle * (1 + share * np.abs(np.random.default_rng(seed).standard_normal(count))))


def point(samples: list[float], clock: str = "measured") -> dict[str, Any]:
    return {"extra_info": {"samples_s": samples, "clock_source": clock}, "stats": {"median": samples[0]}}


def run(points: dict[str, dict[str, Any]], name: str = "old", date: str = "2026-01-01T00:00:00+00:00") -> Run:
    identity = DeviceIdentity("hopper", "H100", "measured", "GPU-1", "13.0")
    return Run(Path(f"{name}.json"), date, "abc", identity, points)


def test_same_code_twice_is_the_same_at_every_scale() -> None:
    for middle in (3e-9, 400e-9, 5e-6, 1e-3):
        for seed in range(20):
            found = compare_samples("p", noisy(middle, 0.02, seed), noisy(middle, 0.02, seed + 100))
            assert found.verdict is Verdict.SAME, (middle, seed, found)


def test_a_large_share_of_a_few_nanoseconds_is_the_same() -> None:
    found = compare_samples("p", [10e-9] * 10, [25e-9] * 10)
    assert found.verdict is Verdict.SAME
    assert "floor of 20 ns" in found.reason


def test_a_real_loss_is_slower_even_with_noise() -> None:
    found = compare_samples("p", noisy(1e-5, 0.1, 1), noisy(2.3e-5, 0.1, 2))
    assert found.verdict is Verdict.SLOWER
    assert found.ratio == pytest.approx(2.3, rel=0.1)


def test_a_gain_asks_for_a_new_baseline() -> None:
    found = compare_samples("p", noisy(2e-5, 0.02, 1), noisy(1e-5, 0.02, 2))
    assert found.verdict is Verdict.FASTER
    assert "new baseline" in found.reason


def test_noise_across_the_limit_is_unsure_not_green() -> None:
    found = compare_samples("p", noisy(1e-5, 0.3, 1, 8), noisy(1.05e-5, 0.3, 2, 8))
    assert found.verdict is Verdict.UNSURE


def test_too_few_measured_samples_are_unsure() -> None:
    found = compare_samples("p", [1e-5] * 2, [2e-5] * 2)
    assert found.verdict is Verdict.UNSURE
    assert "2 samples, 5 needed" in found.reason


def test_one_modelled_sample_is_enough() -> None:
    assert compare_samples("p", [1e-5], [2e-5], exact=True).verdict is Verdict.SLOWER
    assert compare_samples("p", [1e-5], [1e-5], exact=True).verdict is Verdict.SAME
    assert compare_samples("p", [2e-5], [1e-5], exact=True).verdict is Verdict.FASTER


def test_limits_can_be_chosen() -> None:
    old, new = [1e-5] * 10, [1.08e-5] * 10
    assert compare_samples("p", old, new).verdict is Verdict.SLOWER
    assert compare_samples("p", old, new, Limits(relative=0.1)).verdict is Verdict.SAME
    assert compare_samples("p", old, new, Limits(floor_s=1e-6)).verdict is Verdict.SAME


def test_runs_of_different_clocks_are_refused() -> None:
    old, new = run({"p": point([1e-5])}), run({"p": point([1e-5], "modelled")}, "new")
    with pytest.raises(ValueError, match="modelled and measured times are never compared"):
        compare_runs(old, new)


def test_report_shows_origin_age_changes_and_machine() -> None:
    old = run({"a": point([1e-5] * 10), "b": point([1e-5] * 10), "gone": point([1e-5] * 10)})
    new = run({"a": point([2e-5] * 10), "b": point([1e-5] * 10), "fresh": point([1e-5] * 10)}, "new")
    assert new.identity is not None
    new = replace(new, identity=replace(new.identity, driver="13.1"))
    text = comparison_text(compare_runs(old, new), now=NOW)
    assert "baseline old.json, commit abc, 10.0 days old" in text
    assert "machines differ: driver: 13.0 -> 13.1" in text
    assert next(line.split()[:2] for line in text.splitlines() if "SLOWER" in line) == ["a", "SLOWER"]
    assert "2 points in both runs: 1 SAME, 0 FASTER, 1 SLOWER, 0 UNSURE" in text
    assert "only in the baseline: gone" in text
    assert "only in the new run: fresh" in text


def test_stale_baseline_and_gains_are_pointed_out() -> None:
    old = run({"a": point([3e-5] * 10)}, date="2025-01-01T00:00:00")
    text = comparison_text(compare_runs(old, run({"a": point([1e-5] * 10)}, "new")), now=NOW)
    assert "old: more than 90 days" in text
    assert "save a new baseline" in text


def test_a_file_without_a_date_has_no_age() -> None:
    assert age_days(run({}, date="")) is None


def test_samples_fall_back_to_the_median() -> None:
    assert samples_of({"extra_info": {}, "stats": {"median": 2e-6}}) == [2e-6]
    assert samples_of({"extra_info": {}, "stats": {"median": 2e-6, "data": [1e-6, 3e-6]}}) == [1e-6, 3e-6]


def test_points_of_one_name_that_did_other_work_are_not_compared() -> None:
    def whole(work: int) -> dict[str, Any]:
        made = point([1e-5] * 10)
        made["extra_info"]["key"] = {"pipeline": "ring", "work": work}
        return made

    other = compare_runs(run({"p": whole(12)}), run({"p": whole(14)}, "new"))
    assert other.points == ()
    assert other.only_old == other.only_new == ("p",)
    same = compare_runs(run({"p": whole(12)}), run({"p": whole(12)}, "new"))
    assert [found.verdict for found in same.points] == [Verdict.SAME]


def test_the_floor_of_a_control_operation_is_that_of_all_turns_of_a_reading() -> None:
    """An arrive of 3.5 ns that takes 10 was read as 16 of them: 104 ns more, no jitter of one reading."""

    def operation(seconds: float) -> dict[str, Any]:
        made = point([seconds], "modelled")
        made["extra_info"]["config"] = {"turns": 16}
        return made

    for new, verdict in ((10e-9, Verdict.SLOWER), (4.5e-9, Verdict.SAME), (2e-9, Verdict.FASTER)):
        found = compare_runs(run({"arrive": operation(3.5e-9)}), run({"arrive": operation(new)}, "new"))
        assert [one.verdict for one in found.points] == [verdict]
    tile = compare_runs(
        run({"t": point([3.5e-9], "modelled")}), run({"t": point([10e-9], "modelled")}, "new")
    )
    assert [one.verdict for one in tile.points] == [Verdict.SAME]
