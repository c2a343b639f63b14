// What does an access cost when the lanes of a warp do not read neighbours?
//
// Moves      num_elements of ELEMENT_BYTES to dst, in order: dst[i] = src[index[i]] (INDEXED = 1), or
//            dst[i] = src[i x stride] (INDEXED = 0, index unused). global -> registers -> global. A warp's
//            load touches between ELEMENT_BYTES (neighbours) and 32 (far apart) sectors of 32 bytes.
// In flight  THREADS x UNROLL x ELEMENT_BYTES per CTA.
// Needs      sm_80. dst, src aligned to ELEMENT_BYTES (4, 8 or 16), index to 4; dst overlaps neither. Every
//            index[i], or (num_elements - 1) x stride, is an element of src.
// Barriers   none: no byte is shared.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DTHREADS=256 -DUNROLL=4 -DELEMENT_BYTES=4
//            -DINDEXED=1 gather.cu
// Launch     any grid (CTAs stride over the batches), THREADS threads.
#include "ptx.cuh"

template <u32 BYTES> struct VectorOf;
template <> struct VectorOf<4> { using type = b32x1; };
template <> struct VectorOf<8> { using type = b32x2; };
template <> struct VectorOf<16> { using type = b32x4; };
using Element = VectorOf<ELEMENT_BYTES>::type;

constexpr u32 BATCH = THREADS * UNROLL;  // elements that the CTA has in flight

__device__ __forceinline__ u64 place_of(const u8* index, u64 stride, u64 i) {
  if constexpr (!INDEXED) return i * stride;
  b32x1 found;
  ld_global_nc(found, index + i * 4);
  return found.x;
}

// Indices first, then elements: each kind is in flight together, and a lane pays two latencies, not 2 COUNT.
template <u32 COUNT>
__device__ __forceinline__ void gather(u8* dst, const u8* src, const u8* index, u64 stride, u64 first) {
  u64 place[COUNT];
  Element v[COUNT];
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) place[k] = place_of(index, stride, first + k * THREADS);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) ld_global_nc(v[k], src + place[k] * ELEMENT_BYTES);
#pragma unroll
  for (u32 k = 0; k < COUNT; ++k) st_global(dst + (first + k * THREADS) * ELEMENT_BYTES, v[k]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
lsu_gather(u8* dst, const u8* src, const u8* index, u64 stride, u64 num_elements) {
#pragma unroll 1
  for (u64 first = (u64)blockIdx.x * BATCH; first < num_elements; first += (u64)gridDim.x * BATCH) {
    if (first + BATCH <= num_elements) {
      gather<UNROLL>(dst, src, index, stride, first + threadIdx.x);
    } else {
#pragma unroll 1
      for (u64 i = first + threadIdx.x; i < num_elements; i += THREADS)
        gather<1>(dst, src, index, stride, i);
    }
  }
}
