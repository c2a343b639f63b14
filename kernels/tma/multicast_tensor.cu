// What does the L2 save when one tensor copy serves all CTAs of a cluster?
//
// Moves      a matrix src into the matrix of dst of each CTA of a cluster: global -> shared by
//            cp.async.bulk.tensor.2d, shared -> global by cp.async.bulk.tensor.3d (dimension 2 is the CTA's
//            rank); no byte passes through registers. MULTICAST 1: each CTA asks for its share of a tile,
//            BOX_ROWS / CLUSTER rows, and the copy lands in the shared memory of all. MULTICAST 0: each CTA
//            asks for all the shares, so the L2 is read CLUSTER times.
// In flight  NUM_STAGES x TILE_BYTES per CTA.
// Needs      sm_90; for sm_120, ptxas makes a call of the multicast. A map of box {BOX_COLS, BOX_ROWS /
//            CLUSTER} over src and {BOX_COLS, BOX_ROWS, 1} over dst; a share is a multiple of 128 bytes.
// Barriers   full[s]: 1 arrival (thread 0, with expect_tx of TILE_BYTES, whoever asked for them; elements
//            that are filled count too) and those bytes, which may land before they are announced.
//            empty[s]: CLUSTER arrivals, one of each CTA whose store has read its stage s: a copy
//            overwrites the stage in all of them. Both complete once per use of stage s, so the awaited
//            parity starts at 0 and flips at each wrap of the ring; empty[] is awaited from the second use
//            on.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders
//            the two.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[NUM_STAGES], empty[NUM_STAGES], padded
//            to 128 bytes. A copy lands at the same offset in every CTA.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DCLUSTER=4 -DMULTICAST=1 -DBOX_ROWS=64 -DBOX_COLS=64
//            -DTILE_BYTES=16384 -DNUM_STAGES=4 multicast_tensor.cu
// Launch     a grid of whole clusters (clusters stride over the tiles), 32 threads, NUM_STAGES x TILE_BYTES
//            of dynamic shared memory.
#include "ptx.cuh"

constexpr u32 SHARE_ROWS = BOX_ROWS / CLUSTER, SHARE_BYTES = TILE_BYTES / CLUSTER;

static_assert(BOX_ROWS % CLUSTER == 0, "a share of a tile is whole rows");
static_assert(SHARE_BYTES % 128 == 0, "a tensor copy's shared address is 128-byte aligned");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
__device__ __forceinline__ u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

__device__ __forceinline__ void load_tile(u32 s, const TensorMap& src_map, i32 col, i32 row, u32 rank) {
  mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);
  if constexpr (MULTICAST) {
    cp_async_bulk_tensor_2d_shared_global_multicast(stage_at(s) + rank * SHARE_BYTES, &src_map, col,
                                                    row + rank * SHARE_ROWS, full_at(s), (1u << CLUSTER) - 1);
  } else {
#pragma unroll
    for (u32 share = 0; share < CLUSTER; ++share)
      cp_async_bulk_tensor_2d_shared_global(stage_at(s) + share * SHARE_BYTES, &src_map, col,
                                            row + share * SHARE_ROWS, full_at(s));
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32)
tma_multicast_tensor(const __grid_constant__ TensorMap dst_map, const __grid_constant__ TensorMap src_map,
                     u32 tiles_x, u32 tiles_y) {
  const u32 num_tiles = tiles_x * tiles_y, rank = mov_cluster_ctarank(), clusters = gridDim.x / CLUSTER;
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
    u32 request = blockIdx.x / CLUSTER;  // the next tile to ask for, up to NUM_STAGES ahead
    const auto load = [&](u32 s) {
      load_tile(s, src_map, request % tiles_x * BOX_COLS, request / tiles_x * BOX_ROWS, rank);
      request += clusters;
    };
#pragma unroll 1
    for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s) load(s);

    u32 s = 0, phase = 0;
    for (u32 tile = blockIdx.x / CLUSTER; tile < num_tiles; tile += clusters) {
      wait_parity(full_at(s), phase);
      cp_async_bulk_tensor_3d_global_shared(&dst_map, tile % tiles_x * BOX_COLS, tile / tiles_x * BOX_ROWS,
                                            rank, stage_at(s));
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
