"""Axes of what the host waits for, quick and full: handles of other processes' memory, copies of its own.

As in :mod:`bench.axes`, QUICK is for an emulated GPU, FULL for a real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from smfree.measure.host_costs import Backing, Direction, HostMemory, Operation
from smfree.measure.options import Axes
from smfree.model.crossover import format_bytes

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class IpcAxes:
    backings: tuple[Backing, ...]
    nbytes: tuple[int, ...]
    peers: tuple[int, ...]


IPC: Mapping[Axes, IpcAxes] = {
    Axes.QUICK: IpcAxes(tuple(Backing), (2 * MIB, 64 * MIB), (1, 3)),
    Axes.FULL: IpcAxes(tuple(Backing), (64 * KIB, 2 * MIB, 64 * MIB, 1024 * MIB), (1, 3, 7)),
}


@dataclass(frozen=True, slots=True)
class HostAxes:
    memories: tuple[HostMemory, ...]
    directions: tuple[Direction, ...]
    nbytes: tuple[int, ...]


HOST: Mapping[Axes, HostAxes] = {
    Axes.QUICK: HostAxes(tuple(HostMemory), tuple(Direction), (4 * KIB, 256 * KIB, 16 * MIB)),
    Axes.FULL: HostAxes(
        tuple(HostMemory), tuple(Direction), tuple(4 * KIB << power for power in range(0, 17, 2))
    ),
}


@dataclass(frozen=True, slots=True)
class IpcPoint:
    """One operation on allocations of ``nbytes``, each rank with ``peers`` others."""

    backing: Backing
    nbytes: int
    peers: int
    operation: Operation

    @property
    def id(self) -> str:
        size = format_bytes(self.nbytes).replace(" ", "")
        words = (self.backing.name.lower(), size, f"{self.peers}peers", self.operation.name.lower())
        return "-".join(words)


@dataclass(frozen=True, slots=True)
class HostPoint:
    """A copy of ``nbytes`` each way that it goes."""

    memory: HostMemory
    direction: Direction
    nbytes: int

    @property
    def id(self) -> str:
        size = format_bytes(self.nbytes).replace(" ", "")
        return f"{self.memory.name.lower()}-{self.direction.name.lower()}-{size}"


def ipc_points(axes: Axes) -> Iterator[IpcPoint]:
    """All operations, fastest, so that the ranks run once for all of them."""
    chosen = IPC[axes]
    for backing in chosen.backings:
        for peers in chosen.peers:
            for nbytes in chosen.nbytes:
                for operation in Operation:
                    yield IpcPoint(backing, nbytes, peers, operation)


def host_points(axes: Axes) -> Iterator[HostPoint]:
    """All copies, the directions fastest, so that they share their memory."""
    chosen = HOST[axes]
    for memory in chosen.memories:
        for nbytes in chosen.nbytes:
            for direction in chosen.directions:
                yield HostPoint(memory, direction, nbytes)
