"""Tensor maps in device memory: edited by kernels, released, acquired, and what a missing fence is told."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import CopyFault, MemoryFault, Unsupported
from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.tensormap import DataType, Swizzle, decode, encode, replace
from tests.emulator.exec_kit import Machine, every_schedule, kernel, report

DATA = np.arange(64 * 32, dtype=np.uint32).reshape(64, 32)
SHARED = ".shared .align 8 .b64 full;\n.shared .align 128 .b8 tile[1024];\n.shared .align 128 .b8 smap[128];"

# ------------------------------------------------------------------------------------------------- the fields

BASE = 1 << 40


def made(changes: list[tuple[str, int, int]], start: bytes = bytes(128)) -> bytes:
    for field, ordinal, value in changes:
        start = replace(start, field, ordinal, value)
    return start


#: What Triton sets for a 2-D float32 descriptor, in its order; the rest stays zero.
FROM_ZERO = [
    ("global_address", 0, BASE), ("rank", 0, 1), ("box_dim", 0, 32), ("box_dim", 1, 64),
    ("global_dim", 0, 100), ("global_dim", 1, 50), ("global_stride", 0, 400), ("element_stride", 0, 1),
    ("element_stride", 1, 1), ("elemtype", 0, 7), ("swizzle_mode", 0, 3),
]  # fmt: skip


def test_a_map_from_128_zero_bytes() -> None:
    assert made(FROM_ZERO) == encode("FLOAT32", BASE, [100, 50], [400], [32, 64], swizzle="128B")
    assert made(FROM_ZERO[::-1]) == made(FROM_ZERO)


PTX_TYPES = [
    "UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT16", "FLOAT32", "FLOAT32_FTZ", "FLOAT64",
    "BFLOAT16", "TFLOAT32", "TFLOAT32_FTZ",
]  # fmt: skip


@pytest.mark.parametrize(("number", "name"), list(enumerate(PTX_TYPES)))
def test_element_types_have_a_numbering_of_their_own(number: int, name: str) -> None:
    raw = replace(encode("UINT64", BASE, [64, 50], [512], [16, 8]), "elemtype", 0, number)
    if name in ("FLOAT32_FTZ", "TFLOAT32", "TFLOAT32_FTZ"):
        with pytest.raises(Unsupported, match=f"{name} are not modelled: the TMA rounds or flushes"):
            decode(raw)
    else:
        assert decode(raw).data_type is DataType[name]


@pytest.mark.parametrize(
    ("mode", "atomicity", "swizzle"),
    [(0, 0, "NONE"), (1, 0, "B32"), (2, 0, "B64"), (3, 0, "B128"), (3, 1, "B128_ATOM_32B"),
     (3, 3, "B128_ATOM_64B")],
)  # fmt: skip
def test_a_swizzle_is_a_mode_and_an_atomicity(mode: int, atomicity: int, swizzle: str) -> None:
    start = encode("UINT32", BASE, [64, 50], [256], [8, 8], swizzle="128B_ATOM_64B")
    both = made([("swizzle_atomicity", 0, atomicity), ("swizzle_mode", 0, mode)], start)
    assert decode(both).swizzle is Swizzle[swizzle]
    assert both == encode("UINT32", BASE, [64, 50], [256], [8, 8], swizzle=swizzle)


def test_the_other_fields() -> None:
    start = encode("FLOAT32", BASE, [8, 8, 8], [32, 256], [4, 4, 4])
    changes = [
        ("global_address", 0, BASE + 4096), ("rank", 0, 3), ("global_dim", 2, 9), ("global_dim", 3, 7),
        ("global_stride", 1, 512), ("global_stride", 2, 8192), ("box_dim", 1, 6), ("box_dim", 3, 2),
        ("element_stride", 1, 2), ("element_stride", 3, 1), ("fill_mode", 0, 1),
    ]  # fmt: skip
    want = encode(
        "FLOAT32", BASE + 4096, [8, 8, 9, 7], [32, 512, 8192], [4, 6, 4, 2], [1, 2, 1, 1],
        oob_fill="NAN_REQUEST_ZERO_FMA",
    )  # fmt: skip
    assert made(changes, start) == want


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("box_dim", 0, 300), "the tensor map in use: box dimension 0 must be 1..256 elements (got 300)"),
        (("box_dim", 1, 0), "box dimension 1 must be 1..256"),
        (("global_stride", 0, 404), "multiple of 16 and below 2^40 bytes (got 404)"),
        (("global_address", 0, BASE + 8), "16-byte aligned"),
        (("element_stride", 1, 9), "element stride 1 must be 1..8 (got 9)"),
        (("elemtype", 0, 9), "exceeds the 128-byte span"),
        (("fill_mode", 0, 1), None),
    ],
)
def test_what_does_not_fit_is_told_when_the_map_is_used(
    change: tuple[str, int, int], said: str | None
) -> None:
    raw = made([*FROM_ZERO, change])
    if said is None:
        decode(raw)
        return
    with pytest.raises(CopyFault) as caught:
        decode(raw)
    assert said in str(caught.value)


def test_what_is_refused() -> None:
    with pytest.raises(CopyFault, match=r"rank minus one, 0..4 .got 5"):
        replace(bytes(128), "rank", 0, 5)
    with pytest.raises(CopyFault, match="stride 4 belongs to no dimension"):
        replace(bytes(128), "global_stride", 4, 64)
    with pytest.raises(CopyFault, match="no tensor map lies here"):
        replace(b"\1" * 128, "rank", 0, 1)
    start = encode("UINT32", BASE, [64, 50], [256], [8, 8], swizzle="32B")
    with pytest.raises(Unsupported, match="swizzle mode 1 with atomicity 1"):
        decode(replace(start, "swizzle_atomicity", 0, 1))
    three = encode("UINT32", BASE, [64, 50, 4], [256, 12800], [8, 8, 1])
    with pytest.raises(Unsupported, match="interleave B16"):
        decode(replace(three, "interleave_layout", 0, 1))


# ------------------------------------------------------------------------------------------------- in kernels

#: %rd1 = a tensor map in global memory, %rd2 = another place for one, %r0 = the column to load from.
HEAD = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
mov.u32 %r24, smap;
setp.eq.u32 %p1, %r2, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
bar.sync 0;
"""
LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
mov.u32 %r10, 4;
mov.u32 %r11, 8;
.loc 1 40 0
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r22], [{map}, {{%r10, %r11}}], [%r20];
"""
WAIT = """
W:
mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra W;
"""
OUT = """
shl.b32 %r23, %r2, 3;
add.u32 %r12, %r22, %r23;
ld.shared.v2.u32 {%r13, %r14}, [%r12];
mul.wide.u32 %rd10, %r1, 8;
add.s64 %rd10, %rd10, %rd0;
st.global.v2.u32 [%rd10], {%r13, %r14};
"""
ACQUIRE = ".loc 1 39 0\n@%p1 fence.proxy.tensormap::generic.acquire.gpu [{map}], 128;\n"
RELEASE = ".loc 1 38 0\n@%p1 fence.proxy.tensormap::generic.release.gpu;\n"
#: %rd20 = the address of the other half of the tensor
MOVE = "ld.global.u64 %rd20, [%rd2];\n"
EDIT = MOVE + ".loc 1 37 0\n@%p1 tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd20;\n"
WANT = DATA[8:16, 4:12]


def go(
    body: str, schedule: str = "min-pc", *, grid: int = 1, strict: str = "error", maps: int = 1, **more: Any
) -> np.ndarray:
    """8 x 8 words per CTA. ``a`` holds the map of DATA's first half, ``b`` the second half's address."""
    m = Machine(schedule, strict=strict)
    tensor = m.put(DATA)
    a = m.put(np.frombuffer(encode("UINT32", tensor, [32, 32], [128], [8, 8]) * maps, np.uint8))
    b = m.put(np.array([tensor + 32 * 128], np.uint64))
    out = m.put(np.zeros(64 * grid, np.uint32))
    params = struct.pack("<QQQI", out, a, b, 0)
    m.launch(kernel(HEAD + body, shared=SHARED), params, grid=grid, block=32, **more)
    assert not m.node.findings or strict != "error"
    return m.get(out, 64 * grid).reshape(grid, 8, 8)


def use(map_register: str = "%rd1") -> str:
    return LOAD.format(map=map_register) + WAIT + OUT


def acquire(map_register: str = "%rd1") -> str:
    return ACQUIRE.format(map=map_register)


@every_schedule
def test_a_map_that_the_host_put_into_global_memory(schedule: str) -> None:
    """Each CTA acquires it once; a second use needs no second fence."""
    got = go(acquire() + use(), schedule, grid=3)
    assert (got == WANT).all()
    with report("no thread of CTA 0 has acquired it yet", "acquire.gpu [map], 128", "case.cu:40",
                rule="tensormap.acquire", kind=CopyFault) as caught:  # fmt: skip
        go(use(), schedule)
    assert caught.value.severity == "strict"
    go(use(), schedule, strict="off")


@every_schedule
def test_each_cta_acquires_for_itself(schedule: str) -> None:
    body = "setp.eq.u32 %p5, %r3, 0;\nand.pred %p5, %p5, %p1;\n" + acquire().replace("%p1", "%p5") + use()
    with report("no thread of CTA 1 has acquired it yet", "case.cu:40", rule="tensormap.acquire"):
        go(body, schedule, grid=2)


@every_schedule
def test_an_edit_in_global_memory(schedule: str) -> None:
    """tensormap.replace.global, release, acquire, use; each fence left out, and both in the wrong order."""
    moved = DATA[40:48, 4:12]
    assert (go(EDIT + RELEASE + acquire() + use(), schedule) == moved).all()
    with report("tensormap.replace by CTA 0 thread 0 at case.cu:37", "was not released to the tensormap",
                "case.cu:40", rule="tensormap.release", kind=CopyFault):  # fmt: skip
        go(EDIT + acquire() + use(), schedule)
    with report("no thread of CTA 0 has acquired it yet", rule="tensormap.acquire", kind=CopyFault):
        go(EDIT + RELEASE + use(), schedule)
    with report("no thread of CTA 0 has acquired it yet", rule="tensormap.acquire", kind=CopyFault):
        go(EDIT + acquire() + RELEASE + use(), schedule)
    with report("no thread of CTA 0 has acquired it since it changed", rule="tensormap.acquire"):
        go(acquire() + EDIT + RELEASE + use(), schedule)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_b17_an_edit_while_a_copy_uses_the_map(schedule: str) -> None:
    """The twin waits for the copy first."""
    load, rest = LOAD.format(map="%rd1"), WAIT + OUT
    with report("descriptor modified while 1 copies in flight still use it", "bulk.tensor load of 256",
                "case.cu:37", "case.cu:40", rule="copy.descriptor", kind=CopyFault):  # fmt: skip
        go(acquire() + load + EDIT + rest, schedule)
    assert (go(acquire() + load + WAIT + EDIT + OUT, schedule) == WANT).all()
    with report("store writes 4 bytes", "descriptor modified while 1 copies", rule="copy.descriptor"):
        go(acquire() + load + "st.global.u32 [%rd1+16], 1;\n" + rest, schedule)


COPY_IN = """
shl.b32 %r12, %r2, 2;
add.u32 %r13, %r24, %r12;
cvt.u64.u32 %rd11, %r12;
add.s64 %rd11, %rd11, %rd1;
ld.global.u32 %r14, [%rd11];
st.shared.u32 [%r13], %r14;
bar.sync 0;
"""
EDIT_SHARED = (
    MOVE + "@%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r24], %rd20;\nbar.sync 0;\n"
)
PUBLISH = (
    ".loc 1 38 0\ntensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    " [{dst}], [%r24], 128;\n"
)
#: %rd12 = a map slot of this CTA
SLOT = "mul.wide.u32 %rd12, %r3, 128;\nadd.s64 %rd12, %rd12, %rd1;\nadd.s64 %rd12, %rd12, 128;\n"


@every_schedule
def test_an_edit_in_shared_memory_published_by_the_warp(schedule: str) -> None:
    """Every CTA makes a map of its own; copies through several maps run together."""
    moved = DATA[40:48, 4:12]
    body = SLOT + COPY_IN + EDIT_SHARED + PUBLISH.format(dst="%rd12")
    got = go(body + acquire("%rd12") + use("%rd12"), schedule, grid=4, maps=5)
    assert (got == moved).all()
    with report("no thread of CTA", "has acquired it yet", "case.cu:40", rule="tensormap.acquire"):
        go(body + use("%rd12"), schedule, grid=4, maps=5)
    body = SLOT + COPY_IN + "setp.eq.u32 %p4, %r3, 1;\n@!%p4 bra OLD;\n" + EDIT_SHARED + "OLD:\n"
    got = go(body + PUBLISH.format(dst="%rd12") + acquire("%rd12") + use("%rd12"), schedule, grid=3, maps=4)
    assert (got[0] == WANT).all() and (got[1] == moved).all() and (got[2] == WANT).all()


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_b18_the_next_map_in_the_slot_of_one_in_use(schedule: str) -> None:
    prepare = SLOT + COPY_IN + PUBLISH.format(dst="%rd12") + acquire("%rd12")
    again = EDIT_SHARED + PUBLISH.format(dst="%rd12").replace("1 38", "1 50")
    load = LOAD.format(map="%rd12")
    with report("descriptor modified while 1 copies in flight still use it", "case.cu:50", "case.cu:40",
                rule="copy.descriptor", kind=CopyFault):  # fmt: skip
        go(prepare + load + again + WAIT + OUT, schedule, maps=2)
    assert (go(prepare + load + WAIT + again + OUT, schedule, maps=2) == WANT).all()


def test_an_edit_by_ordinary_stores_is_found() -> None:
    with report("the tensor map was edited by ordinary stores", "case.cu:40", rule="tensormap.damaged"):
        go("@%p1 st.global.u32 [%rd1+16], 5;\n" + RELEASE + acquire() + use())
    with report("no tensor map lies here", "case.cu:40", rule="tensormap.invalid"):
        go(acquire("%rd0") + use("%rd0"))


def test_generic_addresses_of_both_kinds() -> None:
    """Without a state space, tensormap.replace takes generic addresses."""
    moved = DATA[40:48, 4:12]
    generic = EDIT.replace(".global.b1024", ".b1024")
    assert (go(generic + RELEASE + acquire() + use()) == moved).all()
    shared = "cvta.shared.u64 %rd13, %rd14;\n"
    body = SLOT + COPY_IN + "cvt.u64.u32 %rd14, %r24;\n" + shared
    body += EDIT_SHARED.replace(".shared::cta.b1024", ".b1024").replace("[%r24]", "[%rd13]")
    assert (go(body + PUBLISH.format(dst="%rd12") + acquire("%rd12") + use("%rd12"), maps=2) == moved).all()


@pytest.mark.parametrize(
    ("body", "texts", "rule"),
    [
        ("add.s64 %rd1, %rd1, 32;\n" + acquire(), ("64-byte aligned", "case.cu:39"),
         "tensormap.map_alignment"),
        ("mov.b64 %rd1, 4096;\n" + acquire(), ("tensor map of 128 bytes at 0x1000",), "memory.bounds"),
        ("cvt.u64.u32 %rd14, %r24;\ncvta.shared.u64 %rd1, %rd14;\n" + acquire(),
         ("takes an address in global memory",), "tensormap.space"),
        ("cvt.u64.u32 %rd14, %r24;\ncvta.shared.u64 %rd1, %rd14;\n" + use(),
         ("lies in shared memory", "tensormap.cp_fenceproxy", "case.cu:40"), "tensormap.shared"),
        (EDIT_SHARED, ("nobody has written",), "memory.uninitialized"),
        (SLOT + PUBLISH.format(dst="%rd12"), ("nobody has written", "case.cu:38"), "memory.uninitialized"),
        (COPY_IN + EDIT_SHARED.replace("[%r24]", "[%r24+64]"), ("leaves the",), "shared.bounds"),
    ],
)  # fmt: skip
def test_where_a_map_may_lie(body: str, texts: tuple[str, ...], rule: str) -> None:
    with report(*texts, rule=rule):
        go(body, maps=2)


def test_a_map_in_constant_memory_needs_no_fence() -> None:
    m = Machine()
    tensor, out = m.put(DATA), m.put(np.zeros(64, np.uint32))
    cmap = m.memory.alloc(128, 128, ".const cmap")
    m.memory.write(cmap, encode("UINT32", tensor, [32, 32], [128], [8, 8]))
    body = HEAD + "mov.b64 %rd15, cmap;\ncvta.const.u64 %rd1, %rd15;\n" + use()
    k = kernel(body, shared=SHARED, globals=".const .align 64 .b8 cmap[128];")
    m.launch(k, struct.pack("<QQQI", out, 0, 0, 0), block=32, symbols={"cmap": cmap})
    assert (m.get(out, 64).reshape(8, 8) == WANT).all()


def test_copies_and_fences_count() -> None:
    m = Machine()
    tensor = m.put(DATA)
    a = m.put(np.frombuffer(encode("UINT32", tensor, [32, 32], [128], [8, 8]) * 2, np.uint8))
    b, out = m.put(np.array([tensor], np.uint64)), m.put(np.zeros(64, np.uint32))
    body = HEAD + SLOT + COPY_IN + EDIT_SHARED + PUBLISH.format(dst="%rd12") + acquire("%rd12") + use("%rd12")
    counters = m.launch(kernel(body, shared=SHARED), struct.pack("<QQQI", out, a, b, 0), block=32).counters
    assert counters.fences == 2 and counters.tma_requests == 1 and counters.bytes_async == 256
    assert (
        counters.shared_store_bytes == 128 and counters.global_store_bytes == 256
    )  # the map itself is in neither


def test_memory_faults_of_a_map_s_tensor_name_the_lane() -> None:
    with report("CTA 0 thread 0", "case.cu:40", rule="memory.bounds", kind=MemoryFault):
        grown = "@%p1 tensormap.replace.tile.global_dim.global.b1024.b32 [%rd1], 1, 100000;\n"
        go(grown + RELEASE + acquire() + use().replace("mov.u32 %r11, 8;", "mov.u32 %r11, 9000;"))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_finding_among_several_maps_names_its_cta(wrong: int) -> None:
    """Two different maps in three CTAs; one of them starts its box off a 16-byte boundary."""
    body = SLOT + COPY_IN + "setp.eq.u32 %p4, %r3, 1;\n@!%p4 bra OLD;\n" + EDIT_SHARED + "OLD:\n"
    body += PUBLISH.format(dst="%rd12") + acquire("%rd12")
    crooked = f"mov.u32 %r10, 4;\nsetp.eq.u32 %p6, %r3, {wrong};\n@%p6 mov.u32 %r10, 5;\n"
    load = use("%rd12").replace("mov.u32 %r10, 4;\n", crooked)
    with report(
        "must start at a multiple of 16 bytes", f"at CTA {wrong} thread 0", rule="tensor.inner_start"
    ):
        go(body + load, grid=3, maps=4)
