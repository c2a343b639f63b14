"""The Triton twins: right under every schedule, and made of what their docstring says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier.axpy_triton import TritonAxpyConfig, axpy
from smfree.cuda import Device, ModuleImage, compile_triton
from tests.kernels import pairwise
from tests.kernels.pairwise import SCHEDULES
from tests.kernels.test_pipelines import ALPHA, TILE, Run, expected, operands

AXES = {
    "spec": ("emu:a100", "emu:h100", "emu:b200"),
    "schedule": SCHEDULES,
    "stages": range(1, 9),
    "size": ("32", "tile-1", "tile", "tile+1", "ragged", "wraps"),
    "work": (0, 1, 5),
    "descriptors": (True, False),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = pairwise.rows(AXES, metafunc.config)
        rows = [row for row in rows if row["spec"] != "emu:a100" or not row["descriptors"]]
        metafunc.parametrize("row", rows, ids=["-".join(map(str, row.values())) for row in rows])


def elements_of(size: str, stages: int) -> int:
    fixed = {"32": 32, "tile-1": TILE - 1, "tile": TILE, "tile+1": TILE + 1, "ragged": 5 * TILE + 133}
    return fixed.get(size, (3 * stages * 2 + 1) * TILE + 77)


def run(device: Device, config: TritonAxpyConfig, elements: int, seed: int = 0) -> None:
    x, y = operands(elements, seed)
    arrays = Run.on(device, dst=np.full(elements, 7.5, np.float32), x=x, y=y)
    axpy(arrays.view("dst"), arrays.view("x"), arrays.view("y"), alpha=ALPHA, config=config)
    device.synchronize()
    arrays.check(dst=expected(x, y, config.work))


def count(image: ModuleImage, pattern: str) -> int:
    return len(re.findall(pattern, image.ptx))


def test_twins_are_bitwise_right(row: dict[str, Any]) -> None:
    config = TritonAxpyConfig(
        4 * TILE, row["stages"], 64, row["work"], descriptors=row["descriptors"], max_ctas=2
    )
    with pairwise.opened(row) as device:
        run(device, config, elements_of(row["size"], row["stages"]), seed=row["stages"])


@pytest.mark.parametrize("elements", [0, 1, 31])
def test_less_than_a_row_is_for_the_pointer_twin(elements: int) -> None:
    with Device.open("emu:h100") as device:
        run(device, TritonAxpyConfig(1024, 2, 32, descriptors=False), elements)
        if elements == 0:
            run(device, TritonAxpyConfig(1024, 2, 32), elements)
        else:
            with pytest.raises(OperandError, match=rf"one row of 32 elements \(got {elements}\); use desc"):
                run(device, TritonAxpyConfig(1024, 2, 32), elements)


# ---- what the compiler makes of it -------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_descriptors_become_a_ring_of_mbarriers_without_empty_barriers(
    stages: int, capability: tuple[int, int]
) -> None:
    config = TritonAxpyConfig(4096, stages)
    image = compile_triton(config.source, capability)
    assert image.metadata["shared"] == config.shared_bytes
    assert count(image, r"mbarrier\.init") == config.buffers == stages - 1
    loads = r"cp\.async\.bulk\.tensor\.2d\.shared::cta\.global\.mbarrier::complete_tx::bytes"
    assert count(image, loads) == 2 * stages, "x and y: before the loop for each buffer, and once inside"
    assert count(image, r"mbarrier\.arrive\.expect_tx") == stages, "one announcement for both"
    assert count(image, r"mbarrier\.try_wait") == 1
    assert count(image, r"mbarrier\.arrive\.(?!expect_tx)") == 0, "nobody arrives on an empty barrier"
    assert count(image, r"cp\.async\.bulk\.wait_group\.read") == 1
    assert {"UTMALDG", "UTMASTG", "LDS", "STS"} <= image.sass().stems().keys()


def test_one_stage_waits_for_every_load() -> None:
    config = TritonAxpyConfig(4096, 1)
    image = compile_triton(config.source, (9, 0))
    assert image.metadata["shared"] == config.shared_bytes
    assert count(image, r"mbarrier\.try_wait") == 2
    assert count(image, r"cp\.async\.bulk\.wait_group\s+0;") == 1


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_pointers_become_groups_of_cp_async_without_mbarriers(
    stages: int, capability: tuple[int, int]
) -> None:
    config = TritonAxpyConfig(4096, stages, descriptors=False)
    image = compile_triton(config.source, capability)
    assert image.metadata["shared"] == config.shared_bytes
    assert "mbarrier." not in image.ptx and "cp.async.bulk" not in image.ptx
    widths = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", image.ptx)
    assert len(widths) == 2 * 2 * stages and set(widths) == {"0x10"}, "2 x 16 bytes of x and of y per thread"
    assert count(image, r"cp\.async\.commit_group") >= stages
    assert "LDGSTS" in image.sass().stems()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_one_stage_of_pointers_loads_to_registers(capability: tuple[int, int]) -> None:
    image = compile_triton(TritonAxpyConfig(4096, 1, descriptors=False).source, capability)
    assert image.metadata["shared"] == 0 and "cp.async" not in image.ptx


def test_more_stages_hide_latency_in_modelled_time() -> None:
    """One CTA, many tiles: with one stage every tile pays the whole latency, with four they overlap."""
    cycles = {}
    for stages in (1, 4):
        with Device.open("emu:h100") as device:
            run(device, TritonAxpyConfig(4 * TILE, stages, 64, max_ctas=1), 64 * TILE)
            x = device.asarray(np.zeros(64 * TILE, np.float32))
            dst = device.empty(x.shape, np.float32)
            before = device.default_stream.record()
            axpy(dst, x, x, alpha=1.0, config=TritonAxpyConfig(4 * TILE, stages, 64, max_ctas=1))
            after = device.default_stream.record()
            device.synchronize()
            cycles[stages] = after.elapsed_us(before)
    assert cycles[4] < cycles[1] / 2


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"tile_bytes": 3072}, r"tile_bytes must be a power of two for Triton \(got 3072\)"),
        ({"tile_bytes": 64}, r"multiple of 128 \(got 64\)"),
        ({"threads": 96}, r"threads must be a power of two for Triton \(got 96\)"),
        ({"tile_bytes": 65536, "threads": 64}, r"at most 64 elements .*\(got 256\); use more threads"),
        ({"num_stages": 9}, r"num_stages must be 1 to 8 \(got 9\)"),
        ({"work": 65}, r"work must be 0 to 64 FMAs \(got 65\)"),
        ({"max_ctas": 0}, r"max_ctas must be at least 1 \(got 0\)"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_before_compiling(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        TritonAxpyConfig(**wrong)


def test_descriptors_need_the_tma() -> None:
    with Device.open("emu:a100") as device, pytest.raises(ConfigError, match="needs the TMA"):
        run(device, TritonAxpyConfig(1024, 2, 32), 100)
