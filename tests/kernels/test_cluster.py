"""Rows of alpha[r] * x by clusters whose CTAs share their loads: right under every schedule, x read once per
cluster, and each mistake between CTAs reported (cases A07, A17, A20)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier.cluster import ClusterConfig, outer
from kernels.mbarrier.pipeline import Part
from smfree.cuda import Device
from tests.kernels import pairwise
from tests.kernels.mutant_kit import mutated, reported
from tests.kernels.pairwise import SCHEDULES
from tests.kernels.test_pipelines import SIZES, operands

TILE = 256  # elements
SPARE = np.float32(7.5)
AXES = {
    "spec": ("emu:h100", "emu:b200"),
    "schedule": SCHEDULES,
    "stages": range(1, 9),
    "cluster_size": (2, 4, 8),
    "multicast": (True, False),
    "size": SIZES,
    "part": list(Part),
    "work": (1, 9),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = pairwise.rows(AXES, metafunc.config)
        metafunc.parametrize("row", rows, ids=["-".join(map(str, row.values())) for row in rows])


def elements_of(size: str, stages: int) -> int:
    fixed = {"0": 0, "1": 1, "tile-1": TILE - 1, "tile": TILE, "tile+1": TILE + 1, "ragged": 5 * TILE + 133}
    return fixed.get(size, (3 * stages + 1) * TILE + 77)


def run(device: Device, config: Any, rows: int, elements: int, seed: int = 0) -> Any:
    """Run it and compare every element of dst, those behind the rows too; gives the LaunchInfo."""
    x, _ = operands(elements, seed)
    alpha = (np.random.default_rng(seed).integers(-8191, 8192, rows) / 4096).astype(np.float32)
    before = np.full((rows, -(-elements // 4) * 4 + 4), SPARE, np.float32)
    dst = device.asarray(before)
    info = outer(dst, device.asarray(alpha), device.asarray(x), config=config)
    device.synchronize()
    wanted = before.copy()
    for row in range(rows):
        if config.part is Part.COPY:
            wanted[row, :elements] = x
        elif config.part is Part.BOTH:
            wanted[row, :elements] = scaled(x, alpha[row], config.work)
    np.testing.assert_array_equal(dst.numpy().view(np.uint32), wanted.view(np.uint32))
    return info


def scaled(x: np.ndarray, alpha: np.float32, work: int) -> np.ndarray:
    """``work`` times fmaf(alpha, x, .) from 0. Both factors have 13 bits, multiples of 2^-12 and 2^-10, so
    float64 holds product and sum exactly, and only the result is rounded."""
    total = np.zeros_like(x)
    for _ in range(work):
        total = (np.float64(alpha) * x.astype(np.float64) + total.astype(np.float64)).astype(np.float32)
    return total


def test_rows_are_bitwise_right(row: dict[str, Any]) -> None:
    config = ClusterConfig(
        4 * TILE,
        row["stages"],
        96,
        row["work"],
        row["part"],
        cluster_size=row["cluster_size"],
        multicast=row["multicast"],
        max_ctas=2 * row["cluster_size"],
    )
    with pairwise.opened(row) as device:
        run(device, config, 2 * row["cluster_size"], elements_of(row["size"], row["stages"]), row["stages"])


@pytest.mark.parametrize("cluster_size", [2, 4, 8])
def test_any_tile_of_whole_slices_and_the_whole_device(cluster_size: int) -> None:
    """A slice of one 16-byte unit; last tiles in which some ranks have nothing to ask for."""
    with Device.open("emu:h100") as device:
        small = ClusterConfig(16 * cluster_size, 3, 64, cluster_size=cluster_size)
        for units in range(1, cluster_size + 1):
            run(device, small, cluster_size, 5 * 4 * cluster_size + 4 * units)
        info = run(device, ClusterConfig(1024, 2, 64, cluster_size=cluster_size), 8, 70 * 256)
        assert info.grid == 132 // cluster_size * cluster_size


@pytest.mark.parametrize("cluster_size", [2, 4, 8])
def test_with_multicast_a_cluster_reads_x_once(cluster_size: int) -> None:
    """Otherwise alike: each of the other CTAs would read x again."""
    elements, found = 20 * TILE, {}
    for multicast in (True, False):
        with Device.open("emu:h100") as device:
            config = ClusterConfig(4 * TILE, 3, cluster_size=cluster_size, multicast=multicast)
            run(device, config, cluster_size, elements)
            found[multicast] = device.emulator.last_launch.counters
    shared, apart = found[True], found[False]
    x_bytes = 4 * elements
    assert shared.bytes_async == x_bytes + cluster_size * x_bytes, "x once, a row out of each CTA"
    assert apart.bytes_async == 2 * cluster_size * x_bytes
    read = {name: c.l2_hit_bytes + c.l2_miss_bytes for name, c in (("shared", shared), ("apart", apart))}
    assert read["apart"] - read["shared"] == (cluster_size - 1) * x_bytes
    assert shared.shared_load_bytes == apart.shared_load_bytes == cluster_size * x_bytes


def test_the_compute_half_moves_nothing_and_the_copy_half_computes_nothing() -> None:
    found = {}
    for part in Part:
        with Device.open("emu:h100") as device:
            run(device, ClusterConfig(4 * TILE, 2, work=50, part=part, max_ctas=2), 2, 8 * TILE)
            found[part] = device.emulator.last_launch.counters
    both, copy, compute = (found[part] for part in Part)
    assert (compute.bytes_async, compute.tma_requests, copy.shared_load_bytes) == (0, 0, 0)
    assert copy.bytes_async == both.bytes_async
    assert copy.mbarrier_arrivals == compute.mbarrier_arrivals == both.mbarrier_arrivals > 0


RELEASE = "mbarrier_arrive_relaxed_shared_cluster(mapa_shared_cluster(empty_at(s), peer));"
CLOSING = """  __syncwarp();  // the cluster barriers are aligned: the whole warp, together
  barrier_cluster_arrive();
  barrier_cluster_wait();
"""
BROKEN: dict[str, tuple[tuple[str, str], str, tuple[str, ...]]] = {
    "A07: empty[] counts one CTA, both release": (
        ("mbarrier_init(empty_at(s), EMPTY_ARRIVALS);", "mbarrier_init(empty_at(s), 1);"),
        "timed",
        (
            "more arrivals than phase 0 expects",
            "1 of 1 pending",
            "empty[0] of CTA 0",
            "at CTA 1 thread 32, cluster.cu",
        ),
    ),
    "A07: empty[] counts both CTAs, each releases its own": (
        (RELEASE, "{ if (peer == 0) mbarrier_arrive(empty_at(s)); }"),
        "timed",
        (
            "empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 1 of 2 arrivals missing "
            "(arrived: CTA 0)",
            "empty[0] of CTA 1, phase 0 (parity 0): no bytes announced, 1 of 2 arrivals missing "
            "(arrived: CTA 1)",
            "waiting: CTA 1 thread 0 at cluster.cu",
        ),
    ),
    "A07: each CTA arrives twice on its own": (
        (RELEASE, "{ mbarrier_arrive(empty_at(s)); }"),
        "async-latest",
        ("overwrites the destination of the cp.async.bulk load", "issued by CTA", "which is not complete"),
    ),
    "A17: no closing cluster barrier": (
        (CLOSING, ""),
        "async-latest",
        ("CTA 0 touches the shared memory of CTA 1, which has exited", "thread 32, cluster.cu"),
    ),
    "A20: no cluster barrier at entry": (
        ("  barrier_cluster_arrive();\n  barrier_cluster_wait();\n\n", "  __syncthreads();\n\n"),
        "timed",
        ("touches the shared memory of CTA", "before anything has proven that it has started"),
    ),
    "one rank does not ask for its slice": (
        ("if (part != COMPUTE) load_slice", "if (part != COMPUTE && rank == 0) load_slice"),
        "timed",
        (
            "full[0] of CTA 0, phase 0 (parity 0): 512 of 1024 bytes missing, 0 of 1 arrivals missing",
            "full[0] of CTA 1, phase 0 (parity 0): 512 of 1024 bytes missing, 0 of 1 arrivals missing",
        ),
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_mistake_between_ctas_is_reported_and_its_twin_is_clean(name: str) -> None:
    replacement, schedule, words = BROKEN[name]
    config = ClusterConfig(4 * TILE, 2, 96, max_ctas=2)
    with Device.open("emu:h100", schedule=schedule) as device, reported(*words):
        run(device, mutated(config, replacement), 2, 11 * TILE)
    with Device.open("emu:h100", schedule=schedule) as device:
        run(device, config, 2, 11 * TILE)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"cluster_size": 3}, r"cluster_size is 2, 4, 8 \(got 3\); use 2"),
        ({"cluster_size": 8, "tile_bytes": 192}, r"multiple of 128 \(got 192\); use 128 or 256"),
        ({"threads": 32}, r"threads must be at least 64"),
        ({"cluster_size": 4, "empty_arrivals": 1}, r"empty\[\] .* 4 arrivals: 4 of CTA of the cluster"),
        ({"multicast": False, "empty_arrivals": 2}, r"empty\[\] completes with 1 arrivals: 1 of this CTA"),
        ({"full_tx_bytes": 512}, r"full\[\] completes with 1024 bytes: 1024 of x"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_before_compiling(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ClusterConfig(**{"tile_bytes": 1024, **wrong})


def test_wrong_operands_are_refused_by_name() -> None:
    config = ClusterConfig(1024, 2)
    with Device.open("emu:h100") as device:
        dst, alpha, x = (device.empty(shape, np.float32) for shape in ((4, 12), 4, 10))
        for arrays, rule in (
            ((dst[:3], alpha[:3], x), r"rows must be a multiple of cluster_size 2 \(got 3\)"),
            ((dst, alpha[:2], x), r"shapes must be dst \(rows, pitch\), alpha \(rows,\) and x \(n,\)"),
            ((device.empty((4, 10), np.float32), alpha, x), r"multiple of 4 elements, at least n .*; use 12"),
            ((device.empty((4, 8), np.float32), alpha, x), r"multiple of 4 elements, at least n .*; use 12"),
            ((dst, alpha, device.empty(10, np.int32)), r"dst and x must have one dtype"),
            ((dst, alpha, dst.view(np.float32)[:10]), r"dst and x must not overlap"),
            ((dst, alpha, x[1:]), r"x must be 16-byte aligned for cp.async.bulk"),
        ):
            with pytest.raises(OperandError, match=rule):
                outer(*arrays, config=config)
        assert outer(device.empty((0, 12), np.float32), alpha[:0], x, config=config).kernel is None
    with Device.open("emu:a100") as device, pytest.raises(ConfigError, match="needs the TMA"):
        run(device, config, 2, 5)
