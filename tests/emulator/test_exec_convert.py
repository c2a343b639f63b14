"""Moves, conversions and memory accesses: widths, signs, clamping, packing, state spaces."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from smfree.emulator.errors import MemoryFault, Unsupported
from tests.emulator.exec_kit import Machine, cuda_kernel, every_schedule, execute, kernel, report
from tests.emulator.test_exec_arith import Case, check, nearest, read, wrap

_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def _limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


@pytest.mark.parametrize("to", _INTEGERS)
@pytest.mark.parametrize("source", _INTEGERS)
def test_integer_conversion_extends_by_the_source_and_truncates(source: str, to: str) -> None:
    bits = int(to[1:])
    check(
        Case(f"cvt.{to}.{source} {{d}}, {{a}};", f"b{bits}", (source,), lambda a: wrap(read(a, source), bits))
    )


@pytest.mark.parametrize("to", ["u8", "s8"])
@pytest.mark.parametrize("register", [16, 32, 64])
def test_a_narrow_result_is_extended_to_its_register(to: str, register: int) -> None:
    def answer(a: int) -> int:
        byte = a & 0xFF
        return wrap(byte - 256 if to == "s8" and byte & 0x80 else byte, register)

    check(Case(f"cvt.{to}.u32 {{d}}, {{a}};", f"b{register}", ("u32",), answer))


@pytest.mark.parametrize(
    ("to", "source"),
    [("s16", "s32"), ("u16", "s32"), ("u32", "s32"), ("s32", "u32"), ("u16", "u64"), ("s32", "s64"),
     ("u64", "s64"),
     ("s64", "u64"), ("u32", "s64"), ("s16", "u64"), ("u32", "u64")],
)  # fmt: skip
def test_saturating_integer_conversion(to: str, source: str) -> None:
    low, high = _limits(to)
    bits = int(to[1:])
    check(Case(f"cvt.sat.{to}.{source} {{d}}, {{a}};", f"b{bits}", (source,),
               lambda a: wrap(min(max(read(a, source), low), high), bits)))  # fmt: skip


_ROUND = {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", sorted(_ROUND))
@pytest.mark.parametrize("to", _INTEGERS)
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_float_to_integer_rounds_clamps_and_maps_nan(source: str, to: str, mode: str) -> None:
    """NaN: 0 for f32 to at most 32 bits, else the pattern 1 << (bits - 1) (PTX ISA, cvt)."""
    low, high = _limits(to)
    bits = int(to[1:])

    def answer(a: int) -> int:
        x = read(a, source)
        if math.isnan(x):
            return 0 if source != "f64" and bits < 64 else 1 << (bits - 1)
        if math.isinf(x):
            return wrap(high if x > 0 else low, bits)
        return wrap(min(max(_ROUND[mode](Fraction(x)), low), high), bits)

    check(Case(f"cvt.{mode}.{to}.{source} {{d}}, {{a}};", f"b{bits}", (source,), answer))


@pytest.mark.parametrize("source", _INTEGERS)
@pytest.mark.parametrize("to", ["f32", "f64"])
def test_integer_to_float_rounds_to_nearest_even(to: str, source: str) -> None:
    bits = int(to[1:])
    check(Case(f"cvt.rn.{to}.{source} {{d}}, {{a}};", to, (source,),
               lambda a: nearest(Fraction(read(a, source)), bits)))  # fmt: skip


@pytest.mark.parametrize(("to", "source"), [("f32", "f64"), ("f16", "f32"), ("f64", "f32"), ("f32", "f16")])
def test_float_to_float(to: str, source: str) -> None:
    bits = int(to[1:])
    mode = ".rn" if bits < int(source[1:]) else ""

    def answer(a: int) -> int:
        x = read(a, source)
        if math.isfinite(x):
            return nearest(Fraction(x), bits, zero_sign=int(math.copysign(1, x) < 0))
        code, whole = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}[bits]
        return int(struct.unpack(whole, struct.pack(code, x))[0])

    check(Case(f"cvt{mode}.{to}.{source} {{d}}, {{a}};", to, (source,), answer))


def test_packing_and_unpacking() -> None:
    check(Case("mov.b32 {d}, {{{a}, {b}}};", "b32", ("b16", "b16"), lambda a, b: b << 16 | a))
    check(Case("mov.b64 {d}, {{{a}, {b}}};", "b64", ("b32", "b32"), lambda a, b: b << 32 | a))
    check(Case("mov.b32 {{{d}, _}}, {a};", "b16", ("b32",), lambda a: a & 0xFFFF))
    check(Case("mov.b32 {{_, {d}}}, {a};", "b16", ("b32",), lambda a: a >> 16))
    check(Case("mov.b64 {{_, {d}}}, {a};", "b32", ("b64",), lambda a: a >> 32))
    check(Case("mov.b64 {{_, _, {d}, _}}, {a};", "b16", ("b64",), lambda a: a >> 32 & 0xFFFF))


def test_swapping_the_halves_of_a_register_in_place() -> None:
    body = """
    mad.wide.u32 %rd10, %r2, 65537, 99;
    mov.b64 {%r10, %r11}, %rd10;
    mov.b64 %rd10, {%r11, %r10};
    mov.b64 {%r12, %r13}, %rd10;
    sub.u32 %r14, %r13, %r12;
    st.global.u32 [%rd3], %r14;
    """
    assert execute(body).out.tolist() == [t * 65537 + 99 for t in range(32)]


def test_half_a_pack_that_nothing_writes_may_be_dropped_and_not_read() -> None:
    """Compilers fill a pair with a register that has no value, where they want the other half only."""
    body = "mov.b64 %rd10, {%r2, %r11};\nmov.b64 {%r12, TAKEN}, %rd10;\nst.global.u32 [%rd3], %r12;"
    assert execute(body.replace("TAKEN", "_")).out.tolist() == list(range(32))
    with report("%r11", "never written", rule="register.undefined"):
        execute(body.replace("TAKEN", "%r13"))


_REFUSED = [
    "cvt.rz.f32.f64 %r10, %rd0;", "cvt.rni.f32.f32 %r10, %r2;", "cvt.sat.f32.f32 %r10, %r2;",
    "cvt.rn.ftz.f32.f64 %r10, %rd0;", "cvt.rn.relu.bf16.f32 %h1, %r2;",
    "cvt.rn.relu.f16x2.f32 %r10, %r2, %r2;",
    "cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r2;", "cvt.rna.tf32.f32 %r10, %r2;",
    "cvt.pack.sat.s16.s32 %r10, %r2, %r2;",
    "match.any.sync.b32 %r10, %r2, 0xffffffff;",
    "mov.u32 %r10, %lanemask_gt;", "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    " {%r10,%r11,%r12,%r13},{%r2,%r2,%r2,%r2},{%r2,%r2},{%r2,%r2,%r2,%r2};",
    "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16"
    " {%r10,%r11,%r12,%r13},{%r2,%r2},{%r2,%r2},{%r2,%r2,%r2,%r2};",
    "multimem.st.weak.global.v4.e5m2x4 [%rd0], {%r2,%r2,%r2,%r2};", "atom.global.add.f64 %rd4, [%rd0], %rd1;",
    "atom.global.add.noftz.f16 %h1, [%rd0], %h1;", "discard.global.L2 [%rd0], 128;",
]  # fmt: skip


@pytest.mark.parametrize(
    "text", [t for t in _REFUSED if "%rq" not in t and not t.startswith(("call", "tex"))]
)
def test_what_is_not_modelled_is_refused_with_both_lines(text: str) -> None:
    with report(text.rstrip(";").split(" ")[0], "case.cu:33", "PTX line", "not modelled", kind=Unsupported):
        execute(f"mov.b16 %h1, 0;\n.loc 1 33 5\n{text}")


def test_calls_are_refused() -> None:
    source = """
    __device__ __noinline__ unsigned f(unsigned x) { return x * x + threadIdx.y; }
    extern "C" __global__ void k(unsigned* out) { out[threadIdx.x] = f(threadIdx.x) + f(3); }"""
    with report("call", "case.cu:", "not modelled", kind=Unsupported):
        Machine().launch(cuda_kernel(source), struct.pack("<Q", 0))


# ------------------------------------------------------------------------------------------- loads and stores


@pytest.mark.parametrize("kind", ["u8", "s8", "b8", "u16", "s16", "u32", "s32", "b32", "f32", "u64", "b64"])
@pytest.mark.parametrize("space", ["global", "shared", "generic", "local"])
def test_a_loaded_element_is_extended_and_a_stored_one_truncated(kind: str, space: str) -> None:
    bits = int(kind[1:])
    register, width = (
        ("%rd10", 64) if bits <= 32 and kind[0] != "f" else ("%rd10", 64) if bits == 64 else ("%r10", 32)
    )
    home = {
        "global": ("%rd7", ".global"),
        "shared": ("%r24", ".shared"),
        "generic": ("%rd6", ""),
        "local": ("%r25", ".local"),
    }
    base, suffix = home[space]
    body = f"""
    mul.wide.u32 %rd4, %r2, 8;
    add.s64 %rd5, %rd1, %rd4;
    add.s64 %rd7, %rd2, %rd4;
    cvt.u32.u64 %r22, %rd4;
    mov.u32 %r23, sm;
    add.u32 %r24, %r22, %r23;
    mov.u32 %r25, depot;
    cvt.u64.u32 %rd6, %r24;
    cvta.shared.u64 %rd6, %rd6;
    ld.global.b{width} {register}, [%rd5];
    st{suffix}.{kind} [{base}], {register};
    ld{suffix}.{kind} {register}, [{base}];
    add.s64 %rd8, %rd0, %rd4;
    st.global.b{width} [%rd8], {register};
    """
    data = np.random.default_rng(bits).integers(0, 1 << 64, 32, np.uint64)
    shared = ".shared .align 8 .b8 sm[256];\n.local .align 8 .b8 depot[8];"
    out = execute(body, words=64, a=data, b=np.zeros(32, np.uint64), shared=shared, zero_out=True).view(
        np.uint64
    )
    for x, got in zip(data.tolist(), out.tolist(), strict=True):
        low = x & ((1 << bits) - 1)
        assert got == wrap(read(low, kind) if kind[0] == "s" else low, width)


@pytest.mark.parametrize(
    ("count", "kind"), [(2, "u8"), (4, "u8"), (2, "u16"), (4, "u32"), (2, "u64"), (4, "f32"), (2, "b32")]
)
def test_vectors_with_sinks_and_repeats(count: int, kind: str) -> None:
    bits = int(kind[1:])
    stem = "%rd" if bits == 64 else "%r" if bits == 32 else "%h"
    names = [f"{stem}{20 + i}" for i in range(count)]
    into = ", ".join(["_", *names[1:]])
    outof = ", ".join([names[-1], *names[1:]])
    size = bits // 8 * count
    body = f"""
    mul.wide.u32 %rd4, %r2, {size};
    add.s64 %rd5, %rd1, %rd4;
    add.s64 %rd6, %rd0, %rd4;
    ld.global.v{count}.{kind} {{{into}}}, [%rd5];
    st.global.v{count}.{kind} [%rd6], {{{outof}}};
    """
    data = np.random.default_rng(3).integers(0, 256, 32 * size).astype(np.uint8)
    got = execute(body, a=data, words=8 * size).view(f"u{bits // 8}").reshape(32, count)
    want = data.view(f"u{bits // 8}").reshape(32, count).copy()
    want[:, 0] = want[:, -1]
    assert (got == want).all()


def test_a_mixed_guard_on_a_load_keeps_the_old_value() -> None:
    body = """
    setp.lt.u32 %p1, %r2, 7;
    mov.u32 %r10, 1000;
    add.s64 %rd4, %rd1, %rd39;
    @!%p1 ld.global.u32 %r10, [%rd4];
    @%p1 st.global.u32 [%rd3], %r10;
    @!%p1 st.global.u32 [%rd3], %r10;
    """
    data = np.arange(32, dtype=np.uint32) * 3
    assert execute(body, a=data).out.tolist() == [1000] * 7 + data[7:].tolist()


def test_constant_and_global_variables() -> None:
    body = """
    mul.wide.u32 %rd4, %r2, 4;
    mov.u64 %rd5, table;
    add.s64 %rd5, %rd5, %rd4;
    ld.const.u32 %r10, [%rd5];
    ld.global.u32 %r11, [total+4];
    add.u32 %r10, %r10, %r11;
    st.global.u32 [%rd3], %r10;
    """
    module = ".const .align 4 .u32 table[32];\n.global .align 4 .u32 total[2];"
    m = Machine()
    table, total = m.put(np.arange(32, dtype=np.uint32) * 5), m.put(np.array([1, 70], np.uint32))
    out = m.empty(128)
    m.launch(
        kernel(body, globals=module),
        struct.pack("<QQQI", out, 0, 0, 0),
        symbols={"table": table, "total": total},
    )
    assert m.get(out, 32).tolist() == [5 * t + 70 for t in range(32)]


@every_schedule
def test_atomics_give_every_lane_its_turn(schedule: str) -> None:
    for space, address in (("global", "[%rd1]"), ("shared", "[sm]")):
        body = f"""
        setp.eq.u32 %p1, %r2, 0;
        @%p1 st.shared.u32 [sm], 0;
        bar.sync 0;
        atom.{space}.add.u32 %r10, {address}, 1;
        red.{space}.max.u32 {address}, 0;
        st.global.u32 [%rd3], %r10;
        """
        shared = ".shared .align 4 .b8 sm[4];"
        got = execute(body, block=70, a=np.zeros(1, np.uint32), shared=shared, schedule=schedule).out
        assert sorted(got.tolist()) == list(range(70))


_ATOMS = {
    "min.s32": lambda old, v: v if (old ^ 1 << 31) > (v ^ 1 << 31) else old,
    "max.u32": max, "and.b32": lambda old, v: old & v, "or.b32": lambda old, v: old | v,
    "xor.b32": lambda old, v: old ^ v,
    "exch.b32": lambda old, v: v, "inc.u32": lambda old, v: 0 if old >= v else old + 1,
    "dec.u32": lambda old, v: v if old == 0 or old > v else old - 1,
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(_ATOMS))
def test_atomic_operations_agree_with_python(op: str) -> None:
    body = f"""
    add.s64 %rd4, %rd1, %rd39;
    add.s64 %rd5, %rd2, %rd39;
    ld.global.u32 %r10, [%rd5];
    atom.global.{op} %r11, [%rd4], %r10;
    ld.global.u32 %r12, [%rd4];
    sub.u32 %r12, %r12, %r11;
    st.global.u32 [%rd3], %r12;
    """
    dice = np.random.default_rng(4)
    edge = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 5, 6], np.uint32)
    old, value = dice.choice(edge, 64).astype(np.uint32), dice.choice(edge, 64).astype(np.uint32)
    got = execute(body, block=64, a=old, b=value).out.tolist()
    assert got == [wrap(_ATOMS[op](int(o), int(v)) - int(o), 32) for o, v in zip(old, value, strict=True)]


def test_compare_and_swap() -> None:
    body = """
    atom.global.cas.b32 %r10, [%rd1], %r2, 100;
    st.global.u32 [%rd3], %r10;
    """
    got = execute(body, a=np.array([5], np.uint32)).out.tolist()
    assert got == [5] * 6 + [100] * 26


# --------------------------------------------------------------------------------------------- wrong accesses


@pytest.mark.parametrize(
    ("text", "rule", "phrases"),
    [
        ("ld.global.u32 %r10, [%rd1+128];", "memory.bounds", ("allocation",)),
        ("st.global.u32 [%rd1+-4], %r2;", "memory.bounds", ("allocation",)),
        ("ld.global.u64 %rd10, [%rd1+4];", "memory.misaligned", ("8-byte aligned",)),
        ("ld.global.u32 %r10, [%rd0];", "memory.uninitialized", ("nobody",)),
        ("ld.shared.u32 %r10, [sm+4096];", "shared.bounds", ("offset 0x1000", "256 bytes")),
        ("mov.b64 %rd10, 64;\nld.global.u32 %r10, [%rd10];", "memory.bounds", ("0x40",)),
    ],
)
def test_a_wrong_access_names_rule_lane_and_line(text: str, rule: str, phrases: tuple[str, ...]) -> None:
    body = f"setp.ne.u32 %p1, %r2, 9;\n@%p1 exit;\n.loc 1 55 0\n{text}"
    with report(*phrases, "CTA 0 thread 9", "case.cu:55", "PTX line", rule=rule, kind=MemoryFault):
        execute(body, a=np.zeros(32, np.uint32), shared=".shared .align 8 .b8 sm[256];")


def test_a_texture_fetch_is_refused_with_its_line() -> None:
    source = """
    extern "C" __global__ void k(float* out, unsigned long long t) {
      float x, y, z, w;
      asm volatile("tex.1d.v4.f32.s32 {%0, %1, %2, %3}, [%4, {%5}];"
                   : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "l"(t), "r"((int)threadIdx.x));
      out[threadIdx.x] = x + y + z + w;
    }"""
    with report("tex.1d.v4.f32.s32", "case.cu:4", "not modelled", kind=Unsupported):
        Machine().launch(cuda_kernel(source), struct.pack("<QQ", 0, 0))
