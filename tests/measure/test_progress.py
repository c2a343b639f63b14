"""The progress line on a terminal and elsewhere."""

from __future__ import annotations

import io

from smfree.measure.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_rewritten_and_cleared() -> None:
    screen = Terminal()
    progress = Progress(2, screen, width=30)
    progress.begin("bench_latency[emu:h100-lsu-128B-128t-copy-L2]")
    progress.finish()
    progress.begin("second")
    progress.finish()
    text = screen.getvalue()
    assert "\n" not in text
    frames = text.split("\r\x1b[2K")
    assert frames[1] == "[1/2] bench_latency[emu:h100-l"
    assert frames[2] == "[2/2] second"
    assert frames[-1] == ""


def test_time_left_appears_once_there_is_something_to_judge_by() -> None:
    screen = Terminal()
    progress = Progress(10, screen)
    for index in range(6):
        progress.begin(f"point {index}")
        progress.finish()
    assert "s left] point 5" in screen.getvalue()
    assert "left] point 4" not in screen.getvalue()


def test_a_log_file_sees_nothing() -> None:
    log = io.StringIO()
    progress = Progress(3, log)
    progress.begin("point")
    progress.finish()
    progress.clear()
    assert not progress.enabled
    assert log.getvalue() == ""


def test_nothing_to_measure_shows_nothing() -> None:
    assert not Progress(0, Terminal()).enabled
