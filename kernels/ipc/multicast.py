"""AllGather by stores to a multicast address, which the switch copies (multicast.cu): way ``multicast``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import LaunchInfo, require
from kernels.ipc import gather
from kernels.ipc.gather import GatherConfig, prepare
from kernels.ipc.grid import suitable_ctas
from smfree.cuda import Capabilities, Kernel

if TYPE_CHECKING:
    from kernels.ipc.group import Group, Member
    from kernels.ipc.shards import Shards

__all__ = ["MulticastConfig", "launch", "prepare", "throughput_config", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class MulticastConfig(GatherConfig):
    """How ``allgather_multicast`` is compiled and launched. Raises ConfigError."""

    file: ClassVar[str] = "multicast.cu"


def unavailable(group: Group) -> str | None:
    """Why the group's symmetric memory has no multicast address, None when it has."""
    return group.direct_reason or group.multicast_reason


def throughput_config(capabilities: Capabilities, largest_shard_bytes: int) -> MulticastConfig:
    """For shards of at most so many bytes."""
    del capabilities
    return MulticastConfig(ctas=suitable_ctas(largest_shard_bytes))


def launch(member: Member, shards: Shards, config: MulticastConfig, kernel: Kernel) -> LaunchInfo:
    """Queue the member's part on its stream; ``kernel`` is what :func:`prepare` gave. Raises ConfigError
    without a multicast address."""
    address = shards.dst.multicast(member.rank)
    require(
        address is not None,
        "dst needs a multicast address",
        f"none: {shards.dst.group.multicast_reason}",
        "use another way",
    )
    return gather.launch(member, shards, config, kernel, extra=(np.uint64(address or 0),))
