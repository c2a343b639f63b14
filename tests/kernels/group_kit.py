"""Groups of ranks: in this process, on any machine, or each rank as a process of an emulated node (a
thread)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.ipc.allgather import ways
from kernels.ipc.group import Group
from smfree.cuda import Device
from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from smfree.ranks import UnixRendezvous
from tests.nodes import open_ranks
from tests.ranks.kit import as_threads

EMULATED = "emu:h100"
POOL_BYTES = 1 << 20


@contextmanager
def local_group(
    world_size: int, node: str = EMULATED, *, schedule: str = "timed", seed: int = 0, **options: Any
) -> Iterator[Group]:
    """A group in this process on the GPUs of a node (tests/nodes.py), which its ranks may have to share."""
    devices = open_ranks(node, world_size, schedule=schedule, seed=seed)
    shared = len(set(devices)) < world_size
    try:
        with Group.local(devices, several_per_gpu=shared, **{"pool_bytes": POOL_BYTES, **options}) as group:
            yield group
    finally:
        for device in devices:
            device.close()


def joined(
    gpus: Sequence[str],
    body: Callable[[Group], Any],
    *,
    node: Node | None = None,
    options: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> list[Any]:
    """``body(group)`` as each rank of a group of processes, rank i on GPU i of a node; what they returned or
    raised. ``options(rank)`` go to ``Group.join``."""
    shared = node or Node(gpus)

    def rank(rendezvous: UnixRendezvous) -> Any:
        ordinal = rendezvous.rank % len(shared.devices)
        device = Device(Driver(shared), ordinal, spec=f"emu:{gpus[ordinal]}:{ordinal}", is_emulated=True)
        try:
            with Group.join(
                device, rendezvous, **{"pool_bytes": POOL_BYTES, **options(rendezvous.rank)}
            ) as group:
                return body(group)
        finally:
            device.close()

    return as_threads(rank, len(gpus), timeout_s=20.0)


def need(way: str, group: Group, node: str) -> None:
    """Skip a way that is not open to these GPUs. To emulated H100s every way is: there it is an error."""
    reason = ways(group)[way]
    if reason is not None and node != EMULATED:
        pytest.skip(f"{way}: {reason}")


def random_bytes(count: int, seed: int) -> NDArray[np.uint8]:
    """``count`` bytes."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
