// What is the phase of an mbarrier, and what does each operation on it cost beside bar.sync and a flag?
//
// Moves      nothing but 16 bytes, for a lesson. An mbarrier counts two things down: arrivals, and bytes that
//            were announced (expect_tx) and have not landed. When both are zero the phase completes, the
//            arrivals are counted anew and the next phase begins. A wait names a phase by its parity, 0, 1,
//            0, 1, ...: is the phase of this parity, the current one or the one before it, complete? More it
//            cannot tell apart, so a waiter may never be two phases behind.
//            test_wait answers at once; try_wait (sm_90) may sleep first; neither promises true, so wait in
//            a loop (wait_parity). Each thread flips its own parity after each wait.
// In flight  16 bytes, to see a phase wait for them.
// Needs      sm_80. expect_tx and try_wait are left out (0) before sm_90. src: 16 bytes, 16-byte aligned.
// Barriers   lesson: 2 arrivals, three phases, the last of them with 16 bytes as well.
//            solo: TURNS arrivals of one thread. announced: TURNS arrivals, 0 bytes each.
//            ping, pong: 1 arrival of the other warp, one phase per turn.
// Shared     static: the barriers, two flags, 16 bytes.
// Result     seen[]: what test_wait said, in the order of Lesson in phases.py. cycles[]: of TURNS operations,
//            in the order of Operation there, the first of none. A handover is one warp arriving and the
//            other one returning from its wait: two of them per turn.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTURNS=16 phases.cu
// Launch     one CTA of 64 threads.
#include "ptx.cuh"

static_assert(TURNS % 2 == 0, "each pass begins with parity 0 again");

constexpr u32 PASSES = 2;  // the first one warms the instruction cache
constexpr bool has_tx = __CUDA_ARCH__ >= 900;

__shared__ u64 lesson, solo, announced, ping, pong;
__shared__ __align__(16) u8 landing[16];
__shared__ volatile u32 flags[2];

template <class Operation>
__device__ __forceinline__ void repeat(Operation operation) {
#pragma unroll
  for (u32 turn = 0; turn < TURNS; ++turn) operation(turn);
}

template <class Operation>
__device__ __forceinline__ u64 timed(Operation operation) {
  const u64 begin = clock64_now();
  repeat(operation);
  return clock64_now() - begin;
}

__device__ __forceinline__ void teach(u32* seen, const u8* src) {
  const u32 bar = smem_addr(&lesson);
  seen[0] = mbarrier_test_wait_parity(bar, 1);  // fresh: the phase before the first counts as complete,
  seen[1] = mbarrier_test_wait_parity(bar, 0);  // phase 0 is not
  mbarrier_arrive(bar);
  seen[2] = mbarrier_test_wait_parity(bar, 0);  // one of two arrivals missing
  mbarrier_arrive(bar);
  seen[3] = mbarrier_test_wait_parity(bar, 0);  // phase 0 is complete,
  seen[4] = mbarrier_test_wait_parity(bar, 1);  // phase 1 is not
  mbarrier_arrive(bar), mbarrier_arrive(bar);
  seen[5] = mbarrier_test_wait_parity(bar, 1);  // phase 1 is complete,
  seen[6] = mbarrier_test_wait_parity(bar, 0);  // parity 0 means phase 2 now: it has wrapped around
  if constexpr (has_tx) {
    mbarrier_arrive_expect_tx(bar, 16);
    mbarrier_arrive(bar);
    seen[7] = mbarrier_test_wait_parity(bar, 0);  // all arrived, 16 bytes missing
    cp_async_bulk_shared_global(smem_addr(landing), src, 16, bar);
    wait_parity(bar, 0);
    seen[8] = mbarrier_test_wait_parity(bar, 0);  // the bytes landed
  }
  mbarrier_inval(bar);  // from here its 8 bytes may hold something else, or be initialised again
}

// A wait is over when its answer can be acted on: this exit, never taken, stands for the branch of a waiting
// loop. Without it only the issue of the instructions would be timed.
__device__ __forceinline__ void use(bool answer, bool expected) {
  if (answer != expected) asm volatile("exit;" ::: "memory");
}

__device__ __forceinline__ void measure_alone(u64* cycles, u32 parity) {  // one thread
  const u32 bar = smem_addr(&solo);
  cycles[0] = timed([](u32) {});
  cycles[1] = timed([=](u32) { use(mbarrier_test_wait_parity(bar, parity), false); });  // nobody has arrived
  cycles[2] = timed([=](u32) { mbarrier_arrive(bar); });
  cycles[3] = timed([=](u32) { use(mbarrier_test_wait_parity(bar, parity), true); });
  if constexpr (has_tx) {
    cycles[4] = timed([=](u32) { use(mbarrier_try_wait_parity(bar, parity), true); });
    cycles[5] = timed([](u32) { mbarrier_arrive_expect_tx(smem_addr(&announced), 0); });
    wait_parity(smem_addr(&announced), parity);  // no phase may follow one that nobody waited for
  }
}

// One warp arrives and waits for the other, which waits first: by mbarrier, by bar.sync, by flag. Lane 0
// speaks for its warp; were there data of the other lanes to hand over, a __syncwarp would come before.
__device__ __forceinline__ void arrive_of_warp(u64* mbar) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(mbar));
}

__device__ __forceinline__ void set_flag(u32 warp, u32 value) {
  if (threadIdx.x % 32 == 0) flags[warp] = value;
}

__device__ __forceinline__ void await_flag(u32 warp, u32 value) {
  while (flags[warp] < value) {}  // orders nothing but itself: data would need a fence on either side
}

__device__ __forceinline__ void measure_handovers(u64* cycles, u32 turns_before) {  // the first warp
  const u64 mbarrier = timed([](u32 i) { arrive_of_warp(&ping), wait_parity(smem_addr(&pong), i & 1); });
  const u64 hardware = timed([](u32) { bar_arrive(2, 64), bar_sync(3, 64); });
  const u64 flag = timed([=](u32 i) {
    set_flag(0, turns_before + i + 1), await_flag(1, turns_before + i + 1);
  });
  if (threadIdx.x == 0) cycles[7] = mbarrier, cycles[8] = hardware, cycles[9] = flag;
}

__device__ __forceinline__ void answer_handovers(u32 turns_before) {  // the second warp
  repeat([](u32 i) { wait_parity(smem_addr(&ping), i & 1), arrive_of_warp(&pong); });
  repeat([](u32) { bar_sync(2, 64), bar_arrive(3, 64); });
  repeat([=](u32 i) { await_flag(0, turns_before + i + 1), set_flag(1, turns_before + i + 1); });
}

extern "C" __global__ void __launch_bounds__(64) mbarrier_phases(u64* cycles, u32* seen, const u8* src) {
  if (threadIdx.x == 0) {
    mbarrier_init(smem_addr(&lesson), 2);
    mbarrier_init(smem_addr(&solo), TURNS);
    mbarrier_init(smem_addr(&announced), TURNS);
    mbarrier_init(smem_addr(&ping), 1);
    mbarrier_init(smem_addr(&pong), 1);
    if constexpr (has_tx) fence_mbarrier_init();  // the TMA counts bytes on lesson at cluster scope
    flags[0] = flags[1] = 0;
    teach(seen, src);
  }
  __syncthreads();  // the other warp finds the barriers initialised

#pragma unroll 1
  for (u32 pass = 0; pass < PASSES; ++pass) {
    if (threadIdx.x == 0) measure_alone(cycles, pass & 1);
    __syncthreads();
    const u64 both = timed([](u32) { bar_sync(1, 64); });
    if (threadIdx.x == 0) cycles[6] = both;
    if (threadIdx.x < 32) measure_handovers(cycles, pass * TURNS);
    else answer_handovers(pass * TURNS);
  }
}
