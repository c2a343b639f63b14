"""What the user reads at the end: one table per question, every header saying modelled or measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from smfree.measure.allgather import allgather_tables, gather_answers
from smfree.measure.allreduce import reduction_answers, reduction_tables
from smfree.measure.answers import answers
from smfree.measure.clusters import dsmem_table, multicast_answers, multicast_table, path_answers
from smfree.measure.control import control_table
from smfree.measure.host_costs import host_table, ipc_table
from smfree.measure.log import RunLog
from smfree.measure.marks import legend, marked, unique
from smfree.measure.peer_flags import peer_flag_table
from smfree.measure.pipelines import pipeline_tables, stage_answers
from smfree.measure.records import Question, Record
from smfree.model.crossover import format_bytes

Row = list[str]


def summary(log: RunLog) -> list[tuple[str, str]]:
    """(title, text) of every section, in reading order."""
    sections: list[tuple[str, str]] = []
    for device in unique(record.device for record in log.records):
        records = [record for record in log.records if record.device == device]
        modelled = records[0].modelled
        head = f"{device} ({records[0].clock_source})" if modelled else f"{records[0].gpu} (measured)"
        sections += latency_tables(head, [r for r in records if r.question is Question.LATENCY])
        sections += throughput_tables(head, records)
        sections += cost_table(head, records)
        sections += pipeline_tables(head, records)
        sections += dsmem_table(head, records)
        sections += multicast_table(head, records)
        sections += allgather_tables(head, records)
        sections += reduction_tables(head, records)
        sections += peer_flag_table(head, records)
        sections += ipc_table(head, records)
        sections += host_table(head, records)
    crossing = answers(log)
    if crossing:
        sections.append(("Which engine should move my tile? Crossovers against the LSU", crossing))
    control = control_table(log.records)
    if control:
        sections.append(("What control costs: barriers and flags", control))
    stages = stage_answers(log.records)
    if stages:
        sections.append(("How many stages until the copy is hidden?", stages))
    paths = path_answers(log.records)
    if paths:
        sections.append(("Which path carries a tile to the next CTA of a cluster?", paths))
    casts = multicast_answers(log.records)
    if casts:
        sections.append(("Where does one copy for all CTAs of a cluster pay?", casts))
    gather = gather_answers(log)
    if gather:
        sections.append(("Who should gather?", gather))
    reduced = reduction_answers(log)
    if reduced:
        sections.append(("Who should reduce?", reduced))
    sections.append(("smfree run", closing(log)))
    return sections


def grid(records: Sequence[Record], columns: Sequence[str], cell: Callable[[Record], str]) -> str:
    """Tile sizes down, one column per distinct tuple of the ``columns`` axes; the best cell of a group is
    starred."""
    heads = unique(tuple(record.key.get(name) for name in columns) for record in records)
    by_place = {(r.key["tile_bytes"], tuple(r.key.get(name) for name in columns)): r for r in records}
    rows = []
    for tile in sorted(unique(record.key["tile_bytes"] for record in records)):
        row = [format_bytes(tile)]
        for head in heads:
            record = by_place.get((tile, head))
            row.append("-" if record is None else marked(record, cell(record)))
        rows.append(row)
    return tabulate(
        rows,
        headers=["tile", *["\n".join(_head(value) for value in head) for head in heads]],
        disable_numparse=True,
        colalign=("right",) * (len(heads) + 1),
    )


def _head(value: Any) -> str:
    return value if isinstance(value, str) else "best" if value is None else str(value)


# --- latency ------------------------------------------------------------------------------------------------


def latency_tables(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """One table per leg and thread count: cycles of one tile, engines side by side, L2 and DRAM."""
    sections = []
    for leg, threads in unique((record.key["leg"], record.key["threads"]) for record in records):
        chosen = [r for r in records if (r.key["leg"], r.key["threads"]) == (leg, threads)]
        chosen.sort(key=lambda r: r.memory.value, reverse=True)
        clock = chosen[0].clock_source
        text = grid(chosen, ("memory", "engine"), lambda r: f"{r.cycles:.0f}")
        text += (
            f"\nSM cycles of one tile ({clock}), {LEG_MEANING.get(leg, leg)}; one CTA, chain of dependent "
            "tiles"
        )
        sections.append((f"Latency: {leg}, {threads} threads: {head}", text + legend(chosen)))
    return sections


LEG_MEANING = {
    "load": "until its last byte is readable in shared memory",
    "store": "until its last byte is in global memory",
    "copy": "global to shared to global",
}


# --- throughput ---------------------------------------------------------------------------------------------


def throughput_tables(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """One table at fixed bytes in flight, one with each engine at its best."""
    sections = []
    baselines = [r for r in records if r.question is Question.BASELINE]
    records = [r for r in records if r.question is Question.THROUGHPUT]
    fixed = [r for r in records if r.key.get("bytes_in_flight") is not None]
    best = [r for r in records if r.key.get("bytes_in_flight") is None]
    for amount in unique(record.key["bytes_in_flight"] for record in fixed):
        chosen = [r for r in fixed if r.key["bytes_in_flight"] == amount]
        title = f"Throughput at {format_bytes(amount)} in flight per SM: {head}"
        sections.append((title, _throughput(chosen)))
    if best:
        sections.append((f"Throughput, each engine at its best: {head}", _throughput(best)))
    if best or baselines:
        sections.append((f"Best of each engine, and baselines: {head}", best_table([*best, *baselines])))
    return sections


def _throughput(records: Sequence[Record]) -> str:
    def cell(record: Record) -> str:
        percent = record.percent_of_peak
        return f"{record.gbps:.0f}" + ("" if percent is None else f" {percent:3.0f}%")

    first = records[0]
    threads = unique(record.config.get("threads", "?") for record in records)
    same = f"{threads[0]} threads per CTA" if len(threads) == 1 else "threads per CTA as each engine likes"
    text = grid(records, ("engine",), cell)
    peak = (
        f"percent of the {first.memory.value} peak, {first.peak_gbps:.0f} GB/s"
        if first.peak_gbps
        else "peak unknown"
    )
    text += (
        f"\nGB/s read plus written ({first.clock_source}), GB = 1e9 bytes, and {peak};\n{same}; copies "
        f"of {format_bytes(first.traffic.payload_bytes)}; L2 {first.cache.value}"
    )
    return text + legend(records)


def best_table(records: Sequence[Record]) -> str:
    rows = []
    for engine in unique(record.key["engine"] for record in records):
        top = max((r for r in records if r.key["engine"] == engine), key=lambda r: r.gbps)
        percent = top.percent_of_peak
        rows.append(
            [
                engine,
                marked(top, f"{top.gbps:.0f}"),
                "-" if percent is None else f"{percent:.0f}%",
                format_bytes(top.key["tile_bytes"]) if "tile_bytes" in top.key else "-",
                *[str(top.config.get(name, "-")) for name in ("num_stages", "threads", "ctas_per_sm")],
                _in_flight(top),
            ]
        )
    headers = [
        "engine",
        f"GB/s ({records[0].clock_source})",
        "of peak",
        "tile",
        "stages",
        "threads",
        "CTAs/SM launched",
        "in flight",
    ]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _in_flight(record: Record) -> str:
    amount = record.config.get("bytes_in_flight_per_sm")
    return format_bytes(amount) + "/SM" if isinstance(amount, int | float) else "-"


# --- cost ---------------------------------------------------------------------------------------------------


def cost_table(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Why: instructions, registers and occupancy per engine, bytes in flight and unroll depth.

    Each at the tile nearest to 4 KiB, so that as many rows as can be compare the same tile.
    """
    copies = [record for record in records if record.question is Question.THROUGHPUT]
    seen: dict[tuple[Any, ...], Record] = {}
    for record in sorted(copies, key=_from_common_tile):
        key = (record.key["engine"], record.key.get("bytes_in_flight"), record.config.get("unroll"))
        seen.setdefault(key, record)
    regimes = list(dict.fromkeys(record.key.get("bytes_in_flight") for record in copies))
    seen = dict(sorted(seen.items(), key=lambda item: (regimes.index(item[0][1]), item[1].key["tile_bytes"])))
    if not seen:
        return []
    rows = []
    for (engine, amount, unroll), record in seen.items():
        cost = record.cost
        rows.append(
            [
                engine,
                "best" if amount is None else format_bytes(amount),
                _number(unroll, "d"),
                format_bytes(record.key["tile_bytes"]),
                _number(cost.ptx_per_kib, ".1f"),
                _number(cost.sass_per_kib, ".1f"),
                _number(cost.registers, "d"),
                _number(cost.ctas_per_sm, "d"),
                "-" if cost.occupancy is None else f"{cost.occupancy:.0%}",
                _number(cost.registers_per_byte, ".2f"),
            ]
        )
    headers = [
        "engine",
        "in flight\nper SM",
        "unroll",
        "tile",
        "PTX instr\nper KiB",
        "SASS instr\nper KiB",
        "registers\nper thread",
        "CTAs that\nfit an SM",
        "occupancy",
        "bytes through registers\nper byte copied",
    ]
    text = tabulate(rows, headers=headers, disable_numparse=True)
    text += (
        "\nwarp instructions; PTX counted while running, SASS of the loops that move the tile, from the "
        "cubin;\nexact, no clock involved"
    )
    for engine, path in {r.key["engine"]: r.config.get("path") for r in seen.values()}.items():
        text += f"\n{engine}: {path}" if path else ""
    return [(f"What each engine costs the SM: {head}", text)]


def _from_common_tile(record: Record) -> float:
    """How far the record's tile is from 4 KiB, in doublings."""
    return abs(math.log2(record.key["tile_bytes"] / 4096))


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


# --- end ----------------------------------------------------------------------------------------------------


def closing(log: RunLog) -> str:
    """Points, skips with their reasons, seconds by kind, files."""
    lines = list(log.devices.values())
    verified = (
        f", every one verified before it was timed: {_how(log.records)}" if log.records else " were timed"
    )
    lines.append(f"{len(log.records)} points{verified}")
    modelled = sum(record.modelled for record in log.records)
    if modelled:
        lines.append(
            f"{modelled} of them are modelled: times of a first-order cost model, not of a GPU; "
            "docs/emulator.md says what it leaves out"
        )
    for reason, count in _reasons(log).items():
        lines.append(f"skipped {count}: {reason}")
    for note in unique(note for record in log.records for note in record.notes)[:10]:
        lines.append(note)
    lines += log.notes
    spent = log.seconds
    shared = f", summed over {log.jobs} processes" if log.jobs > 1 else ""
    lines.append(f"compile {spent.compile:.1f} s, run {spent.run:.1f} s, verify {spent.verify:.1f} s{shared}")
    if log.files:
        lines += [f"results: {path}" for path in log.files]
    else:
        lines.append(
            "results were not kept: use --benchmark-json=PATH, or --benchmark-autosave to track regressions"
        )
    return "\n".join(lines)


def _how(records: Sequence[Record]) -> str:
    """By what the points were verified."""
    loads = sum(record.key.get("leg") == "load" for record in records)
    control = sum(record.question is Question.CONTROL for record in records)
    flags = sum(r.question is Question.PEER_FLAG and not r.key["data_bytes"] for r in records)
    bounded = sum(not record.config.get("bitwise", True) for record in records)
    parts = ["bitwise"] if loads + control + flags + bounded < len(records) else []
    parts += [f"{loads} load legs by the tile that their chain ends at"] if loads else []
    parts += [f"{control} control operations by what test_wait answers"] if control else []
    parts += [f"{bounded} sums in an unknown order within the bound of their roundings"] if bounded else []
    parts += [f"{flags} flags by both sides having played to the end"] if flags else []
    return ", ".join(parts)


def _reasons(log: RunLog) -> dict[str, int]:
    counts: dict[str, int] = {}
    for skip in log.skips:
        text = f"{skip.device}: {skip.reason}" if skip.device else skip.reason
        counts[text] = counts.get(text, 0) + 1
    return counts
