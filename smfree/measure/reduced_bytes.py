"""What a reduction moves through links, memory and SMs: counted on emulated GPUs, beside what is on paper.

In units of the message, per rank. Signals are counted apart; the polling of words in own memory is in what
goes through registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from smfree.measure.records import Question, Record
from smfree.model.collectives import expected_sent_bytes, expected_steps, reduce_scatter_sent_bytes
from smfree.model.crossover import format_bytes

#: What is counted of each column, beside the link's.
COLUMNS = {
    "memory\nread": ("dram_read_bytes",),
    "memory\nwritten": ("dram_write_bytes",),
    "copy engine\nread + written": ("copy_engine_read_bytes", "copy_engine_write_bytes"),
    "through\nregisters": ("bytes_through_registers",),
    "through shared\nmemory (TMA)": ("bytes_async",),
}


def amounts(record: Record, *names: str) -> list[float]:
    """By rank."""
    found = [record.per_rank[name] for name in names if name in record.per_rank]
    return [sum(one) for one in zip(*found, strict=True)] or [0.0] * record.key["ranks"]


def sent_bytes(record: Record) -> list[float]:
    """What left each rank over its link, without signals: stores, copies, and what others have loaded."""
    links = amounts(record, "nvlink_sent_bytes", "pcie_sent_bytes")
    signals = amounts(record, "peer_signal_bytes")
    return [link - signal for link, signal in zip(links, signals, strict=True)]


def expected_mean(record: Record) -> float | None:
    """Bytes that a rank sends on paper, the mean over ranks; None for an algorithm that is not known."""
    ranks, size, way = record.key["ranks"], record.key["message_bytes"], record.key["way"]
    element = record.config["element_bytes"]
    count = size // element
    if record.question is Question.REDUCE_SCATTER:
        return sum(reduce_scatter_sent_bytes(count, element, ranks, rank) for rank in range(ranks)) / ranks
    if way == "tree":  # each edge carries its tree's half of the message both ways
        return 2 * (ranks - 1) * size / ranks
    try:
        return sum(expected_sent_bytes(way, count, element, ranks, rank) for rank in range(ranks)) / ranks
    except ValueError:
        return None


def steps_of(record: Record) -> int | None:
    """Sends on the longest path; None for an algorithm that is not known. A ReduceScatter is the first half
    of an AllReduce, directly it is one step."""
    if record.key["way"] == "direct":
        return 1
    try:
        steps = expected_steps(record.key["way"], record.key["ranks"])
    except ValueError:
        return None
    return steps if record.question is Question.ALLREDUCE else steps // 2


def reduced_bytes(records: Sequence[Record]) -> str:
    """A table of the ways that were counted; empty on a real GPU, which does not tell."""
    rows = []
    for record in records:
        expected = expected_mean(record)
        if expected is None or not record.counters:
            continue
        size, sent = record.key["message_bytes"], sent_bytes(record)
        row = [
            record.key["way"],
            _steps(record),
            str(record.config["ctas"]),
            f"{max(amounts(record, 'peer_signals')):.0f}",
            f"{sum(sent) / len(sent) / size:.2f} ({expected / size:.2f})",
            f"{max(sent) / size:.2f}",
        ]
        row += [f"{max(amounts(record, *names)) / size:.2f}" for names in COLUMNS.values()]
        rows.append(row)
    if not rows:
        return ""
    first = records[0]
    headers = [
        "way", "steps\n(formula)", "CTAs", "signals\nsent", "link sent,\nmean (formula)",
        "by the rank\nwith most", *COLUMNS,
    ]  # fmt: skip
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 10))
    return text + (
        f"\nmessages of {format_bytes(first.key['message_bytes'])} of {first.key['dtype']} per rank, N = "
        f"{first.key['ranks']}; steps, CTAs and signals are numbers, all else is in messages, of the rank "
        "with most.\nCounted; in parentheses: what the formula says. Steps: sends that wait for each other; "
        "counted for rings only.\nSignals: of all CTAs together, to every peer; 4 bytes each, not in what "
        "the link sent.\nMemory: DRAM, for kernels, the L2 cold; copy engines ask the L2, each time. No "
        "clock involved"
    )


def _steps(record: Record) -> str:
    """Counted where the signals tell, and by the formula."""
    counted = record.config.get("steps")
    return ("-" if counted is None else f"{counted:g}") + f" ({steps_of(record)})"
