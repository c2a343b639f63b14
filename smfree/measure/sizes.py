"""What tables of collectives share: rates, who is fastest at which size, how many SMs it takes.

A record's ``traffic.payload_bytes`` over its time is the algorithm bandwidth, its ``traffic.written_bytes``,
what a rank has to get from its peers, the bus bandwidth: rates as in NCCL's tests, the second to be compared
with the link. ``size`` is the key of a record that holds the size: "shard_bytes", "message_bytes".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tabulate import tabulate

from smfree.measure.answers import uncertainty
from smfree.measure.clusters import leaders
from smfree.measure.log import RunLog
from smfree.measure.marks import legend, marked, unique
from smfree.measure.records import Record
from smfree.model.crossover import TIE, Crossover, Curve, crossover, format_bytes

SATURATED = 0.95
"""Of the best bandwidth in a sweep of grids."""


def algorithm_gbps(record: Record) -> float:
    """1e9 bytes of output per second."""
    return record.traffic.payload_bytes / record.seconds / 1e9


def bus_gbps(record: Record) -> float:
    """1e9 bytes per second that a rank receives from its peers."""
    return record.traffic.written_bytes / record.seconds / 1e9


def word(size: str) -> str:
    """What a size is the size of."""
    return size.removesuffix("_bytes")


# --- by size ------------------------------------------------------------------------------------------------


def time_table(records: Sequence[Record], size: str) -> str:
    """Sizes down, ways across: microseconds and bus bandwidth, the fastest starred."""
    ways = unique(record.key["way"] for record in records)
    by_place: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        place = record.key["ranks"], record.key[size]
        by_place.setdefault(place, {})[record.key["way"]] = record
    rows = []
    for (ranks, nbytes), here in sorted(by_place.items()):
        fastest = min(record.seconds for record in here.values())
        cells = [_time_cell(here[way], fastest) if way in here else "-" for way in ways]
        rows.append([str(ranks), format_bytes(nbytes), *cells])
    return tabulate(
        rows,
        headers=["ranks", word(size), *[f"{way}\nus  GB/s " for way in ways]],
        disable_numparse=True,
        colalign=("right",) * (len(ways) + 2),
    )


def _time_cell(record: Record, fastest_s: float) -> str:
    star = "*" if record.seconds <= (1 + TIE) * fastest_s else " "
    return marked(record, f"{record.seconds * 1e6:.1f} {bus_gbps(record):5.1f}{star}")


def how(records: Sequence[Record]) -> list[str]:
    """Path, copies and backing of each way, those that agree in one line (cases D15, D30)."""
    told: dict[str, list[str]] = {}
    for record in records:
        config = record.config
        path = config["path"]
        parts = [path if path.startswith("staged") else f"over {path}"]
        parts += [f"by {config['copies']}"] if config.get("copies") else []
        parts += [f"version {config['version']}"] if config.get("version") else []
        told.setdefault(", ".join(parts), []).append(record.key["way"])
    said = [f"{', '.join(unique(ways))}: {text}" for text, ways in told.items()]
    reasons: dict[str, str] = {}
    for record in records:
        backing, _, reason = str(record.config.get("backing", "")).partition(": ")
        reasons.setdefault(backing, reason)
    return said + [f"memory: {backing}: {why}" for backing, why in reasons.items() if backing]


def by_way(records: Sequence[Record], size: str) -> dict[str, Curve]:
    """Way -> time against size."""
    found: dict[str, dict[int, Sequence[float]]] = {}
    for record in records:
        found.setdefault(record.key["way"], {})[record.key[size]] = record.samples_s
    return {way: Curve(way, samples) for way, samples in found.items()}


# --- SMs ----------------------------------------------------------------------------------------------------


def saturation(records: Sequence[Record], size: str) -> str:
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
        f"{text}\nbus bandwidth in GB/s ({first.clock_source}) of {word(size)}s of "
        f"{format_bytes(first.key[size])}, start-up included; a CTA per SM, of "
        f"{first.config['num_sms']}; copy engines take none"
    ) + legend(records)


def saturating(by_ctas: Mapping[int, Record]) -> int:
    """The fewest CTAs that reach ``SATURATED`` of the best bandwidth of a sweep."""
    best = max(map(bus_gbps, by_ctas.values()))
    return min(ctas for ctas, record in by_ctas.items() if bus_gbps(record) >= SATURATED * best)


# --- who overtakes whom -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways by size, on so many GPUs of one device; ``record``: any of them."""

    record: Record
    base: Curve
    challenger: Curve
    result: Crossover

    @property
    def regime(self) -> dict[str, Any]:
        """What names it among sensitivities, beside the challenger."""
        key = self.record.key
        return {**{name: key[name] for name in ("ranks", "dtype") if name in key}, "against": self.base.name}


def compare(record: Record, base: Curve, challenger: Curve) -> Comparison | None:
    """None below two sizes that both were measured at."""
    if len(set(base.samples) & set(challenger.samples)) < 2:
        return None
    return Comparison(record, base, challenger, crossover(base, challenger))


def leads(found: Mapping[str, Curve]) -> dict[int, set[str]]:
    """Size -> the ways that are fastest there."""
    return leaders({way: curve.medians() for way, curve in found.items()})


def changes_of_lead(found: Mapping[str, Curve]) -> list[tuple[str, str]]:
    """(who led, who leads then), from the smallest size on."""
    times = {way: curve.medians() for way, curve in found.items()}
    first = {size: min(ways, key=lambda way: times[way][size]) for size, ways in leads(found).items()}
    pairs = [(first[low], first[high]) for low, high in pairwise(sorted(first))]
    return list(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


def crossing_row(log: RunLog, pair: Comparison) -> list[str]:
    """Device, ranks, way, against, where it is faster, uncertainty."""
    first = pair.record
    spread = uncertainty(log, first, pair.regime, pair.result, pair.base, pair.challenger)
    where = [f"{first.device} ({first.clock_source})", str(first.key["ranks"])]
    return [*where, pair.challenger.name, pair.base.name, pair.result.text(), spread]


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
