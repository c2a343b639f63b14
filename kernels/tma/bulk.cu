// How fast does the TMA move bytes as 1-D bulk copies, with one thread asking?
//
// Moves      num_bytes from src to dst: global -> shared -> global, both ways by cp.async.bulk; no byte
//            passes through registers. A bulk copy takes multiples of 16 bytes: the last num_bytes % 16 go
//            through one thread each.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA.
// Needs      sm_90. src and dst 16-byte aligned, not overlapping.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of the tile's bytes) and those bytes;
//            completed once per use of stage s, so the awaited parity starts at 0 and flips at each wrap of
//            the ring. No empty[s]: the thread that asks also stores, and wait_group.read tells it that the
//            stage has been read.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders the
//            two.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[NUM_STAGES], padded to 128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=4 -DTHREADS=32 bulk.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x TILE_BYTES of dynamic
//            shared memory.
#include "ptx.cuh"

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
static_assert(THREADS % 32 == 0, "the tail of up to 15 bytes takes one thread per byte");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ u32 bytes_of(u64 tile, u64 bulk_bytes) {
  const u64 left_bytes = bulk_bytes - tile * TILE_BYTES;
  return left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES;
}

__device__ __forceinline__ void load_tile(u32 s, const u8* src, u64 tile, u64 bulk_bytes) {
  const u32 tile_bytes = bytes_of(tile, bulk_bytes);
  mbarrier_arrive_expect_tx(full_at(s), tile_bytes);
  cp_async_bulk_shared_global(stage_at(s), src + tile * TILE_BYTES, tile_bytes, full_at(s));
}

extern "C" __global__ void __launch_bounds__(THREADS) tma_bulk(u8* dst, const u8* src, u64 num_bytes) {
  const u32 tail_bytes = num_bytes % 16;
  const u64 bulk_bytes = num_bytes - tail_bytes;
  const u64 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

    u64 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
      load_tile(s, src, request, bulk_bytes);

    u32 s = 0, phase = 0;
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
      wait_parity(full_at(s), phase);
      cp_async_bulk_global_shared(dst + tile * TILE_BYTES, stage_at(s), bytes_of(tile, bulk_bytes));
      cp_async_bulk_commit_group();
      if (request < num_tiles) {
        cp_async_bulk_wait_group_read<0>();  // the store has read the stage: refill it
        load_tile(s, src, request, bulk_bytes);
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
