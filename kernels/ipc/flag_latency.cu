// How long does a signal take from one GPU to another, and how much of it is the fence?
//
// One thread of rank `first` signals rank `second`, which answers; num_rounds times. Half a round trip is one
// way: the clocks of two GPUs cannot be compared. Three messages: DATA_BYTES = 0 with RELEASE = 0 (the flag
// alone, nothing ordered), with RELEASE = 1 (the fence finds nothing to wait for), and DATA_BYTES > 0 (the
// fence waits until the data has arrived, and only then the flag leaves).
//
// Moves      per message DATA_BYTES, 16 per thread and turn, then a 4-byte flag: registers -> remote global.
// In flight  one message.
// Needs      sm_80; peer access to the other's pad and landing.
// Barriers   all ranks meet once (signals.cuh), so that no start-up is timed. Then each message has its own
//            epoch. Ranks that do not play go on by as many epochs: the slot's number stays the same on every
//            rank.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=128 -DDATA_BYTES=2048 -DRELEASE=1 -DWORLD_SIZE=8
//            -DSIGNAL_SLOTS=512 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2304 -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 flag_latency.cu
// Launch     one CTA of THREADS threads on every rank. landing: DATA_BYTES of the other player's memory,
//            16-byte aligned. result[0]: cycles, result[1]: nanoseconds of all rounds, by the thread that
//            signals.
#include "signals.cuh"

static_assert(DATA_BYTES % 16 == 0, "data go in vectors of 16 bytes");
static_assert(DATA_BYTES == 0 || RELEASE, "data needs a release");
static_assert(THREADS >= WORLD_SIZE, "a thread per peer");

PTX_INLINE void send(const Signals& signals, u32 to, u8* landing) {
  if constexpr (DATA_BYTES > 0) {
    for (u32 at = threadIdx.x * 16; at < DATA_BYTES; at += THREADS * 16)
      st_global(landing + at, b32x4{signals.epoch, at, signals.rank, to});
    __syncthreads();  // the data of all threads, before the release of one
  }
  if (threadIdx.x != to) return;
  if constexpr (RELEASE) signal_peer(signals);
  else st_relaxed_sys(signals.theirs, signals.epoch);
}

// False: the host has aborted. Without data only the thread that waits knows.
PTX_INLINE bool receive(const Signals& signals, u32 from) {
  const bool aborted = threadIdx.x == from && !wait_peer(signals, SIGNAL_STEP_EXIT);
  if constexpr (DATA_BYTES > 0) return !__syncthreads_or(aborted);
  else return !aborted;
}

extern "C" __global__ void __launch_bounds__(THREADS)
flag_latency(u64* result, u8* landing, SignalControl* control, u32 rank, u32 first, u32 second,
             u32 num_rounds) {
  Signals signals = open_signals(control, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  if (rank == first || rank == second) {
    const u32 other = rank == first ? second : first;
    const u64 begin_ns = globaltimer_now(), begin_cycles = clock64_now();
#pragma unroll 1
    for (u32 round = 0; round < num_rounds; ++round) {
      ++signals.epoch;
      if (rank == first) send(signals, other, landing);
      if (!receive(signals, other)) return;
      if (rank == second) send(signals, other, landing);
    }
    const u64 cycles = clock64_now() - begin_cycles, ns = globaltimer_now() - begin_ns;
    if (threadIdx.x == other) result[0] = cycles, result[1] = ns;
  } else {
    signals.epoch += num_rounds;
  }
  close_signals(signals);
}
