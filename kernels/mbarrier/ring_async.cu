// What does the ring look like without a TMA, where threads copy and cp.async arrives for them?
//
// Moves      num_elements floats of x and y to dst: dst = y, then WORK times dst = fmaf(alpha, x, dst).
//            In: global -> shared by cp.async, no byte through registers. Out: shared -> registers -> global,
//            because there is no asynchronous store before sm_90: every byte of dst passes through registers
//            once. The last num_elements % 4 floats do not use shared memory and take one thread each.
// In flight  NUM_STAGES x 2 x TILE_BYTES of loads per CTA.
// Needs      sm_80. dst, x and y 16-byte aligned; dst overlaps neither.
// Roles      warp 0 loads, 16 bytes per lane and instruction. All other warps compute and store.
// Barriers   full[s]: FULL_ARRIVALS, one of each loading lane. cp.async.mbarrier.arrive arrives by itself
//            when all earlier cp.async of its thread have landed, so a lane asks for tile after tile and
//            never waits for one; .noinc: that arrival is one of FULL_ARRIVALS. No bytes are counted.
//            empty[s]: EMPTY_ARRIVALS, one of each consumer thread, as soon as it has read its part: no warp
//            has to gather first (before sm_90 a __syncwarp in a role's branch costs a call).
//            Both complete once per use of stage s. Consumers await full[s] with parity 0 first; the loading
//            warp awaits empty[s] with parity 1 first, which a fresh barrier answers at once: the phase
//            before the first counts as complete. Both parities flip at each wrap.
// Proxies    none crossed: cp.async, unlike the TMA, writes through the generic proxy.
// Shared     dynamic: stage s at s x STAGE_BYTES: the tile of x, then the tile of y at TILE_BYTES. Static:
//            full[NUM_STAGES], empty[NUM_STAGES], padded to STAGE_ALIGN.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTILE_BYTES=8192 -DNUM_STAGES=4 -DSTAGE_BYTES=16384
//            -DSTAGE_ALIGN=128 -DTHREADS=160 -DWORK=1 -DPART=BOTH -DFULL_ARRIVALS=32 -DEMPTY_ARRIVALS=128
//            ring_async.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory. PART COPY or COMPUTE leaves out the other half, to see what overlaps.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };

constexpr Part part = PART;
constexpr u32 LOADERS = FULL_ARRIVALS;
constexpr u32 CONSUMERS = THREADS - LOADERS;

static_assert(TILE_BYTES % 16 == 0, "a tile is whole vectors");
static_assert(LOADERS == 32, "every lane of warp 0 loads, and arrives once");
static_assert(EMPTY_ARRIVALS == CONSUMERS, "each consumer thread arrives once");

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES];
__shared__ u64 empty[NUM_STAGES];

__device__ __forceinline__ u32 x_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 y_at(u32 s) { return x_at(s) + TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
__device__ __forceinline__ u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

__device__ __forceinline__ u32 vectors_of(u64 tile, u64 num_vectors) {
  const u64 left = num_vectors - tile * (TILE_BYTES / 16);
  return left < TILE_BYTES / 16 ? (u32)left : TILE_BYTES / 16;
}

__device__ __forceinline__ void fma_work(u32& y, u32 x, float alpha) {
  float sum = __uint_as_float(y);
#pragma unroll 8
  for (u32 k = 0; k < WORK; ++k) sum = fmaf(alpha, __uint_as_float(x), sum);
  y = __float_as_uint(sum);
}

__device__ __forceinline__ void load(u32 lane, const u8* x, const u8* y, u64 num_tiles, u64 num_vectors) {
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u64 start = tile * TILE_BYTES;
    const u32 vectors = part == COMPUTE ? 0 : vectors_of(tile, num_vectors);
    wait_parity(empty_at(s), phase ^ 1);
#pragma unroll 1
    for (u32 at = lane * 16; at < vectors * 16; at += LOADERS * 16) {
      cp_async_cg<16>(x_at(s) + at, x + start + at);
      cp_async_cg<16>(y_at(s) + at, y + start + at);
    }
    cp_async_mbarrier_arrive_noinc(full_at(s));
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

__device__ __forceinline__ void axpy(u8* dst, u32 s, u32 consumer, u32 vectors, float alpha) {
#pragma unroll 1
  for (u32 at = consumer * 16; at < vectors * 16; at += CONSUMERS * 16) {
    b32x4 x, y;
    ld_shared(y, y_at(s) + at);
    if (part != COPY) {
      ld_shared(x, x_at(s) + at);
      fma_work(y.x, x.x, alpha), fma_work(y.y, x.y, alpha);
      fma_work(y.z, x.z, alpha), fma_work(y.w, x.w, alpha);
    }
    if (part == COMPUTE) st_shared(y_at(s) + at, y);
    else st_global(dst + at, y);
  }
}

__device__ __forceinline__ void compute(u8* dst, u32 consumer, u64 num_tiles, u64 num_vectors, float alpha) {
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    wait_parity(full_at(s), phase);
    axpy(dst + tile * TILE_BYTES, s, consumer, vectors_of(tile, num_vectors), alpha);
    mbarrier_arrive(empty_at(s));
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mbarrier_ring_async(u8* dst, const u8* x, const u8* y, float alpha, u64 num_elements) {
  const u64 num_vectors = num_elements / 4;
  const u64 num_tiles = (num_vectors * 16 + TILE_BYTES - 1) / TILE_BYTES;

  if (threadIdx.x == 0)
    for (u32 s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(full_at(s), FULL_ARRIVALS);
      mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    }
  if (part == COMPUTE)  // nothing is loaded: compute on numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(smem_addr(stages) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  __syncthreads();  // every thread finds the barriers initialised

  if (threadIdx.x < LOADERS) load(threadIdx.x, x, y, num_tiles, num_vectors);
  else compute(dst, threadIdx.x - LOADERS, num_tiles, num_vectors, alpha);

  const u32 tail = num_elements % 4;
  if (part != COMPUTE && blockIdx.x == gridDim.x - 1 && threadIdx.x < tail) {
    const u64 i = num_elements - tail + threadIdx.x;
    u32 sum = ((const u32*)y)[i];
    if (part == BOTH) fma_work(sum, ((const u32*)x)[i], alpha);
    ((u32*)dst)[i] = sum;
  }
}
