"""Marks beside the numbers of a table, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smfree.measure.records import Flag, Record

MARKS: Mapping[Flag, str] = {
    Flag.LAUNCH_BOUND: "l",
    Flag.ABOVE_PEAK: "!",
    Flag.FITS_IN_L2: "!",
    Flag.DRIFT: "~",
    Flag.THROTTLED: "~",
    Flag.NO_BLOCKER: "h",
    Flag.FEW_SAMPLES: "?",
}
LEGEND: Mapping[str, str] = {
    "l": "launch-bound: shorter than two empty launches",
    "!": "above the peak of the named memory, or its working set fits in L2: part of it came from L2",
    "~": "the samples drifted or the clock was reduced",
    "h": "no blocker: host launch gaps may lie inside",
    "?": "fewer than five samples",
}


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they come."""
    return list(dict.fromkeys(values))


def marked(record: Record, text: str) -> str:
    """The number of a record with its marks."""
    marks = "".join(unique(MARKS[flag] for flag in record.flags if flag in MARKS))
    return f"{text} {marks}" if marks else text


def legend(records: Sequence[Record]) -> str:
    """A line for each mark that these records have, each after a newline."""
    used = unique(MARKS[flag] for record in records for flag in record.flags if flag in MARKS)
    return "".join(f"\n{mark} {LEGEND[mark]}" for mark in used)
