"""The shift of a crossover when a parameter of the model changes, on a model made of two lines."""

from __future__ import annotations

import pytest

from smfree.model.crossover import Curve, Outcome, crossover
from smfree.model.sensitivity import Shift, as_record, largest_first, shifts

SIZES = [128 << i for i in range(10)]
PARAMETERS = {
    "lsu.start": 100.0,
    "lsu.rate": 8.0,
    "tma.start": 300.0,
    "tma.rate": 64.0,
    "host.launch_us": 3.0,
}


def times(parameter: str | None, factor: float, size: int) -> tuple[float, float]:
    value = dict(PARAMETERS)
    if parameter is not None:
        value[parameter] *= factor
    return (
        value["lsu.start"] + size / value["lsu.rate"],
        value["tma.start"] + size / value["tma.rate"],
    )


def found_over(sizes: list[int]):
    runs = {size: times(None, 1.0, size) for size in sizes}
    return crossover(
        Curve("lsu", {size: [a] for size, (a, _) in runs.items()}),
        Curve("tma", {size: [b] for size, (_, b) in runs.items()}),
    )


def test_each_parameter_that_matters_is_named_with_its_shift() -> None:
    nominal, moved = shifts(found_over(SIZES), list(PARAMETERS), SIZES, times)
    assert nominal == pytest.approx(1828.6, rel=0.03)
    by_name = {shift.parameter: shift for shift in moved}
    assert "host.launch_us" not in by_name
    start = by_name["tma.start"]
    assert start.down_bytes is not None and start.up_bytes is not None
    # 240 or 360 instead of 300: S = 140 / 0.109375 = 1280 and 260 / 0.109375 = 2377
    assert start.down_bytes == pytest.approx(1280, rel=0.05)
    assert start.up_bytes == pytest.approx(2377, rel=0.05)
    assert largest_first(nominal, moved)[0].parameter in ("tma.start", "lsu.rate")


def test_the_search_leaves_the_bracket_only_as_far_as_needed() -> None:
    asked: set[int] = set()

    def counted(parameter: str | None, factor: float, size: int) -> tuple[float, float]:
        asked.add(size)
        return times(parameter, factor, size)

    shifts(found_over(SIZES), ["tma.start"], SIZES, counted)
    assert asked == {1024, 2048, 4096}


def test_a_crossover_that_leaves_the_range_is_none() -> None:
    def cliff(parameter: str | None, factor: float, size: int) -> tuple[float, float]:
        a, b = times(None, 1.0, size)
        return a, b * (3.0 if factor > 1 else 1.0)

    sizes = [1024, 2048]
    nominal, moved = shifts(found_over(sizes), ["tma.start"], sizes, cliff)
    assert nominal is not None
    assert moved[0].up_bytes is None
    assert as_record(nominal, moved)["shifts"]["tma.start"][1] is None


def test_without_a_crossover_there_is_nothing_to_vary() -> None:
    never = crossover(Curve("lsu", {1: [1.0], 2: [1.0]}), Curve("tma", {1: [2.0], 2: [2.0]}))
    assert never.outcome is Outcome.NEVER_FASTER
    with pytest.raises(ValueError, match="never faster"):
        shifts(never, ["p"], [1, 2], times)


def test_a_shift_below_one_percent_does_not_count() -> None:
    assert not Shift("p", 1001.0, 999.0).moves(1000.0)
    assert Shift("p", 1100.0, 999.0).moves(1000.0)
    assert Shift("p", None, 1000.0).moves(1000.0)


def test_a_lead_that_ends_is_varied_too() -> None:
    def swapped(parameter: str | None, factor: float, size: int) -> tuple[float, float]:
        a, b = times(parameter, factor, size)
        return b, a

    below = crossover(
        Curve("tma", {size: [times(None, 1.0, size)[1]] for size in SIZES}),
        Curve("lsu", {size: [times(None, 1.0, size)[0]] for size in SIZES}),
    )
    assert below.outcome is Outcome.OVERTAKEN
    nominal, moved = shifts(below, ["tma.start"], SIZES, swapped)
    assert nominal == pytest.approx(1828.6, rel=0.03)
    assert moved[0].down_bytes == pytest.approx(1280, rel=0.05)
    assert moved[0].up_bytes == pytest.approx(2377, rel=0.05)
