// What does an addition cost when the TMA does it on the way out of shared memory, in 1-D bulk copies?
//
// Moves      num_parts arrays of num_floats: global -> shared by cp.async.bulk, shared -> global by
//            cp.reduce.async.bulk.add.f32, which adds to dst in the L2. dst += part 0 + part 1 + ...; dst
//            is not cleared. No byte passes through registers, but for the last num_floats % 4, which
//            threads add. The order of the additions is free: all CTAs add to the same dst. Each addition
//            rounds to nearest even and flushes subnormals.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA.
// Needs      sm_90. dst and every part 16-byte aligned (part_stride, in floats, a multiple of 4).
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of the tile's bytes) and those bytes;
//            completed once per use of stage s, so the awaited parity starts at 0 and flips at each wrap of
//            the ring. No empty[s]: the thread that asks also stores, and wait_group.read frees the stage.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders
//            the two.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[NUM_STAGES], padded to 128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=4 reduce_bulk.cu
// Launch     any grid (CTAs stride over the tiles of all parts), 32 threads, NUM_STAGES x TILE_BYTES of
//            dynamic shared memory.
#include "ptx.cuh"

constexpr u32 TILE_FLOATS = TILE_BYTES / 4;

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

struct Parts {
  const float* src;
  u64 bulk_floats;  // of one part, a multiple of 4
  u64 part_stride;
  u32 tiles;        // of one part
};
struct Tile {
  u32 part;
  u64 first_float;
  u32 num_bytes;
};

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ Tile tile_at(u32 number, const Parts& parts) {
  const u64 first = (u64)(number % parts.tiles) * TILE_FLOATS, left = parts.bulk_floats - first;
  return {number / parts.tiles, first, left < TILE_FLOATS ? (u32)left * 4 : TILE_BYTES};
}

__device__ __forceinline__ void load_tile(u32 s, u32 number, const Parts& parts) {
  const Tile tile = tile_at(number, parts);
  const float* src = parts.src + tile.part * parts.part_stride + tile.first_float;
  mbarrier_arrive_expect_tx(full_at(s), tile.num_bytes);
  cp_async_bulk_shared_global(stage_at(s), src, tile.num_bytes, full_at(s));
}

extern "C" __global__ void __launch_bounds__(32)
tma_reduce_bulk(float* dst, const float* src, u64 num_floats, u64 part_stride, u32 num_parts) {
  const u64 bulk_floats = num_floats / 4 * 4;
  const Parts parts{src, bulk_floats, part_stride,
                    (u32)((bulk_floats + TILE_FLOATS - 1) / TILE_FLOATS)};
  const u32 num_tiles = parts.tiles * num_parts;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

    u32 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being added
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
      load_tile(s, request, parts);

    u32 s = 0, phase = 0;
    for (u32 number = blockIdx.x; number < num_tiles; number += gridDim.x) {
      const Tile tile = tile_at(number, parts);
      wait_parity(full_at(s), phase);
      cp_reduce_async_bulk_global_shared_add_f32(dst + tile.first_float, stage_at(s), tile.num_bytes);
      cp_async_bulk_commit_group();
      if (request < num_tiles) {
        cp_async_bulk_wait_group_read<0>();  // the addition has read the stage: refill it
        load_tile(s, request, parts);
        request += gridDim.x;
      }
      if (++s == NUM_STAGES) s = 0, phase ^= 1;
    }
    cp_async_bulk_wait_group<0>();  // shared memory must outlive the additions that read it
  }

  const u32 tail = num_floats % 4;
  for (u32 part = blockIdx.x; part < num_parts && threadIdx.x < tail; part += gridDim.x) {
    const u64 at = bulk_floats + threadIdx.x;
    red_global_add_f32(dst + at, src[part * part_stride + at]);
  }
}
