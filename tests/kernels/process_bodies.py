"""What the ranks of test_ipc_processes.py do, each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ipc.allgather import allgather, ways
from kernels.ipc.copy_engine import CopyEngineConfig
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
from smfree.cuda import CudaHostError
from smfree.ranks import RankContext

COUNTS = (1000, 0, 77)
MODES: list[tuple[Backing, str, Any]] = [
    (Backing.VMM, "ce", CopyEngineConfig(batched=True)),
    (Backing.IPC, "ce", CopyEngineConfig(batched=False)),
    (Backing.ALONE, "staged", None),
    (Backing.IPC, "sm.push", None),
    (Backing.IPC, "tma.pull", None),
    (Backing.VMM, "multicast", None),
]


def shard(rank: int, call: int) -> np.ndarray:
    """The bytes of a rank."""
    return np.random.default_rng(10 * call + rank).integers(0, 256, COUNTS[rank], dtype=np.uint8)


def join(context: RankContext, **options: Any) -> Group:
    """The rank's group; on a machine with fewer GPUs than ranks they share one."""
    return Group.join(context.device, context.rendezvous, pool_bytes=1 << 16, several_per_gpu=True, **options)


def gather_all(context: RankContext) -> list[tuple[str, bool | str]]:
    """Per mode its backing, and whether all bytes were right, or why it is not open to these GPUs."""
    return [gather_by(context, *mode) for mode in MODES]


def gather_by(context: RankContext, backing: Backing, way: str, config: Any) -> tuple[str, bool | str]:
    """Three gathers."""
    try:
        group = join(context, backing=backing)
    except (CudaHostError, GroupError) as error:  # on every rank alike
        return f"{backing}: refused", f"{type(error).__name__}: {error}"
    with group:
        reason = ways(group)[way]
        if reason is not None:
            return group.pool.backing, reason
        dst, right = group.symmetric(sum(COUNTS), "dst"), True
        for call in range(3):
            src = context.device.asarray(shard(context.rank, call))
            allgather(group, dst, src, way=way, counts=COUNTS, config=config)
            group.wait(timeout_s=20)
            wanted = np.concatenate([shard(rank, call) for rank in range(3)])
            right &= bool((dst.array(context.rank).numpy() == wanted).all())
        return group.pool.backing, right


def die_before_the_call(context: RankContext, way: str, clock: Path) -> None:
    """Rank 1 is killed where the others gather, and leaves the time of it in the file ``clock``."""
    with join(context) as group:
        dst = group.symmetric(30, "weights")
        if context.rank == 1:
            clock.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        allgather(group, dst, context.device.asarray(np.zeros(10, np.uint8)), way=way)
        group.wait(timeout_s=100)
