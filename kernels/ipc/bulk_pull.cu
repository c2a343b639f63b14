// AllGather, how fast when one thread asks the TMA for the shards of the others?
//
// Moves      each rank reads N - 1 shards from its peers' dst over the links and writes them to its own:
//            remote global -> shared -> global, both ways by cp.async.bulk; no byte passes through registers
//            but up to 15 on each side of a shard.
// In flight  NUM_STAGES x TILE_BYTES of remote loads per CTA, from as many peers as the tiles belong to.
// Needs      sm_90; peer access to every rank's dst. Any byte count, offset and alignment of src.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of the tile's bytes) and those bytes; once
//            per use of stage s, so the awaited parity starts at 0 and flips at each wrap of the ring. No
//            empty[s]: the thread that asks also stores, and wait_group.read tells it that a stage has been
//            read. Of the slot over all ranks (signals.cuh). Entry: every rank's own shard is in its dst, and
//            nobody reads the old one any more. Exit: every peer has read this rank's shard.
// Proxies    generic -> async: peers have placed their shards by stores: one fence.proxy.async behind the
//            entry barrier, where that is known. A tile is written and read by the async proxy, and the wait
//            on full[s] orders the two.
// Order      rank r asks peer r + 1, then r + 2: at any time each port serves about one reader.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[], offset[], bytes[] of each, padded to
//            128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTHREADS=128 -DUNROLL=4 -DTILE_BYTES=16384 -DNUM_STAGES=4
//            -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2304 -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 bulk_pull.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads (all of
//            them place a src that lies elsewhere), NUM_STAGES x TILE_BYTES of dynamic shared memory.
#include "gather.cuh"

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
constexpr u32 DEFER = NUM_STAGES > 1;  // refill a stage one tile later: its store has had time to read it

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];
__shared__ u64 offset[NUM_STAGES];  // in dst, of the tile in a stage: noted when it is asked for
__shared__ u32 bytes[NUM_STAGES];   // of that tile

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

// Goes over the tiles of this CTA's slices of all peers' shards.
struct Request {
  const Gather& gather;
  u32 rank, turn;
  u64 at, end;  // offsets in dst

  PTX_INLINE Request(const Gather& all, u32 own) : gather(all), rank(own), turn(0), at(0), end(0) { next(); }
  PTX_INLINE bool more() const { return turn < WORLD_SIZE; }
  PTX_INLINE void next() {
    at += TILE_BYTES;
    while (at >= end && ++turn < WORLD_SIZE) {
      const u32 peer = (rank + turn) % WORLD_SIZE;
      const Slice body = body_of<16>(gather.dst[rank], slice_of(gather, peer));
      at = body.begin, end = body.end;
    }
  }
};

PTX_INLINE void load_tile(u32 s, Request& tile) {
  offset[s] = tile.at;
  bytes[s] = tile.end - tile.at < TILE_BYTES ? (u32)(tile.end - tile.at) : TILE_BYTES;
  mbarrier_arrive_expect_tx(full_at(s), bytes[s]);
  cp_async_bulk_shared_global(stage_at(s), peer_dst(tile.gather, tile.rank, tile.turn) + tile.at, bytes[s],
                              full_at(s));
  tile.next();
}

PTX_INLINE void pull_bodies(const Gather& gather, u32 rank) {  // one thread
  u8* const dst = gather.dst[rank];
  Request request(gather, rank);  // the next tile to ask for
  u32 asked = 0, s = 0, refill = 0, phase = 0;
#pragma unroll 1
  for (; asked < NUM_STAGES && request.more(); ++asked) load_tile(asked, request);

#pragma unroll 1
  for (u32 stored = 0; stored < asked; ++stored) {
    wait_parity(full_at(s), phase);
    cp_async_bulk_global_shared(dst + offset[s], stage_at(s), bytes[s]);
    cp_async_bulk_commit_group();
    if (request.more() && stored >= DEFER) {
      cp_async_bulk_wait_group_read<DEFER>();  // all stores but this tile's have read their stage
      load_tile(refill, request);
      ++asked;
      if (++refill == NUM_STAGES) refill = 0;
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_bulk_pull(const __grid_constant__ Gather gather, const u8* src, SignalControl* control, u32 rank) {
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  Signals signals = open_signals(control, rank);
  place_own(gather, src, rank);
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  u8* const dst = gather.dst[rank];
#pragma unroll 1
  for (u32 turn = 1; turn < WORLD_SIZE; ++turn) {
    const u32 peer = (rank + turn) % WORLD_SIZE;
    const Slice slice = slice_of(gather, peer);
    move_edges(gather.dst[peer], slice, body_of<16>(dst, slice),
               [=](u64 at, u8 byte) { st_global(dst + at, byte); });
  }
  if (threadIdx.x == 0) {
    fence_proxy_async_global();  // what the entry barrier made known, before bulk copies read or overwrite it
    pull_bodies(gather, rank);
  }

  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
