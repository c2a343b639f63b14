"""Every pipeline computes axpy bitwise, for every length, depth, half, schedule and device that has its
instructions, and moves its bytes the way it says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.common import MAX_STAGES
from kernels.mbarrier.pipeline import Part
from kernels.mbarrier.registry import PIPELINES, Pipeline
from smfree.cuda import Device, DeviceArray
from tests.kernels import pairwise
from tests.kernels.pairwise import SCHEDULES

TILE = 256  # elements
CTAS = 2
MARGIN = 64
CANARY = np.float32(-123.25)
ALPHA = 5555 / 4096
SPECS = ("emu:a100", "emu:h100", "emu:b200")
SIZES = ("0", "1", "tile-1", "tile", "tile+1", "ragged", "wraps")
HALVES = ((Part.BOTH, 0), (Part.BOTH, 9), (Part.COPY, 9), (Part.COMPUTE, 1))
"""What is compiled in, and FMAs per element."""


@dataclass(frozen=True)
class Point:
    """One run."""

    name: str
    spec: str
    schedule: tuple[str, int]
    stages: int
    size: str
    half: tuple[Part, int]

    def __str__(self) -> str:
        schedule = f"{self.schedule[0]}{self.schedule[1] or ''}"
        part, work = self.half
        return f"{self.name}-{self.spec}-{schedule}-{self.stages}stages-{self.size}-{part}-{work}fma"

    @property
    def elements(self) -> int:
        """``wraps`` fills each stage of each CTA three times, and the last tile is ragged."""
        fixed = {
            "0": 0,
            "1": 1,
            "tile-1": TILE - 1,
            "tile": TILE,
            "tile+1": TILE + 1,
            "ragged": 5 * TILE + 133,
        }
        return fixed.get(self.size, (3 * self.stages * CTAS + 1) * TILE + 77)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        points = [Point(name, **row) for name in PIPELINES for row in _rows(name, metafunc.config)]
        metafunc.parametrize("point", points, ids=str)


def _rows(name: str, config: pytest.Config) -> list[pairwise.Row]:
    pipeline = PIPELINES[name]
    axes = {
        "spec": [spec for spec in SPECS if _unavailable(name, spec) is None],
        "schedule": SCHEDULES,
        "stages": range(1, pipeline.max_stages + 1),
        "size": SIZES,
        "half": HALVES,
    }
    return pairwise.rows(axes, config)


@cache
def _unavailable(name: str, spec: str) -> str | None:
    with Device.open(spec) as device:
        return PIPELINES[name].unavailable(device.capabilities)


def operands(elements: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """x and y with 13 significant bits, multiples of 2^-10 below 8, as ALPHA is one of 2^-12 below 2."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(-8191, 8192, (2, elements)) / 1024
    return x.astype(np.float32), y.astype(np.float32)


def expected(x: NDArray[np.float32], y: NDArray[np.float32], work: int) -> NDArray[np.float32]:
    """``work`` times fmaf, each rounded once.

    A product is a multiple of 2^-22, exact in float64; so is every sum of it with a float32 that is itself a
    multiple of 2^-22. Below 2^12 such a sum has at most 34 bits: float64 holds it exactly, and the only
    rounding is the one to float32. (The product alone has 26 bits: a multiplication rounded by itself would
    give other results.)
    """
    total = y
    for _ in range(work):
        exact = np.float64(ALPHA) * x.astype(np.float64) + total.astype(np.float64)
        assert exact.size == 0 or np.abs(exact).max() < 4096
        total = exact.astype(np.float32)
    return total


@dataclass(frozen=True)
class Run:
    """The arrays of one call, each between two margins of canaries."""

    memory: dict[str, DeviceArray]
    before: dict[str, NDArray[np.float32]]

    @classmethod
    def on(cls, device: Device, **data: NDArray[np.float32]) -> Run:
        framed = {name: np.pad(array, MARGIN, constant_values=CANARY) for name, array in data.items()}
        return cls({name: device.asarray(array) for name, array in framed.items()}, framed)

    def view(self, name: str) -> DeviceArray:
        return self.memory[name][MARGIN : len(self.before[name]) - MARGIN]

    def check(self, **after: NDArray[np.float32]) -> None:
        """Bitwise: these arrays hold this, and nothing else changed."""
        for name, array in self.before.items():
            wanted = np.pad(after[name], MARGIN, constant_values=CANARY) if name in after else array
            np.testing.assert_array_equal(self.memory[name].numpy().view(np.uint32), wanted.view(np.uint32))


def run(device: Device, pipeline: Pipeline, config: Any, elements: int, seed: int) -> None:
    """Run it and compare every byte of dst, x, y and their surroundings."""
    x, y = operands(elements, seed)
    arrays = Run.on(device, dst=np.full(elements, 7.5, np.float32), x=x, y=y)
    pipeline.run(arrays.view("dst"), arrays.view("x"), arrays.view("y"), alpha=ALPHA, config=config)
    device.synchronize()
    result = {Part.BOTH: expected(x, y, config.work), Part.COPY: y}.get(config.part)
    arrays.check(**({} if result is None else {"dst": result}))


def test_axpy_is_bitwise_right(point: Point) -> None:
    pipeline = PIPELINES[point.name]
    part, work = point.half
    config = pipeline.config(4 * TILE, point.stages, work=work, part=part, max_ctas=CTAS)
    schedule, seed = point.schedule
    with Device.open(point.spec, schedule=schedule, seed=seed) as device:
        run(device, pipeline, config, point.elements, seed=point.elements + seed)


@pytest.mark.parametrize("name", list(PIPELINES))
@pytest.mark.parametrize("tile_bytes", [16, 48, 2000, 8192])
def test_any_multiple_of_16_is_a_tile(name: str, tile_bytes: int, device: Device) -> None:
    pipeline = usable(name, device)
    for stages in {1, min(3, pipeline.max_stages)}:
        config = pipeline.config(tile_bytes, stages, work=2, max_ctas=3 * CTAS)
        run(device, pipeline, config, 20 * tile_bytes // 4 + 7, seed=tile_bytes)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_the_whole_device_takes_part(name: str, device: Device) -> None:
    pipeline = usable(name, device)
    tiles = device.capabilities.num_sms * (pipeline.max_stages + 2) + 7
    config = pipeline.config(512, pipeline.max_stages, work=1)
    run(device, pipeline, config, tiles * 128 + 77, seed=11)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_zero_elements_launch_nothing(name: str, device: Device) -> None:
    pipeline = usable(name, device)
    empty = device.empty(0, np.float32)
    info = pipeline.run(empty, empty, empty, alpha=1.0, config=pipeline.config(1024, 1))
    assert (info.kernel, info.grid) == (None, 0)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_runs_queue_on_the_given_stream(name: str, device: Device) -> None:
    """``y + 2 a x`` in two runs, the second of which reads what the first one wrote."""
    pipeline = usable(name, device)
    stream = device.stream(non_blocking=True)
    config = pipeline.config(1024, min(2, pipeline.max_stages))
    x, y = operands(3000, seed=5)
    on_x, on_y = device.asarray(x), device.asarray(y)
    middle, dst = device.empty(3000, np.float32), device.empty(3000, np.float32)
    pipeline.run(middle, on_x, on_y, alpha=ALPHA, config=config, stream=stream)
    pipeline.run(dst, on_x, middle, alpha=ALPHA, config=config, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(dst.numpy(), expected(x, y, 2))


@pytest.mark.parametrize("part", [Part.BOTH, Part.COPY])
@pytest.mark.parametrize("name", ["pingpong", "ring"])
def test_the_tma_path_moves_no_byte_through_registers_but_the_tail(name: str, part: Part) -> None:
    """Loads of x and y and the store of dst; COPY does not load the tail of x."""
    for elements in (4 * TILE, 5 * TILE + 3, 2):
        counters = _counters("emu:h100", name, part, elements)
        tail = 4 * (elements % 4)
        assert counters.bytes_through_registers == (3 if part is Part.BOTH else 2) * tail
        assert counters.bytes_async == 3 * (4 * elements - tail)


@pytest.mark.parametrize("spec", ["emu:a100", "emu:h100"])
def test_cp_async_moves_each_byte_of_dst_through_registers_once(spec: str) -> None:
    for elements in (4 * TILE, 5 * TILE + 3, 2):
        counters = _counters(spec, "ring_async", Part.BOTH, elements)
        tail = 4 * (elements % 4)
        assert counters.bytes_through_registers == 4 * elements + 2 * tail
        assert counters.bytes_async == 2 * (4 * elements - tail)


@pytest.mark.parametrize("name", ["pingpong", "ring", "ring_async"])
def test_computing_alone_moves_nothing_and_copying_alone_computes_nothing(name: str) -> None:
    both, copy, compute = (_counters("emu:h100", name, part, 8 * TILE, work=50) for part in Part)
    assert (compute.bytes_async, compute.bytes_through_registers, compute.tma_requests) == (0, 0, 0)
    assert (copy.bytes_async, copy.tma_requests) == (both.bytes_async, both.tma_requests)
    fmas = 8 * TILE * 50
    assert both.thread_instructions - copy.thread_instructions > fmas
    assert copy.thread_instructions < fmas < compute.thread_instructions
    assert copy.mbarrier_arrivals == compute.mbarrier_arrivals == both.mbarrier_arrivals > 0


def _counters(spec: str, name: str, part: Part, elements: int, work: int = 1) -> Any:
    pipeline = PIPELINES[name]
    with Device.open(spec) as device:
        config = pipeline.config(4 * TILE, 2, work=work, part=part, max_ctas=CTAS)
        run(device, pipeline, config, elements, seed=1)
        return device.emulator.last_launch.counters


def usable(name: str, device: Device) -> Pipeline:
    """The pipeline, or a skip with the reason why this device has no such hardware."""
    reason = PIPELINES[name].unavailable(device.capabilities)
    if reason is not None:
        pytest.skip(reason)
    return PIPELINES[name]


def test_eight_stages_are_offered_by_all_but_the_ping_pong() -> None:
    assert {name: one.max_stages for name, one in PIPELINES.items() if one.max_stages < MAX_STAGES} == {
        "pingpong": 2
    }
