"""Ranks through a store of torch.distributed: one in memory, and, where there is torch, under torchrun."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smfree.ranks import PeerLost, RankError, RendezvousMismatch, RendezvousTimeout
from smfree.ranks.torch import TorchRendezvous
from tests.ranks.kit import under_torchrun


class MemoryStore:
    """The part of torch.distributed.Store that is used."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.broken = False

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
            return int(self.values[key])

    def set(self, key: str, value: bytes) -> None:
        if self.broken:
            raise RuntimeError("Broken pipe")
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def run(
    function: Callable[[TorchRendezvous], Any],
    hosts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    store: MemoryStore | None = None,
) -> list[Any]:
    """Each rank a thread, on the host that its place in ``hosts`` names."""
    local, shared = threading.local(), store or MemoryStore()
    monkeypatch.setattr("smfree.ranks.torch._host", lambda: local.host)

    def rank(number: int) -> Any:
        local.host = hosts[number]
        with TorchRendezvous(store=shared, rank=number, world_size=len(hosts), timeout_s=10) as rendezvous:
            return function(rendezvous)

    with ThreadPoolExecutor(len(hosts)) as pool:
        futures = [pool.submit(rank, number) for number in range(len(hosts))]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("hosts", ["aaa", "aabb", "a"])
def test_every_rank_gets_the_bytes_of_every_rank(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(rendezvous: TorchRendezvous) -> tuple[bool, list[list[bytes]]]:
        steps = []
        for step in range(3):
            steps.append(rendezvous.all_gather(bytes([rendezvous.rank, step]) * 1000, f"step {step}"))
            rendezvous.barrier("between")
            rendezvous.check("nothing")
        return rendezvous.one_host, steps

    store = MemoryStore()
    steps = [[bytes([rank, step]) * 1000 for rank in range(len(hosts))] for step in range(3)]
    found = run(exchange, list(hosts), monkeypatch, store)
    assert found == [(hosts != "aabb", steps)] * len(hosts)
    assert len(store.values) <= 3 * len(hosts), "keys of earlier calls are deleted"


def test_descriptors_stay_on_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(rendezvous: TorchRendezvous) -> str:
        with pytest.raises(RankError) as caught:
            rendezvous.recv_fd((rendezvous.rank + 2) % 4, "memory")
        with open("/dev/null") as file:
            rendezvous.send_fd(rendezvous.rank ^ 1, file.fileno(), "memory")
            with open(rendezvous.recv_fd(rendezvous.rank ^ 1, "memory")) as received:
                assert received.name > 2
        return str(caught.value)

    texts = run(send, ["a", "a", "b", "b"], monkeypatch)
    assert texts[0] == "recv_fd 'memory': a descriptor stays on its host, which has ranks 0 and 1 (got 2)"
    assert texts[3] == "recv_fd 'memory': a descriptor stays on its host, which has ranks 2 and 3 (got 1)"


def test_a_late_rank_of_another_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def late(rendezvous: TorchRendezvous) -> None:
        if rendezvous.rank == 1:
            done.wait(10)
            return
        try:
            rendezvous.barrier("start", timeout_s=0.1)
        finally:
            done.set()

    error, _ = run(late, ["a", "b"], monkeypatch)
    assert isinstance(error, RendezvousTimeout) and error.ranks == (1,)
    assert str(error).startswith("rank 0 waited 0.1 s in barrier 'start' for rank 1: not called, or gone")


def test_different_calls_on_two_hosts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(rendezvous: TorchRendezvous) -> None:
        if rendezvous.rank == 0:
            rendezvous.barrier("a")
        else:
            rendezvous.all_gather(b"", "b")

    first, second = run(differ, ["a", "b"], monkeypatch)
    assert isinstance(first, RendezvousMismatch) and isinstance(second, RendezvousMismatch)
    assert "rank 1 is in all_gather 'b' and rank 0 in barrier 'a'" in str(first)


def test_a_failure_on_this_host_ends_a_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail(rendezvous: TorchRendezvous) -> None:
        rendezvous.barrier("start")
        if rendezvous.rank == 1:
            failed.set()
            raise ValueError("bad shard")
        if rendezvous.rank == 2:
            failed.wait(10)
            return
        rendezvous.barrier("a")

    error = run(fail, ["a", "a", "b"], monkeypatch)[0]
    assert isinstance(error, PeerLost) and error.ranks == (1,)
    assert str(error) == "rank 0 waited in barrier 'a' for rank 1: rank 1 failed: ValueError: bad shard"


def test_a_lost_store_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    def lose(rendezvous: TorchRendezvous) -> None:
        rendezvous.barrier("start")
        store.broken = True
        rendezvous.barrier("end")

    for error in run(lose, ["a", "b"], monkeypatch, store):
        assert isinstance(error, PeerLost)
        assert "lost the store of torch.distributed: Broken pipe" in str(error)


def test_without_torch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RankError, match=r"ranks under torchrun need torch .*pip install 'smfree\[torch\]'"):
        TorchRendezvous()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with torch")
def test_ranks_join_under_torchrun(tmp_path: Path) -> None:
    """Two processes on an emulated node that the first one serves."""
    text = (
        "from smfree.ranks import join\n"
        "from tests.ranks.functions import read_the_others\n"
        "with join('emu:h100x2') as context:\n"
        "    said = ' '.join(map(str, (context.rank, *read_the_others(context))))\n"
        "    print(said + '\\n', end='', flush=True)\n"
    )
    printed = under_torchrun(tmp_path / "ranks.py", text, 2, timeout_s=120)
    expected = [[rank] * 8 for rank in range(2)]
    assert printed == [f"{rank} emu:h100x2:{rank} None {expected}" for rank in (0, 1)]
