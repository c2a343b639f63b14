"""Hardware barriers and warp-wide instructions: what passes, what deadlocks, and what the report says."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from smfree.emulator.errors import BarrierFault, Deadlock
from smfree.emulator.exec.schedule import SCHEDULES
from tests.emulator.exec_kit import Machine, cuda_kernel, every_schedule, execute, kernel, reads, report

_EXCHANGE = """
mov.u32 %r10, sm;
shl.b32 %r11, %r2, 2;
add.u32 %r10, %r10, %r11;
st.shared.u32 [%r10], %r1;
{barrier}
mov.u32 %r12, %ntid.x;
sub.u32 %r12, %r12, 1;
sub.u32 %r12, %r12, %r2;
shl.b32 %r12, %r12, 2;
mov.u32 %r13, sm;
add.u32 %r12, %r12, %r13;
ld.shared.u32 %r14, [%r12];
st.global.u32 [%rd3], %r14;
"""
_SHARED = ".shared .align 16 .b8 sm[1024];"

_SPELLINGS = [
    "bar.sync 0;", "bar.cta.sync 0;", "barrier.sync 0;", "barrier.cta.sync 0;", "barrier.sync.aligned 0;",
    "barrier.cta.sync.aligned 0;", "bar.sync 15;", "bar.sync 3, 96;", "barrier.cta.sync 3, 96;",
    "mov.u32 %r20, 7;\nbar.sync %r20;", "mov.u32 %r20, 7;\nmov.u32 %r21, 96;\nbar.sync %r20, %r21;",
]  # fmt: skip


@pytest.mark.parametrize("barrier", _SPELLINGS)
@pytest.mark.parametrize("schedule", ["min-pc", "random", "timed"])
def test_every_spelling_of_a_block_barrier(barrier: str, schedule: str) -> None:
    """Case H05. Threads exchange values through shared memory, in reverse order."""
    got = execute(_EXCHANGE.format(barrier=barrier), block=96, grid=3, shared=_SHARED, schedule=schedule)
    want = [cta * 96 + 95 - t for cta in range(3) for t in range(96)]
    assert got.out.tolist() == want
    assert got.counters.barriers == 9


@pytest.mark.parametrize("block", [1, 31, 33, 50, 95])
def test_a_thread_count_counts_whole_warps(block: int) -> None:
    """The last warp may be partial: it still counts as 32 threads."""
    count = -(-block // 32) * 32
    body = _EXCHANGE.format(barrier=f"bar.sync 1, {count};")
    assert execute(body, block=block, shared=_SHARED).out.tolist() == list(range(block))[::-1]


def test_without_the_barrier_the_exchange_reads_unwritten_bytes() -> None:
    """The exchange really depends on its barrier; the random schedule shows it."""
    with report("bytes nobody has written", "ld.shared.u32 %r14", rule="memory.uninitialized"):
        execute(_EXCHANGE.format(barrier=""), block=96, grid=3, shared=_SHARED, schedule="random")


@every_schedule
def test_producer_arrives_and_runs_on_while_the_consumer_waits(schedule: str) -> None:
    """The ISA's producer/consumer example: arrive on one barrier, sync on the other, several rounds."""
    body = """
    setp.ge.u32 %p1, %r2, 32;
    shl.b32 %r10, %r2, 2;
    and.b32 %r10, %r10, 127;
    mov.u32 %r11, sm;
    add.u32 %r10, %r10, %r11;
    mov.u32 %r12, 0;
    mov.u32 %r16, 0;
    LOOP:
    @%p1 bra CONSUME;
    mad.lo.u32 %r13, %r12, 100, %r2;
    st.shared.u32 [%r10], %r13;
    bar.arrive 1, 64;
    bar.sync 2, 64;
    bra NEXT;
    CONSUME:
    bar.sync 1, 64;
    ld.shared.u32 %r14, [%r10];
    add.u32 %r16, %r16, %r14;
    bar.arrive 2, 64;
    NEXT:
    add.u32 %r12, %r12, 1;
    setp.lt.u32 %p2, %r12, 5;
    @%p2 bra LOOP;
    st.global.u32 [%rd3], %r16;
    """
    got = execute(body, block=64, shared=_SHARED, schedule=schedule).out
    assert got[32:].tolist() == [sum(100 * i + lane for i in range(5)) for lane in range(32)]


@every_schedule
def test_barriers_of_different_numbers_are_independent(schedule: str) -> None:
    body = """
    shr.u32 %r10, %r2, 5;
    add.u32 %r10, %r10, 1;
    setp.eq.u32 %p1, %r10, 1;
    @%p1 bra ONE;
    bar.sync 2, 32;
    bra END;
    ONE:
    bar.sync 1, 32;
    END:
    bar.sync 0;
    st.global.u32 [%rd3], %r10;
    """
    assert execute(body, block=64, schedule=schedule).out.tolist() == [1] * 32 + [2] * 32


@every_schedule
@pytest.mark.parametrize("form", ["bar.sync 0;", "barrier.sync 0;"])
def test_exited_threads_do_not_block_a_barrier(form: str, schedule: str) -> None:
    body = f"""
    setp.ge.u32 %p1, %r2, 20;
    @%p1 exit;
    {form}
    st.global.u32 [%rd3], %r2;
    """
    got = execute(body, block=70, schedule=schedule).out
    assert got[:20].tolist() == list(range(20))
    assert (got[20:] == 0xFFFFFFFF).all()


@every_schedule
def test_threads_that_exit_later_open_the_barrier(schedule: str) -> None:
    """Half of warp 0 waits; the other half spins on a flag that warp 1 sets, then leaves."""
    body = """
    setp.ge.u32 %p1, %r2, 32;
    @%p1 bra SET;
    setp.ge.u32 %p2, %r2, 16;
    @%p2 bra SPIN;
    barrier.sync 0;
    st.global.u32 [%rd3], %r2;
    ret;
    SPIN:
    ld.volatile.global.u32 %r10, [%rd1];
    setp.eq.u32 %p3, %r10, 0;
    @%p3 bra SPIN;
    ret;
    SET:
    st.volatile.global.u32 [%rd1], 1;
    """
    got = execute(body, block=64, a=np.zeros(1, np.uint32), schedule=schedule).out
    assert got[:16].tolist() == list(range(16))


_DIVERGED = """
setp.lt.u32 %p1, %r2, {limit};
@%p1 bra LOW;
.loc 1 20 0
{form} 0;
bra END;
LOW:
.loc 1 30 0
{form} 0;
END:
st.global.u32 [%rd3], %r2;
"""


@every_schedule
@pytest.mark.parametrize("form", ["bar.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned"])
def test_lanes_of_one_warp_at_two_aligned_barriers_is_an_error(form: str, schedule: str) -> None:
    """Cases H10 and H22."""
    with report(
        "lanes of one warp",
        "barrier 0",
        "case.cu:20",
        "case.cu:30",
        "CTA 0",
        rule="bar.divergent",
        kind=BarrierFault,
    ):
        execute(_DIVERGED.format(form=form, limit=16), block=64, schedule=schedule)


@every_schedule
def test_different_warps_at_two_aligned_barriers_is_a_strict_finding(schedule: str) -> None:
    body = _DIVERGED.format(form="bar.sync", limit=32)
    with report(
        "different warps met barrier 0", "case.cu:20", "case.cu:30", rule="bar.different_instructions"
    ):
        execute(body, block=64, schedule=schedule)
    got = execute(body, block=64, schedule=schedule, strict="record")
    assert [f.rule for f in got.result.findings] == ["bar.different_instructions"]
    assert got.out.tolist() == list(range(64))


@every_schedule
@pytest.mark.parametrize("limit", [16, 32, 40])
def test_unaligned_barriers_meet_wherever_they_stand(limit: int, schedule: str) -> None:
    got = execute(_DIVERGED.format(form="barrier.sync", limit=limit), block=64, schedule=schedule)
    assert got.out.tolist() == list(range(64))
    assert got.result.findings == []


@every_schedule
def test_a_barrier_that_some_threads_never_reach_is_a_deadlock_with_their_names(schedule: str) -> None:
    body = """
    setp.ge.u32 %p1, %r2, 40;
    @%p1 bra SPIN;
    .loc 1 41 0
    bar.sync 3;
    ret;
    SPIN:
    .loc 1 50 0
    ld.volatile.global.u32 %r10, [%rd1];
    setp.eq.u32 %p3, %r10, 0;
    @%p3 bra SPIN;
    """
    with report(
        "barrier 3 of CTA 0: 24 of 64 threads missing (40-63)", "threads 0-39 at case.cu:41",
        "looping for ever over what nobody else will change: CTA 0 threads 40-63 at case.cu:50",
        kind=Deadlock,
    ) as caught:  # fmt: skip
        execute(body, block=64, a=np.zeros(1, np.uint32), schedule=schedule)
    assert caught.value.rule == "deadlock"


@every_schedule
def test_a_counted_barrier_with_too_few_threads_is_a_deadlock(schedule: str) -> None:
    body = """
    setp.ge.u32 %p1, %r2, 64;
    @%p1 exit;
    .loc 1 7 0
    bar.sync 1, 96;
    """
    with report("barrier 1 of CTA 0: 32 of 96 threads missing", "case.cu:7", kind=Deadlock):
        execute(body, block=96, schedule=schedule)


def test_counts_that_do_not_agree_are_an_error() -> None:
    body = """
    setp.ge.u32 %p1, %r2, 32;
    @%p1 bra HIGH;
    bar.sync 1, 64;
    ret;
    HIGH:
    bar.sync 1, 96;
    """
    with report("barrier 1", "64", "96", "must agree", rule="bar.count"):
        execute(body, block=64)


@pytest.mark.parametrize("count", [0, 20, 33])
def test_a_thread_count_is_a_multiple_of_the_warp_size(count: int) -> None:
    with report("multiple of 32", str(count), rule="bar.count"):
        execute(f"mov.u32 %r10, {count};\nbar.sync 1, %r10;", block=64)


def test_a_barrier_number_is_below_sixteen() -> None:
    with report("0..15", "16", rule="bar.number"):
        execute("mov.u32 %r10, 16;\nbar.sync %r10;")


def test_an_arrival_left_over_by_one_cta_is_not_seen_by_the_next() -> None:
    """One CTA per SM. The first 132 leave a half-filled barrier behind; CTA 132 takes over a slot, and half
    of a barrier of its own must hang: the arrival of its predecessor may not complete it."""
    body = """
    setp.ge.u32 %p1, %r2, 32;
    @%p1 exit;
    setp.lt.u32 %p2, %r3, 132;
    @%p2 bra LEAVE;
    .loc 1 81 0
    bar.sync 1, 64;
    ret;
    LEAVE:
    bar.arrive 1, 64;
    """
    k, params = kernel(body), struct.pack("<QQQI", 0, 0, 0, 0)
    Machine().launch(k, params, grid=132, block=64, shared_bytes=150_000)
    with report("barrier 1 of CTA 132: 32 of 64 threads missing", "case.cu:81", kind=Deadlock):
        Machine().launch(k, params, grid=133, block=64, shared_bytes=150_000)


def test_a_warp_may_arrive_twice_at_different_instructions() -> None:
    body = """
    setp.ge.u32 %p1, %r2, 32;
    @%p1 bra CONSUMER;
    bar.arrive 1, 64;
    bar.arrive 1, 64;
    ret;
    CONSUMER:
    st.global.u32 [%rd3], %r2;
    """
    got = execute(body, block=64)  # two arrivals of one warp complete the barrier by themselves
    assert got.out[32:].tolist() == list(range(32, 64))


# ---------------------------------------------------------------------------------------------- warp barriers

_HALVES = """
setp.ge.u32 %p1, %r2, 16;
@%p1 bra HIGH;
.loc 1 11 0
bar.warp.sync {low};
bra END;
HIGH:
.loc 1 12 0
bar.warp.sync {high};
END:
st.global.u32 [%rd3], %r2;
"""


@every_schedule
@pytest.mark.parametrize(
    ("low", "high"), [("0xffffffff", "0xffffffff"), ("0x0000ffff", "0xffff0000")], ids=["joint", "separate"]
)
def test_warp_barriers_in_two_arms(low: str, high: str, schedule: str) -> None:
    """bar.warp.sync waits for its members, whichever bar.warp.sync they execute."""
    got = execute(_HALVES.format(low=low, high=high), schedule=schedule)
    assert got.out.tolist() == list(range(32))


@every_schedule
def test_a_warp_barrier_that_leaves_out_its_own_lane_is_an_error(schedule: str) -> None:
    with report("member mask 0x0000ffff", "leaves it out", "thread 16", rule="warp.mask"):
        execute("bar.warp.sync 0x0000ffff;", schedule=schedule)


@every_schedule
def test_a24_an_elected_lane_that_waits_for_lanes_elsewhere_is_a_deadlock(schedule: str) -> None:
    """The other 31 lanes wait at a block barrier (or have left, which is fine)."""
    body = """
    setp.eq.u32 %p1, %r2, 0;
    @!%p1 bra OTHERS;
    .loc 1 61 0
    bar.warp.sync 0xffffffff;
    st.global.u32 [%rd3], 5;
    OTHERS:
    {rest}
    """
    with report(
        "member mask 0xffffffff waits for lanes 1-31 of warp 0", "thread 0 at case.cu:61", kind=Deadlock
    ) as caught:
        execute(body.format(rest=".loc 1 66 0\nbarrier.sync 0;"), schedule=schedule)
    reads(["barrier 0 of CTA 0: 1 of 32 threads missing (0)", "case.cu:66"], str(caught.value))
    assert execute(body.format(rest="ret;"), schedule=schedule).out[0] == 5


def test_elect_passes_over_lanes_that_have_exited() -> None:
    """One of those that are there is elected, whatever the mask's lowest lane did."""
    body = """
    setp.lt.u32 %p1, %r2, 3;
    @%p1 exit;
    elect.sync %r10|%p2, 0xffffffff;
    selp.b32 %r11, 100, 0, %p2;
    add.u32 %r11, %r11, %r10;
    st.global.u32 [%rd3], %r11;
    """
    assert execute(body, zero_out=True).out.tolist() == [0] * 3 + [103] + [3] * 28


def test_a_shuffle_from_a_lane_outside_the_own_mask_is_undefined() -> None:
    """Both halves of the warp run together, each with its own mask."""
    body = """
    setp.lt.u32 %p1, %r2, 16;
    selp.b32 %r10, 0x0000ffff, 0xffff0000, %p1;
    shfl.sync.bfly.b32 %r11, %r2, {distance}, 31, %r10;
    st.global.u32 [%rd3], %r11;
    """
    assert execute(body.format(distance=8)).out.tolist() == [lane ^ 8 for lane in range(32)]
    with report("reads lane 16", "thread 0", rule="warp.absent_source"):
        execute(body.format(distance=16))


@every_schedule
def test_elect_takes_the_same_lane_every_time(schedule: str) -> None:
    """Case H15. The elected lane counts the rounds; a mask without lane 0 elects another."""
    body = """
    mov.u32 %r13, %laneid;
    setp.lt.u32 %p1, %r13, 5;
    mov.u32 %r12, 0;
    @%p1 bra END;
    mov.u32 %r10, 0;
    LOOP:
    elect.sync %r11|%p2, 0xffffffe0;
    @%p2 add.u32 %r12, %r12, 1;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 4;
    @%p3 bra LOOP;
    shl.b32 %r11, %r11, 8;
    or.b32 %r12, %r12, %r11;
    END:
    st.global.u32 [%rd3], %r12;
    """
    got = execute(body, block=64, schedule=schedule).out
    assert got.tolist() == ([0] * 5 + [5 << 8 | 4] + [5 << 8] * 26) * 2


@every_schedule
def test_vote_modes(schedule: str) -> None:
    body = """
    setp.lt.u32 %p1, %r2, {below};
    vote.sync.all.pred %p2, %p1, 0xffffffff;
    vote.sync.any.pred %p3, %p1, 0xffffffff;
    vote.sync.uni.pred %p4, %p1, 0xffffffff;
    vote.sync.ballot.b32 %r10, %p1, 0xffffffff;
    vote.sync.ballot.b32 %r11, !%p1, 0xffffffff;
    selp.u32 %r12, 1, 0, %p2;
    selp.u32 %r13, 2, 0, %p3;
    selp.u32 %r14, 4, 0, %p4;
    or.b32 %r12, %r12, %r13;
    or.b32 %r12, %r12, %r14;
    xor.b32 %r11, %r11, %r10;
    add.u32 %r11, %r11, 1;
    add.u32 %r12, %r12, %r11;
    st.global.u32 [%rd3], %r12;
    add.s64 %rd4, %rd3, 128;
    st.global.u32 [%rd4], %r10;
    """
    for below in (0, 1, 20, 32):
        got = execute(body.format(below=below), words=64, schedule=schedule).out
        flags = (below == 32) | (below > 0) << 1 | (below in (0, 32)) << 2
        assert got[:32].tolist() == [flags] * 32
        assert got[32:].tolist() == [(1 << below) - 1] * 32


def test_vote_ignores_lanes_that_have_left() -> None:
    body = """
    setp.ge.u32 %p1, %r2, 8;
    @%p1 exit;
    setp.ge.u32 %p2, %r2, 0;
    vote.sync.all.pred %p3, %p2, 0xffffffff;
    vote.sync.ballot.b32 %r10, %p2, 0xffffffff;
    @!%p3 mov.u32 %r10, 77;
    st.global.u32 [%rd3], %r10;
    """
    assert execute(body).out[:8].tolist() == [0xFF] * 8


@every_schedule
def test_a_vote_in_a_branch_gathers_its_members(schedule: str) -> None:
    """Lanes reach the vote at different times: those of the inner branch later."""
    body = """
    setp.ge.u32 %p1, %r2, 24;
    mov.u32 %r10, 0;
    @%p1 bra SKIP;
    and.b32 %r11, %r2, 3;
    LOOP:
    setp.eq.u32 %p2, %r11, 0;
    @%p2 bra VOTE;
    sub.u32 %r11, %r11, 1;
    bra LOOP;
    VOTE:
    setp.ne.u32 %p3, %r2, 7;
    vote.sync.ballot.b32 %r10, %p3, 0x00ffffff;
    SKIP:
    st.global.u32 [%rd3], %r10;
    """
    got = execute(body, schedule=schedule).out
    assert got.tolist() == [0x00FFFF7F] * 24 + [0] * 8


def _shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The ISA's pseudo-code of shfl.sync: (source lane, in range)."""
    segment, limit, by = c >> 8 & 31, c & 31, b & 31
    most, least = lane & segment | limit & ~segment & 31, lane & segment
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": least | by & ~segment & 31}[mode]
    ok = source >= most if mode == "up" else source <= most
    return (source, True) if ok else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_agrees_with_the_isa(mode: str) -> None:
    body = f"""
    ld.global.u32 %r10, [%rd1];
    ld.global.u32 %r11, [%rd1+4];
    mad.lo.u32 %r12, %r2, 3, 7;
    shfl.sync.{mode}.b32 %r13|%p1, %r12, %r10, %r11, 0xffffffff;
    selp.u32 %r14, 0x80000000, 0, %p1;
    or.b32 %r13, %r13, %r14;
    st.global.u32 [%rd3], %r13;
    """
    controls = [
        0 if mode == "up" else 31,
        0x1C00 | (0 if mode == "up" else 3),
        0x1800 | 7,
        0x1000 | 0xF,
        0x10,
    ]
    for c in controls:
        for b in (0, 1, 2, 5, 16, 31):
            got = execute(body, a=np.array([b, c], np.uint32)).out
            for lane in range(32):
                source, ok = _shuffled(mode, lane, b, c)
                assert int(got[lane]) == (source * 3 + 7) | (0x80000000 if ok else 0), (mode, b, c, lane)


def test_shuffle_from_a_lane_that_has_left_is_an_error() -> None:
    body = """
    setp.ge.u32 %p1, %r2, 16;
    @%p1 exit;
    .loc 1 71 0
    shfl.sync.down.b32 %r13, %r2, 1, 31, 0xffffffff;
    """
    with report("reads lane 16", "thread 15", "case.cu:71", rule="warp.absent_source"):
        execute(body)


@every_schedule
def test_activemask_names_the_lanes_that_run_together(schedule: str) -> None:
    """Guarded lanes that do not execute it are not active; nobody may count on more than its own bit."""
    body = """
    setp.lt.u32 %p1, %r2, 12;
    mov.u32 %r10, 0;
    @%p1 activemask.b32 %r10;
    st.global.u32 [%rd3], %r10;
    """
    got = execute(body, block=40, schedule=schedule).out.tolist()
    assert got[12:32] == [0] * 20 and got[32:] == [0] * 8
    for lane in range(12):
        assert got[lane] >> lane & 1 and got[lane] < 1 << 12


def test_cuda_reductions_over_warp_and_block() -> None:
    """What a compiler makes of shuffles, ballots and barriers."""
    source = """
    extern "C" __global__ void k(unsigned* out, const unsigned* in, unsigned, unsigned n) {
      __shared__ unsigned partial[8];
      unsigned v = threadIdx.x < n ? in[threadIdx.x] : 0;
      for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
      __syncthreads();
      unsigned sum = 0;
      for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += partial[w];
      unsigned odd = __popc(__ballot_sync(~0u, in[threadIdx.x % n] & 1));
      if (__any_sync(~0u, threadIdx.x == 3) && threadIdx.x < 32) sum += 1000000;
      out[threadIdx.x] = sum * 64 + odd;
    }"""
    data = np.random.default_rng(5).integers(0, 1000, 100).astype(np.uint32)
    for schedule in SCHEDULES:
        m = Machine(schedule)
        out, a = m.empty(4 * 128), m.put(data)
        m.launch(cuda_kernel(source), struct.pack("<QQII", out, a, 0, 100), block=128)
        got = m.get(out, 128)
        padded = data[np.arange(128) % 100]
        for t in range(128):
            odd = int((padded[t // 32 * 32 : t // 32 * 32 + 32] & 1).sum())
            want = ((int(data.sum()) + (1000000 if t < 32 else 0)) * 64 + odd) & 0xFFFFFFFF
            assert int(got[t]) == want, (schedule, t)
