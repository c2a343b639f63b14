"""Tensor maps: alignment, every encode rule, and what reaches the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smfree.cuda import DataType, Device, Interleave, L2Promotion, OobFill, Swizzle, TensorMapError
from smfree.cuda.tensormap import TensorMapSpec, data_type_of, spec_for
from tests.cuda.fake_driver import FakeDriver


@pytest.fixture(params=["fake", "emu:h100"])
def any_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The fake driver (called through its function pointer) and the emulated H100 (through its Python
    function)."""
    if request.param == "fake":
        with Device(FakeDriver(), 0, spec="cuda:0", is_emulated=False) as device:
            yield device
    else:
        with Device.open(request.param) as device:
            yield device


def test_a_thousand_maps_are_aligned(any_device: Device) -> None:
    """E04: each of 1000 maps lies at a multiple of 128 and keeps its bytes while the others are made."""
    array = any_device.empty((64, 64), np.float32)
    maps = [any_device.tensor_map(array, (1 + n % 32, 32)) for n in range(1000)]
    copies = [m.tobytes() for m in maps]
    assert all(m.address % 128 == 0 for m in maps) and len({m.address for m in maps}) == 1000
    assert [m.tobytes() for m in maps] == copies
    assert all(len(data) == 128 for data in copies)


def test_driver_gets_dimensions_innermost_first(device: Device, fake: FakeDriver) -> None:
    array = device.empty((5, 40, 64), np.float16)
    made = device.tensor_map(
        array, (1, 8, 32), swizzle=Swizzle.B64, l2_promotion=L2Promotion.B256, oob_fill=OobFill.NAN
    )
    (seen,) = fake.maps
    assert seen == {
        "address": made.address,
        "data_type": DataType.FLOAT16,
        "base": array.ptr,
        "dims": [64, 40, 5],
        "strides": [128, 5120],
        "box": [32, 8, 1],
        "element_strides": [1, 1, 1],
        "rest": (0, Swizzle.B64, L2Promotion.B256, OobFill.NAN),
    }
    assert made.box_bytes == 512


def test_strides_and_views_describe_the_array(device: Device, fake: FakeDriver) -> None:
    array = device.empty((64, 64), np.uint32)
    device.tensor_map(array[8:16], (8, 16), strides_bytes=(512,), element_strides=(2, 1))
    assert fake.maps[0]["base"] == array.ptr + 8 * 256
    assert fake.maps[0]["strides"] == [512] and fake.maps[0]["element_strides"] == [1, 2]


GOOD = TensorMapSpec(
    address=1 << 33,
    data_type=DataType.FLOAT32,
    dims=(64, 64, 4),
    strides_bytes=(256, 16384),
    box=(32, 64, 1),
    element_strides=(1, 1, 1),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": (1 << 33) + 4}, "16-byte aligned .got address ending in 0x4"),
        ({"address": 0}, "16-byte aligned"),
        ({"dims": (64, 0, 4)}, r"dimension 1 has 1 to 2\^32 elements \(got 0\)"),
        ({"dims": (2**32 + 1, 64, 4)}, "dimension 0"),
        (
            {"strides_bytes": (260, 16384)},
            r"stride of dimension 1 is a multiple of 16 bytes.*\(got 260 bytes\)",
        ),
        ({"strides_bytes": (256, 2**40)}, r"stride of dimension 2.*below 2\^40"),
        ({"box": (0, 64, 1)}, r"box dimension 0 has 1 to 256 elements \(got 0\)"),
        ({"box": (32, 257, 1)}, "box dimension 1 has 1 to 256 elements .got 257"),
        ({"box": (3, 64, 1)}, r"innermost row is a multiple of 16 bytes \(got 12 bytes\)"),
        ({"box": (32, 64)}, r"one entry per dimension"),
        ({"element_strides": (1, 9, 1)}, r"element stride 1 is 1 to 8 \(got 9\)"),
        ({"element_strides": (1, 0, 1)}, "element stride 1"),
        ({"swizzle": Swizzle.B64}, r"under swizzle B64 .* at most 64 bytes \(got 128 bytes\)"),
        ({"swizzle": Swizzle.B32}, "at most 32 bytes"),
        ({"swizzle": Swizzle.B128, "box": (64, 1, 1)}, "at most 128 bytes .got 256"),
        ({"data_type": DataType.INT32, "oob_fill": OobFill.NAN}, "NaN fill needs a float type .got INT32"),
        ({"interleave": Interleave.B32}, "interleave B32 goes with swizzle B32 .got NONE"),
        (
            {"interleave": Interleave.B32, "swizzle": Swizzle.B32, "address": (1 << 33) + 16},
            "32-byte aligned",
        ),
        (
            {"interleave": Interleave.B32, "swizzle": Swizzle.B32, "strides_bytes": (272, 16384)},
            "multiple of 32",
        ),
        (
            {
                "interleave": Interleave.B16,
                "dims": (64, 64),
                "strides_bytes": (256,),
                "box": (32, 64),
                "element_strides": (1, 1),
            },
            "at least 3 dimensions",
        ),
    ],
)
def test_every_encode_rule_names_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    GOOD.validate()
    with pytest.raises(TensorMapError, match=message) as caught:
        replace(GOOD, **changes).validate()
    assert "; " in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.uint8, np.float32, np.float64])
def test_b04_rows_that_are_no_multiple_of_16_bytes(any_device: Device, dtype: type) -> None:
    """B04: a dense matrix of odd width. The next width that fits is accepted."""
    size = np.dtype(dtype).itemsize
    width = 96 // size + 4 // size if size <= 4 else 13
    fits = -(-width * size // 16) * 16 // size
    message = rf"stride of dimension 1 is a multiple of 16 bytes.*\(got {width * size} bytes\); pad the rows"
    with pytest.raises(TensorMapError, match=message):
        any_device.tensor_map(any_device.empty((64, width), dtype), (8, 16 // size))
    any_device.tensor_map(any_device.empty((64, fits), dtype), (8, 16 // size))


def test_b04_the_reported_width(any_device: Device) -> None:
    """B04: 100 float16 in a row are refused, 104 accepted."""
    with pytest.raises(TensorMapError, match=r"\(got 200 bytes\)"):
        any_device.tensor_map(any_device.empty((64, 100), np.float16), (8, 8))
    assert any_device.tensor_map(any_device.empty((64, 104), np.float16), (8, 8)).box_bytes == 128


@pytest.mark.parametrize(
    "swizzle", [s for s in Swizzle if s not in (Swizzle.NONE, Swizzle.B128_ATOM_32B_FLIP_8B)]
)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_b06_the_inner_box_against_the_swizzle(any_device: Device, swizzle: Swizzle, size: int) -> None:
    """B06: as wide as the span is accepted, 16 bytes more are refused, with both numbers."""
    span = swizzle.span_bytes or 0
    array = any_device.empty((64, 256), f"u{size}")
    assert any_device.tensor_map(array, (4, span // size), swizzle=swizzle).box_bytes == 4 * span
    message = (
        rf"under swizzle {swizzle.name} .* at most {span} bytes \(got {span + 16} bytes\); narrow the box"
    )
    with pytest.raises(TensorMapError, match=message):
        any_device.tensor_map(array, (4, (span + 16) // size), swizzle=swizzle)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_b06_without_a_swizzle_256_elements_are_allowed(any_device: Device, size: int) -> None:
    """B06: the limit is then one of elements."""
    array = any_device.empty((64, 512), f"u{size}")
    assert any_device.tensor_map(array, (4, 256)).box_bytes == 4 * 256 * size
    with pytest.raises(TensorMapError, match=r"box dimension 0 has 1 to 256 elements \(got 272\)"):
        any_device.tensor_map(array, (4, 272))


def test_refused_map_never_reaches_the_driver(device: Device, fake: FakeDriver) -> None:
    with pytest.raises(TensorMapError, match="16-byte aligned"):
        device.tensor_map(device.empty(1024).bytes_view(4, 1008).view(np.uint32, (63, 4)), (8, 4))
    assert not fake.maps


def test_sampled_box_counts_what_arrives() -> None:
    """Element strides load ceil(box/stride); dimension 0's is ignored without interleave."""
    assert replace(GOOD, element_strides=(2, 3, 1)).box_bytes == 32 * 22 * 1 * 4
    assert GOOD.box_bytes == 32 * 64 * 4


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("u1", DataType.UINT8), ("i4", DataType.INT32), ("f2", DataType.FLOAT16), ("f8", DataType.FLOAT64)],
)
def test_numpy_types_have_an_element_type(dtype: str, wanted: DataType) -> None:
    assert data_type_of(np.dtype(dtype)) is wanted


@pytest.mark.parametrize("dtype", ["c8", ">f4", "S4"])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(TensorMapError, match="no element type"):
        data_type_of(np.dtype(dtype))


def test_named_type_must_be_as_wide_as_the_array(device: Device) -> None:
    array = device.empty((8, 8), np.uint16)
    assert spec_for(array, (8, 8), data_type=DataType.BFLOAT16).data_type is DataType.BFLOAT16
    with pytest.raises(TensorMapError, match="FLOAT32 for uint16"):
        spec_for(array, (8, 8), data_type=DataType.FLOAT32)


def test_map_keeps_its_array_alive(device: Device, fake: FakeDriver) -> None:
    array = device.empty((64, 64), np.float32)
    address, made = array.ptr, device.tensor_map(array, (32, 32))
    del array
    assert address in fake.memory
    del made
    assert address not in fake.memory
