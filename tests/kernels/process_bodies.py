"""What the ranks of test_ipc_processes.py do, each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ipc.allgather import allgather
from kernels.ipc.copy_engine import CopyEngineConfig
from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
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


def gather_all(context: RankContext) -> list[tuple[str, bool]]:
    """Three gathers per mode; backing and whether all bytes were right."""
    device, results = context.device, []
    for backing, way, config in MODES:
        with Group.join(device, context.rendezvous, pool_bytes=1 << 16, backing=backing) as group:
            dst, right = group.symmetric(sum(COUNTS), "dst"), True
            for call in range(3):
                src = device.asarray(shard(context.rank, call))
                allgather(group, dst, src, way=way, counts=COUNTS, config=config)
                group.wait(timeout_s=20)
                wanted = np.concatenate([shard(rank, call) for rank in range(3)])
                right &= bool((dst.array(context.rank).numpy() == wanted).all())
            results.append((group.pool.backing, right))
    return results


def die_before_the_call(context: RankContext, way: str, clock: Path) -> None:
    """Rank 1 is killed where the others gather, and leaves the time of it in the file ``clock``."""
    with Group.join(context.device, context.rendezvous, pool_bytes=1 << 16) as group:
        dst = group.symmetric(30, "weights")
        if context.rank == 1:
            clock.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        allgather(group, dst, context.device.asarray(np.zeros(10, np.uint8)), way=way)
        group.wait(timeout_s=100)
