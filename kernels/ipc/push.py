"""AllGather by stores to the peers (push.cu): way ``sm.push``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.ipc.gather import GatherConfig, launch, prepare
from kernels.ipc.grid import suitable_ctas
from smfree.cuda import Capabilities

if TYPE_CHECKING:
    from kernels.ipc.group import Group

__all__ = ["PushConfig", "launch", "prepare", "throughput_config", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class PushConfig(GatherConfig):
    """How ``allgather_push`` is compiled and launched. Loads are local and stores wait for nobody: four loads
    per thread. Raises ConfigError."""

    file: ClassVar[str] = "push.cu"


def unavailable(group: Group) -> str | None:
    """Why the ranks' kernels cannot store to each other, None when they can."""
    return group.direct_reason


def throughput_config(capabilities: Capabilities, largest_shard_bytes: int) -> PushConfig:
    """For shards of at most so many bytes."""
    del capabilities
    return PushConfig(ctas=suitable_ctas(largest_shard_bytes))
