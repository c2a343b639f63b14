"""The answer of a run: crossovers of each engine against the LSU, per regime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from smfree.measure.log import RunLog
from smfree.measure.records import Question, Record
from smfree.model.crossover import (
    OFTEN_QUOTED_BYTES,
    TIE,
    Crossover,
    Curve,
    Outcome,
    crossover,
    format_bytes,
    sample_uncertainty,
)
from smfree.model.hockney import hockney

BASE = "lsu"
TILE_QUESTIONS = (Question.LATENCY, Question.THROUGHPUT)

#: Axes that name a regime: everything but the engine and the size.
_NOT_REGIME = ("engine", "tile_bytes")


def regimes(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Records of one device, question and regime together; the key tells them apart."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.question not in TILE_QUESTIONS:
            continue
        axes = tuple((name, value) for name, value in record.key.items() if name not in _NOT_REGIME)
        found.setdefault((record.device, record.question, axes), []).append(record)
    return found


def curves(records: Sequence[Record]) -> dict[str, Curve]:
    """Engine -> time of one tile against its size. Latency in cycles where known, throughput in seconds per
    tile."""
    found: dict[str, dict[int, Sequence[float]]] = {}
    for record in records:
        if record.config.get("twin_of"):
            continue
        samples = record.samples_cycles or record.samples_s
        if record.question is Question.THROUGHPUT:
            # Launches of different engines may move different amounts; what is compared is the time per byte.
            samples = [seconds / record.traffic.payload_bytes for seconds in record.samples_s]
        found.setdefault(record.key["engine"], {})[record.key["tile_bytes"]] = samples
    return {name: Curve(name, points) for name, points in found.items()}


def regime_text(question: Question, axes: Mapping[str, Any]) -> str:
    """Short name of a regime for a table row."""
    if question is Question.LATENCY:
        return f"latency, {axes.get('leg')}, {axes.get('memory')}, {axes.get('threads')} threads"
    amount = axes.get("bytes_in_flight")
    where = axes.get("memory")
    return f"throughput, {where}, " + (
        "each at its best" if amount is None else f"{format_bytes(amount)} in flight/SM"
    )


def answers(log: RunLog) -> str:
    """The table of crossovers with its notes; empty when no regime has the LSU and a challenger at two
    sizes."""
    rows = []
    for (device, question, axes), records in regimes(log.records).items():
        found = curves(records)
        base = found.pop(BASE, None)
        if base is None:
            continue
        for name, challenger in found.items():
            if len(set(base.samples) & set(challenger.samples)) < 2:
                continue
            result = crossover(base, challenger)
            rows.append(
                [
                    f"{device} ({records[0].clock_source})",
                    regime_text(question, dict(axes)),
                    name,
                    result.text(),
                    beside_quoted(result),
                    uncertainty(log, records[0], regime_key(records[0]), result, base, challenger),
                ]
            )
    if not rows:
        return ""
    low, high = (format_bytes(size) for size in OFTEN_QUOTED_BYTES)
    quoted = f"the often quoted\n{low} to {high}"
    headers = ["device (clock)", "regime", "engine", "faster than the LSU", quoted, "uncertainty"]
    text = tabulate(rows, headers=headers, disable_numparse=True, maxcolwidths=[None] * 3 + [30, None, 40])
    note = (
        "Matched work: same tile, threads and bytes in flight on both sides of a row, but for 'each at its "
        f"best'. Sizes\nbetween two points are interpolated; times within {TIE:.0%} are a tie. Often quoted: "
        "where the TMA is said to overtake\nthread loads; no public measurement confirms it."
    )
    shifted = shift_table(log, TILE_QUESTIONS, regime_text)
    return "\n".join(line for line in (text, note, shifted, _lines(log)) if line)


def beside_quoted(result: Crossover) -> str:
    """How a crossover stands to the range that is often quoted."""
    low, high = OFTEN_QUOTED_BYTES
    if result.size_bytes is None or result.tie:
        return "not seen here"
    if result.outcome is Outcome.OVERTAKEN:
        return "other way round"
    if result.size_bytes < low:
        return "earlier here"
    return "agrees" if result.size_bytes <= high else "later here"


def uncertainty(
    log: RunLog,
    record: Record,
    regime: Mapping[str, Any],
    result: Crossover,
    base: Curve,
    challenger: Curve,
) -> str:
    """Measured: the spread over resampled samples. Modelled: the parameters it follows from, with its
    shifts. ``record``: any of the regime."""
    if result.size_bytes is None:
        return ""
    if result.tie:
        here = "ends" if result.outcome is Outcome.CROSSES else "begins"
        return f"no crossing: tie ({TIE:.0%}) {here} there"
    if record.modelled:
        return _modelled(sensitivity_row(log, record, regime, challenger.name))
    spread = sample_uncertainty(base, challenger)
    if spread.interval is None:
        return "no resample has a crossover"
    low, high = format_bytes(spread.interval.low), format_bytes(spread.interval.high)
    share = "" if spread.found > 0.995 else f" in {spread.found:.0%} of resamples"
    return f"95 % of resamples {low} to {high}{share}"


def _modelled(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "parameters not varied"
    ends = [end for pair in row["shifts"].values() for end in pair]
    if not ends:
        return "no parameter moves it by 1 %"
    found = [end for end in ends if end is not None]
    lost = "" if len(found) == len(ends) else ", or none"
    span = f"{format_bytes(min(found))} to {format_bytes(max(found))}" if found else "none"
    count = len(row["shifts"])
    return f"{span}{lost} ({count} parameter{'s' if count > 1 else ''})"


def sensitivity_row(
    log: RunLog, record: Record, regime: Mapping[str, Any], challenger: str
) -> dict[str, Any] | None:
    """The sensitivity of a regime, if it was run."""
    for row in log.sensitivities:
        here = (row["device"], row["question"], row["key"]) == (record.device, record.question.value, regime)
        if here and row["challenger"] == challenger:
            return row
    return None


def shift_table(
    log: RunLog, questions: Sequence[Question], regime_of: Callable[[Question, Mapping[str, Any]], str]
) -> str:
    """Modelled crossovers with each parameter 20 % lower and higher; empty when none was varied."""
    rows = []
    for row in log.sensitivities:
        if Question(row["question"]) not in questions:
            continue
        regime = regime_of(Question(row["question"]), row["key"])
        for parameter, ends in row["shifts"].items():
            cells = ["none in range" if end is None else format_bytes(end) for end in ends]
            rows.append(
                [row["device"], regime, row["challenger"], _size(row["nominal_bytes"]), parameter, *cells]
            )
    if not rows:
        return ""
    headers = ["device", "regime", "engine", "crossover", "parameter", "at -20 %", "at +20 %"]
    title = (
        "Uncertainty of modelled crossovers: each of these parameters was varied and the kernels ran again"
    )
    return f"\n{title}\n" + tabulate(rows, headers=headers, disable_numparse=True)


def _size(size: float | None) -> str:
    return "none" if size is None else format_bytes(size)


def regime_key(record: Record) -> dict[str, Any]:
    """The axes of a record that name its regime."""
    return {name: value for name, value in record.key.items() if name not in _NOT_REGIME}


def _lines(log: RunLog) -> str:
    """Hockney lines of the latency curves: start-up and rate, which is why the curves cross."""
    rows = []
    for (device, question, axes), records in regimes(log.records).items():
        if question is not Question.LATENCY:
            continue
        regime = regime_text(question, dict(axes))
        for name, curve in curves(records).items():
            if len(curve.samples) < 3:
                continue
            line = hockney(curve)
            rows.append(
                [
                    f"{device} ({records[0].clock_source})",
                    regime,
                    name,
                    f"{line.alpha:.0f}",
                    f"{line.beta:.1f}",
                    f"{line.worst:.0%}",
                ]
            )
    if not rows:
        return ""
    headers = ["device (clock)", "regime", "engine", "start-up cycles", "bytes per cycle", "worst residual"]
    return "\nWhy: time of a tile = start-up + size / rate\n" + tabulate(
        rows, headers=headers, disable_numparse=True
    )
