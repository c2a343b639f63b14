"""AllGather by loads of the peers' shards (pull.cu): way ``sm.pull``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.ipc.gather import GatherConfig, launch, prepare
from kernels.ipc.grid import suitable_ctas
from smfree.cuda import Capabilities

if TYPE_CHECKING:
    from kernels.ipc.group import Group

__all__ = ["PullConfig", "launch", "prepare", "throughput_config", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class PullConfig(GatherConfig):
    """How ``allgather_pull`` is compiled and launched. A load waits for a round trip over the link, so bytes
    in flight count: eight loads per thread. Raises ConfigError."""

    file: ClassVar[str] = "pull.cu"

    threads: int = 512
    unroll: int = 8


def unavailable(group: Group) -> str | None:
    """Why the ranks' kernels cannot load from each other, None when they can."""
    return group.direct_reason


def throughput_config(capabilities: Capabilities, largest_shard_bytes: int) -> PullConfig:
    """For shards of at most so many bytes."""
    del capabilities
    return PullConfig(ctas=suitable_ctas(largest_shard_bytes))
