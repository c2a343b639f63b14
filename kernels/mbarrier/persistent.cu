// What does it take to keep one ring going while CTAs fetch their work as they get free?
//
// Moves      num_elements floats of x and y to dst: dst = y, then WORK times dst = fmaf(alpha, x, dst).
//            global -> shared -> global by cp.async.bulk, computed in place in shared memory; only the last
//            num_elements % 4 floats, which fill no 16-byte unit, go through registers.
// In flight  NUM_STAGES tiles of x and y, 2 x TILE_BYTES each, per CTA.
// Needs      sm_90. dst, x and y 16-byte aligned; dst overlaps neither. next_batch[0] is 0.
// Schedule   the producer takes batches of BATCH_TILES tiles from a counter in global memory and puts each
//            tile's number into a slot beside its stage, so all roles agree on the tile and on the end. Stage
//            and phase run on from batch to batch: nothing drains, the next batch is being loaded while this
//            one is computed.
// Reset      each CTA takes exactly one number past the last batch, so num_batches + gridDim.x numbers are
//            taken; atomicInc wraps to 0 with the last of them. Launches that share a counter follow one
//            another.
// Barriers   full[s]: FULL_ARRIVALS = 1 (the producer, with expect_tx of both tiles, after it wrote slot[s])
//            and their bytes; none come with NO_TILE. empty[s]: EMPTY_ARRIVALS = 1, the storing thread, once
//            its store has read the stage. Parities: consumers phase, producer phase ^ 1 (free before the
//            first use). bar.sync 1: the consumers have computed the tile, and read the slot.
// Proxies    async write -> generic read: full[s]. Generic write -> bulk store, and generic read -> the next
//            bulk load: the fence of every consumer, then bar.sync.
// Shared     dynamic: stage s at s x STAGE_BYTES: the tile of x, then the tile of y. Static: full[], empty[],
//            slot[], padded to STAGE_ALIGN.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=4 -DSTAGE_BYTES=32768
//            -DSTAGE_ALIGN=128 -DTHREADS=288 -DBATCH_TILES=4 -DWORK=1 -DPART=BOTH -DFULL_ARRIVALS=1
//            -DFULL_TX_BYTES=32768 -DEMPTY_ARRIVALS=1 persistent.cu
// Launch     any grid, best one that is resident at once; THREADS threads, NUM_STAGES x STAGE_BYTES of
//            dynamic shared memory. PART COPY or COMPUTE leaves out the other half.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };
constexpr Part part = PART;
constexpr u32 CONSUMERS = THREADS - 32;  // warp 0 produces
constexpr u32 COPIES = FULL_TX_BYTES / TILE_BYTES;  // that complete on full[s]: x and y, none for COMPUTE
constexpr u32 STORES_IN_FLIGHT = NUM_STAGES > 1 ? 1 : 0;  // released at the next store: take 3 stages or more
constexpr u32 NO_TILE = 0xffffffff;

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];
__shared__ u32 slot[NUM_STAGES];

PTX_INLINE u32 x_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
PTX_INLINE u32 y_at(u32 s) { return x_at(s) + TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
PTX_INLINE u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }
PTX_INLINE u32 slot_at(u32 s) { return smem_addr(slot) + s * 4; }

struct Ring {  // a place in the ring, and the parity of this round through it
  u32 s = 0, phase = 0;
  PTX_INLINE void next() {
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
};

PTX_INLINE u32 bytes_of(u32 tile, u64 bulk_bytes) {
  return min(bulk_bytes - (u64)tile * TILE_BYTES, (u64)TILE_BYTES);
}

PTX_INLINE void load_tile(u32 s, const u8* x, const u8* y, u32 tile, u64 bulk_bytes) {
  const u32 bytes = bytes_of(tile, bulk_bytes);
  st_shared(slot_at(s), b32x1{tile});
  mbarrier_arrive_expect_tx(full_at(s), COPIES * bytes);  // releases the slot, too
  if (part == COMPUTE) return;
  cp_async_bulk_shared_global(x_at(s), x + (u64)tile * TILE_BYTES, bytes, full_at(s));
  cp_async_bulk_shared_global(y_at(s), y + (u64)tile * TILE_BYTES, bytes, full_at(s));
}

PTX_INLINE void produce(const u8* x, const u8* y, u64 bulk_bytes, u32 num_tiles, u32* next_batch) {
  const u32 num_batches = (num_tiles + BATCH_TILES - 1) / BATCH_TILES;
  Ring ring;
  for (;;) {
    const u32 batch = atomicInc(next_batch, num_batches + gridDim.x - 1);
    if (batch >= num_batches) break;
    const u32 first = batch * BATCH_TILES, end = min(first + BATCH_TILES, num_tiles);
    for (u32 tile = first; tile < end; ++tile, ring.next()) {
      wait_parity(empty_at(ring.s), ring.phase ^ 1);
      load_tile(ring.s, x, y, tile, bulk_bytes);
    }
  }
  wait_parity(empty_at(ring.s), ring.phase ^ 1);
  st_shared(slot_at(ring.s), b32x1{NO_TILE});
  mbarrier_arrive(full_at(ring.s));
}

PTX_INLINE void fma_work(u32& y, u32 x, float alpha) {
  float sum = __uint_as_float(y);
#pragma unroll 8
  for (u32 k = 0; k < WORK; ++k) sum = fmaf(alpha, __uint_as_float(x), sum);
  y = __float_as_uint(sum);
}

PTX_INLINE void axpy(u32 s, u32 bytes, float alpha) {
  if (part == COPY) return;
#pragma unroll 1
  for (u32 at = (threadIdx.x - 32) * 16; at < bytes; at += CONSUMERS * 16) {
    b32x4 x, y;
    ld_shared(x, x_at(s) + at);
    ld_shared(y, y_at(s) + at);
    fma_work(y.x, x.x, alpha), fma_work(y.y, x.y, alpha);
    fma_work(y.z, x.z, alpha), fma_work(y.w, x.w, alpha);
    st_shared(y_at(s) + at, y);
  }
}

PTX_INLINE void consume(u8* dst, float alpha, u64 bulk_bytes) {
  Ring ring;
  for (bool stored = false;; stored = true, ring.next()) {  // stored: a tile before this one
    b32x1 tile;
    wait_parity(full_at(ring.s), ring.phase);
    ld_shared(tile, slot_at(ring.s));
    if (tile.x == NO_TILE) break;
    const u32 bytes = bytes_of(tile.x, bulk_bytes);
    axpy(ring.s, bytes, alpha);
    fence_proxy_async_shared_cta();  // my accesses come before the store's read and the next load's write
    bar_sync(1, CONSUMERS);
    if (threadIdx.x == 32) {
      if (part != COMPUTE) cp_async_bulk_global_shared(dst + (u64)tile.x * TILE_BYTES, y_at(ring.s), bytes);
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<STORES_IN_FLIGHT>();
      if (STORES_IN_FLIGHT == 0 || stored)
        mbarrier_arrive(empty_at((ring.s + NUM_STAGES - STORES_IN_FLIGHT) % NUM_STAGES));
    }
  }
  if (threadIdx.x == 32) cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}

extern "C" __global__ void __launch_bounds__(THREADS)
mbarrier_persistent(u8* dst, const u8* x, const u8* y, float alpha, u64 num_elements, u32* next_batch) {
  const u64 bulk_bytes = num_elements / 4 * 16;
  const u32 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES, tail = num_elements % 4;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s)
      mbarrier_init(full_at(s), FULL_ARRIVALS), mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  if (part == COMPUTE)  // nothing is loaded: compute on numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(smem_addr(stages) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  __syncthreads();  // every thread finds the barriers initialised

  if (threadIdx.x >= 32) consume(dst, alpha, bulk_bytes);
  else if (threadIdx.x == 0) produce(x, y, bulk_bytes, num_tiles, next_batch);

  const u64 i = bulk_bytes / 4 + threadIdx.x;
  if (part != COMPUTE && blockIdx.x == gridDim.x - 1 && threadIdx.x < tail) {
    u32 sum = ((const u32*)y)[i];
    if (part == BOTH) fma_work(sum, ((const u32*)x)[i], alpha);
    ((u32*)dst)[i] = sum;
  }
}
