// AllGather, how fast when one thread asks the TMA for the shards of the others?
//
// Moves      each rank reads N - 1 shards from its peers' dst over the links and writes them to its own:
//            remote global -> shared -> global, both ways by cp.async.bulk; no byte passes through registers
//            but up to 15 on each side of a shard. A src that lies elsewhere takes the same way to its place
//            in the own dst, where it is aligned like that.
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
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[], offset[], bytes[] of each, slice[]
//            and body[] of each shard, padded to 128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTHREADS=128 -DUNROLL=4 -DTILE_BYTES=8192 -DNUM_STAGES=8
//            -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2304 -DSIGNAL_STEP_ENTRY=1 -DSIGNAL_STEP_EXIT=2 bulk_pull.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS CTAs, all resident; THREADS threads (all of
//            them place a src that is aligned otherwise), NUM_STAGES x TILE_BYTES of dynamic shared memory.
#include "gather.cuh"

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
constexpr u32 DEFER = NUM_STAGES > 1;  // refill a stage one tile later: its store has had time to read it

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];
__shared__ u64 offset[NUM_STAGES];  // in dst, of the tile in a stage: noted when it is asked for
__shared__ u32 bytes[NUM_STAGES];   // of that tile
__shared__ Slice slice[WORLD_SIZE], body[WORLD_SIZE];  // of this CTA, by turn: 0 is the own shard

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

struct Ring {
  u32 s, phase;  // the next stage to wait for, and the parity to wait for
  PTX_INLINE void next() {
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
};

// The tiles of the bodies of turns [turn, last), one body after the other.
struct Tiles {
  u32 turn, last;
  u64 at, end;  // offsets in dst

  PTX_INLINE Tiles(u32 first, u32 behind) : turn(first), last(behind), at(0), end(0) { open(); }
  PTX_INLINE bool more() const { return turn < last; }
  PTX_INLINE void open() {
    for (; turn < last; ++turn) {
      at = body[turn].begin, end = body[turn].end;
      if (at < end) return;
    }
  }
  PTX_INLINE void next() {
    at += TILE_BYTES;
    if (at >= end) ++turn, open();
  }
};

PTX_INLINE void load_tile(u32 s, const u8* shard, const Tiles& tile) {
  offset[s] = tile.at;
  bytes[s] = tile.end - tile.at < TILE_BYTES ? (u32)(tile.end - tile.at) : TILE_BYTES;
  mbarrier_arrive_expect_tx(full_at(s), bytes[s]);
  cp_async_bulk_shared_global(stage_at(s), shard + tile.at, bytes[s], full_at(s));
}

// To their places in the own dst. One thread; the ring is empty before and after.
PTX_INLINE void copy_tiles(const Gather& gather, const u8* own, u32 rank, Tiles tiles, Ring& ring) {
  u32 asked = 0, refill = ring.s;
  const auto ask = [&] {
    const u8* const shard = tiles.turn == 0 ? own : peer_dst(gather, rank, tiles.turn);
    load_tile(refill, shard, tiles);
    tiles.next();
    ++asked;
    if (++refill == NUM_STAGES) refill = 0;
  };
#pragma unroll 1
  while (asked < NUM_STAGES && tiles.more()) ask();

#pragma unroll 1
  for (u32 stored = 0; stored < asked; ++stored) {
    wait_parity(full_at(ring.s), ring.phase);
    cp_async_bulk_global_shared(gather.dst[rank] + offset[ring.s], stage_at(ring.s), bytes[ring.s]);
    cp_async_bulk_commit_group();
    if (tiles.more() && stored >= DEFER) {
      cp_async_bulk_wait_group_read<DEFER>();  // all stores but this tile's have read their stage
      ask();
    }
    ring.next();
  }
  cp_async_bulk_wait_group<0>();  // the bytes are in dst, and shared memory has outlived who reads it
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
allgather_bulk_pull(const __grid_constant__ Gather gather, const u8* src, SignalControl* control, u32 rank) {
  u8* const dst = gather.dst[rank];
  if (const u32 turn = threadIdx.x; turn < WORLD_SIZE) {
    slice[turn] = slice_of(gather, (rank + turn) % WORLD_SIZE);
    body[turn] = body_of<16>(dst, slice[turn]);
  }
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  Signals signals = open_signals(control, rank);
  __syncthreads();

  Ring ring = {0, 0};
  const u8* const own = own_source(gather, src, rank);
  const auto store = [=](u64 at, u8 byte) { st_global(dst + at, byte); };
  if (own != dst) {
    move_edges(0, own, slice[0], body[0], store);
    if (threadIdx.x == 0) copy_tiles(gather, own, rank, Tiles(0, 1), ring);
  }
  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;

  if (threadIdx.x == 0) {
    fence_proxy_async_global();  // what the entry barrier made known, before bulk copies read or overwrite it
    copy_tiles(gather, own, rank, Tiles(1, WORLD_SIZE), ring);
  }
#pragma unroll 1
  for (u32 turn = 1; turn < WORLD_SIZE; ++turn)  // by other warps, as far as there are any
    move_edges(turn % (THREADS / 32), peer_dst(gather, rank, turn), slice[turn], body[turn], store);

  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
