"""The rows that stand for a full product."""

from __future__ import annotations

from itertools import combinations

from tests.kernels.pairwise import full_rows, pair_rows

AXES = {"device": "ahb", "schedule": range(8), "stages": range(1, 9), "size": "0123456"}


def test_every_two_values_of_two_axes_meet_in_a_row() -> None:
    product, found = full_rows(AXES), pair_rows(AXES)
    assert all(row in product for row in found)
    for one, other in combinations(AXES, 2):
        met = {(row[one], row[other]) for row in found}
        assert met == {(row[one], row[other]) for row in product}
    assert len(found) < len(product) / 15


def test_the_rows_are_the_same_each_time() -> None:
    assert pair_rows(AXES) == pair_rows(AXES)
