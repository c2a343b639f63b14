"""How much of the copy does a pipeline hide behind its computation, and how many stages does it take?

Each pipeline computes axpy on tiles that it streams through its stages. It runs whole, and with a half
removed: the copies alone and the computation alone, on all tiles and on a single one per CTA. The difference
of the two is the time of a tile, launch and fill cancel. The FMAs per element are chosen so that the
computation on a tile takes a given multiple of its copy, both with two stages.

Bytes     a launch reads x and y and writes dst; the computation alone moves none
L2        quick: arrays read just before; full: flushed by a read sweep before each launch
Verified  dst against numpy, bitwise: the sums are small integers, which float32 holds exactly
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest

from bench.axes import Half, PipelinePoint, pipeline_points
from bench.cost import resources
from bench.pools import check_bitwise
from kernels.mbarrier.pipeline import MAX_WORK, Part, PipelineConfig
from kernels.mbarrier.registry import PIPELINES
from smfree.cuda import Device, DeviceArray, Stream
from smfree.measure.fixture import Measure, Point
from smfree.measure.options import Axes
from smfree.measure.queue import DeviceQueue
from smfree.measure.records import CacheState, Memory, Question, Traffic
from smfree.measure.timer import DeviceTimer

ALPHA = 2.0
SEED = 11
CALIBRATION_WORK = (8, 32)
CALIBRATION_SAMPLES = 5
"""Launches whose shortest counts, on a GPU: differences of two times are taken."""
PARTS = {
    Half.BOTH: Part.BOTH,
    Half.COPY: Part.COPY,
    Half.ONE_COPY: Part.COPY,
    Half.COMPUTE: Part.COMPUTE,
    Half.ONE_COMPUTE: Part.COMPUTE,
}


@dataclass(frozen=True)
class Arrays:
    """Small whole numbers, so that every sum of a pipeline is exact."""

    host_x: np.ndarray
    host_y: np.ndarray
    x: DeviceArray
    y: DeviceArray
    dst: DeviceArray

    def first(self, count: int) -> Arrays:
        """The first ``count`` elements."""
        return Arrays(
            self.host_x[:count], self.host_y[:count], self.x[:count], self.y[:count], self.dst[:count]
        )

    def expected(self, part: Part, work: int) -> np.ndarray:
        """What ``dst`` holds after a launch; before it, zeros."""
        if part is Part.COMPUTE:
            return np.zeros_like(self.host_y)
        return self.host_y + np.float32(ALPHA * work) * self.host_x if part is Part.BOTH else self.host_y


@lru_cache(maxsize=2)
def arrays_for(device: Device, count: int) -> Arrays:
    rng = np.random.default_rng(SEED)
    x, y = (rng.integers(0, 64, count).astype(np.float32) for _ in range(2))
    return Arrays(x, y, device.asarray(x), device.asarray(y), device.empty(count, np.float32))


def points(axes: Axes, spec: str) -> Iterable[PipelinePoint]:
    del spec
    return pipeline_points(axes)


@pytest.mark.points.with_args(points)
def bench_pipeline(measure: Measure, point: PipelinePoint) -> None:
    """Seconds of one launch."""
    capabilities = measure.device.capabilities
    reason = PIPELINES[point.pipeline].unavailable(capabilities)
    if reason:
        measure.skip(f"{point.pipeline} {reason}")
    with measure.compiling():
        work = 0 if point.ratio is None else work_for(measure.device, point, point.ratio)
        part = PARTS[point.half]
        config = config_for(point, part, work)
        kernel = measure.device.compile(config.source).kernel()
    grid = config.grid_for(1 << 40, capabilities)
    tiles = 1 if point.half.single else point.tiles_per_cta
    count = grid * tiles * point.tile_bytes // 4
    arrays = arrays_for(measure.device, grid * point.tiles_per_cta * point.tile_bytes // 4).first(count)
    arrays.dst.fill(0)
    moved = 0 if part is Part.COMPUTE else arrays.dst.nbytes
    resident = point.max_ctas is not None
    measure.launches(
        Point(
            question=Question.PIPELINE,
            key={
                "pipeline": point.pipeline,
                "tile_bytes": point.tile_bytes,
                "num_stages": point.num_stages,
                "part": point.half.value,
                "ratio": point.ratio,
                "work": work,
            },
            traffic=Traffic(moved, 2 * moved, moved),
            memory=Memory.L2 if resident else Memory.DRAM,
            cache=CacheState.HOT if resident else CacheState.FLUSHED,
            working_set_bytes=3 * arrays.dst.nbytes,
            config={
                "grid": grid,
                "tiles_per_cta": tiles,
                "threads": config.threads,
                "shared_bytes": config.shared_bytes,
                "bytes_in_flight_per_cta": config.bytes_in_flight_per_cta,
            },
            launch_cancels=True,
            cost=resources(kernel, config.threads, config.shared_bytes, capabilities),
        ),
        lambda _, stream: run(point, config, arrays, stream),
        lambda: check_bitwise(arrays.dst.numpy(), arrays.expected(part, work)),
    )


def config_for(point: PipelinePoint, part: Part, work: int) -> PipelineConfig:
    """The pipeline's configuration; everything that the point does not name is the pipeline's own choice."""
    return PIPELINES[point.pipeline].config(
        point.tile_bytes, point.num_stages, work=work, part=part, max_ctas=point.max_ctas
    )


def run(point: PipelinePoint, config: PipelineConfig, arrays: Arrays, stream: Stream) -> None:
    PIPELINES[point.pipeline].run(arrays.dst, arrays.x, arrays.y, alpha=ALPHA, config=config, stream=stream)


def work_for(device: Device, point: PipelinePoint, ratio: float) -> int:
    """FMAs per element with which the computation on a tile takes ``ratio`` of its copy, with two stages.

    The computation's time is taken as a line through two runs. Three significant bits: so that a later run
    comes to the same number, which is a part of the point's key.
    """
    calibrated = replace(point, num_stages=2, half=Half.BOTH, ratio=None)
    few, many = CALIBRATION_WORK
    low, high = (tile_seconds(device, calibrated, Part.COMPUTE, work) for work in CALIBRATION_WORK)
    wanted = ratio * tile_seconds(device, calibrated, Part.COPY, 0)
    return rounded(few + (wanted - low) * (many - few) / (high - low))


@lru_cache
def tile_seconds(device: Device, point: PipelinePoint, part: Part, work: int) -> float:
    """What one tile more per CTA takes."""
    config = config_for(point, part, work)
    device.compile(config.source).kernel()  # nothing may be loaded behind a blocker
    tile = config.grid_for(1 << 40, device.capabilities) * point.tile_bytes // 4
    arrays = arrays_for(device, tile * point.tiles_per_cta)
    timer = DeviceTimer(DeviceQueue(device, device.stream()))
    samples = 1 if device.is_emulated else CALIBRATION_SAMPLES

    def seconds(tiles: int) -> float:
        some = arrays.first(tiles * tile)
        found = (
            timer.batch(lambda _, stream: run(point, config, some, stream), 1, count=False)
            for _ in range(samples)
        )
        return min(sample.seconds for sample in found)

    seconds(1 if part is Part.COMPUTE else point.tiles_per_cta)  # warm: a computation reads no array
    return (seconds(point.tiles_per_cta) - seconds(1)) / (point.tiles_per_cta - 1)


def rounded(work: float) -> int:
    """To three significant bits, from 1 to ``MAX_WORK``."""
    work = min(max(work, 1.0), float(MAX_WORK))
    step = 2.0 ** max(0, math.floor(math.log2(work)) - 2)
    return int(round(work / step) * step)
