"""Tensor maps: every rule of cuTensorMapEncodeTiled, the round trip, swizzles, and the rows of a box."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.errors import CopyFault, Unsupported
from smfree.emulator.tensor_boxes import box_rows, swizzle
from smfree.emulator.tensor_types import CONVERTED
from smfree.emulator.tensormap import (
    ELEMENT_BYTES,
    MAP_BYTES,
    DataType,
    Swizzle,
    TensorMap,
    decode,
    encode,
)

BASE = 1 << 40


def make(**changes: Any) -> bytes:
    """A valid 2-D fp16 map, changed."""
    fields: dict[str, Any] = {
        "data_type": "FLOAT16",
        "address": BASE,
        "dims": [104, 50],
        "strides": [208],
        "box": [16, 8],
    }
    return encode(**(fields | changes))


def test_round_trip() -> None:
    raw = make(element_strides=[1, 2], swizzle="32B", oob_fill="NAN_REQUEST_ZERO_FMA", l2_promotion="L2_256B")
    assert len(raw) == MAP_BYTES
    assert decode(raw) == TensorMap(
        data_type=DataType.FLOAT16,
        address=BASE,
        dims=(104, 50),
        strides=(2, 208),
        box=(16, 8),
        element_strides=(1, 2),
        swizzle=Swizzle.B32,
        fill_nan=True,
    )


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_rank_keeps_64_bit_addresses_and_strides(rank: int) -> None:
    strides = [(1 << 39) + 16 * d for d in range(rank - 1)]
    raw = encode(0, (1 << 45) + 16, [1 << 32] * rank, strides, [16] * rank, map_address=BASE + 64)
    tensor = decode(np.frombuffer(raw, np.uint8))
    assert (tensor.rank, tensor.address, tensor.dims) == (rank, (1 << 45) + 16, (1 << 32,) * rank)
    assert tensor.strides == (1, *strides) and tensor.box == (16,) * rank


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("32B", 1),
        ("SWIZZLE_64B", 2),
        ("CU_TENSOR_MAP_SWIZZLE_128B", 3),
        ("128B_ATOM_32B", 4),
        ("128B_ATOM_64B", 6),
    ],
)
def test_enums_by_name_or_number(name: str, value: int) -> None:
    assert make(swizzle=name, box=[8, 8]) == make(swizzle=value, box=[8, 8])


@pytest.mark.parametrize(
    ("change", "rule", "said", "twin"),
    [
        ({"address": BASE + 8}, "address", "16-byte aligned (got 0x10000000008)", {"address": BASE + 16}),
        (
            {"strides": [200], "dims": [100, 50]},
            "strides",
            "multiple of 16 and below 2^40 bytes (got 200)",
            {},
        ),
        ({"strides": [1 << 40]}, "strides", "below 2^40", {"strides": [(1 << 40) - 16]}),
        ({"dims": [0, 50]}, "dims", "dimension 0 must be 1..2^32 (got 0)", {"dims": [1, 50]}),
        ({"dims": [104, (1 << 32) + 1]}, "dims", "dimension 1", {"dims": [104, 1 << 32]}),
        ({"box": [16, 257]}, "box", "box dimension 1 must be 1..256 elements (got 257)", {"box": [16, 256]}),
        ({"box": [0, 8]}, "box", "box dimension 0", {"box": [8, 8]}),
        ({"box": [12, 8]}, "box", "multiple of 16 bytes (got 12 x 2 = 24)", {"box": [24, 8]}),
        (
            {"element_strides": [1, 9]},
            "element_strides",
            "1 must be 1..8 (got 9)",
            {"element_strides": [1, 8]},
        ),
        ({"element_strides": [1, 0]}, "element_strides", "(got 0)", {"element_strides": [1, 1]}),
        ({"dims": [], "strides": [], "box": []}, "rank", "rank must be 1..5 (got 0)", {}),
        ({"dims": [8] * 6, "strides": [16] * 5, "box": [8] * 6}, "rank", "(got 6)", {}),
        ({"strides": [208, 416]}, "rank", "rank 2 needs 1 strides (got 2)", {}),
        ({"box": [16]}, "rank", "rank 2 needs 2 box", {}),
        ({"map_address": BASE + 32}, "map_alignment", "64-byte aligned", {"map_address": BASE + 64}),
        ({"interleave": "16B"}, "rank", "need rank 3 or more (got 2)", {}),
        (
            {"data_type": "INT32", "oob_fill": 1, "box": [8, 8]},
            "fill",
            "floating-point types (got INT32)",
            {"oob_fill": 1},
        ),
        ({"swizzle": 9}, "swizzle", "unknown swizzle 9", {"swizzle": 1}),
        ({"data_type": "FLOAT8"}, "data_type", "unknown data type 'FLOAT8'", {"data_type": "BFLOAT16"}),
    ],
)
def test_a_broken_rule_is_named_with_its_value(
    change: dict[str, Any], rule: str, said: str, twin: dict[str, Any]
) -> None:
    with pytest.raises(CopyFault) as fault:
        make(**change)
    assert fault.value.rule == f"tensormap.{rule}" and said in str(fault.value)
    decode(make(**twin))


@pytest.mark.parametrize(
    ("mode", "span"),
    [("32B", 32), ("64B", 64), ("128B", 128), ("128B_ATOM_32B", 128), ("128B_ATOM_64B", 128)],
)
def test_inner_box_against_the_swizzle_span(mode: str, span: int) -> None:
    decode(make(swizzle=mode, box=[span // 2, 8]))
    with pytest.raises(
        CopyFault, match=f"inner box of {span + 16} bytes exceeds the {span}-byte span"
    ) as fault:
        make(swizzle=mode, box=[span // 2 + 8, 8])
    assert fault.value.rule == "tensormap.swizzle_span"


def test_without_swizzle_the_inner_box_takes_256_elements() -> None:
    assert decode(make(box=[256, 8])).row_bytes == 512


@pytest.mark.parametrize(
    "change",
    [
        {"interleave": "16B", "dims": [8, 8, 8], "strides": [16, 128], "box": [8, 8, 8]},
        {"interleave": 2, "swizzle": "32B", "dims": [8, 8, 8], "strides": [32, 128], "box": [8, 8, 8]},
        {"data_type": 13},
        {"swizzle": "128B_ATOM_32B_FLIP_8B"},
    ],
)
def test_what_is_not_modelled_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="not modelled"):
        make(**change)


def test_interleave_32b_has_stricter_rules() -> None:
    three = {"dims": [8, 8, 8], "strides": [32, 128], "box": [8, 8, 8], "interleave": "32B"}
    with pytest.raises(CopyFault, match="needs swizzle 32B"):
        make(**three)
    with pytest.raises(CopyFault, match="32-byte aligned"):
        make(**three, address=BASE + 16)
    with pytest.raises(CopyFault, match="multiple of 32"):
        make(**(three | {"strides": [16, 128]}))


def test_bytes_that_are_no_map_or_were_edited() -> None:
    with pytest.raises(CopyFault, match="no tensor map lies here") as fault:
        decode(bytes(128))
    assert fault.value.rule == "tensormap.invalid"
    edited = bytearray(make())
    edited[20] ^= 1
    with pytest.raises(CopyFault, match="edited by ordinary stores"):
        decode(edited)


# --- swizzles ---

# PTX ISA, "Swizzling Modes": which 16-byte chunk of a 128-byte line lands where, line after line.
TABLES = {
    Swizzle.NONE: ["01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}


@pytest.mark.parametrize("mode", list(TABLES))
def test_swizzle_follows_the_isa_tables(mode: Swizzle) -> None:
    table = TABLES[mode]
    addr = np.arange(0, 4096, 16, dtype=np.int64)
    moved = swizzle(addr, mode)
    for a, b in zip(addr.tolist(), moved.tolist(), strict=True):
        line, chunk = divmod(a // 16, 8)
        assert b // 128 == line and table[line % len(table)][b % 128 // 16] == str(chunk)
    assert (swizzle(moved, mode) == addr).all()
    assert (swizzle(addr + 5, mode) == moved + 5).all()


def test_an_unmodelled_swizzle_is_refused() -> None:
    with pytest.raises(Unsupported, match="FLIP_8B is not modelled"):
        swizzle(np.zeros(1, np.int64), Swizzle.B128_ATOM_32B_FLIP_8B)


# --- boxes ---


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorMap, list[list[int]]]:
    rank = draw(st.integers(1, 5))
    kind = draw(st.sampled_from([DataType.UINT8, DataType.FLOAT16, DataType.FLOAT32, DataType.INT64]))
    element = ELEMENT_BYTES[kind]
    box = [draw(st.integers(1, 2)) * 16 // element, *(draw(st.integers(1, 4)) for _ in range(rank - 1))]
    dims = [draw(st.integers(1, 40)), *(draw(st.integers(1, 6)) for _ in range(rank - 1))]
    steps = [draw(st.integers(1, 3)) for _ in range(rank)]
    strides, span = [], dims[0] * element
    for d in range(1, rank):
        span = -(-span // 16) * 16
        strides.append(span)
        span *= dims[d]
    coords = [[draw(st.integers(-6, 44)) for _ in range(rank)] for _ in range(draw(st.integers(1, 3)))]
    return decode(encode(kind, BASE, dims, strides, box, steps)), coords


@settings(max_examples=200)
@given(tensors())
def test_box_rows_equal_element_by_element(case: tuple[TensorMap, list[list[int]]]) -> None:
    tensor, coords = case
    rows = box_rows(tensor, np.array(coords, np.int64))
    element = tensor.element_bytes
    outer = [range(0, b, s) for b, s in zip(tensor.box[1:], tensor.element_strides[1:], strict=True)]
    assert (
        tensor.rows == int(np.prod([len(r) for r in outer]))
        and tensor.box_bytes == tensor.rows * tensor.row_bytes
    )
    for n, start in enumerate(coords):
        for r, steps in enumerate(itertools.product(*reversed(outer))):
            where = [start[0], *(c + s for c, s in zip(start[1:], reversed(steps), strict=True))]
            address = BASE + sum(c * s for c, s in zip(where, tensor.strides, strict=True))
            assert rows.addr[n, r] == address
            assert rows.inside[n, r] == all(
                0 <= c < d for c, d in zip(where[1:], tensor.dims[1:], strict=True)
            )
        inner = [x for x in range(tensor.box[0]) if 0 <= start[0] + x < tensor.dims[0]]
        assert (rows.hi[n] - rows.lo[n]) == len(inner) * element
        assert not inner or rows.lo[n] == inner[0] * element


def test_element_stride_2_takes_half_the_rows_and_bytes() -> None:
    tensor = decode(make(element_strides=[1, 2], box=[16, 7]))
    assert tensor.shared_box == (16, 4) and tensor.box_bytes == 4 * 32
    rows = box_rows(tensor, np.array([[0, 3]], np.int64))
    assert (rows.addr[0] - BASE).tolist() == [208 * y for y in (3, 5, 7, 9)]


def test_the_element_stride_of_dimension_0_is_ignored() -> None:
    assert decode(make(element_strides=[2, 1])).box_bytes == decode(make()).box_bytes


@pytest.mark.parametrize("kind", CONVERTED)
def test_types_whose_elements_the_tma_converts_are_refused(kind: DataType) -> None:
    with pytest.raises(Unsupported, match=f"{kind.name} are not modelled: the TMA rounds or flushes"):
        encode(kind, BASE, [64], [], [64])


@pytest.mark.parametrize("kind", [t for t in ELEMENT_BYTES if "FLOAT" in t.name and t not in CONVERTED])
def test_the_nan_fill_is_a_nan_of_the_type(kind: DataType) -> None:
    word = decode(encode(kind, BASE, [64], [], [64], oob_fill=1)).fill_word
    if kind is DataType.BFLOAT16:
        word = b"\0\0" + word
    assert np.isnan(np.frombuffer(word, f"f{len(word)}")).all()
    assert decode(encode(kind, BASE, [64], [], [64])).fill_word == bytes(ELEMENT_BYTES[kind])
