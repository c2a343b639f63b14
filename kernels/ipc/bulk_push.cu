// AllGather, how fast when the TMA loads the shard once and one thread sends it to every peer?
//
// Moves      each rank reads its shard once and writes it to N - 1 peers over the links: global -> shared ->
//            N - 1 times remote global, by cp.async.bulk; no byte passes through registers but up to 15 on
//            each side of the shard. A src that lies elsewhere, aligned like its place, goes to the own
//            dst, too.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA; N - 1 stores of each tile.
// Needs      sm_90; peer access to every rank's dst. Any byte count, offset and alignment of src.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of the tile's bytes) and those bytes; once
//            per use of stage s, so the awaited parity starts at 0 and flips at each wrap of the ring. No
//            empty[s]: the thread that asks also stores, and wait_group.read tells it that a stage has been
//            read. Of the slot over all ranks (signals.cuh). Entry: every peer's dst may be overwritten.
//            Exit: all shards have landed here.
// Proxies    generic -> async: the own shard may have been placed by this CTA's stores, and peers have read
//            by loads what now is overwritten: one fence.proxy.async behind the entry barrier, where both are
//            known. async -> generic: wait_group makes the writes, also those at peers, visible to the asking
//            thread, with an implicit proxy fence (PTX ISA, "Async Proxy" of asynchronous copies). bar.sync
//            and the release of the exit barrier hand that on.
// Order      rank r stores to peer r + 1, then r + 2, for each tile: at any time each port takes about one
//            writer.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[NUM_STAGES], padded to 128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTHREADS=128 -DUNROLL=4 -DTILE_BYTES=8192 -DNUM_STAGES=8
//            -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2304 -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 bulk_push.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads (all of
//            them place a src that is aligned otherwise), NUM_STAGES x TILE_BYTES of dynamic shared memory.
#include "gather.cuh"

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
constexpr u32 DEFER = NUM_STAGES > 1;  // refill a stage one tile later: its stores have had time to read it

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

PTX_INLINE u32 bytes_at(u64 at, Slice body) {
  return body.end - at < TILE_BYTES ? (u32)(body.end - at) : TILE_BYTES;
}

PTX_INLINE void load_tile(u32 s, const u8* source, u64 at, Slice body) {
  const u32 tile_bytes = bytes_at(at, body);
  mbarrier_arrive_expect_tx(full_at(s), tile_bytes);
  cp_async_bulk_shared_global(stage_at(s), source + at, tile_bytes, full_at(s));
}

// One thread. In place the first turn is 1, else 0: the own dst takes a copy, too.
PTX_INLINE void push_body(const Gather& gather, const u8* source, Slice body, u32 rank, u32 first) {
  u64 request = body.begin;  // the next tile to ask for
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES && request < body.end; ++s, request += TILE_BYTES)
    load_tile(s, source, request, body);

  u32 s = 0, refill = 0, phase = 0;
#pragma unroll 1
  for (u64 at = body.begin; at < body.end; at += TILE_BYTES) {
    wait_parity(full_at(s), phase);
#pragma unroll 1
    for (u32 turn = first; turn < WORLD_SIZE; ++turn)
      cp_async_bulk_global_shared(peer_dst(gather, rank, turn) + at, stage_at(s), bytes_at(at, body));
    cp_async_bulk_commit_group();
    if (request < body.end && at >= body.begin + DEFER * TILE_BYTES) {
      cp_async_bulk_wait_group_read<DEFER>();  // all stores but those of this tile have read their stage
      load_tile(refill, source, request, body);
      request += TILE_BYTES;
      if (++refill == NUM_STAGES) refill = 0;
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  cp_async_bulk_wait_group<0>();  // every write has landed at its peer: the exit barrier may say so
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_bulk_push(const __grid_constant__ Gather gather, const u8* src, SignalControl* control, u32 rank) {
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  Signals signals = open_signals(control, rank);
  const u8* const source = own_source(gather, src, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  const Slice slice = slice_of(gather, rank), body = body_of<16>(source, slice);
  const u32 first = source == gather.dst[rank];
  const auto store = [&](u64 at, u8 byte) { store_from_turn(first, gather, rank, at, byte); };
  move_edges(0, source, slice, body, store);
  if (threadIdx.x == 0) {
    fence_proxy_async_global();  // what the entry barrier made known, before bulk copies read or overwrite it
    push_body(gather, source, body, rank, first);
  }

  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
