// Can one CTA copy the next tile while it computes on this one, with two buffers and one barrier each?
//
// Moves      num_elements floats of x and y to dst: dst = y, then WORK times dst = fmaf(alpha, x, dst).
//            global -> shared -> global by cp.async.bulk, computed in place in shared memory: no byte passes
//            through registers on its way from or to global memory, but the last num_elements % 4 floats,
//            which fill no 16-byte unit and take one thread each.
// In flight  the next tile of x and y, 2 x TILE_BYTES per CTA, while this one is computed.
// Needs      sm_90. dst, x and y 16-byte aligned; dst overlaps neither.
// Barriers   full[s]: FULL_ARRIVALS = 1 (the asking thread, with expect_tx of both tiles' bytes) and
//            FULL_TX_BYTES for a whole tile; one phase per use of buffer s, so the awaited parity starts at 0
//            and flips each time s comes round. No empty[s]: the asking thread also stores, and
//            wait_group.read tells it that the buffer has been read. __syncthreads: the tile is computed.
// Proxies    full[s] orders the TMA's writes before the threads' reads. The threads' reads and writes come
//            before the TMA's store and next load by a fence.proxy.async of each, then the __syncthreads.
// Stages     NUM_STAGES 2: tile i + 1 is asked for while tile i is computed; 1: before, so nothing overlaps.
// Shared     dynamic: buffer s at s x STAGE_BYTES: the tile of x, then the tile of y at TILE_BYTES. Static:
//            full[NUM_STAGES], padded to STAGE_ALIGN.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=2 -DSTAGE_BYTES=32768
//            -DSTAGE_ALIGN=128 -DTHREADS=256 -DWORK=1 -DPART=BOTH -DFULL_ARRIVALS=1 -DFULL_TX_BYTES=32768
//            pingpong.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory. PART COPY or COMPUTE leaves out the other half, to see what overlaps.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };

constexpr Part part = PART;
constexpr u32 COPIES = FULL_TX_BYTES / TILE_BYTES;  // that complete on full[s]: x and y, none for COMPUTE
constexpr u32 HEAD = TILE_BYTES / 16 / THREADS / 4 * THREADS;  // vectors computed before asking: about 1/4

static_assert(NUM_STAGES == 1 || NUM_STAGES == 2, "two buffers, or one to see what the second is good for");
static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
static_assert(FULL_TX_BYTES == (part == COMPUTE ? 0 : 2 * TILE_BYTES), "a tile of x and one of y");

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES];

__device__ __forceinline__ u32 x_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 y_at(u32 s) { return x_at(s) + TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ u32 bytes_of(u64 tile, u64 bulk_bytes) {
  const u64 left_bytes = bulk_bytes - tile * TILE_BYTES;
  return left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES;
}

__device__ __forceinline__ void load_tile(u32 s, const u8* x, const u8* y, u64 tile, u64 bulk_bytes) {
  const u32 bytes = bytes_of(tile, bulk_bytes);
  cp_async_bulk_wait_group_read<0>();  // the store of the tile before has read the buffer: overwrite it
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

// Vectors first .. last - 1 of buffer s, 16 bytes per thread and turn.
__device__ __forceinline__ void axpy(u32 s, u32 first, u32 last, float alpha) {
  if (part == COPY) return;
#pragma unroll 1
  for (u32 i = first + threadIdx.x; i < last; i += THREADS) {
    b32x4 x, y;
    ld_shared(x, x_at(s) + i * 16);
    ld_shared(y, y_at(s) + i * 16);
    fma_work(y.x, x.x, alpha), fma_work(y.y, x.y, alpha);
    fma_work(y.z, x.z, alpha), fma_work(y.w, x.w, alpha);
    st_shared(y_at(s) + i * 16, y);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mbarrier_pingpong(u8* dst, const u8* x, const u8* y, float alpha, u64 num_elements) {
  const u64 bulk_bytes = num_elements / 4 * 16;
  const u64 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES;
  const bool asks = threadIdx.x == 0;

  if (asks) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), FULL_ARRIVALS);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
    if (NUM_STAGES == 2 && blockIdx.x < num_tiles) load_tile(0, x, y, blockIdx.x, bulk_bytes);
  }
  if (part == COMPUTE)  // nothing is loaded: compute on numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(smem_addr(stages) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  __syncthreads();  // every thread finds the barriers initialised

  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u64 next = tile + gridDim.x;
    const u32 vectors = bytes_of(tile, bulk_bytes) / 16;
    const u32 head = HEAD < vectors ? HEAD : vectors;

    if (NUM_STAGES == 1 && asks) load_tile(0, x, y, tile, bulk_bytes);
    wait_parity(full_at(s), phase);
    axpy(s, 0, head, alpha);  // meanwhile the store of the tile before reads the other buffer
    if (NUM_STAGES == 2 && asks && next < num_tiles) load_tile(s ^ 1, x, y, next, bulk_bytes);
    axpy(s, head, vectors, alpha);
    fence_proxy_async_shared_cta();  // what I read and wrote comes before the store, and the next load
    __syncthreads();
    if (asks) store_tile(dst, s, tile, bulk_bytes);
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  if (asks) cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it

  const u32 tail = num_elements % 4;
  if (part != COMPUTE && blockIdx.x == gridDim.x - 1 && threadIdx.x < tail) {
    const u64 i = num_elements - tail + threadIdx.x;
    u32 sum = ((const u32*)y)[i];
    if (part == BOTH) fma_work(sum, ((const u32*)x)[i], alpha);
    ((u32*)dst)[i] = sum;
  }
}
