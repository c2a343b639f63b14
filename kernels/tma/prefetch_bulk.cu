// What do a prefetch into the L2 and an eviction hint do for 1-D bulk copies?
//
// Moves      num_bytes from src to dst: global -> shared -> global, both ways by cp.async.bulk; no byte
//            passes through registers. AHEAD > 0: cp.async.bulk.prefetch fetches each tile into the L2 that
//            many tiles before its load; it needs no stage and nobody waits for it. POLICY EVICT_FIRST or
//            EVICT_LAST: the loads say how long the L2 should keep their lines. Neither changes the result.
//            The last num_bytes % 16 go through one thread each.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA, and AHEAD x TILE_BYTES of prefetches into the L2.
// Needs      sm_90. src and dst 16-byte aligned, not overlapping.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of the tile's bytes) and those bytes;
//            completed once per use of stage s, so the awaited parity starts at 0 and flips at each wrap of
//            the ring. No empty[s]: the thread that asks also stores, and wait_group.read frees the stage.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders
//            the two.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[NUM_STAGES], padded to 128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=4 -DAHEAD=4
//            -DPOLICY=EVICT_FIRST prefetch_bulk.cu
// Launch     any grid (CTAs stride over the tiles), 32 threads, NUM_STAGES x TILE_BYTES of dynamic shared
//            memory.
#include "ptx.cuh"

enum { NORMAL, EVICT_FIRST, EVICT_LAST };

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
static_assert(AHEAD == 0 || AHEAD >= NUM_STAGES, "nearer tiles are being loaded already");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

struct Source {
  const u8* src;
  u64 bulk_bytes, num_tiles, policy;
};

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ u64 make_policy() {
  if constexpr (POLICY == EVICT_FIRST) return createpolicy_fractional_L2_evict_first();
  if constexpr (POLICY == EVICT_LAST) return createpolicy_fractional_L2_evict_last();
  return 0;
}

__device__ __forceinline__ u32 bytes_of(u64 tile, u64 bulk_bytes) {
  const u64 left_bytes = bulk_bytes - tile * TILE_BYTES;
  return left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES;
}

__device__ __forceinline__ void prefetch_tile(u64 tile, const Source& from) {
  if (tile < from.num_tiles)
    cp_async_bulk_prefetch_L2_global(from.src + tile * TILE_BYTES, bytes_of(tile, from.bulk_bytes));
}

__device__ __forceinline__ void load_tile(u32 s, u64 tile, const Source& from) {
  const u8* src = from.src + tile * TILE_BYTES;
  const u32 tile_bytes = bytes_of(tile, from.bulk_bytes);
  mbarrier_arrive_expect_tx(full_at(s), tile_bytes);
  if constexpr (POLICY == NORMAL)
    cp_async_bulk_shared_global(stage_at(s), src, tile_bytes, full_at(s));
  else
    cp_async_bulk_shared_global_cache_hint(stage_at(s), src, tile_bytes, full_at(s), from.policy);
  if constexpr (AHEAD > 0) prefetch_tile(tile + (u64)AHEAD * gridDim.x, from);
}

extern "C" __global__ void __launch_bounds__(32) tma_prefetch_bulk(u8* dst, const u8* src, u64 num_bytes) {
  const u32 tail_bytes = num_bytes % 16;
  const u64 bulk_bytes = num_bytes - tail_bytes;
  const u64 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES;

  if (threadIdx.x == 0) {
    const Source from{src, bulk_bytes, num_tiles, make_policy()};
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

    u64 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
    for (u32 i = NUM_STAGES; i < AHEAD; ++i) prefetch_tile(request + (u64)i * gridDim.x, from);
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
      load_tile(s, request, from);

    u32 s = 0, phase = 0;
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
      wait_parity(full_at(s), phase);
      cp_async_bulk_global_shared(dst + tile * TILE_BYTES, stage_at(s), bytes_of(tile, bulk_bytes));
      cp_async_bulk_commit_group();
      if (request < num_tiles) {
        cp_async_bulk_wait_group_read<0>();  // the store has read the stage: refill it
        load_tile(s, request, from);
        request += gridDim.x;
      }
      if (++s == NUM_STAGES) s = 0, phase ^= 1;
    }
    cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
  }

  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < tail_bytes) {
    const u64 i = bulk_bytes + threadIdx.x;
    dst[i] = src[i];
  }
}
