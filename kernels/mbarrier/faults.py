"""Mistakes in a ring of stages, one by one: the correct kernel, and a switch that gets one thing wrong.

For reading and for tests. ``scale`` doubles u32 words through the ring of ``faults.cu``, with the mistake
that the configuration names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_operands,
    check_shared,
    check_stages,
    check_tile,
    check_whole,
    launch,
    plain_integers,
    require,
    tma_unavailable,
)
from smfree.cuda import CudaSource, DeviceArray, Stream


class Ending(Enum):
    """What becomes of a run."""

    CORRECT = "it ends with the right result"
    HANGS = "it hangs: some wait is never satisfied"
    BREAKS = "rules of the ISA are broken: wrong data, a stage overwritten in use, or a hang, as it happens"


class Mistake(Enum):
    """A mistake that a kernel can be compiled with: what is done wrong, and how a run ends."""

    @property
    def mistake(self) -> str:
        """What is done wrong."""
        return self.value[0]

    @property
    def ending(self) -> Ending:
        """How a run ends, by the ISA."""
        return self.value[1]


class Fault(Mistake):
    """The mistakes of ``faults.cu``. BYTES_SHORT hangs because the tx-count never is 0 while no arrival is
    pending; hardware that counted a copy in pieces could meet 0 on the way."""

    NONE = "nothing: the correct ring", Ending.CORRECT
    BYTES_SHORT = "the producer announces 16 bytes less than the copy brings", Ending.HANGS
    BYTES_OVER = "the producer announces 16 bytes more than the copy brings", Ending.HANGS
    LOAD_MISSING = "the last tile is announced, but its copy is not issued", Ending.HANGS
    ARRIVE_MISSING = "the producer announces bytes without arriving", Ending.HANGS
    PRODUCER_NOT_REACHED = "no thread takes the producer's branch", Ending.HANGS
    PRODUCER_LEAVES_EARLY = "the producer leaves one tile before the consumers", Ending.HANGS
    ARRIVALS_SHORT = "empty[] expects one arrival more than there are consumer warps", Ending.HANGS
    ARRIVALS_OVER = "empty[] expects one arrival less than there are consumer warps", Ending.BREAKS
    RELEASE_MISSING = "the consumers never arrive on empty[]", Ending.HANGS
    EVERY_LANE_RELEASES = "all 32 lanes of a consumer warp arrive where one should", Ending.BREAKS
    INIT_MISSING = "full[] is never initialised", Ending.BREAKS
    INIT_NOT_SYNCED = "no block barrier between the initialisation and the first use", Ending.BREAKS
    FULL_NOT_AWAITED = "the consumers do not wait for the tile", Ending.BREAKS
    EMPTY_NOT_AWAITED = "the producer reuses a stage without waiting for its release", Ending.BREAKS
    WRONG_BARRIER = "the consumers wait on the neighbouring stage's barrier", Ending.BREAKS
    PARITY_NOT_FLIPPED = "the consumers keep their parity at the wrap of the ring", Ending.BREAKS
    COMMIT_AFTER_WAIT = "the bulk store is committed after the wait, which so covers nothing", Ending.BREAKS


@dataclass(frozen=True)
class FaultConfig:
    """Bytes per tile (a multiple of 128 per consumer warp), stages (2 to 8), consumer warps, and the fault.

    The kernel's 2 x ``num_stages`` barriers are static. Raises ConfigError.
    """

    tile_bytes: int = 512
    num_stages: int = 2
    warps: int = 2
    fault: Fault = Fault.NONE

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("warps", self.warps)
        require(2 <= self.warps <= 31, "warps must be 2 to 31, beside the producer's", self.warps, "use 4")
        check_tile(self.tile_bytes, multiple_of=128 * self.warps)
        check_stages(self.num_stages)
        require(self.num_stages >= 2, "num_stages must be at least 2", self.num_stages, "use 2")
        require(isinstance(self.fault, Fault), "fault must be a Fault", self.fault, "use Fault.NONE")

    @property
    def threads(self) -> int:
        """Threads per CTA: the consumer warps and the producer's."""
        return (1 + self.warps) * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages."""
        return self.num_stages * self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "mbarrier" / "faults.cu",
            {
                "TILE_BYTES": self.tile_bytes,
                "NUM_STAGES": self.num_stages,
                "WARPS": self.warps,
                "FAULT": self.fault.name,
            },
        )


def whole_tiles(src: DeviceArray, tile_bytes: int) -> int:
    """How many tiles of uint32 ``src`` holds, at least one. Raises OperandError."""
    if src.dtype != np.uint32 or src.nbytes == 0 or src.nbytes % tile_bytes:
        raise OperandError(
            f"src must hold whole tiles of uint32 (got {src.nbytes} bytes of {src.dtype} for tiles of "
            f"{tile_bytes} bytes); pad it"
        )
    return src.nbytes // tile_bytes


def scale(
    dst: DeviceArray, src: DeviceArray, *, config: FaultConfig, grid: int = 1, stream: Stream | None = None
) -> LaunchInfo:
    """``dst = 2 * src``: u32, whole tiles, 16-byte aligned, not overlapping; by ``grid`` CTAs, at most one
    per tile. Queues on ``stream`` and returns. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, FaultConfig, src=src, dst=dst)
    check_available(tma_unavailable(capabilities))
    check_shared(config.shared_bytes + 2 * 8 * config.num_stages, capabilities)
    check_operands("cp.async.bulk", dst, src)
    tiles = whole_tiles(src, config.tile_bytes)
    require(1 <= grid <= tiles, "grid must be 1 CTA to one per tile", grid, f"use at most {tiles}")
    return launch(
        config.source,
        grid,
        config.threads,
        (dst, src, np.uint32(tiles)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
