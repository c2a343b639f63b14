"""The pictures of docs/img show what the kernels do now, up to what a compiler's version moves."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.draw_timelines import FOLDER, PICTURES, drawn, main
from smfree.timeline.lanes import Kind

SVG = "{http://www.w3.org/2000/svg}"
EXACT = (Kind.LOAD, Kind.STORE, Kind.EVEN, Kind.ODD)
"""What neither the compiler nor the clock's parameters change."""


def structure(text: str) -> tuple[list[str], list[Counter[str]]]:
    """Names of panels and lanes, in order, and the bars of each panel by kind."""
    root = ET.fromstring(text)
    names: list[str] = []
    counts: list[Counter[str]] = []
    for element in root:
        if element.tag == f"{SVG}text" and element.get("x") == "14":
            names.append(element.text or "")
            if element.get("class") == "name":
                counts.append(Counter())
        if element.tag == f"{SVG}rect" and element.find(f"{SVG}title") is not None:
            kind = element.get("class")
            if kind in [exact.value for exact in EXACT]:
                counts[-1][str(kind)] += 1
    return names, counts


def cycles(text: str) -> list[int]:
    """What each panel says it took."""
    return [int(found) for found in re.findall(r">(\d+) cycles, ", text)]


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return {name: drawn(picture) for name, picture in PICTURES.items()}


@pytest.mark.parametrize("name", PICTURES)
def test_the_committed_picture_is_what_the_kernels_do(name: str, fresh: dict[str, str]) -> None:
    kept = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert structure(kept) == structure(fresh[name]), "run `make docs`"
    assert cycles(kept) == pytest.approx(cycles(fresh[name]), rel=0.1), "run `make docs`"


def test_every_picture_has_its_file_and_every_file_its_picture() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_more_stages_take_less_time_in_every_picture(name: str, fresh: dict[str, str]) -> None:
    took = cycles(fresh[name])
    assert len(took) == len(PICTURES[name].runs) >= 2
    assert all(later < 0.9 * earlier for earlier, later in pairwise(took))


def test_the_script_draws_one_picture_and_keeps_its_trace(tmp_path: Path) -> None:
    assert main(["--only", "tma_bulk", "--out", str(tmp_path), "--traces", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tma_bulk.svg", "tma_bulk.json"}
