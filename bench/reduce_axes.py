"""What is reduced between GPUs: every axis of it, quick and full (see :mod:`bench.axes`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.peer_axes import KIB, NCCL
from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.elements import Element
from smfree.measure.options import Axes
from smfree.model.crossover import format_bytes


@dataclass(frozen=True, slots=True)
class ReduceAxes:
    """Messages of ``message_bytes`` on ``ranks`` GPUs by all ``ways``; fewer sizes and ways on
    ``other_ranks``. Of bfloat16; messages of ``float32_bytes`` of that type, too.

    ``ctas``: grids of the ``swept_ways``, for messages of ``swept_bytes``. What each way moves is told for
    messages of ``counted_bytes``.
    """

    ways: tuple[str, ...]
    ranks: int
    message_bytes: tuple[int, ...]
    other_ranks: tuple[int, ...]
    other_bytes: tuple[int, ...]
    other_ways: tuple[str, ...]
    float32_bytes: tuple[int, ...]
    ctas: tuple[int, ...]
    swept_ways: tuple[str, ...]
    swept_ranks: int
    swept_bytes: int
    counted_bytes: int


ALLREDUCE_WAYS = (*allreduce.WAYS, NCCL)
SCATTER_WAYS = (*reduce_scatter.WAYS, NCCL)
SWEPT_WAYS = tuple(way for way in allreduce.WAYS if way != "ce")
"""Those with a grid of their own."""

#: 8 B to 256 MiB, in steps of four.
ALL_BYTES = (*(8 << power for power in range(0, 25, 2)), 256 << 20)

ALLREDUCE: Mapping[Axes, ReduceAxes] = {
    Axes.QUICK: ReduceAxes(
        ways=ALLREDUCE_WAYS,
        ranks=4,
        message_bytes=(1 * KIB, 64 * KIB, 1024 * KIB),
        other_ranks=(8,),
        other_bytes=(64 * KIB,),
        other_ways=("ring.sm", "twoshot", "nvls"),
        float32_bytes=(),
        ctas=(1, 4, 16),
        swept_ways=("ring.sm", "twoshot"),
        swept_ranks=2,
        swept_bytes=256 * KIB,
        counted_bytes=64 * KIB,
    ),
    Axes.FULL: ReduceAxes(
        ways=ALLREDUCE_WAYS,
        ranks=8,
        message_bytes=ALL_BYTES,
        other_ranks=(2, 4),
        other_bytes=ALL_BYTES,
        other_ways=ALLREDUCE_WAYS,
        float32_bytes=(32 * KIB, 2 << 20, 128 << 20),
        ctas=(1, 2, 4, 8, 16, 32, 64, 128),
        swept_ways=SWEPT_WAYS,
        swept_ranks=2,
        swept_bytes=64 << 20,
        counted_bytes=32 * KIB,
    ),
}

REDUCE_SCATTER: Mapping[Axes, ReduceAxes] = {
    Axes.QUICK: ReduceAxes(
        ways=SCATTER_WAYS,
        ranks=4,
        message_bytes=(64 * KIB,),
        other_ranks=(),
        other_bytes=(),
        other_ways=(),
        float32_bytes=(),
        ctas=(),
        swept_ways=(),
        swept_ranks=4,
        swept_bytes=0,
        counted_bytes=64 * KIB,
    ),
    Axes.FULL: ReduceAxes(
        ways=SCATTER_WAYS,
        ranks=8,
        message_bytes=ALL_BYTES[2::2],  # every rank's chunk has an element
        other_ranks=(2, 4),
        other_bytes=(32 * KIB, 8 << 20, 128 << 20),
        other_ways=SCATTER_WAYS,
        float32_bytes=(),
        ctas=(),
        swept_ways=(),
        swept_ranks=8,
        swept_bytes=0,
        counted_bytes=32 * KIB,
    ),
}


@dataclass(frozen=True, slots=True)
class ReducePoint:
    """One reduction. ``ctas``: None for the way's own choice. ``counted``: for the table of what moves."""

    way: str
    ranks: int
    message_bytes: int
    dtype: str
    ctas: int | None
    counted: bool
    largest_bytes: int

    @property
    def id(self) -> str:
        size = format_bytes(self.message_bytes).replace(" ", "")
        grid = "" if self.ctas is None else f"-{self.ctas}ctas"
        return f"{self.way}-{size}-{self.dtype}-{self.ranks}ranks{grid}"


def reduce_points(chosen: ReduceAxes) -> Iterator[ReducePoint]:
    """All reductions, the number of ranks slowest, so that a group serves all its points in turn."""
    for ranks in sorted({chosen.ranks, chosen.swept_ranks, *chosen.other_ranks}):
        main = ranks == chosen.ranks
        swept = chosen.swept_bytes if ranks == chosen.swept_ranks else 0
        sizes = chosen.message_bytes if main else chosen.other_bytes if ranks in chosen.other_ranks else ()
        ways = chosen.ways if main else tuple(way for way in chosen.ways if way in chosen.other_ways)
        alike = [(Element.BF16, size) for size in sizes]
        alike += [(Element.F32, size) for size in chosen.float32_bytes if main]
        largest = max(swept, *(size for _, size in alike), 0)
        for element, size in alike:
            counted = main and element is Element.BF16 and size == chosen.counted_bytes
            for way in ways:
                yield ReducePoint(way, ranks, size, element.value, None, counted, largest)
        for way in chosen.swept_ways if swept else ():
            for ctas in chosen.ctas:
                yield ReducePoint(way, ranks, swept, Element.BF16.value, ctas, False, largest)
