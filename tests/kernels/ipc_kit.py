"""Groups of ranks with small pools, and what an AllGather has to give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels.ipc.bulk import BulkPullConfig, BulkPushConfig
from kernels.ipc.group import Group
from kernels.ipc.multicast import MulticastConfig
from kernels.ipc.pull import PullConfig
from kernels.ipc.push import PushConfig
from smfree.cuda import DeviceArray
from tests.kernels.group_kit import EMULATED, local_group

SLOTS = 8
CONFIGS: dict[str, Any] = {
    "sm.pull": PullConfig(ctas=2, threads=32, unroll=2),
    "sm.push": PushConfig(ctas=2, threads=64, unroll=2),
    "tma.pull": BulkPullConfig(ctas=2, threads=32, unroll=1, tile_bytes=256, num_stages=2),
    "tma.push": BulkPushConfig(ctas=2, threads=32, unroll=1, tile_bytes=256, num_stages=2),
    "multicast": MulticastConfig(ctas=2, threads=32, unroll=2),
}
"""Small ones: a few hundred bytes already take several batches, tiles and turns of the ring."""


@contextmanager
def opened_group(
    num_ranks: int,
    schedule: str = "timed",
    seed: int = 0,
    *,
    node: str = EMULATED,
    slots: int = SLOTS,
) -> Iterator[Group]:
    """``local_group`` with a small pool and few slots."""
    with local_group(num_ranks, node, schedule=schedule, seed=seed, pool_bytes=1 << 18, slots=slots) as group:
        yield group


def shard_bytes(rank: int, nbytes: int, call: int = 0) -> Any:
    """Random bytes of a rank's shard: uint8[nbytes]."""
    return np.random.default_rng([rank, call]).integers(0, 256, nbytes, dtype=np.uint8)


def filled(group: Group, rank: int, data: Any, shift: int = 0) -> DeviceArray:
    """``data`` on the rank's device, ``shift`` bytes into an allocation."""
    member = group.member(rank)
    array = member.device.empty(len(data) + shift + 1, np.uint8).bytes_view(shift, len(data))
    return array.copy_from(data, stream=member.stream) if len(data) else array


def words(array: DeviceArray) -> Any:
    """The bytes of a device array as uint32, on the host."""
    return array.numpy().view(np.uint32)


def set_epochs(group: Group, epoch: int) -> None:
    """As if every slot of every rank had done so many barriers (modulo 2^32)."""
    layout = group.layout
    for member in group.members:
        pad = np.full(layout.pad_bytes // 4, epoch % 2**32, np.uint32)
        group.lane.pad(member.rank).bytes_view(0, pad.nbytes).view(np.uint32).copy_from(
            pad, stream=member.stream
        )
        here = control_words(group, member.rank, layout.epochs_offset, SLOTS)
        here.copy_from(np.full(SLOTS, epoch % 2**32, np.uint32), stream=member.stream)
        member.stream.synchronize()


def control_words(group: Group, rank: int, offset: int, count: int) -> DeviceArray:
    """``count`` words of a rank's control block."""
    return group.lane.control(rank).bytes_view(offset, 4 * count).view(np.uint32)


def epochs(group: Group, rank: int) -> list[int]:
    """Of every slot of a rank."""
    return [int(n) for n in control_words(group, rank, group.layout.epochs_offset, SLOTS).numpy()]


def records(group: Group, rank: int, slot: int) -> Any:
    """(step, wanted, seen) per peer of a slot: uint32[N, 3]."""
    offset = group.layout.records_offset + 16 * slot * group.world_size
    return control_words(group, rank, offset, 4 * group.world_size).numpy().reshape(-1, 4)[:, :3]
