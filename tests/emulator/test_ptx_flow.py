"""Control flow and liveness, against hand-made answers and against brute force on random programs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.errors import Unsupported
from smfree.emulator.ptx import effects
from smfree.emulator.ptx.ast import Kernel, LabelRef
from smfree.emulator.ptx.flow import KNOWN, Flow, analyse, flow_of
from smfree.emulator.ptx.parser import parse
from tests.emulator.ptx_kit import nvrtc_ptx

REGISTERS = ".reg .pred %p<4>; .reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .f32 %f<70>;"


def kernel(body: str) -> Kernel:
    """The kernel with this body, registers declared."""
    return parse(
        f".version 9.0\n.target sm_90a\n.address_size 64\n.entry k() {{ {REGISTERS}\n{body}\n}}\n"
    ).kernels["k"]


def flow(body: str) -> Flow:
    """The analysis of :func:`kernel`."""
    return analyse(kernel(body))


# ------------------------------------------------------------------------------------- blocks, dominators


def test_if_else_meets_behind_both_arms() -> None:
    f = flow("@%p1 bra A; mov.u32 %r1, 1; bra B; A: mov.u32 %r1, 2; B: mov.u32 %r2, %r1; ret;")
    assert f.leaders == (0, 1, 3, 4)
    assert f.block_of == (0, 1, 1, 2, 3, 3)
    assert f.successors == ((1, 2), (3,), (3,), (4,)) and f.exit == 4
    assert f.predecessors[3] == (1, 2) and f.predecessors[f.exit] == (3,)
    assert f.idom == (None, 0, 0, 0, 3)
    assert f.ipdom == (3, 3, 3, 4, None)
    assert f.ipdom_pc == {0: 4}
    assert f.dominates(0, 3) and not f.dominates(1, 3)


def test_a_loop_meets_behind_itself() -> None:
    f = flow("mov.u32 %r1, 0; L: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 9; @%p1 bra L; ret;")
    assert f.leaders == (0, 1, 4) and f.ipdom_pc == {3: 4}


def test_a_guarded_return_leaves_nothing_to_meet_at() -> None:
    f = flow("@%p1 bra A; mov.u32 %r1, 1; @%p2 ret; A: mov.u32 %r2, %r1;")
    assert f.leaders == (0, 1, 3) and f.successors == ((1, 2), (2, 3), (3,))
    assert f.ipdom_pc == {0: None}


def test_a_branch_into_an_arm_that_returns_has_no_meeting_point() -> None:
    assert flow("@%p1 bra A; ret; A: mov.u32 %r1, 1; exit;").ipdom_pc == {0: None}


def test_branches_inside_an_endless_loop_still_meet() -> None:
    f = flow("L: @%p1 bra A; mov.u32 %r1, 1; A: mov.u32 %r2, 2; bra L;")
    assert f.ipdom_pc == {0: 2}


def test_two_endless_loops_behind_one_branch_never_meet() -> None:
    f = flow("@%p1 bra B; A: mov.u32 %r1, 1; bra A; B: @%p2 bra C; mov.u32 %r2, 1; C: bra B;")
    assert f.ipdom_pc == {0: None, 3: 5}


def test_only_branch_targets_start_a_block() -> None:
    assert flow("TMP: mov.u32 %r1, 1; DEBUG: mov.u32 %r2, 1; ret; END:").leaders == (0,)


def test_a_branch_to_the_very_end_is_a_way_out() -> None:
    f = flow("@%p1 bra END; mov.u32 %r1, 1; END:")
    assert f.successors == ((1, 2), (2,)) and f.ipdom_pc == {0: None}


def test_unreachable_code_has_no_dominator() -> None:
    f = flow("ret; mov.u32 %r1, 1; ret;")
    assert f.idom == (None, None, 0) and f.live_in[1] == frozenset()


def test_an_empty_kernel() -> None:
    f = flow("")
    assert f.leaders == () and f.ipdom_pc == {} and f.live_at(0) == frozenset()


def test_indirect_branches_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"indirect branch 'brx\.idx %r1, ts' is not modelled"):
        flow("A: ts: .branchtargets A; brx.idx %r1, ts;")


# ----------------------------------------------------------------------------------------------- liveness


def test_a_guarded_write_does_not_kill() -> None:
    f = flow("@%p1 mov.u32 %r1, 1; st.shared.u32 [%r2], %r1; ret;")
    assert f.live_in[0] == {"%p1", "%r1", "%r2"}
    assert f.live_at(1) == {"%r1", "%r2"} and f.live_at(2) == frozenset()


@pytest.mark.parametrize(
    ("code", "reads", "writes"),
    [
        ("ld.shared.v4.u32 {%r1, %r2, _, %r3}, [%r4+16];", "%r4", "%r1 %r2 %r3"),
        ("st.shared.v2.u32 [%r1], {%r2, %r3};", "%r1 %r2 %r3", ""),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];", "%r1 %r2 %r3", ""),
        ("setp.lt.and.s32 %p1|%p2, %r1, 5, !%p3;", "%r1 %p3", "%p1 %p2"),
        ("elect.sync _|%p1, %r1;", "%r1", "%p1"),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", "%r2", "%r1 %p1"),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", "%rd1 %r2", "%r1"),
        ("red.global.add.u32 [%rd1], %r2;", "%rd1 %r2", ""),
        ("mbarrier.init.shared::cta.b64 [%r1], %r2;", "%r1 %r2", ""),
        ("mbarrier.arrive.shared::cta.b64 %rd1, [%r1], %r2;", "%r1 %r2", "%rd1"),
        ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;", "%r1 %r2", ""),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r2;", "%r1 %r2", ""),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2, %r3;", "%r1 %r2 %r3", "%p1"),
        ("mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd1;", "%r1 %rd1", "%p1"),
        ("mbarrier.pending_count.b64 %r1, %rd1;", "%rd1", "%r1"),
        ("mbarrier.inval.shared::cta.b64 [%r1];", "%r1", ""),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", "%r1 %rd1 %r2", ""),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
            "[%r1], [%rd1, {%r2, %r3}], [%r4];",
            "%r1 %rd1 %r2 %r3 %r4",
            "",
        ),
        ("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1];", "%rd1 %r1 %r2", ""),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];", "%r1", ""),
        ("bar.sync %r1, %r2;", "%r1 %r2", ""),
        ("bar.red.popc.u32 %r1, %r2, !%p1;", "%r2 %p1", "%r1"),
        ("barrier.cluster.arrive.aligned;", "", ""),
        ("fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;", "%rd1", ""),
        ("prefetch.tensormap [%rd1];", "%rd1", ""),
        ("mov.b64 {%r1, %r2}, %rd1;", "%rd1", "%r1 %r2"),
        ("mov.u32 %r1, %tid.x;", "", "%r1"),
        ("selp.b32 %r1, %r1, 2, %p1;", "%r1 %p1", "%r1"),
        ("createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0;", "", "%rd1"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r3];", "%r3", "%r1 %r2"),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};", "%r1 %r2", ""),
        (
            "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1,%r2}, {%r3}, {%r4}, {%r1,%r2};",
            "%r1 %r2 %r3 %r4",
            "%r1 %r2",
        ),
        ("setmaxnreg.dec.sync.aligned.u32 40;", "", ""),
        ("nanosleep.u32 %r1;", "%r1", ""),
        ("multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%rd1];", "%rd1", "%r1"),
        ("multimem.red.relaxed.sys.global.add.u32 [%rd1], %r1;", "%rd1 %r1", ""),
        ("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %rd1;", "%r1 %rd1", ""),
        ("add.cc.u32 %r1, %r2, %r3;", "%r2 %r3", "%r1 %cc"),
        ("addc.cc.u32 %r1, %r2, %r3;", "%r2 %r3 %cc", "%r1 %cc"),
        ("madc.hi.u32 %r1, %r2, %r3, %r4;", "%r2 %r3 %r4 %cc", "%r1"),
        ("@!%p1 add.s32 %r1, %r2, 1;", "%p1 %r2", "%r1"),
        ("ret;", "", ""),
    ],
)  # fmt: skip
def test_what_an_instruction_reads_and_writes(code: str, reads: str, writes: str) -> None:
    (instr,) = kernel(code).instrs
    assert effects.reads(instr) == set(reads.split())
    assert effects.writes(instr) == set(writes.split())
    assert effects.kills(instr) == (set() if instr.guard else set(writes.split()))


@pytest.mark.parametrize(
    "code",
    [
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
        "notyetknown.b32 {%f0, %f1, %f2, %f3}, %rd1;",
    ],
)
def test_accumulators_and_unknown_opcodes_keep_their_old_value_alive(code: str) -> None:
    (instr,) = kernel(code).instrs
    accumulator = {"%f0", "%f1", "%f2", "%f3"}
    assert accumulator < effects.reads(instr)
    assert effects.writes(instr) == accumulator and effects.kills(instr) == frozenset()


def test_a_call_writes_its_results() -> None:
    text = ".version 9.0\n.target sm_90\n.func (.param .b32 r) f(.param .b32 x);\n"
    k = parse(text + ".entry k() { .reg .b32 %r<4>; call.uni (%r1), f, (%r2); ret; }").kernels["k"]
    assert effects.reads(k.instrs[0]) == {"%r2"} and effects.writes(k.instrs[0]) == {"%r1"}


PIPELINE_CU = """
typedef unsigned u32; typedef unsigned long long u64;
__device__ __forceinline__ bool ready(u32 bar, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0,1,0,q; }"
               : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  return ok;
}
extern "C" __global__ void pipe(uint4* out, u32 n) {
  __shared__ uint4 tile[128];
  __shared__ u64 full[2];
  u32 bar = (u32)__cvta_generic_to_shared(full);
  for (u32 i = 0; i < n; ++i) {
    while (!ready(bar + 8 * (i & 1), i >> 1 & 1)) ;
    for (u32 j = threadIdx.x; j < 128; j += blockDim.x) out[i * 128 + j] = tile[j];
    __syncthreads();
  }
}
"""


@pytest.mark.parametrize("debug", [False, True], ids=["release", "debug"])
def test_compiled_code_needs_nothing_at_entry_and_reconverges_its_waits(debug: bool) -> None:
    k = parse(nvrtc_ptx(PIPELINE_CU, "sm_90a", *(["--device-debug"] if debug else []))).kernels["pipe"]
    f = analyse(k)
    assert f.live_in[0] == frozenset()
    wait = next(pc for pc, i in enumerate(k.instrs) if i.opcode == "mbarrier")
    last = f.block_range(f.block_of[wait]).stop - 1
    branch = next(pc for pc in sorted(f.ipdom_pc) if pc >= last)
    meet = f.ipdom_pc[branch]
    assert meet is not None and meet > branch
    assert all(meet in f.leaders for meet in f.ipdom_pc.values() if meet is not None)


# ---------------------------------------------------------------------------- random programs, brute force

Steps = list[tuple[str, int, int, int]]
_STEP = st.tuples(
    st.sampled_from(["def", "use", "guarded", "branch", "jump", "ret", "maybe"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 11),
)


def _program(steps: Steps) -> Kernel:
    lines = []
    for at, (kind, a, b, to) in enumerate(steps):
        target = f"L{to % (len(steps) + 1)}"
        code = {
            "def": f"mov.u32 %r{a}, {at};",
            "use": f"add.s32 %r{a}, %r{b}, 1;",
            "guarded": f"@%p1 mov.u32 %r{a}, %r{b};",
            "branch": f"@%p1 bra {target};",
            "jump": f"bra {target};",
            "ret": "ret;",
            "maybe": "@%p2 exit;",
        }[kind]
        lines.append(f"L{at}: {code}")
    return kernel("\n".join(lines) + f"\nL{len(steps)}:")


def _next_pcs(k: Kernel, pc: int) -> list[int]:
    instr, end = k.instrs[pc], len(k.instrs)
    ways = []
    if instr.opcode == "bra":
        target = instr.operands[0]
        assert isinstance(target, LabelRef)
        ways.append(k.labels[target.name])
    elif instr.opcode in ("ret", "exit"):
        ways.append(end)
    else:
        ways.append(pc + 1)
    if instr.guard is not None and instr.opcode in ("bra", "exit"):
        ways.append(pc + 1)
    return ways


def _reaches(k: Kernel, start: int, goal: int, avoid: int | None) -> bool:
    seen, todo = set(), [start]
    while todo:
        pc = todo.pop()
        if pc == goal:
            return True
        if pc in seen or pc == avoid or pc >= len(k.instrs):
            continue
        seen.add(pc)
        todo += _next_pcs(k, pc)
    return False


def _is_live(k: Kernel, register: str, start: int) -> bool:
    """Some path from ``start`` reads the register before it is overwritten without a guard."""
    seen, todo = set(), [start]
    while todo:
        pc = todo.pop()
        if pc in seen or pc >= len(k.instrs):
            continue
        seen.add(pc)
        instr = k.instrs[pc]
        if register in effects.reads(instr):
            return True
        if register not in effects.writes(instr) or instr.guard is not None:
            todo += _next_pcs(k, pc)
    return False


@settings(max_examples=150)
@given(st.lists(_STEP, min_size=1, max_size=12))
def test_liveness_is_what_paths_say(steps: Steps) -> None:
    k = _program(steps)
    f = analyse(k)
    for pc in range(len(k.instrs)):
        expected = {r for r in k.registers if _is_live(k, r, pc)}
        assert f.live_at(pc) == expected, f"pc {pc}: {k.instrs[pc].text}"
    assert all(f.live_in[pc] == f.live_at(pc) for pc in f.leaders)


@settings(max_examples=150)
@given(st.lists(_STEP, min_size=1, max_size=12))
def test_dominators_are_what_paths_say(steps: Steps) -> None:
    k = _program(steps)
    f = analyse(k)
    for below, start in enumerate(f.leaders):
        if not _reaches(k, 0, start, None):
            assert f.idom[below] is None
            continue
        above = {b for b, leader in enumerate(f.leaders) if b == below or not _reaches(k, 0, start, leader)}
        assert {b for b in range(f.exit) if f.dominates(b, below)} == above


@settings(max_examples=150)
@given(st.lists(_STEP, min_size=1, max_size=12))
def test_reconvergence_points_are_what_paths_say(steps: Steps) -> None:
    k = _program(steps)
    f = analyse(k)
    end = len(k.instrs)
    exits = [pc for pc in range(end) if _reaches(k, pc, end, None)]
    for branch, meet in f.ipdom_pc.items():
        if len(exits) < end:
            continue  # endless loops are given a way out of our own choice: see the examples above
        common = [
            pc for pc in f.leaders if all(not _reaches(k, way, end, pc) for way in _next_pcs(k, branch))
        ]
        if meet is None:
            assert not common
        else:
            assert meet in common
            assert all(pc == meet or not _reaches_first(k, branch, pc, meet) for pc in common)


def _reaches_first(k: Kernel, branch: int, pc: int, meet: int) -> bool:
    """Whether every way from the branch to ``meet`` passes ``pc`` first."""
    return all(not _reaches(k, way, meet, pc) for way in _next_pcs(k, branch))


def test_a_function_is_analysed_once_and_another_of_the_same_text_for_itself() -> None:
    """They are kept by identity: enough new ones push out the oldest."""
    body = "@%p1 bra A; mov.u32 %r1, 1; A: ret;"
    first = kernel(body)
    found = flow_of(first)
    assert flow_of(first) is found and found == analyse(first)
    others = [flow_of(kernel(body)) for _ in range(KNOWN)]
    assert all(other == found and other is not found for other in others)
    assert flow_of(first) == found and flow_of(first) is not found
