// How deep must a ring of stages be so that neither the copies nor the computation wait for the other?
//
// Moves      num_elements floats of x and y to dst: dst = y, then WORK times dst = fmaf(alpha, x, dst).
//            global -> shared -> global by cp.async.bulk, computed in place in shared memory: no byte passes
//            through registers on its way from or to global memory, but the last num_elements % 4 floats,
//            which fill no 16-byte unit and take one thread each.
// In flight  NUM_STAGES x 2 x TILE_BYTES of loads per CTA.
// Needs      sm_90. dst, x and y 16-byte aligned; dst overlaps neither.
// Roles      warp 0 moves: one thread asks for every load and every store. All other warps compute. So no
//            warp that computes ever waits until a store has read its stage.
// Barriers   full[s]: FULL_ARRIVALS = 1 (the moving thread, with expect_tx of both tiles' bytes) and
//            FULL_TX_BYTES for a whole tile: the stage may be computed.
//            empty[s]: EMPTY_ARRIVALS, one of each consumer warp: the stage is computed, it may be stored
//            and, once wait_group.read says that it has been, refilled.
//            Both complete once per use of stage s: the awaited parity starts at 0 and flips at each wrap.
//            The first fill waits for nothing, so nobody ever waits for the phase before the first.
// Proxies    full[s] orders the TMA's writes before the consumers' reads. What consumers read and wrote comes
//            before the TMA's store and next load by a fence.proxy.async of each thread, then empty[s].
// Shared     dynamic: stage s at s x STAGE_BYTES: the tile of x, then the tile of y at TILE_BYTES. Static:
//            full[NUM_STAGES], empty[NUM_STAGES], padded to STAGE_ALIGN.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=8192 -DNUM_STAGES=4 -DSTAGE_BYTES=16384
//            -DSTAGE_ALIGN=128 -DTHREADS=160 -DWORK=1 -DPART=BOTH -DFULL_ARRIVALS=1 -DFULL_TX_BYTES=16384
//            -DEMPTY_ARRIVALS=4 ring.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory. PART COPY or COMPUTE leaves out the other half, to see what overlaps.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };

constexpr Part part = PART;
constexpr u32 CONSUMERS = THREADS - 32;
constexpr u32 COPIES = FULL_TX_BYTES / TILE_BYTES;  // that complete on full[s]: x and y, none for COMPUTE

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
static_assert(FULL_TX_BYTES == (part == COMPUTE ? 0 : 2 * TILE_BYTES), "a tile of x and one of y");
static_assert(EMPTY_ARRIVALS == CONSUMERS / 32, "each consumer warp arrives once");

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES];
__shared__ u64 empty[NUM_STAGES];

__device__ __forceinline__ u32 x_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 y_at(u32 s) { return x_at(s) + TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
__device__ __forceinline__ u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

__device__ __forceinline__ u32 bytes_of(u64 tile, u64 bulk_bytes) {
  const u64 left_bytes = bulk_bytes - tile * TILE_BYTES;
  return left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES;
}

__device__ __forceinline__ void load_tile(u32 s, const u8* x, const u8* y, u64 tile, u64 bulk_bytes) {
  const u32 bytes = bytes_of(tile, bulk_bytes);
  mbarrier_arrive_expect_tx(full_at(s), COPIES * bytes);
  if (part == COMPUTE) return;
  cp_async_bulk_shared_global(x_at(s), x + tile * TILE_BYTES, bytes, full_at(s));
  cp_async_bulk_shared_global(y_at(s), y + tile * TILE_BYTES, bytes, full_at(s));
}

__device__ __forceinline__ void store_tile(u8* dst, u32 s, u64 tile, u64 bulk_bytes) {
  if (part == COMPUTE) return;
  cp_async_bulk_global_shared(dst + tile * TILE_BYTES, y_at(s), bytes_of(tile, bulk_bytes));
  cp_async_bulk_commit_group();
}

__device__ __forceinline__ void fma_work(u32& y, u32 x, float alpha) {
  float sum = __uint_as_float(y);
#pragma unroll 8
  for (u32 k = 0; k < WORK; ++k) sum = fmaf(alpha, __uint_as_float(x), sum);
  y = __float_as_uint(sum);
}

__device__ __forceinline__ void axpy(u32 s, u32 consumer, u32 vectors, float alpha) {
#pragma unroll 1
  for (u32 i = consumer; i < vectors; i += CONSUMERS) {
    b32x4 x, y;
    ld_shared(x, x_at(s) + i * 16);
    ld_shared(y, y_at(s) + i * 16);
    fma_work(y.x, x.x, alpha), fma_work(y.y, x.y, alpha);
    fma_work(y.z, x.z, alpha), fma_work(y.w, x.w, alpha);
    st_shared(y_at(s) + i * 16, y);
  }
}

// One thread.
__device__ __forceinline__ void move(u8* dst, const u8* x, const u8* y, u64 num_tiles, u64 bulk_bytes) {
  u64 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
    load_tile(s, x, y, request, bulk_bytes);

  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    wait_parity(empty_at(s), phase);
    store_tile(dst, s, tile, bulk_bytes);
    if (request < num_tiles) {
      cp_async_bulk_wait_group_read<0>();  // the store has read the stage: refill it
      load_tile(s, x, y, request, bulk_bytes);
      request += gridDim.x;
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}

__device__ __forceinline__ void compute(u32 consumer, u64 num_tiles, u64 bulk_bytes, float alpha) {
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    wait_parity(full_at(s), phase);
    if (part != COPY) axpy(s, consumer, bytes_of(tile, bulk_bytes) / 16, alpha);
    fence_proxy_async_shared_cta();  // what I read and wrote comes before the store, and the next load
    __syncwarp();
    if (consumer % 32 == 0) mbarrier_arrive(empty_at(s));
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mbarrier_ring(u8* dst, const u8* x, const u8* y, float alpha, u64 num_elements) {
  const u64 bulk_bytes = num_elements / 4 * 16;
  const u64 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(full_at(s), FULL_ARRIVALS);
      mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    }
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  if (part == COMPUTE)  // nothing is loaded: compute on numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(smem_addr(stages) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  __syncthreads();  // every thread finds the barriers initialised

  if (threadIdx.x >= 32) compute(threadIdx.x - 32, num_tiles, bulk_bytes, alpha);
  else if (threadIdx.x == 0) move(dst, x, y, num_tiles, bulk_bytes);

  const u32 tail = num_elements % 4;
  if (part != COMPUTE && blockIdx.x == gridDim.x - 1 && threadIdx.x < tail) {
    const u64 i = num_elements - tail + threadIdx.x;
    u32 sum = ((const u32*)y)[i];
    if (part == BOTH) fma_work(sum, ((const u32*)x)[i], alpha);
    ((u32*)dst)[i] = sum;
  }
}
