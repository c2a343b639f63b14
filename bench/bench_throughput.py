"""How fast does each engine copy with the whole device filled?

Matched     every engine keeps the same bytes in flight per SM, with the same threads per CTA
At best     every engine takes the stages, threads and CTAs that serve it
Baselines   cuMemcpyDtoD, and torch's copy_ where torch is there, on the same buffers with the same timer

Bytes       a copy of S bytes reads S and writes S; bandwidth counts both and is compared with the DRAM peak
L2          flushed by a read sweep before each launch, outside the timed window
Verified    every byte of the destination, against numpy, before a number exists
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from bench.axes import THROUGHPUT, ThroughputPoint, throughput_points
from bench.cost import cost_of
from bench.pools import check_bitwise
from kernels.common import ConfigError
from kernels.engine import CopyConfig, Engine, engine
from smfree.cuda import Device, DeviceArray
from smfree.measure.fixture import Measure, Point
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Memory, Question, Traffic

SEED = 7


@dataclass(frozen=True)
class CopyBuffers:
    """Random bytes on the host and on a device, and a destination."""

    host: np.ndarray
    src: DeviceArray
    dst: DeviceArray

    def clear(self) -> None:
        self.dst.fill(0)

    def verify(self) -> None:
        check_bitwise(self.dst.numpy(), self.host)


@lru_cache(maxsize=1)
def host_bytes(num_bytes: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(SEED).bytes(num_bytes), np.uint32)


@lru_cache(maxsize=2)
def buffers_for(device: Device, num_bytes: int) -> CopyBuffers:
    host = host_bytes(num_bytes)
    return CopyBuffers(host, device.asarray(host), device.empty(host.shape, host.dtype))


def points(axes: Axes, spec: str) -> Iterable[ThroughputPoint]:
    del spec
    return throughput_points(axes)


@pytest.mark.points.with_args(points)
def bench_throughput(measure: Measure, point: ThroughputPoint) -> None:
    """Seconds of one copy over all SMs."""
    capabilities = measure.device.capabilities
    mover = engine(point.engine)
    reason = mover.unavailable(capabilities)
    if reason:
        measure.skip(f"{point.engine} {reason}")
    matched = point.bytes_in_flight is not None
    try:
        config = mover.throughput_config(
            capabilities,
            point.tile_bytes,
            bytes_in_flight_per_sm=point.bytes_in_flight,
            threads=point.threads if matched else None,
        )
    except ConfigError as error:
        measure.skip(f"{point.engine}: {error}")
    with measure.compiling():
        kernel = measure.device.compile(config.source).kernel()
        cost = cost_of(kernel, config, capabilities)
    buffers = buffers_for(measure.device, point.copy_bytes)
    buffers.clear()
    measure.launches(
        Point(
            question=Question.THROUGHPUT,
            key={
                "engine": point.engine,
                "tile_bytes": point.tile_bytes,
                "bytes_in_flight": point.bytes_in_flight,
                "memory": Memory.DRAM.value,
            },
            traffic=Traffic(point.copy_bytes, point.copy_bytes, point.copy_bytes),
            memory=Memory.DRAM,
            cache=CacheState.FLUSHED,
            working_set_bytes=2 * point.copy_bytes,
            config=described(config, mover),
            cost=cost,
        ),
        lambda _, stream: mover.copy(buffers.dst, buffers.src, config=config, stream=stream),
        buffers.verify,
    )


def described(config: CopyConfig, mover: Engine) -> Mapping[str, Any]:
    """The parts of a configuration that a reader compares."""
    return {
        "path": mover.path,
        "twin_of": mover.twin_of,
        "tile_bytes": config.tile_bytes,
        "num_stages": config.num_stages,
        "threads": config.threads,
        "ctas_per_sm": config.ctas_per_sm,
        "vector_bytes": getattr(config, "vector_bytes", None),
        "unroll": getattr(config, "unroll", None),
        "shared_bytes": config.shared_bytes,
        "bytes_in_flight_per_sm": config.bytes_in_flight_per_cta * config.ctas_per_sm,
    }


@dataclass(frozen=True, slots=True)
class BaselinePoint:
    """A copy that somebody else wrote."""

    name: str
    copy_bytes: int

    @property
    def id(self) -> str:
        return self.name


def baselines(axes: Axes, spec: str) -> Iterable[BaselinePoint]:
    del spec
    return [BaselinePoint(name, THROUGHPUT[axes].copy_bytes) for name in ("cuMemcpyDtoD", "torch.copy_")]


@pytest.mark.points.with_args(baselines)
def bench_baseline(measure: Measure, point: BaselinePoint) -> None:
    """Seconds of the same copy by the driver and by torch."""
    buffers = buffers_for(measure.device, point.copy_bytes)
    buffers.clear()
    if point.name == "torch.copy_":
        launch = _torch_copy(measure, buffers)
    else:

        def launch(_: int, stream: Any) -> object:
            return buffers.dst.copy_from_device(buffers.src, stream=stream)

    measure.launches(
        Point(
            question=Question.BASELINE,
            key={"engine": point.name, "memory": Memory.DRAM.value},
            traffic=Traffic(point.copy_bytes, point.copy_bytes, point.copy_bytes),
            memory=Memory.DRAM,
            cache=CacheState.FLUSHED,
            working_set_bytes=2 * point.copy_bytes,
        ),
        launch,
        buffers.verify,
    )


def _torch_copy(measure: Measure, buffers: CopyBuffers) -> Any:
    """torch's copy_ on views of the same memory, on the timer's stream. Skips where torch cannot reach the
    device."""
    if measure.device.is_emulated:
        measure.skip("torch.copy_ needs a real GPU: torch cannot use an emulated one")
    try:
        import torch
    except ImportError:
        measure.skip("torch is not installed")
    place = torch.device("cuda", measure.device.ordinal)
    # As int32: torch took no uint32 before 2.3.
    dst, src = (torch.as_tensor(a.view(np.int32), device=place) for a in (buffers.dst, buffers.src))
    if dst.data_ptr() != buffers.dst.ptr:
        measure.skip("this torch copies instead of viewing __cuda_array_interface__")
    timed = torch.cuda.ExternalStream(int(measure.stream.handle), device=place)

    def launch(_: int, stream: Any) -> object:
        assert stream is measure.stream
        with torch.cuda.stream(timed):
            return dst.copy_(src)

    return launch
