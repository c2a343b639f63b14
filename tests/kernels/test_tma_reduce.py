"""Additions by the TMA: exact where the order cannot matter, within the bound of any order otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import reduce_bulk, reduce_tensor
from kernels.tma.reduce_bulk import ReduceBulkConfig
from kernels.tma.reduce_tensor import ReduceTensorConfig
from smfree.cuda import Device
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import CTAS, SIZES, extent, faults, mutated, random_array, same_bits, sweep

TILE = 1024
FLOATS = TILE // 4
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}


def small_integers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Floats whose sums of up to 64 are exact, in whatever order they are added."""
    return np.random.default_rng(seed).integers(-16, 17, shape).astype(dtype)


def check_bulk(
    device: Device, config: ReduceBulkConfig, num_parts: int, length: int, pitch: int | None = None
) -> None:
    parts = small_integers((num_parts, pitch or length), np.float32, num_parts)
    before = small_integers((length,), np.float32, length)
    dst = device.asarray(before)
    reduce_bulk.add_parts(dst, device.asarray(parts), config=config)
    device.synchronize()
    same_bits(dst.numpy(), before + parts[:, :length].sum(0))


def check_tensor(
    device: Device, config: ReduceTensorConfig, shape: tuple[int, int, int], dtype: Any, seed: int = 0
) -> None:
    make = small_integers if np.dtype(dtype).kind == "f" else random_array
    parts, before = make(shape, dtype, seed), make(shape[1:], dtype, seed + 1)
    dst = device.asarray(before)
    reduce_tensor.add_parts(dst, device.asarray(parts), config=config)
    device.synchronize()
    same_bits(dst.numpy(), before + parts.sum(0, dtype=dtype))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, num_stages=range(1, 9), size=SIZES, num_parts=(1, 3), form=("bulk", "tensor"))


def test_every_combination(row: Row) -> None:
    """Two CTAs add the parts to the same dst."""
    stages, parts = row["num_stages"], row["num_parts"]
    with opened(row) as device:
        if row["form"] == "bulk":
            config = ReduceBulkConfig(tile_bytes=TILE, num_stages=stages, max_ctas=CTAS)
            length = extent(row["size"], FLOATS, stages)
            check_bulk(device, config, parts, length, pitch=-(-length // 4) * 4 + 8)
        else:
            boxes = ReduceTensorConfig(box_rows=8, box_cols=16, num_stages=stages, max_ctas=CTAS)
            check_tensor(device, boxes, (parts, extent(row["size"], 8, stages), 12), np.int32)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint64, np.float32, np.float16])
def test_tensor_adds_in_the_type_of_its_map(dtype: Any, tma_device: Device) -> None:
    """Integers are random over their whole range: they wrap. Ragged in both dimensions."""
    size = np.dtype(dtype).itemsize
    config = ReduceTensorConfig(box_rows=8, box_cols=64 // size, element_bytes=size, num_stages=2, max_ctas=4)
    for shape in ((1, 1, 16 // size), (3, 8, 64 // size), (4, 21, 112 // size)):
        check_tensor(tma_device, config, shape, dtype, seed=size)


@pytest.mark.parametrize("schedule", ["timed", "random"])
@pytest.mark.parametrize("form", ["bulk", "tensor"])
def test_random_floats_stay_within_the_bound_of_any_order(form: str, schedule: str) -> None:
    """p + 1 terms added in any order differ from the exact sum by at most p u / (1 - p u) times the sum of
    their magnitudes, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2)."""
    num_parts, rows, cols = 12, 16, 64
    parts = random_array((num_parts, rows, cols), np.float32, 1)
    before = random_array((rows, cols), np.float32, 2)
    with Device.open("emu:h100", schedule=schedule, seed=3) as device:
        dst, source = device.asarray(before), device.asarray(parts)
        if form == "bulk":
            flat, matrix = dst.view(np.float32), source.view(np.float32, (num_parts, rows * cols))
            reduce_bulk.add_parts(flat, matrix, config=ReduceBulkConfig(tile_bytes=TILE, max_ctas=5))
        else:
            config = ReduceTensorConfig(box_rows=8, box_cols=32, max_ctas=5)
            reduce_tensor.add_parts(dst, source, config=config)
        device.synchronize()
        got = dst.numpy().astype(np.float64)
    terms = np.concatenate([before[None], parts]).astype(np.float64)
    pu = num_parts * UNIT_ROUNDOFF["float32"]
    bound = pu / (1 - pu) * np.abs(terms).sum(0)
    assert (np.abs(got - terms.sum(0)) <= bound).all()


def test_bulk_additions_flush_subnormals_and_keep_their_sign(tma_device: Device) -> None:
    """PTX ISA, "cp.reduce.async.bulk": inputs and results. The last three floats are added by threads, whose
    red.add.f32 flushes, too (PTX ISA, "red")."""
    tiny = np.float32(1e-40)
    parts = np.full((1, 8), -tiny, np.float32)
    dst, before = tma_device.empty(7, np.float32), np.full(7, -0.0, np.float32)
    before[::2] = tiny
    dst.copy_from(before)
    reduce_bulk.add_parts(dst, tma_device.asarray(parts), config=ReduceBulkConfig(tile_bytes=TILE))
    tma_device.synchronize()
    assert (dst.numpy() == 0).all()
    half = np.float32(1.5e-38)  # normal; half - 1e-38 is not
    dst.copy_from(np.full(7, half, np.float32))
    parts[:] = np.float32(-1.4e-38)
    reduce_bulk.add_parts(dst, tma_device.asarray(parts), config=ReduceBulkConfig(tile_bytes=TILE))
    tma_device.synchronize()
    assert (dst.numpy() == 0).all()


def test_no_byte_goes_through_registers() -> None:
    with Device.open("emu:h100") as device:
        check_bulk(device, ReduceBulkConfig(tile_bytes=TILE, num_stages=2), 4, 4 * FLOATS)
        counters = device.emulator.last_launch.counters
    assert counters.bytes_through_registers == 0 and counters.atomics == 0
    assert counters.tma_requests == 2 * 4 * 4


def test_a_stage_refilled_before_the_addition_has_read_it_is_reported() -> None:
    config = ReduceBulkConfig(tile_bytes=TILE, num_stages=1, max_ctas=1)
    broken = mutated(config, "cp_async_bulk_wait_group_read<0>();", "")
    with faults("reduce_bulk.cu", "has not been read yet"), Device.open("emu:h100") as device:
        check_bulk(device, broken, 3, FLOATS)
    with Device.open("emu:h100") as device:
        check_bulk(device, config, 3, FLOATS)


def test_copies_in_place_of_the_additions_are_unordered_writes() -> None:
    """Additions may meet in dst, copies may not; the twin is every test above."""
    config = ReduceBulkConfig(tile_bytes=TILE, num_stages=2, max_ctas=1)
    name = "cp_reduce_async_bulk_global_shared_add_f32(dst"
    copies = mutated(config, name, "cp_async_bulk_global_shared(dst")
    words = ("cp.async.bulk store writes 1024 bytes", "nothing orders the two", "reduce_bulk.cu")
    with faults(*words), Device.open("emu:h100", schedule="min-pc") as device:
        check_bulk(device, copies, 2, FLOATS)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (ReduceBulkConfig, {"tile_bytes": 40}, "positive multiple of 16 .got 40"),
        (ReduceBulkConfig, {"num_stages": 9}, "num_stages must be 1 to 8"),
        (ReduceBulkConfig, {"max_ctas": 0}, "max_ctas must be at least 1"),
        (ReduceTensorConfig, {"box_rows": 257}, "box_rows is 1 to 256 .got 257"),
        (ReduceTensorConfig, {"box_cols": 3}, "a box's row is a multiple of 16 bytes .got 3 x 4 bytes"),
        (ReduceTensorConfig, {"element_bytes": 3}, "element_bytes is 1, 2, 4 or 8"),
    ],
)
def test_wrong_configurations_are_refused(kind: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**changes)


def test_wrong_operands_are_refused(tma_device: Device) -> None:
    bulk, tensor = ReduceBulkConfig(tile_bytes=TILE), ReduceTensorConfig()
    dst, parts = tma_device.empty(64, np.float32), tma_device.empty((3, 64), np.float32)
    with pytest.raises(OperandError, match=r"dst is \(n,\) and parts \(p, pitch\), float32"):
        reduce_bulk.add_parts(dst.view(np.int32), parts.view(np.int32, (3, 64)), config=bulk)
    with pytest.raises(OperandError, match=r"no longer than a part \(got 64 and 60\)"):
        reduce_bulk.add_parts(dst, tma_device.empty((3, 60), np.float32), config=bulk)
    with pytest.raises(OperandError, match=r"each part must be 16-byte aligned .*pitch of 66 floats"):
        reduce_bulk.add_parts(dst, tma_device.empty((3, 66), np.float32), config=bulk)
    with pytest.raises(OperandError, match="must not overlap"):
        reduce_bulk.add_parts(parts[:1].view(np.float32), parts, config=bulk)
    with pytest.raises(OperandError, match=r"dst must be 16-byte aligned .*offset the view by .*4 elements"):
        reduce_bulk.add_parts(dst[1:], parts, config=bulk)
    with pytest.raises(OperandError, match=r"a tensor reduction adds uint32, int32, .* .got float64"):
        reduce_tensor.add_parts(
            tma_device.empty((4, 4), np.float64), tma_device.empty((1, 4, 4), np.float64), config=tensor
        )
    with pytest.raises(OperandError, match=r"every part has dst's shape \(4, 4\)"):
        reduce_tensor.add_parts(
            tma_device.empty((4, 4), np.int32), tma_device.empty((1, 4, 8), np.int32), config=tensor
        )
    with pytest.raises(OperandError, match="rows of a multiple of 16 bytes"):
        reduce_tensor.add_parts(
            tma_device.empty((4, 3), np.int32), tma_device.empty((1, 4, 3), np.int32), config=tensor
        )


def test_nothing_to_add_launches_nothing(tma_device: Device) -> None:
    none = reduce_bulk.add_parts(
        tma_device.empty(4, np.float32), tma_device.empty((0, 4), np.float32), config=ReduceBulkConfig()
    )
    empty = reduce_tensor.add_parts(
        tma_device.empty((0, 4), np.int32), tma_device.empty((2, 0, 4), np.int32), config=ReduceTensorConfig()
    )
    assert none.kernel is None and empty.kernel is None
