// Which engine should carry a tile from one CTA's shared memory to another's: loads, st.async or the TMA?
//
// Moves      tiles around a ring of CTAs: each loads its tile from src, STEPS times all tiles of the
//            cluster go to the next CTA, each stores what it has then to dst. dst[cluster][(rank + STEPS) %
//            CLUSTER] = src[cluster][rank]. PATH PULL: ld.shared::cluster, through registers. PATH PUSH:
//            ld.shared and st.async, through registers, bytes counted at the receiver. PATH BULK:
//            cp.async.bulk from shared::cta to shared::cluster, no registers. To and from global memory
//            cp.async.bulk.
// In flight  one tile per CTA in each step.
// Needs      sm_90. src and dst 16-byte aligned, not overlapping, tiles of TILE_BYTES, CLUSTER of them per
//            cluster.
// Barriers   landed[b]: 1 arrival (thread 0, with expect_tx of TILE_BYTES) and those bytes, of the first
//            load or (PUSH, BULK) of what the previous CTA sends into buffer b; completed once per use,
//            parity of its own. Cluster barrier: once per step, and before leaving.
// Proxies    async -> generic: the wait on landed. Generic -> bulk, and bulk writes of another CTA -> bulk:
//            fence.proxy.async after the wait or the cluster barrier.
// Shared     dynamic: two buffers of TILE_BYTES; static: landed[2], padded to 128 bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DPATH=BULK -DCLUSTER=4 -DTILE_BYTES=16384 -DTHREADS=128
//            dsmem.cu
// Launch     a grid of whole clusters (they stride over the groups of tiles), THREADS threads, 2 x
//            TILE_BYTES of dynamic shared memory.
#include "ptx.cuh"

enum { PULL, PUSH, BULK };
constexpr u32 VECTORS = TILE_BYTES / 16;

static_assert(CLUSTER > 1, "st.async goes to another CTA");
static_assert(TILE_BYTES % 128 == 0, "each buffer is 128-byte aligned");

extern __shared__ __align__(128) u8 buffers[];
__shared__ u64 landed[2];

__device__ __forceinline__ u32 buffer_at(u32 b) { return smem_addr(buffers) + b * TILE_BYTES; }
__device__ __forceinline__ u32 landed_at(u32 b) { return smem_addr(landed) + b * 8; }

__device__ __forceinline__ void pull(u32 to, u32 from, u32 peer) {
  const u32 source = mapa_shared_cluster(buffer_at(from), peer);
#pragma unroll 4  // loads of a thread in flight
  for (u32 i = threadIdx.x; i < VECTORS; i += THREADS) {
    b32x4 value;
    ld_shared_cluster(value, source + i * 16);
    st_shared(buffer_at(to) + i * 16, value);
  }
}

__device__ __forceinline__ void push(u32 to, u32 from, u32 peer) {
  const u32 target = mapa_shared_cluster(buffer_at(to), peer);
  const u32 mbar = mapa_shared_cluster(landed_at(to), peer);
  for (u32 i = threadIdx.x; i < VECTORS; i += THREADS) {
    b32x4 value;
    ld_shared(value, buffer_at(from) + i * 16);
    st_async_shared_cluster(target + i * 16, value, mbar);
  }
}

__device__ __forceinline__ void bulk(u32 to, u32 from, u32 peer) {
  if (threadIdx.x == 0)
    cp_async_bulk_shared_cluster_shared_cta(mapa_shared_cluster(buffer_at(to), peer), buffer_at(from),
                                            TILE_BYTES, mapa_shared_cluster(landed_at(to), peer));
}

__device__ __forceinline__ void barrier_cluster() {
  __syncwarp();  // cluster barriers are aligned: the whole warp, together
  barrier_cluster_arrive();
  barrier_cluster_wait();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
tma_dsmem(u8* dst, const u8* src, u32 num_groups, u32 num_steps) {
  const u32 rank = mov_cluster_ctarank();
  const u32 next = (rank + 1) % CLUSTER, previous = (rank + CLUSTER - 1) % CLUSTER;
  if (threadIdx.x == 0) {
    for (u32 b = 0; b < 2; ++b) mbarrier_init(landed_at(b), 1);
    fence_mbarrier_init();  // the previous CTA's copies must find them initialised
  }

  u32 phases = 0;  // bit b: the parity awaited next on landed[b]
  for (u32 group = blockIdx.x / CLUSTER; group < num_groups; group += gridDim.x / CLUSTER) {
    const u64 tile = ((u64)group * CLUSTER + rank) * TILE_BYTES;
    if (threadIdx.x == 0) {
      cp_async_bulk_wait_group_read<0>();  // the last group's store has read its buffer
      mbarrier_arrive_expect_tx(landed_at(0), TILE_BYTES);
      cp_async_bulk_shared_global(buffer_at(0), src + tile, TILE_BYTES, landed_at(0));
    }
    __syncthreads();
    wait_parity(landed_at(0), phases & 1);
    phases ^= 1;

    u32 at = 0;  // the buffer that holds this CTA's tile
#pragma unroll 1
    for (u32 step = 0; step < num_steps; ++step) {
      const u32 to = at ^ 1;
      if (PATH != PULL && threadIdx.x == 0) mbarrier_arrive_expect_tx(landed_at(to), TILE_BYTES);
      // Every CTA has its tile in `at`, and nobody reads `to` any more: what was sent from there has landed.
      fence_proxy_async_shared_cluster();
      barrier_cluster();
      if constexpr (PATH == PULL) pull(to, at, previous);
      if constexpr (PATH == PUSH) push(to, at, next);
      if constexpr (PATH == BULK) bulk(to, at, next);
      if constexpr (PATH != PULL) {
        wait_parity_cluster(landed_at(to), phases >> to & 1);  // acquires what the previous CTA has sent
        phases ^= 1 << to;
      }
      at = to;
    }
    fence_proxy_async_shared_cluster();  // what threads or another CTA's copy have written, before its store
    barrier_cluster();                   // ... and nobody pulls from here any more
    if (threadIdx.x == 0) {
      cp_async_bulk_global_shared(dst + tile, buffer_at(at), TILE_BYTES);
      cp_async_bulk_commit_group();
    }
  }
  if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();  // shared memory must outlive the store that reads it
}
