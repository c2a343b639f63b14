// AllGather, how fast when every rank's threads store their shard to the others?
//
// Moves      each rank reads its shard once and stores it to N - 1 peers over the links: global -> registers
//            -> N - 1 times remote global. A store waits for nobody until the release, so few threads go far.
//            A src that lies elsewhere, aligned like its place, goes to the own dst, too.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA, N - 1 times as many bytes of stores; stores have
//            no bound but the queues of the hardware.
// Needs      sm_80; peer access to every rank's dst. Any byte count, offset and alignment of src.
// Barriers   of the slot over all ranks (signals.cuh). Entry: every peer's dst may be overwritten. Exit: all
//            shards have landed here. Its release waits until this CTA's stores have arrived at every peer.
// Order      rank r stores to peer r + 1, then r + 2, for each vector: at any time each port takes about one
//            writer.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=256 -DUNROLL=4 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512
//            -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304
//            -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 push.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads.
#include "gather.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_push(const __grid_constant__ Gather gather, const u8* src, SignalControl* control, u32 rank) {
  Signals signals = open_signals(control, rank);
  const u8* const source = own_source(gather, src, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  u8* dst[WORLD_SIZE];  // by turn, in registers: the loops over it are unrolled
#pragma unroll
  for (u32 turn = 0; turn < WORLD_SIZE; ++turn) dst[turn] = peer_dst(gather, rank, turn);
  const auto push = [&](bool own) {  // not in place: the own dst takes a copy, too
    move<b32x4>(source, slice_of(gather, rank), [&](u64 at, const auto& value) {
#pragma unroll
      for (u32 turn = 1; turn < WORLD_SIZE; ++turn) st_global(dst[turn] + at, value);
      if (own) st_global(dst[0] + at, value);
    });
  };
  if (source == dst[0]) push(false);
  else push(true);

  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
