"""The rows that stand for a full product."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.kernels import pairwise
from tests.kernels.pairwise import full_rows, pair_rows, rows

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


class Asked:
    """The options of a session, as pytest's config gives them."""

    def __init__(self, *device: str) -> None:
        self.options: dict[str, Any] = {"device": list(device), "--full-product": False}

    def getoption(self, name: str) -> Any:
        return self.options[name]


@pytest.mark.parametrize(
    ("emulated", "gpus"), [(("emu:h100", "emu:b200"), {"cuda:1"}), (("emu:a100",), {"cuda:0", "cuda:1"})]
)
def test_named_gpus_run_the_rows_that_they_can(
    emulated: tuple[str, ...], gpus: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda:0 has no TMA, which all devices of the first case have."""
    monkeypatch.setattr(pairwise, "has_tma", lambda spec: spec not in ("cuda:0", "emu:a100"))
    axes = {"spec": emulated, "schedule": [("timed", 0), ("min-pc", 0)], "size": range(5)}
    config: Any = Asked("cuda:0", "cuda:1")
    assert {row["spec"] for row in rows(axes, config)} == gpus
    assert {row["schedule"] for row in rows(axes, config)} == {("timed", 0)}
    assert {row["size"] for row in rows(axes, config)} == set(range(5))
    other: Any = Asked("emu:h100")
    assert {row["spec"] for row in rows(axes, other)} == set(emulated)
