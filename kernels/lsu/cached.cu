// What do the cache operators of loads and stores change?
//
// Moves      num_bytes from src to dst: global -> registers -> global, 16 bytes per access. The last
//            num_bytes % 16 bytes take one thread each.
// In flight  THREADS x UNROLL x 16 bytes per CTA: each thread issues UNROLL loads before its first store.
// Needs      sm_80. src and dst 16-byte aligned, not overlapping.
// Operators  loads: CA (the default: cached in L1 and L2), CG (L2 only), CS (streaming, evicted first), CV
//            (fetched again), NC (the read-only path: nobody may write src meanwhile), NC_NO_ALLOCATE (the
//            same, leaving L1 to others). Stores: WB (the default), CS, WT (through to memory).
// Barriers   none: no byte is shared.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=256 -DUNROLL=4 -DLOAD=CS -DSTORE=CS cached.cu
// Launch     any grid (CTAs stride over the batches), THREADS threads.
#include "ptx.cuh"

enum class Load { CA, CG, CS, CV, NC, NC_NO_ALLOCATE };
enum class Store { WB, CS, WT };

constexpr u32 BATCH = THREADS * UNROLL;  // vectors that the CTA has in flight

__device__ __forceinline__ void load(b32x4& dst, const u8* src) {
  if constexpr (Load::LOAD == Load::CG) ld_global_cg(dst, src);
  else if constexpr (Load::LOAD == Load::CS) ld_global_cs(dst, src);
  else if constexpr (Load::LOAD == Load::CV) ld_global_cv(dst, src);
  else if constexpr (Load::LOAD == Load::NC) ld_global_nc(dst, src);
  else if constexpr (Load::LOAD == Load::NC_NO_ALLOCATE) ld_global_nc_no_allocate(dst, src);
  else ld_global(dst, src);
}

__device__ __forceinline__ void store(u8* dst, const b32x4& src) {
  if constexpr (Store::STORE == Store::CS) st_global_cs(dst, src);
  else if constexpr (Store::STORE == Store::WT) st_global_wt(dst, src);
  else st_global(dst, src);
}

// COUNT loads, then COUNT stores: the loads of a batch are in flight together.
template <u32 COUNT>
__device__ __forceinline__ void copy_vectors(u8* dst, const u8* src, u64 first) {
  b32x4 v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) load(v[k], src + (first + k * THREADS) * 16);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) store(dst + (first + k * THREADS) * 16, v[k]);
}

extern "C" __global__ void __launch_bounds__(THREADS) lsu_cached(u8* dst, const u8* src, u64 num_bytes) {
  const u64 num_vectors = num_bytes / 16;
#pragma unroll 1
  for (u64 first = (u64)blockIdx.x * BATCH; first < num_vectors; first += (u64)gridDim.x * BATCH) {
    if (first + BATCH <= num_vectors) {
      copy_vectors<UNROLL>(dst, src, first + threadIdx.x);
    } else {
#pragma unroll 1
      for (u64 i = first + threadIdx.x; i < num_vectors; i += THREADS) copy_vectors<1>(dst, src, i);
    }
  }

  const u32 tail_bytes = num_bytes % 16;
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < tail_bytes) {
    const u64 i = num_bytes - tail_bytes + threadIdx.x;
    dst[i] = src[i];
  }
}
