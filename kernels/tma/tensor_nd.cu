// How does the TMA move a box of an N-D strided tensor, with one thread asking?
//
// Moves      a region of src to all of dst: global -> shared -> global, both ways by cp.async.bulk.tensor of
//            RANK 1 to 5; no byte passes through registers. dst[i] = src[start + i * stride] per dimension.
//            What lies outside src is filled as its map says (zero or NaN), what lies outside dst is dropped.
//            The strides are element strides of the source map: its box covers more than the tile in shared
//            memory holds.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA; a tile is one box of dst.
// Needs      sm_90. Two maps of RANK dimensions whose boxes place the same TILE_BYTES in shared memory.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of TILE_BYTES: elements that are filled
//            count too) and those bytes; completed once per use of stage s, so the awaited parity starts at 0
//            and flips at each wrap of the ring. No empty[s]: the thread that asks also stores, and
//            wait_group.read frees the stage.
// Proxies    none crossed: a tile is written and read by the async proxy, and the wait on full[s] orders the
//            two.
// Shared     dynamic: stages, NUM_STAGES x STAGE_BYTES, which is TILE_BYTES rounded up to 128; static:
//            full[NUM_STAGES], padded to 128.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DRANK=3 -DTILE_BYTES=8192 -DNUM_STAGES=4 tensor_nd.cu
// Launch     any grid (CTAs stride over the tiles), 32 threads, NUM_STAGES x STAGE_BYTES of dynamic shared
//            memory.
#include "ptx.cuh"

constexpr u32 STAGE_BYTES = (TILE_BYTES + 127) / 128 * 128;  // tensor copies want 128-byte aligned tiles

static_assert(RANK >= 1 && RANK <= 5, "tensor maps have 1 to 5 dimensions");
static_assert(TILE_BYTES % 16 == 0, "a box is a multiple of 16 bytes");

struct Dimension {
  u32 num_tiles;
  i32 src_start;  // coordinates in elements; the first of the region, which may lie before src ...
  i32 src_step;   // ... and from tile to tile
  i32 dst_step;
};
struct Tiling { Dimension dim[RANK]; };  // innermost first

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

__device__ __forceinline__ u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
__device__ __forceinline__ u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

__device__ __forceinline__ void load_box(u32 dst, const TensorMap* map, const i32 (&c)[RANK], u32 mbar) {
  if constexpr (RANK == 1) cp_async_bulk_tensor_1d_shared_global(dst, map, c[0], mbar);
  if constexpr (RANK == 2) cp_async_bulk_tensor_2d_shared_global(dst, map, c[0], c[1], mbar);
  if constexpr (RANK == 3) cp_async_bulk_tensor_3d_shared_global(dst, map, c[0], c[1], c[2], mbar);
  if constexpr (RANK == 4) cp_async_bulk_tensor_4d_shared_global(dst, map, c[0], c[1], c[2], c[3], mbar);
  if constexpr (RANK == 5)
    cp_async_bulk_tensor_5d_shared_global(dst, map, c[0], c[1], c[2], c[3], c[4], mbar);
}
__device__ __forceinline__ void store_box(const TensorMap* map, const i32 (&c)[RANK], u32 src) {
  if constexpr (RANK == 1) cp_async_bulk_tensor_1d_global_shared(map, c[0], src);
  if constexpr (RANK == 2) cp_async_bulk_tensor_2d_global_shared(map, c[0], c[1], src);
  if constexpr (RANK == 3) cp_async_bulk_tensor_3d_global_shared(map, c[0], c[1], c[2], src);
  if constexpr (RANK == 4) cp_async_bulk_tensor_4d_global_shared(map, c[0], c[1], c[2], c[3], src);
  if constexpr (RANK == 5) cp_async_bulk_tensor_5d_global_shared(map, c[0], c[1], c[2], c[3], c[4], src);
}

// A tile's place in each dimension; the innermost runs fastest.
__device__ __forceinline__ void place_of(u32 tile, const Tiling& tiling, i32 (&place)[RANK]) {
#pragma unroll
  for (u32 d = 0; d < RANK; ++d) {
    place[d] = tile % tiling.dim[d].num_tiles;
    tile /= tiling.dim[d].num_tiles;
  }
}

__device__ __forceinline__ void load_tile(u32 s, const TensorMap& src_map, u32 tile, const Tiling& tiling) {
  i32 at[RANK];
  place_of(tile, tiling, at);
#pragma unroll
  for (u32 d = 0; d < RANK; ++d) at[d] = tiling.dim[d].src_start + at[d] * tiling.dim[d].src_step;
  mbarrier_arrive_expect_tx(full_at(s), TILE_BYTES);
  load_box(stage_at(s), &src_map, at, full_at(s));
}

__device__ __forceinline__ void store_tile(u32 s, const TensorMap& dst_map, u32 tile, const Tiling& tiling) {
  i32 at[RANK];
  place_of(tile, tiling, at);
#pragma unroll
  for (u32 d = 0; d < RANK; ++d) at[d] *= tiling.dim[d].dst_step;
  store_box(&dst_map, at, stage_at(s));
  cp_async_bulk_commit_group();
}

extern "C" __global__ void __launch_bounds__(32)
tma_tensor_nd(const __grid_constant__ TensorMap dst_map, const __grid_constant__ TensorMap src_map,
              const __grid_constant__ Tiling tiling) {
  if (threadIdx.x != 0) return;
  for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
  fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised

  u32 num_tiles = 1;
#pragma unroll
  for (u32 d = 0; d < RANK; ++d) num_tiles *= tiling.dim[d].num_tiles;

  u32 request = blockIdx.x;  // the next tile to ask for, up to NUM_STAGES ahead of the one being stored
#pragma unroll 1
  for (u32 s = 0; s < NUM_STAGES && request < num_tiles; ++s, request += gridDim.x)
    load_tile(s, src_map, request, tiling);

  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    wait_parity(full_at(s), phase);
    store_tile(s, dst_map, tile, tiling);
    if (request < num_tiles) {
      cp_async_bulk_wait_group_read<0>();  // the store has read the stage: refill it
      load_tile(s, src_map, request, tiling);
      request += gridDim.x;
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}
