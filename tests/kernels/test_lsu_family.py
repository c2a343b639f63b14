"""The LSU family: cache operators, gathers, zero-filled rows, staged transposes; bitwise and by counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.common import ConfigError, OperandError
from kernels.lsu import cached, pad_async, transpose
from kernels.lsu import gather as gathering
from kernels.lsu.cached import CachedCopyConfig, LoadCache, StoreCache
from kernels.lsu.gather import GatherConfig
from kernels.lsu.pad_async import PadConfig
from kernels.lsu.transpose import Layout, TransposeConfig
from smfree.cuda import Device
from tests.kernels import pairwise
from tests.kernels.pairwise import SCHEDULES, opened

SPECS = ["emu:a100", "emu:h100", "emu:b200"]
CANARY = 0xA5
CANARY_BYTES = 64

AXES: dict[str, dict[str, list[Any]]] = {
    "cached": {
        "load": list(LoadCache),
        "store": list(StoreCache),
        "unroll": [1, 2, 4],
        "length": [0, 1, 15, 16, 17, 64 * 16 - 1, 64 * 16, 64 * 16 + 1, 7 * 64 * 16 + 133],
    },
    "gather": {
        "element": [4, 8, 16],
        "unroll": [1, 4],
        "length": [0, 1, 63, 64, 65, 1000],
        "stride": [None, 1, 2, 5, 32],
    },
    "pad": {
        "stages": list(range(1, 9)),
        "row_bytes": [0, 1, 4, 15, 16, 17, 60, 79, 80],
        "rows": [0, 1, 3, 4, 5, 23, 137],
        "slack": [0, 16],
    },
    "transpose": {
        "layout": list(Layout),
        "threads": [32, 96, 256],
        "rows": [0, 1, 31, 32, 33, 70],
        "columns": [1, 31, 32, 33, 65],
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    family = metafunc.function.__name__.removeprefix("test_every_")
    if family in AXES:
        axes = {"spec": SPECS, "schedule": SCHEDULES, **AXES[family]}
        rows = pairwise.rows(axes, metafunc.config)
        metafunc.parametrize("row", rows, ids=["-".join(map(str, row.values())) for row in rows])


def moved(
    device: Device, num_bytes: int, run: Callable[[Any], object], dtype: Any = np.uint8
) -> NDArray[Any]:
    """What ``run`` wrote to an array of ``num_bytes``; the canaries around it are untouched."""
    whole = device.asarray(np.full(num_bytes + 2 * CANARY_BYTES, CANARY, np.uint8))
    run(whole[CANARY_BYTES : CANARY_BYTES + num_bytes])
    device.synchronize()
    found = whole.numpy()
    for margin in (found[:CANARY_BYTES], found[CANARY_BYTES + num_bytes :]):
        assert (margin == CANARY).all(), "bytes outside dst were written"
    return found[CANARY_BYTES : CANARY_BYTES + num_bytes].view(dtype)


def random_bytes(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


def test_every_cached(row: pairwise.Row) -> None:
    data = random_bytes(row["length"])
    config = CachedCopyConfig(row["load"], row["store"], 64, row["unroll"])
    with opened(row) as device:
        src = device.asarray(data)
        found = moved(device, len(data), lambda dst: cached.copy(dst, src, config=config))
    np.testing.assert_array_equal(found, data)


def test_every_gather(row: pairwise.Row) -> None:
    element, length, stride = row["element"], row["length"], row["stride"]
    rng = np.random.default_rng(length)
    data = random_bytes((length * (stride or 1) + 7) * element)
    rows = data.reshape(-1, element)
    index = rng.integers(0, len(rows), length, np.uint32)
    places = index if stride is None else np.arange(length) * stride
    config = GatherConfig(element, 64, row["unroll"])
    with opened(row) as device:
        src, indices = device.asarray(data), device.asarray(index)

        def run(dst: Any) -> None:
            if stride is None:
                gathering.gather(dst, src, indices, config=config)
            else:
                gathering.strided(dst, src, stride, config=config)

        found = moved(device, length * element, run)
    np.testing.assert_array_equal(found, rows[places].ravel())


def test_every_pad(row: pairwise.Row) -> None:
    padded, num_rows, row_bytes = 80, row["rows"], row["row_bytes"]
    pitch = -(-row_bytes // 16) * 16 + row["slack"]
    data = random_bytes(max((num_rows - 1) * pitch + row_bytes, 0) if num_rows else 0)
    expected = np.zeros((num_rows, padded), np.uint8)
    for r in range(num_rows):
        expected[r, :row_bytes] = data[r * pitch : r * pitch + row_bytes]
    config = PadConfig(padded, 4, row["stages"], 32)
    with opened(row) as device:
        src = device.asarray(data)
        found = moved(
            device,
            num_rows * padded,
            lambda dst: pad_async.pad(dst, src, row_bytes=row_bytes, src_pitch_bytes=pitch, config=config),
        )
    np.testing.assert_array_equal(found, expected.ravel())


def test_every_transpose(row: pairwise.Row) -> None:
    data = random_bytes(row["rows"] * row["columns"] * 4).view(np.uint32).reshape(row["rows"], row["columns"])
    config = TransposeConfig(row["layout"], row["threads"])
    with opened(row) as device:
        src, dst = device.asarray(data), device.empty(data.shape[::-1], np.uint32)
        transpose.transpose(dst, src, config=config)
        device.synchronize()
        np.testing.assert_array_equal(dst.numpy(), data.T)


# ---- counters: what the pattern costs ---------------------------------------------------------------


def counted(device: Device, run: Callable[[], object]) -> Any:
    """Counters of what ``run`` launches."""
    run()
    device.synchronize()
    return device.emulator.last_launch.counters


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (32, 32)])
def test_a_strided_load_touches_the_sectors_of_its_span_up_to_one_per_lane(stride: int, sectors: int) -> None:
    with Device.open("emu:h100") as device:
        src = device.asarray(random_bytes(1024 * stride * 4))
        dst = device.empty((4096,), np.uint8)
        config = GatherConfig(4, 64, 1)
        found = counted(device, lambda: gathering.strided(dst, src, stride, config=config))
    assert found.global_load_requests == 1024 // 32
    assert found.global_load_sectors == 1024 // 32 * sectors


@pytest.mark.parametrize(
    ("layout", "wavefronts"), [(Layout.PLAIN, 32), (Layout.PADDED, 1), (Layout.SWIZZLED, 1)]
)
def test_a_column_costs_a_wavefront_per_bank_conflict(layout: Layout, wavefronts: int) -> None:
    with Device.open("emu:h100") as device:
        src = device.asarray(random_bytes(64 * 64 * 4).view(np.uint32).reshape(64, 64))
        dst = device.empty((64, 64), np.uint32)
        found = counted(device, lambda: transpose.transpose(dst, src, config=TransposeConfig(layout)))
    assert found.shared_store_wavefronts == 4 * 32
    assert found.shared_load_wavefronts == 4 * 32 * wavefronts


def test_zero_filled_bytes_are_never_read() -> None:
    with Device.open("emu:h100") as device:
        src, dst = device.asarray(random_bytes(3 * 32)), device.empty((3 * 80,), np.uint8)
        config = PadConfig(80, 4, 2, 32)
        found = counted(device, lambda: pad_async.pad(dst, src, row_bytes=17, config=config))
    assert found.bytes_async == 3 * 17


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CachedCopyConfig(load="cx"), "load must be one of ca, cg"),
        (lambda: CachedCopyConfig(store="cg"), "store must be one of wb, cs, wt"),
        (lambda: CachedCopyConfig(unroll=9), "unroll must be 1 to 8"),
        (lambda: GatherConfig(2), "element_bytes must be 4, 8 or 16"),
        (lambda: PadConfig(72), "padded_bytes must be a positive multiple of 16 (got 72); use 80"),
        (lambda: PadConfig(tile_rows=0), "tile_rows must be at least 1"),
        (lambda: TransposeConfig("xor"), "layout must be one of plain, padded, swizzled"),
    ],
)
def test_configurations_that_no_kernel_has(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert words in str(refusal.value)


def test_operands_that_do_not_fit() -> None:
    with Device.open("emu:h100") as device:
        a, b = device.empty((256,), np.uint32), device.empty((256,), np.uint32)
        index = device.asarray(np.zeros(255, np.uint32))
        pads = {"config": PadConfig(80)}
        attempts: list[tuple[Callable[[], object], type[Exception], str]] = [
            (lambda: gathering.gather(a, b, index, config=GatherConfig()), OperandError, "index must be 256"),
            (lambda: gathering.strided(a, b, 2, config=GatherConfig()), OperandError, "need 511 elements"),
            (lambda: gathering.strided(a, b, 0, config=GatherConfig()), ConfigError, "stride must be at"),
            (lambda: gathering.strided(a[1:], b[1:], 1, config=GatherConfig(8)), OperandError, "8-byte al"),
            (
                lambda: gathering.gather(a, b, a, config=GatherConfig()),
                OperandError,
                "dst and index must not",
            ),
            (lambda: pad_async.pad(a, b, row_bytes=81, config=PadConfig(80)), ConfigError, "row_bytes must"),
            (lambda: pad_async.pad(a, b, row_bytes=8, **pads), OperandError, "whole rows of 80 bytes"),
            (lambda: pad_async.pad(a[:240], b[:8], row_bytes=8, **pads), OperandError, "need 184 bytes"),
            (
                lambda: pad_async.pad(a[:240], b, row_bytes=20, src_pitch_bytes=24, **pads),
                ConfigError,
                "src_pitch_bytes must be a multiple of 16",
            ),
            (lambda: transpose.transpose(a, b, config=TransposeConfig()), OperandError, "must be a matrix"),
        ]
        for run, kind, words in attempts:
            with pytest.raises(kind) as refusal:
                run()
            assert words in str(refusal.value)
