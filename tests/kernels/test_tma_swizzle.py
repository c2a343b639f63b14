"""Swizzled tiles: where the bytes lie, how threads find them, and the bank conflicts that this saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import swizzle
from kernels.tma.swizzle import Output, SwizzleConfig
from smfree.cuda import Device, Swizzle
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import CTAS, SIZES, extent, faults, filled, mutated, random_array, same_bits, sweep

#: PTX ISA, "Swizzling Modes": which 16-byte chunk of a 128-byte line lies where, line by line.
LINES = {
    Swizzle.NONE: ["01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        "01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210",
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}  # fmt: skip
#: Wavefronts of a warp whose lanes each read 16 bytes of a row of their own: by hand, from the tables above.
#: Eight lanes go together; each wavefront serves 128 bytes. Spans of 32, 64 and 128 bytes put 4, 2 and 1 rows
#: into a line, so that 2, 4 and 8 of the eight lanes meet without a swizzle.
UNSWIZZLED_WAVEFRONTS = {32: 8, 64: 16, 128: 32}
WAVEFRONTS = {
    Swizzle.B32: 4, Swizzle.B64: 4, Swizzle.B128: 4, Swizzle.B128_ATOM_32B: 8, Swizzle.B128_ATOM_64B: 16,
}  # fmt: skip


def as_stored(matrix: np.ndarray, config: SwizzleConfig) -> np.ndarray:
    """The tiles of a matrix as they lie in shared memory: [tile, row, element], zeros outside."""
    down, across = config.tiles(*matrix.shape)
    rows, cols = config.box_rows, config.row_elements
    padded = np.zeros((down * rows, across * cols), matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    tiles = padded.reshape(down, rows, across, cols).swapaxes(1, 2).reshape(-1, rows * cols)
    chunks = np.ascontiguousarray(tiles).reshape(down * across, config.tile_bytes // 128, 8, 4)
    table = np.array([[int(c) for c in line] for line in LINES[config.swizzle]])
    places = table[np.arange(chunks.shape[1]) % len(table)]
    stored = np.take_along_axis(chunks, places[None, :, :, None], axis=2)
    return stored.reshape(down * across, rows, cols)


def check(device: Device, config: SwizzleConfig, shape: tuple[int, int], seed: int = 0) -> None:
    data = random_array(shape, np.uint32, seed)
    want = data.T.copy() if config.output is Output.TRANSPOSED else as_stored(data, config)
    src, dst = device.asarray(data), filled(device, want.shape, np.uint32)
    swizzle.read_tiles(dst, src, config=config)
    device.synchronize()
    same_bits(dst.numpy(), want)


def usable(device: Device, kind: Swizzle) -> None:
    reason = swizzle.unavailable(device.capabilities, kind)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("output", list(Output))
@pytest.mark.parametrize("kind", swizzle.SWIZZLES)
def test_every_swizzle_lies_and_reads_as_the_isa_draws_it(
    kind: Swizzle, output: Output, tma_device: Device
) -> None:
    usable(tma_device, kind)
    config = SwizzleConfig(kind, output, 32, num_stages=2, threads=64, max_ctas=3)
    for seed, shape in enumerate([(1, 4), (31, 8), (32, 32), (33, 36), (100, 80)]):
        check(tma_device, config, shape, seed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = (Swizzle.B32, Swizzle.B64, Swizzle.B128)
    sweep(metafunc, num_stages=range(1, 9), size=SIZES, kind=kinds, output=list(Output))


def test_every_combination(row: Row) -> None:
    config = SwizzleConfig(
        row["kind"],
        row["output"],
        box_rows=32,
        threads=64,
        num_stages=row["num_stages"],
        max_ctas=CTAS,
    )
    with opened(row) as device:
        check(device, config, (extent(row["size"], 32, row["num_stages"]), config.row_elements - 4))


@pytest.mark.parametrize("kind", list(WAVEFRONTS))
def test_bank_conflicts_with_and_without_the_swizzle(kind: Swizzle) -> None:
    """Shared-memory wavefronts of the same reads; the twin differs in the map and in the XOR alone."""
    config = SwizzleConfig(kind, box_rows=64, threads=64)
    counted = {}
    with Device.open("emu:b200") as device:
        for used in (config, replace(config, swizzle=Swizzle.NONE)):
            check(device, used, (128, 64))
            counters = device.emulator.last_launch.counters
            counted[used.swizzle] = counters.shared_load_wavefronts / counters.shared_load_requests
    assert counted == {kind: WAVEFRONTS[kind], Swizzle.NONE: UNSWIZZLED_WAVEFRONTS[config.row_bytes]}


def test_b08_a_stage_that_starts_amid_the_pattern_is_reported() -> None:
    """The XOR on absolute addresses would still be right, one on offsets into the tile would not. The twin is
    the kernel as it is."""
    config = SwizzleConfig(Swizzle.B128, box_rows=32)
    line = "return smem_addr(stages) + s * STAGE_BYTES;"
    broken = mutated(config, line, line.replace("stages)", "stages) + 128"))
    words = ("not aligned to 1024", "swizzle B128 works on absolute shared addresses", "swizzle.cu")
    with faults(*words), Device.open("emu:h100") as device:
        check(device, broken, (32, 32))
    with Device.open("emu:h100") as device:
        check(device, config, (32, 32))


def test_reading_by_the_wrong_formula_gives_other_bytes() -> None:
    """The negative twin of the layout: the identity in place of the XOR transposes the wrong elements."""
    config = SwizzleConfig(Swizzle.B128, box_rows=32)
    wrong = mutated(config, "if constexpr (SWIZZLE == 3) return swizzle_128b(addr);", "")
    with Device.open("emu:h100") as device:
        check(device, config, (64, 64))
        with pytest.raises(AssertionError, match="Mismatched elements"):
            check(device, wrong, (64, 64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"swizzle": Swizzle.B128_ATOM_32B_FLIP_8B},
            "swizzle is one of NONE, B32, .* .got <Swizzle.B128_ATOM_32B_FLIP_8B",
        ),
        ({"row_bytes": 64}, "under swizzle B128 a tile's row is its span of 128 bytes .* .got 64"),
        ({"swizzle": Swizzle.NONE, "row_bytes": 40}, "row_bytes is a multiple of 16, at most 1024 .got 40"),
        ({"box_rows": 48}, "box_rows is a multiple of 32, at most 256 .got 48"),
        ({"box_rows": 288}, "box_rows is a multiple of 32, at most 256 .got 288"),
        ({"output": "transposed"}, "output is an Output"),
        ({"num_stages": 0}, "num_stages must be 1 to"),
        ({"threads": 33}, "threads must be a multiple of 32"),
        ({"max_ctas": 0}, "max_ctas must be at least 1 .got 0"),
    ],
)
def test_wrong_configurations_are_refused_before_compiling(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SwizzleConfig(**changes)


def test_wrong_operands_are_refused(device: Device) -> None:
    config = SwizzleConfig()
    src, dst = device.asarray(np.zeros((64, 32), np.uint32)), device.empty((32, 64), np.uint32)
    if not device.capabilities.has_tma:
        with pytest.raises(ConfigError, match="needs the TMA"):
            swizzle.read_tiles(dst, src, config=config)
        return
    with pytest.raises(OperandError, match=r"rows are multiples of 16 bytes \(got \(64, 30\) uint32\); pad"):
        swizzle.read_tiles(dst, device.empty((64, 30), np.uint32), config=config)
    with pytest.raises(OperandError, match=r"matrix of 4-byte elements .*uint8\)"):
        swizzle.read_tiles(dst.view(np.uint8), src.view(np.uint8, (64, 128)), config=config)
    with pytest.raises(OperandError, match=r"must have the shape \(32, 64\) .* \(got \(64, 32\)\)"):
        swizzle.read_tiles(dst.view(np.uint32, (64, 32)), src, config=config)
    with pytest.raises(OperandError, match="must not overlap"):
        swizzle.read_tiles(src.view(np.uint32, (32, 64)), src, config=config)
    if device.capabilities.compute_capability < (10, 0):
        with pytest.raises(ConfigError, match=r"B128_ATOM_32B needs compute capability 10.0"):
            swizzle.read_tiles(dst, src, config=SwizzleConfig(Swizzle.B128_ATOM_32B))


def test_an_empty_matrix_launches_nothing() -> None:
    with Device.open("emu:h100") as device:
        src, dst = device.empty((0, 32), np.uint32), device.empty((32, 0), np.uint32)
        assert swizzle.read_tiles(dst, src, config=SwizzleConfig()).kernel is None
