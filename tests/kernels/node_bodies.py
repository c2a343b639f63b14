"""What the ranks of test_ipc_on_node.py do, each in a process of its own; several may share a GPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ipc.allgather import WAYS, allgather, ways
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
from smfree.cuda import CudaHostError
from smfree.ranks import RankContext

COUNTS = (1000, 0, 77)
BACKINGS = (Backing.VMM, Backing.IPC)


def join(context: RankContext, **options: Any) -> Group:
    """The rank's group."""
    return Group.join(context.device, context.rendezvous, pool_bytes=1 << 16, several_per_gpu=True, **options)


def shard(rank: int, call: int) -> np.ndarray:
    """The bytes of a rank."""
    return np.random.default_rng([rank, call]).integers(0, 256, COUNTS[rank], dtype=np.uint8)


def gather_each_way(context: RankContext) -> dict[tuple[str, str], bool | str]:
    """By backing and way: whether all bytes of two gathers were right, or why these GPUs cannot."""
    found: dict[tuple[str, str], bool | str] = {}
    for backing in BACKINGS:
        try:
            group = join(context, backing=backing)
        except (CudaHostError, GroupError) as error:  # on every rank alike: the other backing can still work
            found |= {(backing.name, way): f"{type(error).__name__}: {error}" for way in WAYS}
            continue
        with group:
            dst, reasons = group.symmetric(sum(COUNTS), "dst"), ways(group)
            for way in WAYS:
                found[backing.name, way] = reasons[way] or _gathers(context, group, dst, way)
    return found


def _gathers(context: RankContext, group: Group, dst: Any, way: str) -> bool:
    right = True
    for call in range(2):
        dst.array(context.rank).fill(0xEE, stream=group.member(context.rank).stream)
        allgather(group, dst, context.device.asarray(shard(context.rank, call)), way=way, counts=COUNTS)
        group.wait(timeout_s=20)
        wanted = np.concatenate([shard(rank, call) for rank in range(context.world_size)])
        right &= bool((dst.array(context.rank).numpy() == wanted).all())
    return right


def die_while_others_gather(context: RankContext, way: str, clock: Path) -> None:
    """Rank 1 is killed where the others gather, and leaves the time of it in the file ``clock``."""
    with join(context) as group:
        dst = group.symmetric(30, "weights")
        if context.rank == 1:
            clock.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        allgather(group, dst, context.device.asarray(np.zeros(10, np.uint8)), way=way)
        group.wait(timeout_s=100)
