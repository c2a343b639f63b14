// AllGather, how fast when every rank's threads load the shards of the others?
//
// Moves      each rank reads N - 1 shards from its peers' dst over the links and writes them to its own dst:
//            remote global -> registers -> global. A load waits a round trip, so bytes in flight decide.
// In flight  THREADS x UNROLL x 16 bytes of remote loads per CTA: of each peer's shard as many vectors as
//            make up UNROLL, at least one.
// Needs      sm_80; peer access to every rank's dst. Any byte count, offset and alignment of src.
// Barriers   of the slot over all ranks (signals.cuh). Entry: every rank's own shard is in its dst, and
//            nobody reads the old one any more. Exit: every peer has read this rank's shard, it may be
//            overwritten.
// Order      rank r asks peer r + 1, then r + 2 for a vector, then all for the next: a small shard costs one
//            round trip, not one per peer. Each port serves all readers alike.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=256 -DUNROLL=4 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512
//            -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304
//            -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 pull.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads.
#include "gather.cuh"

constexpr u32 PEERS = WORLD_SIZE - 1;
constexpr u32 ROUNDS = UNROLL > PEERS && PEERS > 0 ? UNROLL / PEERS : 1;  // vectors of each peer under way
constexpr u32 STEP = THREADS * sizeof(b32x4);

PTX_INLINE void pull_bodies(const Gather& gather, u32 rank) {
  u8* const dst = gather.dst[rank];
  const u8* peers[WORLD_SIZE];  // by turn, in registers: the loops over them are unrolled
  Slice bodies[WORLD_SIZE];
  u64 shortest = ~0ull, longest = 0;
#pragma unroll
  for (u32 turn = 1; turn < WORLD_SIZE; ++turn) {
    const u32 peer = (rank + turn) % WORLD_SIZE;
    const Slice slice = slice_of(gather, peer), body = body_of<16>(dst, slice);
    peers[turn] = gather.dst[peer], bodies[turn] = body;
    const u64 length = body.end - body.begin;
    shortest = length < shortest ? length : shortest, longest = length > longest ? length : longest;
    move_edges((turn - 1) % (THREADS / 32), peers[turn], slice, body,
               [=](u64 at, u8 byte) { st_global(dst + at, byte); });
  }

  u64 start = threadIdx.x * sizeof(b32x4);  // in each body
  const auto vectors = [&](bool whole) {
    b32x4 v[ROUNDS][WORLD_SIZE];
    const auto each = [&](auto move) {
#pragma unroll
      for (u32 round = 0; round < ROUNDS; ++round)
#pragma unroll
        for (u32 turn = 1; turn < WORLD_SIZE; ++turn) {
          const u64 at = bodies[turn].begin + start + round * STEP;
          if (whole || at < bodies[turn].end) move(turn, at, v[round][turn]);
        }
    };
    each([&](u32 turn, u64 at, b32x4& value) { ld_global(value, peers[turn] + at); });
    each([&](u32, u64 at, b32x4& value) { st_global(dst + at, value); });
  };
#pragma unroll 1
  for (; PEERS > 0 && start + (ROUNDS - 1) * STEP < shortest; start += ROUNDS * STEP) vectors(true);
#pragma unroll 1
  for (; start < longest; start += ROUNDS * STEP) vectors(false);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_pull(const __grid_constant__ Gather gather, const u8* src, SignalControl* control, u32 rank) {
  Signals signals = open_signals(control, rank);
  place_own(gather, src, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;
  pull_bodies(gather, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
