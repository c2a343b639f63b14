"""One copy for all CTAs of a cluster: the same bytes in each, the L2 read once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import multicast_bulk, multicast_tensor
from kernels.tma.multicast_bulk import MulticastBulkConfig
from kernels.tma.multicast_tensor import MulticastTensorConfig
from smfree.cuda import Device
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import SIZES, extent, faults, filled, mutated, random_array, same_bits, sweep

TILE = 1024
BULK = MulticastBulkConfig(tile_bytes=TILE, cluster=4, num_stages=2, max_ctas=8)
TENSOR = MulticastTensorConfig(box_rows=16, box_cols=32, cluster=4, num_stages=2, max_ctas=8)
FORMS: dict[str, Any] = {
    "bulk": (multicast_bulk.broadcast, BULK),
    "tensor": (multicast_tensor.broadcast, TENSOR),
}


def check(device: Device, form: str, config: Any, shape: tuple[int, ...], dtype: Any = np.uint32) -> None:
    data = random_array(shape, dtype, 7)
    src, dst = device.asarray(data), filled(device, (config.cluster, *shape), dtype)
    FORMS[form][0](dst, src, config=config)
    device.synchronize()
    same_bits(dst.numpy(), np.broadcast_to(data, dst.shape))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    axes: dict[str, Any] = {"form": list(FORMS), "multicast": (True, False), "cluster": (2, 4)}
    sweep(metafunc, num_stages=range(1, 9), size=SIZES, **axes)


def test_every_combination(row: Row) -> None:
    """One cluster takes all tiles."""
    stages, form, cluster = row["num_stages"], row["form"], row["cluster"]
    config = replace(
        FORMS[form][1], num_stages=stages, multicast=row["multicast"], cluster=cluster, max_ctas=cluster
    )
    with opened(row) as device:
        if form == "bulk":
            check(device, form, config, (extent(row["size"], TILE, stages, 16),), np.uint8)
        else:
            check(device, form, config, (extent(row["size"], 16, stages), 28))


@pytest.mark.parametrize("shape", [(1, 4), (15, 32), (17, 36), (70, 40)])
def test_matrices_around_the_box(shape: tuple[int, int], tma_device: Device) -> None:
    for multicast in (True, False):
        check(tma_device, "tensor", replace(TENSOR, multicast=multicast), shape)


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("form", list(FORMS))
def test_the_l2_is_read_once_for_the_whole_cluster(form: str, cluster: int) -> None:
    data = random_array((128, 32), np.uint32, 1)
    stored = cluster * data.nbytes
    read = {}
    for multicast in (True, False):
        with Device.open("emu:h100") as device:
            check(device, form, replace(FORMS[form][1], cluster=cluster, multicast=multicast), data.shape)
            counters = device.emulator.last_launch.counters
        read[multicast] = counters.l2_hit_bytes + counters.l2_miss_bytes - stored
        assert counters.bytes_multicast == (stored if multicast else 0)
        assert counters.bytes_through_registers == 0
    assert read == {True: data.nbytes, False: stored}


def test_clusters_fill_the_sms_as_often_as_asked(tma_device: Device) -> None:
    sms = tma_device.capabilities.num_sms
    for per_sm in (1, 3):
        config = replace(BULK, max_ctas=None, ctas_per_sm=per_sm)
        assert config.grid_for(10**6, tma_device.capabilities) == sms * per_sm // 4 * 4
        assert config.grid_for(2, tma_device.capabilities) == 8
    check(tma_device, "bulk", replace(BULK, max_ctas=None, ctas_per_sm=2), (2 * sms * TILE,), np.uint8)


ONE_STAGE = replace(BULK, cluster=2, num_stages=1, max_ctas=2)
BROKEN = {
    "a stage released to its own CTA only": (
        "for (u32 peer = 0; peer < CLUSTER; ++peer)",
        "for (u32 peer = rank; peer == rank; ++peer)",
        ("empty of CTA 0, phase 0", "1 of 2 arrivals missing (arrived: CTA 0)", "empty of CTA 1"),
    ),
    "the stage's barrier counted for one CTA": (
        "mbarrier_init(empty_at(s), CLUSTER);",
        "mbarrier_init(empty_at(s), 1);",
        ("more arrivals than phase 0 expects", "1 of 1 pending", "mbarrier.arrive.relaxed.cluster"),
    ),
    "only a CTA's own share announced": (
        "mbarrier_arrive_expect_tx(full_at(s), tile_bytes);",
        "mbarrier_arrive_expect_tx(full_at(s), tile_bytes / CLUSTER);",
        ("cp.async.bulk store reads", "which is not complete; wait for that first"),
    ),
    "a CTA left out of the mask": (
        "(1u << CLUSTER) - 1",
        "1",
        ("full of CTA 1, phase 0", "1024 of 1024 bytes missing", "0 of 1 arrivals missing"),
    ),
    "no cluster barrier at entry": (
        "  __syncwarp();\n  barrier_cluster_arrive();\n  barrier_cluster_wait();\n\n",
        "",
        ("CTA 0 touches the shared memory of CTA 1 before anything has proven that it has started",),
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_mistake_between_the_ctas_is_reported(name: str) -> None:
    """A07 and its like; the twin is the kernel as it is."""
    line, replacement, words = BROKEN[name]
    broken = mutated(ONE_STAGE, line, replacement)
    with faults(*words, "multicast_bulk.cu"), Device.open("emu:h100") as device:
        check(device, "bulk", broken, (5 * TILE,), np.uint8)
    with Device.open("emu:h100") as device:
        check(device, "bulk", ONE_STAGE, (5 * TILE,), np.uint8)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("bulk", {"cluster": 3}, "cluster is 2, 4 or 8 CTAs .got 3"),
        ("bulk", {"cluster": 16}, "cluster is 2, 4 or 8 CTAs .got 16"),
        ("bulk", {"cluster": 2.0}, "cluster must be a whole number"),
        ("bulk", {"multicast": 1}, "multicast is a bool"),
        ("bulk", {"tile_bytes": 1040}, "positive multiple of 64 .got 1040.; use 1024 or 1088"),
        ("bulk", {"max_ctas": 3}, "max_ctas holds a whole cluster of 4 .got 3"),
        ("bulk", {"num_stages": 9}, "num_stages must be 1 to 8"),
        ("bulk", {"ctas_per_sm": 0}, "ctas_per_sm must be at least 1 .got 0"),
        (
            "tensor",
            {"box_rows": 6},
            "each CTA's share of a box is whole rows .* .got 6 rows of 128 bytes for 4",
        ),
        ("tensor", {"box_cols": 4}, "a multiple of 128 bytes .got 16 rows of 16 bytes for 4 CTAs"),
    ],
)
def test_wrong_configurations_are_refused(form: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(FORMS[form][1], **changes)


@pytest.mark.parametrize("form", list(FORMS))
def test_wrong_operands_are_refused(form: str, device: Device) -> None:
    broadcast, config = FORMS[form]
    src, dst = device.asarray(np.zeros((16, 32), np.uint32)), device.empty((4, 16, 32), np.uint32)
    if not device.capabilities.has_tma:
        with pytest.raises(ConfigError, match="needs the TMA"):
            broadcast(dst, src, config=config)
        return
    with pytest.raises(OperandError, match=r"one copy of src per CTA, \(4, 16, 32\) \(got \(3, 16, 32\)\)"):
        broadcast(dst[:3], src, config=config)
    with pytest.raises(OperandError, match="must not overlap"):
        broadcast(dst, dst[:1].view(np.uint32, (16, 32)), config=config)
    with pytest.raises(OperandError, match="must have one dtype"):
        broadcast(dst, src.view(np.int32, (16, 32)), config=config)
    odd = device.empty((5, 3), np.uint32), device.empty((4, 5, 3), np.uint32)
    with pytest.raises(OperandError, match="multiple of 16 bytes"):
        broadcast(odd[1], odd[0], config=config)
    assert broadcast(device.empty((4, 0, 32), np.uint32), src[:0], config=config).kernel is None
