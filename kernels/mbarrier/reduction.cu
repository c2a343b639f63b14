// Can a sum keep up with its loads, and still give the same bits on every run and every schedule?
//
// Computes   result[0] = the sum of num_elements floats of x, in float32, in one fixed order (below).
// Moves      x once, global -> shared by cp.async.bulk, shared -> registers; a partial sum per CTA to global
//            memory and back. The last num_elements % 4 floats go global -> registers.
// In flight  NUM_STAGES x TILE_BYTES per CTA.
// Needs      sm_90. x 16-byte aligned. partials has gridDim.x floats. num_done[0] is 0, and is again at the
//            end.
// Order      Tile t belongs to CTA t % gridDim.x. Consumer thread c adds vectors c, c + CONSUMERS, ... of its
//            CTA's tiles, in that order, component by component, to a sum of four; the last CTA's threads add
//            one of the last elements each to the first. A thread's sum is (x + y) + (z + w). Threads are
//            summed by a tree over the lanes (lane ^ 16, 8, 4, 2, 1), warps by the same tree. The CTA that
//            finishes last, whichever it is, sums the partials: lane l adds partials l, l + 32, ... in order,
//            then the tree. So the bits depend on x, TILE_BYTES, CONSUMERS and the grid, and on nothing else.
// Barriers   full[s]: FULL_ARRIVALS = 1 (the producer, with expect_tx of the tile) and its bytes. empty[s]:
//            EMPTY_ARRIVALS, one per consumer warp, when its lanes have read the stage. Parities: consumers
//            phase, producer phase ^ 1 (free before the first use). bar.sync 1: the sums of all warps are in
//            shared memory.
// Proxies    async write -> generic read: full[s]. Generic read -> the next bulk load: the fence of every
//            consumer, then empty[s].
// Shared     dynamic: stage s at s x STAGE_BYTES. Static: full[], empty[], warp_sums[], padded to
//            STAGE_ALIGN.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=4 -DSTAGE_BYTES=16384
//            -DSTAGE_ALIGN=128 -DTHREADS=160 -DPART=BOTH -DFULL_ARRIVALS=1 -DFULL_TX_BYTES=16384
//            -DEMPTY_ARRIVALS=4 reduction.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory. PART COPY or COMPUTE leaves out the other half; result[0] means nothing then.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };
constexpr Part part = PART;
constexpr u32 CONSUMERS = THREADS - 32;  // warp 0 produces
constexpr u32 COPIES = FULL_TX_BYTES / TILE_BYTES;  // of a tile, that complete on full[s]; none for COMPUTE

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];
__shared__ float warp_sums[CONSUMERS / 32];

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
PTX_INLINE u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

PTX_INLINE u32 bytes_of(u64 tile, u64 bulk_bytes) {
  return min(bulk_bytes - tile * TILE_BYTES, (u64)TILE_BYTES);
}

PTX_INLINE void produce(const u8* x, u64 num_tiles, u64 bulk_bytes) {  // one thread
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u32 bytes = bytes_of(tile, bulk_bytes);
    wait_parity(empty_at(s), phase ^ 1);
    mbarrier_arrive_expect_tx(full_at(s), COPIES * bytes);
    if (part != COMPUTE) cp_async_bulk_shared_global(stage_at(s), x + tile * TILE_BYTES, bytes, full_at(s));
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

struct Sum {
  float x = 0, y = 0, z = 0, w = 0;  // four, so that additions need not wait for one another
};

PTX_INLINE void add_tile(Sum& sum, u32 stage, u32 bytes) {
  if (part == COPY) return;
#pragma unroll 4
  for (u32 at = (threadIdx.x - 32) * 16; at < bytes; at += CONSUMERS * 16) {
    b32x4 v;
    ld_shared(v, stage + at);
    sum.x += __uint_as_float(v.x), sum.y += __uint_as_float(v.y);
    sum.z += __uint_as_float(v.z), sum.w += __uint_as_float(v.w);
  }
}

PTX_INLINE float tree(float sum) {  // over the lanes; a + b is b + a, so all lanes get the same bits
#pragma unroll
  for (u32 lane_mask = 16; lane_mask > 0; lane_mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane_mask);
  return sum;
}

PTX_INLINE Sum consume(u64 num_tiles, u64 bulk_bytes) {
  Sum sum;
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    wait_parity(full_at(s), phase);
    add_tile(sum, stage_at(s), bytes_of(tile, bulk_bytes));
    fence_proxy_async_shared_cta();  // what I have read, before the bulk load that overwrites it
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_at(s));
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  return sum;
}

// The first consumer warp of every CTA; the last to come adds up what all have left.
PTX_INLINE void finish(float* result, float* partials, u32* num_done, float sum) {
  const u32 lane = threadIdx.x % 32;
  u32 done = 0;
  if (lane == 0) {
    partials[blockIdx.x] = sum;
    fence_acq_rel_gpu();  // releases my partial, and acquires those of the CTAs that counted before me
    done = atomicInc(num_done, gridDim.x - 1);  // wraps to 0 with the last
    fence_acq_rel_gpu();
  }
  if (__shfl_sync(0xffffffff, done, 0) != gridDim.x - 1) return;
  __syncwarp();  // what lane 0 has acquired, to all lanes: a shuffle orders no memory
  float total = 0;
  for (u32 i = lane; i < gridDim.x; i += 32) total += partials[i];
  total = tree(total);
  if (lane == 0) result[0] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
mbarrier_reduction(float* result, float* partials, u32* num_done, const u8* x, u64 num_elements) {
  const u64 bulk_bytes = num_elements / 4 * 16;
  const u64 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s)
      mbarrier_init(full_at(s), FULL_ARRIVALS), mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  if (part == COMPUTE)  // nothing is loaded: add numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(stage_at(0) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  __syncthreads();  // every thread finds the barriers initialised

  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) produce(x, num_tiles, bulk_bytes);
    return;
  }
  const u32 consumer = threadIdx.x - 32, lane = consumer % 32;
  Sum sum = consume(num_tiles, bulk_bytes);
  if (blockIdx.x == gridDim.x - 1 && consumer < num_elements % 4)
    sum.x += ((const float*)x)[bulk_bytes / 4 + consumer];
  const float mine = tree((sum.x + sum.y) + (sum.z + sum.w));
  if (lane == 0) warp_sums[consumer / 32] = mine;
  bar_sync(1, CONSUMERS);
  if (consumer < 32) finish(result, partials, num_done, tree(lane < CONSUMERS / 32 ? warp_sums[lane] : 0));
}
