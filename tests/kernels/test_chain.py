"""The latency chains do the work they time: every step, every byte, and the index that proves it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.chain import ChainConfig, Leg, TilePool
from kernels.engine import ENGINES, Engine
from smfree.cuda import CudaSource, Device

LEGS = [(name, leg) for name, engine in ENGINES.items() for leg in engine.legs]


def usable(name: str, device: Device) -> Engine:
    engine = ENGINES[name]
    reason = engine.unavailable(device.capabilities)
    if reason is not None:
        pytest.skip(reason)
    return engine


def walk(
    engine: Engine, device: Device, pool: TilePool, leg: Leg, threads: int, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run a chain, check ``dst`` and the final index, return (result, dst)."""
    before = np.random.default_rng(2).integers(0, 256, pool.data.size, dtype=np.uint8)
    config = engine.latency_config(device.capabilities, pool.data.shape[1], threads, leg)
    tiles, dst = device.asarray(pool.data.reshape(-1)), device.asarray(before)
    result = device.empty(3, np.uint64)
    engine.chain(dst, tiles, result, config=config, num_steps=num_steps)
    device.synchronize()
    found = result.numpy()
    np.testing.assert_array_equal(dst.numpy(), pool.expected(leg, num_steps, before).reshape(-1))
    assert found[2] == pool.final_index(num_steps)
    return found, dst.numpy()


@pytest.mark.parametrize("tile_bytes", [16, 128, 1040, 4096])
@pytest.mark.parametrize(("name", "leg"), LEGS)
def test_chain_visits_the_tiles_in_order_and_moves_every_byte(
    name: str, leg: Leg, tile_bytes: int, device: Device
) -> None:
    engine = usable(name, device)
    walk(engine, device, TilePool.random(48, tile_bytes, seed=tile_bytes), leg, 64, num_steps=31)


@pytest.mark.parametrize(("name", "leg"), LEGS)
def test_chain_of_1024_steps_wraps_around_the_pool(name: str, leg: Leg, device: Device) -> None:
    engine = usable(name, device)
    result, _ = walk(engine, device, TilePool.random(40, 512, seed=9), leg, 128, num_steps=1024)
    cycles, nanoseconds = int(result[0]), int(result[1])
    assert cycles > 1024 * 50, "a dependent step takes hundreds of cycles"
    mhz = cycles * 1e3 / nanoseconds
    assert 200 < mhz < 5000, "SM cycles and nanoseconds of one interval give a clock"


@pytest.mark.timing
@pytest.mark.parametrize(("name", "leg"), LEGS)
def test_time_grows_in_proportion_to_the_steps(name: str, leg: Leg, device: Device) -> None:
    """The slope is what a step costs: the second half of a chain takes as long as the first."""
    engine = usable(name, device)
    pool = TilePool.random(16, 256, seed=1)
    times = [int(walk(engine, device, pool, leg, 32, steps)[0][0]) for steps in (64, 128, 256)]
    first, second = times[1] - times[0], times[2] - times[1]
    assert second == pytest.approx(2 * first, rel=0.2)


@pytest.mark.timing
@pytest.mark.parametrize("name", ["lsu", "tma.bulk", "tma.tensor"])
def test_a_copy_step_costs_about_a_load_and_a_store_step(name: str, device: Device) -> None:
    engine = usable(name, device)
    pool = TilePool.random(16, 1024, seed=4)
    cost = {
        leg: int(walk(engine, device, pool, leg, 128, 128)[0][0])
        - int(walk(engine, device, pool, leg, 128, 64)[0][0])
        for leg in Leg
    }
    assert cost[Leg.COPY] == pytest.approx(cost[Leg.LOAD] + cost[Leg.STORE], rel=0.35)


def without_clock(config: ChainConfig) -> ChainConfig:
    """The same kernel with its clock reads replaced by zeros: only the timed schedule has a clock."""
    source = config.source
    text = re.sub(r"(clock64|globaltimer)_now\(\)", "0", source.read().decode())

    class Untimed(type(config)):  # type: ignore[misc]
        @property
        def source(self) -> CudaSource:
            return CudaSource(source.path, dict(source.defines), text=text)

    return Untimed(config.tile_bytes, config.threads, config.leg)


def test_pool_is_one_cycle_through_all_tiles() -> None:
    pool = TilePool.random(1000, 64, seed=7)
    successor = pool.data.view(np.uint32)[:, 0]
    at, seen = 0, []
    for _ in range(1000):
        seen.append(at)
        at = int(successor[at])
    assert at == 0 and sorted(seen) == list(range(1000))
    np.testing.assert_array_equal(pool.visited(1000), seen)
    assert pool.final_index(1500) == seen[500]


@pytest.mark.parametrize("schedule", ["min-pc", "producer-ahead", "async-earliest", "async-latest", "random"])
@pytest.mark.parametrize(("name", "leg"), LEGS)
def test_every_schedule_of_the_emulated_gpu_walks_the_same_chain(name: str, leg: Leg, schedule: str) -> None:
    with Device.open("emu:h100", schedule=schedule, seed=3) as device:
        pool = TilePool.random(24, 768, seed=8)
        config = without_clock(ENGINES[name].latency_config(device.capabilities, 768, 96, leg))
        before = np.zeros(pool.data.size, np.uint8)
        tiles, dst, result = (
            device.asarray(pool.data.reshape(-1)),
            device.asarray(before),
            device.empty(3, np.uint64),
        )
        ENGINES[name].chain(dst, tiles, result, config=config, num_steps=40)
        device.synchronize()
        np.testing.assert_array_equal(dst.numpy(), pool.expected(leg, 40, before).reshape(-1))
        assert result.numpy()[2] == pool.final_index(40)
