// What do a prefetch into the L2 and an eviction hint do for 2-D tensor copies?
//
// Moves      a matrix: global -> shared -> global, both ways by cp.async.bulk.tensor.2d; no byte passes
//            through registers. AHEAD > 0: cp.async.bulk.prefetch.tensor fetches each box into the L2 that
//            many tiles before its load; it needs no stage and nobody waits for it. POLICY EVICT_FIRST or
//            EVICT_LAST: the loads say how long the L2 should keep their lines. Neither changes the result.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA, and AHEAD x TILE_BYTES of prefetches into the L2.
// Needs      sm_90. Maps of box {BOX_COLS, BOX_ROWS} over src and dst, not overlapping; TILE_BYTES one box.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of TILE_BYTES: elements that are filled
//            count too) and those bytes; completed once per use of stage s, so the awaited parity starts at
//            0 and flips at each wrap of the ring. No empty[s]: the thread that asks also stores, and
//            wait_group.read frees the stage.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders
//            the two.
// Shared     dynamic: stages, NUM_STAGES x STAGE_BYTES, which is TILE_BYTES rounded up to 128; static:
//            full[NUM_STAGES], padded to 128.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DBOX_ROWS=64 -DBOX_COLS=64 -DTILE_BYTES=16384
//            -DNUM_STAGES=4 -DAHEAD=4 -DPOLICY=EVICT_FIRST prefetch_tensor.cu
// Launch     any grid (CTAs stride over the tiles), 32 threads, NUM_STAGES x STAGE_BYTES of dynamic shared
//            memory.
#include "ptx.cuh"

enum { NORMAL, EVICT_FIRST, EVICT_LAST };
constexpr u32 STAGE_BYTES = (TILE_BYTES + 127) / 128 * 128;  // tensor copies want 128-byte aligned tiles

static_assert(AHEAD == 0 || AHEAD >= NUM_STAGES, "nearer tiles are being loaded already");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

struct Source {
  const TensorMap* map;
  u32 tiles_x, num_tiles;
  u64 policy;
};
struct Place { i32 col, row; };

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ u64 make_policy() {
  if constexpr (POLICY == EVICT_FIRST) return createpolicy_fractional_L2_evict_first();
  if constexpr (POLICY == EVICT_LAST) return createpolicy_fractional_L2_evict_last();
  return 0;
}

__device__ __forceinline__ Place place_of(u32 tile, u32 tiles_x) {
  return {(i32)(tile % tiles_x * BOX_COLS), (i32)(tile / tiles_x * BOX_ROWS)};
}

__device__ __forceinline__ void prefetch_tile(u32 tile, const Source& from) {
  const Place at = place_of(tile, from.tiles_x);
  if (tile < from.num_tiles) cp_async_bulk_prefetch_tensor_2d_L2_global(from.map, at.col, at.row);
}

__device__ __forceinline__ void load_tile(u32 s, u32 tile, const Source& from) {
  const Place at = place_of(tile, from.tiles_x);
  mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);
  if constexpr (POLICY == NORMAL)
    cp_async_bulk_tensor_2d_shared_global(stage_at(s), from.map, at.col, at.row, full_at(s));
  else
    cp_async_bulk_tensor_2d_shared_global_cache_hint(stage_at(s), from.map, at.col, at.row, full_at(s),
                                                     from.policy);
  if constexpr (AHEAD > 0) prefetch_tile(tile + AHEAD * gridDim.x, from);
}

extern "C" __global__ void __launch_bounds__(32)
tma_prefetch_tensor(const __grid_constant__ TensorMap dst_map, const __grid_constant__ TensorMap src_map,
                    u32 tiles_x, u32 tiles_y) {
  if (threadIdx.x != 0) return;
  if constexpr (AHEAD > 0) prefetch_tensormap(&src_map);  // the first copy finds the map itself at hand
  const u32 num_tiles = tiles_x * tiles_y;
  const Source from{&src_map, tiles_x, num_tiles, make_policy()};
  for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
  fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

  u32 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
  for (u32 i = NUM_STAGES; i < AHEAD; ++i) prefetch_tile(request + i * gridDim.x, from);
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
    load_tile(s, request, from);

  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const Place at = place_of(tile, tiles_x);
    wait_parity(full_at(s), phase);
    cp_async_bulk_tensor_2d_global_shared(&dst_map, at.col, at.row, stage_at(s));
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
