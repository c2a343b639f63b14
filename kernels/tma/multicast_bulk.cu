// What does the L2 save when one bulk copy serves all CTAs of a cluster?
//
// Moves      num_bytes of src into the row of dst of each CTA of a cluster: global -> shared -> global by
//            cp.async.bulk; no byte passes through registers. MULTICAST 1: each CTA asks for its share of a
//            tile, 1 / CLUSTER, and the copy lands in the shared memory of all. MULTICAST 0: each CTA loads
//            whole tiles, so the L2 is read CLUSTER times.
// In flight  NUM_STAGES x TILE_BYTES per CTA.
// Needs      sm_90; for sm_120, ptxas makes a call of the multicast. src and the rows of dst 16-byte
//            aligned, num_bytes a multiple of 16, row_pitch bytes from row to row.
// Barriers   full[s]: 1 arrival (thread 0, with expect_tx of the tile's bytes, whoever asked for them) and
//            those bytes, which may land before they are announced. empty[s]: CLUSTER arrivals, one of each
//            CTA whose store has read its stage s: a copy overwrites the stage in all of them. Both
//            complete once per use of stage s, so the awaited parity starts at 0 and flips at each wrap of
//            the ring; empty[] is awaited from the second use on.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders
//            the two.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[NUM_STAGES], empty[NUM_STAGES], padded
//            to 128 bytes. A copy lands at the same offset in every CTA.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DCLUSTER=4 -DMULTICAST=1 -DTILE_BYTES=16384
//            -DNUM_STAGES=4 multicast_bulk.cu
// Launch     a grid of whole clusters (clusters stride over the tiles), 32 threads, NUM_STAGES x TILE_BYTES
//            of dynamic shared memory.
#include "ptx.cuh"

static_assert(TILE_BYTES % (16 * CLUSTER) == 0, "a share of a tile is a multiple of 16 bytes");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
__device__ __forceinline__ u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

__device__ __forceinline__ u32 bytes_of(u64 tile, u64 num_bytes) {
  const u64 left_bytes = num_bytes - tile * TILE_BYTES;
  return left_bytes < TILE_BYTES ? (u32)left_bytes : TILE_BYTES;
}

__device__ __forceinline__ void load_tile(u32 s, const u8* src, u32 tile_bytes, u32 rank) {
  mbarrier_arrive_expect_tx(full_at(s), tile_bytes);
  if constexpr (MULTICAST) {
    constexpr u32 SHARE_BYTES = TILE_BYTES / CLUSTER;
    const u32 first = rank * SHARE_BYTES;
    if (first >= tile_bytes) return;  // the last tile is shorter: others ask for all of it
    const u32 share_bytes = tile_bytes - first < SHARE_BYTES ? tile_bytes - first : SHARE_BYTES;
    cp_async_bulk_shared_global_multicast(stage_at(s) + first, src + first, share_bytes, full_at(s),
                                          (1u << CLUSTER) - 1);
  } else {
    cp_async_bulk_shared_global(stage_at(s), src, tile_bytes, full_at(s));
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32)
tma_multicast_bulk(u8* dst, const u8* src, u64 num_bytes, u64 row_pitch) {
  const u64 num_tiles = (num_bytes + TILE_BYTES - 1) / TILE_BYTES;
  const u32 rank = mov_cluster_ctarank(), clusters = gridDim.x / CLUSTER;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) {
      mbarrier_init(full_at(s), 1);
      mbarrier_init(empty_at(s), CLUSTER);
    }
    fence_mbarrier_init();  // the other CTAs' copies and arrivals must find them initialised
  }
  __syncwarp();
  barrier_cluster_arrive();
  barrier_cluster_wait();

  if (threadIdx.x == 0) {
    u8* const row = dst + rank * row_pitch;
    u64 request = blockIdx.x / CLUSTER;  // the next tile to ask for, up to NUM_STAGES ahead
    const auto load = [&](u32 s) {
      load_tile(s, src + request * TILE_BYTES, bytes_of(request, num_bytes), rank);
      request += clusters;
    };
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s) load(s);

    u32 s = 0, phase = 0;
    for (u64 tile = blockIdx.x / CLUSTER; tile < num_tiles; tile += clusters) {
      wait_parity(full_at(s), phase);
      cp_async_bulk_global_shared(row + tile * TILE_BYTES, stage_at(s), bytes_of(tile, num_bytes));
      cp_async_bulk_commit_group();
      if (request < num_tiles) {
        cp_async_bulk_wait_group_read<0>();  // this CTA's store has read its stage ...
        if constexpr (MULTICAST) {
          fence_release_shared_cta();
          for (u32 peer = 0; peer < CLUSTER; ++peer)  // ... tell all who fill it
            mbarrier_arrive_relaxed_shared_cluster(mapa_shared_cluster(empty_at(s), peer));
          wait_parity_cluster(empty_at(s), phase);
        }
        load(s);
      }
      if (++s == NUM_STAGES) s = 0, phase ^= 1;
    }
    cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
  }
  __syncwarp();              // cluster barriers are aligned: the whole warp, together
  barrier_cluster_arrive();  // nobody leaves while others' copies and arrivals are on their way here
  barrier_cluster_wait();
}
