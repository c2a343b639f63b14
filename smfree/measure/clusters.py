"""Tables and answers of clusters: paths between shared memories, and multicast against loads of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from smfree.measure.records import Question, Record
from smfree.model.crossover import TIE, Curve, format_bytes
from smfree.model.hockney import hockney

REGISTER_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "ld.shared::cluster": ("cluster_load_bytes", "shared_store_bytes"),
    "st.async": ("shared_load_bytes", "cluster_async_bytes"),
    "cp.async.bulk": ("shared_load_bytes", "shared_store_bytes"),
}
"""Of each path, the bytes that go into and out of registers; the last one's are none."""

Pair = tuple[Record, Record]
"""Each CTA for itself, and the multicast of the same tiles."""


def through_registers(record: Record) -> float | None:
    """Bytes that went into or out of registers, per byte that a ring moved; None without counters."""
    if not record.counters:
        return None
    moved = record.traffic.payload_bytes * record.config["turns"]
    return sum(record.counters[name] for name in REGISTER_COUNTERS[record.key["path"]]) / moved


def l2_read(record: Record) -> float | None:
    """Bytes that the L2 was read, per byte that a CTA got; None without counters. Every got byte is written
    once, and that is taken off."""
    if not record.counters:
        return None
    asked = record.counters["l2_hit_bytes"] + record.counters["l2_miss_bytes"]
    steps = record.config["turns"]
    return (asked / steps - record.traffic.written_bytes) / record.traffic.payload_bytes


def per_cycle(record: Record) -> float:
    """Bytes that one SM gets per cycle."""
    per_sm = record.traffic.payload_bytes / record.config["ctas"] * record.key.get("ctas_per_sm", 1)
    return per_sm / cycles(record)


def cycles(record: Record) -> float:
    assert record.cycles is not None, f"{record.name} has no cycles"
    return record.cycles


def _of(records: Iterable[Record], question: Question) -> list[Record]:
    return [record for record in records if record.question is question]


# --- DSMEM --------------------------------------------------------------------------------------------------


def dsmem_table(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """One table of every path, tile size and cluster size."""
    mine = _of(records, Question.DSMEM)
    if not mine:
        return []
    rows = []
    for record in mine:
        key, cost, registers = record.key, record.cost, through_registers(record)
        rows.append(
            [
                str(key["cluster"]),
                str(record.config["ctas"] // key["cluster"]),
                format_bytes(key["tile_bytes"]),
                key["path"],
                f"{cycles(record):.0f}",
                f"{per_cycle(record):.1f}",
                "-" if registers is None else f"{registers:.0f}",
                "-" if cost.ptx_per_kib is None else f"{cost.ptx_per_kib:.1f}",
                "-" if cost.registers is None else str(cost.registers),
            ]
        )
    headers = [
        "CTAs of a\ncluster", "clusters", "tile", "path", "cycles\nper tile", "bytes per\nSM cycle",
        "bytes through\nregisters per byte", "PTX instr\nper KiB", "registers\nper thread",
    ]  # fmt: skip
    right = ("right",) * 3, ("right",) * 5
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=(*right[0], "left", *right[1]))
    first = mine[0]
    text += (
        f"\nSM cycles ({first.clock_source}) of a step in which each CTA sends a tile and gets one, "
        f"{first.config['threads']} threads; launch cancels, a\ncluster barrier, a proxy fence and, but for "
        "loads, the wait on an mbarrier are part of each step; warp instructions"
    )
    return [(f"Tiles from CTA to CTA, distributed shared memory: {head}", text)]


def path_answers(records: Sequence[Record]) -> str:
    """Which path leads at which size, and its line. Empty when no size was run with two paths."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in _of(records, Question.DSMEM):
        place = record.device, record.clock_source, record.key["cluster"], record.key["filled"]
        groups.setdefault(place, []).append(record)
    rows = []
    for (device, clock, cluster, filled), mine in groups.items():
        times: dict[str, dict[int, float]] = {}
        for record in mine:
            times.setdefault(record.key["path"], {})[record.key["tile_bytes"]] = cycles(record)
        leads = leaders(times)
        if not leads:
            continue
        for path, by_size in times.items():
            line = ["-", "-"]
            if len(by_size) > 2:
                fit = hockney(Curve(path, {size: [time] for size, time in by_size.items()}))
                line = [f"{fit.alpha:.0f}", f"{fit.beta:.1f}"]
            where = "all SMs" if filled else "one alone"
            rows.append([f"{device} ({clock})", str(cluster), where, path, _ranges(leads, path), *line])
    if not rows:
        return ""
    headers = [
        "device (clock)",
        "CTAs",
        "clusters",
        "path",
        "fastest at",
        "start-up\ncycles",
        "bytes per\ncycle",
    ]
    aligned = ("left", "right", "left", "left", "left", "right", "right")
    note = (
        f"Sizes that were run; within {TIE:.0%} of the fastest counts as fastest. Time of a step = start-up "
        "+ size / rate: the\nstart-up holds the step's cluster barrier, which all paths need."
    )
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned) + "\n" + note


def leaders(times: Mapping[str, Mapping[int, float]]) -> dict[int, set[str]]:
    """Size -> the names that are within TIE of the fastest, where at least two can be compared; ``times``:
    name -> size -> time."""
    found = {}
    for size in sorted({size for by_size in times.values() for size in by_size}):
        here = {name: by_size[size] for name, by_size in times.items() if size in by_size}
        if len(here) > 1:
            found[size] = {name for name, time in here.items() if time <= (1 + TIE) * min(here.values())}
    return found


def _ranges(leads: Mapping[int, set[str]], name: str) -> str:
    """The sizes at which ``name`` leads, neighbours joined."""
    runs: list[list[int]] = []
    before = False
    for size in sorted(leads):
        here = name in leads[size]
        if here and before:
            runs[-1].append(size)
        elif here:
            runs.append([size])
        before = here
    texts = [
        format_bytes(run[0]) if len(run) == 1 else f"{format_bytes(run[0])} to {format_bytes(run[-1])}"
        for run in runs
    ]
    return ", ".join(texts) or "no size"


# --- multicast ----------------------------------------------------------------------------------------------


def pairs(records: Sequence[Record]) -> dict[tuple[str, str, int, int, int], Pair]:
    """(device, form, cluster, ctas_per_sm, tile_bytes) -> each for itself, and the multicast. One without the
    other is left out."""
    found: dict[tuple[Any, ...], dict[bool, Record]] = {}
    for record in _of(records, Question.MULTICAST):
        key = record.key
        place = record.device, key["form"], key["cluster"], key["ctas_per_sm"], key["tile_bytes"]
        found.setdefault(place, {})[key["multicast"]] = record
    return {place: (both[False], both[True]) for place, both in found.items() if len(both) == 2}


def multicast_table(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """One table of every form, tile size and cluster size: L2 bytes and time."""
    found = pairs(records)
    if not found:
        return []
    rows = []
    for (_, form, cluster, per_sm, tile), pair in found.items():
        row = [form, format_bytes(tile), str(cluster), str(per_sm)]
        row += ["-" if read is None else f"{read:.3f}" for read in map(l2_read, pair)]
        row += [f"{cycles(record):.0f}" for record in pair]
        row += [f"{per_cycle(record):.1f}" for record in pair]
        rows.append(row)
    headers = ["form", "tile", "CTAs of a\ncluster", "CTAs\nper SM"]
    for what in ("L2 read\nper byte", "cycles\nper tile", "bytes per\nSM cycle"):
        headers += [f"{what}\neach", "\n\nmulticast"]
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 9))
    first = next(iter(found.values()))[0]
    text += (
        f"\nSM cycles ({first.clock_source}) of a tile in every CTA, all SMs filled, "
        f"{first.config['num_stages']} stages; launch and fill cancel, the store of\nthe tile by each CTA is "
        "part of it; each: every CTA loads for itself, tensor copies share by share\nL2 bytes read per byte "
        f"that a CTA gets are counted, no clock involved; L2 {first.cache.value}"
    )
    return [(f"One copy for all CTAs of a cluster: {head}", text)]


def multicast_answers(records: Sequence[Record]) -> str:
    """Where a multicast is faster; empty when no pair was run."""
    groups: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
    for (device, form, cluster, per_sm, tile), (own, multicast) in pairs(records).items():
        gain = cycles(own) / cycles(multicast)
        where = f"{format_bytes(tile)} x {per_sm} per SM"
        groups.setdefault((f"{device} ({own.clock_source})", form, cluster), []).append((where, gain))
    if not groups:
        return ""
    rows = []
    for (device, form, cluster), gains in groups.items():
        pays = [f"{where}: {gain:.2f} x" for where, gain in gains if gain > 1 + TIE]
        costs = [f"{where}: {gain:.2f} x" for where, gain in gains if gain < 1 / (1 + TIE)]
        even = [where for where, gain in gains if 1 / (1 + TIE) <= gain <= 1 + TIE]
        rows.append([device, form, str(cluster), *["\n".join(cells) or "-" for cells in (pays, even, costs)]])
    headers = ["device (clock)", "form", "CTAs", "multicast is faster", "as fast", "slower"]
    note = (
        "Tile x CTAs per SM: speed against each CTA loading for itself. Every CTA stores what it gets, so a "
        "cluster of n\nspares the L2 (1 - 1/n) / 2 of its bytes, and each stage waits for all CTAs."
    )
    aligned = ("left", "left", "right", "left", "left", "left")
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned) + "\n" + note
