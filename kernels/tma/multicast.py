"""What the two multicasts have in common: a ring of stages filled for all CTAs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.common import check_ctas, check_shared, check_whole, persistent_grid, require
from kernels.staged import BarrierPlan
from kernels.tma.ring import RingConfig
from smfree.cuda import Capabilities

MAX_CLUSTER = 8
"""The portable cluster size."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(RingConfig):
    """A ring in each of ``cluster`` CTAs; ``multicast``: each asks for its share of a tile on behalf of all,
    else each loads for itself. ``ctas_per_sm`` CTAs per SM at most, or ``max_ctas`` in all. Raises
    ConfigError."""

    cluster: int = 4
    multicast: bool = True
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ctas(self.ctas_per_sm)
        check_whole("cluster", self.cluster)
        require(
            self.cluster in (2, 4, 8),
            f"cluster is 2, 4 or {MAX_CLUSTER} CTAs",
            self.cluster,
            "use 4, or tma.bulk for one CTA",
        )
        require(isinstance(self.multicast, bool), "multicast is a bool", self.multicast, "use True")
        most = self.max_ctas
        require(
            most is None or most >= self.cluster,
            f"max_ctas holds a whole cluster of {self.cluster}",
            most,
            "leave it out",
        )

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``, and ``empty[s]``: every CTA, since a copy overwrites the stage in all of them."""
        return (*super().barriers, BarrierPlan("empty", {"CTA": self.cluster}))

    @property
    def cluster_defines(self) -> dict[str, object]:
        """What both kernels are compiled with."""
        return {"CLUSTER": self.cluster, "MULTICAST": int(self.multicast), "NUM_STAGES": self.num_stages}

    def grid_for(self, num_tiles: int, capabilities: Capabilities) -> int:
        """CTAs to launch: whole clusters, one per tile at most. Raises ConfigError when the stages do not fit
        the device's shared memory."""
        check_shared(self.shared_bytes + self.static_shared_bytes, capabilities)
        ctas = num_tiles * self.cluster
        ctas = persistent_grid(capabilities, min(ctas, self.max_ctas or ctas), self.ctas_per_sm)
        return max(ctas // self.cluster, 1) * self.cluster
