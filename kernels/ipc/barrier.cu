// What does it cost that every rank waits for every other, and nothing else?
//
// Moves      one 4-byte word from each rank to each other one.
// In flight  N - 1 signals per CTA.
// Needs      sm_80; peer access to every rank's pad.
// Barriers   of the slot over all ranks (signals.cuh), once: what any rank's streams had done before this
//            kernel is seen by whatever follows it on any rank.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=32 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512
//            -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304
//            -DSIGNAL_STEP_ENTRY=1 barrier.cu
// Launch     the same grid on every rank (1 CTA does it), THREADS threads, at least one per rank.
#include "signals.cuh"

static_assert(THREADS >= WORLD_SIZE, "a thread per peer");

extern "C" __global__ void __launch_bounds__(THREADS) ipc_barrier(SignalControl* control, u32 rank) {
  Signals signals = open_signals(control, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;
  close_signals(signals);
}
