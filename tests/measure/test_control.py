"""The table of control operations."""

from __future__ import annotations

from smfree.measure.control import control_table
from smfree.measure.log import RunLog
from smfree.measure.records import Question, Record
from smfree.measure.tables import summary
from tests.measure.test_records import record


def row(device: str, operation: str, cycles: float, sass: float | None = 1.0) -> Record:
    return record(
        question=Question.CONTROL,
        device=device,
        clock_source="measured" if device.startswith("cuda") else "modelled",
        key={"operation": operation},
        samples_s=[cycles / 1e9],
        samples_cycles=[cycles],
        config={"sass_per_operation": sass},
    )


ROWS = [
    row("emu:a100", "arrive", 7.0, 2.0),
    row("emu:a100", "bar.sync", 33.0),
    row("cuda:0", "arrive", 12.4, 1.0),
    row("cuda:0", "arrive.expect_tx", 13.0, None),
    row("cuda:0", "bar.sync", 20.0),
]


def test_devices_stand_side_by_side_each_with_its_clock() -> None:
    lines = control_table(ROWS).splitlines()
    assert lines[2].split() == ["(modelled)", "(measured)"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[4:7]}
    assert cells == {
        "arrive": ["7", "2.0", "12", "1.0"],
        "arrive.expect_tx": ["-", "-", "13", "-"],
        "bar.sync": ["33", "1.0", "20", "1.0"],
    }
    assert list(cells) == ["arrive", "arrive.expect_tx", "bar.sync"]  # as the device that has most of them


def test_the_summary_has_it_once_and_says_how_it_was_verified() -> None:
    sections = dict(summary(RunLog(records=list(ROWS))))
    assert "What control costs: barriers and flags" in sections
    assert "timed: 5 control operations by what test_wait answers" in sections["smfree run"]
    mixed = dict(summary(RunLog(records=[*ROWS, record()])))["smfree run"]
    assert "timed: bitwise, 5 control operations by what test_wait answers" in mixed
    assert control_table([record()]) == ""
