"""Mistakes in a ring between two CTAs of a cluster, one by one; see ``faults.py`` for those inside a CTA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    MAX_THREADS,
    LaunchInfo,
    check_available,
    check_call,
    check_operands,
    check_shared,
    check_stages,
    check_whole,
    launch,
    plain_integers,
    require,
)
from kernels.mbarrier.faults import Ending, Mistake, whole_tiles
from smfree.cuda import CudaSource, DeviceArray, Stream

CLUSTER = 2


class ClusterFault(Mistake):
    """The mistakes of ``faults_cluster.cu``."""

    NONE = "nothing: the correct ring", Ending.CORRECT
    INIT_FENCE_MISSING = "no fence makes the initialised barriers visible to the cluster", Ending.BREAKS
    ENTRY_BARRIER_MISSING = "the peer is written before anything proves that it has started", Ending.BREAKS
    EXIT_BARRIER_MISSING = "a CTA leaves while its peer still arrives on its barriers", Ending.BREAKS
    RELEASED_TO_ITSELF = "the consumers arrive on their own empty[], not on the producer's", Ending.HANGS
    ARRIVALS_OF_TWO = "empty[] counts the consumer warps of two CTAs, one CTA consumes", Ending.HANGS
    SCOPE_TOO_NARROW = "the consumers wait at CTA scope for what another CTA released", Ending.BREAKS
    ADDRESS_TAKEN_FOR_OWN = "arrivals on the peer's barriers use the form for the own CTA", Ending.BREAKS


@dataclass(frozen=True)
class ClusterFaultConfig:
    """Stages (1 to 8), warps per CTA, and the fault. A tile has 16 bytes per thread. Raises ConfigError."""

    num_stages: int = 2
    warps: int = 2
    fault: ClusterFault = ClusterFault.NONE

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("warps", self.warps)
        most = MAX_THREADS // 32
        require(1 <= self.warps <= most, f"warps must be 1 to {most}", self.warps, "use 4")
        check_stages(self.num_stages)
        require(isinstance(self.fault, ClusterFault), "fault must be a ClusterFault", self.fault, "use NONE")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.warps * 32

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.threads * 16

    @property
    def static_shared_bytes(self) -> int:
        """Shared memory per CTA: the stages and two barriers for each."""
        return self.num_stages * (self.tile_bytes + 16)

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "mbarrier" / "faults_cluster.cu",
            {"NUM_STAGES": self.num_stages, "WARPS": self.warps, "FAULT": self.fault.name},
        )


def scale(
    dst: DeviceArray,
    src: DeviceArray,
    *,
    config: ClusterFaultConfig,
    clusters: int = 1,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst = 2 * src``: u32, whole tiles, 16-byte aligned, not overlapping; by ``clusters`` clusters of two
    CTAs, at most one per tile. Queues on ``stream`` and returns. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, ClusterFaultConfig, src=src, dst=dst)
    check_available(None if capabilities.has_clusters else f"needs clusters; {capabilities.name} has none")
    check_shared(config.static_shared_bytes, capabilities)
    check_operands("ld.global.v4.b32", dst, src)
    tiles = whole_tiles(src, config.tile_bytes)
    require(1 <= clusters <= tiles, "clusters must be 1 to one per tile", clusters, f"use at most {tiles}")
    return launch(
        config.source,
        CLUSTER * clusters,
        config.threads,
        (dst, src, np.uint32(tiles)),
        device_array=src,
        shared_bytes=0,
        stream=stream,
    )
