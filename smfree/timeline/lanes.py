"""From a trace's events to lanes of bars: who waits, who works, which copy is in flight.

A trace is the JSON that ``Trace.save`` writes (smfree/emulator/trace.py). Times are modelled SM cycles since
the launch began.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
_INDEX = re.compile(r"\[(\d+)\]$")
Event = Mapping[str, Any]


class Kind(Enum):
    """What a bar shows; the value is its class in the picture."""

    RUN = "run"
    WORK = "work"
    WAIT = "wait"
    LOAD = "load"
    HOLD = "hold"
    STORE = "store"
    EVEN = "even"
    ODD = "odd"


#: What the legend says.
MEANING: Mapping[Kind, str] = {
    Kind.LOAD: "copy in flight",
    Kind.HOLD: "stage full",
    Kind.STORE: "store reads it",
    Kind.WORK: "works on a tile",
    Kind.RUN: "runs",
    Kind.WAIT: "waits",
    Kind.EVEN: "barrier phase, parity 0",
    Kind.ODD: "parity 1",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """From ``start`` to ``end`` in cycles. ``texts``: what may stand inside, the longest first."""

    start: float
    end: float
    kind: Kind
    texts: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One row. ``thin`` rows are those of barriers."""

    name: str
    bars: tuple[Bar, ...]
    thin: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One launch."""

    title: str
    cycles: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Launches of one trace, to be drawn on one scale."""

    device: str
    clock: str
    sm_clock_mhz: float
    panels: tuple[Panel, ...]


def load(path: Path) -> Timeline:
    """Read a trace file. Raises ValueError for anything else."""
    try:
        return timeline(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a trace ({type(error).__name__}: {error}); make one with "
            "`with device.trace() as trace` and trace.save(path)"
        ) from error


def timeline(data: Mapping[str, Any]) -> Timeline:
    """The lanes of a trace's JSON. Raises ValueError when there is nothing to draw."""
    version = data.get("smfree_trace")
    if version != FORMAT_VERSION:
        raise ValueError(f"smfree_trace must be {FORMAT_VERSION} (got {version!r})")
    launches = data["launches"]
    if not launches:
        raise ValueError("no launch was traced")
    first = launches[0]
    panels = tuple(panel(launch) for launch in launches)
    return Timeline(first["device"], first["clock"], first["sm_clock_mhz"], panels)


def panel(launch: Event) -> Panel:
    """The lanes of one launch: for each CTA its warps, then its stages, each with its barriers."""
    ctas = sorted({life["cta"] for life in launch["warps"]})
    lanes: list[Lane] = []
    for cta in ctas:
        mine = [*warp_lanes(launch, cta), *stage_lanes(launch, cta)]
        prefix = f"CTA {cta} " if len(ctas) > 1 else ""
        lanes += [Lane(prefix + lane.name, lane.bars, lane.thin) for lane in mine]
    threads = launch["block"][0] * launch["block"][1] * launch["block"][2]
    num_ctas = launch["grid"][0] * launch["grid"][1] * launch["grid"][2]
    shown = f"CTA {ctas[0]} of {num_ctas}" if len(ctas) == 1 else f"{len(ctas)} CTAs of {num_ctas}"
    name = launch["label"] or launch["kernel"]
    return Panel(f"{name}: {shown}, {threads} threads", launch["cycles"], tuple(lanes))


# --- warps --------------------------------------------------------------------------------------------------


def warp_lanes(launch: Event, cta: int) -> list[Lane]:
    """Warps that wait for the same phases in the same order share a lane; the first of them is drawn."""
    copies = [copy for copy in launch["copies"] if copy["cta"] == cta]
    landing = {copy["barrier"] for copy in copies if copy["barrier"]}
    groups: dict[tuple[Any, ...], list[Event]] = {}
    for life in launch["warps"]:
        if life["cta"] == cta:
            waits = _waits(launch, cta, life["warp"])
            order = tuple(dict.fromkeys((wait["on"], wait["phase"]) for wait in waits))
            issues = tuple(_issued(copies, life["warp"]))
            groups.setdefault((order, issues), []).append(life)
    lanes = []
    for (_, issues), lives in groups.items():
        life = lives[0]
        name = _numbers("warp", [item["warp"] for item in lives]) + (
            f": {', '.join(issues)}" if issues else ""
        )
        lanes.append(Lane(name, tuple(_warp_bars(life, _waits(launch, cta, life["warp"]), landing))))
    return lanes


def _waits(launch: Event, cta: int, warp: int) -> list[Event]:
    mine = [wait for wait in launch["waits"] if (wait["cta"], wait["warp"]) == (cta, warp)]
    return sorted(mine, key=lambda wait: wait["start"])


def _issued(copies: Iterable[Event], warp: int) -> list[str]:
    kinds = ["stores" if _stores(copy) else "copies" for copy in copies if copy["warp"] == warp]
    return sorted(set(kinds))


def _warp_bars(life: Event, waits: Sequence[Event], landing: set[str]) -> Iterable[Bar]:
    """Waits, and what lies between them: work once a tile has been waited for."""
    at, kind, stage = life["start"], Kind.RUN, ""
    for wait in waits:
        if wait["start"] > at:
            yield _running(at, wait["start"], kind, stage)
        on, phase = wait["on"], wait["phase"]
        texts = (f"{on} phase {phase}", on) if phase is not None else (on,)
        if wait["end"] > wait["start"]:
            yield Bar(wait["start"], wait["end"], Kind.WAIT, texts, f"waits for {texts[0]} at {wait['at']}")
        at = wait["end"]
        if on in landing:
            kind, stage = Kind.WORK, _stage_of(on)
        elif on.startswith("cp.async.wait"):
            kind, stage = Kind.WORK, ""
        elif phase is not None:
            kind, stage = Kind.RUN, ""
    if life["end"] > at:
        yield _running(at, life["end"], kind, stage)


def _running(start: float, end: float, kind: Kind, stage: str) -> Bar:
    text = stage if kind is Kind.WORK else ""
    what = f"works on {text}" if text else MEANING[kind]
    return Bar(start, end, kind, (text, text.removeprefix("stage ")) if text else (), what)


# --- stages -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Filled:
    """Copies into one stage that are in flight together."""

    start: float
    end: float
    num_bytes: int
    kind: str
    at: str


def stage_lanes(launch: Event, cta: int) -> list[Lane]:
    """One lane per stage (a barrier that copies complete on, else a place in shared memory), with the thin
    lanes of the barriers that bear its number."""
    loads = _by_stage([c for c in launch["copies"] if c["into"] == cta and not _stores(c)])
    stores = [c for c in launch["copies"] if c["cta"] == cta and _stores(c)]
    barriers = _phases(launch, cta)
    lanes: list[Lane] = []
    for name, copies in loads.items():
        spans = [(copy["shared"], copy["shared"] + copy["num_bytes"]) for copy in copies]
        own = [s for s in stores if any(low <= s["shared"] < high for low, high in spans)]
        stores = [store for store in stores if store not in own]
        lanes.append(Lane(name, tuple(_stage_bars(_together(copies), own, launch["cycles"]))))
        for barrier in [b for b in barriers if _stage_of(b) == name]:
            lanes.append(Lane(barrier, tuple(barriers.pop(barrier)), thin=True))
    if stores:
        lanes.append(Lane("other stores", tuple(_store_bar(store) for store in stores)))
    lanes += [Lane(barrier, tuple(bars), thin=True) for barrier, bars in barriers.items()]
    return lanes


def _stores(copy: Event) -> bool:
    return copy["kind"].endswith(("store", "reduce"))


def _stage_of(barrier: str) -> str:
    """ "full[1]" belongs to "stage 1"; a barrier without a number to the only stage."""
    found = _INDEX.search(barrier)
    return f"stage {found[1] if found else 0}"


def _by_stage(loads: Sequence[Event]) -> dict[str, list[Event]]:
    """Copies by the stage they fill, stages in order. Without barriers, groups that begin at one place are of
    one stage."""
    found: dict[str, list[Event]] = {}
    for copy in loads:
        if copy["barrier"]:
            found.setdefault(_stage_of(copy["barrier"]), []).append(copy)
    groups: dict[int, list[Event]] = {}
    for copy in loads:
        if not copy["barrier"]:
            groups.setdefault(copy["group"], []).append(copy)
    places: dict[int, list[Event]] = {}
    for copies in groups.values():
        places.setdefault(min(copy["shared"] for copy in copies), []).extend(copies)
    for number, place in enumerate(sorted(places)):
        found.setdefault(f"stage {number}", []).extend(places[place])
    return dict(sorted(found.items(), key=lambda item: int(item[0].split()[1])))


def _together(copies: Sequence[Event]) -> list[_Filled]:
    """Copies of one stage that overlap in time are one filling."""
    filled: list[_Filled] = []
    for copy in sorted(copies, key=lambda copy: copy["start"]):
        latest = filled[-1] if filled else None
        if latest is not None and copy["start"] < latest.end:
            latest.end = max(latest.end, copy["end"])
            latest.num_bytes += copy["num_bytes"]
        else:
            made = _Filled(copy["start"], copy["end"], copy["num_bytes"], copy["kind"], copy["at"])
            filled.append(made)
    return filled


def _stage_bars(filled: Sequence[_Filled], stores: Sequence[Event], cycles: float) -> Iterable[Bar]:
    for now, after in [*pairwise(filled), *[(last, None) for last in filled[-1:]]]:
        size = size_text(now.num_bytes)
        yield Bar(now.start, now.end, Kind.LOAD, (f"{size} in", size), f"{now.kind}, {size}, at {now.at}")
        until = after.start if after is not None else cycles
        emptied = [store["read"] for store in stores if now.end <= store["start"] < until]
        yield Bar(now.end, max(emptied, default=until), Kind.HOLD, (), "the stage is full")
    yield from (_store_bar(store) for store in stores)


def _store_bar(store: Event) -> Bar:
    """Until its source has been read; written it is later."""
    size = size_text(store["num_bytes"])
    detail = f"{store['kind']}, {size}, at {store['at']}, written at {store['end']:.0f}"
    return Bar(store["start"], store["read"], Kind.STORE, (f"{size} out", size), detail)


def _phases(launch: Event, cta: int) -> dict[str, list[Bar]]:
    """Barrier -> its phases, alternately coloured: the colour is the parity."""
    found: dict[str, list[Bar]] = {}
    for event in launch["phases"]:
        if event["cta"] != cta:
            continue
        bars = found.setdefault(event["barrier"], [])
        number, start = event["phase"], bars[-1].end if bars else 0.0
        detail = f"{event['barrier']}: phase {number} (parity {number & 1}) until {event['time']:.0f}"
        bars.append(Bar(start, event["time"], _parity(number), (f"phase {number}", str(number)), detail))
    for barrier, bars in found.items():
        number = len(bars)
        detail = f"{barrier}: phase {number} (parity {number & 1}), not completed"
        bars.append(Bar(bars[-1].end, launch["cycles"], _parity(number), (), detail))
    return found


def _parity(phase: int) -> Kind:
    return Kind.ODD if phase & 1 else Kind.EVEN


# --- texts --------------------------------------------------------------------------------------------------


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """ "warp 0", "warps 1-4, 7" """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"


def size_text(num_bytes: int) -> str:
    """ "8 KiB", "48 B" """
    return f"{num_bytes / 1024:g} KiB" if num_bytes % 256 == 0 and num_bytes else f"{num_bytes} B"
