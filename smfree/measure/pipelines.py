"""Tables and answers of the pipelines: what overlaps, and how many stages it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from tabulate import tabulate

from smfree.measure.records import Question, Record
from smfree.model.crossover import format_bytes
from smfree.model.overlap import CLOSE, Halves, enough_stages

DEFINITIONS = """\
ratio    computation to copy of a tile: asked for with two stages, and as it came with these; FMAs per element
serial   copies alone + compute per tile: nothing overlaps
ideal    the longer of: copies alone + the last computation / tiles, compute per tile + the first copy / tiles
overlap  (serial - both) / (serial - ideal): 0% nothing, 100% all that can
alone    the same kernel with the other half left out, in the same run
regs     registers per thread; CTAs fit: on an SM"""


def ratio_text(ratio: float) -> str:
    """0.25 -> "1:4": computation to copy."""
    exact = Fraction(ratio).limit_denominator(64)
    return f"{exact.numerator}:{exact.denominator}"


def halves(records: Sequence[Record]) -> dict[tuple[str, int, int, float], tuple[Record, Halves]]:
    """(pipeline, tile_bytes, num_stages, ratio) -> the record of the whole, and its halves.

    A whole of which a half was not run is left out.
    """
    parts: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = record.key
        parts[key["pipeline"], key["tile_bytes"], key["num_stages"], key["part"], key["ratio"]] = record
    found = {}
    for (name, tile, stages, part, ratio), whole in parts.items():
        copies = [parts.get((name, tile, stages, half, None)) for half in ("copy", "one copy")]
        computed = [parts.get((name, tile, stages, half, ratio)) for half in ("compute", "one compute")]
        solo = [half.seconds for half in (*copies, *computed) if half is not None]
        if part == "both" and len(solo) == 4:
            made = Halves(whole.config["tiles_per_cta"], whole.seconds, *solo)
            found[name, tile, stages, ratio] = (whole, made)
    return found


def pipeline_tables(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """One table of every pipeline, stage count and ratio."""
    mine = [record for record in records if record.question is Question.PIPELINE]
    ordered = sorted(halves(mine).items(), key=lambda item: (item[0][:2], item[0][3], item[0][2]))
    if not ordered:
        return []
    headers = [
        "pipeline", "tile", "stages", "ratio\nasked", "ratio\ncame", "FMAs", "both", "ideal", "serial",
        "overlap", "copies\nalone", "compute\nper tile", "regs", "CTAs\nfit", "occu-\npancy",
    ]  # fmt: skip
    rows = [_row(*key, whole, part) for key, (whole, part) in ordered]
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 14))
    first = ordered[0][1][0]
    text += (
        f"\nSM cycles per tile and CTA ({first.clock_source}), launch included; {first.config['grid']} CTAs, "
        f"{first.config['tiles_per_cta']} tiles each;\nL2 {first.cache.value}\n{DEFINITIONS}"
    )
    return [(f"Pipelines, copy and computation overlapped: {head}", text)]


def _row(name: str, tile: int, stages: int, ratio: float, whole: Record, part: Halves) -> list[str]:
    cost, overlap = whole.cost, part.overlap

    def cycles(seconds: float) -> str:
        return f"{seconds * (whole.sm_clock_mhz or 0.0) * 1e6:.0f}"

    return [
        name,
        format_bytes(tile),
        str(stages),
        ratio_text(ratio),
        f"{part.ratio:.2f}",
        str(whole.key["work"]),
        *[cycles(total / part.tiles) for total in (part.both, part.ideal, part.serial)],
        "-" if overlap is None else f"{overlap:.0%}",
        cycles(part.copy / part.tiles),
        cycles(part.tile_compute),
        "-" if cost.registers is None else str(cost.registers),
        "-" if cost.ctas_per_sm is None else str(cost.ctas_per_sm),
        "-" if cost.occupancy is None else f"{cost.occupancy:.0%}",
    ]


def stage_answers(records: Sequence[Record]) -> str:
    """How many stages until the copy is hidden? Empty when no pipeline was run with two stage counts."""
    groups: dict[tuple[str, str, int, float], dict[int, Halves]] = {}
    clocks: dict[str, str] = {}
    for device in dict.fromkeys(record.device for record in records):
        mine = [r for r in records if r.device == device and r.question is Question.PIPELINE]
        for (name, tile, stages, ratio), (whole, part) in halves(mine).items():
            groups.setdefault((device, name, tile, ratio), {})[stages] = part
            clocks[device] = whole.clock_source
    rows = []
    for (device, name, tile, ratio), by_stages in sorted(groups.items()):
        if len(by_stages) < 2:
            continue
        best = enough_stages({stages: part.both for stages, part in by_stages.items()})
        rows.append(
            [
                f"{device} ({clocks[device]})",
                name,
                format_bytes(tile),
                ratio_text(ratio),
                _hidden(by_stages),
                f"{best} of {', '.join(map(str, sorted(by_stages)))}",
                f"{by_stages[min(by_stages)].both / by_stages[best].both:.2f} x",
            ]
        )
    if not rows:
        return ""
    headers = ["device (clock)", "pipeline", "tile", "compute:\ncopy", "copy hidden with"]
    headers += ["enough stages", "faster than with\nthe fewest"]
    note = (
        f"Hidden: within {CLOSE:.0%} of the computation alone with the copy of one tile. Enough: within\n"
        f"{CLOSE:.0%} of the fastest of those that were run."
    )
    return tabulate(rows, headers=headers, disable_numparse=True) + "\n" + note


def _hidden(by_stages: Mapping[int, Halves]) -> str:
    found = [stages for stages in sorted(by_stages) if by_stages[stages].hidden]
    if found:
        return f"{found[0]} stage{'s' if found[0] > 1 else ''}"
    most = by_stages[max(by_stages)]
    if most.ratio < 1:
        return f"none: the copy takes {1 / most.ratio:.2f} x the computation"
    return "none of these"
