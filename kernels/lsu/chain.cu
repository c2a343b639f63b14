// How long does one tile take when threads move it with loads and stores, and nothing overlaps?
//
// Moves      num_steps tiles, one after another, by one CTA. A pool tile's first word is the index of the
//            next tile, so no address is known before the previous step has ended. A step of LEG
//              LOAD   global -> registers -> shared; ends when every thread may read the tile and has read
//                     its index
//              STORE  shared -> registers -> global; ends when the tile is performed at GPU scope. Every step
//                     stores pool tile 0; the indices of all tiles lie in shared memory beforehand
//              COPY   LOAD, then STORE of the loaded tile to the same index of dst
// In flight  one tile: THREADS x UNROLL x 16 bytes at a time. Loads bypass L1 (.cg), like cp.async.cg and the
//            TMA.
// Needs      sm_80. pool and dst 16-byte aligned, num_tiles x TILE_BYTES each. TILE_BYTES a multiple of 16.
// Barriers   LOAD: one __syncthreads. STORE: fence.acq_rel.gpu, then one __syncthreads. The same in every
//            chain.
// Shared     two slots of TILE_BYTES, used in turn, so that a slow reader of the last index is never
//            overwritten; LEG STORE: then num_tiles indices of 4 bytes.
// Result     result[0] SM cycles, result[1] nanoseconds, result[2] the index after the last step.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTILE_BYTES=4096 -DTHREADS=128 -DUNROLL=2 -DLEG=LOAD
//            chain.cu
// Launch     one CTA of THREADS threads, the shared memory above.
#include "ptx.cuh"

enum Leg { LOAD, STORE, COPY };

constexpr Leg leg = LEG;
constexpr u32 NUM_VECTORS = TILE_BYTES / 16;
constexpr u32 BATCH = THREADS * UNROLL;
constexpr u32 BATCHED = NUM_VECTORS / BATCH * BATCH;  // the rest of a tile goes vector by vector

static_assert(TILE_BYTES % 16 == 0, "a tile is whole vectors of 16 bytes");

extern __shared__ __align__(128) u8 slots[];

template <u32 COUNT>
__device__ __forceinline__ void load_vectors(u32 slot, const u8* src, u32 first) {
  b32x4 v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) ld_global_cg(v[k], src + (first + k * THREADS) * 16);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) st_shared(slot + (first + k * THREADS) * 16, v[k]);
}

template <u32 COUNT>
__device__ __forceinline__ void store_vectors(u8* dst, u32 slot, u32 first) {
  b32x4 v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) ld_shared(v[k], slot + (first + k * THREADS) * 16);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) st_global(dst + (first + k * THREADS) * 16, v[k]);
}

__device__ __forceinline__ void load_tile(u32 slot, const u8* src) {
#pragma unroll 1
  for (u32 i = 0; i < BATCHED; i += BATCH) load_vectors<UNROLL>(slot, src, i + threadIdx.x);
#pragma unroll 1
  for (u32 i = BATCHED + threadIdx.x; i < NUM_VECTORS; i += THREADS) load_vectors<1>(slot, src, i);
  __syncthreads();
}

__device__ __forceinline__ void store_tile(u8* dst, u32 slot) {
#pragma unroll 1
  for (u32 i = 0; i < BATCHED; i += BATCH) store_vectors<UNROLL>(dst, slot, i + threadIdx.x);
#pragma unroll 1
  for (u32 i = BATCHED + threadIdx.x; i < NUM_VECTORS; i += THREADS) store_vectors<1>(dst, slot, i);
  fence_acq_rel_gpu();  // waits until this thread's stores are performed for the whole GPU
  __syncthreads();      // ... and everybody else's
}

// The 1 (CTA per SM) lets ptxas spend registers, so that UNROLL vectors are really in flight at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
lsu_chain(u8* dst, const u8* pool, u32 num_tiles, u32 num_steps, u64* result) {
  const u32 first_slot = smem_addr(slots);
  const u32 indices = first_slot + 2 * TILE_BYTES;
  if (leg == STORE) {
    load_tile(first_slot, pool);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < num_tiles; i += THREADS)
      st_shared(indices + i * 4, b32x1{*(const u32*)(pool + (u64)i * TILE_BYTES)});
  }
  __syncthreads();

  b32x1 index{0};
  const u64 start_ns = globaltimer_now();
  const u64 start_cycles = clock64_now();
#pragma unroll 1
  for (u32 step = 0; step < num_steps; ++step) {
    const u64 offset = (u64)index.x * TILE_BYTES;
    const u32 slot = leg == STORE ? first_slot : first_slot + (step & 1) * TILE_BYTES;
    if (leg != STORE) {
      load_tile(slot, pool + offset);
      ld_shared(index, slot);
    }
    if (leg != LOAD) store_tile(dst + offset, slot);
    if (leg == STORE) ld_shared(index, indices + index.x * 4);
  }
  const u64 end_cycles = clock64_now();
  const u64 end_ns = globaltimer_now();

  if (threadIdx.x == 0) {
    result[0] = end_cycles - start_cycles;
    result[1] = end_ns - start_ns;
    result[2] = index.x;
  }
}
