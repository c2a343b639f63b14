"""Tables of AllGathers: who is fastest at which size, why, and how many SMs it takes.

Rates as in NCCL's tests: N ranks with shards of S bytes end with N S bytes each. Algorithm bandwidth is
N S / t; bus bandwidth is (N - 1) / N of it, what crosses each rank's port in either direction, to be compared
with the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tabulate import tabulate

from smfree.measure.answers import shift_table, uncertainty
from smfree.measure.clusters import leaders
from smfree.measure.log import RunLog
from smfree.measure.marks import legend, marked, unique
from smfree.measure.movement import movement
from smfree.measure.records import Question, Record
from smfree.model.crossover import TIE, Crossover, Curve, crossover, format_bytes
from smfree.model.hockney import hockney

SATURATED = 0.95
"""Of the best bandwidth in a sweep of grids."""

BASE = "ce.batch"
"""What the other ways are compared with: no SM works."""


def algorithm_gbps(record: Record) -> float:
    """1e9 bytes of output per second."""
    return record.traffic.payload_bytes / record.seconds / 1e9


def bus_gbps(record: Record) -> float:
    """1e9 bytes per second that a rank receives from its peers."""
    return record.traffic.written_bytes / record.seconds / 1e9


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
        "AllGather, how many SMs": saturation([r for r in mine if r.key["ctas"] is not None]),
        "AllGather, what moves": movement([r for r in own_choice if r.config.get("counted")]),
    }
    return [(f"{title}: {head}", text) for title, text in parts.items() if text]


# --- times --------------------------------------------------------------------------------------------------


def times(records: Sequence[Record]) -> str:
    """Sizes down, ways across: microseconds and bus bandwidth, the fastest starred. Empty without records."""
    if not records:
        return ""
    ways = unique(record.key["way"] for record in records)
    by_place: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        place = record.key["ranks"], record.key["shard_bytes"]
        by_place.setdefault(place, {})[record.key["way"]] = record
    rows = []
    for (ranks, size), here in sorted(by_place.items()):
        fastest = min(record.seconds for record in here.values())
        row = [str(ranks), format_bytes(size)]
        for way in ways:
            row.append(_time_cell(here[way], fastest) if way in here else "-")
        rows.append(row)
    first = records[0]
    text = tabulate(
        rows,
        headers=["ranks", "shard", *[f"{way}\nus  GB/s " for way in ways]],
        disable_numparse=True,
        colalign=("right",) * (len(ways) + 2),
    )
    text += (
        f"\nus ({first.clock_source}) of a whole AllGather, and its bus bandwidth in GB/s: (N - 1) shards / "
        f"time; * fastest, ties within {TIE:.0%}.\nAlgorithm bandwidth is N / (N - 1) of it. In place; "
        f"maximum over ranks, which start together; L2 {first.cache.value}"
    )
    return text + "".join(f"\n{line}" for line in _how(records)) + legend(records)


def _time_cell(record: Record, fastest_s: float) -> str:
    star = "*" if record.seconds <= (1 + TIE) * fastest_s else " "
    return marked(record, f"{record.seconds * 1e6:.1f} {bus_gbps(record):5.1f}{star}")


def _how(records: Sequence[Record]) -> list[str]:
    """Path, copies and backing of each way, those that agree in one line (cases D15, D30)."""
    told: dict[str, list[str]] = {}
    for record in records:
        config = record.config
        path = config["path"]
        parts = [path if path.startswith("staged") else f"over {path}"]
        parts += [f"by {config['copies']}"] if config.get("copies") else []
        parts += [f"version {config['version']}"] if config.get("version") else []
        told.setdefault(", ".join(parts), []).append(record.key["way"])
    said = [f"{', '.join(unique(ways))}: {how}" for how, ways in told.items()]
    reasons: dict[str, str] = {}
    for record in records:
        backing, _, reason = str(record.config.get("backing", "")).partition(": ")
        reasons.setdefault(backing, reason)
    return said + [f"memory: {backing}: {why}" for backing, why in reasons.items() if backing]


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


# --- SMs ----------------------------------------------------------------------------------------------------


def saturation(records: Sequence[Record]) -> str:
    """Bus bandwidth against CTAs, and the fewest that are within ``SATURATED`` of the best. Empty without a
    sweep."""
    if not records:
        return ""
    grids = sorted(unique(record.key["ctas"] for record in records))
    rows = []
    for way in unique(record.key["way"] for record in records):
        mine = {record.key["ctas"]: record for record in records if record.key["way"] == way}
        config = next(iter(mine.values())).config
        rows.append(
            [
                way,
                str(config["threads"]),
                format_bytes(config["bytes_in_flight_per_sm"]),
                *[f"{bus_gbps(mine[ctas]):.0f}" if ctas in mine else "-" for ctas in grids],
                str(saturating(mine)),
            ]
        )
    first = records[0]
    headers = ["way", "threads", "in flight\nper SM", *[f"{ctas} CTA{'s' * (ctas > 1)}" for ctas in grids]]
    headers.append(f"fewest within\n{1 - SATURATED:.0%} of the best")
    text = tabulate(
        rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1))
    )
    return (
        f"{text}\nbus bandwidth in GB/s ({first.clock_source}) of shards of "
        f"{format_bytes(first.key['shard_bytes'])}, start-up included; a CTA per SM, of "
        f"{first.config['num_sms']}; copy engines take none"
    ) + legend(records)


def saturating(by_ctas: Mapping[int, Record]) -> int:
    """The fewest CTAs that reach ``SATURATED`` of the best bandwidth of a sweep."""
    best = max(map(bus_gbps, by_ctas.values()))
    return min(ctas for ctas, record in by_ctas.items() if bus_gbps(record) >= SATURATED * best)


# --- who should gather --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways by the size of a shard, on ``ranks`` GPUs of one device; ``record``: any of them."""

    record: Record
    base: Curve
    challenger: Curve
    result: Crossover

    @property
    def regime(self) -> dict[str, Any]:
        """What names it among sensitivities, beside the challenger."""
        return {"ranks": self.record.key["ranks"], "against": self.base.name}


def by_machine(records: Iterable[Record]) -> list[list[Record]]:
    """Gathers with the ways' own grids: those of one device, clock and number of ranks together."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in gathers(records):
        if record.key["ctas"] is None:
            place = record.device, record.key["ranks"], record.clock_source
            groups.setdefault(place, []).append(record)
    return [groups[place] for place in sorted(groups)]


def by_shard(records: Sequence[Record]) -> dict[str, Curve]:
    """Way -> time against the size of a shard."""
    found: dict[str, dict[int, Sequence[float]]] = {}
    for record in records:
        found.setdefault(record.key["way"], {})[record.key["shard_bytes"]] = record.samples_s
    return {way: Curve(way, samples) for way, samples in found.items()}


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Of one machine: each way with the copy engines, and each other leader with the one before it."""
    found = by_shard(records)
    pairs = [(BASE, way) for way in found if BASE in found and way != BASE]
    times = {way: curve.medians() for way, curve in found.items()}
    first = {size: min(ways, key=lambda way: times[way][size]) for size, ways in leaders(times).items()}
    for low, high in pairwise(sorted(first)):
        pair = first[low], first[high]
        if pair[0] != pair[1] and BASE not in pair and pair not in pairs:
            pairs.append(pair)
    return [
        Comparison(records[0], found[base], found[way], crossover(found[base], found[way]))
        for base, way in pairs
        if len(set(found[base].samples) & set(found[way].samples)) >= 2
    ]


def gather_answers(log: RunLog) -> str:
    """Who is fastest at which size, and where one way overtakes another; empty without two ways."""
    rows, said = [], []
    for mine in by_machine(log.records):
        first = mine[0]
        leads = leaders({way: curve.medians() for way, curve in by_shard(mine).items()})
        if leads:
            machine = f"{first.device} ({first.clock_source})"
            said.append(f"{machine}, {first.key['ranks']} ranks: {sentence(leads)}")
        for pair in comparisons(mine):
            spread = uncertainty(log, first, pair.regime, pair.result, pair.base, pair.challenger)
            where = [f"{first.device} ({first.clock_source})", str(first.key["ranks"])]
            rows.append([*where, pair.challenger.name, pair.base.name, pair.result.text(), spread])
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


def sentence(leads: Mapping[int, set[str]]) -> str:
    """Sizes and who leads there, neighbours with the same leaders joined."""
    runs: list[tuple[list[int], set[str]]] = []
    for size in sorted(leads):
        if runs and runs[-1][1] == leads[size]:
            runs[-1][0].append(size)
        else:
            runs.append(([size], leads[size]))
    texts = []
    for sizes, ways in runs:
        low, high = format_bytes(sizes[0]), format_bytes(sizes[-1])
        texts.append(f"{' or '.join(sorted(ways))} at {low}" + (f" to {high}" if len(sizes) > 1 else ""))
    return ", ".join(texts)
