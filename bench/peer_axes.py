"""What is measured between GPUs: every axis of it, quick and full (see :mod:`bench.axes`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from smfree.measure.options import Axes
from smfree.model.crossover import format_bytes

KIB = 1024

#: Ways of an AllGather (kernels.ipc.allgather), the copy engines' in both forms, and what is compared.
KERNEL_WAYS = ("sm.push", "sm.pull", "tma.push", "tma.pull", "multicast")
GATHER_WAYS = ("ce.batch", "ce.streams", *KERNEL_WAYS, "staged")
NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class AllgatherAxes:
    """Shards of ``shard_bytes`` on ``ranks`` GPUs by all ways; fewer sizes and ways on ``other_ranks``.

    ``ctas``: grids of the ``swept_ways``, for shards of ``swept_bytes``. What each way moves is told for
    shards of ``counted_bytes``.
    """

    ranks: int
    shard_bytes: tuple[int, ...]
    other_ranks: tuple[int, ...]
    other_bytes: tuple[int, ...]
    other_ways: tuple[str, ...]
    ctas: tuple[int, ...]
    swept_ways: tuple[str, ...]
    swept_ranks: int
    swept_bytes: int
    counted_bytes: int


ALLGATHER: Mapping[Axes, AllgatherAxes] = {
    Axes.QUICK: AllgatherAxes(
        ranks=4,
        shard_bytes=(1 * KIB, 32 * KIB, 1024 * KIB),
        other_ranks=(8,),
        other_bytes=(32 * KIB,),
        other_ways=("ce.batch", "sm.push", "multicast"),
        ctas=(1, 4, 16),
        swept_ways=("sm.push", "tma.push"),
        swept_ranks=2,
        swept_bytes=1024 * KIB,
        counted_bytes=32 * KIB,
    ),
    Axes.FULL: AllgatherAxes(
        ranks=8,
        shard_bytes=tuple(KIB << power for power in range(0, 19, 2)),
        other_ranks=(2, 4),
        other_bytes=tuple(KIB << power for power in range(0, 19, 2)),
        other_ways=(*GATHER_WAYS, NCCL),
        ctas=(1, 2, 4, 8, 16, 32, 64, 128),
        swept_ways=KERNEL_WAYS,
        swept_ranks=2,
        swept_bytes=64 << 20,
        counted_bytes=16 * KIB,
    ),
}


@dataclass(frozen=True, slots=True)
class PeerFlagAxes:
    """Bytes in front of a flag between two of ``ranks`` GPUs."""

    ranks: tuple[int, ...]
    data_bytes: tuple[int, ...]


PEER_FLAG: Mapping[Axes, PeerFlagAxes] = {
    Axes.QUICK: PeerFlagAxes(ranks=(2,), data_bytes=(128, 4 * KIB)),
    Axes.FULL: PeerFlagAxes(ranks=(2, 8), data_bytes=(16, 128, 1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)),
}


@dataclass(frozen=True, slots=True)
class AllgatherPoint:
    """One AllGather. ``ctas``: None for the way's own choice. ``counted``: for the table of what moves."""

    way: str
    ranks: int
    shard_bytes: int
    ctas: int | None
    counted: bool
    largest_bytes: int

    @property
    def id(self) -> str:
        size = format_bytes(self.shard_bytes).replace(" ", "")
        grid = "" if self.ctas is None else f"-{self.ctas}ctas"
        return f"{self.way}-{size}-{self.ranks}ranks{grid}"


@dataclass(frozen=True, slots=True)
class PeerFlagPoint:
    """Messages between two ranks: a flag, with a release or not, behind ``data_bytes``."""

    data_bytes: int
    release: bool
    ranks: int

    @property
    def id(self) -> str:
        size = format_bytes(self.data_bytes).replace(" ", "")
        return f"{size}-{'released' if self.release else 'relaxed'}-{self.ranks}ranks"


def allgather_points(axes: Axes) -> Iterator[AllgatherPoint]:
    """All gathers, the number of ranks slowest, so that a group serves all its points in turn."""
    chosen = ALLGATHER[axes]
    for ranks in sorted({chosen.ranks, chosen.swept_ranks, *chosen.other_ranks}):
        swept = chosen.swept_bytes if ranks == chosen.swept_ranks else 0
        sizes = chosen.shard_bytes if ranks == chosen.ranks else chosen.other_bytes
        ways = (*GATHER_WAYS, NCCL) if ranks == chosen.ranks else chosen.other_ways
        largest = max(*sizes, swept)
        for shard_bytes in sizes if ranks == chosen.ranks or ranks in chosen.other_ranks else ():
            counted = ranks == chosen.ranks and shard_bytes == chosen.counted_bytes
            for way in ways:
                yield AllgatherPoint(way, ranks, shard_bytes, None, counted, largest)
        if swept:
            for way in chosen.swept_ways:
                for ctas in chosen.ctas:
                    yield AllgatherPoint(way, ranks, swept, ctas, False, largest)


def peer_flag_points(axes: Axes) -> Iterator[PeerFlagPoint]:
    """All messages."""
    chosen = PEER_FLAG[axes]
    for ranks in chosen.ranks:
        yield PeerFlagPoint(0, False, ranks)
        for data_bytes in (0, *chosen.data_bytes):
            yield PeerFlagPoint(data_bytes, True, ranks)
