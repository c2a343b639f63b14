// wait_parity and wait_parity_cluster with a bound: ptx.cuh takes them from here where WATCHDOG_NS is
// defined.
//
// A wait that lasts WATCHDOG_NS nanoseconds writes into host memory who waited for what, and its thread
// exits. Whoever waits for that thread runs into its own bound, so the kernel ends and the host reads the
// records (kernels/watchdog.py). Exited threads hold up neither bar.sync of all threads nor
// barrier.cluster. A bar.sync with a thread count may still hang: the ISA ("exit") releases barriers that
// wait for exited threads alone, but a count names no threads. Then the host's time limit ends the process,
// and the records stay.
#pragma once

struct WatchdogRecord {  // kernels/watchdog.py reads this layout
  u32 valid;             // 1 once the rest is there
  u32 barrier;           // its address in the shared window
  u32 parity;            // the one waited for
  u32 answers;           // of the last waits: bit p for parity p; of a live barrier exactly one is set
  u32 cta, thread;       // linear
  u32 line;              // of the call of wait_parity
  u32 waited_us;
  u64 word;              // of the barrier; its layout is not documented
  u64 module;            // which one the kernel came from
};
struct alignas(16) WatchdogLog {  // the records follow
  u32 claimed;                    // records asked for, as the host read it at the end; the rest were dropped
  u32 capacity;
};
// The host sets them before the launch.
__device__ WatchdogLog* watchdog_log;  // in host memory
__device__ u32* watchdog_claimed;      // in device memory: the host's need not have atomics
__device__ u64 watchdog_module;

PTX_INLINE u64 globaltimer_now();

PTX_INLINE u32 watchdog_ask(u32 mbar, u32 parity) {
#if __CUDA_ARCH__ >= 900
  return mbarrier_try_wait_parity_relaxed_cluster(mbar, parity);  // other CTAs may have arrived there
#else
  return mbarrier_test_wait_parity(mbar, parity);
#endif
}

PTX_INLINE void watchdog_expire(u32 mbar, u32 parity, u32 line, u64 waited_ns) {
  WatchdogLog* const log = watchdog_log;
  if (log == nullptr) __trap();  // nowhere to write
  const u32 slot = atomicAdd(watchdog_claimed, 1);
  if (slot < log->capacity) {
    WatchdogRecord* const record = (WatchdogRecord*)(log + 1) + slot;
    record->barrier = mbar;
    record->parity = parity;
    record->answers = watchdog_ask(mbar, 0) | watchdog_ask(mbar, 1) << 1;
    record->cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    record->thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    record->line = line;
    record->waited_us = (u32)(waited_ns / 1000);
#ifdef WATCHDOG_RAW_WORD  // real GPUs only: PTX leaves a plain read of a live barrier undefined
    b32x2 word;
    ld_shared(word, mbar);
    record->word = (u64)word.y << 32 | word.x;
#endif
    record->module = watchdog_module;
    __threadfence_system();  // the host sees the record before it sees that it is valid
    *(volatile u32*)&record->valid = 1;
  }
  asm volatile("exit;" ::: "memory");
}

// The line is that of the caller: a default argument is evaluated there.
PTX_INLINE void wait_parity(u32 mbar, u32 parity, u32 line = __builtin_LINE()) {
  const u64 begin = globaltimer_now();
#if __CUDA_ARCH__ >= 900
  while (!mbarrier_try_wait_parity(mbar, parity)) {
#else
  while (!mbarrier_test_wait_parity(mbar, parity)) {
#endif
    const u64 waited_ns = globaltimer_now() - begin;
    if (waited_ns > WATCHDOG_NS) watchdog_expire(mbar, parity, line, waited_ns);
  }
}
PTX_INLINE void wait_parity_cluster(u32 mbar, u32 parity, u32 line = __builtin_LINE()) {
  const u64 begin = globaltimer_now();
  while (!mbarrier_try_wait_parity_relaxed_cluster(mbar, parity)) {
    const u64 waited_ns = globaltimer_now() - begin;
    if (waited_ns > WATCHDOG_NS) watchdog_expire(mbar, parity, line, waited_ns);
  }
  fence_acquire_shared_cluster();
}
