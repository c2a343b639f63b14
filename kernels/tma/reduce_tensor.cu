// What does an addition cost when the TMA does it on the way out of shared memory, in 2-D tensor copies?
//
// Moves      num_parts matrices: global -> shared by cp.async.bulk.tensor.3d (the parts are dimension 2),
//            shared -> global by cp.reduce.async.bulk.tensor.2d.add, which adds to dst in the L2, in the
//            map's element type. dst += part 0 + part 1 + ...; dst is not cleared. No byte passes through
//            registers. The order of the additions is free: all CTAs add to the same dst. What lies outside
//            dst is dropped.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA, TILE_BYTES one box.
// Needs      sm_90. Maps of box {BOX_COLS, BOX_ROWS} over dst and {BOX_COLS, BOX_ROWS, 1} over the parts.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of TILE_BYTES: elements that are filled
//            count too) and those bytes; completed once per use of stage s, so the awaited parity starts at
//            0 and flips at each wrap of the ring. No empty[s]: the thread that asks also stores, and
//            wait_group.read frees the stage.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders
//            the two.
// Shared     dynamic: stages, NUM_STAGES x STAGE_BYTES, which is TILE_BYTES rounded up to 128; static:
//            full[NUM_STAGES], padded to 128.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DBOX_ROWS=64 -DBOX_COLS=64 -DTILE_BYTES=16384
//            -DNUM_STAGES=4 reduce_tensor.cu
// Launch     any grid (CTAs stride over the tiles of all parts), 32 threads, NUM_STAGES x STAGE_BYTES of
//            dynamic shared memory.
#include "ptx.cuh"

constexpr u32 STAGE_BYTES = (TILE_BYTES + 127) / 128 * 128;  // tensor copies want 128-byte aligned tiles

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

struct Tile { i32 col, row, part; };

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ Tile tile_at(u32 number, u32 tiles_x, u32 tiles_y) {
  return {(i32)(number % tiles_x * BOX_COLS), (i32)(number / tiles_x % tiles_y * BOX_ROWS),
          (i32)(number / tiles_x / tiles_y)};
}

__device__ __forceinline__ void load_tile(u32 s, const TensorMap& src_map, const Tile& tile) {
  mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);
  cp_async_bulk_tensor_3d_shared_global(stage_at(s), &src_map, tile.col, tile.row, tile.part, full_at(s));
}

extern "C" __global__ void __launch_bounds__(32)
tma_reduce_tensor(const __grid_constant__ TensorMap dst_map, const __grid_constant__ TensorMap src_map,
                  u32 tiles_x, u32 tiles_y, u32 num_parts) {
  if (threadIdx.x != 0) return;
  const u32 num_tiles = tiles_x * tiles_y * num_parts;
  for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
  fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

  u32 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being added
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
    load_tile(s, src_map, tile_at(request, tiles_x, tiles_y));

  u32 s = 0, phase = 0;
  for (u32 number = blockIdx.x; number < num_tiles; number += gridDim.x) {
    const Tile tile = tile_at(number, tiles_x, tiles_y);
    wait_parity(full_at(s), phase);
    cp_reduce_async_bulk_tensor_2d_global_shared_add(&dst_map, tile.col, tile.row, stage_at(s));
    cp_async_bulk_commit_group();
    if (request < num_tiles) {
      cp_async_bulk_wait_group_read<0>();  // the addition has read the stage: refill it
      load_tile(s, src_map, tile_at(request, tiles_x, tiles_y));
      request += gridDim.x;
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  cp_async_bulk_wait_group<0>();  // shared memory must outlive the additions that read it
}
