"""Tables of AllReduces and ReduceScatters: who is fastest at which size, why, how many SMs it takes.

Rates as in NCCL's tests: S bytes on every rank in t seconds are an algorithm bandwidth of S / t. Bus
bandwidth is 2 (N - 1)/N of it for an AllReduce, (N - 1)/N for a ReduceScatter: what a rank has to send at
least where the switch does not add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from tabulate import tabulate

from smfree.measure.answers import shift_table
from smfree.measure.log import RunLog
from smfree.measure.marks import legend, unique
from smfree.measure.records import Question, Record
from smfree.measure.reduced_bytes import reduced_bytes, steps_of
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
from smfree.model.hockney import Hockney, hockney

SIZE = "message_bytes"

NAMES = {Question.ALLREDUCE: "AllReduce", Question.REDUCE_SCATTER: "ReduceScatter"}

RIVALS = ("oneshot", "twoshot", "tree", "ring.sm")
"""Ways of an AllReduce that are compared each with each, from few steps to few bytes."""


def reductions(records: Iterable[Record], question: Question) -> list[Record]:
    """Those of one question."""
    return [record for record in records if record.question is question]


def reduction_tables(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Times, start-up and rate, what moves, and the SMs that saturate."""
    sections: dict[str, str] = {}
    for question, name in NAMES.items():
        mine = reductions(records, question)
        own_choice = [record for record in mine if record.key["ctas"] is None]
        for dtype in unique(record.key["dtype"] for record in own_choice):
            chosen = [record for record in own_choice if record.key["dtype"] == dtype]
            sections[f"{name} of {dtype} by size"] = times(chosen)
            sections[f"{name} of {dtype}, start-up and rate"] = lines(chosen)
        sections[f"{name}, what moves"] = reduced_bytes([r for r in own_choice if r.config.get("counted")])
        sections[f"{name}, how many SMs"] = saturation([r for r in mine if r.key["ctas"] is not None], SIZE)
    return [(f"{title}: {head}", text) for title, text in sections.items() if text]


# --- times --------------------------------------------------------------------------------------------------


def times(records: Sequence[Record]) -> str:
    """Sizes down, ways across: microseconds and bus bandwidth, the fastest starred."""
    first = records[0]
    factor = "2 (N - 1)/N" if first.question is Question.ALLREDUCE else "(N - 1)/N"
    text = time_table(records, SIZE) + (
        f"\nus ({first.clock_source}) of a whole {NAMES[first.question]}, and its bus bandwidth in GB/s: "
        f"{factor} messages / time; * fastest, ties within {TIE:.0%}.\nAlgorithm bandwidth is message / "
        f"time. Not in place; maximum over ranks, which start together; L2 {first.cache.value}"
    )
    return text + "".join(f"\n{line}" for line in how(records)) + legend(records)


# --- start-up and rate --------------------------------------------------------------------------------------


def fits(records: Sequence[Record]) -> dict[tuple[int, str], Hockney]:
    """(ranks, way) -> T = alpha + S / beta of the ways with three sizes, S the message."""
    found = {}
    for ranks in sorted(unique(record.key["ranks"] for record in records)):
        for way, curve in by_way([r for r in records if r.key["ranks"] == ranks], SIZE).items():
            if len(curve.samples) >= 3:
                found[ranks, way] = hockney(curve)
    return found


def lines(records: Sequence[Record]) -> str:
    """alpha and beta of every way with three sizes, and what of alpha a step has. Empty where there is
    none."""
    question, rows = records[0].question, []
    share = 2 if question is Question.ALLREDUCE else 1
    for (ranks, way), fit in fits(records).items():
        mine = [record for record in records if (record.key["ranks"], record.key["way"]) == (ranks, way)]
        smallest, steps = min(record.seconds for record in mine), steps_of(mine[0])
        low, high = (format_bytes(size) for size in fit.range_bytes)
        rows.append(
            [
                str(ranks),
                way,
                f"{smallest * 1e6:.1f}",
                f"{fit.alpha * 1e6:.1f}",
                "-" if steps is None else str(steps),
                "-" if steps is None else f"{fit.alpha / steps * 1e6:.2f}",
                f"{fit.beta / 1e9:.0f}",
                f"{fit.beta / 1e9 * share * (ranks - 1) / ranks:.0f}",
                format_bytes(fit.critical_bytes),
                f"{fit.worst:.0%}",
                f"{low} to {high}",
            ]
        )
    if not rows:
        return ""
    headers = [
        "ranks", "way", f"smallest took\nus ({records[0].clock_source})", "alpha\nus", "steps",
        "alpha / step\nus", "beta\nGB/s", "of the bus\nGB/s", "S* = alpha beta:\nlatency below",
        "worst\nresidual", "fitted from\nmessages of",
    ]  # fmt: skip
    aligned = ("right", "left", *["right"] * 8, "left")
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned)
    return (
        f"{text}\nT = alpha + S / beta, S the message. Launch and barriers are in alpha, and so in what a "
        "step has of it; grids grow with the\nmessages, so beta is that of this range, and can be above "
        "what a link carries"
    )


# --- who should reduce --------------------------------------------------------------------------------------


def by_machine(records: Iterable[Record]) -> list[list[Record]]:
    """Reductions with the ways' own grids: those of one question, device, clock, type and number of ranks
    together."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.question in NAMES and record.key["ctas"] is None:
            key = record.key
            place = (record.question.value, record.device, record.clock_source, key["dtype"], key["ranks"])
            groups.setdefault(place, []).append(record)
    return [groups[place] for place in sorted(groups)]


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Of one machine: the rivals each with each, and every other leader with the one before it."""
    found = by_way(records, SIZE)
    pairs = list(combinations([way for way in RIVALS if way in found], 2))
    known = [set(pair) for pair in pairs]
    pairs += [pair for pair in changes_of_lead(found) if set(pair) not in known]
    compared = [compare(records[0], found[base], found[way]) for base, way in pairs]
    return [pair for pair in compared if pair is not None]


def meeting(base: Curve, challenger: Curve) -> str:
    """At which messages the challenger's line is below the base's; "-" without three sizes of both. Where
    they meet outside the sizes that both were fitted from, no size is said: it would be a guess."""
    if min(len(base.samples), len(challenger.samples)) < 3:
        return "-"
    one, other = hockney(base), hockney(challenger)
    later, sooner = other.alpha - one.alpha, 1 / one.beta - 1 / other.beta
    if sooner == 0 or later / sooner <= 0:  # they do not meet
        return "everywhere" if later < 0 or sooner > 0 else "nowhere"
    place = later / sooner
    low = max(one.range_bytes[0], other.range_bytes[0])
    high = min(one.range_bytes[1], other.range_bytes[1])
    if low <= place <= high:
        return f"{'from' if sooner > 0 else 'below'} {format_bytes(place)}"
    if (place < low) == (sooner > 0):
        return "at all that was run"
    return "beyond what was run" if sooner > 0 else "below what was run"


def reduction_answers(log: RunLog) -> str:
    """Who is fastest at which size, and where one way overtakes another; empty without two ways."""
    rows, said = [], []
    for mine in by_machine(log.records):
        first = mine[0]
        lead = leads(by_way(mine, SIZE))
        if not lead:
            continue
        what = f"{NAMES[first.question]} of {first.key['dtype']}"
        machine = f"{first.device} ({first.clock_source})"
        said.append(f"{machine}, {first.key['ranks']} ranks, {what}: {sentence(lead)}")
        for pair in comparisons(mine):
            device, ranks, *cells, spread = crossing_row(log, pair)
            rows.append([device, ranks, what, *cells, meeting(pair.base, pair.challenger), spread])
    if not said:
        return ""
    parts = ["\n".join(said)]
    if rows:
        headers = [
            "device (clock)", "ranks", "of", "way", "against", "is faster, by message",
            "their lines:\nfaster", "uncertainty",
        ]  # fmt: skip
        parts.append(tabulate(rows, headers=headers, disable_numparse=True))
    parts.append(
        "Between two sizes the logarithm of the times' ratio is interpolated; lines: T = alpha + S / beta. "
        f"Within {TIE:.0%} of the fastest counts as fastest.\nWho adds on SMs takes them from other work, "
        "which no time here shows."
    )
    if any(record.modelled for mine in by_machine(log.records) for record in mine):
        parts[-1] += " --axes full varies the model's parameters, too."
    shifted = shift_table(log, tuple(NAMES), _regime)
    return "\n\n".join(parts) + (f"\n{shifted}" if shifted else "")


def _regime(question: Question, key: Mapping[str, Any]) -> str:
    return f"{NAMES[question]} of {key['dtype']}, {key['ranks']} ranks, against {key['against']}"
