// How do rows of any width reach shared memory as whole vectors, zeros behind them, without a branch?
//
// Moves      num_rows rows of row_bytes, src_pitch_bytes apart, to rows of PADDED_BYTES without gaps: the
//            rest of each row becomes zeros. global -> shared by cp.async with a source size below 16 where
//            a row ends (0 behind it: src is not touched), shared -> registers -> global.
// In flight  NUM_STAGES x TILE_BYTES per CTA, TILE_BYTES = TILE_ROWS x PADDED_BYTES.
// Needs      sm_80. src, dst and src_pitch_bytes 16-byte aligned; row_bytes at most PADDED_BYTES, any number.
// Barriers   one commit group per tile and thread, an empty one past the end, so that "at most NUM_STAGES - 1
//            groups pending" means: the oldest tile is here. A thread stores the vectors that it copied
//            itself, so that its own wait suffices and no thread waits for another.
// Shared     stage s at s x TILE_BYTES.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DPADDED_BYTES=256 -DTILE_ROWS=16 -DNUM_STAGES=2
//            -DTHREADS=128 pad_async.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x TILE_BYTES of dynamic
//            shared memory.
#include "ptx.cuh"

constexpr u32 TILE_BYTES = TILE_ROWS * PADDED_BYTES;
constexpr u32 ROW_VECTORS = PADDED_BYTES / 16;

static_assert(PADDED_BYTES % 16 == 0, "a padded row is whole vectors");

extern __shared__ __align__(128) u8 stages[];

struct Rows {
  const u8* src;
  u64 pitch_bytes, num_rows;
  u32 row_bytes;
};

__device__ __forceinline__ u32 vectors_of(const Rows& rows, u64 tile) {
  const u64 left = rows.num_rows - tile * TILE_ROWS;
  return (left < TILE_ROWS ? (u32)left : TILE_ROWS) * ROW_VECTORS;
}

__device__ __forceinline__ void load_tile(u32 stage, const Rows& rows, u64 tile) {
  const u32 num_vectors = vectors_of(rows, tile);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < num_vectors; i += THREADS) {
    const u32 column = i % ROW_VECTORS * 16;
    const u32 left_bytes = rows.row_bytes > column ? rows.row_bytes - column : 0;
    const u8* src = rows.src + (tile * TILE_ROWS + i / ROW_VECTORS) * rows.pitch_bytes + column;
    cp_async_ca<16>(stage + i * 16, src, left_bytes < 16 ? left_bytes : 16);
  }
}

__device__ __forceinline__ void store_tile(u8* dst, u32 stage, u32 num_vectors) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < num_vectors; i += THREADS) {
    b32x4 v;
    ld_shared(v, stage + i * 16);
    st_global(dst + i * 16, v);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
lsu_pad_async(u8* dst, const u8* src, u64 num_rows, u32 row_bytes, u64 src_pitch_bytes) {
  const Rows rows{src, src_pitch_bytes, num_rows, row_bytes};
  const u32 first_stage = smem_addr(stages);
  const u64 num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;

  u64 request = blockIdx.x;  // the next tile to ask for, NUM_STAGES ahead of the one being stored
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES; ++s, request += gridDim.x) {
    if (request < num_tiles) load_tile(first_stage + s * TILE_BYTES, rows, request);
    cp_async_commit_group();
  }

  u32 s = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, request += gridDim.x) {
    cp_async_wait_group<NUM_STAGES - 1>();
    store_tile(dst + tile * TILE_BYTES, first_stage + s * TILE_BYTES, vectors_of(rows, tile));
    if (request < num_tiles) load_tile(first_stage + s * TILE_BYTES, rows, request);
    cp_async_commit_group();
    if (++s == NUM_STAGES) s = 0;
  }
}
