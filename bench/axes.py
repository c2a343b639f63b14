"""What is measured: every axis of every benchmark, quick and full, in one place.

QUICK answers the question on an emulated GPU within a minute; FULL is every axis, for a real GPU. The plugin
picks by the kind of device unless --axes says otherwise; ``pytest -k "latency and -4KiB"`` filters by the
words of a point's id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kernels.chain import Leg
from kernels.mbarrier.registry import PIPELINES
from kernels.tma.dsmem import Path
from smfree.measure.options import Axes
from smfree.measure.pipelines import ratio_text
from smfree.measure.records import Memory
from smfree.model.crossover import format_bytes

KIB = 1024

#: Tile sizes in bytes of both questions: 128 B to 64 KiB.
TILE_BYTES = tuple(128 << power for power in range(10))

#: The engines that are compared. Triton's twins stand beside the kernel they are a twin of.
ENGINES = ("lsu", "cp.async", "tma.bulk", "tma.tensor")
TRITON_ENGINES = ("triton.pointer", "triton.descriptor")

#: Steps of a latency chain: the slope is taken between the two lengths, over 1024 dependent tiles.
SHORT_STEPS, LONG_STEPS = 8, 8 + 1024

#: A pool of an L2-resident chain stays this small, source and destination each, so that both fit any L2 here.
L2_POOL_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class LatencyAxes:
    tile_bytes: tuple[int, ...]
    threads: tuple[int, ...]
    legs: tuple[Leg, ...]
    memories: tuple[Memory, ...]


@dataclass(frozen=True, slots=True)
class ThroughputAxes:
    """Tiles at fixed ``bytes_in_flight`` per SM, and tiles with each engine at its best.

    Triton's twins are copied at ``twin_tile_bytes`` only. ``copy_bytes`` is the length of one copy.
    """

    engines: tuple[str, ...]
    bytes_in_flight: tuple[int, ...]
    tile_bytes: tuple[int, ...]
    best_tile_bytes: tuple[int, ...]
    twin_tile_bytes: tuple[int, ...]
    threads: int
    copy_bytes: int


LATENCY: Mapping[Axes, LatencyAxes] = {
    Axes.QUICK: LatencyAxes(TILE_BYTES, (128,), (Leg.COPY,), (Memory.L2,)),
    Axes.FULL: LatencyAxes(
        TILE_BYTES, (32, 128, 256), (Leg.LOAD, Leg.STORE, Leg.COPY), (Memory.L2, Memory.DRAM)
    ),
}

THROUGHPUT: Mapping[Axes, ThroughputAxes] = {
    Axes.QUICK: ThroughputAxes(
        engines=ENGINES + TRITON_ENGINES,
        bytes_in_flight=(16 * KIB,),
        tile_bytes=TILE_BYTES[3:8],  # the sizes of which the LSU can have 16 KiB in flight
        best_tile_bytes=TILE_BYTES,
        twin_tile_bytes=(4 * KIB, 16 * KIB),
        threads=128,
        copy_bytes=16 << 20,
    ),
    Axes.FULL: ThroughputAxes(
        engines=ENGINES + TRITON_ENGINES,
        bytes_in_flight=(4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB),
        tile_bytes=TILE_BYTES,
        best_tile_bytes=TILE_BYTES,
        twin_tile_bytes=TILE_BYTES,
        threads=128,
        copy_bytes=256 << 20,
    ),
}


@dataclass(frozen=True, slots=True)
class PipelineAxes:
    """Stage counts with computation and copy alike, and ``ratios`` of the two at ``ratio_stages`` stages for
    the ``swept`` pipelines.

    ``max_ctas`` CTAs (None: what fits on the whole device) of ``tiles_per_cta`` tiles.
    """

    pipelines: tuple[str, ...]
    swept: tuple[str, ...]
    tile_bytes: tuple[int, ...]
    num_stages: tuple[int, ...]
    ratios: tuple[float, ...]
    ratio_stages: tuple[int, ...]
    max_ctas: int | None
    tiles_per_cta: int


PIPELINE: Mapping[Axes, PipelineAxes] = {
    Axes.QUICK: PipelineAxes(
        pipelines=("pingpong", "ring", "specialised", "ring_async"),
        swept=("ring",),
        tile_bytes=(4 * KIB,),
        num_stages=(1, 2, 4),
        ratios=(1.0, 4.0),
        ratio_stages=(2,),
        max_ctas=4,
        tiles_per_cta=12,
    ),
    Axes.FULL: PipelineAxes(
        pipelines=tuple(PIPELINES),
        swept=tuple(PIPELINES),
        tile_bytes=(4 * KIB, 16 * KIB),
        num_stages=tuple(range(1, 9)),
        ratios=(0.25, 0.5, 1.0, 2.0, 4.0),
        ratio_stages=(2,),
        max_ctas=None,
        tiles_per_cta=32,
    ),
}


@dataclass(frozen=True, slots=True)
class ClusterAxes:
    """Tiles that go from CTA to CTA, and tiles that all CTAs of a cluster want.

    ``dsmem_filled``: clusters on all SMs, or a single one. A multicast fills all SMs with ``ctas_per_sm``; it
    is timed over at most ``max_tiles`` tiles per CTA, ``num_stages`` of them in flight.
    """

    dsmem_tile_bytes: tuple[int, ...]
    dsmem_clusters: tuple[int, ...]
    dsmem_filled: tuple[bool, ...]
    multicast_tile_bytes: tuple[int, ...]
    multicast_clusters: tuple[int, ...]
    ctas_per_sm: tuple[int, ...]
    max_tiles: int
    num_stages: int = 4


CLUSTER: Mapping[Axes, ClusterAxes] = {
    Axes.QUICK: ClusterAxes(
        dsmem_tile_bytes=(1 * KIB, 4 * KIB, 16 * KIB),
        dsmem_clusters=(2,),
        dsmem_filled=(False,),
        multicast_tile_bytes=(4 * KIB,),
        multicast_clusters=(2, 4),
        ctas_per_sm=(1, 4),
        max_tiles=12,
    ),
    Axes.FULL: ClusterAxes(
        dsmem_tile_bytes=TILE_BYTES[:9],
        dsmem_clusters=(2, 4, 8),
        dsmem_filled=(False, True),
        multicast_tile_bytes=(1 * KIB, 4 * KIB, 16 * KIB),
        multicast_clusters=(2, 4, 8),
        ctas_per_sm=(1, 2, 4),
        max_tiles=64,
    ),
}

#: The two forms of a multicast.
MULTICAST_FORMS = ("bulk", "tensor")


class Half(StrEnum):
    """What of a pipeline runs: all of it, or one half, that of a single tile per CTA too."""

    BOTH = "both"
    COPY = "copy"
    ONE_COPY = "one copy"
    COMPUTE = "compute"
    ONE_COMPUTE = "one compute"

    @property
    def single(self) -> bool:
        return self in (Half.ONE_COPY, Half.ONE_COMPUTE)


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """One chain."""

    engine: str
    tile_bytes: int
    threads: int
    leg: Leg
    memory: Memory

    @property
    def id(self) -> str:
        size = format_bytes(self.tile_bytes).replace(" ", "")
        return f"{self.engine}-{size}-{self.threads}t-{self.leg}-{self.memory.value}"


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One copy over all SMs."""

    engine: str
    tile_bytes: int
    bytes_in_flight: int | None
    threads: int
    copy_bytes: int

    @property
    def id(self) -> str:
        size = format_bytes(self.tile_bytes).replace(" ", "")
        flight = self.bytes_in_flight
        regime = "best" if flight is None else format_bytes(flight).replace(" ", "") + "-in-flight"
        return f"{self.engine}-{size}-{regime}"


@dataclass(frozen=True, slots=True)
class PipelinePoint:
    """One launch of a pipeline, or of a half of it. ``ratio``: computation to copy, None where there is no
    computation."""

    pipeline: str
    tile_bytes: int
    num_stages: int
    half: Half
    ratio: float | None
    max_ctas: int | None
    tiles_per_cta: int

    @property
    def id(self) -> str:
        size = format_bytes(self.tile_bytes).replace(" ", "")
        ratio = "" if self.ratio is None else "-" + ratio_text(self.ratio).replace(":", "to")
        return f"{self.pipeline}-{size}-{self.num_stages}stage-{self.half.replace(' ', '')}{ratio}"


@dataclass(frozen=True, slots=True)
class DsmemPoint:
    """A ring of CTAs that pass tiles on."""

    path: Path
    tile_bytes: int
    cluster: int
    filled: bool

    @property
    def id(self) -> str:
        size = format_bytes(self.tile_bytes).replace(" ", "")
        where = "filled" if self.filled else "alone"
        return f"{self.path.name.lower()}-{size}-{self.cluster}ctas-{where}"


@dataclass(frozen=True, slots=True)
class MulticastPoint:
    """CTAs that want the same tiles: one copy for all, or each for itself."""

    form: str
    multicast: bool
    tile_bytes: int
    cluster: int
    ctas_per_sm: int
    max_tiles: int
    num_stages: int

    @property
    def id(self) -> str:
        size = format_bytes(self.tile_bytes).replace(" ", "")
        how = "multicast" if self.multicast else "each"
        return f"{self.form}-{how}-{size}-{self.cluster}ctas-{self.ctas_per_sm}perSM"


def latency_points(axes: Axes) -> Iterator[LatencyPoint]:
    """All chains, the tile size slowest, so that a pool serves all engines before the next one is made."""
    chosen = LATENCY[axes]
    for tile_bytes in chosen.tile_bytes:
        for memory in chosen.memories:
            for leg in chosen.legs:
                for threads in chosen.threads:
                    for engine in ENGINES:
                        yield LatencyPoint(engine, tile_bytes, threads, leg, memory)


def throughput_points(axes: Axes) -> Iterator[ThroughputPoint]:
    """All copies. A tile larger than the bytes in flight cannot be had and is no point."""
    chosen = THROUGHPUT[axes]
    regimes: list[tuple[int | None, tuple[int, ...]]] = [
        (flight, tuple(tile for tile in chosen.tile_bytes if tile <= flight))
        for flight in chosen.bytes_in_flight
    ]
    for flight, tiles in [*regimes, (None, chosen.best_tile_bytes)]:
        for tile_bytes in tiles:
            for engine in chosen.engines:
                if engine in TRITON_ENGINES and tile_bytes not in chosen.twin_tile_bytes:
                    continue
                yield ThroughputPoint(engine, tile_bytes, flight, chosen.threads, chosen.copy_bytes)


def pipeline_points(axes: Axes) -> Iterator[PipelinePoint]:
    """All pipelines and their halves. Stages that a pipeline cannot have are no point."""
    chosen = PIPELINE[axes]
    extent = chosen.max_ctas, chosen.tiles_per_cta
    for name in chosen.pipelines:
        ratios_of = {stages: {1.0} for stages in chosen.num_stages}
        for stages in chosen.ratio_stages if name in chosen.swept else ():
            ratios_of.setdefault(stages, set()).update(chosen.ratios)
        for tile_bytes in chosen.tile_bytes:
            for stages, ratios in sorted(ratios_of.items()):
                if stages > PIPELINES[name].max_stages:
                    continue
                for half in (Half.COPY, Half.ONE_COPY):
                    yield PipelinePoint(name, tile_bytes, stages, half, None, *extent)
                for ratio in sorted(ratios):
                    for half in (Half.COMPUTE, Half.ONE_COMPUTE, Half.BOTH):
                        yield PipelinePoint(name, tile_bytes, stages, half, ratio, *extent)


def dsmem_points(axes: Axes) -> Iterator[DsmemPoint]:
    """All rings, the paths side by side."""
    chosen = CLUSTER[axes]
    for filled in chosen.dsmem_filled:
        for cluster in chosen.dsmem_clusters:
            for tile_bytes in chosen.dsmem_tile_bytes:
                for path in Path:
                    yield DsmemPoint(path, tile_bytes, cluster, filled)


def multicast_points(axes: Axes) -> Iterator[MulticastPoint]:
    """All pairs: each CTA for itself, then the multicast."""
    chosen = CLUSTER[axes]
    extent = chosen.max_tiles, chosen.num_stages
    for per_sm in chosen.ctas_per_sm:
        for cluster in chosen.multicast_clusters:
            for tile_bytes in chosen.multicast_tile_bytes:
                for form in MULTICAST_FORMS:
                    for multicast in (False, True):
                        yield MulticastPoint(form, multicast, tile_bytes, cluster, per_sm, *extent)
