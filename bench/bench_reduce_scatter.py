"""Who should add what all ranks have, where each wants its chunk of the sum?

Ways        around a ring by threads or the TMA (ring.sm, ring.tma); every rank sends every other its chunk
            (direct); NCCL where it is
Bytes       messages of S bytes on each of N ranks, chunks of S/N of the sum. Algorithm bandwidth S / t, bus
            bandwidth (N - 1)/N of it, as NCCL's tests have it

Time, L2, proof: as bench_allreduce.py has them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bench.reduce_axes import REDUCE_SCATTER, ReducePoint, reduce_points
from bench.reductions import SCATTER, measure_reduction
from smfree.measure.fixture import Measure
from smfree.measure.options import Axes


def points(axes: Axes, spec: str) -> Iterable[ReducePoint]:
    del spec
    return reduce_points(REDUCE_SCATTER[axes])


@pytest.mark.collective
@pytest.mark.points.with_args(points)
def bench_reduce_scatter(measure: Measure, point: ReducePoint) -> None:
    """Seconds of one ReduceScatter."""
    measure_reduction(measure, point, SCATTER)
