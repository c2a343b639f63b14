"""Prefetches into L2 and cache policies: what they do, what they refuse, what they do not change."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from smfree.emulator.errors import CopyFault
from smfree.emulator.exec.launch import LaunchResult
from smfree.emulator.tensormap import encode
from tests.emulator.exec_kit import Machine, every_schedule, execute, kernel, report

DATA = np.random.default_rng(8).integers(0, 1 << 32, 64 * 64).astype(np.uint32)
SHARED = ".shared .align 8 .b64 full;\n.shared .align 128 .b8 tile[4096];"
MAP = ", .param .align 64 .b8 map[128]"
HEAD = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
mov.b64 %rd6, map;
cvta.param.u64 %rd6, %rd6;
setp.eq.u32 %p1, %r2, 0;
mov.u32 %r10, 0;
mov.u32 %r11, 8;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
bar.sync 0;
mov.u64 %rd20, %clock64;
"""
PREFETCH = ".loc 1 30 0\n@%p1 cp.async.bulk.prefetch.L2.global [%rd1], 4096;\n"
PREFETCH_TENSOR = ".loc 1 30 0\n@%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd6, {%r10, %r11}];\n"
LOADS = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 4096;\n"
BULK = "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r22], [%rd1], 4096, [%r20];\n"
TENSOR = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    " [%r22], [%rd6, {%r10, %r11}], [%r20];\n"
)
PAUSE = "nanosleep.u32 20000;\n"
WAIT = """
W:
mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra W;
mov.u64 %rd21, %clock64;
sub.s64 %rd21, %rd21, %rd20;
@%p1 st.global.u64 [%rd0], %rd21;
"""


def go(body: str, schedule: str = "timed") -> tuple[int, LaunchResult]:
    """(cycles from the start to the wait's end, the result); the map is 64 x 64 words in boxes of 64 x 16."""
    m = Machine(schedule)
    tensor, out = m.put(DATA), m.put(np.zeros(1, np.uint64))
    packed = encode("UINT32", tensor, [64, 64], [256], [64, 16])
    params = struct.pack("<QQQI", out, tensor, 0, 0).ljust(64, b"\0") + packed
    m.device.l2.flush()
    result = m.launch(kernel(HEAD + body, shared=SHARED, params=MAP), params, block=32)
    return int(m.get(out, 1, np.uint64)[0]), result


@pytest.mark.parametrize(("prefetch", "load"), [(PREFETCH, BULK), (PREFETCH_TENSOR, TENSOR)])
def test_a_prefetch_brings_lines_into_l2(prefetch: str, load: str) -> None:
    """Long before the load it saves the DRAM latency; just before the load it changes nothing."""
    plain, cold = go(PAUSE + LOADS + load + WAIT)
    early, warm = go(prefetch + PAUSE + LOADS + load + WAIT)
    late, tight = go(PAUSE + prefetch + LOADS + load + WAIT)
    assert (cold.counters.dram_read_bytes, cold.counters.l2_hit_bytes) == (4096, 0)
    for result in (warm, tight):  # one read of DRAM, by the prefetch
        assert result.counters.dram_read_bytes == 4096 and result.counters.l2_hit_bytes == 4096
        assert result.counters.bytes_prefetched == 4096 and result.counters.bytes_async == 4096
        assert result.counters.tma_requests == 2
    saved = plain - early
    assert saved > 200
    assert late >= plain - 100  # a load does not overtake the prefetch of its lines


@every_schedule
def test_a_prefetch_moves_nothing_and_nobody_waits_for_it(schedule: str) -> None:
    for text in (PREFETCH, PREFETCH_TENSOR):
        body = (HEAD + text).replace("mov.u64 %rd20, %clock64;\n", "")
        m = Machine(schedule)
        packed = encode("UINT32", m.put(DATA), [64, 64], [256], [64, 16])
        params = struct.pack("<QQQI", 0, m.put(DATA), 0, 0).ljust(64, b"\0") + packed
        counters = m.launch(kernel(body, shared=SHARED, params=MAP), params, block=32).counters
        assert (counters.bytes_prefetched, counters.bytes_async, counters.tma_requests) == (4096, 0, 1)
        l2 = counters.l2_miss_bytes
        assert l2 == (4096 if schedule == "timed" else 0)


def test_a_tensor_prefetch_takes_what_lies_in_the_tensor() -> None:
    _, result = go(PREFETCH_TENSOR.replace("%r11}", "%r12}").replace(".loc", "mov.u32 %r12, 56;\n.loc", 1))
    assert result.counters.bytes_prefetched == 8 * 256


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("[%rd1+8], 4096", ("cp.async.bulk.prefetch source", "16-byte aligned")),
        ("[%rd1], %r13", ("cp.async.bulk.prefetch size must be a multiple of 16 bytes (got 40)",)),
    ],
)
def test_operands_of_a_bulk_prefetch(text: str, phrases: tuple[str, ...]) -> None:
    body = f"mov.u32 %r13, 40;\n.loc 1 30 0\n@%p1 cp.async.bulk.prefetch.L2.global {text};\n"
    with report(*phrases, "case.cu:30", "CTA 0 thread 0", kind=CopyFault):
        go(body)


def test_a_prefetch_past_the_end_is_dropped() -> None:
    """A hint: nothing is read that a fault could come from."""
    _, result = go("@%p1 cp.async.bulk.prefetch.L2.global [%rd1+16384], 4096;\n")
    assert result.counters.bytes_prefetched == 4096 and result.counters.l2_miss_bytes == 0


def test_the_coordinates_of_a_tensor_prefetch() -> None:
    text = PREFETCH_TENSOR.replace("2d", "1d").replace("{%r10, %r11}", "{%r10}")
    with report("a 2-D tensor map needs 2 coordinates (got 1)", "case.cu:30", rule="tensor.rank"):
        go(text)


def test_prefetch_tensormap_takes_a_map_that_the_tma_can_see() -> None:
    go("prefetch.tensormap [%rd6];\nprefetch.param.tensormap [map];\n")
    body = ".local .align 64 .b8 copied[128];\nmov.b64 %rd9, copied;\ncvta.local.u64 %rd9, %rd9;\n"
    with report(
        "the tensor map lies in local memory", "__grid_constant__", "case.cu:31", rule="tensormap.local"
    ):
        go(body + ".loc 1 31 0\nprefetch.tensormap [%rd9];\n")


# --------------------------------------------------------------------------------------------- cache policies

POLICIES = [
    "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;",
    "createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %rd9, 0.25;",
    "createpolicy.fractional.L2::evict_normal.b64 %rd9;",
    "createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %rd9, [%rd1], 256, 512;",
    "mov.b64 %rd8, 77;\ncreatepolicy.cvt.L2.b64 %rd9, %rd8;",
    "mov.b64 %rd9, 0x14F0000000000000;",
]
HINTED = [
    (BULK.replace("::bytes", "::bytes.L2::cache_hint").replace("[%r20]", "[%r20], %rd9"), BULK),
    (TENSOR.replace("::bytes", "::bytes.L2::cache_hint").replace("[%r20]", "[%r20], %rd9"), TENSOR),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_changes_neither_bytes_nor_time(policy: str) -> None:
    for hinted, plain in HINTED:
        with_hint, without = (go(policy + "\n" + LOADS + load + WAIT) for load in (hinted, plain))
        assert with_hint[0] == without[0]
        assert with_hint[1].counters.bytes_async == without[1].counters.bytes_async == 4096


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.L2::cache_hint.u32 %r30, [%rd20], %rd9;\nst.global.L2::cache_hint.u32 [%rd3], %r30, %rd9;",
        "ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%r30, %r31}, [%rd21], %rd9;\n"
        "st.global.u32 [%rd3], %r30;",
        "cp.async.ca.shared.global.L2::cache_hint [%r23], [%rd20], 4, %rd9;\ncp.async.wait_all;\n"
        "ld.shared.u32 %r30, [%r23];\nst.global.u32 [%rd3], %r30;",
    ],
)  # fmt: skip
def test_policies_of_loads_stores_and_cp_async(text: str) -> None:
    body = """
    shl.b32 %r23, %r2, 2;
    cvt.u64.u32 %rd20, %r23;
    add.s64 %rd21, %rd20, %rd20;
    add.s64 %rd20, %rd20, %rd1;
    add.s64 %rd21, %rd21, %rd1;
    mov.u32 %r22, tile;
    add.u32 %r23, %r23, %r22;
    createpolicy.fractional.L2::evict_first.b64 %rd9;
    """
    got = execute(body + text, shared=SHARED, a=DATA).out
    assert got.tolist() == (DATA[:64:2] if ".v2" in text else DATA[:32]).tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mov.b32 %r13, 0f3FC00000;\ncreatepolicy.fractional.L2::evict_first.b64 %rd9, %r13;",
         "the fraction must be above 0 and at most 1 (got 1.5)"),
        ("mov.u32 %r13, 512;\nmov.u32 %r14, 256;\n"
         "createpolicy.range.L2::evict_last.b64 %rd9, [%rd1], %r13, %r14;",
         "primary-size must not exceed total-size (got 512)"),
        ("createpolicy.range.L2::evict_last.b64 %rd9, [%rd6], 128, 256;",
         "the range must lie in global memory"),
    ],
)  # fmt: skip
def test_operands_of_a_policy(text: str, said: str) -> None:
    with report(said, "case.cu:32", rule="policy.operand", kind=CopyFault):
        go(".loc 1 32 0\n" + text)
