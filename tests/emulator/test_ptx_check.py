"""The rules of the assembler: the same table goes through our checks and through the real ptxas."""

from __future__ import annotations

from pathlib import Path

import pytest

from smfree.emulator.errors import EmulationError, PtxError
from smfree.emulator.ptx.check import check, load, violations
from smfree.emulator.ptx.parser import parse
from smfree.emulator.ptx.rules import Target
from tests.emulator.ptx_kit import module_text, modules_text, nvrtc_ptx, ptxas_all


def _table() -> list[tuple[str, str, str]]:
    """(target, "ok" or the rule, code) of ptx_verdicts.txt."""
    rows = []
    for line in Path(__file__).with_name("ptx_verdicts.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            target, verdict, code = line.split(" | ", 2)
            rows.append((target, verdict, code))
    return rows


def _our_verdict(target: str, code: str) -> str:
    try:
        load(module_text(code, target))
    except EmulationError as error:
        return error.rule
    return "ok"


def test_every_row_gets_the_verdict_of_the_table() -> None:
    wrong = [
        f"{target} {code}: {got}, not {verdict}"
        for target, verdict, code in _table()
        if (got := _our_verdict(target, code)) != verdict
    ]
    assert not wrong, "\n".join(wrong)


def test_ptxas_accepts_what_we_accept() -> None:
    by_target: dict[str, list[str]] = {}
    for target, verdict, code in _table():
        if verdict == "ok":
            by_target.setdefault(target, []).append(code)
    assert sum(map(len, by_target.values())) > 150
    verdicts = ptxas_all([(modules_text(codes, target), target) for target, codes in by_target.items()])
    assert not [v.log for v in verdicts if not v.accepted]


def test_ptxas_refuses_what_we_refuse() -> None:
    refused = [(target, code) for target, verdict, code in _table() if verdict != "ok"]
    assert len(refused) > 150
    verdicts = ptxas_all([(module_text(code, target), target) for target, code in refused])
    assert not [case for case, judged in zip(refused, verdicts, strict=True) if judged.accepted]


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("sm_80", "cp.async.ca.shared.global [%r2], [%rd1], 2;", "4, 8 or 16 bytes, got 2; split or pad"),
        ("sm_80", "cp.async.ca.shared.global [%r2], [%rd1], 12;", "4, 8 or 16 bytes, got 12"),
        ("sm_80", "cp.async.cg.shared.global [%r2], [%rd1], 8;", "16 bytes, got 8; use .ca"),
        ("sm_80", "cp.async.cg.shared.global [%r2], [%rd1], 16, 20;", "0 to cp-size (16), got 20"),
        (
            "sm_90",
            "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 20;",
            "multiple of 16 bytes, got 20; copy the rest by threads",
        ),
        (
            "sm_80",
            "mbarrier.invalid.shared.b64 [%r2];",
            "no instruction is called mbarrier.invalid.shared.b64",
        ),
        ("sm_80", "mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 2;", "0 or 1, got 2; pass phase & 1"),
        (
            "sm_80",
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 64;",
            "needs sm_90, the target is sm_80",
        ),
        (
            "sm_90",
            "mbarrier.arrive.expect_tx.shared::cta.b64 [%r2], 64;",
            "write a register or '_' first: mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], n;",
        ),
        (
            "sm_90",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 %rd3, [%r2];",
            "returns no state; write '_'",
        ),
        ("sm_90a", "setmaxnreg.inc.sync.aligned.u32 16;", "24 to 256 registers, got 16"),
        ("sm_90a", "setmaxnreg.dec.sync.aligned.u32 28;", "multiple of 8, got 28; use 24"),
        ("sm_90", "setmaxnreg.dec.sync.aligned.u32 24;", "exists on sm_90a, sm_100a"),
        (
            "sm_90a",
            "ld.global.v8.b32 {%r4,%r5,%r6,%r7,%r8,%r9,%r10,%r11}, [%rd1];",
            "32-byte accesses need sm_100, the target is sm_90a; use .v4.b32",
        ),
        ("sm_80", "bar.sync 1, 33;", "multiple of 32, got 33"),
        ("sm_80", "bar.sync 16;", "barriers 0 to 15, got 16"),
        ("sm_80", "fence.mbarrier_init.release.cluster;", "bar.sync makes the initialisation visible"),
        (
            "sm_90",
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r3}], [%r2];",
            ".2d takes 2 coordinates, got 1; innermost comes first",
        ),
        (
            "sm_90",
            "cp.async.bulk.shared::cta.global.bulk_group [%r2], [%rd1], 16;",
            "does not go with shared::cta <- global; use .mbarrier::complete_tx::bytes",
        ),
    ],
)
def test_a_refusal_says_rule_value_and_remedy(target: str, code: str, says: str) -> None:
    text = module_text(code, target)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if code in row)
    with pytest.raises(PtxError) as caught:
        load(text)
    assert says in str(caught.value)
    assert f"PTX line {line}:" in str(caught.value)


def test_a_refusal_names_the_source_line() -> None:
    source = """
extern "C" __global__ void k(unsigned bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 64;" :: "r"(bar) : "memory");
}"""
    with pytest.raises(PtxError, match=r"case\.cu:3\): mbarrier\.expect_tx needs sm_90"):
        load(nvrtc_ptx(source, "compute_80"))
    load(nvrtc_ptx(source, "compute_90a"))


def test_every_violation_is_listed_in_order() -> None:
    text = module_text("bar.sync 16;\n bar.sync 1, 33;\n cp.async.wait_group %r1;", "sm_80")
    assert [v.rule for v in violations(parse(text))] == ["bar.id", "bar.threads", "cp.async.wait_group"]


FAMILIES_CU = """
typedef unsigned u32; typedef unsigned long long u64; typedef long long s64;
extern "C" __global__ void warp(int* o) {
  int v = threadIdx.x;
  for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
  u32 b = __ballot_sync(~0u, v > 3);
  o[threadIdx.x] = v + __popc(b) + __any_sync(~0u, v) + __clz(v) + __ffs(v) + __byte_perm(v, b, 0x3210)
                 + (int)(clock64() & 1) + __reduce_add_sync(~0u, v) + __match_any_sync(~0u, v);
  o[2] = __activemask();
  __syncwarp();
  int n = __syncthreads_count(v);
  o[1] = n + __syncthreads_or(v > 1);
}
extern "C" __global__ void arithmetic(double* d, float* f, s64* l, u32* u) {
  int i = threadIdx.x;
  d[i] = sqrt(d[i]) / d[i + 1] + fma(d[i], 2.0, 1.0) + fabs(d[i + 2]);
  f[i] = rsqrtf(f[i]) * __expf(f[i]) + __logf(f[i]) + f[i] / f[i + 3] + fminf(f[i], 2.f) + sinf(f[i + 4]);
  l[i] = l[i] * l[i + 1] / 3 + __mul64hi(l[i], l[i + 2]) + l[i] % 7 + __double2ll_rn(d[i]) + (l[i] >> i);
  u[i] = __umulhi(u[i], u[i + 1]) + __funnelshift_l(u[i], u[i + 1], 7) + __brev(u[i]);
  u[i] += u[i] < 5 ? u[i + 3] : ~u[i];
  u[i + 9] = (u[i] & u[i + 1]) + (unsigned char)u[i + 2];
  f[i + 9] = __int2float_rn((int)l[i]) + __uint_as_float(u[i]) + (float)d[i] + (short)f[i];
}
extern "C" __global__ void memory(volatile int* p, int* q, float4* v, s64* w) {
  while (p[0] == 0) ;
  __threadfence();
  atomicAdd(q, 1); atomicCAS(q, 1, 2); atomicExch(q + 1, 3); atomicMin(q, 3); atomicAdd((float*)q, 1.f);
  atomicAdd((u64*)w, 5ull); atomicOr((u32*)q, 5u); atomicAdd((double*)w, 1.0);
  v[threadIdx.x] = __ldg(v + 3); __stcs(v + 1, __ldcg(v + 2));
  __threadfence_system();
  __nanosleep(100);
  switch (q[3]) {
    case 0: q[0] = 5; break;
    case 1: q[1] = 7; break;
    case 2: q[2] = 1; break;
    case 5: q[7] = 2; break;
  }
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("debug", [False, True], ids=["release", "debug"])
def test_what_nvrtc_emits_breaks_no_rule(arch: str, debug: bool) -> None:
    module = load(nvrtc_ptx(FAMILIES_CU, arch, *(["--device-debug"] if debug else [])))
    assert set(module.kernels) == {"warp", "arithmetic", "memory"}
    assert sum(len(k.instrs) for k in module.kernels.values()) > 250


@pytest.mark.parametrize(
    ("text", "target"), [("sm_90a", Target(90, "a")), ("sm_100f", Target(100, "f")), ("sm_75", Target(75))]
)
def test_targets(text: str, target: Target) -> None:
    assert Target.parse(text) == target and str(target) == text


def test_a_clean_module_passes() -> None:
    check(parse(module_text("bar.sync 0;", "sm_80")))
