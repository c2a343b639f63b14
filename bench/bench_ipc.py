"""What does it cost to reach another process's memory, and what does a pool save?

Handles    every rank exports an allocation, opens those of all its peers, uses each twice, closes them; all
           ranks at once, as when a group of them starts. Pooled is what takes the place of all that where the
           memory is part of a slab that is open: an offset
Processes  one per rank. With GPUs real ones, which share GPUs where there are fewer; with emulated GPUs
           processes of an emulated node, each with a modelled clock

Time       of the host, of one handle: the slowest rank's mean over its peers. No other benchmark opens
           anything inside of what it times
Verified   what each use has copied, against numpy, bitwise
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pytest

from bench.host_axes import IpcPoint, ipc_points
from smfree.cuda import Device, IpcError, UnavailableError, vmm_unavailable
from smfree.cuda.choose import real_devices
from smfree.measure.fixture import Measure, Point
from smfree.measure.handles import Samples, costs_of_ranks
from smfree.measure.host_costs import USE_BYTES, Backing, Operation
from smfree.measure.host_time import timed_by_host
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Memory, Question, Traffic


def points(axes: Axes, spec: str) -> Iterable[IpcPoint]:
    del spec
    return ipc_points(axes)


@pytest.mark.points.with_args(points)
def bench_ipc(measure: Measure, point: IpcPoint) -> None:
    """Seconds of one operation on one handle."""
    device, world_size = measure.device, 1 + point.peers
    reason = unavailable(device, point.backing)
    if reason:
        measure.skip(reason)
    rounds = measure.rounds + (not measure.deterministic)  # the first one warms up
    samples = measure.run(lambda: costs(device, point.backing, point.nbytes, world_size, rounds))
    if isinstance(samples, str):
        measure.skip(samples)
    moved = USE_BYTES if point.operation in (Operation.FIRST_USE, Operation.USE) else 0
    timed_by_host(
        measure,
        Point(
            question=Question.IPC_COST,
            key={
                "operation": point.operation.value,
                "backing": point.backing.value,
                "nbytes": point.nbytes,
                "peers": point.peers,
            },
            traffic=Traffic(moved, moved, moved),
            memory=Memory.PEER,
            cache=CacheState.REPEATED,
            working_set_bytes=USE_BYTES,
            config={"gpus": world_size if device.is_emulated else min(world_size, real_devices()[1])},
        ),
        iter(samples[point.operation]).__next__,
        lambda: None,  # the ranks have verified every use
    )


@lru_cache(maxsize=1)
def costs(device: Device, backing: Backing, nbytes: int, world_size: int, rounds: int) -> Samples | str:
    """Of all operations: the ranks run once for them. Or why they cannot share memory so."""
    try:
        return costs_of_ranks(device, backing, nbytes, world_size, rounds)
    except (IpcError, UnavailableError) as error:  # whatever peer access says (case D05)
        return str(error).splitlines()[0]


def unavailable(device: Device, backing: Backing) -> str | None:
    """Why the costs of a backing cannot be had here; None when they can."""
    if backing is not Backing.DESCRIPTOR:
        return None
    if device.is_emulated:
        return "what opening a file descriptor costs the host is not modelled: no public row"
    return vmm_unavailable(device)
