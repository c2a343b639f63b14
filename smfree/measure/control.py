"""The table of control operations: cycles and instructions, devices side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from smfree.measure.records import Question, Record


def control_table(records: Sequence[Record]) -> str:
    """Operations down, devices across; empty when none was run."""
    mine = [record for record in records if record.question is Question.CONTROL]
    if not mine:
        return ""
    devices = list(dict.fromkeys(record.device for record in mine))
    clocks = {record.device: record.clock_source for record in mine}
    found = {(record.key["operation"], record.device): record for record in mine}
    rows = []
    lists = [[r.key["operation"] for r in mine if r.device == device] for device in devices]
    lists.sort(key=len, reverse=True)  # the order of the device that has most of them
    for operation in dict.fromkeys(name for names in lists for name in names):
        row = [operation]
        for device in devices:
            record = found.get((operation, device))
            sass = None if record is None else record.config.get("sass_per_operation")
            row.append("-" if record is None or record.cycles is None else f"{record.cycles:.0f}")
            row.append("-" if sass is None else f"{sass:.1f}")
        rows.append(row)
    headers = ["operation"]
    for device in devices:
        headers += [f"{device}\ncycles\n({clocks[device]})", "SASS\ninstr"]
    text = tabulate(
        rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * (2 * len(devices)))
    )
    return (
        f"{text}\none warp; a handover is an arrival of one warp and the return of the other one's wait; "
        "instructions of a waiting\nloop count once"
    )
