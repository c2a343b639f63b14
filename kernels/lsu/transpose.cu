// Why does a tile want another layout in shared memory than in global memory?
//
// Moves      src[num_rows][num_columns] to dst[num_columns][num_rows], 4-byte elements: global ->
//            registers -> shared -> registers -> global. A warp reads a row of the tile and writes a column,
//            so that both global accesses are whole 128-byte lines; one of the two shared accesses crosses
//            the rows.
// In flight  TILE x TILE x 4 bytes per CTA.
// Needs      sm_80. src and dst 4-byte aligned, not overlapping.
// Layout     element (row, column) of the tile lies at row x PITCH + column, of 32 banks of 4 bytes:
//            PLAIN    PITCH = 32: a column is one bank, 32 wavefronts for one read.
//            PADDED   PITCH = 33: a column touches every bank; 4 bytes of each row are lost, and with them
//                     the 16-byte alignment of rows that TMA and vector accesses need.
//            SWIZZLED PITCH = 32, the column XORed with the row: every bank once, nothing lost.
// Barriers   two __syncthreads per tile: the tile is complete; every thread is done with it.
// Shared     static: the tile, TILE x PITCH x 4 bytes.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DLAYOUT=SWIZZLED -DTHREADS=256 transpose.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, a multiple of 32 up to 1024.
#include "ptx.cuh"

enum Layout { PLAIN, PADDED, SWIZZLED };

constexpr u32 TILE = 32;
constexpr u32 PITCH = LAYOUT == PADDED ? TILE + 1 : TILE;
constexpr u32 WARPS = THREADS / 32;

__shared__ u32 tile_smem[TILE * PITCH];

__device__ __forceinline__ u32 element_at(u32 row, u32 column) {
  return smem_addr(tile_smem) + (row * PITCH + (LAYOUT == SWIZZLED ? column ^ row : column)) * 4;
}

extern "C" __global__ void __launch_bounds__(THREADS)
lsu_transpose(u32* dst, const u32* src, u32 num_rows, u32 num_columns) {
  const u32 tiles_across = (num_columns - 1) / TILE + 1;
  const u32 num_tiles = ((num_rows - 1) / TILE + 1) * tiles_across;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  for (u32 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u32 row = tile / tiles_across * TILE, column = tile % tiles_across * TILE;
    const u32 rows = num_rows - row < TILE ? num_rows - row : TILE;
    const u32 columns = num_columns - column < TILE ? num_columns - column : TILE;

#pragma unroll 1
    for (u32 r = warp; r < rows; r += WARPS) {
      if (lane < columns) {
        b32x1 v;
        ld_global_nc(v, src + (u64)(row + r) * num_columns + column + lane);
        st_shared(element_at(r, lane), v);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (u32 c = warp; c < columns; c += WARPS) {
      if (lane < rows) {
        b32x1 v;
        ld_shared(v, element_at(lane, c));
        st_global(dst + (u64)(column + c) * num_rows + row + lane, v);
      }
    }
    __syncthreads();  // the next tile overwrites this one
  }
}
