// A tile of C = A x B^T, by a CTA of 128 threads: A and B are bfloat16 and row-major, sums are in float32.
//
// Blocks of 64 x 64 of A and of B come by cp.async, in a ring of NUM_STAGES; what lies outside is zero. Each
// of 2 x 2 warps computes 32 x 32 of the tile, as mbarrier/matmul.cu does and in the same order: k from its
// begin on, 16 at a time. Dynamic shared memory: stage s at s x STAGE_BYTES, A's block first.
#pragma once
#include "ptx.cuh"

constexpr u32 BLOCK = 64;             // of m, of n and of k
constexpr u32 ROW_BYTES = BLOCK * 2;  // of a block
constexpr u32 CHUNKS = ROW_BYTES / 16;
constexpr u32 BLOCK_BYTES = BLOCK * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * BLOCK_BYTES;
constexpr u32 TILE_BYTES = BLOCK * BLOCK * 4;  // of fragments, as registers hold them
static_assert(THREADS == 128, "2 x 2 warps, each computes 32 x 32 of the tile");
static_assert(NUM_STAGES >= 2, "one is loaded while another is used");

// Element e of a warp's fragment [i][j]: row 16 i + lane / 4, and + 8 for e = 2, 3; column 8 j + 2 (lane %
// 4), and + 1 for e = 1, 3.
using Fragments = float[2][4][4];

struct Operands {
  const u8* a;  // rows of k elements
  const u8* b;
  u64 k;
};

struct Tile {
  u32 row, rows;  // where it begins in C, and in C how many of its 64 rows and columns there are
  u32 column, columns;
};

extern __shared__ __align__(128) u8 stages[];

// Chunks of a row are permuted by its number modulo 8: neighbouring rows have theirs in different banks.
PTX_INLINE u32 chunk_at(u32 block, u32 row, u32 chunk) {
  return smem_addr(stages) + block * BLOCK_BYTES + row * ROW_BYTES + ((chunk ^ (row % 8)) * 16);
}

// 64 of k, from `first` on, of `rows` rows of a matrix; zeros outside.
PTX_INLINE void load_block(u32 block, const u8* matrix, u32 row, u32 rows, u64 first, u64 k) {
#pragma unroll
  for (u32 i = threadIdx.x; i < BLOCK * CHUNKS; i += THREADS) {
    const u32 here = i / CHUNKS, chunk = i % CHUNKS;
    const u64 column = first + chunk * 8;
    const bool inside = here < rows && column < k;
    const u64 at = inside ? ((row + here) * k + column) * 2 : 0;
    cp_async_ca<16>(chunk_at(block, here, chunk), matrix + at, inside ? 16 : 0);
  }
}

// acc += one stage's share of the warp's 32 x 32.
PTX_INLINE void multiply(Fragments& acc, u32 a_block, u32 b_block, u32 row, u32 column) {
  const u32 lane = threadIdx.x % 32, in_matrix = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
  for (u32 chunk = 0; chunk < CHUNKS; chunk += 2) {  // 16 of k: two chunks
    u32 a[2][4];  // of 16 x 16: rows 0-7, rows 8-15, then both again, 8 of k further
#pragma unroll
    for (u32 i = 0; i < 2; ++i)
      ldmatrix_x4(a[i], chunk_at(a_block, row + 16 * i + 8 * low + in_matrix, chunk + high));
#pragma unroll
    for (u32 j = 0; j < 4; j += 2) {
      u32 b[4];  // of 16 columns: columns 0-7, 8 of k further, then columns 8-15
      ldmatrix_x4(b, chunk_at(b_block, column + 8 * j + 8 * high + in_matrix, chunk + low));
      const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        mma_m16n8k16_bf16(acc[i][j], a[i], left);
        mma_m16n8k16_bf16(acc[i][j + 1], a[i], right);
      }
    }
  }
}

// acc += this warp's part of the tile: rows from 32 (warp / 2), columns from 32 (warp % 2).
PTX_INLINE void compute(Fragments& acc, const Operands& operands, const Tile& tile) {
  const u32 row = threadIdx.x / 64 * 32, column = threadIdx.x / 32 % 2 * 32;
  const u32 blocks_k = (u32)((operands.k + BLOCK - 1) / BLOCK);
  const auto load = [&](u32 block) {  // or nothing, as a group all the same: they are counted
    const u32 a = block % NUM_STAGES * 2;
    if (block < blocks_k) {
      load_block(a, operands.a, tile.row, tile.rows, (u64)block * BLOCK, operands.k);
      load_block(a + 1, operands.b, tile.column, tile.columns, (u64)block * BLOCK, operands.k);
    }
    cp_async_commit_group();
  };
  __syncthreads();  // all have used the last tile's stages
  for (u32 block = 0; block < NUM_STAGES - 1; ++block) load(block);
#pragma unroll 1
  for (u32 block = 0; block < blocks_k; ++block) {
    cp_async_wait_group<NUM_STAGES - 2>();  // this thread's chunks of the block have come ...
    __syncthreads();                        // all threads'; and all have used the stage that is loaded now
    load(block + NUM_STAGES - 1);
    const u32 a = block % NUM_STAGES * 2;
    multiply(acc, a, a + 1, row, column);
  }
}

// use(row, column, where in the tile's slot, fragment) for each that has an element in C.
template <class Use>
PTX_INLINE void for_fragments(const Tile& tile, Fragments& acc, Use use) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (u32 f = 0; f < 8; ++f) {
    const u32 row = warp / 2 * 32 + f / 4 * 16 + lane / 4, column = warp % 2 * 32 + f % 4 * 8 + lane % 4 * 2;
    const u32 at = ((warp * 8 + f) * 32 + lane) * 16;
    if (row < tile.rows && column < tile.columns) use(row, column, at, acc[f / 4][f % 4]);
  }
}

