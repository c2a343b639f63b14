"""Tables of AllGathers: who is fastest at which size, why, and how many SMs it takes.

Rates as in NCCL's tests: N ranks with shards of S bytes end with N S bytes each. Algorithm bandwidth is
N S / t; bus bandwidth is (N - 1) / N of it, what crosses each rank's port in either direction, to be compared
with the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from smfree.measure.answers import shift_table
from smfree.measure.log import RunLog
from smfree.measure.marks import legend
from smfree.measure.movement import movement
from smfree.measure.records import Question, Record
from smfree.measure.sizes import (
    Comparison,
    by_way,
    changes_of_lead,
    compare,
    crossing_row,
    how,
    leads,
    saturation,
    sentence,
    time_table,
)
from smfree.model.crossover import TIE, Curve, format_bytes
from smfree.model.hockney import hockney

BASE = "ce.batch"
"""What the other ways are compared with: no SM works."""

SIZE = "shard_bytes"


def gathers(records: Iterable[Record]) -> list[Record]:
    """Those of this question."""
    return [record for record in records if record.question is Question.ALLGATHER]


def allgather_tables(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Times, start-up and rate, the SMs that saturate, and what each way moves."""
    mine = gathers(records)
    own_choice = [record for record in mine if record.key["ctas"] is None]
    parts = {
        "AllGather by size": times(own_choice),
        "AllGather, start-up and rate": lines(own_choice),
        "AllGather, how many SMs": saturation([r for r in mine if r.key["ctas"] is not None], SIZE),
        "AllGather, what moves": movement([r for r in own_choice if r.config.get("counted")]),
    }
    return [(f"{title}: {head}", text) for title, text in parts.items() if text]


# --- times --------------------------------------------------------------------------------------------------


def times(records: Sequence[Record]) -> str:
    """Sizes down, ways across: microseconds and bus bandwidth, the fastest starred. Empty without records."""
    if not records:
        return ""
    first = records[0]
    text = time_table(records, SIZE) + (
        f"\nus ({first.clock_source}) of a whole AllGather, and its bus bandwidth in GB/s: (N - 1) shards / "
        f"time; * fastest, ties within {TIE:.0%}.\nAlgorithm bandwidth is N / (N - 1) of it. In place; "
        f"maximum over ranks, which start together; L2 {first.cache.value}"
    )
    return text + "".join(f"\n{line}" for line in how(records)) + legend(records)


# --- start-up and rate --------------------------------------------------------------------------------------


def curves(records: Sequence[Record]) -> dict[tuple[int, str], Curve]:
    """(ranks, way) -> time against the bytes that a rank gets from its peers."""
    found: dict[tuple[int, str], dict[int, Sequence[float]]] = {}
    for record in records:
        place = record.key["ranks"], record.key["way"]
        found.setdefault(place, {})[record.traffic.written_bytes] = record.samples_s
    return {place: Curve(place[1], samples) for place, samples in sorted(found.items(), key=_ranks)}


def _ranks(item: tuple[tuple[int, str], object]) -> int:
    return item[0][0]


def lines(records: Sequence[Record]) -> str:
    """T = alpha + S / beta of every way with three sizes. Empty where there is none."""
    rows = []
    for (ranks, way), curve in curves(records).items():
        if len(curve.samples) < 3:
            continue
        fit = hockney(curve)
        low, high = (format_bytes(size) for size in fit.range_bytes)
        smallest = min(curve.medians().values())
        rows.append(
            [
                str(ranks),
                way,
                f"{smallest * 1e6:.1f}",
                f"{fit.alpha * 1e6:.1f}",
                f"{fit.beta / 1e9:.0f}",
                format_bytes(fit.critical_bytes),
                f"{fit.worst:.0%}",
                f"{low} to {high}",
            ]
        )
    if not rows:
        return ""
    clock = records[0].clock_source
    headers = [
        "ranks", "way", f"smallest took\nus ({clock})", "alpha\nus", "beta\nGB/s",
        "S* = alpha beta:\nlatency below", "worst\nresidual", "fitted from bytes\nthat a rank gets",
    ]  # fmt: skip
    aligned = ("right", "left", *["right"] * 5, "left")
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned)
    return (
        text + "\nT = alpha + S / beta, S bytes that a rank gets from its peers; grids grow with the shards"
    )


# --- who should gather --------------------------------------------------------------------------------------


def by_machine(records: Iterable[Record]) -> list[list[Record]]:
    """Gathers with the ways' own grids: those of one device, clock and number of ranks together."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in gathers(records):
        if record.key["ctas"] is None:
            place = record.device, record.key["ranks"], record.clock_source
            groups.setdefault(place, []).append(record)
    return [groups[place] for place in sorted(groups)]


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Of one machine: each way with the copy engines, and each other leader with the one before it."""
    found = by_way(records, SIZE)
    pairs = [(BASE, way) for way in found if BASE in found and way != BASE]
    pairs += [pair for pair in changes_of_lead(found) if BASE not in pair]
    compared = [compare(records[0], found[base], found[way]) for base, way in pairs]
    return [pair for pair in compared if pair is not None]


def gather_answers(log: RunLog) -> str:
    """Who is fastest at which size, and where one way overtakes another; empty without two ways."""
    rows, said = [], []
    for mine in by_machine(log.records):
        first = mine[0]
        lead = leads(by_way(mine, SIZE))
        if lead:
            machine = f"{first.device} ({first.clock_source})"
            said.append(f"{machine}, {first.key['ranks']} ranks: {sentence(lead)}")
        rows += [crossing_row(log, pair) for pair in comparisons(mine)]
    if not said:
        return ""
    parts = ["\n".join(said)]
    if rows:
        headers = ["device (clock)", "ranks", "way", "against", "is faster, by shard", "uncertainty"]
        parts.append(tabulate(rows, headers=headers, disable_numparse=True))
    parts.append(
        f"Sizes are those of a shard; within {TIE:.0%} of the fastest counts as fastest. Copy engines leave "
        "the SMs to other\nwork, which no time here shows."
    )
    if any(record.modelled for record in gathers(log.records)):
        parts[-1] += " --axes full varies the model's parameters, too."
    shifted = shift_table(log, (Question.ALLGATHER,), _regime)
    return "\n\n".join(parts) + (f"\n{shifted}" if shifted else "")


def _regime(question: Question, key: Mapping[str, Any]) -> str:
    del question
    return f"{key['ranks']} ranks, against {key['against']}"
