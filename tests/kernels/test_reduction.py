"""The sum has the bits of the order that reduction.cu states, whatever the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier.counter import counter_of
from kernels.mbarrier.pipeline import Part
from kernels.mbarrier.reduction import ReductionConfig, sum_in_order, total
from smfree.cuda import Device
from tests.kernels import pairwise
from tests.kernels.mutant_kit import mutated, reported
from tests.kernels.pairwise import SCHEDULES
from tests.kernels.test_pipelines import SIZES

TILE = 256  # elements
AXES = {
    "spec": ("emu:h100", "emu:b200"),
    "schedule": SCHEDULES,
    "stages": range(1, 9),
    "threads": (64, 160),
    "max_ctas": (1, 2, 5),
    "size": SIZES,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = pairwise.rows(AXES, metafunc.config)
        metafunc.parametrize("row", rows, ids=["-".join(map(str, row.values())) for row in rows])


def elements_of(size: str, stages: int, ctas: int) -> int:
    fixed = {"0": 0, "1": 1, "tile-1": TILE - 1, "tile": TILE, "tile+1": TILE + 1, "ragged": 5 * TILE + 133}
    return fixed.get(size, (3 * stages * ctas + 1) * TILE + 77)


def values(elements: int, seed: int) -> np.ndarray:
    """Magnitudes over seven decades: another order gives other bits."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(elements) * 10.0 ** rng.integers(-3, 4, elements)).astype(np.float32)


def sum_on(device: Device, config: Any, x: np.ndarray) -> tuple[np.float32, int]:
    """The kernel's sum and its grid; partials are new, so an unwritten one would be reported."""
    result, partials = device.empty(1, np.float32), device.empty(256, np.float32)
    info = total(result, partials, device.asarray(x), config=config)
    device.synchronize()
    return result.numpy()[0], info.grid


def test_the_sum_has_the_bits_of_the_stated_order(row: dict[str, Any]) -> None:
    config = ReductionConfig(4 * TILE, row["stages"], row["threads"], max_ctas=row["max_ctas"])
    x = values(elements_of(row["size"], row["stages"], row["max_ctas"]), seed=row["stages"])
    with pairwise.opened(row) as device:
        found, grid = sum_on(device, config, x)
        wanted = sum_in_order(x, config=config, grid=grid)
        assert found.tobytes() == wanted.tobytes(), (found, wanted)
        assert counter_of(device, None).numpy().tolist() == [0]


def test_every_schedule_and_device_gives_the_same_bits_and_another_order_would_not() -> None:
    config, x = ReductionConfig(4 * TILE, 3, max_ctas=4), values(40 * TILE + 3, seed=1)
    found = set()
    for spec in AXES["spec"]:
        for schedule, seed in SCHEDULES:
            with Device.open(str(spec), schedule=schedule, seed=seed) as device:
                found.add(sum_on(device, config, x)[0].tobytes())
    assert found == {sum_in_order(x, config=config, grid=4).tobytes()}
    others = {sum_in_order(x, config=config, grid=grid).tobytes() for grid in (1, 2, 3, 5)}
    assert not found & others


@pytest.mark.parametrize("grid", [1, 2, 33, 132])
def test_the_order_is_a_sum(grid: int) -> None:
    """Held against float64: each of the additions on the longest path rounds by 2^-24 of the sum of |x|."""
    config, x = ReductionConfig(4 * TILE, 2), values(40 * TILE + 3, seed=2)
    exact, scale = x.astype(np.float64).sum(), np.abs(x.astype(np.float64)).sum()
    per_thread = -(-len(x) // (4 * config.consumers * grid)) + TILE // config.consumers + 1
    longest = per_thread + 2 + 5 + 5 + -(-grid // 32) + 5
    assert abs(float(sum_in_order(x, config=config, grid=grid)) - exact) <= longest * 2.0**-24 * scale


def test_three_launches_share_a_counter_and_the_whole_device_takes_part() -> None:
    with Device.open("emu:h100") as device:
        config = ReductionConfig(512, 2, 64)
        for elements in (200 * 128 + 3, 7, 133 * 128):
            x = values(elements, seed=elements)
            found, grid = sum_on(device, config, x)
            assert grid == min(132, max(1, -(-4 * elements // 512)))
            assert found.tobytes() == sum_in_order(x, config=config, grid=grid).tobytes()
            assert device.emulator.last_launch.counters.atomics == grid


def test_bytes_of_x_come_by_the_tma_and_the_halves_do_their_half() -> None:
    found = {}
    for part in Part:
        with Device.open("emu:h100") as device:
            sum_on(device, ReductionConfig(4 * TILE, 2, part=part, max_ctas=2), values(8 * TILE + 3, seed=3))
            found[part] = device.emulator.last_launch.counters
    both, copy, compute = (found[part] for part in Part)
    assert both.bytes_async == copy.bytes_async == 4 * 8 * TILE and compute.bytes_async == 0
    assert both.shared_load_bytes - copy.shared_load_bytes == 4 * 8 * TILE
    assert compute.shared_load_bytes == both.shared_load_bytes
    assert both.bytes_through_registers == 3 * 4 + 4 * 4 + 4, (
        "the tail, two partials there and back, the result"
    )


def test_a_stage_that_lacks_a_release_hangs() -> None:
    """One warp of four does not arrive: the producer waits for ever for the second use of the stage."""
    config, x = ReductionConfig(4 * TILE, 1, max_ctas=1), values(4 * TILE, seed=4)
    broken = mutated(
        config,
        (
            "if (threadIdx.x % 32 == 0) mbarrier_arrive",
            "if (threadIdx.x % 32 == 0 && threadIdx.x > 32) mbarrier_arrive",
        ),
    )
    words = (
        "empty of CTA 0, phase 0 (parity 0)",
        "1 of 4 arrivals missing",
        "waiting: CTA 0 thread 0 at reduction.cu",
    )
    for schedule in ("timed", "async-latest"):
        with Device.open("emu:h100", schedule=schedule) as device, reported(*words):
            sum_on(device, broken, x)
        with Device.open("emu:h100", schedule=schedule) as device:
            sum_on(device, config, x)


def test_wrong_operands_and_configurations_are_refused_by_name() -> None:
    for wrong, rule in (
        ({"work": 2}, r"one addition per element \(got work=2\)"),
        ({"threads": 32}, r"threads must be at least 64"),
        ({"empty_arrivals": 1}, r"empty\[\] completes with 4 arrivals: 4 of consumer warp"),
        ({"full_tx_bytes": 2048}, r"full\[\] completes with 1024 bytes: 1024 of x"),
    ):
        with pytest.raises(ConfigError, match=rule):
            ReductionConfig(4 * TILE, 2, **wrong)
    config = ReductionConfig(4 * TILE, 2, max_ctas=3)
    with Device.open("emu:h100") as device:
        one, many = device.empty(1, np.float32), device.empty(3, np.float32)
        x, doubles = device.asarray(values(3 * TILE, 5)), device.asarray(np.zeros(4))
        for arrays, rule in (
            ((one, many[:2], x), r"partials must have at least 3 elements \(got 2\)"),
            ((many[:0], many, x), r"result must have at least 1 elements \(got 0\)"),
            ((one, many, doubles), r"result and x must have one dtype"),
            ((x[:1], many, x), r"result and x must not overlap"),
            ((one, x[4:8], x), r"partials and x must not overlap"),
            ((one, many, x[1:]), r"x must be 16-byte aligned for cp.async.bulk"),
        ):
            with pytest.raises(OperandError, match=rule):
                total(*arrays, config=config)
    with Device.open("emu:a100") as device, pytest.raises(ConfigError, match="needs the TMA"):
        sum_on(device, config, values(5, 6))
