// How does an exchange between GPUs break, and what does each mistake look like from outside?
//
// Each rank sends one word per thread to every rank, waits, and copies what all of them sent to out;
// num_calls times, into the same dst. The exchange is complete and correct. FAULT names one mistake, made
// where its name stands below; faults.py says each in a sentence. The answers are in
// tests/kernels/test_ipc_faults.py.
//
// Moves      per call THREADS words per CTA to each rank: registers -> remote global; dst -> registers ->
//            out.
// In flight  a word per thread and peer.
// Needs      sm_80; peer access to every rank's dst and pad.
// Barriers   of the slot over all ranks. Entry: every rank has copied the call before. Exit: all words have
//            landed.
// Slow       rank `slow` sleeps after each wait, and its warps that do not signal before they send: it is the
//            one that others overtake.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=64 -DFAULT=NONE -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512
//            -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304
//            -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 faults.cu
// Launch     the same grid on every rank, THREADS threads. src: u32 [num_calls][grid x THREADS]; dst of each
//            rank: [WORLD_SIZE][grid x THREADS]; out: [num_calls][WORLD_SIZE][grid x THREADS].
#include "signals.cuh"

enum Fault { NONE, RELEASE_MISSING, SYNC_MISSING, FLAGS_RESET, BYTE_FLAGS, EPOCH_REUSED, ENTRY_MISSING };

static_assert(THREADS >= 64, "more than the warp that signals");
static_assert(FAULT != BYTE_FLAGS || WORLD_SIZE % 2 == 0 && WORLD_SIZE <= 8, "flags in 8 aligned bytes");
constexpr u32 SLEEP_NS = 20000;

struct Destinations { u32* of[WORLD_SIZE]; };

PTX_INLINE void signal(const Signals& signals) {
  u8* const bytes = (u8*)(signals.theirs - signals.rank);  // the slot's flags at the peer, one byte per rank
  if constexpr (FAULT == FLAGS_RESET) st_release_sys(signals.theirs, 1);
  else if constexpr (FAULT == BYTE_FLAGS) st_release_sys(bytes + signals.rank, (u8)signals.epoch);
  else if constexpr (FAULT == RELEASE_MISSING) st_relaxed_sys(signals.theirs, signals.epoch);
  else signal_peer(signals);
}

PTX_INLINE void wait(const Signals& signals, u32 step) {
  const u64* const flags = (const u64*)(signals.mine - threadIdx.x);  // those of all peers in one word
  if constexpr (FAULT == FLAGS_RESET) while (ld_acquire_sys(signals.mine) != 1) {}
  else if constexpr (FAULT == BYTE_FLAGS)
    while ((signed char)((ld_acquire_sys(flags) >> 8 * threadIdx.x) - signals.epoch) < 0) {}
  else wait_peer(signals, step);
}

PTX_INLINE void meet(Signals& signals, u32 step, u32 slow) {
  if constexpr (FAULT != SYNC_MISSING) __syncthreads();
  if (!(FAULT == EPOCH_REUSED && step == SIGNAL_STEP_EXIT)) ++signals.epoch;
  if (has_peer(signals)) {
    signal(signals);
    wait(signals, step);
    if (signals.rank == slow) __nanosleep(SLEEP_NS);
    if constexpr (FAULT == FLAGS_RESET) st_relaxed_sys((u32*)signals.mine, 0);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
ipc_faults(u32* out, const __grid_constant__ Destinations dst, const u32* src, SignalControl* control,
           u32 rank, u32 slow, u32 num_calls) {
  Signals signals = open_signals(control, rank);
  const u32 num_words = gridDim.x * THREADS, word = blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 1
  for (u32 call = 0; call < num_calls; ++call) {
    if constexpr (FAULT != ENTRY_MISSING) meet(signals, SIGNAL_STEP_ENTRY, slow);

    if (rank == slow && threadIdx.x >= 32) __nanosleep(SLEEP_NS);
    b32x1 value;
    ld_global(value, src + call * num_words + word);
    for (u32 turn = 0; turn < WORLD_SIZE; ++turn)
      st_global(dst.of[(rank + turn) % WORLD_SIZE] + rank * num_words + word, value);

    meet(signals, SIGNAL_STEP_EXIT, slow);
    for (u32 from = 0; from < WORLD_SIZE; ++from) {
      ld_global(value, dst.of[rank] + from * num_words + word);
      st_global(out + (call * WORLD_SIZE + from) * num_words + word, value);
    }
  }
  close_signals(signals);
}
