"""The pipelines, behind one interface: what benchmarks and tests iterate over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.common import LaunchInfo
from kernels.mbarrier import persistent, pingpong, ring, ring_async, specialised
from kernels.mbarrier.pipeline import Part, PipelineConfig
from smfree.cuda import Capabilities, DeviceArray, Stream


@dataclass(frozen=True)
class Pipeline:
    """One way to overlap copies and computation. ``path`` says which way the bytes go."""

    name: str
    path: str
    config_type: type[PipelineConfig]
    axpy: Callable[..., LaunchInfo]

    @property
    def max_stages(self) -> int:
        """Most stages that its configuration takes; 1 means no overlap."""
        return self.config_type.max_stages

    def unavailable(self, capabilities: Capabilities) -> str | None:
        """Why a device cannot run it, None when it can."""
        return self.config_type.unavailable(capabilities)

    def config(
        self, tile_bytes: int, num_stages: int, *, work: int = 1, part: Part = Part.BOTH, **others: Any
    ) -> PipelineConfig:
        """A checked configuration; ``others``: ``threads``, ``ctas_per_sm``, ``max_ctas`` and what its type
        has besides. Raises ConfigError."""
        return self.config_type(tile_bytes, num_stages, work=work, part=part, **others)

    def run(
        self,
        dst: DeviceArray,
        x: DeviceArray,
        y: DeviceArray,
        *,
        alpha: float,
        config: PipelineConfig,
        stream: Stream | None = None,
    ) -> LaunchInfo:
        """Queue ``dst = y``, then ``config.work`` times ``dst = fmaf(alpha, x, dst)``. Part.COPY makes it
        ``dst = y``, Part.COMPUTE leaves ``dst`` alone. Raises OperandError, ConfigError."""
        return self.axpy(dst, x, y, alpha=alpha, config=config, stream=stream)


_BULK = "global -> shared -> global"

PIPELINES: dict[str, Pipeline] = {
    made.name: made
    for made in (
        Pipeline("pingpong", _BULK, pingpong.PingpongConfig, pingpong.axpy),
        Pipeline("ring", _BULK, ring.RingConfig, ring.axpy),
        Pipeline("specialised", _BULK, specialised.SpecialisedConfig, specialised.axpy),
        Pipeline("persistent", _BULK, persistent.PersistentConfig, persistent.axpy),
        Pipeline(
            "ring_async",
            "global -> shared -> registers -> global",
            ring_async.RingAsyncConfig,
            ring_async.axpy,
        ),
    )
}


def pipeline(name: str) -> Pipeline:
    """A pipeline by name. Raises KeyError listing those there are."""
    if name not in PIPELINES:
        raise KeyError(f"no pipeline {name!r}; there are {', '.join(PIPELINES)}")
    return PIPELINES[name]
