"""How long does one tile take, by engine and size, when nothing overlaps?

One CTA walks a chain of tiles in which each address is read out of the tile before, so the time of a step is
a latency, not a throughput. The kernel reads its own clock; a step is the slope between a short and a long
walk over tiles of their own.

Bytes     a step moves one tile: read once (load, copy), written once (store, copy)
L2        the pool and the destination are small and were read just before
DRAM      the L2 is flushed by a read sweep before the walks, and every tile is visited once
Verified  the index the kernel ends on, and every byte of the destination, against numpy
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bench.axes import LONG_STEPS, SHORT_STEPS, LatencyPoint, latency_points
from bench.pools import ChainBuffers, long_buffers, short_buffers
from kernels.chain import Leg
from kernels.common import ConfigError
from kernels.engine import engine
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
    short = short_buffers(measure.device, point.tile_bytes)
    long = long_buffers(measure.device, point.tile_bytes, point.memory)

    def walk(buffers: ChainBuffers, steps: int) -> tuple[float, float]:
        dst = None if point.leg is Leg.LOAD else buffers.dst
        mover.chain(dst, buffers.pool, buffers.result, config=config, num_steps=steps, stream=measure.stream)
        measure.stream.synchronize()
        return buffers.read_result(steps)

    def run() -> ChainReading:
        if point.memory is Memory.DRAM:
            measure.instruments.flush_l2()
        else:
            for buffers in (short, long):
                measure.instruments.read(buffers.pool)
                measure.instruments.read(buffers.dst)
        first, _ = walk(short, SHORT_STEPS)
        cycles, nanoseconds = walk(long, LONG_STEPS)
        return ChainReading((cycles - first) / (LONG_STEPS - SHORT_STEPS), cycles, nanoseconds, LONG_STEPS)

    short.clear()
    long.clear()
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
            cache=CacheState.FLUSHED if point.memory is Memory.DRAM else CacheState.HOT,
            working_set_bytes=long.pool.nbytes * (1 if point.leg is Leg.LOAD else 2),
            config={"threads": point.threads, "unroll": config.unroll, "shared_bytes": config.shared_bytes},
            cost=Cost(registers=kernel.registers, local_bytes=kernel.local_bytes),
        ),
        run,
        lambda: long.verify(point.leg, LONG_STEPS),
    )


def traffic(point: LatencyPoint) -> Traffic:
    """Bytes of one step."""
    reads = 0 if point.leg is Leg.STORE else point.tile_bytes
    writes = 0 if point.leg is Leg.LOAD else point.tile_bytes
    return Traffic(point.tile_bytes, reads, writes)
