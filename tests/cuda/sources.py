"""Small kernels that the tests of the host side compile."""

from __future__ import annotations

from smfree.cuda import CudaSource

COPY = """
extern "C" __global__ void copy_words(unsigned* dst, const unsigned* src, unsigned n) {
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  for (unsigned i = first; i < n; i += gridDim.x * blockDim.x) dst[i] = src[i];
}
"""
ABI = """
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void abi(unsigned char a, unsigned long long* b, const __grid_constant__ Map map,
                               unsigned short c, float4 d, unsigned char e, double f) {
  b[0] = a; b[1] = map.opaque[0]; b[2] = map.opaque[15]; b[3] = c; b[4] = (unsigned long long)d.x;
  b[5] = (unsigned long long)d.w; b[6] = e; b[7] = (unsigned long long)f;
}
"""
DYNAMIC = """
extern "C" __global__ void reverse(unsigned* dst, const unsigned* src, unsigned n) {
  extern __shared__ unsigned words[];
  for (unsigned i = threadIdx.x; i < n; i += blockDim.x) words[i] = src[i];
  __syncthreads();
  for (unsigned i = threadIdx.x; i < n; i += blockDim.x) dst[i] = words[n - 1 - i];
}
"""
CLUSTER = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) paired(unsigned* p) { p[blockIdx.x] = blockIdx.x; }
"""
CLUSTER_RING = """
extern "C" __global__ void next_rank(unsigned* out) {  // the builtins behind cooperative groups
  __shared__ unsigned mine;
  const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
  if (threadIdx.x == 0) mine = rank;
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  const unsigned* theirs = (const unsigned*)__cluster_map_shared_rank(&mine, (rank + 1) % size);
  if (threadIdx.x == 0) out[__clusterIdx().x * size + rank] = *theirs;
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
"""
FACTS = """
extern "C" __global__ void plain(float* p) { p[threadIdx.x] = 1.f; }
extern "C" __global__ void shared(float* p) {
  __shared__ float s[300];
  s[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = s[255 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* p, int n) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; i++) a[i] = p[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i * 7 + 1) % 64] + p[k + i];
  }
#pragma unroll
  for (int i = 0; i < 64; i++) p[i * 1024 + threadIdx.x] = a[i];
}
extern "C" __global__ void local(float* p, int n) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = p[i];
  for (int i = 0; i < n; i++) a[(i * i) & 63] += 1;
  p[n] = a[n & 63];
}
"""
TENSOR_LOAD = """
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void load_box(QUALIFIER Map map, unsigned* out) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ __align__(8) unsigned long long full;
  const unsigned bar = (unsigned)__cvta_generic_to_shared(&full);
  const unsigned dst = (unsigned)__cvta_generic_to_shared(smem);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %2}], [%3];"
        ::"r"(dst), "l"(&map), "r"(0), "r"(bar) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar) : "memory");
  for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) out[i] = ((unsigned*)smem)[i];
}
"""


def source(text: str, **defines: object) -> CudaSource:
    """A source from text, named ``test/kernel.cu``."""
    return CudaSource("test/kernel.cu", defines, text=text)
