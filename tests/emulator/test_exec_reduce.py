"""Bulk and tensor reductions in kernels: exact results, who may overlap whom, in every schedule."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

from smfree.emulator.errors import CopyFault, MemoryFault
from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.reductions import GLOBAL_TYPES, Reduction
from smfree.emulator.tensormap import encode
from tests.emulator.exec_kit import Machine, every_schedule, execute, kernel, report

CASES = [(op, kind) for op, kinds in GLOBAL_TYPES.items() for kind in kinds]
BITS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
#: Bit patterns that matter, of 16-bit floats: zeros, subnormals, one, largest, infinities, NaN, ties.
EDGES = {
    "f16": [0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00,
            0x7E00, 0xFE01, 0x1000, 0x6400, 0x2E66],
    "bf16": [0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80,
             0x7FC0, 0xFFC1, 0x3B80, 0x4300, 0x3DCD],
}  # fmt: skip


def value(bits: int, kind: str) -> Fraction | str:
    """The exact number behind a bit pattern, or "inf", "-inf", "nan"."""
    exponents, mantissas = BITS[kind]
    sign = -1 if bits >> (exponents + mantissas) else 1
    exponent = bits >> mantissas & ((1 << exponents) - 1)
    mantissa = bits & ((1 << mantissas) - 1)
    bias = (1 << (exponents - 1)) - 1
    if exponent == (1 << exponents) - 1:
        return "nan" if mantissa else "inf" if sign > 0 else "-inf"
    if exponent:
        return sign * Fraction((1 << mantissas) + mantissa) * Fraction(2) ** (exponent - bias - mantissas)
    return sign * Fraction(mantissa) * Fraction(2) ** (1 - bias - mantissas)


def rounded(number: Fraction, kind: str) -> int:
    """The bit pattern (without sign) of the nearest representable magnitude, ties to even."""
    exponents, mantissas = BITS[kind]
    top = ((1 << exponents) - 1) << mantissas  # infinity; one below it is the largest number
    low, high = 0, top
    number = abs(number)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle, kind) <= number else (low, middle)
    below = value(low, kind)
    step = Fraction(2) ** ((1 << (exponents - 1)) - 1 - mantissas)
    above = below + step if high == top else value(high, kind)
    assert isinstance(below, Fraction)
    if number - below == above - number:
        return low if low % 2 == 0 else high
    return low if number - below < above - number else high


def added(a: int, b: int, kind: str) -> int:
    """a + b in one rounding, by exact rational arithmetic."""
    exponents, mantissas = BITS[kind]
    sign = 1 << (exponents + mantissas)
    x, y = value(a, kind), value(b, kind)
    nan = sign - 1
    if "nan" in (x, y) or {"inf", "-inf"} == {x, y}:
        return nan
    if isinstance(x, str):
        return a
    if isinstance(y, str):
        return b
    total = x + y
    if total == 0:
        return sign if a & sign and b & sign else 0
    return rounded(total, kind) | (sign if total < 0 else 0)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_of_16_bit_floats_are_rounded_once(kind: str) -> None:
    rng = np.random.default_rng(5)
    a = np.concatenate((np.repeat(EDGES[kind], 18), rng.integers(0, 1 << 16, 700))).astype(np.uint16)
    b = np.concatenate((np.tile(EDGES[kind], 18), rng.integers(0, 1 << 16, 700))).astype(np.uint16)
    near = (a & 0x7FFF).astype(np.int64) + rng.integers(-300, 300, len(a))  # exponents that interact
    b[400:] = np.clip(near, 0, 0x7FFF)[400:].astype(np.uint16) | (b[400:] & 0x8000)
    got = Reduction("add", kind).combine(a.view(np.uint8), b.view(np.uint8)).view(np.uint16)
    want = [added(x, y, kind) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_minimum_and_maximum_of_16_bit_floats(kind: str, op: str) -> None:
    """-0 is below +0; a NaN loses against a number; two NaN make the canonical one."""
    a = np.repeat(EDGES[kind], 18).astype(np.uint16)
    b = np.tile(EDGES[kind], 18).astype(np.uint16)
    got = Reduction(op, kind).combine(a.view(np.uint8), b.view(np.uint8)).view(np.uint16)

    def order(bits: int) -> tuple[float, bool]:
        x = value(bits, kind)
        return (float(x), not bits & 0x8000)

    for x, y, result in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        numbers = [z for z in (x, y) if value(z, kind) != "nan"]
        want = (min if op == "min" else max)(numbers, key=order) if numbers else 0x7FFF
        assert result == want, (hex(x), hex(y))


def test_add_f32_flushes_subnormals_and_f64_does_not() -> None:
    a = np.array([1e-40, -1e-40, 1.5e-38, 1.0, np.inf, 3e38], np.float32)
    b = np.array([1.0, -1e-45, -1.4e-38, -0.0, -np.inf, 3e38], np.float32)
    got = Reduction("add", "f32").combine(a.view(np.uint8), b.view(np.uint8)).view(np.uint32)
    want = np.array([1.0, -0.0, 0.0, 1.0, 0, np.inf], np.float32).view(np.uint32)
    want[4] = 0x7FFFFFFF
    assert got.tolist() == want.tolist()
    tiny = np.array([5e-324, 1e-310], np.float64)
    assert (Reduction("add", "f64").combine(tiny.view(np.uint8), tiny.view(np.uint8)).view(np.float64)
            == 2 * tiny).all()  # fmt: skip


def oracle(op: str, kind: str, old: int, new: int) -> int:
    bits = int(kind.lstrip("busf"))
    if kind == "s32" or kind == "s64":
        old, new = (x - (1 << bits) if x >> (bits - 1) else x for x in (old, new))
    result = {
        "add": lambda: old + new, "min": lambda: min(old, new), "max": lambda: max(old, new),
        "inc": lambda: 0 if old >= new else old + 1, "dec": lambda: new if old == 0 or old > new else old - 1,
        "and": lambda: old & new, "or": lambda: old | new, "xor": lambda: old ^ new,
    }[op]()  # fmt: skip
    return result & ((1 << bits) - 1)


_SHARED = ".shared .align 128 .b8 tile[1024];"
#: every thread stores one word of ``a``, thread 0 reduces 128 bytes into ``out``
_BODY = """
mov.u32 %r22, tile;
shl.b32 %r23, %r2, 2;
cvt.u64.u32 %rd20, %r23;
add.u32 %r23, %r23, %r22;
add.s64 %rd20, %rd20, %rd1;
setp.eq.u32 %p1, %r2, 0;
ld.global.u32 %r24, [%rd20];
st.shared.u32 [%r23], %r24;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra DONE;
{copies}
DONE:
"""
_INTO = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
_REDUCE = f".loc 1 30 0\n{_INTO}.{{op}}{{noftz}}.{{kind}} [%rd2], [%r22], 128;\n"
_WAIT = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"


def reduce(op: str, kind: str, old: np.ndarray, new: np.ndarray, schedule: str = "min-pc") -> np.ndarray:
    """128 bytes of ``new`` reduced into ``old``."""
    m = Machine(schedule)
    target = m.put(old)
    noftz = ".noftz" if op == "add" and kind in ("f16", "bf16") else ""
    body = _BODY.format(copies=_REDUCE.format(op=op, kind=kind, noftz=noftz) + _WAIT)
    params = struct.pack("<QQQI", 0, m.put(new), target, 0)
    result = m.launch(kernel(body, shared=_SHARED), params, block=32)
    assert result.counters.bytes_reduced == 128 and result.counters.tma_requests == 1
    assert result.counters.bytes_async == 0
    return m.get(target, len(old), old.dtype)


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_every_documented_operation_and_type(op: str, kind: str) -> None:
    rng = np.random.default_rng(len(op) * 7 + len(kind))
    size = Reduction(op, kind).element_bytes
    word = np.dtype(f"u{size}")
    old = rng.integers(0, 256, 128).astype(np.uint8).view(word)
    new = rng.integers(0, 256, 128).astype(np.uint8).view(word)
    if kind in ("f32", "f64"):
        old, new = (rng.standard_normal(128 // size).astype(f"f{size}").view(word) for _ in range(2))
    if op in ("inc", "dec"):
        old[:8], new[:8] = [0, 1, 2, 3, 4, 5, 6, 7], [3, 3, 3, 3, 3, 0, 6, 6]
    got = reduce(op, kind, old, new)
    if kind in ("f32", "f64"):
        want = (old.view(f"f{size}") + new.view(f"f{size}")).view(word)
    elif kind in ("f16", "bf16"):
        assert op in ("add", "min", "max")
        want = Reduction(op, kind).combine(old.view(np.uint8), new.view(np.uint8)).view(word)
        # rounding and order are held against exact arithmetic above
    else:
        want = [oracle(op, kind, x, y) for x, y in zip(old.tolist(), new.tolist(), strict=True)]
    assert (got == want).all()


@every_schedule
def test_reductions_of_many_ctas_into_one_place(schedule: str) -> None:
    """12 CTAs, unordered; each reduction is atomic element by element."""
    m = Machine(schedule)
    new = np.arange(1, 33, dtype=np.uint32)
    target = m.put(np.full(32, 1000, np.uint32))
    body = _BODY.format(copies=_REDUCE.format(op="add", kind="u32", noftz="") + _WAIT)
    params = struct.pack("<QQQI", 0, m.put(new), target, 0)
    m.launch(kernel(body, shared=_SHARED), params, grid=12, block=32)
    assert m.get(target, 32).tolist() == (1000 + 12 * new).tolist()


def _two(first: str, second: str, wait: str = "") -> str:
    return _BODY.format(copies=f".loc 1 30 0\n{first}\n{wait}.loc 1 31 0\n{second}\n" + _WAIT)


_ADD = f"{_INTO}.add.u32 [%rd2], [%r22], 128;"
_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd2+64], [%r22], 64;"
_LATE = [s for s in SCHEDULES if s not in ("async-earliest", "random")]


def _meet(body: str, schedule: str) -> np.ndarray:
    m = Machine(schedule)
    target = m.put(np.full(32, 7, np.uint32))
    params = struct.pack(
        "<QQQI", m.put(np.zeros(32, np.uint32)), m.put(np.arange(32, dtype=np.uint32)), target, 0
    )
    m.launch(kernel(body, shared=_SHARED), params, block=32)
    return m.get(target, 32)


@pytest.mark.parametrize("schedule", _LATE)
def test_what_a_reduction_in_flight_may_not_meet(schedule: str) -> None:
    """A plain load, a plain store, a copy in flight, in both orders; another reduction may overlap it."""
    plain = "ld.global.u32 %r30, [%rd2+8];"
    write = "st.global.u32 [%rd2+8], %r2;"
    with report("load reads 4 bytes", "the cp.reduce.async.bulk of 128 bytes", "has yet to write",
                "case.cu:31", "case.cu:30", rule="copy.race"):  # fmt: skip
        _meet(_two(_ADD, plain), schedule)
    with report("store writes 4 bytes", "the cp.reduce.async.bulk of 128 bytes", rule="copy.race"):
        _meet(_two(_ADD, write), schedule)
    with report("cp.async.bulk store writes 64 bytes", "the cp.reduce.async.bulk of 128", rule="copy.race"):
        _meet(_two(_ADD, _STORE), schedule)
    with report("cp.reduce.async.bulk writes 128 bytes", "the cp.async.bulk store of 64", rule="copy.race"):
        _meet(_two(_STORE, _ADD), schedule)
    assert _meet(_two(_ADD, _ADD), schedule).tolist() == [7 + 2 * i for i in range(32)]
    done = _meet(_two(_ADD, plain + write.replace("%r2", "%r30"), _WAIT), schedule)
    assert done.tolist() == [7 + i for i in range(32)]


@pytest.mark.parametrize("schedule", _LATE)
def test_an_atomic_of_a_thread_on_bytes_of_a_reduction_in_flight(schedule: str) -> None:
    """Both are atomic, but in different proxies: strict."""
    body = _two(_ADD, "red.global.add.u32 [%rd2+8], 1;")
    with report("atomic writes 4 bytes", "cp.reduce.async.bulk", "case.cu:31", rule="copy.race") as caught:
        _meet(body, schedule)
    assert caught.value.severity == "strict"
    assert _meet(_two(_ADD, "red.global.add.u32 [%rd2+8], 1;", _WAIT), schedule)[2] == 7 + 2 + 1


@every_schedule
def test_a_reduction_reads_its_destination(schedule: str) -> None:
    m = Machine(schedule)
    body = _BODY.format(copies=_REDUCE.format(op="add", kind="u32", noftz="") + _WAIT)
    params = struct.pack("<QQQI", 0, m.put(np.arange(32, dtype=np.uint32)), m.empty(128), 0)
    with report("cp.reduce.async.bulk.add.u32 of 128 bytes", "128 bytes nobody has written", "case.cu:30",
                rule="memory.uninitialized", kind=MemoryFault):  # fmt: skip
        m.launch(kernel(body, shared=_SHARED), params, block=32)


# ------------------------------------------------------------------------------------------ tensor reductions

_MAP = ", .param .align 64 .b8 map[128]"
_TENSOR = """
mov.b64 %rd6, map;
cvta.param.u64 %rd6, %rd6;
mov.u32 %r10, {x};
mov.u32 %r11, {y};
.loc 1 33 0
cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group [%rd6, {{%r10, %r11}}], [%r22];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""


def tensor_reduce(
    op: str, kind: str, old: np.ndarray, new: np.ndarray, at: tuple[int, int], schedule: str = "min-pc"
) -> np.ndarray:
    """A box of 32 words (4 rows of 8 words, or the same bytes) of a tensor, reduced; the tensor after it."""
    m = Machine(schedule)
    target = m.put(old)
    box = [32 // old.itemsize, 4]
    packed = encode(kind, target, old.shape[::-1], [old.strides[0]], box)
    body = _BODY.format(copies=_TENSOR.format(op=op, x=at[0], y=at[1]))
    params = struct.pack("<QQQI", 0, m.put(new), 0, 0).ljust(64, b"\0") + packed
    m.launch(kernel(body, shared=_SHARED, params=_MAP), params, block=32)
    return m.get(target, old.size, old.dtype).reshape(old.shape)


@every_schedule
@pytest.mark.parametrize("at", [(4, 2), (24, 14)])
def test_a_tensor_reduction_of_the_map_s_type(at: tuple[int, int], schedule: str) -> None:
    """The part of the box outside the tensor is dropped."""
    rng = np.random.default_rng(3)
    old, new = rng.standard_normal((16, 28)).astype(np.float32), rng.standard_normal(32).astype(np.float32)
    want = old.copy()
    part = want[at[1] : at[1] + 4, at[0] : at[0] + 8]
    part += new.reshape(4, 8)[: part.shape[0], : part.shape[1]]
    assert (tensor_reduce("add", "FLOAT32", old, new, at, schedule) == want).all()


@pytest.mark.parametrize(
    ("op", "kind", "dtype", "how"),
    [
        ("max", "INT32", np.int32, np.maximum), ("min", "INT64", np.int64, np.minimum),
        ("xor", "UINT32", np.uint32, np.bitwise_xor), ("and", "UINT64", np.uint64, np.bitwise_and),
        ("add", "FLOAT16", np.float16, np.add), ("add", "UINT64", np.uint64, np.add),
    ],
)  # fmt: skip
def test_tensor_reductions_by_type(op: str, kind: str, dtype: type, how: np.ufunc) -> None:
    rng = np.random.default_rng(9)
    size = np.dtype(dtype).itemsize
    if dtype is np.float16:
        old, new = (rng.standard_normal(n).astype(dtype) for n in (16 * 16, 128 // size))
    else:
        old, new = (
            rng.integers(0, 256, n * size).astype(np.uint8).view(dtype) for n in (16 * 16, 128 // size)
        )
    old = old.reshape(16, 16)
    columns = 32 // size
    want = old.copy()
    part = want[3:7, :columns]
    part[...] = how(part, new.reshape(4, columns)[:, : part.shape[1]])
    assert np.array_equal(tensor_reduce(op, kind, old, new, (0, 3)), want)


@pytest.mark.parametrize(
    ("op", "kind", "dtype"),
    [("add", "INT64", np.int64), ("add", "UINT8", np.uint8), ("inc", "INT32", np.int32),
     ("max", "FLOAT32", np.float32), ("xor", "FLOAT32", np.float32), ("add", "FLOAT64", np.float64)],
)  # fmt: skip
def test_tensor_reductions_that_do_not_exist(op: str, kind: str, dtype: type) -> None:
    old = np.zeros((16, 32), dtype)
    with report(f"cp.reduce.async.bulk.tensor.{op} does not exist for {kind}", "case.cu:33",
                rule="tensor.reduce_type", kind=CopyFault):  # fmt: skip
        tensor_reduce(op, kind, old, np.zeros(128 // old.itemsize, dtype), (0, 0))


def test_reductions_of_overlapping_rows() -> None:
    """A map with a row stride of 0: all rows of the box add into one."""
    m = Machine()
    target = m.put(np.zeros(8, np.uint32))
    packed = encode("UINT32", target, [8, 4], [0], [8, 4])
    new = np.arange(32, dtype=np.uint32)
    body = _BODY.format(copies=_TENSOR.format(op="add", x=0, y=0))
    params = struct.pack("<QQQI", 0, m.put(new), 0, 0).ljust(64, b"\0") + packed
    m.launch(kernel(body, shared=_SHARED, params=_MAP), params, block=32)
    assert m.get(target, 8).tolist() == new.reshape(4, 8).sum(axis=0).tolist()


def test_a_reduction_needs_16_byte_units() -> None:
    for text, phrases in (
        ("[%rd2+4], [%r22], %r4", ("cp.reduce.async.bulk.add.u32 destination", "16-byte aligned")),
        ("[%rd2], [%r22+8], %r4", ("cp.reduce.async.bulk.add.u32 source", "16-byte aligned")),
        ("[%rd2], [%r22], %r5", ("cp.reduce.async.bulk.add.u32 size", "multiple of 16 bytes (got 24)")),
    ):
        sizes = "mov.u32 %r4, 32;\nmov.u32 %r5, 24;\n.loc 1 30 0\n"
        body = _BODY.format(copies=f"{sizes}{_INTO}.add.u32 {text};\n{_WAIT}")
        with report(*phrases, "case.cu:30", kind=CopyFault):
            execute(body, shared=_SHARED, a=np.zeros(32, np.uint32), b=np.zeros(32, np.uint32))


def test_a_reduction_into_lines_that_are_not_in_l2_reads_them_first() -> None:
    """Cold, it reads and writes DRAM and takes its latency; a store of the same bytes only writes."""

    def run(copy: str, *, cold: bool) -> tuple[float, int, int]:
        m = Machine("timed")
        target, new = m.put(np.zeros(32, np.uint32)), m.put(np.ones(32, np.uint32))
        warm = "" if cold else "ld.global.u32 %r30, [%rd2+4];\nadd.u32 %r30, %r30, %r30;\n"
        m.device.l2.flush()
        params = struct.pack("<QQQI", 0, new, target, 0)
        done = m.launch(kernel(_BODY.format(copies=warm + copy + _WAIT), shared=_SHARED), params, block=32)
        return done.cycles, done.counters.dram_read_bytes, done.counters.dram_write_bytes

    store = _STORE.replace("+64", "").replace("64;", "128;")
    add, plain, hit = run(_ADD, cold=True), run(store, cold=True), run(_ADD, cold=False)
    assert (add[1] - plain[1], add[2], plain[2]) == (128, 128, 128)
    assert add[0] > plain[0] + 200
    assert hit[2] == 0 and hit[1] - plain[1] == 4
