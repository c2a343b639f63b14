// What must a thread do to read a swizzled tile, and what does the swizzle save?
//
// Moves      a matrix of 4-byte elements: global -> shared by cp.async.bulk.tensor.2d, which shuffles the
//            tile's 16-byte chunks as the map's swizzle says; shared -> registers -> global by all threads.
//            OUTPUT TRANSPOSED: dst is the transposed matrix; each lane takes 16 bytes of its own row, so a
//            warp reads down a column, and without a swizzle its lanes meet in the same banks. OUTPUT
//            AS_STORED: dst gets the bytes of shared memory as they lie there, tile after tile.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA, TILE_BYTES = BOX_ROWS x ROW_BYTES.
// Needs      sm_90. A map of box {ROW_BYTES / 4, BOX_ROWS} with this SWIZZLE, ROW_BYTES its full span.
// Barriers   full[s]: 1 arrival (thread 0, with expect_tx of TILE_BYTES) and those bytes; completed once per
//            use of stage s, so the awaited parity starts at 0 and flips at each wrap of the ring. No
//            empty[s]: __syncthreads frees a stage.
// Proxies    async -> generic: the wait on full[s]. Generic reads -> the next load into the stage: the fence
//            of each reader before __syncthreads.
// Shared     dynamic: stages, NUM_STAGES x STAGE_BYTES: TILE_BYTES rounded up to 1024, so that each stage
//            starts a pattern of any swizzle; static: full[NUM_STAGES], padded to 1024.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DSWIZZLE=3 -DROW_BYTES=128 -DBOX_ROWS=64
//            -DOUTPUT=TRANSPOSED -DNUM_STAGES=2 -DTHREADS=128 swizzle.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory.
#include "ptx.cuh"

enum { AS_STORED, TRANSPOSED };
constexpr u32 TILE_BYTES = BOX_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = (TILE_BYTES + 1023) / 1024 * 1024;
constexpr u32 CHUNKS = ROW_BYTES / 16;

static_assert(BOX_ROWS % 32 == 0 && ROW_BYTES % 16 == 0, "a warp reads chunks of 32 rows");

extern __shared__ __align__(1024) u8 stages[];
__shared__ u64 full[NUM_STAGES];

// The TMA exchanges chunks within a row by XOR with bits of the row's number. Both are bits of the absolute
// shared address, so the same function finds a byte and undoes itself. For a tile that starts a pattern (1024
// bytes apart at the most), an offset into the tile does as well.
__device__ __forceinline__ u32 swizzle_32b(u32 a) { return a ^ (a >> 3 & 0x10); }   // bit 4 ^= bit 7
__device__ __forceinline__ u32 swizzle_64b(u32 a) { return a ^ (a >> 3 & 0x30); }   // bits 4-5 ^= bits 7-8
__device__ __forceinline__ u32 swizzle_128b(u32 a) { return a ^ (a >> 3 & 0x70); }  // bits 4-6 ^= bits 7-9
__device__ __forceinline__ u32 swizzle_128b_atom_32b(u32 a) { return a ^ (a >> 2 & 0x60); }  // 5-6 ^= 7-8
__device__ __forceinline__ u32 swizzle_128b_atom_64b(u32 a) { return a ^ (a >> 1 & 0x40); }  // 6 ^= 7

__device__ __forceinline__ u32 swizzled(u32 addr) {  // SWIZZLE is numbered as CUtensorMapSwizzle
  if constexpr (SWIZZLE == 1) return swizzle_32b(addr);
  if constexpr (SWIZZLE == 2) return swizzle_64b(addr);
  if constexpr (SWIZZLE == 3) return swizzle_128b(addr);
  if constexpr (SWIZZLE == 4) return swizzle_128b_atom_32b(addr);
  if constexpr (SWIZZLE == 6) return swizzle_128b_atom_64b(addr);
  return addr;
}

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ void load_tile(u32 s, const TensorMap& src_map, u32 tile, u32 tiles_x) {
  mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);
  cp_async_bulk_tensor_2d_shared_global(stage_at(s), &src_map, tile % tiles_x * (ROW_BYTES / 4),
                                        tile / tiles_x * BOX_ROWS, full_at(s));
}

__device__ __forceinline__ void write_as_stored(u32* dst, u32 stage, u32 tile) {
  for (u32 at = threadIdx.x * 16; at < TILE_BYTES; at += THREADS * 16) {
    b32x4 chunk;
    ld_shared(chunk, stage + at);
    st_global(dst + ((u64)tile * TILE_BYTES + at) / 4, chunk);
  }
}

// dst is num_cols x num_rows. Lanes of a warp have neighbouring rows of src, so their stores are contiguous.
__device__ __forceinline__ void write_transposed(u32* dst, u32 stage, u32 row0, u32 col0, u32 num_rows,
                                                 u32 num_cols) {
  for (u32 i = threadIdx.x; i < BOX_ROWS * CHUNKS; i += THREADS) {
    const u32 row = i % BOX_ROWS, chunk = i / BOX_ROWS;
    b32x4 value;
    ld_shared(value, swizzled(stage + row * ROW_BYTES + chunk * 16));
    const u32 col = col0 + chunk * 4;
    if (row0 + row >= num_rows || col >= num_cols) continue;  // num_cols is a multiple of 4
    u32* out = dst + (u64)col * num_rows + row0 + row;
    st_global(out, b32x1{value.x});
    st_global(out + num_rows, b32x1{value.y});
    st_global(out + 2ull * num_rows, b32x1{value.z});
    st_global(out + 3ull * num_rows, b32x1{value.w});
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
tma_swizzle(const __grid_constant__ TensorMap src_map, u32* dst, u32 num_rows, u32 num_cols) {
  const u32 tiles_x = (num_cols * 4 + ROW_BYTES - 1) / ROW_BYTES;
  const u32 num_tiles = tiles_x * ((num_rows + BOX_ROWS - 1) / BOX_ROWS);

  u32 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being read
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
      load_tile(s, src_map, request, tiles_x);
  }
  __syncthreads();  // full[] is initialised before anyone waits on it

  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    wait_parity(full_at(s), phase);
    if constexpr (OUTPUT == AS_STORED) write_as_stored(dst, stage_at(s), tile);
    if constexpr (OUTPUT == TRANSPOSED)
      write_transposed(dst, stage_at(s), tile / tiles_x * BOX_ROWS, tile % tiles_x * (ROW_BYTES / 4),
                       num_rows, num_cols);
    fence_proxy_async_shared_cta();  // this thread's reads of the stage before the load that overwrites it
    __syncthreads();
    if (threadIdx.x == 0 && request < num_tiles) {
      load_tile(s, src_map, request, tiles_x);
      request += gridDim.x;
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}
