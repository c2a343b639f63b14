// AllGather, how fast when the switch copies: one store that lands on every GPU?
//
// Moves      each rank reads its shard once and stores it once, to a multicast address; the switch writes it
//            to all N GPUs, the own one too: global -> registers -> switch -> N times global. Egress per rank
//            is one shard instead of N - 1.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA, as many of stores.
// Needs      sm_90, multicast objects (NVSwitch); multicast, which means dst on every rank, congruent to it
//            modulo 16. Any byte count, offset and alignment of src: multimem.st has no form below 4 bytes,
//            so up to 15 bytes on each side go to each peer by plain stores.
// Barriers   of the slot over all ranks (signals.cuh). Entry: every peer's dst may be overwritten. Exit: all
//            shards have landed here.
// Proxies    the multicast address is an alias of dst: fence.proxy.alias before the release of the exit
//            barrier.
// Shared     none.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTHREADS=256 -DUNROLL=4 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512
//            -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304
//            -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 multicast.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads.
#include "gather.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_multicast(const __grid_constant__ Gather gather, const u8* src, SignalControl* control,
                    u8* multicast, u32 rank) {
  Signals signals = open_signals(control, rank);
  const u8* const source = own_source(gather, src, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  const Slice slice = slice_of(gather, rank), body = body_of<16>(gather.dst[rank], slice);
  const u32 first = source == gather.dst[rank];  // in place the own dst has the edges already
  const auto store = [&](u64 at, u8 byte) { store_from_turn(first, gather, rank, at, byte); };
  move_edges(0, source, slice, body, store);
  move_body<b32x4>(source, body, [=](u64 at, const b32x4& value) { multimem_st(multicast + at, value); });

  // Peers read through other addresses than this CTA wrote: the ISA ("Causality Order") wants an alias fence
  // on the way. Here one warp makes it for all threads: after the bar.sync, before the release.
  __syncthreads();
  if (has_peer(signals)) fence_proxy_alias();
  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
