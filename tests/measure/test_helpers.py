"""Points run by helper processes: same results, no result lost, failures seen by the session."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from smfree.measure.helpers import Helpers
from tests.measure.conftest import BENCH, Run


def collect(helpers: Helpers, total: int, *, pause_s: float = 0.0) -> list[int | None]:
    """What the session gets: a helper's process id, or None for what it has to run itself."""
    found = []
    for number in range(total):
        found.append(helpers.result(number))
        time.sleep(pause_s)
    return found


def test_helpers_take_from_the_end_and_the_session_from_the_front() -> None:
    helpers = Helpers(20, 1)
    helpers.start(lambda number: (time.sleep(0.01), os.getpid())[1])
    try:
        found = collect(helpers, 20, pause_s=0.01)
    finally:
        helpers.close()
    mine = [number for number, result in enumerate(found) if result is None]
    theirs = [number for number, result in enumerate(found) if result is not None]
    assert theirs, "the helper did nothing"
    assert set(found) - {None} <= {result for result in found if result != os.getpid()}
    assert mine == list(range(len(mine)))
    assert theirs == list(range(len(mine), 20))


def test_a_job_that_a_helper_cannot_do_comes_back_to_the_session() -> None:
    helpers = Helpers(4, 1)
    helpers.start(lambda number: None if number == 3 else number)
    try:
        time.sleep(0.3)
        assert collect(helpers, 4) == [0, 1, 2, None]
    finally:
        helpers.close()


def test_a_helper_that_dies_loses_nothing() -> None:
    helpers = Helpers(4, 1)
    helpers.start(lambda number: os._exit(1) if number == 2 else number)
    try:
        time.sleep(0.3)
        assert collect(helpers, 4) == [None, None, None, 3]
    finally:
        helpers.close()


def test_without_helpers_the_session_runs_everything() -> None:
    helpers = Helpers(3, 0)
    helpers.start(lambda number: number)
    assert collect(helpers, 3) == [None, None, None]
    helpers.close()


def test_closing_ends_a_busy_helper_and_removes_its_files() -> None:
    helpers = Helpers(1, 1)
    helpers.start(lambda number: time.sleep(60))
    (child,) = helpers._children
    folder = helpers._folder
    helpers.close()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_helpers_of_a_killed_session_end_and_remove_its_files() -> None:
    """The session is a process of its own here, killed at once; its helper sees it before the next job."""
    receive, send = os.pipe()
    session = os.fork()
    if session == 0:
        helpers = Helpers(1000, 1)
        helpers.start(lambda number: time.sleep(0.01))
        os.write(send, f"{helpers._children[0]} {helpers._folder}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(session, 0)
    child, folder = os.read(receive, 4096).decode().split()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (_runs(int(child)) or Path(folder).exists()):
        time.sleep(0.01)
    assert not _runs(int(child))
    assert not Path(folder).exists()


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie (it belongs to whoever adopted it)."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_two_processes_report_what_one_reports(run_bench: Run, pytester: pytest.Pytester) -> None:
    slow = BENCH.replace("lambda: None)", "lambda: time.sleep(0.01))").replace(
        "import pytest", "import time\nimport pytest", 1
    )
    reports = {}
    for jobs in ("1", "2"):
        result = run_bench(
            "--device=emu:a100,emu:h100", f"--jobs={jobs}", f"--benchmark-json=out{jobs}.json", source=slow
        )
        result.assert_outcomes(passed=34, skipped=10)
        data = json.loads((pytester.path / f"out{jobs}.json").read_text())
        reports[jobs] = [(e["fullname"], e["stats"]["median"], e["extra_info"]) for e in data["benchmarks"]]
    assert reports["1"] == reports["2"]
    assert "summed over 2 processes" in result.stdout.str()


def test_a_wrong_result_in_a_helper_still_fails(run_bench: Run) -> None:
    wrong = BENCH.replace("stream), lambda: None)", "stream), lambda: 1 / 0)")
    result = run_bench("--jobs=3", source=wrong)
    result.assert_outcomes(passed=20, failed=2)
    result.stdout.fnmatch_lines(["*ZeroDivisionError*"])
