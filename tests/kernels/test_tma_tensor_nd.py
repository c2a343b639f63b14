"""Boxes of strided tensors of every rank, against numpy's indexing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import tensor_nd
from kernels.tma.tensor_nd import TensorNdConfig
from smfree.cuda import Device, OobFill, TensorMapError
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import CTAS, SIZES, extent, faults, filled, mutated, random_array, same_bits, sweep

BOXES = {1: (64,), 2: (8, 16), 3: (4, 6, 8), 4: (3, 2, 4, 8), 5: (2, 3, 2, 2, 16)}
SHAPES = {1: (208,), 2: (21, 40), 3: (9, 7, 20), 4: (7, 3, 5, 24), 5: (3, 4, 5, 2, 20)}
"""No multiple of the boxes; the innermost of dst a multiple of 16 bytes for elements of 4."""


def expected(
    src: np.ndarray, shape: Sequence[int], start: Sequence[int], steps: Sequence[int], fill: float = 0
) -> np.ndarray:
    """dst[i] = src[start + i * step], ``fill`` outside."""
    out = np.full(shape, fill, src.dtype)
    rows = [first + np.arange(n) * step for n, first, step in zip(shape, start, steps, strict=True)]
    inside = [(row >= 0) & (row < n) for row, n in zip(rows, src.shape, strict=True)]
    out[np.ix_(*inside)] = src[np.ix_(*(row[i] for row, i in zip(rows, inside, strict=True)))]
    return out


def check(
    device: Device,
    config: TensorNdConfig,
    src_shape: tuple[int, ...],
    dst_shape: tuple[int, ...],
    start: tuple[int, ...] = (),
    dtype: Any = np.uint32,
    seed: int = 0,
) -> None:
    data = random_array(src_shape, dtype, seed)
    src, dst = device.asarray(data), filled(device, dst_shape, dtype)
    tensor_nd.copy(dst, src, config=config, start=start)
    device.synchronize()
    fill = np.nan if config.fill is OobFill.NAN else 0
    want = expected(data, dst_shape, start or (0,) * config.rank, config.element_strides, fill)
    got = dst.numpy()
    if fill:
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        got, want = np.nan_to_num(got), np.nan_to_num(want)
    same_bits(got, want)


@pytest.mark.parametrize("rank", list(BOXES))
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int32, np.float64])
def test_whole_tensors_of_every_rank_and_element_size(rank: int, dtype: Any, tma_device: Device) -> None:
    size = np.dtype(dtype).itemsize
    widen = max(4 // size, 1)
    box = (*BOXES[rank][:-1], BOXES[rank][-1] * widen)
    shape = (*SHAPES[rank][:-1], SHAPES[rank][-1] * widen)
    check(tma_device, TensorNdConfig(box, size, num_stages=2), shape, shape, dtype=dtype, seed=rank)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, num_stages=range(1, 9), rank=list(BOXES), size=SIZES, shift=(-1, 1))


def test_every_combination(row: Row) -> None:
    """The outermost extent goes around the box, the region starts before or inside src."""
    rank, box = row["rank"], BOXES[row["rank"]]
    unit = 4 if rank == 1 else 1
    inner = box[1:] if row["size"] == "wraps" else SHAPES[rank][1:]
    shape = (extent(row["size"], box[0], row["num_stages"], unit), *inner)
    start = (unit * row["shift"], *(0,) * (rank - 1))
    config = TensorNdConfig(box, num_stages=row["num_stages"], max_ctas=CTAS)
    with opened(row) as device:
        check(device, config, SHAPES[rank], shape, start)


@pytest.mark.parametrize("rank", list(BOXES))
def test_regions_that_start_before_src_and_end_after_it(rank: int, tma_device: Device) -> None:
    config = TensorNdConfig(BOXES[rank], num_stages=2, max_ctas=3)
    check(tma_device, config, SHAPES[rank], SHAPES[rank], (-2, 1, -1, 2, -4)[-rank:])
    larger = tuple(n + 4 for n in SHAPES[rank])
    check(tma_device, config, SHAPES[rank], larger, (-1, -2, -3, -1, -8)[-rank:])


@pytest.mark.parametrize("steps", [(2, 1), (3, 1), (8, 1), (2, 3, 1), (1, 2, 4, 1)])
def test_element_strides_take_every_nth_element(steps: tuple[int, ...], tma_device: Device) -> None:
    """B20: a simulator that stores the stride and copies with 1 fails here."""
    config = TensorNdConfig(BOXES[len(steps)], element_strides=steps, num_stages=2)
    src_shape = SHAPES[len(steps)]
    dst_shape = tuple(-(-n // s) + 1 for n, s in zip(src_shape[:-1], steps, strict=False)) + src_shape[-1:]
    check(tma_device, config, src_shape, dst_shape)
    check(tma_device, config, src_shape, dst_shape, start=(-steps[0], *(0,) * (len(steps) - 1)))


@pytest.mark.parametrize("fill", list(OobFill))
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_lies_outside_is_filled(fill: OobFill, dtype: Any, tma_device: Device) -> None:
    size = np.dtype(dtype).itemsize
    config = TensorNdConfig((4, 3, 64 // size), size, num_stages=2, fill=fill)
    check(tma_device, config, (6, 5, 96 // size), (11, 9, 192 // size), (-3, -2, -32 // size), dtype)


def test_b21_boxes_wholly_outside_are_filled_and_counted(tma_device: Device) -> None:
    """Each tile of dst lies past the end of src: nothing is read, all bytes are counted, nothing hangs."""
    check(tma_device, TensorNdConfig((8, 16), num_stages=2), (8, 16), (24, 32), (8, 16))


def test_a_strided_view_of_a_larger_array(tma_device: Device) -> None:
    """Every other plane and a window of the columns of an array, seen as a tensor by its strides."""
    data = random_array((8, 10, 32), np.float32, 3)
    memory, dst = tma_device.asarray(data), filled(tma_device, (4, 10, 16), np.float32)
    src = memory.bytes_view(64, memory.nbytes - 64).view(np.float32)
    config = TensorNdConfig((2, 4, 16), num_stages=2)
    tensor_nd.copy(dst, src, config=config, shape=(4, 10, 16), strides_bytes=(2 * 10 * 128, 128))
    tma_device.synchronize()
    same_bits(dst.numpy(), data[::2, :, 16:])


def test_no_byte_goes_through_registers() -> None:
    with Device.open("emu:h100") as device:
        check(device, TensorNdConfig((4, 6, 8), num_stages=2), (9, 7, 20), (9, 7, 20))
        counters = device.emulator.last_launch.counters
    assert counters.bytes_through_registers == 0 and counters.global_load_bytes == 0
    assert counters.tma_requests == 2 * 3 * 2 * 3


def test_a_box_announced_over_is_a_deadlock() -> None:
    """Filled elements count: of the 1024 bytes announced here, the whole box of 512 arrives, not less."""
    config = TensorNdConfig((8, 16), num_stages=2, max_ctas=1)
    line = "mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);"
    broken = mutated(config, line, line.replace("TILE_BYTES", "2 * TILE_BYTES"))
    with (
        faults("full[0]", "512 of 1024 bytes missing", "0 of 1 arrivals missing", "tensor_nd.cu"),
        Device.open("emu:h100") as device,
    ):
        check(device, broken, (5, 16), (8, 16))
    with Device.open("emu:h100") as device:
        check(device, config, (5, 16), (8, 16))


def test_b11_small_tiles_at_a_pitch_of_their_own_size_are_misaligned_from_the_second_stage_on() -> None:
    """Tiles of 64 bytes: stages 64 apart leave the second amid a 128-byte unit; they are 128 apart."""
    config = TensorNdConfig((16,), num_stages=2, max_ctas=1)
    line = "constexpr u32 STAGE_BYTES = (TILE_BYTES + 127) / 128 * 128;"
    broken = mutated(config, line, "constexpr u32 STAGE_BYTES = TILE_BYTES;")
    words = (
        "shared destination must be 128-byte aligned",
        "64 past",
        "make the stage pitch one",
        "tensor_nd.cu",
    )
    with faults(*words), Device.open("emu:h100") as device:
        check(device, broken, (64,), (64,))
    with Device.open("emu:h100") as device:
        check(device, broken, (16,), (16,))
        check(device, config, (64,), (64,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"box": ()}, "box has 1 to 5 dimensions .got 0"),
        ({"box": (1, 1, 1, 1, 1, 4)}, "box has 1 to 5 dimensions .got 6"),
        ({"box": (8, 3)}, r"multiple of 16 bytes \(got 3 x 4 bytes\); use a multiple of 4 elements"),
        ({"box": (8, 2.5)}, r"box\[1\] must be a whole number"),
        ({"box": (0, 16)}, r"box\[0\] times its element stride is 1 to 256 \(got 0 x 1\)"),
        ({"box": (257, 16)}, r"box\[0\] .* 1 to 256 \(got 257 x 1\)"),
        ({"element_strides": (2,)}, "one entry per dimension of box, 2 .got 1"),
        ({"element_strides": (9, 1)}, r"element_strides\[0\] is 1 to 8 \(got 9\)"),
        ({"box": (40, 16), "element_strides": (8, 1)}, r"1 to 256 \(got 40 x 8\)"),
        ({"element_strides": (1, 2)}, "innermost element stride is 1 .got 2"),
        ({"element_bytes": 3}, "element_bytes is 1, 2, 4 or 8 .got 3"),
        ({"num_stages": 9}, "num_stages must be 1 to 8"),
        ({"max_ctas": 0}, "max_ctas must be at least 1 .got 0"),
    ],
)
def test_wrong_configurations_are_refused_before_compiling(changes: dict[str, Any], message: str) -> None:
    good = TensorNdConfig((8, 16))
    with pytest.raises(ConfigError, match=message):
        replace(good, **({"element_strides": ()} | changes))


def test_wrong_operands_are_refused(device: Device) -> None:
    config = TensorNdConfig((8, 16))
    src, dst = device.asarray(np.zeros((64, 32), np.uint32)), device.empty((64, 32), np.uint32)
    if not device.capabilities.has_tma:
        with pytest.raises(ConfigError, match="needs the TMA"):
            tensor_nd.copy(dst, src, config=config)
        return
    with pytest.raises(OperandError, match=r"dst has as many dimensions as the box, 2 \(got 1"):
        tensor_nd.copy(dst.view(np.uint32), src, config=config)
    with pytest.raises(OperandError, match=r"start has as many dimensions as the box, 2 \(got 1"):
        tensor_nd.copy(dst, src, config=config, start=(3,))
    with pytest.raises(OperandError, match=r"config.element_bytes, 4 \(got uint8, 1 bytes\)"):
        tensor_nd.copy(dst.view(np.uint8, (64, 128)), src.view(np.uint8, (64, 128)), config=config)
    with pytest.raises(OperandError, match=r"innermost dimension .* 16 bytes .*\(got 30 x 4 bytes\); pad it"):
        tensor_nd.copy(device.empty((64, 30), np.uint32), src, config=config)
    with pytest.raises(
        OperandError, match=r"innermost start .*\(got -2 x 4 bytes\); .* multiple of 4 elements"
    ):
        tensor_nd.copy(dst, src, config=config, start=(0, -2))
    with pytest.raises(OperandError, match=r"start is a sequence of whole numbers \(got \(0.5, 0\)\)"):
        tensor_nd.copy(dst, src, config=config, start=(0.5, 0))  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="coordinates of dimension 0 must fit 32 bits"):
        tensor_nd.copy(dst, src, config=config, start=(2**31 - 9, 0))
    with pytest.raises(OperandError, match=r"must lie in src .it ends 16384 bytes in, src has 8192"):
        tensor_nd.copy(dst, src, config=config, shape=(128, 32))
    with pytest.raises(OperandError, match="src must not be empty"):
        tensor_nd.copy(dst, device.empty((0, 32), np.uint32), config=config)
    with pytest.raises(OperandError, match="must not overlap"):
        tensor_nd.copy(src[:8], src, config=config)
    with pytest.raises(
        TensorMapError, match=r"stride of dimension 1 is a multiple of 16 bytes.*\(got 120 bytes"
    ):
        tensor_nd.copy(dst, src, config=config, shape=(64, 30))
    with pytest.raises(TensorMapError, match="NaN fill needs a float type"):
        tensor_nd.copy(dst, src, config=replace(config, fill=OobFill.NAN))
    with pytest.raises(ConfigError, match=r"shared memory .*use a smaller tile"):
        tensor_nd.copy(dst, src, config=TensorNdConfig((256, 256)))
