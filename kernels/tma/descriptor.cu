// How does one launch copy many matrices of different shapes, with tensor maps made on device or host?
//
// Moves      num_groups matrices of 4-byte elements, each of its own address and shape: global -> shared ->
//            global, both ways by cp.async.bulk.tensor.2d; no byte of them passes through registers. MAPS
//            FROM_DEVICE: one warp edits a template in shared memory (tensormap.replace: address,
//            dimensions, row stride) and publishes it in a slot of the CTA in global memory. MAPS
//            FROM_HOST: the host has encoded two maps per group into global memory.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA, TILE_BYTES = BOX_ROWS x BOX_COLS x 4.
// Needs      sm_90a (tensormap.replace). A template of rank 2 with this box; maps: 2 per CTA (FROM_DEVICE,
//            written here) or per group (FROM_HOST), dst then src.
// Barriers   full[s]: 1 arrival (lane 0, with expect_tx of TILE_BYTES: elements that are filled count too)
//            and those bytes; completed once per use of stage s; the ring runs on from group to group, so
//            the parity flips at each wrap. No empty[s]: the thread that asks also stores, and
//            wait_group.read frees the stage.
// Proxies    tensor maps are read by the tensormap proxy. cp_fenceproxy releases what the generic proxy has
//            written, fence.proxy.tensormap acquires it before the first copy through the map. The tiles
//            cross none.
// Shared     dynamic: stages, NUM_STAGES x STAGE_BYTES, which is TILE_BYTES rounded up to 128; static: two
//            maps of 128 bytes, then full[NUM_STAGES], padded to 128.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DMAPS=FROM_DEVICE -DBOX_ROWS=32 -DBOX_COLS=32
//            -DNUM_STAGES=4 descriptor.cu
// Launch     any grid (CTAs stride over the groups), 32 threads, NUM_STAGES x STAGE_BYTES of dynamic shared
//            memory.
#include "ptx.cuh"

enum { FROM_HOST, FROM_DEVICE };
constexpr u32 TILE_BYTES = BOX_ROWS * BOX_COLS * 4;
constexpr u32 STAGE_BYTES = (TILE_BYTES + 127) / 128 * 128;  // tensor copies want 128-byte aligned tiles

struct Group {
  u8 *dst, *src;
  u32 num_rows, num_cols;
};

extern __shared__ __align__(128) u8 stages[];
__shared__ __align__(128) TensorMap edited[2];
__shared__ u64 full[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

// The whole warp. A map in shared memory becomes that of one matrix and is copied to global memory.
__device__ __forceinline__ void publish_map(TensorMap* dst, u32 map, const u8* matrix, const Group& group) {
  if (threadIdx.x == 0) {
    tensormap_replace_global_address(map, matrix);
    tensormap_replace_global_dim<0>(map, group.num_cols);
    tensormap_replace_global_dim<1>(map, group.num_rows);
    tensormap_replace_global_stride<0>(map, (u64)group.num_cols * 4);
  }
  __syncwarp();  // the lanes copy what lane 0 has edited
  tensormap_cp_fenceproxy(dst, map);
}

// What this CTA has published is acquired at the scope of the GPU, what the host has copied to global memory
// before the launch at that of the system.
__device__ __forceinline__ void acquire_map(const TensorMap* map) {
  if constexpr (MAPS == FROM_DEVICE) fence_proxy_tensormap_acquire(map);
  else fence_proxy_tensormap_acquire_sys(map);
}

extern "C" __global__ void __launch_bounds__(32)
tma_descriptor(const __grid_constant__ TensorMap map_template, TensorMap* maps, const Group* groups,
               u32 num_groups) {
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  if constexpr (MAPS == FROM_DEVICE) {
    if (threadIdx.x < 16) edited[0].opaque[threadIdx.x] = map_template.opaque[threadIdx.x];
    else edited[1].opaque[threadIdx.x - 16] = map_template.opaque[threadIdx.x - 16];
    __syncwarp();
  }

  u32 s = 0, phase = 0;
  for (u32 g = blockIdx.x; g < num_groups; g += gridDim.x) {
    const Group group = groups[g];
    TensorMap* const dst_map = maps + 2 * (MAPS == FROM_DEVICE ? blockIdx.x : g);
    TensorMap* const src_map = dst_map + 1;
    if constexpr (MAPS == FROM_DEVICE) {
      publish_map(dst_map, smem_addr(&edited[0]), group.dst, group);
      publish_map(src_map, smem_addr(&edited[1]), group.src, group);
    }
    if (threadIdx.x == 0) {
      acquire_map(dst_map);  // before the first copy through it
      acquire_map(src_map);
      const u32 tiles_x = (group.num_cols + BOX_COLS - 1) / BOX_COLS;
      const u32 num_tiles = tiles_x * ((group.num_rows + BOX_ROWS - 1) / BOX_ROWS);

      u32 ask = s;
      const auto load = [&](u32 tile) {
        mbarrier_arrive_expect_tx(full_at(ask), TILE_BYTES);
        cp_async_bulk_tensor_2d_shared_global(stage_at(ask), src_map, tile % tiles_x * BOX_COLS,
                                              tile / tiles_x * BOX_ROWS, full_at(ask));
        if (++ask == NUM_STAGES) ask = 0;
      };
      u32 request = 0;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
      for (; request < NUM_STAGES && request < num_tiles; ++request) load(request);

      for (u32 tile = 0; tile < num_tiles; ++tile) {
        wait_parity(full_at(s), phase);
        cp_async_bulk_tensor_2d_global_shared(dst_map, tile % tiles_x * BOX_COLS, tile / tiles_x * BOX_ROWS,
                                              stage_at(s));
        cp_async_bulk_commit_group();
        if (request < num_tiles) {
          cp_async_bulk_wait_group_read<0>();  // the store has read the stage: refill it
          load(request++);
        }
        if (++s == NUM_STAGES) s = 0, phase ^= 1;
      }
      // The next group's maps take these maps' places, and its loads these stages: all loads have landed, all
      // stores must have read both.
      cp_async_bulk_wait_group_read<0>();
    }
    __syncwarp();
  }
  if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}
