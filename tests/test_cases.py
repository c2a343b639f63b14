"""docs/cases.md and the tests name the same cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cases.md").read_text()
ROWS = re.findall(r"^\| ([A-G]\d\d) \|.*\| (.*) \|$", PAGE, re.MULTILINE)
NOT_TESTED = ("needs race detection", "not here yet")


def files_of(place: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py)`", place)


def test_every_id_stands_once() -> None:
    ids = [case for case, _ in ROWS]
    assert ids == sorted(set(ids)) and len(ids) > 40


@pytest.mark.parametrize(("case", "place"), ROWS, ids=[case for case, _ in ROWS])
def test_the_tests_of_a_row_bear_its_id(case: str, place: str) -> None:
    files = files_of(place)
    if not files and place.startswith("the same"):
        return  # as the row before
    assert files or place.startswith(NOT_TESTED), place
    for name in files:
        text = (ROOT / name).read_text()
        assert re.search(rf"\b{case}\b|_{case.lower()}_", text), f"{name} does not name {case}"


def test_every_id_in_a_tests_name_is_on_the_page() -> None:
    """Of the kinds that the page has."""
    named = {
        found.upper()
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"^def test_([a-g]\d\d)_", path.read_text(), re.MULTILINE)
    }
    kinds = re.findall(r"^## ([A-G]):", PAGE, re.MULTILINE)
    missing = {case for case in named if case[0] in kinds} - set(re.findall(r"\b[A-G]\d\d\b", PAGE))
    assert not missing
