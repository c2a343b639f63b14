"""What the ranks of test_ipc_processes.py do, each in a process of its own."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ipc import slabs
from kernels.ipc.allgather import allgather
from kernels.ipc.copy_engine import CopyEngineConfig
from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
from kernels.reduce.allreduce import allreduce
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device
from smfree.cuda.ipc import export
from smfree.cuda.vmm import PhysicalMemory
from smfree.ranks import RankContext

COUNTS = (1000, 0, 77)
MODES: list[tuple[Backing, str, Any]] = [
    (Backing.VMM, "ce", CopyEngineConfig(batched=True)),
    (Backing.VMM, "sm.pull", None),
    (Backing.VMM, "tma.push", None),
    (Backing.IPC, "ce", CopyEngineConfig(batched=False)),
    (Backing.IPC, "sm.push", None),
    (Backing.IPC, "tma.pull", None),
    (Backing.ALONE, "staged", None),
    (Backing.VMM, "multicast", None),
]


def shard(rank: int, call: int) -> np.ndarray:
    """The bytes of a rank."""
    return np.random.default_rng(10 * call + rank).integers(0, 256, COUNTS[rank], dtype=np.uint8)


def gather_all(context: RankContext) -> list[tuple[str, str, bool]]:
    """Two gathers per mode that the ranks' GPUs can go, the second in place: backing, way, and whether all
    bytes were right."""
    device, rank, results = context.device, context.rank, []
    ranks = range(context.world_size)
    counts = COUNTS[: context.world_size]
    shared = context.rendezvous.all_gather(device.uuid.encode(), "GPUs")
    sharing = len(set(shared)) < len(shared)
    for backing, way, config in MODES:
        if way == "multicast" and sharing:  # its members are GPUs
            continue
        with Group.join(
            device, context.rendezvous, pool_bytes=1 << 16, backing=backing, several_per_gpu=sharing
        ) as group:
            dst, right = group.symmetric(sum(counts), "dst"), True
            for call in range(2):
                src: Any = device.asarray(shard(rank, call))
                if call:
                    place = dst.array(rank).bytes_view(sum(counts[:rank]), counts[rank])
                    place.copy_from_device(src)
                    device.synchronize()
                    src = None
                allgather(group, dst, src, way=way, counts=counts, config=config)
                group.wait(timeout_s=30)
                wanted = np.concatenate([shard(owner, call) for owner in ranks])
                right &= bool((dst.array(rank).numpy() == wanted).all())
            results.append((group.pool.backing, way, right))
    return results


# --- deaths ------------------------------------------------------------------------------------------


def _die(clock: Path) -> None:
    """SIGKILL, after a note of the time."""
    clock.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_call(context: RankContext, backing: Backing, way: str, clock: Path) -> None:
    """Rank 1 is killed where the others gather."""
    with Group.join(context.device, context.rendezvous, pool_bytes=1 << 16, backing=backing) as group:
        dst = group.symmetric(30, "weights")
        if context.rank == 1:
            _die(clock)
        allgather(group, dst, context.device.asarray(np.zeros(10, np.uint8)), way=way)
        group.wait(timeout_s=100)


def die_at_some_time(context: RankContext, backing: Backing, way: str, clock: Path) -> None:
    """Rank 1 is killed while all gather again and again."""
    with Group.join(context.device, context.rendezvous, pool_bytes=1 << 16, backing=backing) as group:
        dst, src = group.symmetric(30_000, "weights"), context.device.asarray(np.zeros(10_000, np.uint8))
        allgather(group, dst, src, way=way)
        group.wait(timeout_s=100)
        if context.rank == 1:
            threading.Timer(0.2, _die, [clock]).start()
        while True:
            allgather(group, dst, src, way=way)
            group.wait(timeout_s=100)


def die_while_opening(context: RankContext, backing: Backing, way: str, clock: Path) -> None:
    """Rank 1 is killed when it would open the memory of the others."""
    del way
    if context.rank == 1:
        Device.open_ipc = slabs.PhysicalMemory.map = lambda *_: _die(clock)  # type: ignore[method-assign, assignment]
    Group.join(context.device, context.rendezvous, pool_bytes=1 << 16, backing=backing)


# --- leaks -------------------------------------------------------------------------------------------


def _server() -> str:
    """The pid of the process that serves the node."""
    listed = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    (pid,) = [pid for pid in listed if b"emulator.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def _count(device: Device) -> dict[str, int]:
    """What a leak makes grow, here and in the server; device memory in use."""
    free, total = device.calls("cuMemGetInfo")
    found = {"device bytes": total - free, "imports": len(device.imports), "objects": len(gc.get_objects())}
    for name, pid in (("rank", str(os.getpid())), ("server", _server())):
        found[f"{name} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        found[f"{name} threads"] = len(os.listdir(f"/proc/{pid}/task"))
        found[f"{name} mappings"] = Path(f"/proc/{pid}/maps").read_text().count("\n")
    return found


def grow(context: RankContext) -> list[tuple[str, int, dict[str, int]]]:
    """Pool allocations, IPC opens, VMM exports and imports, groups: what each makes grow in many rounds."""
    device, ranks = context.device, context.rendezvous
    peer = (context.rank + 1) % 2
    own = device.asarray(np.zeros(8, np.uint8))
    handle = pickle.loads(ranks.all_gather(pickle.dumps(export(own)), "handle")[peer])

    def open_twice() -> None:
        array = device.open_ipc(handle)
        device.open_ipc(handle).free()
        array.numpy()

    def share() -> None:
        memory = PhysicalMemory.create(device, 1)
        descriptor = memory.export()
        ranks.send_fd(peer, descriptor, "memory")
        os.close(descriptor)
        descriptor = ranks.recv_fd(peer, "memory")
        imported = PhysicalMemory.from_descriptor(device, descriptor, memory.nbytes)
        os.close(descriptor)
        mapped = imported.map([device])
        mapped.array(100).fill(0)
        device.synchronize()
        mapped.free()
        imported.close()
        memory.close()

    def join(backing: Backing, way: str) -> None:
        with Group.join(device, ranks, pool_bytes=1 << 12, slots=4, backing=backing) as group:
            allgather(group, group.symmetric(16, "dst"), own, way=way)
            group.wait(timeout_s=20)

    def reduce() -> None:
        sizes: dict[str, Any] = {"scratch_bytes": 256, "oneshot_bytes": 0, "channels": 1}
        with Workspace(group, **sizes, own_streams=True) as workspace, group.symmetric(8, "sum") as dst:
            allreduce(workspace, dst, own, dtype="float32", way="ring.sm")
            group.wait(timeout_s=20)

    with Group.join(device, ranks, pool_bytes=1 << 14) as group:
        tasks: list[tuple[str, int, Callable[[], None]]] = [
            ("pool allocations", 400, lambda: group.symmetric(100, "x").free()),
            ("workspaces", 8, reduce),
            ("IPC opens", 100, open_twice),
            ("VMM imports", 40, share),
            ("groups over VMM", 8, lambda: join(Backing.VMM, "ce")),
            ("groups over IPC", 8, lambda: join(Backing.IPC, "ce")),
            ("groups through the host", 8, lambda: join(Backing.ALONE, "staged")),
        ]
        return [(name, rounds, _growth(context, rounds, task)) for name, rounds, task in tasks]


def _growth(context: RankContext, rounds: int, task: Callable[[], None]) -> dict[str, int]:
    for _ in range(3):  # what is made once
        task()
    before = _together(context)
    for _ in range(rounds):
        task()
    after = _together(context)
    return {name: after[name] - before[name] for name in before}


def _together(context: RankContext) -> dict[str, int]:
    """Counts while all ranks do nothing else."""
    gc.collect()
    context.rendezvous.barrier("collected")
    found = _count(context.device)
    context.rendezvous.barrier("counted")
    return found
