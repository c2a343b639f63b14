"""The table of crossovers, from curves whose relation is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smfree.measure.answers import answers
from smfree.measure.log import RunLog
from smfree.measure.records import Record
from tests.measure.test_records import record

WIDEST = 160
SIZES = (128, 1024, 65536)
LSU = (1e-6, 1e-6, 1e-6)


def curve(engine: str, seconds: Sequence[float], amount: int | None = 16384) -> list[Record]:
    return [
        record(
            device="emu:h100",
            clock_source="modelled",
            key={"engine": engine, "tile_bytes": size, "memory": "DRAM", "bytes_in_flight": amount},
            samples_s=[time],
        )
        for size, time in zip(SIZES, seconds, strict=True)
    ]


def row(text: str, engine: str) -> str:
    (line,) = (" ".join(line.split()) for line in text.splitlines() if f" {engine} " in line)
    return line.partition(f" {engine} ")[2]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1e-6, 1e-6, 5e-7), "from 1.13 KiB (a tie below) not seen here no crossing: tie (2%) ends there"),
        (
            (5e-7, 1e-6, 1e-6),
            "only below 965 B (a tie above) not seen here no crossing: tie (2%) begins there",
        ),
        ((5e-7, 1e-6, 5e-7), "never slower (128 B to 64 KiB) not seen here"),
        ((2e-6, 2e-6, 2e-6), "never faster (128 B to 64 KiB) not seen here"),
        ((2e-6, 5e-7, 5e-7), "from 362 B earlier here parameters not varied"),
        ((5e-7, 5e-7, 2e-6), "only below 8 KiB other way round parameters not varied"),
    ],
)
def test_a_row_says_where_the_challenger_leads(seconds: Sequence[float], said: str) -> None:
    text = answers(RunLog(records=[*curve("lsu", LSU), *curve("tma.tensor", seconds)]))
    assert row(text, "tma.tensor") == said
    assert max(map(len, text.splitlines())) <= WIDEST


def test_work_is_matched_but_for_engines_at_their_best() -> None:
    text = answers(RunLog(records=[*curve("lsu", LSU, None), *curve("tma.bulk", LSU, None)]))
    assert "throughput, DRAM, each at its best" in text
    assert "on both sides of a row, but for 'each at its best'" in text
    assert row(text, "tma.bulk") == "tie (128 B to 64 KiB) not seen here"
