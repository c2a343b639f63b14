// How fast do threads move bytes with plain loads and stores?
//
// Moves      num_bytes from src to dst: global -> registers -> shared -> registers -> global. Every byte
//            crosses the registers twice. The last num_bytes % VECTOR_BYTES bytes go global -> registers ->
//            global.
// In flight  THREADS x UNROLL x VECTOR_BYTES per CTA (at most TILE_BYTES): each thread issues UNROLL loads
//            before it uses the first.
// Needs      sm_80; VECTOR_BYTES = 32 needs sm_100. src and dst aligned to VECTOR_BYTES, not overlapping.
// Barriers   two __syncthreads per tile: the tile is complete; every thread is done with it.
// Shared     [0, TILE_BYTES) the tile, as it lies in global memory.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTILE_BYTES=16384 -DTHREADS=256 -DVECTOR_BYTES=16
//            -DUNROLL=4 -DREAD_ONLY=0 -DCTAS_PER_SM=4 copy.cu
// Launch     any grid (CTAs stride over the tiles; CTAS_PER_SM x SMs fill the GPU), THREADS threads,
//            TILE_BYTES of dynamic shared memory.
#include "ptx.cuh"

template <u32 BYTES> struct VectorOf;
template <> struct VectorOf<4> { using type = b32x1; };
template <> struct VectorOf<8> { using type = b32x2; };
template <> struct VectorOf<16> { using type = b32x4; };
template <> struct VectorOf<32> { using type = b32x8; };
using Vector = VectorOf<VECTOR_BYTES>::type;

constexpr u32 BATCH = THREADS * UNROLL;  // vectors that the CTA has in flight

static_assert(TILE_BYTES % 16 == 0 && TILE_BYTES % VECTOR_BYTES == 0, "a tile is whole vectors");
static_assert(THREADS % 32 == 0, "the tail of up to 31 bytes takes one thread per byte");

extern __shared__ __align__(128) u8 staging[];

__device__ __forceinline__ void load(Vector& dst, const u8* src) {
  if constexpr (READ_ONLY) ld_global_nc(dst, src);
  else ld_global(dst, src);
}

// Shared memory has no 32-byte access. Two of 16 bytes conflict two ways, still far above the global rate.
__device__ __forceinline__ void st_shared(u32 dst, const b32x8& src) {
  st_shared(dst, src.low);
  st_shared(dst + 16, src.high);
}
__device__ __forceinline__ void ld_shared(b32x8& dst, u32 src) {
  ld_shared(dst.low, src);
  ld_shared(dst.high, src + 16);
}

// COUNT loads, then COUNT uses: the loads of a batch are in flight together.
template <u32 COUNT>
__device__ __forceinline__ void load_vectors(u32 tile, const u8* src, u32 first) {
  Vector v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) load(v[k], src + (first + k * THREADS) * VECTOR_BYTES);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) st_shared(tile + (first + k * THREADS) * VECTOR_BYTES, v[k]);
}

template <u32 COUNT>
__device__ __forceinline__ void store_vectors(u8* dst, u32 tile, u32 first) {
  Vector v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) ld_shared(v[k], tile + (first + k * THREADS) * VECTOR_BYTES);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) st_global(dst + (first + k * THREADS) * VECTOR_BYTES, v[k]);
}

__device__ __forceinline__ void load_tile(u32 tile, const u8* src, u32 num_vectors) {
  const u32 batched = num_vectors / BATCH * BATCH;  // the rest of a tile goes vector by vector
#pragma unroll 1
  for (u32 i = 0; i < batched; i += BATCH) load_vectors<UNROLL>(tile, src, i + threadIdx.x);
#pragma unroll 1
  for (u32 i = batched + threadIdx.x; i < num_vectors; i += THREADS) load_vectors<1>(tile, src, i);
}

__device__ __forceinline__ void store_tile(u8* dst, u32 tile, u32 num_vectors) {
  const u32 batched = num_vectors / BATCH * BATCH;
#pragma unroll 1
  for (u32 i = 0; i < batched; i += BATCH) store_vectors<UNROLL>(dst, tile, i + threadIdx.x);
#pragma unroll 1
  for (u32 i = batched + threadIdx.x; i < num_vectors; i += THREADS) store_vectors<1>(dst, tile, i);
}

// CTAS_PER_SM tells ptxas how many registers it may spend. Else it saves them for CTAs that nobody asked for,
// and stores the first vectors before it loads the last.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
lsu_copy(u8* dst, const u8* src, u64 num_bytes) {
  const u32 tile_smem = smem_addr(staging);
  const u64 num_tiles = (num_bytes + TILE_BYTES - 1) / TILE_BYTES;

  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u64 offset = tile * TILE_BYTES;
    const u64 left_bytes = num_bytes - offset;
    const u32 num_vectors = (left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES) / VECTOR_BYTES;
    load_tile(tile_smem, src + offset, num_vectors);
    // Each thread reads back what it wrote, a copy alone could do without; who computes on the tile cannot.
    __syncthreads();
    store_tile(dst + offset, tile_smem, num_vectors);
    __syncthreads();  // the next tile overwrites this one
  }

  const u32 tail_bytes = num_bytes % VECTOR_BYTES;
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < tail_bytes) {
    const u64 i = num_bytes - tail_bytes + threadIdx.x;
    dst[i] = src[i];
  }
}
