"""AllGather by the TMA (bulk_push.cu, bulk_pull.cu): ways ``tma.push`` and ``tma.pull``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.common import check_stages, check_tile, tma_unavailable
from kernels.ipc.gather import GatherConfig, launch, prepare
from kernels.ipc.grid import suitable_ctas
from kernels.staged import BarrierPlan
from smfree.cuda import Capabilities

if TYPE_CHECKING:
    from kernels.ipc.group import Group

__all__ = [
    "BulkConfig",
    "BulkPullConfig",
    "BulkPushConfig",
    "launch",
    "prepare",
    "throughput_config",
    "unavailable",
]


@dataclass(frozen=True, kw_only=True)
class BulkConfig(GatherConfig):
    """``num_stages`` tiles of ``tile_bytes`` under way per CTA; by default a slice is two tiles, so that one
    is stored while the other is loaded. All ``threads``, with ``unroll`` loads each, place a src that is not
    aligned like its place and move the edges; one of them does the rest. Raises ConfigError."""

    threads: int = 128
    tile_bytes: int = 8192
    num_stages: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tile(self.tile_bytes)
        check_stages(self.num_stages)

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the asking thread, and the tile; a shorter last one is announced as such."""
        return (BarrierPlan("full", {"asking thread": 1}, {"tile": self.tile_bytes}),)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages."""
        return self.num_stages * self.tile_bytes

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes that an SM with one CTA has asked for when it waits for the oldest."""
        return self.num_stages * self.tile_bytes

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the layout of the signals."""
        return {**super().defines, "TILE_BYTES": self.tile_bytes, "NUM_STAGES": self.num_stages}


@dataclass(frozen=True, kw_only=True)
class BulkPushConfig(BulkConfig):
    """How ``allgather_bulk_push`` is compiled and launched. Raises ConfigError."""

    file: ClassVar[str] = "bulk_push.cu"


@dataclass(frozen=True, kw_only=True)
class BulkPullConfig(BulkConfig):
    """How ``allgather_bulk_pull`` is compiled and launched. Raises ConfigError."""

    file: ClassVar[str] = "bulk_pull.cu"


def unavailable(group: Group) -> str | None:
    """Why the ranks' TMAs cannot reach each other, None when they can."""
    return group.direct_reason or tma_unavailable(group.capabilities)


def throughput_config(
    capabilities: Capabilities, largest_shard_bytes: int, kind: type[BulkConfig] = BulkPushConfig
) -> BulkConfig:
    """For shards of at most so many bytes, in the direction of ``kind``."""
    del capabilities
    return kind(ctas=suitable_ctas(largest_shard_bytes))
