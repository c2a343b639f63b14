"""Tensor copies in kernels: every rank, swizzle and fill against a loop over elements."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable

import numpy as np
import pytest

from smfree.emulator.errors import CopyFault, Unsupported
from smfree.emulator.tensormap import encode
from tests.emulator.exec_kit import Machine, every_schedule, kernel, report

RANKS = [1, 2, 3, 4, 5]
#: (shift, mask) of a ^= (a >> shift) & mask on shared byte addresses; widest inner box in bytes.
SWIZZLES = {
    "NONE": (0, 0, 64), "32B": (3, 0x10, 32), "64B": (3, 0x30, 64), "128B": (3, 0x70, 128),
    "128B_ATOM_32B": (2, 0x60, 128), "128B_ATOM_64B": (1, 0x40, 128),
}  # fmt: skip
DIMS = [40, 7, 6, 5, 3]
BOX = [0, 5, 3, 2, 2]
SHARED = ".shared .align 8 .b64 full;\n.shared .align 1024 .b8 tile[16384];"
MAP = ", .param .align 64 .b8 map[128], .param .align 8 .b8 at[40]"
MAP_OFFSET, COORDS_OFFSET = 64, 192

_HEAD = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
mov.b64 %rd6, map;
cvta.param.u64 %rd6, %rd6;
ld.param.u32 %r10, [at];
ld.param.u32 %r11, [at+4];
ld.param.u32 %r12, [at+8];
ld.param.u32 %r13, [at+12];
ld.param.u32 %r14, [at+16];
"""
_LOAD = """
setp.eq.u32 %p1, %r2, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {nbytes};
.loc 1 30 0
@%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r22], [%rd6, {{{coords}}}], [%r20];
bar.sync 0;
W:
mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra W;
"""
#: shared tile -> out, or out -> shared tile, {words} words.
_LOOP = """
mov.u32 %r30, %r2;
L:
setp.ge.u32 %p2, %r30, {words};
@%p2 bra DONE;
shl.b32 %r31, %r30, 2;
add.u32 %r32, %r22, %r31;
cvt.u64.u32 %rd10, %r31;
add.s64 %rd10, %rd10, {pointer};
{body}
add.u32 %r30, %r30, 128;
bra L;
DONE:
"""
_OUT = "ld.shared.u32 %r33, [%r32];\nst.global.u32 [%rd10], %r33;"
_IN = "ld.global.u32 %r33, [%rd10];\nst.shared.u32 [%r32], %r33;"
_STORE = """
fence.proxy.async.shared::cta;
bar.sync 0;
setp.eq.u32 %p1, %r2, 0;
.loc 1 40 0
@%p1 cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%rd6, {{{coords}}}], [%r22];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""


def names(rank: int) -> str:
    return ", ".join(f"%r{10 + d}" for d in range(rank))


def run(
    body: str, packed: bytes, coords: list[int], machine: Machine, out: int, a: int, shared: str = SHARED
) -> None:
    """128 threads, of which one copies; the map and the coordinates are kernel parameters."""
    k = kernel(_HEAD + body, shared=shared, params=MAP)
    params = struct.pack("<QQQI", out, a, 0, 0).ljust(MAP_OFFSET, b"\0") + packed
    params += struct.pack("<5i", *coords, *(0,) * (5 - len(coords))).ljust(40, b"\0")
    machine.launch(k, params, block=128)


def tile(tensor: np.ndarray, box: list[int], steps: list[int], at: list[int], fill: int) -> np.ndarray:
    """The shared tile, outermost first, element by element; dimension 0 knows no element stride."""
    steps = [1, *steps[1:]]
    shape = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    want = np.full(shape[::-1], fill, tensor.dtype)
    for place in itertools.product(*(range(n) for n in shape)):
        where = [c + i * s for c, i, s in zip(at, place, steps, strict=True)]
        if all(0 <= w < n for w, n in zip(where, tensor.shape[::-1], strict=True)):
            want[place[::-1]] = tensor[tuple(where[::-1])]
    return want


def unswizzled(raw: np.ndarray, swizzle: str, base: int = 0) -> np.ndarray:
    """The bytes of a tile at shared address ``base`` in order of its elements."""
    shift, mask, _ = SWIZZLES[swizzle]
    address = np.arange(len(raw)) + base
    return raw[(address ^ (address >> shift) & mask if mask else address) - base]


Pack = Callable[..., bytes]


def make(
    rank: int, swizzle: str, *, fill: int = 0, steps: list[int] | None = None
) -> tuple[Pack, list[int], list[int], np.ndarray]:
    """(the map of a tensor at an address, box, element strides, random words of that tensor)."""
    dims, inner = DIMS[:rank], SWIZZLES[swizzle][2] // 4
    box = [inner, *BOX[1:rank]]
    steps = steps or [1] * rank
    strides = list(itertools.accumulate([4 * dims[0], *dims[1:-1]], lambda x, y: x * y))[: rank - 1]
    data = np.random.default_rng(rank).integers(0, 1 << 32, dims[::-1]).astype(np.uint32)

    def packed(address: int, kind: str = "UINT32") -> bytes:
        return encode(kind, address, dims, strides, box, steps, swizzle=swizzle, oob_fill=fill)

    return packed, box, steps, data


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("rank", RANKS)
def test_a_load_of_any_rank_and_swizzle(rank: int, swizzle: str) -> None:
    packed, box, steps, data = make(rank, swizzle)
    m = Machine()
    words = int(np.prod(box))
    a, out = m.put(data), m.empty(4 * words)
    body = _LOAD.format(rank=rank, coords=names(rank), nbytes=4 * words)
    body += _LOOP.format(pointer="%rd0", words=words, body=_OUT)
    for at in ([4, 1, 2, 1, 0][:rank], [32, 5, -1, 4, 2][:rank], [-8, -2, 5, -1, -1][:rank]):
        run(body, packed(a), at, m, out, 0)
        got = unswizzled(m.get(out, 4 * words, np.uint8), swizzle).view(np.uint32)
        assert (got == tile(data, box, steps, at, 0).ravel()).all(), at


@pytest.mark.parametrize("rank", RANKS)
def test_a_store_of_any_rank_drops_what_lies_outside(rank: int) -> None:
    for swizzle in SWIZZLES:
        packed, box, _, data = make(rank, swizzle)
        m = Machine()
        words = int(np.prod(box))
        source = np.arange(1, words + 1, dtype=np.uint32)
        a, tensor = m.put(unswizzled(source.view(np.uint8), swizzle)), m.put(data)
        body = _LOOP.format(pointer="%rd1", words=words, body=_IN)
        body += _STORE.format(rank=rank, coords=names(rank))
        at = [32, 4, 4, 4, 2][:rank]
        run(body, packed(tensor), at, m, 0, a)
        want = data.copy()
        for place, value in zip(np.ndindex(*box[::-1]), source, strict=True):
            where = tuple(c + i for c, i in zip(at[::-1], place, strict=True))
            if all(w < n for w, n in zip(where, data.shape, strict=True)):
                want[where] = value
        assert (m.get(tensor, data.size) == want.ravel()).all(), swizzle


@every_schedule
def test_nan_fill_outside_a_float_tensor(schedule: str) -> None:
    packed, box, steps, data = make(3, "64B", fill=1)
    data = (data % 1000).astype(np.float32)
    m = Machine(schedule)
    words = int(np.prod(box))
    a, out = m.put(data), m.empty(4 * words)
    body = _LOAD.format(rank=3, coords=names(3), nbytes=4 * words)
    body += _LOOP.format(pointer="%rd0", words=words, body=_OUT)
    at = [32, -2, 5]
    run(body, packed(a, "FLOAT32"), at, m, out, 0)
    got = unswizzled(m.get(out, 4 * words, np.uint8), "64B").view(np.float32)
    want = tile(data, box, steps, at, np.nan).ravel()
    assert np.array_equal(got, want, equal_nan=True) and np.isnan(want).sum() not in (0, words)


def test_b20_element_strides_load_every_second_and_third_row() -> None:
    """The box in shared memory is smaller, and so is the byte count; stride 1 is the twin."""
    for steps in ([1, 2, 3], [1, 1, 1], [4, 2, 1]):
        packed, box, _, data = make(3, "64B", steps=steps)
        m = Machine()
        want = tile(data, box, steps, [4, 1, 1], 0)
        a, out = m.put(data), m.empty(want.nbytes)
        body = _LOAD.format(rank=3, coords=names(3), nbytes=want.nbytes)
        body += _LOOP.format(pointer="%rd0", words=want.size, body=_OUT)
        run(body, packed(a), [4, 1, 1], m, out, 0)
        got = unswizzled(m.get(out, want.nbytes, np.uint8), "64B").view(np.uint32)
        assert (got == want.ravel()).all()


def test_coordinates_must_match_the_rank_of_the_map() -> None:
    packed, _, _, data = make(3, "NONE")
    m = Machine()
    body = _LOAD.format(rank=2, coords=names(2), nbytes=64)
    with report(
        "a 3-D tensor map needs 3 coordinates (got 2)", "tensor.3d", "case.cu:30",
        rule="tensor.rank", kind=CopyFault,
    ):  # fmt: skip
        run(body, packed(m.put(data)), [0, 0], m, 0, 0)


def test_a_parameter_off_a_multiple_of_64_is_no_place_for_a_map() -> None:
    """As in a struct that is not declared alignas(64); in all other tests it is 64-byte aligned."""
    packed, _, _, data = make(1, "NONE")
    m = Machine()
    body = _HEAD + "mov.u32 %r10, 0;\n" + _LOAD.format(rank=1, coords="%r10", nbytes=64)
    k = kernel(body, shared=SHARED, params=MAP.replace(".align 64", ".align 8"))
    params = struct.pack("<QQQI4x", 0, 0, 0, 0) + packed(m.put(data)) + bytes(40)
    with report("64-byte aligned (got 0x20)", "case.cu:30", rule="tensormap.map_alignment", kind=CopyFault):
        m.launch(k, params, block=128)


def test_a_parameter_s_address_converted_twice() -> None:
    """Seen from NVRTC 13.5 for sm_100a, where ptxas adds the base of the window twice, too."""
    packed, _, _, data = make(1, "NONE")
    m = Machine()
    body = "cvta.param.u64 %rd6, %rd6;\n" + _LOAD.format(rank=1, coords=names(1), nbytes=64)
    with report("has been through cvta.param twice", "case.cu:30", kind=CopyFault):
        run(body, packed(m.put(data)), [0], m, 0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%r22], [%rd6, {%r10, %r11, %r12}], [%r20], {%h1};",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
        " [%r22], [%rd6, {%r10, %r11, %r12, %r13, %r14}], [%r20];",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
        " [%rd6, {%r10, %r11, %r12, %r13, %r14}], [%r22];",
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
        " [%r22], [%rd6, {%r10}], [%r20];",
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group"
        " [%rd6, {%r10, %r11, %r12}], [%r22];",
    ],
)
def test_other_modes_are_refused_by_name(text: str) -> None:
    mode = next(m for m in ("im2col_no_offs", "im2col", "tile::gather4", "tile::scatter4", "cta_group::2")
                if f".{m}" in text)  # fmt: skip
    body = _HEAD + f"mov.b16 %h1, 1;\n.loc 1 21 0\n{text}"
    with report(f".{mode}", "is not modelled", "case.cu:21", kind=Unsupported):
        k = kernel(body, shared=SHARED, params=MAP, target="sm_100a")
        Machine().launch(k, bytes(COORDS_OFFSET + 40), block=1)
