// What does cp.async gain over plain loads, by letting bytes reach shared memory without registers?
//
// Moves      num_bytes from src to dst: global -> shared (cp.async), shared -> registers -> global (there is
//            no asynchronous store before the TMA). The last num_bytes % VECTOR_BYTES bytes go global ->
//            registers -> global.
// In flight  NUM_STAGES x TILE_BYTES per CTA.
// Needs      sm_80. src and dst 16-byte aligned, not overlapping. .cg (BYPASS_L1 = 1) takes VECTOR_BYTES = 16
//            only, .ca takes 4, 8 and 16.
// Barriers   one commit group per tile and thread, an empty one past the end, so that "at most NUM_STAGES - 1
//            groups pending" always means: the oldest tile is here. Two __syncthreads per tile: everybody's
//            part of the tile is here; every thread is done with the stage.
// Shared     stage s at [s x TILE_BYTES, (s + 1) x TILE_BYTES), NUM_STAGES of them.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=2 -DTHREADS=256
//            -DVECTOR_BYTES=16 -DBYPASS_L1=1 -DUNROLL=4 copy_async.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x TILE_BYTES of dynamic
//            shared memory.
#include "ptx.cuh"

template <u32 BYTES> struct VectorOf;
template <> struct VectorOf<4> { using type = b32x1; };
template <> struct VectorOf<8> { using type = b32x2; };
template <> struct VectorOf<16> { using type = b32x4; };
using Vector = VectorOf<VECTOR_BYTES>::type;

constexpr u32 BATCH = THREADS * UNROLL;  // vectors that the CTA moves between two loop tests

static_assert(TILE_BYTES % 16 == 0, "a tile is whole vectors");
static_assert(!BYPASS_L1 || VECTOR_BYTES == 16, "cp.async.cg copies 16 bytes");
static_assert(THREADS % 32 == 0, "the tail of up to 15 bytes takes one thread per byte");

extern __shared__ __align__(128) u8 stages[];

__device__ __forceinline__ u32 vectors_of(u64 tile, u64 num_bytes) {
  const u64 left_bytes = num_bytes - tile * TILE_BYTES;
  return (left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES) / VECTOR_BYTES;
}

template <u32 COUNT>
__device__ __forceinline__ void load_vectors(u32 stage, const u8* src, u32 first) {
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) {
    const u32 at = (first + k * THREADS) * VECTOR_BYTES;
    if constexpr (BYPASS_L1) cp_async_cg<VECTOR_BYTES>(stage + at, src + at);
    else cp_async_ca<VECTOR_BYTES>(stage + at, src + at);
  }
}

template <u32 COUNT>
__device__ __forceinline__ void store_vectors(u8* dst, u32 stage, u32 first) {
  Vector v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) ld_shared(v[k], stage + (first + k * THREADS) * VECTOR_BYTES);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) st_global(dst + (first + k * THREADS) * VECTOR_BYTES, v[k]);
}

__device__ __forceinline__ void load_tile(u32 stage, const u8* src, u32 num_vectors) {
  const u32 batched = num_vectors / BATCH * BATCH;  // the rest of a tile goes vector by vector
#pragma unroll 1
  for (u32 i = 0; i < batched; i += BATCH) load_vectors<UNROLL>(stage, src, i + threadIdx.x);
#pragma unroll 1
  for (u32 i = batched + threadIdx.x; i < num_vectors; i += THREADS) load_vectors<1>(stage, src, i);
}

__device__ __forceinline__ void store_tile(u8* dst, u32 stage, u32 num_vectors) {
  const u32 batched = num_vectors / BATCH * BATCH;
#pragma unroll 1
  for (u32 i = 0; i < batched; i += BATCH) store_vectors<UNROLL>(dst, stage, i + threadIdx.x);
#pragma unroll 1
  for (u32 i = batched + threadIdx.x; i < num_vectors; i += THREADS) store_vectors<1>(dst, stage, i);
}

extern "C" __global__ void __launch_bounds__(THREADS) lsu_copy_async(u8* dst, const u8* src, u64 num_bytes) {
  const u32 first_stage = smem_addr(stages);
  const u64 num_tiles = (num_bytes + TILE_BYTES - 1) / TILE_BYTES;

  u64 request = blockIdx.x;  // the next tile to ask for, NUM_STAGES ahead of the one being stored
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES; ++s, request += gridDim.x) {
    if (request < num_tiles)
      load_tile(first_stage + s * TILE_BYTES, src + request * TILE_BYTES, vectors_of(request, num_bytes));
    cp_async_commit_group();
  }

  u32 stage = first_stage;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, request += gridDim.x) {
    cp_async_wait_group<NUM_STAGES - 1>();
    __syncthreads();  // a wait covers only the thread's own copies
    store_tile(dst + tile * TILE_BYTES, stage, vectors_of(tile, num_bytes));
    __syncthreads();  // the stage is refilled next
    if (request < num_tiles) load_tile(stage, src + request * TILE_BYTES, vectors_of(request, num_bytes));
    cp_async_commit_group();
    stage = stage == first_stage + (NUM_STAGES - 1) * TILE_BYTES ? first_stage : stage + TILE_BYTES;
  }

  const u32 tail_bytes = num_bytes % VECTOR_BYTES;
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < tail_bytes) {
    const u64 i = num_bytes - tail_bytes + threadIdx.x;
    dst[i] = src[i];
  }
}
