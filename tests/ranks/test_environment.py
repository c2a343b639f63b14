"""Which rank a process is, from its environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smfree.ranks import RankError, UnixRendezvous, from_environment
from smfree.ranks.environment import local_ranks
from tests.ranks.kit import new_name

ROOT = Path(__file__).parents[2]
NAMES = ("SMFREE_RANK", "SMFREE_WORLD_SIZE", "SMFREE_RENDEZVOUS", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_our_variables_name_a_rank_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMFREE_RANK", "0")
    monkeypatch.setenv("SMFREE_WORLD_SIZE", "1")
    monkeypatch.setenv("SMFREE_RENDEZVOUS", new_name())
    with from_environment() as rendezvous:  # type: ignore[attr-defined]
        assert isinstance(rendezvous, UnixRendezvous)
        assert rendezvous.all_gather(b"x", "alone") == [b"x"]
    assert local_ranks() == (0, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing in the environment says which rank this is: start it with torchrun, set SMFREE_RANK"),
        ({"SMFREE_RANK": "0"}, "the environment lacks SMFREE_WORLD_SIZE, SMFREE_RENDEZVOUS; ranks need"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks MASTER_ADDR, MASTER_PORT; ranks need RANK, WORLD_SIZE"),
        (
            {"SMFREE_RANK": "one", "SMFREE_WORLD_SIZE": "2", "SMFREE_RENDEZVOUS": "x"},
            "SMFREE_RANK is a whole number (got 'one')",
        ),
    ],
)
def test_what_is_missing_is_named(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for ask in (from_environment, local_ranks):
        with pytest.raises(RankError) as caught:
            ask()
        assert message in str(caught.value)


def test_torchruns_variables_say_which_gpu_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("11", "16", "3", "8", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert local_ranks() == (3, 8)


def start(name: str, rank: int, device: str) -> subprocess.Popen[str]:
    """Rank ``rank`` of 2, with variables that any launcher can set."""
    script = (
        "import sys\n"
        "from smfree.ranks import join\n"
        "with join(sys.argv[1]) as context:\n"
        "    specs = context.rendezvous.all_gather(context.device.spec.encode(), 'specs')\n"
        "    print(context.rank, context.device.asarray([context.rank]).numpy(), specs)\n"
    )
    variables = {"SMFREE_RANK": str(rank), "SMFREE_WORLD_SIZE": "2", "SMFREE_RENDEZVOUS": name}
    return subprocess.Popen(
        [sys.executable, "-c", script, device],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_somebody_else_starts_join_and_share_a_served_node() -> None:
    """Rank 0 serves it."""
    name = new_name()
    ranks = [start(name, rank, "emu:h100x2") for rank in range(2)]
    printed = [process.communicate(timeout=120)[0].strip() for process in ranks]
    specs = [b"emu:h100x2:0", b"emu:h100x2:1"]
    assert printed == [f"{rank} [{rank}] {specs}" for rank in range(2)]
    assert [process.returncode for process in ranks] == [0, 0]


def test_d11_ranks_that_share_a_gpu_are_told_which_whatever_its_number() -> None:
    """Each has the one GPU that its string names: the same one."""
    name = new_name()
    ranks = [start(name, rank, "emu:h100x2:1") for rank in range(2)]
    for process in ranks:
        text = process.communicate(timeout=120)[1]
        assert process.returncode == 1
        assert re.search(r"ranks 0 and 1 both have the GPU [0-9a-f]{32}; .*several_per_gpu=True", text)
