"""What the ranks of the tests do: functions that a child process can import."""

from __future__ import annotations

import multiprocessing.util
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from smfree.cuda import CudaHostError
from smfree.cuda.ipc import export, ipc_unavailable
from smfree.ranks import PeerLost, RankContext


def who(context: RankContext, *args: Any) -> tuple[int, int, int, tuple[Any, ...]]:
    return context.rank, context.world_size, context.local_rank, args


def exchange(context: RankContext, nbytes: int) -> list[int]:
    gathered = context.rendezvous.all_gather(bytes([context.rank]) * nbytes, "bytes")
    return [len(data) * data[0] for data in gathered]


class ShardError(Exception):
    """An exception that pickles."""


class Stubborn(Exception):
    """One that does not."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail(context: RankContext, bad: int, how: str) -> str:
    """Rank ``bad`` fails in its own way, the others wait for it in a barrier and then pass the error on."""
    context.rendezvous.barrier("start")
    if context.rank == bad:
        if how == "raises":
            raise ShardError("shard 7 is empty")
        if how == "stubborn":
            raise Stubborn(1, 2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        if how == "sys.exit":
            raise SystemExit("enough")
    context.rendezvous.barrier("end")
    return "never"


def survive(context: RankContext) -> str:
    """Rank 0 is killed; the others return what they were told of it."""
    context.rendezvous.barrier("start")
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            context.rendezvous.check("kernels")
            time.sleep(0.005)
    except PeerLost as error:
        return str(error)


class Poisoned:
    """It pickles, and no more."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


class Mute(Exception):
    """It says nothing."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raise_mutely(context: RankContext) -> None:
    raise Mute


def hang(context: RankContext, hanging: int) -> None:
    """Deaf to everything but SIGKILL."""
    if context.rank == hanging:
        while True:
            time.sleep(1)


def fail_beside_a_deaf_rank(context: RankContext) -> None:
    if context.rank == 0:
        raise ShardError("first")
    while True:
        time.sleep(1)


def return_and_die(context: RankContext) -> int:
    """The process does not survive its own end."""
    if context.rank == 1:
        multiprocessing.util.Finalize(None, os._exit, (7,), exitpriority=1)
    return context.rank


def unreadable(context: RankContext) -> Any:
    return lambda: None


def spawn_and_wait(pid_file: str) -> None:
    """For a process that a test kills: ranks that write down their pids and wait."""
    from smfree.ranks import spawn

    spawn(write_pid_and_wait, 2, pid_file, device="emu:h100x2")


def write_pid_and_wait(context: RankContext, pid_file: str) -> None:
    pids = context.rendezvous.all_gather(str(os.getpid()).encode(), "pids")
    if context.rank == 0:
        names = [os.environ["SMFREE_RENDEZVOUS"].encode(), os.environ["SMFREE_NODE"].encode()]
        with open(pid_file + ".new", "wb") as file:
            file.write(b" ".join(pids) + b"\n" + b" ".join(names))
        os.rename(pid_file + ".new", pid_file)
    while True:
        time.sleep(1)


def lose_the_node(context: RankContext) -> str:
    """Rank 0 kills the process that serves the emulated GPUs; what each is told at its next call."""
    array = context.device.asarray(np.arange(4))
    context.rendezvous.barrier("start")
    if context.rank == 0:
        siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        (server,) = [
            pid for pid in siblings if b"emulator.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(int(server), signal.SIGKILL)
    killed = time.monotonic()
    try:
        while time.monotonic() < killed + 10:
            array.numpy()
    except CudaHostError as error:
        return f"{type(error).__name__} after {time.monotonic() - killed:.0f} s: {error}"
    return "nothing"


def read_the_others(context: RankContext) -> tuple[str, str | None, list[list[int]]]:
    """The rank's GPU, what the probe of CUDA IPC says, the memory of every rank, read through IPC."""
    device, ranks = context.device, context.rendezvous
    own = device.asarray(np.full(8, context.rank, np.uint32))
    handles = ranks.all_gather(pickle.dumps(export(own)), "ipc handles")
    found = []
    for rank, handle in enumerate(handles):
        array = own if rank == context.rank else device.open_ipc(pickle.loads(handle))
        found.append(array.numpy().tolist())
    ranks.barrier("all have read")
    return device.spec, ipc_unavailable(device, ranks), found
