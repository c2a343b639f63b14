"""Who should add what all ranks have: rings, trees, everyone for itself, the switch, copies and a kernel?

Ways        around a ring by threads or the TMA (ring.sm, ring.tma); up and down two trees (tree); every rank
            adds everything (oneshot), or its chunk and sends the sum (twoshot); the switch adds (nvls); copy
            engines bring and a kernel adds (ce); NCCL where it is
Grid        CTAs of the kernels, at most one per SM: the way's own choice, and a sweep for the SMs that
            saturate

Time        of a whole AllReduce: it begins when all ranks' streams are let go at once, and ends on the
            slowest rank. Launch, signals and the wait for the slowest are part of it
Bytes       messages of S bytes on each of N ranks, not in place: a repeated one has the same result.
            Algorithm bandwidth S / t, bus bandwidth 2 (N - 1)/N of it, as NCCL's tests have it
L2          as the same reduction on the same buffers left it; counted bytes are those of a cold one
Verified    every element of every rank's dst, before a number exists: to the bit where the way has an order
            of summation (kernels/reduce/order.py), else within the bound that its roundings give
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bench.reduce_axes import ALLREDUCE, ReducePoint, reduce_points
from bench.reductions import ALL, measure_reduction
from smfree.measure.fixture import Measure
from smfree.measure.options import Axes


def points(axes: Axes, spec: str) -> Iterable[ReducePoint]:
    del spec
    return reduce_points(ALLREDUCE[axes])


@pytest.mark.collective
@pytest.mark.points.with_args(points)
def bench_allreduce(measure: Measure, point: ReducePoint) -> None:
    """Seconds of one AllReduce."""
    measure_reduction(measure, point, ALL)
