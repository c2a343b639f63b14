"""Which engine should carry a tile to the next CTA of a cluster, and when does one copy for all CTAs pay?

Ring       each CTA passes a tile on in each step: by loads from its neighbour's shared memory, by st.async,
           or by the TMA from shared memory to shared memory
Multicast  all CTAs of a cluster want the same tiles: each asks for its share on behalf of all, or for all of
           it by itself. Each stores what it gets, which takes as long in both

Cycles     of a step, in which every CTA moves a tile: slope between launches of two lengths, so launch, fill
           and drain cancel. What each step needs stays in: of the ring a cluster barrier, a proxy fence and
           the wait; of the multicast the stores and the release of the stage by all CTAs
Bytes      a ring's go from shared memory to shared memory; a multicast's are read once per cluster or once
           per CTA, and written once per CTA
L2         hot: arrays read just before. Those of a multicast take half of it at most
Verified   dst of the longer launch against numpy, bitwise
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from bench.axes import DsmemPoint, MulticastPoint, dsmem_points, multicast_points
from bench.cost import resources
from bench.pools import check_bitwise
from kernels.common import LaunchInfo
from kernels.tma import dsmem, multicast_bulk, multicast_tensor
from kernels.tma.dsmem import DsmemConfig
from kernels.tma.multicast_bulk import MulticastBulkConfig
from kernels.tma.multicast_tensor import MulticastTensorConfig
from smfree.cuda import Capabilities, Device, DeviceArray, Kernel
from smfree.measure.fixture import ChainReading, Measure, Point
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Memory, Question, Traffic
from smfree.measure.slope import slope

SEED = 5
STEPS = (17, 272)
"""Steps of the two launches of a ring. Their difference is odd, so no cluster of even size ends as it was."""
MODELLED_STEPS = (3, 12)
"""The same on a deterministic clock, which needs no more than to get past the first steps."""
WARP = 32
BOX_COLS = 32
"""Elements of 4 bytes in a row of a box: 128 bytes."""


def points(axes: Axes, spec: str) -> Iterable[DsmemPoint]:
    del spec
    return dsmem_points(axes)


@pytest.mark.points.with_args(points)
def bench_dsmem(measure: Measure, point: DsmemPoint) -> None:
    """Cycles of one step of a ring."""
    device = measure.device
    need_clusters(measure)
    config = DsmemConfig(path=point.path, tile_bytes=point.tile_bytes, cluster=point.cluster)
    with measure.compiling():
        kernel = device.compile(config.source).kernel()
    groups = clusters_of(kernel, point.cluster, config.threads, device.capabilities) if point.filled else 1
    shape = (groups, point.cluster, point.tile_bytes // 4)
    host, src, dst = arrays_for(device, shape, shape)
    short, long = MODELLED_STEPS if measure.deterministic else STEPS
    dst.fill(0, stream=measure.stream)

    def launch(steps: int, stream: Any) -> LaunchInfo:
        return dsmem.rotate(dst, src, config=config, num_steps=steps, stream=stream)

    moved = host.nbytes
    measure.chain(
        Point(
            question=Question.DSMEM,
            key={
                "path": point.path.value,
                "tile_bytes": point.tile_bytes,
                "cluster": point.cluster,
                "filled": point.filled,
            },
            traffic=Traffic(moved, moved, moved),
            memory=Memory.DSMEM,
            cache=CacheState.HOT,
            working_set_bytes=2 * moved,
            config=described(groups * point.cluster, config.threads, config.shared_bytes, short, long),
            cost=resources(kernel, config.threads, config.shared_bytes, device.capabilities),
        ),
        lambda: hot_slope(measure, (src, dst), launch, short, long),
        lambda: check_bitwise(dst.numpy(), np.roll(host, long, axis=1)),
    )


def copies(axes: Axes, spec: str) -> Iterable[MulticastPoint]:
    del spec
    return multicast_points(axes)


@pytest.mark.points.with_args(copies)
def bench_multicast(measure: Measure, point: MulticastPoint) -> None:
    """Cycles of one tile in every CTA."""
    device, capabilities = measure.device, measure.device.capabilities
    need_clusters(measure)
    config = multicast_config(point)
    with measure.compiling():
        kernel = device.compile(config.source).kernel()
    fit = kernel.occupancy(WARP, config.shared_bytes)
    if fit < point.ctas_per_sm:
        measure.skip(f"{point.ctas_per_sm} CTAs of {config.shared_bytes} bytes per SM: {fit} fit")
    groups = clusters_of(kernel, point.cluster, WARP, capabilities) * point.ctas_per_sm
    config = replace(config, max_ctas=groups * point.cluster)
    share = point.cluster if point.multicast else 1
    delivered = groups * point.cluster * point.tile_bytes  # in a step, over all CTAs
    room = capabilities.l2_bytes // 2 // (delivered + groups * point.tile_bytes)
    long = min(point.max_tiles, room)
    short = max(long // 2, point.num_stages)
    if short >= long:
        measure.skip(f"{room} tiles per CTA fit in half of the L2, {point.num_stages + 1} are needed")
    words = point.tile_bytes // 4
    host, src, dst = arrays_for(device, (groups * long * words,), (point.cluster, groups * long * words))
    dst.fill(0, stream=measure.stream)

    def launch(tiles: int, stream: Any) -> LaunchInfo:
        """The last tiles of src: a longer launch puts other ones in their place."""
        count = groups * tiles * words
        rows = dst.view(np.uint32, (dst.size,))[: point.cluster * count]
        some = src[src.size - count :]
        if isinstance(config, MulticastBulkConfig):
            rows = rows.view(np.uint32, (point.cluster, count))
            return multicast_bulk.broadcast(rows, some, config=config, stream=stream)
        matrix = (count // BOX_COLS, BOX_COLS)
        return multicast_tensor.broadcast(
            rows.view(np.uint32, (point.cluster, *matrix)),
            some.view(np.uint32, matrix),
            config=config,
            stream=stream,
        )

    measure.chain(
        Point(
            question=Question.MULTICAST,
            key={
                "form": point.form,
                "multicast": point.multicast,
                "tile_bytes": point.tile_bytes,
                "cluster": point.cluster,
                "ctas_per_sm": point.ctas_per_sm,
            },
            traffic=Traffic(delivered, delivered // share, delivered),
            memory=Memory.L2,
            cache=CacheState.HOT,
            working_set_bytes=host.nbytes + dst.nbytes,
            config=described(groups * point.cluster, WARP, config.shared_bytes, short, long)
            | {"num_stages": point.num_stages},
            cost=resources(kernel, WARP, config.shared_bytes, capabilities),
        ),
        lambda: hot_slope(measure, (src, dst), launch, short, long),
        lambda: check_bitwise(dst.numpy(), np.broadcast_to(host, dst.shape)),
    )


def multicast_config(point: MulticastPoint) -> MulticastBulkConfig | MulticastTensorConfig:
    """The form's configuration; a box has rows of 128 bytes."""
    shared: dict[str, Any] = {
        "cluster": point.cluster,
        "multicast": point.multicast,
        "num_stages": point.num_stages,
        "ctas_per_sm": point.ctas_per_sm,
    }
    if point.form == "bulk":
        return MulticastBulkConfig(tile_bytes=point.tile_bytes, **shared)
    return MulticastTensorConfig(box_rows=point.tile_bytes // (4 * BOX_COLS), box_cols=BOX_COLS, **shared)


def need_clusters(measure: Measure) -> None:
    capabilities = measure.device.capabilities
    if not capabilities.has_clusters:
        major, minor = capabilities.compute_capability
        measure.skip(
            f"clusters need compute capability 9.0 or higher; {capabilities.name} has {major}.{minor}"
        )


def clusters_of(kernel: Kernel, cluster: int, threads: int, capabilities: Capabilities) -> int:
    """Clusters that the device holds with one CTA per SM."""
    whole_sm = capabilities.max_shared_bytes_per_block - kernel.static_shared_bytes
    return min(kernel.max_active_clusters(cluster, threads, whole_sm), capabilities.num_sms // cluster)


def hot_slope(
    measure: Measure,
    arrays: Sequence[DeviceArray],
    launch: Callable[[int, Any], object],
    short: int,
    long: int,
) -> ChainReading:
    """The slope, with the arrays in the L2."""
    if not measure.deterministic:  # a first launch may wait for what never comes while the stream is held
        launch(short, measure.stream)
    for array in arrays:
        measure.instruments.read(array)
    measure.stream.synchronize()  # a launch right behind them would wait for a gap that the other has not
    return slope(measure, launch, short, long)


def described(ctas: int, threads: int, shared_bytes: int, short: int, long: int) -> dict[str, Any]:
    """``turns``: steps that a reading is divided by."""
    return {
        "ctas": ctas,
        "threads": threads,
        "shared_bytes": shared_bytes,
        "steps": [short, long],
        "turns": long - short,
    }


@lru_cache(maxsize=2)
def arrays_for(
    device: Device, src_shape: tuple[int, ...], dst_shape: tuple[int, ...]
) -> tuple[np.ndarray, DeviceArray, DeviceArray]:
    """Random words on the host and on a device, and a destination."""
    host = np.random.default_rng(SEED).integers(0, 2**32, src_shape, np.uint32)
    return host, device.asarray(host), device.empty(dst_shape, np.uint32)
