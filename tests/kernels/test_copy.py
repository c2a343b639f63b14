"""Every engine copies every length bitwise and touches no byte outside, on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.engine import ENGINES, Engine
from kernels.lsu.copy import LsuCopyConfig
from kernels.lsu.copy_async import AsyncCopyConfig, CacheOperator
from kernels.lsu.copy_triton import TritonCopyConfig
from kernels.tma.bulk import BulkConfig
from kernels.tma.tensor2d import Tensor2dConfig
from kernels.tma.tensor2d_triton import TritonTensorConfig
from smfree.cuda import Device, DeviceArray, Swizzle
from tests.kernels import pairwise
from tests.kernels.pairwise import SCHEDULES, opened

TILE = 2048
LENGTHS = (1, 15, 16, 17, 127, 128, TILE - 1, TILE, TILE + 1, 3 * TILE + 133)
MARGIN = 256
CANARY = 0xA5

CONFIGS: dict[str, list[Any]] = {
    "lsu": [
        LsuCopyConfig(TILE, 64, vector, unroll, read_only)
        for vector, unroll, read_only in [
            (4, 4, False),
            (8, 1, False),
            (16, 1, False),
            (16, 2, True),
            (16, 8, False),
        ]
    ],
    "cp.async": [AsyncCopyConfig(TILE, stages, 64) for stages in (1, 2, 3, 4)]
    + [AsyncCopyConfig(TILE, 2, 96, vector, CacheOperator.CA) for vector in (4, 8, 16)],
    "tma.bulk": [BulkConfig(TILE, stages) for stages in (1, 2, 3, 4)],
    "tma.tensor": [Tensor2dConfig(TILE, stages) for stages in (1, 2, 3, 4)]
    + [Tensor2dConfig(TILE, 2, swizzle=swizzle) for swizzle in (Swizzle.B32, Swizzle.B64, Swizzle.B128)],
    "triton.pointer": [TritonCopyConfig(TILE, 64)],
    "triton.descriptor": [TritonTensorConfig(TILE, 32)],
}
CASES = [(name, config) for name, configs in CONFIGS.items() for config in configs]
IDS = [f"{name}-{number}" for name, configs in CONFIGS.items() for number in range(len(configs))]


def usable(name: str, device: Device) -> Engine:
    """The engine, or a skip with the reason why this device has no such hardware."""
    engine = ENGINES[name]
    reason = engine.unavailable(device.capabilities)
    if reason is not None:
        pytest.skip(reason)
    return engine


def framed(device: Device, data: np.ndarray) -> tuple[DeviceArray, DeviceArray]:
    """Device memory with ``data`` between two margins of canary bytes, and the view of the data alone."""
    whole = np.full(data.nbytes + 2 * MARGIN, CANARY, np.uint8)
    whole[MARGIN : MARGIN + data.nbytes] = data
    array = device.asarray(whole)
    return array, array.bytes_view(MARGIN, data.nbytes)


def check_copy(engine: Engine, device: Device, config: Any, length: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    src_memory, src = framed(device, data)
    dst_memory, dst = framed(device, np.zeros(length, np.uint8))
    before = src_memory.numpy()
    engine.copy(dst, src, config=config)
    device.synchronize()
    expected = np.full(length + 2 * MARGIN, CANARY, np.uint8)
    expected[MARGIN : MARGIN + length] = data
    np.testing.assert_array_equal(dst_memory.numpy(), expected)
    np.testing.assert_array_equal(src_memory.numpy(), before)


@pytest.mark.parametrize(("name", "config"), CASES, ids=IDS)
def test_every_length_around_the_tile_is_copied_bitwise(name: str, config: Any, device: Device) -> None:
    engine = usable(name, device)
    for seed, length in enumerate(LENGTHS):
        if name == "triton.descriptor" and length < 128:
            continue  # refused by name, see test_refusals.py
        check_copy(engine, device, config, length, seed)


@pytest.mark.parametrize(("name", "config"), CASES, ids=IDS)
def test_the_stage_ring_wraps_around_several_times_per_cta(name: str, config: Any, device: Device) -> None:
    """More tiles than the grid has CTAs and stages: each CTA reuses each stage, the last tile is ragged."""
    engine = usable(name, device)
    tiles = device.capabilities.num_sms * (2 * config.num_stages + 1) + 7
    check_copy(engine, device, config, tiles * TILE + 77, seed=11)


@pytest.mark.parametrize("name", list(ENGINES))
def test_zero_bytes_work_and_launch_nothing(name: str, device: Device) -> None:
    engine = usable(name, device)
    info = engine.copy(device.empty(0), device.empty(0), config=CONFIGS[name][0])
    assert (info.kernel, info.grid) == (None, 0)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint64])
def test_shape_and_dtype_do_not_matter(name: str, dtype: type, device: Device) -> None:
    engine = usable(name, device)
    data = np.random.default_rng(5).integers(0, 256, (37, 29, np.dtype(dtype).itemsize), dtype=np.uint8)
    values: np.ndarray = data.view(dtype)[..., 0]
    src, dst = device.asarray(values), device.asarray(np.zeros_like(values))
    engine.copy(dst, src, config=CONFIGS[name][0])
    device.synchronize()
    assert dst.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("tile_bytes", [16, 48, 144, 2000, 8192, 32768])
@pytest.mark.parametrize("name", ["lsu", "cp.async", "tma.bulk", "tma.tensor"])
def test_any_multiple_of_16_is_a_tile(name: str, tile_bytes: int, device: Device) -> None:
    engine = usable(name, device)
    config = engine.throughput_config(device.capabilities, tile_bytes)
    check_copy(engine, device, config, 3 * tile_bytes + 21, seed=tile_bytes)


@pytest.mark.parametrize("name", list(ENGINES))
def test_copies_queue_on_the_given_stream(name: str, device: Device) -> None:
    engine = usable(name, device)
    stream = device.stream(non_blocking=True)
    data = np.random.default_rng(9).integers(0, 256, 5000, dtype=np.uint8)
    first = device.asarray(data)
    second, third = device.asarray(np.zeros_like(data)), device.asarray(np.zeros_like(data))
    engine.copy(second, first, config=CONFIGS[name][0], stream=stream)
    engine.copy(third, second, config=CONFIGS[name][0], stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(third.numpy(), data)


# ---- every engine under every schedule, with every number of stages, on every emulated GPU that has it ----

EVERY, WITH_TMA, WIDE = ["emu:a100", "emu:h100", "emu:b200"], ["emu:h100", "emu:b200"], ["emu:b200"]
SWEPT: list[tuple[str, list[str], list[Any]]] = [
    ("lsu", EVERY, CONFIGS["lsu"]),
    ("lsu", WIDE, [LsuCopyConfig(TILE, 64, 32, unroll) for unroll in (1, 2)]),
    ("cp.async", EVERY, [AsyncCopyConfig(TILE, stages, 64) for stages in range(1, 9)]),
    ("tma.bulk", WITH_TMA, [BulkConfig(TILE, stages) for stages in range(1, 9)]),
    ("tma.tensor", WITH_TMA, [Tensor2dConfig(TILE, stages) for stages in range(1, 9)]),
    ("triton.pointer", EVERY, CONFIGS["triton.pointer"]),
    ("triton.descriptor", WITH_TMA, CONFIGS["triton.descriptor"]),
]
SIZES = (0, 1, TILE - 1, TILE, TILE + 1, 5 * TILE + 77, 151 * TILE + 1001)  # the last: more tiles than SMs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine_row" in metafunc.fixturenames:
        found, ids = [], []
        for name, specs, configs in SWEPT:
            sizes = [
                n for n in SIZES if name != "triton.descriptor" or n == 0 or n >= 128
            ]  # test_refusals.py
            axes = {"spec": specs, "schedule": SCHEDULES, "config": range(len(configs)), "size": sizes}
            for row in pairwise.rows(axes, metafunc.config):
                found.append((name, configs[row["config"]], row))
                ids.append(f"{name}{len(ids)}-" + "-".join(map(str, row.values())))
        metafunc.parametrize("engine_row", found, ids=ids)


def test_every_combination(engine_row: tuple[str, Any, pairwise.Row]) -> None:
    name, config, row = engine_row
    with opened(row) as device:
        check_copy(ENGINES[name], device, config, row["size"], seed=row["size"])
