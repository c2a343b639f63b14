// How fast does the TMA move bytes as 2-D tensor copies, with one thread asking?
//
// Moves      num_bytes from src to dst: global -> shared -> global, both ways by cp.async.bulk.tensor.2d; no
//            byte passes through registers. The arrays are seen as rows of ROW_BYTES, a tile is BOX_ROWS of
//            them. Loads fill the rows past the end with zeros, stores drop them. The last num_bytes %
//            ROW_BYTES bytes are no row: the threads move them.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA, TILE_BYTES = BOX_ROWS x ROW_BYTES.
// Needs      sm_90. src and dst 16-byte aligned, not overlapping. Tensor maps of box {ROW_BYTES, BOX_ROWS}
//            over the same rows of each; both with one swizzle, which then cancels out.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of TILE_BYTES: rows that are filled count
//            too) and those bytes; completed once per use of stage s, so the awaited parity starts at 0 and
//            flips at each wrap of the ring. No empty[s]: the thread that asks also stores, and
//            wait_group.read frees the stage.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders the
//            two.
// Shared     dynamic: stages, NUM_STAGES x STAGE_BYTES, where STAGE_BYTES is TILE_BYTES rounded up to
//            STAGE_ALIGN: 128, or the swizzle's period (256, 512, 1024 for 32, 64, 128 bytes), so that each
//            stage starts a pattern; static: full[NUM_STAGES], padded to STAGE_ALIGN.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DROW_BYTES=128 -DBOX_ROWS=128 -DSTAGE_ALIGN=128
//            -DNUM_STAGES=4 -DTHREADS=32 tensor2d.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory.
#include "ptx.cuh"

constexpr u32 TILE_BYTES = BOX_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = (TILE_BYTES + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;

static_assert(ROW_BYTES % 16 == 0 && BOX_ROWS <= 256, "what a tensor map's box allows");
static_assert(STAGE_ALIGN % 128 == 0, "a tensor copy's shared address is 128-byte aligned");

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ void load_tile(u32 s, const TensorMap& src_map, u64 tile) {
  mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);
  cp_async_bulk_tensor_2d_shared_global(stage_at(s), &src_map, 0, (u32)tile * BOX_ROWS, full_at(s));
}

extern "C" __global__ void __launch_bounds__(THREADS)
tma_tensor2d(const __grid_constant__ TensorMap dst_map, const __grid_constant__ TensorMap src_map, u8* dst,
             const u8* src, u64 num_bytes) {
  const u32 tail_bytes = num_bytes % ROW_BYTES;
  const u64 num_rows = num_bytes / ROW_BYTES;
  const u64 num_tiles = (num_rows + BOX_ROWS - 1) / BOX_ROWS;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

    u64 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
      load_tile(s, src_map, request);

    u32 s = 0, phase = 0;
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
      wait_parity(full_at(s), phase);
      cp_async_bulk_tensor_2d_global_shared(&dst_map, 0, (u32)tile * BOX_ROWS, stage_at(s));
      cp_async_bulk_commit_group();
      if (request < num_tiles) {
        cp_async_bulk_wait_group_read<0>();  // the store has read the stage: refill it
        load_tile(s, src_map, request);
        request += gridDim.x;
      }
      if (++s == NUM_STAGES) s = 0, phase ^= 1;
    }
    cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
  }

  if (blockIdx.x == gridDim.x - 1) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < tail_bytes; i += THREADS)
      dst[num_rows * ROW_BYTES + i] = src[num_rows * ROW_BYTES + i];
  }
}
