"""Ranks as child processes: results, failures, deaths, hangs; nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from smfree.cuda import Device
from smfree.ranks import PeerLost, RankError, RankFailed, spawn
from tests.ranks import functions

ROOT = Path(__file__).parents[2]


def children() -> set[str]:
    """This process's children; multiprocessing keeps a tracker of its own."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in listed if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_each_rank_knows_who_it_is_and_gets_the_arguments() -> None:
    before, fds = children(), len(os.listdir("/proc/self/fd"))
    assert spawn(functions.who, 3, "a", 7, device=None) == [(rank, 3, rank, ("a", 7)) for rank in range(3)]
    assert children() == before and len(os.listdir("/proc/self/fd")) <= fds + 2  # the tracker's pipe


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "-c",
            "RankError: a rank's process imports what it shall call, and cannot (AttributeError: ",
        ),
        (
            "file",
            "RankError: spawn was called while a rank's process imported the script that calls it; call",
        ),
    ],
)
def test_a_script_whose_ranks_cannot_import_it_is_told_why(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = "from smfree.ranks import spawn\ndef work(context): pass\nspawn(work, 2, device=None)\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, *(["-c", script] if given == "-c" else ["script.py"])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr


def test_one_rank_is_a_world() -> None:
    assert spawn(functions.exchange, 1, 5, device=None) == [[0]]


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_others_end() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        spawn(functions.fail, 3, 1, "raises", device=None)
    assert time.monotonic() - started < 30
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 failed: Traceback") and "in fail\n" in text
    assert "ShardError: shard 7 is empty\nthen rank " in text
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, functions.ShardError)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("stubborn", "tests.ranks.functions.Stubborn: 1 and 2"),
        ("killed", "rank 1 of 2 was killed by SIGKILL"),
        ("exits", "rank 1 of 2 ended its process with exit code 3"),
        ("sys.exit", "SystemExit: enough"),
    ],
)
def test_whatever_a_rank_dies_of_is_told(how: str, text: str) -> None:
    with pytest.raises(RankFailed) as caught:
        spawn(functions.fail, 2, 1, how, device=None)
    assert text in str(caught.value) and caught.value.rank == 1
    assert "then rank 0 failed: smfree.ranks.errors.PeerLost: rank 0 waited in barrier" in str(caught.value)
    assert not isinstance(caught.value.__cause__, PeerLost)


def test_survivors_are_told_who_was_killed_and_their_results_are_kept() -> None:
    with pytest.raises(RankFailed, match="rank 0 of 3 was killed by SIGKILL") as caught:
        spawn(functions.survive, 3, device=None)
    results = caught.value.results
    assert results.keys() == {1, 2}
    for rank, text in results.items():
        assert text.startswith(f"rank {rank} waited in kernels for rank 0: rank 0 ")
        assert "was killed by SIGKILL" in text or "has died (its process" in text


def test_a_rank_that_hangs_is_shown_where() -> None:
    with pytest.raises(RankFailed) as caught:
        spawn(functions.hang, 2, 1, device=None, timeout_s=4)
    text = str(caught.value)
    assert text.startswith("rank 1 did not end within 4 s\nrank 1 is at:\n") and "in hang" in text
    assert caught.value.results == {0: None}


def test_a_deaf_rank_is_killed_after_the_grace_period() -> None:
    before = children()
    with pytest.raises(RankFailed, match="rank 0 of 2 failed") as caught:
        spawn(functions.fail_beside_a_deaf_rank, 2, device=None, grace_s=0.5)
    assert isinstance(caught.value.__cause__, functions.ShardError)
    assert children() == before


def test_a_rank_that_dies_after_it_returned_has_failed() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 returned, then ended its process with exit code 7"):
        spawn(functions.return_and_die, 2, device=None)


def test_a_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailed, match=r"Can't (pickle|get) local object"):
        spawn(functions.unreadable, 1, device=None)


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """SIGKILL: the launcher, its ranks and the node's server are gone within a few seconds."""
    pid_file = tmp_path / "pids"
    launcher = multiprocessing.get_context("spawn").Process(
        target=functions.spawn_and_wait, args=(str(pid_file),)
    )
    launcher.start()
    deadline = time.monotonic() + 60
    while not pid_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    pids, names = pid_file.read_text().splitlines()
    assert set(pids.split()) < set(listed)
    assert launcher.pid is not None
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.join()
    deadline = time.monotonic() + 5
    while (left := _left(listed, names.split())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _left(pids: list[str], names: list[str]) -> list[str]:
    """The processes that live, and the names that sockets still have: a process whose first thread is gone
    keeps its sockets until the last one is."""
    sockets = Path("/proc/net/unix").read_text()
    return [pid for pid in pids if _alive(pid)] + [name for name in names if name in sockets]


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_d12_only_spawn_starts_ranks(method: str) -> None:
    """Also when CUDA (here: emulated) was initialised already."""
    with Device.open("emu:h100"), pytest.raises(RankError) as caught:
        spawn(functions.who, 2, device=None, start_method=method)
    assert f"started with the method spawn (got '{method}'): a process forked after CUDA was" in str(
        caught.value
    )


def test_d12_importing_initialises_nothing() -> None:
    script = (
        "import smfree.ranks\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libnvrtc' not in maps and 'libcuda.so' not in maps, maps\n"
        "import sys\n"
        "assert 'triton' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_function_that_no_process_can_import_is_refused() -> None:
    def inner(context: object) -> None:
        del context

    with pytest.raises(RankError, match="lives at a module's top level"):
        spawn(inner, 2, device=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 0}, "there is at least one rank (got world_size 0); use a whole number"),
        ({"world_size": 1.5}, "there is at least one rank (got world_size 1.5)"),
        ({"timeout_s": 0}, "timeout_s is a positive number of seconds (got 0); inf: no limit"),
        ({"timeout_s": float("nan")}, "timeout_s is a positive number of seconds (got nan)"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError) as caught:
        spawn(functions.who, **{"world_size": 2, "device": None, **given})
    assert message in str(caught.value)


def test_an_argument_that_cannot_travel_is_refused() -> None:
    with pytest.raises(RankError, match=r"gets is pickled, and this cannot be .*'_thread.lock' object"):
        spawn(functions.who, 1, threading.Lock(), device=None)


def test_an_argument_that_a_rank_cannot_unpickle_is_that_ranks_failure() -> None:
    """Also: a rank that ends with an exception whose text cannot be had says so, and no time limit is one."""
    with pytest.raises(RankFailed, match=r"rank \d of 2 failed: Traceback(.|\n)*ZeroDivisionError"):
        spawn(functions.who, 2, functions.Poisoned(), device=None, timeout_s=float("inf"))
    with pytest.raises(RankFailed, match=r"rank 0 of 1 failed: (.|\n)*Mute: <exception str\(\) failed>$"):
        spawn(functions.raise_mutely, 1, device=None)


def test_a_schedule_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule is one of timed, .*random \(got 'fast'\)"):
        spawn(functions.who, 1, device="emu:h100", schedule="fast")


def test_more_ranks_than_gpus_are_refused_unless_they_may_share() -> None:
    with pytest.raises(
        RankError, match=r"emu:h100x2 has 2 GPUs for 3 ranks; name more .*emu:h100x3.*several"
    ):
        spawn(functions.who, 3, device="emu:h100x2")


# --- devices -----------------------------------------------------------------------------------------


def test_ranks_on_a_served_node_exchange_memory_through_ipc() -> None:
    """Each reads what every other has put into its own memory; two of the three share a GPU."""
    before = children()
    found = spawn(functions.read_the_others, 3, device="emu:h100x2", several_per_gpu=True)
    contents = [[rank] * 8 for rank in range(3)]
    assert found == [(f"emu:h100x2:{ordinal}", None, contents) for ordinal in (0, 1, 0)]
    assert children() == before


def test_kill_9_of_the_nodes_server_is_told_to_every_rank() -> None:
    for text in spawn(functions.lose_the_node, 2, device="emu:h100x2"):
        assert text.startswith(("DeviceLostError after 0 s: ", "DeviceLostError after 1 s: ")), text
        assert "node" in text
