"""ldmatrix, stmatrix, movmatrix and mma.sync against layouts and sums written down here a second time."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import BarrierFault, Deadlock, MemoryFault
from tests.emulator.exec_kit import Machine, Outcome, every_schedule, execute, kernel, report
from tests.emulator.test_exec_arith import nearest, read

RNG = np.random.default_rng(11)
_TILE = ".shared .align 128 .b8 tile[8192];"

# Every thread copies 16 bytes of a to the tile; then lane l's row address is tile + pitch * l, in %r20.
# %r21 = the tile, %rd20 = out + 16 x thread.
_FILL = """
mov.u32 %r21, tile;
shl.b32 %r22, %r2, 4;
cvt.u64.u32 %rd20, %r22;
add.s64 %rd21, %rd1, %rd20;
add.u32 %r23, %r21, %r22;
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd21];
st.shared.v4.b32 [%r23], {%r4, %r5, %r6, %r7};
bar.sync 0;
and.b32 %r20, %r2, 31;
mad.lo.u32 %r20, %r20, PITCH, %r21;
add.s64 %rd20, %rd20, %rd0;
mov.u32 %r10, 0;
mov.u32 %r11, 0;
mov.u32 %r12, 0;
mov.u32 %r13, 0;
"""
_OUT = "st.global.v4.b32 [%rd20], {%r10, %r11, %r12, %r13};"
_VECTOR = {1: "{%r10}", 2: "{%r10, %r11}", 4: "{%r10, %r11, %r12, %r13}"}


def rows(count: int = 32) -> np.ndarray:
    """``count`` rows of eight 16-bit elements."""
    return RNG.integers(0, 1 << 16, (count, 8), dtype=np.uint16)


def run(body: str, a: np.ndarray, *, pitch: int = 16, **options: Any) -> Outcome:
    text = _FILL.replace("PITCH", str(pitch)) + body
    return execute(text, shared=_TILE, a=a, words=4 * options.get("block", 32), **options)


def expected_load(data: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """uint32[32, 4] by the ISA's figure: lane 4 r + c has elements 2 c and 2 c + 1 of row r."""
    out = np.zeros((32, 4), np.uint32)
    for lane in range(32):
        for i in range(count):
            matrix = data[8 * i : 8 * i + 8].T if transposed else data[8 * i : 8 * i + 8]
            low, high = (int(matrix[lane // 4, lane % 4 * 2 + j]) for j in (0, 1))
            out[lane, i] = low | high << 16
    return out


# ----------------------------------------------------------------------------- to and from shared memory


@every_schedule
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(schedule: str, count: int, trans: str) -> None:
    data = rows()
    body = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {_VECTOR[count]}, [%r20];\n{_OUT}"
    got = run(body, data, schedule=schedule).out.reshape(32, 4)
    assert np.array_equal(got, expected_load(data, count, bool(trans)))


def test_ldmatrix_by_generic_address_with_an_offset() -> None:
    data = rows(64)
    body = (
        "cvt.u64.u32 %rd22, %r20;\ncvta.shared.u64 %rd22, %rd22;\n"
        f"ldmatrix.sync.aligned.m8n8.x4.b16 {_VECTOR[4]}, [%rd22+512];\n{_OUT}"
    )
    got = run(body, data, block=64).out.reshape(64, 4)
    assert np.array_equal(got[:32], expected_load(data[32:], 4, False))
    assert np.array_equal(got[32:], got[:32])


@pytest.mark.parametrize("count", [1, 2])
def test_addresses_of_lanes_that_name_no_row_do_not_matter(count: int) -> None:
    data = rows()
    body = (
        f"cvt.u64.u32 %rd22, %r20;\ncvta.shared.u64 %rd22, %rd22;\nsetp.ge.u32 %p1, %r2, {8 * count};\n"
        f"@%p1 mov.u64 %rd22, 3;\nldmatrix.sync.aligned.m8n8.x{count}.b16 {_VECTOR[count]}, [%rd22];\n{_OUT}"
    )
    got = run(body, data).out.reshape(32, 4)
    assert np.array_equal(got, expected_load(data, count, False))


@every_schedule
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_is_the_inverse_of_ldmatrix(schedule: str, count: int, trans: str) -> None:
    data = rows()
    body = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {_VECTOR[count]}, [%r20];\n"
        f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r20+4096], {_VECTOR[count]};\n"
        "bar.warp.sync 0xffffffff;\n"
        f"setp.ge.u32 %p2, %r2, {8 * count};\n@%p2 bra DONE;\n"
        "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r20+4096];\n"
        f"{_OUT}\nDONE:\n"
    )
    out = run(body, data, schedule=schedule, zero_out=True).out.view(np.uint16).reshape(32, 8)
    assert np.array_equal(out[: 8 * count], data[: 8 * count])
    assert not out[8 * count :].any()


def test_movmatrix_transposes() -> None:
    data = rows()
    body = (
        f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {_VECTOR[1]}, [%r20];\n"
        f"movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r10;\n{_OUT}"
    )
    assert np.array_equal(run(body, data).out.reshape(32, 4), expected_load(data, 1, True))


@pytest.mark.parametrize(("pitch", "waves"), [(16, 4), (128, 32), (144, 4), (32, 8)])
def test_bank_conflicts_of_rows_are_counted_as_wavefronts(pitch: int, waves: int) -> None:
    data = rows(512)
    body = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_VECTOR[4]}, [%r20];\n{_OUT}"
    counters = run(body, data, pitch=pitch, block=512, schedule="timed").counters
    assert counters.shared_load_wavefronts == 16 * waves
    assert counters.shared_load_bytes == 16 * 512
    assert counters.instructions_by_class["shared load"] == 16


@pytest.mark.parametrize("instruction", ["ldmatrix", "stmatrix"])
def test_a_row_address_off_a_multiple_of_16_is_an_error(instruction: str) -> None:
    load = f"ldmatrix.sync.aligned.m8n8.x2.shared.b16 {_VECTOR[2]}, [%r20];\n"
    store = f"stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r20], {_VECTOR[2]};\n"
    access = load if instruction == "ldmatrix" else store
    shifted = "setp.eq.u32 %p2, %r2, 9;\n@%p2 add.u32 %r20, %r20, 8;\n"
    with report("16", "thread 9", instruction, rule="memory.misaligned", kind=MemoryFault):
        run(shifted + access + _OUT, rows())
    elsewhere = "setp.eq.u32 %p2, %r2, 16;\n@%p2 add.u32 %r20, %r20, 8;\n"  # lane 16 gives no address of .x2
    run(elsewhere + access + _OUT, rows())


def test_rows_outside_the_ctas_shared_memory_name_the_thread() -> None:
    body = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_VECTOR[4]}, [%r20+7952];\n{_OUT}"
    with report("shared access of 16 bytes", "thread 15", rule="shared.bounds"):
        run(body, rows())


def test_rows_nobody_wrote_are_reported() -> None:
    body = f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {_VECTOR[1]}, [%r20+2048];\n{_OUT}"
    with report("thread 0", "ldmatrix", rule="memory.uninitialized"):
        run(body, rows())


def test_an_address_in_global_memory_is_refused() -> None:
    body = f"ldmatrix.sync.aligned.m8n8.x1.b16 {_VECTOR[1]}, [%rd1];\n{_OUT}"
    with report("ldmatrix takes addresses in shared memory", "global", rule="matrix.space"):
        run(body, rows())


_LOAD = f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {_VECTOR[1]}, [%r20];\n"


def test_lanes_that_wait_elsewhere_are_named() -> None:
    half = "setp.ge.u32 %p2, %r2, 16;\n@%p2 bra WAIT;\n"
    with report("waits for lanes 16-31 of warp 0", kind=Deadlock):
        run(half + _LOAD + "bra DONE;\nWAIT:\nbar.warp.sync 0xffffffff;\nDONE:\n" + _OUT, rows())
    run(half + "WAIT:\n" + _LOAD + _OUT, rows())


def test_a_warp_with_exited_lanes_is_undefined() -> None:
    with report("only 16 threads are left", "ldmatrix", rule="warp.not_whole", kind=BarrierFault):
        run("setp.ge.u32 %p2, %r2, 16;\n@%p2 exit;\n" + _LOAD + _OUT, rows())
    with report("only 16 threads are left", rule="warp.not_whole"):
        run(_LOAD + _OUT, rows(48), block=48)


# ------------------------------------------------------------------------------------------------------- mma

# (modifiers of the shape and types, k, elements of A, B and C per lane)
SHAPES = {
    "m16n8k8.row.col.f32.f16.f16.f32": (8, 4, 2),
    "m16n8k16.row.col.f32.f16.f16.f32": (16, 8, 4),
    "m16n8k8.row.col.f16.f16.f16.f16": (8, 4, 2),
    "m16n8k16.row.col.f16.f16.f16.f16": (16, 8, 4),
    "m16n8k8.row.col.f32.bf16.bf16.f32": (8, 4, 2),
    "m16n8k16.row.col.f32.bf16.bf16.f32": (16, 8, 4),
    "m16n8k4.row.col.f32.tf32.tf32.f32": (4, 2, 1),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (8, 4, 2),
}


def place_a(kind: str, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i of a lane's fragment of A, as the ISA's figures say."""
    group, inside = lane >> 2, lane % 4
    if kind == "tf32":
        return group + (8 if i in (1, 3) else 0), inside + (4 if i in (2, 3) else 0)
    return group + (8 if i in (2, 3, 6, 7) else 0), inside * 2 + (i & 1) + (8 if i >= 4 else 0)


def place_b(kind: str, lane: int, i: int) -> tuple[int, int]:
    group, inside = lane >> 2, lane % 4
    if kind == "tf32":
        return inside + (4 if i == 1 else 0), group
    return inside * 2 + (i & 1) + (8 if i >= 2 else 0), group


def place_c(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """float32[32, n] -> uint32[32, registers]; the values must be exact in ``kind``."""
    if kind == "f16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)
    bits = values.astype(np.float32).view(np.uint32)
    if kind == "bf16":
        return np.ascontiguousarray((bits >> 16).astype(np.uint16)).view(np.uint32)
    return bits


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """uint32[32, registers] -> float64[32, n]."""
    if kind == "f16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float64)
    return bits.view(np.float32).astype(np.float64)


def multiply(form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **options: Any) -> np.ndarray:
    """D of A (16 x k), B (k x 8) and C (16 x 8), through the lanes' fragments."""
    _, _, _, kind_d, kind, _, _ = form.split(".")
    _, count_a, count_b = SHAPES[form]
    at_a = np.array([[a[place_a(kind, lane, i)] for i in range(count_a)] for lane in range(32)])
    at_b = np.array([[b[place_b(kind, lane, i)] for i in range(count_b)] for lane in range(32)])
    at_c = np.array([[c[place_c(lane, i)] for i in range(4)] for lane in range(32)])
    words = [encode(at_a, kind), encode(at_b, kind), encode(at_c, kind_d)]
    widths = [w.shape[1] for w in words]
    packed = np.zeros((32, 12), np.uint32)
    starts = (0, 4, 8)
    for start, w in zip(starts, words, strict=True):
        packed[:, start : start + w.shape[1]] = w
    names = [
        ", ".join(f"%r{10 + start + i}" for i in range(n)) for start, n in zip(starts, widths, strict=True)
    ]
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd21+{4 * i}];\n" for i in range(12))
    results = ", ".join(f"%r{30 + i}" for i in range(widths[2]))
    stores = "".join(f"st.global.b32 [%rd22+{4 * i}], %r{30 + i};\n" for i in range(widths[2]))
    body = (
        "mul.wide.u32 %rd20, %r2, 48;\nadd.s64 %rd21, %rd1, %rd20;\n"
        "mul.wide.u32 %rd20, %r2, 16;\nadd.s64 %rd22, %rd0, %rd20;\n"
        f"{loads}mma.sync.aligned.{form} {{{results}}}, {{{names[0]}}}, {{{names[1]}}}, {{{names[2]}}};\n"
        f"{stores}"
    )
    out = execute(body, a=packed.ravel(), words=128, **options).out.reshape(32, 4)[:, : widths[2]]
    values = decode(out, kind_d)
    d = np.empty((16, 8))
    for lane in range(32):
        for i in range(4):
            d[place_c(lane, i)] = values[lane, i]
    return d


@pytest.mark.parametrize("schedule", ["timed", "random"])
@pytest.mark.parametrize("form", SHAPES)
def test_mma_of_whole_numbers_is_exact(form: str, schedule: str) -> None:
    k = SHAPES[form][0]
    a, b = RNG.integers(-8, 9, (16, k)), RNG.integers(-8, 9, (k, 8))
    c = RNG.integers(-100, 101, (16, 8))
    assert np.array_equal(multiply(form, a, b, c, schedule=schedule), a @ b + c)


@pytest.mark.parametrize("form", SHAPES)
def test_mma_picks_the_rows_and_columns_of_the_isa(form: str) -> None:
    """One element of A and one of B: only their product's place in D changes."""
    k = SHAPES[form][0]
    for row, col, depth in [(0, 0, 0), (9, 3, 1), (15, 7, k - 1), (7, 4, k // 2)]:
        a, b, c = np.zeros((16, k)), np.zeros((k, 8)), np.zeros((16, 8))
        a[row, depth], b[depth, col] = 3, 5
        expected = c.copy()
        expected[row, col] = 15
        assert np.array_equal(multiply(form, a, b, c), expected)


def _rounded(x: Fraction) -> Fraction:
    """The nearest float32, ties to even."""
    return Fraction(read(nearest(x, 32), "f32"))


def _numbers(shape: tuple[int, int], kind: str, scale: float) -> np.ndarray:
    """Normally distributed numbers that are exact in a format."""
    x = RNG.standard_normal(shape) * scale
    if kind == "f16":
        return x.astype(np.float16).astype(np.float64)
    keep = np.uint32({"bf16": 0xFFFF0000, "tf32": 0xFFFFE000, "f32": 0xFFFFFFFF}[kind])
    return (x.astype(np.float32).view(np.uint32) & keep).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("form", "scale"),
    [(f, 1.0) for f in SHAPES if ".f32." in f]
    + [(f, 2.0**-70) for f in SHAPES if "bf16" in f or "tf32" in f],
)
def test_mma_adds_the_products_in_order_each_sum_rounded_once(form: str, scale: float) -> None:
    """The order and rounding that docs/emulator.md states, in exact arithmetic; also where the products are
    below the smallest float32."""
    k = SHAPES[form][0]
    kind = form.split(".")[4]
    a, b = _numbers((16, k), kind, scale), _numbers((k, 8), kind, scale)
    c = _numbers((16, 8), "f32", scale * scale)
    got = multiply(form, a, b, c)
    for row, col in np.ndindex(16, 8):
        total = Fraction(c[row, col])
        for depth in range(k):
            total = _rounded(total + Fraction(a[row, depth]) * Fraction(b[depth, col]))
        assert Fraction(got[row, col]) == total


@pytest.mark.parametrize("form", ["m16n8k16.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f32.bf16.bf16.f32"])
def test_infinities_and_nans_go_through(form: str) -> None:
    a, b, c = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    a[3, 5], a[4, 6], b[7, 2] = np.inf, np.nan, -np.inf
    got = multiply(form, a, b, c)
    assert np.isnan(got[3, 2]) and np.isnan(got[4]).all()
    assert (got[3, [0, 1, 3, 4, 5, 6, 7]] == np.inf).all() and (got[[0, 1, 15], 2] == -np.inf).all()
    assert (got[5:, [0, 7]] == 16).all()


def test_mma_into_f16_rounds_once_at_the_end() -> None:
    a, b, c = np.zeros((16, 8)), np.zeros((8, 8)), np.full((16, 8), 2048.0)
    a[:, :2], b[:2, :] = 1.0, 1.0  # 2048 + 1 + 1: in f16 steps of 2 it would stay 2048
    assert (multiply("m16n8k8.row.col.f16.f16.f16.f16", a, b, c) == 2050).all()


def test_tf32_drops_the_low_bits_of_a_float32() -> None:
    form = "m16n8k8.row.col.f32.tf32.tf32.f32"
    a, b, c = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8))
    a[:, 0], b[0, :] = 1 + 2.0**-10 + 2.0**-11, 1.0
    assert (multiply(form, a, b, c) == 1 + 2.0**-10).all()


def test_a_chain_of_mma_takes_its_latency_each_and_many_warps_share_the_rate() -> None:
    m = Machine("timed")
    spec = m.device.profile.issue
    zero = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(10, 24))
    one = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, "
        "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r21, %r22, %r23};\n"
    )

    def cycles(count: int, block: int) -> float:
        body = zero + one * count + "st.global.u32 [%rd3], %r20;"
        params = struct.pack("<QQQI", m.empty(4 * block), 0, 0, 0)
        return m.launch(kernel(body), params, 1, block).cycles

    each = spec.mma_latency_cycles + spec.dependent_cycles
    assert cycles(17, 32) - cycles(1, 32) == pytest.approx(16 * each)
    rate = 1024 / 32 * 2048 / spec.mma_fma_per_cycle
    assert cycles(17, 1024) - cycles(1, 1024) == pytest.approx(16 * rate, rel=0.1)


def test_mma_needs_the_whole_warp() -> None:
    body = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(10, 24)) + (
        "setp.ge.u32 %p2, %r2, 31;\n@%p2 exit;\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r20, %r21, %r22, %r23}, "
        "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r21, %r22, %r23};\n"
    )
    with report("mma by a warp of which only 31 threads are left", rule="warp.not_whole"):
        execute(body, words=32)
