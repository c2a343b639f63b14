"""The PTX parser: real compiler output, odd spellings, scopes, layout, errors."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smfree.emulator.errors import PtxError, Unsupported
from smfree.emulator.ptx.ast import (
    Address,
    ArgList,
    Guard,
    Imm,
    Instr,
    Kernel,
    LabelRef,
    Not,
    Pair,
    Reg,
    Sink,
    SourceLine,
    Special,
    Symbol,
    TensorAddress,
    Vector,
)
from smfree.emulator.ptx.declarations import parameter_offsets
from smfree.emulator.ptx.lexer import Cursor, literal
from smfree.emulator.ptx.parser import parse
from tests.emulator.ptx_kit import cubin_parameters, nvrtc_ptx

REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<9>; .reg .b64 %rd<5>; .reg .f32 %f<9>;"

ARGUMENTS_CU = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned long long u64;
struct alignas(64) Map { u64 opaque[16]; };
struct __align__(16) Float4 { float x, y, z, w; };
extern "C" __global__ void mixed(u8 a, u64 b, const __grid_constant__ Map m, u16 c, Float4 f, u64* out) {
  out[0] = a + b + m.opaque[3] + c + (u64)(f.x + f.w);
}
"""

PIPELINE_CU = """
typedef unsigned u32; typedef unsigned long long u64;
__device__ __forceinline__ bool ready(u32 bar, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0,1,0,q; }"
               : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  return ok;
}
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  while (!ready(bar, parity)) ;
}
extern "C" __global__ void __launch_bounds__(128, 2) __cluster_dims__(2, 1, 1) pipe(int* out, u32 n) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ __align__(8) u64 full[3];
  __shared__ int flag;
  if (threadIdx.x == 0) flag = n;
  __syncthreads();
  u32 bar = (u32)__cvta_generic_to_shared(full);
  for (u32 i = 0; i < n; ++i) {
    wait(bar + 8 * (i & 1), i >> 1 & 1);
    out[i] = dynamic[i] + flag;
  }
}
"""

ODD_CU = """
typedef unsigned long long u64;
__device__ int counter;
__constant__ float table[4] = {1.f, 2.5f, -3.f, 0.f};
__device__ const char* names[2] = {"ab", "cde"};
__device__ int matrix[2][3] = {{1, 2}, {4}};
__device__ __noinline__ float slow(float x, int* p) {
  float buffer[8];
  for (int i = 0; i < 8; i++) buffer[i] = x * i + p[i];
  return x > 3 ? sinf(x) * p[0] : buffer[(int)x & 7];
}
extern "C" int printf(const char*, ...);
extern "C" __global__ void odd(float* o, int* p, double* d) {
  __shared__ float s[33];
  s[threadIdx.x] = o[0];
  __syncthreads();
  o[threadIdx.x] = slow(s[31 - threadIdx.x], p) + table[threadIdx.x & 3] + names[threadIdx.x & 1][0];
  o[1] += matrix[p[0]][p[1]];
  d[0] = fma(d[0], 2.0, 1.0) / d[1];
  atomicAdd(&counter, 1);
  if (p[3] < 0) { printf("x %d\\n", p[0]); __trap(); }
  asm volatile("bra LATER;");
  p[1] = 3;
  asm volatile("LATER:");
  p[2] = __shfl_xor_sync(~0u, p[3], 1) + __ballot_sync(~0u, p[4] > 3);
}
"""


def kernel(body: str, *, params: str = "", module: str = "", head: str = "") -> Kernel:
    """The kernel k with this body, registers declared."""
    text = f".version 9.0\n.target sm_90a\n.address_size 64\n{module}\n.entry k({params}) {head}\n"
    return parse(f"{text}{{ {REGISTERS}\n{body}\n}}\n").kernels["k"]


def one(code: str, **more: str) -> Instr:
    """The only instruction of a kernel."""
    (instr,) = kernel(code, **more).instrs
    return instr


# ------------------------------------------------------------------------------------- real compiler output


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_parameters_lie_where_ptxas_puts_them(arch: str) -> None:
    text = nvrtc_ptx(ARGUMENTS_CU, arch)
    params = parse(text).kernels["mixed"].params
    assert [p.size_bytes for p in params] == [1, 8, 128, 2, 16, 8]
    assert [p.align for p in params][2] == 64
    assert [p.offset for p in params] == [0, 8, 64, 192, 208, 224] == parameter_offsets(params)
    base, offsets = cubin_parameters(text.rstrip("\0"), arch, "mixed")
    assert offsets == parameter_offsets(params, base)


def test_pipeline_kernel_from_nvrtc() -> None:
    module = parse(nvrtc_ptx(PIPELINE_CU, "sm_90a"))
    k = module.kernels["pipe"]
    assert module.target == "sm_90a" and k.target == "sm_90a"
    assert k.maxntid == (128, 1, 1) and k.minnctapersm == 2 and k.cluster_dims == (2, 1, 1)
    assert k.explicit_cluster and k.reqntid is None
    sizes = {name.split("4pipe")[-1]: v for name, v in k.shared.items()}
    assert sum(v.size_bytes or 0 for v in sizes.values()) == 28 and k.static_shared_bytes <= 32
    dynamic = k.shared["dynamic"]
    assert dynamic.size_bytes is None and dynamic.offset == 128 == k.dynamic_shared_offset
    (wait,) = [i for i in k.instrs if i.opcode == "mbarrier"]
    assert wait.modifiers == ("try_wait", "parity", "shared::cta", "b64")
    predicate = wait.operands[0]
    assert isinstance(predicate, Reg) and predicate.name.startswith("q@")
    assert k.registers[predicate.name] == "pred"


def test_inlined_lines_name_every_call_site_down_to_the_kernel() -> None:
    k = parse(nvrtc_ptx(PIPELINE_CU, "sm_90a")).kernels["pipe"]
    (wait,) = [i for i in k.instrs if i.opcode == "mbarrier"]
    lines = PIPELINE_CU.splitlines()
    chain, at = [], wait.source
    while at is not None:
        assert at.file.endswith("case.cu")
        chain.append(lines[at.line - 1].strip())
        at = at.inlined_at
    assert chain[0].startswith("asm volatile")
    assert chain[1].startswith("while (!ready")
    assert chain[2].startswith("wait(bar + 8")
    assert wait.source is not None and wait.source.function is not None and "ready" in wait.source.function


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("debug", [False, True], ids=["release", "debug"])
def test_functions_tables_printf_and_asm_labels_from_nvrtc(arch: str, debug: bool) -> None:
    module = parse(nvrtc_ptx(ODD_CU, arch, *(["--device-debug"] if debug else [])))
    k = module.kernels["odd"]
    assert module.globals["table"].space == "const"
    table = module.globals["table"]
    assert table.init.ljust(table.size_bytes, b"\0").hex() == "0000803f00002040000040c000000000"
    assert module.globals["matrix"].init.ljust(24, b"\0").hex() == "01000000020000000000000004" + "0" * 22
    assert module.globals["matrix"].size_bytes == 24
    offsets = [offset for offset, _ in module.globals["names"].relocations]
    assert offsets == [0, 8]
    (slow,) = [f for name, f in module.functions.items() if "slow" in name]
    assert slow.instrs and slow.local_bytes >= 32 and len(slow.results) == 1
    assert module.functions["vprintf"].is_declaration
    calls = [i for i in k.instrs if i.opcode == "call"]
    for callee in ("vprintf", slow.name):
        (call,) = [i for i in calls if Symbol(callee) in i.operands]
        results, _, arguments = call.operands
        assert isinstance(results, ArgList) and len(results.elems) == 1
        assert isinstance(arguments, ArgList) and len(arguments.elems) == 2
    assert "LATER" in k.labels
    assert any(i.operands == (LabelRef("LATER"),) for i in k.instrs if i.opcode == "bra")


def test_parsing_time_grows_with_the_text_and_no_faster() -> None:
    """Four times the text takes about four times as long; a quadratic parser would take sixteen."""
    once, four_times = (min(_seconds(_long_text(kernels)) for _ in range(5)) for kernels in (5, 20))
    assert four_times < 9 * once


def _long_text(kernels: int) -> str:
    body = ".reg .b32 %r<5>;\n" + "mad.lo.s32 %r1, %r2, 3, %r4;\n" * 98 + "ret;"
    texts = "\n".join(f".visible .entry k{i}() {{\n{body}\n}}" for i in range(kernels))
    return f".version 9.0\n.target sm_90a\n.address_size 64\n{texts}"


def _seconds(text: str) -> float:
    start = time.process_time()
    parse(text)
    return time.process_time() - start


# ------------------------------------------------------------------------------------------ odd spellings


def test_guards_before_the_opcode_and_label_on_the_same_line() -> None:
    k = kernel(
        "@%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd3 + 0];\n"
        "@!%p2 bra L;\n"
        "L: @%p1 add.s32 %r1, %r2, -1; ret;"
    )
    load, branch, add, _ = k.instrs
    assert load.guard == Guard(Reg("%p1")) and load.operands[1] == Address(Reg("%rd3"), 0)
    assert branch.guard == Guard(Reg("%p2"), negated=True) and branch.operands == (LabelRef("L"),)
    assert k.labels == {"L": 2} and add.guard == Guard(Reg("%p1"))


@pytest.mark.parametrize(
    "code",
    [
        "ld.shared.b32 {%r1}, [%r2];",
        "st.shared.b32 [%r2], {%r1};",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r3,%r4}, {%r1}, {%r2}, {%r3,%r4};",
    ],
)
def test_one_element_braces_are_vectors(code: str) -> None:
    assert Vector((Reg("%r1"),)) in one(code).operands


@pytest.mark.parametrize(
    ("code", "modifiers"),
    [
        ("bar.sync 0;", ("sync",)),
        ("bar.sync 1, 64;", ("sync",)),
        ("bar.cta.sync 0;", ("cta", "sync")),
        ("barrier.sync 0;", ("sync",)),
        ("barrier.sync.aligned 3;", ("sync", "aligned")),
        ("barrier.cta.sync.aligned 0, 64;", ("cta", "sync", "aligned")),
        ("bar.arrive 1, 64;", ("arrive",)),
        ("barrier.cta.arrive.aligned 1, 64;", ("cta", "arrive", "aligned")),
        ("bar.red.popc.u32 %r1, 0, !%p1;", ("red", "popc", "u32")),
        ("barrier.cta.red.aligned.and.pred %p1, 0, 64, %p2;", ("cta", "red", "aligned", "and", "pred")),
        ("bar.warp.sync 0xffffffff;", ("warp", "sync")),
        ("barrier.cluster.wait.acquire.aligned;", ("cluster", "wait", "acquire", "aligned")),
    ],
)
def test_every_spelling_of_a_barrier(code: str, modifiers: tuple[str, ...]) -> None:
    instr = one(code)
    assert instr.opcode == code.split(".")[0] and instr.modifiers == modifiers


def test_operand_forms() -> None:
    module = ".extern .shared .align 16 .b8 smem[];"
    cases = {
        "elect.sync _|%p1, -1;": (Pair(Sink(), Reg("%p1")), Imm(-1)),
        "setp.lt.and.s32 %p1|%p2, %r1, 0x1F, !%p3;": (
            Pair(Reg("%p1"), Reg("%p2")),
            Reg("%r1"),
            Imm(31),
            Not(Reg("%p3")),
        ),
        "mov.u32 %r1, %tid.x;": (Reg("%r1"), Special("%tid.x")),
        "mov.u32 %r1, WARP_SZ;": (Reg("%r1"), Imm(32)),
        "mov.u32 %r1, smem+16;": (Reg("%r1"), Symbol("smem", 16)),
        "ld.shared.u32 %r1, [smem+4];": (Reg("%r1"), Address(Symbol("smem"), 4)),
        "ld.shared.u32 %r1, [%r2+-16];": (Reg("%r1"), Address(Reg("%r2"), -16)),
        "ld.shared.u32 %r1, [ %r2 + 0 ];": (Reg("%r1"), Address(Reg("%r2"), 0)),
        "ld.shared.u32 %r1, [64];": (Reg("%r1"), Address(Imm(64), 0)),
        "ld.global.v2.b64 {%rd1, _}, [%rd2];": (Vector((Reg("%rd1"), Sink())), Address(Reg("%rd2"), 0)),
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r3, -4}], [%r2];": (
            TensorAddress(Address(Reg("%rd1"), 0), (Reg("%r3"), Imm(-4))),
            Address(Reg("%r2"), 0),
        ),
    }
    for code, operands in cases.items():
        assert one(code, module=module).operands == operands, code


@pytest.mark.parametrize(
    ("token", "value"),
    [("0", 0), ("017", 15), ("0x0U", 0), ("0XfF", 255), ("0b101", 5), ("18446744073709551615U", 2**64 - 1)],
)
def test_integer_literals(token: str, value: int) -> None:
    assert literal(token) == Imm(value)


@pytest.mark.parametrize(
    ("token", "value", "bits", "width"),
    [
        ("0f3F800000", 1.0, 0x3F800000, 32),
        ("0F7FC00001", None, 0x7FC00001, 32),
        ("0dBFF0000000000000", -1.0, 0xBFF0000000000000, 64),
        ("1.5", 1.5, 0x3FF8000000000000, 64),
        ("1e3", 1000.0, 0x408F400000000000, 64),
        ("2.", 2.0, 0x4000000000000000, 64),
    ],
)
def test_float_literals_keep_their_bits(token: str, value: float | None, bits: int, width: int) -> None:
    got = literal(token)
    assert got is not None and (got.bits, got.width) == (bits, width)
    assert got.value == value or (value is None and got.value != got.value)


def test_a_negated_float_flips_the_sign_bit() -> None:
    assert one("mov.f32 %f1, -0f3F800000;").operands[1] == Imm(-1.0, 0xBF800000, 32)


@given(st.recursive(st.integers(0, 2**31), lambda inner: st.tuples(st.sampled_from("+-*&|^"), inner, inner)))
def test_constant_expressions_agree_with_python(tree: object) -> None:
    def text(node: object) -> str:
        return str(node) if isinstance(node, int) else f"({text(node[1])} {node[0]} {text(node[2])})"  # type: ignore[index]

    expression = text(tree)
    assert Cursor(expression).integer("a test value") == eval(expression)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", 14),
        ("1<<4|3", 19),
        ("-7/2", -3),
        ("~0&0xFF", 255),
        ("1 ? 5 : 6", 5),
        ("!3", 0),
        ("10-2-3", 5),
    ],
)
def test_constant_expressions_bind_as_in_c(expression: str, value: int) -> None:
    assert Cursor(expression).integer("a test value") == value


def test_comments_blanks_and_several_instructions_a_line() -> None:
    k = kernel("mov.u32 %r1, /* one;\ntwo */ 1; add .s32 %r2, // {\n  %r1,\n  2; ret;")
    assert [i.text for i in k.instrs] == ["mov.u32 %r1, 1", "add .s32 %r2, %r1, 2", "ret"]
    assert [i.name for i in k.instrs] == ["mov.u32", "add.s32", "ret"]
    first = k.instrs[0].line
    assert [i.line - first for i in k.instrs] == [0, 1, 3]


def test_source_lines_come_from_loc_and_line_zero_is_no_line() -> None:
    text = (
        ".version 9.0\n.target sm_90\n.address_size 64\n.entry k() {\n.reg .b32 %r<3>;\nmov.u32 %r1, 1;\n"
        ".loc 1 12 3\nmov.u32 %r1, 2;\n.loc 1 0 3\nmov.u32 %r1, 3;\n"
        ".loc 1 27 3\n.loc 2 10 5, function_name names, inlined_at 1 27 3\n"
        ".loc 2 15 3, function_name names+4, inlined_at 2 10 5\nmov.u32 %r1, 4;\nret;\n}\n"
        '.file 1 "a.cu"\n.file 2 "b.cuh", 123, 456\n'
        ".section .debug_str { names: .b8 95, 102, 111, 0\n.b8 103,0 }\n"
        ".section .debug_loc { .b8 1 .b32 .debug_str }\n.section .debug_macinfo { }\n"
    )
    module = parse(text)
    a, b, c, d, _ = module.kernels["k"].instrs
    assert a.source is None and c.source is None
    assert str(b.source) == "a.cu:12"
    assert str(d.source) == "a.cu:27 (inlined from b.cuh:15)"
    assert d.source is not None and d.source.function == "g"
    assert module.files == {1: "a.cu", 2: "b.cuh"}


def test_the_line_of_a_helper_in_the_kernels_own_file_goes_before_its_call() -> None:
    call = SourceLine("/k/a.cu", 103)
    wait = SourceLine("/k/a.cu", 72, call, "consume")
    assert str(wait) == "a.cu:72"
    assert str(SourceLine("/k/ptx.cuh", 210, wait, "wait_parity")) == "a.cu:72 (inlined from ptx.cuh:210)"


# --------------------------------------------------------------------------------------- scopes and labels


def test_names_of_inner_blocks_are_their_own() -> None:
    k = kernel(
        "mov.u32 %r1, 1;\n"
        "{ .reg .pred q; .reg .b32 %r1; LAB: setp.eq.s32 q, %r1, 0; @!q bra LAB; }\n"
        "{ .reg .pred q; LAB: setp.eq.s32 q, %r1, 0; @!q bra.uni LAB; }\n"
    )
    first, second = k.instrs[1], k.instrs[3]
    assert first.operands == (Reg("q@1"), Reg("%r1@1"), Imm(0))
    assert second.operands == (Reg("q@2"), Reg("%r1"), Imm(0))
    assert k.labels == {"LAB@1": 1, "LAB@2": 3}
    assert k.instrs[2].operands == (LabelRef("LAB@1"),) and k.instrs[4].operands == (LabelRef("LAB@2"),)
    assert k.registers["q@1"] == k.registers["q@2"] == "pred" and k.registers["%r1@1"] == "b32"


def test_a_branch_in_one_block_reaches_a_label_of_the_function() -> None:
    k = kernel("{ @%p1 bra DONE; }\nmov.u32 %r1, 1;\n{ { bra.uni DONE; } }\nDONE: ret;")
    assert k.instrs[0].operands == k.instrs[2].operands == (LabelRef("DONE"),)
    assert k.labels == {"DONE": 3}


def test_a_label_at_the_very_end_points_behind_the_last_instruction() -> None:
    assert kernel("bra END; ret; END:").labels == {"END": 2}


@pytest.mark.parametrize(
    ("code", "rule", "says"),
    [
        ("bra L; { L: ret; }", "ptx.label", "unknown label 'L'"),
        ("{ bra L; } { L: ret; }", "ptx.label", "inner or neighbouring block"),
        ("{ .reg .b32 q; } mov.u32 %r1, q;", "ptx.undeclared", "'q'"),
        ("mov.u32 %x7, 1;", "ptx.undeclared", "register %x7 is not declared"),
        ("mov.u32 %r9, 1;", "ptx.undeclared", "register %r9"),
        (".reg .b32 %r3;", "ptx.duplicate", "'%r3' is declared twice"),
        ("L: L: ret;", "ptx.duplicate", "label 'L' is defined twice"),
        ("@%r1 bra L; L: ret;", "ptx.guard", "%r1 is no predicate"),
        ("ld.shared.u32 %r1, [%r2-4];", "ptx.syntax", "[reg+-4]"),
        ("mov.u32 %r1 1;", "ptx.syntax", "expected ';' after mov"),
        ("mov.u32 %r1, `;", "ptx.syntax", "'`' starts no PTX token"),
        (".foo 3;", "ptx.directive", "'.foo'"),
        (".reg .b33 %z;", "ptx.type", "'.b33' is no PTX type"),
        (".shared .align 3 .b8 s[4];", "ptx.align", "power of two, got 3"),
        (".shared .b32 s = 4;", "ptx.init", "s is .shared"),
        (".loc 1 x 3", "ptx.syntax", ".loc takes file, line and column"),
        ("mov.u32 %r1, 1/0;", "ptx.syntax", "division by zero"),
        (";", "ptx.syntax", "expected an instruction"),
    ],
)
def test_what_is_malformed_is_refused_with_its_line(code: str, rule: str, says: str) -> None:
    text = f".version 9.0\n.target sm_90\n.address_size 64\n.entry k() {{ {REGISTERS}\n\n{code}\nret; }}\n"
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert caught.value.rule == rule
    assert says in str(caught.value)
    assert caught.value.line in (6, 7) and f"PTX line {caught.value.line}" in str(caught.value)


@pytest.mark.parametrize("text", [".entry k() { ret;", ".entry k() { .reg .b32", ".entry k(", ".entry"])
def test_a_text_that_ends_early_is_an_error_not_a_crash(text: str) -> None:
    with pytest.raises(PtxError):
        parse(f".version 9.0\n.target sm_90\n{text}")


@example("L(09")  # no octal number
@given(st.text(alphabet=' {}[](),;:@!|_%.rp0x19\n"/*abL-+<>', max_size=60))
def test_any_text_parses_or_is_refused(code: str) -> None:
    text = f".version 9.0\n.target sm_90\n.address_size 64\n.entry k() {{ {REGISTERS}\n{code}\n}}\n"
    try:
        parse(text)
    except (PtxError, Unsupported) as error:
        assert str(error)


@pytest.mark.parametrize(
    ("body", "module", "rule"),
    [
        (".reg .v4 .f32 %v;", "", "ptx.vector_register"),
        ("ret;", ".global .texref t;", "ptx.texture"),
        ("ret;", ".global .u8 b[2] = {0xFF(c), 1};", "ptx.init"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(body: str, module: str, rule: str) -> None:
    with pytest.raises(Unsupported) as caught:
        kernel(body, module=module)
    assert caught.value.rule == rule and "PTX line" in str(caught.value)


# --------------------------------------------------------------------------------- declarations and layout


def test_directives_of_a_kernel() -> None:
    k = kernel(
        "ret;",
        head=".reqntid 32, 4 .minnctapersm 2 .maxnreg 64 .reqnctapercluster 2, 2, 1 .explicitcluster "
        '.pragma "nounroll"; .noreturn',
    )
    assert k.reqntid == (32, 4, 1) and k.maxntid is None and k.maxnreg == 64
    assert k.cluster_dims == (2, 2, 1) and k.explicit_cluster and k.maxclusterrank is None
    assert kernel("ret;", head=".maxclusterrank 8").maxclusterrank == 8


def test_pointer_attributes_and_parameter_layout() -> None:
    k = kernel(
        "ld.param.u64 %rd1, [a]; ret;",
        params=".param .u64 .ptr .global .align 16 a, .param .u8 b, .param .align 64 .b8 map[128], "
        ".param .u64 .ptr c, .param .u16 d, .param .align 16 .b8 e[16], .param .f32 f[3], .param .v2 .u32 g",
    )
    a, b, m, c, d, e, f, g = k.params
    assert (a.is_pointer, a.pointer_space, a.pointer_align) == (True, "global", 16)
    assert (c.is_pointer, c.pointer_space, b.is_pointer) == (True, None, False)
    assert [p.offset for p in (a, b, m, c, d, e, f, g)] == [0, 8, 64, 192, 200, 208, 224, 240]
    assert [p.size_bytes for p in (f, g)] == [12, 8] and k.params_bytes == 248


def test_shared_layout_static_in_order_then_dynamic() -> None:
    k = kernel(
        ".shared .align 4 .b8 a[6]; .shared .b64 b; { .shared .align 16 .b8 a[4]; mov.u32 %r1, a; }\n"
        "mov.u32 %r1, late; mov.u32 %r2, big; mov.u32 %r3, small; ret;",
        module=".shared .u16 late; .shared .b8 unused[999]; .extern .shared .align 128 .b8 big[]; "
        ".extern .shared .align 16 .b8 small[];",
    )
    assert {n: v.offset for n, v in k.shared.items() if v.size_bytes} == {
        "late": 0,
        "a": 4,
        "b": 16,
        "a@1": 32,
    }
    assert "unused" not in k.shared and k.static_shared_bytes == 36 and k.dynamic_align == 128
    assert k.shared["big"].offset == k.shared["small"].offset == k.dynamic_shared_offset == 128


def test_shared_variables_of_called_functions_belong_to_the_kernel() -> None:
    text = (
        ".version 9.0\n.target sm_90\n.address_size 64\n.shared .b64 s;\n"
        ".func f() { .reg .b32 %r; mov.u32 %r, s; ret; }\n.func g() { call.uni f; ret; }\n"
        ".entry k() { call.uni g, (); ret; }\n.entry other() { ret; }\n"
    )
    module = parse(text)
    assert module.kernels["k"].static_shared_bytes == 8 and module.kernels["other"].static_shared_bytes == 0


def test_initialisers() -> None:
    module = parse(
        ".version 9.0\n.target sm_90\n.address_size 64\n"
        ".const .f32 bias[] = {-1.0, 0f3F800000};\n.global .s32 x[3][2] = { {1,2}, {3} };\n"
        ".global .u32 n = 2+3;\n.global .v2 .u16 v = {1, 2};\n"
        ".visible .global .align 8 .b8 raw[4] = {255, 1};\n"
        ".global .u64 p[2] = {generic(x)+4, n};\n.extern .global .u32 elsewhere;\n"
        ".global .attribute(.managed) .s32 g;\n.global .f64 d = 1.5;\n"
    )
    g = module.globals
    assert g["bias"].size_bytes == 8 and g["bias"].init.hex() == "000080bf0000803f"
    assert g["x"].init.hex() == "0100000002000000" + "0300000000000000" and g["x"].size_bytes == 24
    assert g["n"].init == b"\x05\0\0\0" and g["v"].init == b"\1\0\2\0" and g["raw"].init == b"\xff\x01"
    assert g["p"].relocations == ((0, Symbol("x", 4)), (8, Symbol("n")))
    assert g["elsewhere"].is_extern and g["g"].managed and g["d"].init.hex() == "000000000000f83f"


def test_branch_target_lists_and_call_prototypes() -> None:
    k = kernel(
        "L0: L1: L2: ts: .branchtargets L<3>; brx.idx %r1, ts;\n"
        "proto: .callprototype (.param .b32 _) _ (.param .b32 _);\n"
        "{ .param .b32 in; .param .b32 out; call (out), %rd1, (in), proto; } ret;"
    )
    assert k.branch_targets == {"ts": ("L0", "L1", "L2")}
    assert k.instrs[0].operands == (Reg("%r1"), LabelRef("ts"))
    assert k.instrs[1].operands == (
        ArgList((Symbol("out@1"),)),
        Reg("%rd1"),
        ArgList((Symbol("in@1"),)),
        LabelRef("proto"),
    )


@pytest.mark.parametrize("version", ["6.0", "8.8", "9.5", "12.0"])
def test_any_version_is_accepted(version: str) -> None:
    module = parse(f".version {version}\n.target sm_80, debug\n.address_size 64\n.entry k() {{ ret; }}\n\0")
    assert module.version == version and module.target_options == ("debug",)


def test_32_bit_addresses_are_refused() -> None:
    with pytest.raises(PtxError, match="compile for 64 bits"):
        parse(".version 9.0\n.target sm_80\n.address_size 32\n")
