"""AllReduce and ReduceScatter around a ring, carried by the TMA (ring_bulk.cu): way ``ring.tma``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.common import check_stages, check_tile
from kernels.ipc.bulk import unavailable
from kernels.reduce import ring
from kernels.reduce.config import KernelWay
from kernels.reduce.ring import RingConfig
from kernels.staged import BarrierPlan

if TYPE_CHECKING:
    from kernels.reduce.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class RingBulkConfig(RingConfig):
    """A :class:`RingConfig` of which ``num_stages`` tiles of ``tile_bytes`` are under way per CTA and source.
    All ``threads`` add; with ``unroll`` loads each they move what the TMA cannot. Raises ConfigError."""

    file: ClassVar[str] = "ring_bulk.cu"

    tile_bytes: int = 8192
    num_stages: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tile(self.tile_bytes)
        check_stages(self.num_stages)

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the asking thread, and the tile of what came and of the own part; where one is only
        passed on, and at the end of a piece, fewer bytes are announced."""
        return (BarrierPlan("full", {"asking thread": 1}, {"came": self.tile_bytes, "own": self.tile_bytes}),)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages, of two tiles each."""
        return self.num_stages * 2 * self.tile_bytes

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes of one source that an SM with one CTA has asked for when it waits for the oldest."""
        return self.num_stages * self.tile_bytes

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {**super().defines, "TILE_BYTES": self.tile_bytes, "NUM_STAGES": self.num_stages}


def throughput_config(workspace: Workspace, nbytes: int) -> RingBulkConfig:
    """For messages of ``nbytes``: the channels and pieces of ``ring.sm``."""
    same = ring.throughput_config(workspace, nbytes)
    return RingBulkConfig(ctas=same.ctas, piece_bytes=same.piece_bytes)


RING_BULK = KernelWay(
    "ring.tma", RingBulkConfig, throughput_config, unavailable, ring.arguments, ring.defines
)
