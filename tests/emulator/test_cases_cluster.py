"""Failures of clusters that others reported (docs/cases.md, section A), each beside a correct twin."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import Deadlock, EmulationError, MemoryFault
from tests.emulator.exec_kit import KERNELS, Machine, Outcome, cuda_kernel, every_schedule, report

ROUNDS = 6
SMEM = 'extern "C" __global__ void __cluster_dims__(2) k(u32* out)'


def run(
    source: str, *defines: str, schedule: str = "min-pc", strict: str = "error", block: int = 64
) -> Outcome:
    """A CUDA body on one cluster of two CTAs; ``out`` has ROUNDS words for each."""
    k = cuda_kernel(f'#include "ptx.cuh"\n{source}', f"-I{KERNELS / 'include'}", *defines)
    m = Machine(schedule, 5, strict)
    out = m.put(np.full(2 * ROUNDS, 99, np.uint32))
    result = m.launch(k, struct.pack("<Q", out), 2, block, cluster=2)
    return Outcome(m.get(out, 2 * ROUNDS), result, m, out)


# ------------------------------------------------------------------------------------ A07: who frees the slot

# Thread 0 of CTA 0 writes the slot of both CTAs, ROUNDS times. It is free when the consumers (thread 32) of
# both have arrived at CTA 0's `empty`.
_SLOT = f"""
{SMEM} {{
  __shared__ __align__(16) b32x4 slot;
  __shared__ u64 full, empty;
  const u32 rank = mov_cluster_ctarank();
  if (threadIdx.x == 0) {{
    mbarrier_init(smem_addr(&full), 1);
    mbarrier_init(smem_addr(&empty), COUNT);
    fence_mbarrier_init();
  }}
  barrier_cluster_arrive();
  barrier_cluster_wait();
  if (rank == 0 && threadIdx.x == 0)
    for (u32 i = 0; i < {ROUNDS}; ++i) {{
      wait_parity_cluster(smem_addr(&empty), i & 1 ^ 1);
      for (u32 peer = 0; peer < 2; ++peer) {{
        st_shared_cluster(mapa_shared_cluster(smem_addr(&slot), peer), b32x4{{i, i, i, i}});
        mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_addr(&full), peer));
      }}
    }}
  if (threadIdx.x == 32)
    for (u32 i = 0; i < {ROUNDS}; ++i) {{
      wait_parity_cluster(smem_addr(&full), i & 1);
      if (rank) asm volatile("nanosleep.u32 3000;");  // CTA 1 is slow
      b32x4 v;
      ld_shared(v, smem_addr(&slot));
      out[rank * {ROUNDS} + i] = v.x;
      mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_addr(&empty), RELEASE));
    }}
  __syncwarp();
  barrier_cluster_arrive();
  barrier_cluster_wait();
}}"""


@every_schedule
def test_a07_a_slot_is_free_when_the_consumers_of_both_ctas_have_arrived(schedule: str) -> None:
    got = run(_SLOT, "-DCOUNT=2", "-DRELEASE=0", schedule=schedule)
    assert got.out.tolist() == 2 * list(range(ROUNDS))


@every_schedule
def test_a07_local_release_of_a_slot_that_counts_two_ctas_hangs(schedule: str) -> None:
    with report(
        "empty of CTA 0, phase 0 (parity 0): no bytes announced, 1 of 2 arrivals missing (arrived: CTA 0); "
        "waiting: CTA 0 thread 0",
        "full of CTA 1, phase 1", "waiting: CTA 1 thread 32",
        "cluster barrier of CTA 0, CTA 1, phase 1: 96 of 128 threads missing (CTA 0 threads 0-63; CTA 1 "
        "threads 32-63); waiting: CTA 1 threads 0-31",
        kind=Deadlock,
    ):  # fmt: skip
        run(_SLOT, "-DCOUNT=2", "-DRELEASE=rank", schedule=schedule)


@every_schedule
def test_a07_two_releases_of_a_slot_that_counts_one(schedule: str) -> None:
    """Phases run twice as fast: an arrival too early, or the producer writes over what is read."""
    try:
        got = run(_SLOT, "-DCOUNT=1", "-DRELEASE=0", schedule=schedule)
    except EmulationError as fault:
        phrase = {
            "mbarrier.overflow": "more arrivals than phase 0 expects: 2 by 2 lanes at once, 1 of 1 pending",
            "mbarrier.early_arrive": "before any successful wait on phase",
            "mbarrier.overrun": "lanes still wait for phase",
        }[fault.rule]
        assert phrase in str(fault) and re.search(r"mbarrier at shared\+0x\w+ \(\w+ of CTA", str(fault))
    else:
        assert got.out.tolist() != 2 * list(range(ROUNDS))


# ---------------------------------------------------------------------------------- A17: a peer that has left

_LEAVES = f"""
{SMEM} {{
  __shared__ u64 full;
  if (threadIdx.x == 0) {{
    mbarrier_init(smem_addr(&full), 1);
    fence_mbarrier_init();
  }}
  barrier_cluster_arrive();
  barrier_cluster_wait();
  if (mov_cluster_ctarank() == 0) {{
    for (u32 turns = 0; AFTER_THE_OTHER && turns < 9000; ++turns)  // then CTA 1 has long returned
      while (((volatile u32*)out)[{ROUNDS}] == 99) {{}}
    if (threadIdx.x == 0) mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_addr(&full), 1));
  }} else if (threadIdx.x == 0) {{
    if (!AFTER_THE_OTHER) wait_parity_cluster(smem_addr(&full), 0);  // the closing wait
    out[{ROUNDS}] = 1;
  }}
}}"""


@every_schedule
def test_a17_an_arrival_at_a_cta_that_has_returned(schedule: str) -> None:
    with report(
        "CTA 0 touches the shared memory of CTA 1, which has exited", "CTA 1 must stay",
        "at CTA 0 thread 0", "mbarrier.arrive.release.cluster.shared::cluster.b64",
        rule="cluster.exited", kind=MemoryFault,
    ):  # fmt: skip
        run(_LEAVES, "-DAFTER_THE_OTHER=1", schedule=schedule, block=1)
    assert run(_LEAVES, "-DAFTER_THE_OTHER=0", schedule=schedule, block=1).out[ROUNDS] == 1


# --------------------------------------------------------------------------- A20: a peer that may not run yet

_EARLY = f"""
{SMEM} {{
  __shared__ __align__(16) b32x4 value;
  const u32 rank = mov_cluster_ctarank();
#if ENTRY_BARRIER
  if (rank == 1 && threadIdx.x == 0) st_shared(smem_addr(&value), b32x4{{7, 7, 7, 7}});
  barrier_cluster_arrive();
  barrier_cluster_wait();
#endif
  if (rank == 0 && threadIdx.x == 0)
    st_shared_cluster(mapa_shared_cluster(smem_addr(&value), 1), b32x4{{5, 5, 5, 5}});
#if !ENTRY_BARRIER
  if (rank == 1 && threadIdx.x == 0) st_shared(smem_addr(&value), b32x4{{7, 7, 7, 7}});
#endif
  barrier_cluster_arrive();
  barrier_cluster_wait();
  b32x4 v;
  if (rank == 1 && threadIdx.x == 0) ld_shared(v, smem_addr(&value)), out[0] = v.x;
}}"""


@every_schedule
def test_a20_a_store_to_a_peer_at_entry(schedule: str) -> None:
    with report(
        "CTA 0 touches the shared memory of CTA 1 before anything has proven that it has started",
        "barrier.cluster.arrive and .wait", "st.shared::cluster",
        rule="cluster.not_started", kind=MemoryFault,
    ):  # fmt: skip
        run(_EARLY, "-DENTRY_BARRIER=0", schedule=schedule)
    assert run(_EARLY, "-DENTRY_BARRIER=1", schedule=schedule).out[0] == 5


def test_a20_is_told_once_per_cta_where_findings_are_recorded() -> None:
    got = run(_EARLY, "-DENTRY_BARRIER=0", strict="record", block=32)
    assert [f.rule for f in got.result.findings] == ["cluster.not_started"]


@every_schedule
def test_a20_an_arrival_of_the_peer_proves_that_it_runs(schedule: str) -> None:
    """CTA 1 alone needs the cluster barrier; CTA 0 has its arrival."""
    source = f"""
    {SMEM} {{
      __shared__ __align__(16) b32x4 value;
      __shared__ u64 here;
      const u32 rank = mov_cluster_ctarank();
      if (threadIdx.x == 0) {{
        mbarrier_init(smem_addr(&here), 1);
        fence_mbarrier_init();
      }}
      barrier_cluster_arrive();
      if (rank == 1) {{
        barrier_cluster_wait();
        if (threadIdx.x == 0) mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_addr(&here), 0));
      }} else {{
        wait_parity_cluster(smem_addr(&here), 0);
        if (threadIdx.x == 0)
          st_shared_cluster(mapa_shared_cluster(smem_addr(&value), 1), b32x4{{5, 5, 5, 5}});
        barrier_cluster_wait();
      }}
      barrier_cluster_arrive();
      barrier_cluster_wait();
      b32x4 v;
      if (rank == 1 && threadIdx.x == 0) ld_shared(v, smem_addr(&value)), out[0] = v.x;
    }}"""
    assert run(source, schedule=schedule).out[0] == 5


def test_a20_an_arrival_at_the_cluster_barrier_is_no_proof() -> None:
    source = _EARLY.replace("barrier_cluster_wait();\n#endif", "#endif").replace(
        "#if !ENTRY_BARRIER\n", "barrier_cluster_wait();\n#if !ENTRY_BARRIER\n"
    )
    for schedule in ("min-pc", "timed", "random"):
        with report("CTA 0 touches the shared memory of CTA 1 before", rule="cluster.not_started"):
            run(source, "-DENTRY_BARRIER=1", schedule=schedule, block=32)


# ------------------------------------------------------------------------- A23: a peer's address, local forms

_FORMS = f"""
{SMEM} {{
  __shared__ u64 bar;
  __shared__ __align__(16) b32x4 value;
  const u32 rank = mov_cluster_ctarank();
  if (threadIdx.x == 0) {{
    mbarrier_init(smem_addr(&bar), 1);
    fence_mbarrier_init();
    st_shared(smem_addr(&value), b32x4{{rank, rank, rank, rank}});
  }}
  barrier_cluster_arrive();
  barrier_cluster_wait();
  if (rank == 0 && threadIdx.x == 0) {{
    const u32 theirs = mapa_shared_cluster(smem_addr(&bar), PEER);
    const u32 data = mapa_shared_cluster(smem_addr(&value), PEER);
    b32x4 v = {{1, 2, 3, 4}};
    FORM;
  }}
  barrier_cluster_arrive();
  barrier_cluster_wait();
}}"""
_NEEDS = "needs .shared::cluster"
_OWN = "mbarrier.init, inval and the waits act on barriers of the own CTA only"


@pytest.mark.parametrize(
    ("form", "text", "remedy"),
    [
        ("mbarrier_arrive(theirs)", "mbarrier.arrive.shared::cta.b64", _NEEDS),
        ("mbarrier_arrive_expect_tx(theirs, 0)", "mbarrier.arrive.expect_tx.release.cta.shared::cta", _NEEDS),
        ("mbarrier_expect_tx(theirs, 0)", "mbarrier.expect_tx.relaxed.cta.shared::cta.b64", _NEEDS),
        ("ld_shared(v, data)", "ld.shared", _NEEDS),
        ("st_shared(data, v)", "st.shared", _NEEDS),
        ("mbarrier_init(theirs, 1)", "mbarrier.init", _OWN),
        ("mbarrier_try_wait_parity_relaxed_cluster(theirs, 1)", "mbarrier.try_wait.parity", _OWN),
        ("mbarrier_test_wait_parity(theirs, 1)", "mbarrier.test_wait.parity", _OWN),
    ],
)
def test_a23_a_peers_address_in_a_form_for_the_own_cta(form: str, text: str, remedy: str) -> None:
    with report(
        "address belongs to CTA 1 of the cluster (rank 1), CTA 0 executes", remedy, "at CTA 0 thread 0", text,
        rule="cluster.own", kind=MemoryFault,
    ):  # fmt: skip
        run(_FORMS, f"-DFORM={form}", "-DPEER=1", block=32)
    if not form.startswith("mbarrier_init"):
        run(_FORMS, f"-DFORM={form}", "-DPEER=0", block=32)  # mapped to the own CTA it is a local address


def test_a23_an_arrival_elsewhere_returns_no_state() -> None:
    form = (
        'u64 s; asm volatile("{.reg .b64 g; .reg .b64 h; cvt.u64.u32 h, %1; cvta.shared::cluster.u64 g, h; '
    )
    form += 'mbarrier.arrive.release.cluster.b64 %0, [g];}" : "=l"(s) : "r"(theirs) : "memory")'
    with report("belongs to CTA 1", "returns no state", "write _", rule="cluster.own"):
        run(_FORMS, f"-DFORM={form}", "-DPEER=1", block=32)
    run(_FORMS, f"-DFORM={form}", "-DPEER=0", block=32)


# ------------------------------------------------------------------------------------------- A27: init unseen

_INIT = f"""
{SMEM} {{
  __shared__ u64 full;
  const u32 rank = mov_cluster_ctarank();
  if (threadIdx.x == 0) {{
    mbarrier_init(smem_addr(&full), 1);
    FENCE;
  }}
  asm volatile("barrier.cluster.arrive." ORDER ".aligned;" ::: "memory");
  barrier_cluster_wait();
  if (rank == 0 && threadIdx.x == 0) mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_addr(&full), 1));
  if (rank == 1) wait_parity_cluster(smem_addr(&full), 0);
}}"""
_NOTHING = '-DFENCE=asm volatile("")'


@every_schedule
def test_a27_an_arrival_at_a_barrier_whose_init_was_not_fenced(schedule: str) -> None:
    with report(
        "CTA 0 uses an mbarrier at shared+0x0 (full of CTA 1), which CTA 1 thread 0 initialised without "
        "making that visible to the cluster", "fence.mbarrier_init.release.cluster", "at CTA 0 thread 0",
        rule="mbarrier.init_fence",
    ):  # fmt: skip
        run(_INIT, _NOTHING, '-DORDER="relaxed"', schedule=schedule)
    run(_INIT, "-DFENCE=fence_mbarrier_init()", '-DORDER="relaxed"', schedule=schedule)


@pytest.mark.parametrize(
    ("fence", "order", "clean"),
    [
        (
            "",
            "release",
            True,
        ),  # the cluster barrier makes prior accesses visible (PTX ISA, "barrier.cluster")
        ("fence.acq_rel.cluster;", "relaxed", True),
        ("fence.acq_rel.gpu;", "relaxed", True),
        ("fence.acq_rel.cta;", "relaxed", False),
        ("fence.proxy.async;", "relaxed", False),
    ],
)
def test_a27_what_makes_an_init_visible(fence: str, order: str, clean: bool) -> None:
    options: Any = (f'-DFENCE=asm volatile("{fence}" ::: "memory")', f'-DORDER="{order}"')
    got = run(_INIT, *options, strict="record")
    assert [f.rule for f in got.result.findings] == ([] if clean else ["mbarrier.init_fence"])


def test_a27_another_threads_fence_does_not_cover_the_init() -> None:
    source = _INIT.replace("    FENCE;\n  }", "  }\n  if (threadIdx.x == 1) fence_mbarrier_init();")
    with report("which CTA 1 thread 0 initialised", rule="mbarrier.init_fence"):
        run(source, '-DORDER="relaxed"')


# ----------------------------------------------------------------------------------------------------- scopes

_SCOPES = _INIT.replace("FENCE;", "fence_mbarrier_init();").replace(
    "mbarrier_arrive_shared_cluster(mapa_shared_cluster(smem_addr(&full), 1))",
    'asm volatile("mbarrier.arrive" ARRIVE ".shared::cluster.b64 _, [%0];"'
    ' :: "r"(mapa_shared_cluster(smem_addr(&full), 1)) : "memory")',
)


@pytest.mark.parametrize(
    ("arrive", "wait", "findings"),
    [
        (".release.cluster", "wait_parity_cluster", []),
        (".relaxed.cluster", "wait_parity_cluster", []),
        (".release.cta", "wait_parity_cluster", ["operates on"]),
        ("", "wait_parity_cluster", ["operates on"]),
        (".release.cluster", "wait_parity", ["a wait with scope .cta"]),
        ("", "wait_parity", ["operates on", "a wait with scope .cta"]),
    ],
)
def test_a_scope_that_does_not_reach_the_other_cta(arrive: str, wait: str, findings: list[str]) -> None:
    source = _SCOPES.replace("wait_parity_cluster", wait)
    for schedule in ("min-pc", "timed"):
        got = run(source, f'-DARRIVE="{arrive}"', '-DORDER="release"', strict="record", schedule=schedule)
        assert {f.rule for f in got.result.findings} == ({"mbarrier.scope"} if findings else set())
        assert len(got.result.findings) == len(findings)
        assert all(any(phrase in str(f) for f in got.result.findings) for phrase in findings)
