"""docs/counting.md, "What each counter takes in": each sentence, on a kernel of a few instructions."""

from __future__ import annotations

import numpy as np

from smfree.emulator.counters import Counters
from tests.emulator.exec_kit import execute

WORDS = np.arange(64, dtype=np.uint32)


def counters(body: str, *, schedule: str = "min-pc", shared: str = "", block: int = 32) -> Counters:
    """Counters of one CTA; parameter ``a`` is 64 words."""
    got = execute(body, schedule=schedule, shared=shared, block=block, a=WORDS, zero_out=True, words=64)
    found: Counters = got.counters
    return found


def test_cp_async_counts_apart_from_loads_and_by_its_src_size() -> None:
    body = """
        shl.b32 %r5, %r2, 2; cvt.u64.u32 %rd5, %r5; add.s64 %rd6, %rd1, %rd5;
        mov.u32 %r6, tile; add.u32 %r7, %r6, %r5;
        {form}
        cp.async.wait_all;
    """
    shared = ".shared .align 16 .b8 tile[256];"
    whole = counters(body.format(form="cp.async.ca.shared.global [%r7], [%rd6], 4;"), shared=shared)
    assert (whole.cp_async_requests, whole.cp_async_sectors, whole.bytes_async) == (1, 4, 128)
    assert (whole.global_load_requests, whole.global_load_sectors, whole.global_load_bytes) == (0, 0, 0)
    assert (whole.shared_store_requests, whole.bytes_through_registers) == (0, 0)
    half = (
        "setp.lt.u32 %p1, %r2, 16; selp.u32 %r8, 4, 0, %p1; cp.async.ca.shared.global [%r7], [%rd6], 4, %r8;"
    )
    assert counters(body.format(form=half), shared=shared).bytes_async == 64


def test_atomics_count_lanes_and_are_no_loads_or_stores() -> None:
    found = counters("red.global.add.u32 [%rd3], 1;")
    assert found.atomics == 32
    assert (found.global_load_requests, found.global_store_requests) == (0, 0)
    found = counters("mov.u32 %r6, x; st.shared.u32 [%r6], 0; atom.shared.add.u32 %r5, [%r6], 1;",
                     shared=".shared .align 4 .b32 x;")  # fmt: skip
    assert (found.atomics, found.shared_load_requests, found.shared_store_requests) == (32, 0, 1)


def test_l2_and_dram_are_counted_only_under_the_clock_in_bytes_asked_for() -> None:
    body = "ld.global.u32 %r5, [%rd1]; st.global.u32 [%rd3], %r5;"  # 32 lanes read one word: one sector
    timed, untimed = counters(body, schedule="timed"), counters(body)
    assert (timed.global_load_sectors, timed.global_store_sectors) == (1, 4)
    assert (timed.dram_read_bytes, timed.dram_write_bytes) == (128, 128)
    assert timed.l2_hit_bytes + timed.l2_miss_bytes == 256
    assert (untimed.dram_read_bytes, untimed.dram_write_bytes) == (0, 0)
    assert untimed.l2_hit_bytes == untimed.l2_miss_bytes == 0
    assert untimed.global_load_bytes == timed.global_load_bytes == 128


def test_an_instruction_that_is_predicated_off_counts_for_the_warp_only() -> None:
    plain = counters("mov.u32 %r5, 7;")
    off = counters("setp.ge.u32 %p1, %r2, 24; @%p1 mov.u32 %r5, 7;")
    assert off.warp_instructions == plain.warp_instructions + 1
    assert off.thread_instructions == plain.thread_instructions + 32 - 24


def test_a_sleeping_wait_counts_once_and_stays_a_miss() -> None:
    """The second warp waits for the first one's arrival."""
    body = """
        mov.u32 %r6, bar; setp.ne.u32 %p1, %r2, 0;
        @%p1 bra READY;
        mbarrier.init.shared::cta.b64 [%r6], 1;
    READY:
        bar.sync 0;
        setp.ge.u32 %p2, %r2, 32; @%p2 bra WAIT;
        @%p1 bra DONE;
        mbarrier.arrive.shared::cta.b64 _, [%r6];
        bra DONE;
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6], 0;
        @!%p3 bra WAIT;
    DONE:
    """
    shared = ".shared .align 8 .b64 bar;"
    for schedule, hits in (("producer-ahead", 0), ("min-pc", 32)):  # the waiter first, the arrival first
        found = counters(body, schedule=schedule, shared=shared, block=64)
        assert (found.mbarrier_wait_hits, found.mbarrier_wait_misses) == (hits, 32 - hits), schedule
        assert found.mbarrier_arrivals == 1
        assert found.barriers == 2


def test_barriers_count_the_warps_that_arrive_and_fences_all_kinds() -> None:
    body = """
        setp.ge.u32 %p1, %r2, 32; @%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;
        fence.acq_rel.gpu; fence.proxy.async.shared::cta;
    """
    found = counters(body, block=64)
    assert (found.barriers, found.fences) == (2, 4)
