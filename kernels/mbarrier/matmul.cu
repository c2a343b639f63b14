// How does a ring of tensor copies feed matrix instructions, and where does the 128-byte swizzle put a row?
//
// Computes   C = A x B^T; A (m x k) and B (n x k) are bfloat16 and row-major, C (m x n) is float32. The last
//            tile of m, n and k may be ragged: loads fill what lies outside with zeros, stores leave it out.
// Moves      per tile of C and block of k: 64 x 64 elements of A and of B, global -> shared, by
//            cp.async.bulk.tensor.2d; shared -> registers by ldmatrix. C: registers -> global.
// In flight  NUM_STAGES x 16384 bytes per CTA.
// Needs      sm_90. Tensor maps of box {64, 64} with the 128-byte swizzle; k a multiple of 8, so that rows
//            start at multiples of 16 bytes.
// Barriers   full[s]: FULL_ARRIVALS = 1 (the producer, with expect_tx of both blocks) and FULL_TX_BYTES.
//            empty[s]: EMPTY_ARRIVALS (lane 0 of each consumer warp, which has read the stage). Both complete
//            once per use of stage s. Consumers await full[s] at parity phase, the producer empty[s] at phase
//            ^ 1: on a fresh barrier that wait passes at once, because a stage is free before its first use.
//            The ring runs on from tile to tile: the next tile is loaded while this one is stored.
// Proxies    async write -> generic read: the wait on full[s]. Generic read -> async overwrite: every
//            reader's proxy fence, then empty[s].
// Shared     dynamic: stage s at s x 16384, A's block first; each block starts a period of the swizzle (1024
//            bytes). Static: full[], empty[], padded to 1024 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DNUM_STAGES=4 -DFULL_ARRIVALS=1
//            -DFULL_TX_BYTES=16384 -DEMPTY_ARRIVALS=4 matmul.cu
// Launch     any grid (CTAs stride over the tiles of C), THREADS threads, NUM_STAGES x 16384 of dynamic
//            shared memory.
#include "ptx.cuh"

constexpr u32 BLOCK = 64;             // of m, of n and of k
constexpr u32 ROW_BYTES = BLOCK * 2;  // 128: what the swizzle spans
constexpr u32 BLOCK_BYTES = BLOCK * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * BLOCK_BYTES;
constexpr u32 CONSUMER_WARPS = 4;  // 2 x 2, each computes 32 x 32 of the tile
constexpr u32 THREADS = 32 * (CONSUMER_WARPS + 1);

static_assert(FULL_TX_BYTES == STAGE_BYTES, "a block of A and one of B");
static_assert(EMPTY_ARRIVALS == CONSUMER_WARPS, "each consumer warp arrives once");

extern __shared__ __align__(1024) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
__device__ __forceinline__ u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

struct Ring {  // a place in the ring: the stage, and the parity of this round through it
  u32 s = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
};

// Where 16-byte chunk `chunk` of row `row` lies. The swizzle is address ^= (address >> 3) & 0x70: bits 7-9,
// the row within 8, are added without carry to bits 4-6, the chunk. So the same chunk of 8 neighbouring rows,
// which is what ldmatrix reads, lies in 8 different groups of 4 banks: no conflict. Without it, all 8 in one.
__device__ __forceinline__ u32 chunk_at(u32 block, u32 row, u32 chunk) {
  return block + row * ROW_BYTES + ((chunk ^ (row % 8)) * 16);
}

__device__ __forceinline__ void produce(const TensorMap& a, const TensorMap& b, u32 tiles_n, u32 tiles,
                                        u32 blocks_k) {
  prefetch_tensormap(&a), prefetch_tensormap(&b);  // both maps on their way before the first copy needs them
  Ring ring;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u32 row = tile / tiles_n * BLOCK, column = tile % tiles_n * BLOCK;
#pragma unroll 1
    for (u32 block = 0; block < blocks_k; ++block, ring.next()) {
      wait_parity(empty_at(ring.s), ring.phase ^ 1);
      mbarrier_arrive_expect_tx(full_at(ring.s), FULL_TX_BYTES);
      cp_async_bulk_tensor_2d_shared_global(stage_at(ring.s), &a, block * BLOCK, row, full_at(ring.s));
      cp_async_bulk_tensor_2d_shared_global(stage_at(ring.s) + BLOCK_BYTES, &b, block * BLOCK, column,
                                            full_at(ring.s));
    }
  }
}

// One stage's share of the warp's 32 x 32: acc[i][j] is 16 rows from 16 i, 8 columns from 8 j.
__device__ __forceinline__ void multiply(float (&acc)[2][4][4], u32 a_block, u32 b_block, u32 row,
                                         u32 column) {
  const u32 lane = threadIdx.x % 32, in_matrix = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
  for (u32 chunk = 0; chunk < ROW_BYTES / 16; chunk += 2) {  // 16 of k: two chunks
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

// Element e of fragment acc[i][j]: row lane / 4, and + 8 for e = 2, 3; column 2 (lane % 4), and + 1 for e =
// 1, 3.
__device__ __forceinline__ void store(float* c, u32 m, u32 n, const float (&acc)[2][4][4], u32 row,
                                      u32 column) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (u32 i = 0; i < 32; ++i) {
    const u32 at_row = row + i / 16 * 16 + i / 2 % 2 * 8 + lane / 4;
    const u32 at_column = column + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
    if (at_row < m && at_column < n) c[(u64)at_row * n + at_column] = acc[i / 16][i / 4 % 4][i % 4];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
mbarrier_matmul(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, float* c,
                u32 m, u32 n, u32 k) {
  const u32 warp = threadIdx.x / 32;
  const u32 tiles_n = (n + BLOCK - 1) / BLOCK, tiles = (m + BLOCK - 1) / BLOCK * tiles_n;
  const u32 blocks_k = (k + BLOCK - 1) / BLOCK;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(full_at(s), FULL_ARRIVALS);
      mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    }
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  __syncthreads();  // nobody waits or arrives before that

  if (warp == CONSUMER_WARPS) {
    if (threadIdx.x % 32 == 0) produce(a_map, b_map, tiles_n, tiles, blocks_k);
    return;  // before the last loads have landed: the consumers, who await them all, keep the CTA alive
  }

  const u32 row = warp / 2 * 32, column = warp % 2 * 32;  // of this warp in the tile
  Ring ring;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[2][4][4] = {};
#pragma unroll 1
    for (u32 block = 0; block < blocks_k; ++block, ring.next()) {
      wait_parity(full_at(ring.s), ring.phase);
      multiply(acc, stage_at(ring.s), stage_at(ring.s) + BLOCK_BYTES, row, column);
      fence_proxy_async_shared_cta();  // this thread's ldmatrix before the copies that overwrite the stage
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_at(ring.s));
    }
    store(c, m, n, acc, tile / tiles_n * BLOCK + row, tile % tiles_n * BLOCK + column);
  }
}
