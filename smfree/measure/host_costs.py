"""Tables of what the host waits for: handles of other processes' memory, and copies of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from tabulate import tabulate

from smfree.measure.marks import legend, marked, unique
from smfree.measure.records import Question, Record
from smfree.model.crossover import Curve, format_bytes
from smfree.model.hockney import hockney

USE_BYTES = 4096
"""What a use copies out of a peer's memory: little, so that its time is that of reaching it."""


class Backing(StrEnum):
    """How memory is shared between processes."""

    IPC = "CUDA IPC"
    DESCRIPTOR = "file descriptor"


class Operation(StrEnum):
    """What the host does with another process's memory. A use: copy 4 KiB out of it and wait for them.
    Pooled: an offset, instead of get, open and close, where the memory is part of a slab that is open."""

    GET = "get"
    OPEN = "open"
    FIRST_USE = "first use"
    USE = "use"
    POOLED = "pooled"
    CLOSE = "close"


class HostMemory(StrEnum):
    """Where the host's side of a copy lies; ``FAR``: pinned on a NUMA node that is not the GPU's."""

    PINNED = "pinned"
    PAGEABLE = "pageable"
    FAR = "pinned, far node"


class Direction(StrEnum):
    """Which way a copy of host memory goes."""

    TO_DEVICE = "to device"
    TO_HOST = "to host"
    BOTH = "both"


def ipc_table(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Microseconds of each operation, a row for each backing, size and number of peers."""
    mine = [record for record in records if record.question is Question.IPC_COST]
    if not mine:
        return []
    rows: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in mine:
        place = tuple(record.key[name] for name in ("backing", "nbytes", "peers"))
        rows.setdefault(place, {})[record.key["operation"]] = record
    cells = [
        [backing, format_bytes(nbytes), peers, *[_us(row.get(operation)) for operation in Operation]]
        for (backing, nbytes, peers), row in rows.items()
    ]
    headers = ["shared by", "allocation", "peers", *[operation.value for operation in Operation]]
    align = ("left", *["right"] * (len(headers) - 1))
    text = tabulate(cells, headers=headers, disable_numparse=True, colalign=align)
    text += (
        f"\nus of the host ({mine[0].clock_source}) for one handle: mean over the peers, slowest rank; all "
        f"ranks at once. A use\ncopies {format_bytes(USE_BYTES)} out of the peer's memory and waits. Pooled: "
        "an offset in a slab that is open, which\ntakes the place of get, open and close"
    )
    if mine[0].modelled:
        text += (
            "\nmodelled: get, open and close are one public row (2019, GPU not named), whatever the size; a "
            "first use costs\nwhat a later one costs; Python costs nothing"
        )
    elif any(record.config["gpus"] <= record.key["peers"] for record in mine):
        text += "\nranks share GPUs, fewer than ranks: times of several GPUs may differ"
    return [(f"What handles of other processes' memory cost: {head}", text + legend(mine))]


def _us(record: Record | None) -> str:
    return "-" if record is None else marked(record, f"{record.seconds * 1e6:.1f}")


def host_table(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """GB/s by size, a column for each memory and direction, and the start-up and rate of each column."""
    mine = [record for record in records if record.question is Question.HOST_COPY]
    if not mine:
        return []
    columns = unique((record.key["memory"], record.key["direction"]) for record in mine)
    found = {(r.key["nbytes"], r.key["memory"], r.key["direction"]): r for r in mine}
    rows = [
        [format_bytes(nbytes), *[_gbps(found.get((nbytes, *column))) for column in columns]]
        for nbytes in sorted(unique(record.key["nbytes"] for record in mine))
    ]
    for name, of in (("start-up, us", _startup_us), ("rate, GB/s", _rate_gbps)):
        rows.append([name, *[of([r for r in mine if _column(r) == column]) for column in columns]])
    headers = ["each way", *["\n".join(column) for column in columns]]
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=("right",) * len(headers))
    text += (
        f"\nGB/s of payload ({mine[0].clock_source}), both ways together in 'both'; from the call until the "
        "host knows that it\nis done. Start-up and rate: line through all sizes"
    )
    return [(f"Copies of host memory: {head}", text + legend(mine))]


def _column(record: Record) -> tuple[str, str]:
    return record.key["memory"], record.key["direction"]


def _gbps(record: Record | None) -> str:
    return "-" if record is None else marked(record, f"{_rate(record):.2f}")


def _rate(record: Record) -> float:
    return record.traffic.payload_bytes / record.seconds / 1e9


def _line(records: Sequence[Record], value: Callable[[Any], str]) -> str:
    samples = {record.traffic.payload_bytes: record.samples_s for record in records}
    return value(hockney(Curve("", samples))) if len(samples) > 1 else "-"


def _startup_us(records: Sequence[Record]) -> str:
    return _line(records, lambda line: f"{line.alpha * 1e6:.1f}")


def _rate_gbps(records: Sequence[Record]) -> str:
    return _line(records, lambda line: f"{line.beta / 1e9:.1f}")
