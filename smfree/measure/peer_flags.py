"""The table of flags between GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from smfree.measure.marks import legend, marked
from smfree.measure.records import Question, Record
from smfree.model.crossover import format_bytes


def peer_flag_table(head: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """One row per message: one way in nanoseconds, and what it is more than the flag alone."""
    mine = [record for record in records if record.question is Question.PEER_FLAG]
    if not mine:
        return []
    alone = {r.key["ranks"]: r for r in mine if not r.key["release"]}
    rows = []
    for record in mine:
        base = alone.get(record.key["ranks"])
        more = "-" if base is None or base is record else f"+{(record.seconds - base.seconds) * 1e9:.0f}"
        rows.append(
            [
                str(record.key["ranks"]),
                message(record),
                marked(record, f"{record.seconds * 1e9:.0f}"),
                more,
                "-" if record.cycles is None else f"{record.cycles:.0f}",
            ]
        )
    first = mine[0]
    headers = [
        "ranks",
        "message",
        f"one way\nns ({first.clock_source})",
        "more than a\nflag alone",
        "SM cycles",
    ]
    text = tabulate(
        rows, headers=headers, disable_numparse=True, colalign=("right", "left", "right", "right", "right")
    )
    text += (
        f"\nover {first.config['path']}; half of a round trip between two polling kernels of one CTA, "
        f"{first.config['threads']} threads write the data;\nflag and data lie in the receiver's memory, "
        "whose L2 holds them. A release waits until all earlier writes have arrived"
    )
    return [(f"A flag from GPU to GPU: {head}", text + legend(mine))]


def message(record: Record) -> str:
    """What is sent."""
    if not record.key["release"]:
        return "flag, relaxed"
    data = record.key["data_bytes"]
    return f"{format_bytes(data)}, then a released flag" if data else "flag, released"
