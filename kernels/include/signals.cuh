// Signals between the ranks of a group: who may read what, across GPUs. Layout: kernels/ipc/signals.py.
//
// Every CTA has a slot: a word in each peer's pad that this rank alone writes, and a word of each peer in its
// own pad. Barrier number n writes n there and waits here until int(word - n) >= 0. A word only grows (modulo
// 2^32): nothing is reset, so no fast rank can take back a signal before a slow one has seen it, and a peer
// may be one barrier ahead. The number lives in own device memory and goes on from launch to launch, also in
// a replayed graph. Every rank must launch the same grid, at most SIGNAL_SLOTS CTAs of WORLD_SIZE threads or
// more, all of them resident at once.
//
// What a barrier costs, in the order in which it happens:
//   bar.sync       the accesses of all threads of the CTA come before what thread t does next.
//   st.release.sys MEMBAR.ALL.SYS, then the store. The membar waits until all writes of the CTA that are
//                  under way, to every peer, have arrived there: one round trip over NVLink. Release is
//                  cumulative, so thread t releases what the bar.sync has shown it: the other threads need no
//                  fence of their own. Threads 0 to WORLD_SIZE - 1 signal one peer each: lanes of one warp,
//                  so one membar for all peers.
//   the flag       travels one way.
//   ld.acquire.sys a load of own memory (L2) and CCTL.IVALL, which drops the SM's L1, per turn: no later load
//                  of any thread is served by lines older than the signal. Polling relaxed and acquiring once
//                  at the end would spare the L1 of neighbours and cost one more trip to L2.
//   bar.sync       what thread t has acquired, every thread of the CTA has.
// Flags inside the data (NCCL's LL: 4 bytes of flag beside 4 of data) need no membar, at half the bandwidth.
// The release also stands before the entry barrier of a collective, where it may find nothing to wait for:
// earlier kernels' accesses are complete then, but only a release says so in the memory model.
//
// A wait looks at the abort word of its own GPU, too. When the host has set it, the wait leaves a record of
// what it waited for, and the kernel ends: it moves nothing more, and the group is of no use afterwards.
//
// Macros: WORLD_SIZE; SIGNAL_SLOTS; SIGNAL_PADS_OFFSET, SIGNAL_EPOCHS_OFFSET and SIGNAL_RECORDS_OFFSET, where
// the host puts the parts of SignalControl; SIGNAL_STEP_*, labels that kernels give their waits, for the
// records alone: any distinct values above 0 do.
#pragma once
#include "ptx_peer.cuh"

struct SignalRecord { u32 step, wanted, seen, number; };  // step 0: nobody waited here

struct SignalControl {  // in own device memory
  u32 abort;            // alone in its line: written by the host
  alignas(128) u32* pads[WORLD_SIZE];
  alignas(128) u32 epochs[SIGNAL_SLOTS];
  alignas(128) SignalRecord records[SIGNAL_SLOTS][WORLD_SIZE];
};
static_assert(__builtin_offsetof(SignalControl, pads) == SIGNAL_PADS_OFFSET,
              "SIGNAL_PADS_OFFSET must be 128: pads follow the line of the abort word");
static_assert(__builtin_offsetof(SignalControl, epochs) == SIGNAL_EPOCHS_OFFSET,
              "SIGNAL_EPOCHS_OFFSET belongs to another WORLD_SIZE: 128 + 8 x WORLD_SIZE in lines of 128");
static_assert(__builtin_offsetof(SignalControl, records) == SIGNAL_RECORDS_OFFSET,
              "SIGNAL_RECORDS_OFFSET belongs to another SIGNAL_SLOTS or WORLD_SIZE: SIGNAL_EPOCHS_OFFSET + "
              "4 x SIGNAL_SLOTS in lines of 128");
static_assert(WORLD_SIZE <= 32,
              "WORLD_SIZE must be 32 or less: the threads that signal are lanes of one warp");

// One CTA's signals, as one of its threads holds them: thread t speaks with peer t.
struct Signals {
  SignalControl* control;
  u32 rank;
  u32 epoch;        // the slot's last barrier
  u32* theirs;      // my word in the peer's pad
  const u32* mine;  // the peer's word in my pad
};

PTX_INLINE bool has_peer(const Signals& signals) {
  return threadIdx.x < WORLD_SIZE && threadIdx.x != signals.rank;
}

PTX_INLINE Signals open_signals(SignalControl* control, u32 rank) {
  Signals signals = {control, rank, control->epochs[blockIdx.x], nullptr, nullptr};
  if (has_peer(signals)) {
    signals.theirs = control->pads[threadIdx.x] + blockIdx.x * WORLD_SIZE + rank;
    signals.mine = control->pads[rank] + blockIdx.x * WORLD_SIZE + threadIdx.x;
  }
  return signals;
}

// What this thread has done and seen is seen by whoever acquires the word.
PTX_INLINE void signal_peer(const Signals& signals) { st_release_sys(signals.theirs, signals.epoch); }

// Waits until a word of this slot has reached an epoch. False: the host has aborted; the record says that
// step `number` waited for the peer.
PTX_INLINE bool wait_word(SignalControl* control, u32 slot, u32 peer, const u32* word, u32 wanted, u32 step,
                          u32 number) {
  while (true) {
    const u32 abort = ld_relaxed_sys(&control->abort);  // first: both loads are under way together
    const u32 seen = ld_acquire_sys(word);
    if ((i32)(seen - wanted) >= 0) return true;
    if (abort != 0) {
      control->records[slot][peer] = {step, wanted, seen, number};
      return false;
    }
  }
}

// Waits until the peer has reached this epoch. False: the host has aborted.
PTX_INLINE bool wait_peer(const Signals& signals, u32 step, u32 number = 0) {
  return wait_word(signals.control, blockIdx.x, threadIdx.x, signals.mine, signals.epoch, step, number);
}

// The barrier of this slot over all ranks; the whole CTA calls it. What any rank's CTA of this slot did
// before is seen by all of them after. False: the host has aborted, leave the kernel.
PTX_INLINE bool sync_ranks(Signals& signals, u32 step, u32 number = 0) {
  __syncthreads();  // the accesses of all threads, before the release of the few that signal
  ++signals.epoch;
  bool aborted = false;
  if (has_peer(signals)) {
    signal_peer(signals);
    aborted = !wait_peer(signals, step, number);
  }
  return !__syncthreads_or(aborted);  // what the few have acquired, before the accesses of all
}

// At the end: the next launch goes on from here.
PTX_INLINE void close_signals(const Signals& signals) {
  if (threadIdx.x == 0) signals.control->epochs[blockIdx.x] = signals.epoch;
}
