"""Prefetches and eviction hints change no byte; the lines they fetch are hits of the loads that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import prefetch_bulk, prefetch_tensor
from kernels.tma.prefetch import Policy
from kernels.tma.prefetch_bulk import PrefetchBulkConfig
from kernels.tma.prefetch_tensor import PrefetchTensorConfig
from smfree.cuda import Device
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import CTAS, SIZES, extent, faults, filled, mutated, random_array, same_bits, sweep

TILE = 1024
BULK = PrefetchBulkConfig(tile_bytes=TILE, num_stages=2, ahead=4)
TENSOR = PrefetchTensorConfig(box_rows=8, box_cols=32, num_stages=2, ahead=4)
COPIES: dict[str, Any] = {"bulk": (prefetch_bulk.copy, BULK), "tensor": (prefetch_tensor.copy, TENSOR)}


def check(device: Device, form: str, config: Any, shape: tuple[int, ...], dtype: Any = np.uint32) -> None:
    data = random_array(shape, dtype, 7)
    src, dst = device.asarray(data), filled(device, shape, dtype)
    COPIES[form][0](dst, src, config=config)
    device.synchronize()
    same_bits(dst.numpy(), data)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    axes: dict[str, Any] = {
        "form": list(COPIES),
        "policy": (Policy.NORMAL, Policy.EVICT_FIRST),
        "ahead": (0, 2),
    }
    sweep(metafunc, num_stages=range(1, 9), size=SIZES, **axes)


def test_every_combination(row: Row) -> None:
    """``ahead`` counts from the last tile in flight."""
    stages, form = row["num_stages"], row["form"]
    ahead = row["ahead"] and stages + row["ahead"] - 1
    config = replace(COPIES[form][1], num_stages=stages, ahead=ahead, policy=row["policy"], max_ctas=CTAS)
    with opened(row) as device:
        if form == "bulk":
            check(device, form, config, (extent(row["size"], TILE, stages),), np.uint8)
        else:
            check(device, form, config, (extent(row["size"], 8, stages), 28))


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("shape", [(1, 4), (8, 32), (9, 36), (67, 80)])
def test_matrices_around_the_box(shape: tuple[int, int], policy: Policy, tma_device: Device) -> None:
    check(tma_device, "tensor", replace(TENSOR, policy=policy), shape)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("length", [15, 16, 17, 21 * TILE + 77])
def test_bytes_that_fill_no_16_byte_unit(length: int, policy: Policy, tma_device: Device) -> None:
    check(tma_device, "bulk", replace(BULK, policy=policy), (length,), np.uint8)


@pytest.mark.parametrize("form", list(COPIES))
def test_prefetched_lines_are_hits_of_the_loads(form: str) -> None:
    """One CTA, cold source of 32 tiles of 1 KiB. Without prefetch every loaded byte misses. With it the tiles
    from the third on are fetched by prefetches, so only the first two miss when they are loaded."""
    tiles, ahead = 32, 2
    shape = (8 * tiles, 32)
    missed = {}
    for distance in (0, ahead):
        config = replace(COPIES[form][1], ahead=distance, max_ctas=1)
        with Device.open("emu:h100") as device:
            data = random_array(shape, np.uint32, 1)
            src, dst = device.asarray(data), device.empty(shape, np.uint32)
            device.emulator.l2.flush()
            COPIES[form][0](dst, src, config=config)
            device.synchronize()
            counters = device.emulator.last_launch.counters
            same_bits(dst.numpy(), data)
        missed[distance] = counters
    bytes_copied = tiles * TILE
    assert missed[0].dram_read_bytes == missed[ahead].dram_read_bytes == bytes_copied
    gained = missed[ahead].l2_hit_bytes - missed[0].l2_hit_bytes
    assert gained == bytes_copied - ahead * TILE
    assert missed[ahead].tma_requests - missed[0].tma_requests == tiles - ahead


def test_a_prefetch_is_no_load() -> None:
    """Waiting for a tile that was only prefetched never ends; the twin is the kernel as it is."""
    line = "cp_async_bulk_shared_global(stage_at(s), src, tile_bytes, full_at(s));"
    broken = mutated(BULK, line, "prefetch_tile(tile, from);")
    words = ("full[0]", "1024 of 1024 bytes missing", "0 of 1 arrivals missing", "prefetch_bulk.cu")
    with faults(*words), Device.open("emu:h100") as device:
        check(device, "bulk", broken, (1024,))
    with Device.open("emu:h100") as device:
        check(device, "bulk", BULK, (1024,))


@pytest.mark.parametrize("config", [BULK, TENSOR])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ahead": 1}, r"ahead is 0 \(no prefetch\) or 2 \(the tiles before .*\) to 1024 \(got 1\); use 4"),
        ({"ahead": -1}, "ahead is 0"),
        ({"ahead": 1025}, "ahead is 0 .* to 1024"),
        ({"ahead": 2.0}, "ahead must be a whole number"),
        ({"policy": "evict first"}, "policy is a Policy"),
        ({"num_stages": 0}, "num_stages must be 1 to 8"),
    ],
)
def test_wrong_configurations_are_refused(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)


def test_wrong_operands_are_refused(tma_device: Device) -> None:
    src, dst = tma_device.empty((16, 32), np.uint32), tma_device.empty((16, 32), np.uint32)
    with pytest.raises(OperandError, match="must have the same size"):
        prefetch_bulk.copy(dst[:4], src, config=BULK)
    with pytest.raises(OperandError, match=r"dst has src's shape \(16, 32\)"):
        prefetch_tensor.copy(dst.view(np.uint32, (32, 16)), src, config=TENSOR)
    with pytest.raises(OperandError, match="src has 2 dimensions, elements of 4 bytes and rows"):
        prefetch_tensor.copy(dst.view(np.uint16), src.view(np.uint16), config=TENSOR)
    with pytest.raises(ConfigError, match="config must be a PrefetchTensorConfig"):
        prefetch_tensor.copy(dst, src, config=BULK)
    assert prefetch_bulk.copy(dst[:0], src[:0], config=BULK).kernel is None
    assert prefetch_tensor.copy(dst[:0], src[:0], config=TENSOR).kernel is None
