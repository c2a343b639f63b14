// AllGather, how fast when every rank's threads load the shards of the others?
//
// Moves      each rank reads N - 1 shards from its peers' dst over the links and writes them to its own dst:
//            remote global -> registers -> global. A load waits a round trip, so bytes in flight decide.
// In flight  THREADS x UNROLL x 16 bytes of remote loads per CTA.
// Needs      sm_80; peer access to every rank's dst. Any byte count, offset and alignment of src.
// Barriers   of the slot over all ranks (signals.cuh). Entry: every rank's own shard is in its dst, and
//            nobody reads the old one any more. Exit: every peer has read this rank's shard, it may be
//            overwritten.
// Order      rank r starts with peer r + 1, then r + 2: at any time each port serves about one reader.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=256 -DUNROLL=4 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512
//            -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304
//            -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 pull.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads.
#include "gather.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_pull(const __grid_constant__ Gather gather, const u8* src, SignalControl* control, u32 rank) {
  Signals signals = open_signals(control, rank);
  place_own(gather, src, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  u8* const dst = gather.dst[rank];
#pragma unroll 1
  for (u32 turn = 1; turn < WORLD_SIZE; ++turn) {
    const u32 peer = (rank + turn) % WORLD_SIZE;
    move<b32x4>(gather.dst[peer], slice_of(gather, peer),
                [=](u64 at, const auto& value) { st_global(dst + at, value); });
  }

  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
