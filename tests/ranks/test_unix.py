"""Ranks over Unix sockets: what they exchange, and what each is told when another is late, wrong or dead."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from smfree.ranks import (
    PeerLost,
    RankError,
    RankFailed,
    Rendezvous,
    RendezvousMismatch,
    RendezvousTimeout,
    UnixRendezvous,
)
from tests.ranks.kit import as_threads, new_name


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "error", [PeerLost("gone", [1, 2]), RendezvousTimeout("late", [3]), RankFailed("failed", 4)], ids=repr
)
def test_errors_survive_the_way_to_another_process(error: RankError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


# --- exchange ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_rank_gets_the_bytes_of_every_rank(world_size: int) -> None:
    def exchange(rendezvous: Rendezvous) -> list[bytes]:
        mine = bytes([rendezvous.rank]) * rendezvous.rank
        rendezvous.barrier("before")
        gathered = rendezvous.all_gather(mine, "some bytes")
        rendezvous.check("nothing")
        return gathered

    before = open_fds()
    expected = [bytes([rank]) * rank for rank in range(world_size)]
    assert as_threads(exchange, world_size) == [expected] * world_size
    assert open_fds() == before


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 16, (1 << 18) + 1, 5_000_000])
def test_payloads_have_any_size(nbytes: int) -> None:
    """Also far more than a socket holds, of all ranks at once."""

    def exchange(rendezvous: Rendezvous) -> bool:
        data = bytes([rendezvous.rank + 1]) * (nbytes + rendezvous.rank)
        gathered = rendezvous.all_gather(data, "bulk")
        return gathered == [bytes([rank + 1]) * (nbytes + rank) for rank in range(3)]

    assert as_threads(exchange, 3) == [True] * 3


def test_a_fast_rank_may_be_a_call_ahead() -> None:
    def exchange(rendezvous: Rendezvous) -> list[list[bytes]]:
        if rendezvous.rank == 1:
            time.sleep(0.05)
        return [rendezvous.all_gather(b"%d" % step, f"step {step}") for step in range(20)]

    steps = [[b"%d" % step] * 3 for step in range(20)]
    assert as_threads(exchange, 3) == [steps] * 3


def test_descriptors_go_from_rank_to_rank() -> None:
    def exchange(rendezvous: Rendezvous) -> list[bytes]:
        others = [rank for rank in range(3) if rank != rendezvous.rank]
        memory = os.memfd_create("test")
        os.write(memory, b"of rank %d" % rendezvous.rank)
        for rank in others:
            rendezvous.send_fd(rank, memory, "memory")
        os.close(memory)
        found = []
        for rank in others:
            fd = rendezvous.recv_fd(rank, "memory")
            assert not os.get_inheritable(fd)
            found.append(os.pread(fd, 100, 0))
            os.close(fd)
        rendezvous.barrier("all have theirs")
        return found

    before = open_fds()
    assert as_threads(exchange, 3) == [
        [b"of rank 1", b"of rank 2"],
        [b"of rank 0", b"of rank 2"],
        [b"of rank 0", b"of rank 1"],
    ]
    assert open_fds() == before


def test_a_descriptor_that_nobody_takes_is_closed() -> None:
    def exchange(rendezvous: UnixRendezvous) -> None:
        if rendezvous.rank == 0:
            with open(os.devnull) as file:
                rendezvous.send_fd(1, file.fileno(), "unwanted")
        else:
            time.sleep(0.05)
            rendezvous.check()

    before = open_fds()
    assert as_threads(exchange, 2) == [None, None]
    assert open_fds() == before


def test_alone_there_is_nobody_to_send_to() -> None:
    with (
        UnixRendezvous(new_name(), 0, 1) as rendezvous,
        pytest.raises(RankError, match=r"send_fd 'x': a descriptor goes to another rank.*\(got 0\)"),
    ):
        rendezvous.send_fd(0, 0, "x")
    with pytest.raises(RankError, match="this rendezvous of rank 0 is closed"):
        rendezvous.barrier("after")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(RankError, match=f"got rank {rank} of {world_size}"):
        UnixRendezvous(new_name(), rank, world_size)


# --- late, and wrong ---------------------------------------------------------------------------------


def test_ranks_that_never_came_are_named() -> None:
    with pytest.raises(
        RendezvousTimeout, match=r"rank 1 waited 0.1 s for ranks 0, 2 and 3 to come"
    ) as caught:
        UnixRendezvous(new_name(), 1, 4, timeout_s=0.1)
    assert caught.value.ranks == (0, 2, 3)


def test_a_rank_that_does_not_call_is_told_from_a_dead_one() -> None:
    def late(rendezvous: Rendezvous) -> None:
        rendezvous.barrier("start")
        if rendezvous.rank == 1:
            time.sleep(0.5)
        else:
            rendezvous.all_gather(b"", "ipc handles", timeout_s=0.1)

    first, second, third = as_threads(late, 3)
    assert isinstance(first, RendezvousTimeout | PeerLost) and isinstance(third, RendezvousTimeout | PeerLost)
    texts = [str(error) for error in (first, third) if isinstance(error, RendezvousTimeout)]
    assert texts and texts[0].endswith(
        "waited 0.1 s in all_gather 'ipc handles' for rank 1: rank 1 is alive but has not called; its last "
        "call was barrier 'start'"
    )
    assert second is None


@pytest.mark.parametrize("other", ["all_gather 'b'", "barrier 'b'", "send_fd 'a'"])
def test_different_calls_are_an_error_that_names_both(other: str) -> None:
    def differ(rendezvous: Rendezvous) -> None:
        if rendezvous.rank == 0:
            rendezvous.barrier("a")
        elif other.startswith("all_gather"):
            rendezvous.all_gather(b"", "b")
        elif other.startswith("barrier"):
            rendezvous.barrier("b")
        else:
            rendezvous.send_fd(0, 0, "a")
            rendezvous.recv_fd(0, "a")

    errors = as_threads(differ, 2)
    text = f"rank 1 is in {other} and rank 0 in barrier 'a'; all ranks must make the same calls"
    mirrored = f"rank 0 is in barrier 'a' and rank 1 in {other}"
    assert any(isinstance(error, RendezvousMismatch) for error in errors)
    assert all(isinstance(error, RendezvousMismatch | PeerLost) for error in errors)
    assert any(text in str(error) or mirrored in str(error) for error in errors)


def test_waiting_for_a_descriptor_of_a_rank_that_waits_for_us_is_an_error() -> None:
    def differ(rendezvous: Rendezvous) -> None:
        if rendezvous.rank == 0:
            rendezvous.barrier("a")
        else:
            rendezvous.recv_fd(0, "memory")

    _, error = as_threads(differ, 2)
    assert isinstance(error, RendezvousMismatch)
    assert "rank 0 is in barrier 'a' and rank 1 in recv_fd 'memory'" in str(error)


def test_after_a_failure_the_rendezvous_says_so() -> None:
    def fail(rendezvous: Rendezvous) -> str:
        if rendezvous.rank == 1:
            time.sleep(0.3)
            return ""
        with pytest.raises(RendezvousTimeout):
            rendezvous.barrier("a", timeout_s=0.05)
        with pytest.raises(RankError) as caught:
            rendezvous.barrier("b")
        return str(caught.value)

    text = as_threads(fail, 2)[0]
    assert text.startswith(
        "barrier 'b': this rendezvous had failed before: rank 0 waited 0.05 s in barrier 'a'"
    )


def test_two_processes_of_one_rank_are_refused() -> None:
    name = new_name()
    address = f"\0smfree-{os.geteuid()}-{name}-0"
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(address)
        with pytest.raises(RendezvousMismatch, match=r"rank 0 of rendezvous .* is already here"):
            UnixRendezvous(name, 0, 2, timeout_s=0.2)


def test_worlds_of_another_size_are_refused() -> None:
    name = new_name()
    child = multiprocessing.get_context("spawn").Process(target=_join_world, args=(name, 1, 3))
    child.start()
    with pytest.raises(RendezvousMismatch, match="as rank 1 of 3; rank 0 knows 2 ranks"):
        UnixRendezvous(name, 0, 2, timeout_s=20)
    child.kill()
    child.join()


def _join_world(name: str, rank: int, world_size: int) -> None:
    UnixRendezvous(name, rank, world_size)


def test_another_users_process_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the listener of rank 0 belonged to user 12345."""
    from smfree.ranks.wire import Link

    name = new_name()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0smfree-{os.geteuid()}-{name}-0")
        squatter.listen()
        monkeypatch.setattr(Link, "peer", property(lambda link: (1, 12345)))
        with pytest.raises(RendezvousMismatch, match="another user's process has taken the name of rank 0"):
            UnixRendezvous(name, 1, 2, timeout_s=1)


# --- dead, failed, left ------------------------------------------------------------------------------


def test_a_rank_that_closes_is_missed_only_by_those_that_wait_for_it() -> None:
    def leave(rendezvous: UnixRendezvous) -> Any:
        rendezvous.barrier("start")
        if rendezvous.rank == 0:
            rendezvous.close()
            return None
        time.sleep(0.1)
        rendezvous.check("kernels")  # it left in peace
        with pytest.raises(PeerLost) as caught:
            rendezvous.barrier("end")
        return str(caught.value)

    _, text = as_threads(leave, 2)
    assert text == "rank 1 waited in barrier 'end' for rank 0: rank 0 has closed its rendezvous"


def test_a_rank_that_failed_tells_the_others_why() -> None:
    def fail(rendezvous: UnixRendezvous) -> Any:
        rendezvous.barrier("start")
        if rendezvous.rank == 2:
            raise ValueError("bad shard")
        started = time.monotonic()
        try:
            while time.monotonic() < started + 5:
                rendezvous.check("the kernels of step 3")
        except PeerLost as error:
            assert error.ranks == (2,)
            return str(error)

    first, second, third = as_threads(fail, 3)
    how = "waited in the kernels of step 3 for rank 2: rank 2 failed: ValueError: bad shard"
    assert isinstance(third, ValueError)
    assert (first, second) == (f"rank 0 {how}", f"rank 1 {how}")


def _rank(name: str, rank: int, pipe: Connection, mode: str) -> None:
    """A rank that waits for ever (rank 1 holds a forked child, too), or says how its wait ended, and when."""
    rendezvous = UnixRendezvous(name, rank, 3)
    if rank == 1 and mode == "forked" and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    rendezvous.barrier("start")
    pipe.send(os.getpid())
    try:
        if rank == 1:
            time.sleep(60)
        elif rank == 0:
            rendezvous.all_gather(b"", "ipc handles")
        else:
            while True:
                rendezvous.check("kernels")
                time.sleep(0.01)
    except PeerLost as error:
        pipe.send((time.monotonic(), str(error)))
        pipe.recv()  # its own end would be noticed, too


@pytest.mark.parametrize("mode", ["alone", "forked"])
def test_kill_9_is_noticed_at_once_by_all(mode: str) -> None:
    """Waiting in a call or polling; also when a child of the dead rank still holds its sockets."""
    context = multiprocessing.get_context("spawn")
    name, pipes, processes = new_name(), [], []
    for rank in range(3):
        here, there = context.Pipe()
        processes.append(context.Process(target=_rank, args=(name, rank, there, mode)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    pids = [pipe.recv() for pipe in pipes]
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    waits = ((0, "all_gather 'ipc handles' for ranks 1 and 2"), (2, "kernels for rank 1"))
    for rank, doing in waits:
        assert pipes[rank].poll(10)
        when, text = pipes[rank].recv()
        assert text == (f"rank {rank} waited in {doing}: rank 1 has died (its process {pids[1]} is gone)")
        assert when - killed < 1
    for pipe in (pipes[0], pipes[2]):
        pipe.send("end")
    for process in processes:
        process.join()
