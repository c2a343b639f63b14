"""How fast does the host's memory come and go, and what do pageable or far memory cost?

Memory     page-locked near the GPU, pageable near the GPU, page-locked on another NUMA node
Direction  to the device, to the host, both at once on two streams

Time       of the host: from the call until it knows that all is done, so a pageable copy, which the driver
           stages while the call waits, stands beside the others
Bytes      payload; both ways count together
Verified   every byte of both sides against numpy
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest

from bench.host_axes import HostPoint, host_points
from bench.pools import check_bitwise
from smfree.cuda import Device, DeviceArray, HostBuffer, Stream, UnavailableError
from smfree.cuda.numa import nodes
from smfree.measure.fixture import Measure, Point
from smfree.measure.host_costs import Direction, HostMemory
from smfree.measure.host_time import timed_by_host
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Memory, Question, Traffic

SEED = 23


def points(axes: Axes, spec: str) -> Iterable[HostPoint]:
    del spec
    return host_points(axes)


@pytest.mark.points.with_args(points)
def bench_host(measure: Measure, point: HostPoint) -> None:
    """Seconds of one copy, or of one each way."""
    device = measure.device
    if point.memory is HostMemory.PAGEABLE and point.direction is Direction.BOTH:
        measure.skip("a copy of pageable memory keeps its host thread, so one thread has no two at once")
    try:
        pairs = buffers(device, point.memory, point.nbytes)
    except UnavailableError as error:
        measure.skip(str(error))
    ways = [pair for pair in pairs if point.direction in (pair.direction, Direction.BOTH)]
    for way in ways:
        way.clear()
    moved = len(ways) * point.nbytes

    def seconds() -> float:
        start = device.host_seconds()
        for way in ways:
            device.copy(way.dst, way.src, stream=way.stream)
        for way in ways:
            way.stream.synchronize()
        return device.host_seconds() - start

    def verify() -> None:
        for way in ways:
            check_bitwise(way.arrived(), way.data)

    timed_by_host(
        measure,
        Point(
            question=Question.HOST_COPY,
            key={
                "memory": point.memory.value,
                "direction": point.direction.value,
                "nbytes": point.nbytes,
            },
            traffic=Traffic(moved, moved, moved),
            memory=Memory.HOST,
            cache=CacheState.REPEATED,
            working_set_bytes=2 * moved,
            config={"numa_node_of_gpu": device.numa_node, "numa_node": node_for(device, point.memory)},
        ),
        seconds,
        verify,
    )


@dataclass(frozen=True)
class Way:
    """A copy in one direction: random bytes and where they go."""

    direction: Direction
    data: np.ndarray
    dst: DeviceArray | HostBuffer
    src: DeviceArray | HostBuffer
    stream: Stream

    def clear(self) -> None:
        """So that a copy that never came shows."""
        if isinstance(self.dst, HostBuffer):
            self.dst.array[...] = 0
        else:
            self.dst.fill(0)
            self.dst.device.synchronize()

    def arrived(self) -> np.ndarray:
        """The bytes at the destination."""
        return self.dst.array if isinstance(self.dst, HostBuffer) else self.dst.numpy()


@lru_cache(maxsize=1)
def buffers(device: Device, memory: HostMemory, nbytes: int) -> tuple[Way, Way]:
    """Both directions, with memory of their own. Raises UnavailableError, the reason of a skip."""
    allocate = host_memory(device, memory)
    up, down = np.random.default_rng(SEED).integers(0, 256, (2, nbytes), np.uint8)
    above, below = allocate(nbytes), allocate(nbytes)
    above.array[...] = up
    there = device.empty(nbytes)
    return (
        Way(Direction.TO_DEVICE, up, there, above, device.stream()),
        Way(Direction.TO_HOST, down, below, device.asarray(down), device.stream()),
    )


def host_memory(device: Device, memory: HostMemory) -> Callable[[int], HostBuffer]:
    """What allocates such memory. Raises UnavailableError."""
    node = node_for(device, memory)
    make = device.pageable if memory is HostMemory.PAGEABLE else device.pinned
    return lambda nbytes: make(nbytes, numa_node=node)


def node_for(device: Device, memory: HostMemory) -> int | None:
    """The NUMA node of such memory, None where there is only one to choose. Raises UnavailableError."""
    known = node_numbers(device)
    if memory is not HostMemory.FAR:
        return device.numa_node if len(known) > 1 else None
    if len(known) < 2:
        raise UnavailableError("this machine has one NUMA node: no memory is far")
    if device.numa_node is None:
        raise UnavailableError("neither driver nor system tells which NUMA node is near the GPU")
    return next(node for node in known if node != device.numa_node)


def node_numbers(device: Device) -> tuple[int, ...]:
    """The NUMA nodes of the device's machine."""
    if not device.is_emulated:
        return nodes()
    from smfree.emulator.links import NUMA_NODES

    return tuple(range(NUMA_NODES))
