"""How long does one tile take, by engine and size, when nothing overlaps?

One CTA walks a chain of tiles in which each address is read out of the tile before, so the time of a step
is a latency,
not a throughput. The kernel reads its own clock; a step is the slope between two chain lengths.

Bytes     a step moves one tile: read once (load, copy), written once (store, copy)
L2        the pool and the destination are small and were read just before
DRAM      the L2 is flushed by a read sweep before each walk, and every tile is visited once
Verified  the index the kernel ends on, and every byte of the destination, against numpy
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from bench.axes import LONG_STEPS, SHORT_STEPS, LatencyPoint, latency_points
from bench.pools import ChainBuffers, buffers_for, check_bitwise
from kernels.chain import Leg
from kernels.common import ConfigError
from kernels.engine import engine
from smfree.measure.errors import MeasureError
from smfree.measure.fixture import ChainReading, Measure, Point
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Cost, Memory, Question, Traffic


def points(axes: Axes, spec: str) -> Iterable[LatencyPoint]:
    del spec
    return latency_points(axes)


@pytest.mark.points.with_args(points)
def bench_latency(measure: Measure, point: LatencyPoint) -> None:
    """Cycles of one tile."""
    capabilities = measure.device.capabilities
    mover = engine(point.engine)
    reason = mover.unavailable(capabilities)
    if reason:
        measure.skip(f"{point.engine} {reason}")
    try:
        config = mover.latency_config(capabilities, point.tile_bytes, point.threads, point.leg)
    except ConfigError as error:
        measure.skip(str(error))
    with measure.compiling():
        kernel = measure.device.compile(config.source).kernel()
    buffers = buffers_for(measure.device, point.tile_bytes, point.memory)
    cold = point.memory is Memory.DRAM

    def walk(steps: int) -> tuple[float, float]:
        dst = None if point.leg is Leg.LOAD else buffers.dst
        if cold:
            measure.instruments.flush_l2()
        else:
            for array in (buffers.pool, buffers.dst):
                measure.instruments.read(array)
        mover.chain(dst, buffers.pool, buffers.result, config=config, num_steps=steps, stream=measure.stream)
        measure.stream.synchronize()
        cycles, nanoseconds, index = (int(word) for word in buffers.result.numpy())
        if index != buffers.host.final_index(steps):
            raise MeasureError(
                f"{point.id}: after {steps} tiles the kernel stood at {index}, "
                f"the chain leads to {buffers.host.final_index(steps)}"
            )
        return float(cycles), float(nanoseconds)

    def run() -> ChainReading:
        short, _ = walk(SHORT_STEPS)
        cycles, nanoseconds = walk(LONG_STEPS)
        return ChainReading((cycles - short) / (LONG_STEPS - SHORT_STEPS), cycles, nanoseconds, LONG_STEPS)

    buffers.clear()
    measure.chain(
        Point(
            question=Question.LATENCY,
            key={
                "engine": point.engine,
                "tile_bytes": point.tile_bytes,
                "threads": point.threads,
                "leg": point.leg.value,
                "memory": point.memory.value,
            },
            traffic=traffic(point),
            memory=point.memory,
            cache=CacheState.FLUSHED if cold else CacheState.HOT,
            working_set_bytes=buffers.pool.nbytes * (1 if point.leg is Leg.LOAD else 2),
            config={"threads": point.threads, "unroll": config.unroll, "shared_bytes": config.shared_bytes},
            cost=Cost(registers=kernel.registers, local_bytes=kernel.local_bytes),
        ),
        run,
        lambda: verify(point, buffers),
    )


def traffic(point: LatencyPoint) -> Traffic:
    """Bytes of one step."""
    reads = 0 if point.leg is Leg.STORE else point.tile_bytes
    writes = 0 if point.leg is Leg.LOAD else point.tile_bytes
    return Traffic(point.tile_bytes, reads, writes)


def verify(point: LatencyPoint, buffers: ChainBuffers) -> None:
    """Every byte of the destination; the load leg writes none, its proof is the index."""
    if point.leg is Leg.LOAD:
        return
    expected = buffers.host.expected(point.leg, LONG_STEPS, np.zeros_like(buffers.host.data))
    check_bitwise(buffers.dst.numpy().reshape(expected.shape), expected)
