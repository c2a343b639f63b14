// What is gained when one warpgroup only copies, the others only compute, and registers follow the work?
//
// Moves      num_elements floats of x and y to dst: dst = y, then WORK times dst = fmaf(alpha, x, dst).
//            global -> shared -> global by cp.async.bulk, computed in place in shared memory; only the last
//            num_elements % 4 floats, which fill no 16-byte unit, go through registers.
// In flight  NUM_STAGES tiles of x and y, 2 x TILE_BYTES each, per CTA.
// Needs      sm_90. dst, x and y 16-byte aligned; dst overlaps neither. setmaxnreg exists on sm_90a, sm_100a,
//            ... only: PRODUCER_REGISTERS=0 leaves it out.
// Roles      warpgroup 0: one thread asks for tiles, as far ahead as stages are free. Warpgroups 1 ..
//            CONSUMER_GROUPS: each computes its share of every tile and stores it.
// Registers  __launch_bounds__ makes ptxas give each thread the most that CTAS_PER_SM CTAs leave it. The
//            producers give all but PRODUCER_REGISTERS of them back, the consumers take up to
//            CONSUMER_REGISTERS; the consumers' setmaxnreg waits until the pool has enough, so the sum must
//            not exceed it.
// Barriers   full[s]: FULL_ARRIVALS = 1 (the producer, with expect_tx of both tiles) and their bytes.
//            empty[s]: EMPTY_ARRIVALS = CONSUMER_GROUPS, from each group's storing thread once its store has
//            read the stage. Parities flip at each wrap of the ring; the producer's starts at 1, which a
//            fresh barrier answers at once: a stage is free before its first use. bar.sync 1 + g: the 128
//            threads of consumer group g.
// Proxies    async write -> generic read: full[s]. Generic write -> bulk store, and generic read -> the next
//            bulk load: the fence of every consumer, then the group's bar.sync.
// Shared     dynamic: stage s at s x STAGE_BYTES: the tile of x, then the tile of y. Static: full[], empty[],
//            padded to STAGE_ALIGN.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=16384 -DNUM_STAGES=4 -DSTAGE_BYTES=32768
//            -DSTAGE_ALIGN=128 -DTHREADS=384 -DCONSUMER_GROUPS=2 -DWORK=1 -DPART=BOTH -DFULL_ARRIVALS=1
//            -DFULL_TX_BYTES=32768 -DEMPTY_ARRIVALS=2 -DCTAS_PER_SM=1 -DPRODUCER_REGISTERS=40
//            -DCONSUMER_REGISTERS=232 specialised.cu
// Launch     any grid (CTAs stride over the tiles), THREADS threads, NUM_STAGES x STAGE_BYTES of dynamic
//            shared memory. PART COPY or COMPUTE leaves out the other half.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };
constexpr Part part = PART;
constexpr u32 COPIES = FULL_TX_BYTES / TILE_BYTES;  // that complete on full[s]: x and y, none for COMPUTE
constexpr u32 SHARE_BYTES = (TILE_BYTES / 16 + CONSUMER_GROUPS - 1) / CONSUMER_GROUPS * 16;  // each
constexpr u32 STORES_IN_FLIGHT = NUM_STAGES > 1 ? 1 : 0;  // released at the next store: take 3 stages or more

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
static_assert(THREADS == 128 * (1 + CONSUMER_GROUPS), "roles are warpgroups");

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];

PTX_INLINE u32 x_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
PTX_INLINE u32 y_at(u32 s) { return x_at(s) + TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
PTX_INLINE u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

PTX_INLINE u32 bytes_of(u64 tile, u64 bulk_bytes) {
  return min(bulk_bytes - tile * TILE_BYTES, (u64)TILE_BYTES);
}

PTX_INLINE void produce(const u8* x, const u8* y, u64 num_tiles, u64 bulk_bytes) {  // one thread
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u32 bytes = bytes_of(tile, bulk_bytes);
    wait_parity(empty_at(s), phase ^ 1);
    mbarrier_arrive_expect_tx(full_at(s), COPIES * bytes);
    if (part != COMPUTE) {
      cp_async_bulk_shared_global(x_at(s), x + tile * TILE_BYTES, bytes, full_at(s));
      cp_async_bulk_shared_global(y_at(s), y + tile * TILE_BYTES, bytes, full_at(s));
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

PTX_INLINE void fma_work(u32& y, u32 x, float alpha) {
  float sum = __uint_as_float(y);
#pragma unroll 8
  for (u32 k = 0; k < WORK; ++k) sum = fmaf(alpha, __uint_as_float(x), sum);
  y = __float_as_uint(sum);
}

PTX_INLINE void axpy(u32 s, u32 begin, u32 end, float alpha) {  // bytes of the tile, 16 per thread and turn
  if (part == COPY) return;
#pragma unroll 1
  for (u32 at = begin + threadIdx.x % 128 * 16; at < end; at += 128 * 16) {
    b32x4 x, y;
    ld_shared(x, x_at(s) + at);
    ld_shared(y, y_at(s) + at);
    fma_work(y.x, x.x, alpha), fma_work(y.y, x.y, alpha);
    fma_work(y.z, x.z, alpha), fma_work(y.w, x.w, alpha);
    st_shared(y_at(s) + at, y);
  }
}

PTX_INLINE void consume(u8* dst, float alpha, u64 num_tiles, u64 bulk_bytes, u32 group) {  // one warpgroup
  const bool stores = threadIdx.x % 128 == 0;
  u32 s = 0, phase = 0;
  for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const u32 bytes = bytes_of(tile, bulk_bytes);
    const u32 begin = group * SHARE_BYTES, end = min(begin + SHARE_BYTES, bytes);  // nothing if begin >= end
    wait_parity(full_at(s), phase);
    axpy(s, begin, end, alpha);
    fence_proxy_async_shared_cta();  // my accesses come before the store's read and the next load's write
    bar_sync(1 + group, 128);
    if (stores) {
      if (part != COMPUTE && begin < end)
        cp_async_bulk_global_shared(dst + tile * TILE_BYTES + begin, y_at(s) + begin, end - begin);
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<STORES_IN_FLIGHT>();
      if (STORES_IN_FLIGHT == 0 || tile != blockIdx.x)
        mbarrier_arrive(empty_at((s + NUM_STAGES - STORES_IN_FLIGHT) % NUM_STAGES));
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  if (stores) cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
mbarrier_specialised(u8* dst, const u8* x, const u8* y, float alpha, u64 num_elements) {
  const u64 bulk_bytes = num_elements / 4 * 16;
  const u64 num_tiles = (bulk_bytes + TILE_BYTES - 1) / TILE_BYTES;
  const u32 group = threadIdx.x / 128, tail = num_elements % 4;

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s)
      mbarrier_init(full_at(s), FULL_ARRIVALS), mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  if (part == COMPUTE)  // nothing is loaded: compute on numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(smem_addr(stages) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  __syncthreads();  // every thread finds the barriers initialised

  if (group == 0) {
    if constexpr (PRODUCER_REGISTERS != 0) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(x, y, num_tiles, bulk_bytes);
  } else {
    if constexpr (PRODUCER_REGISTERS != 0) setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(dst, alpha, num_tiles, bulk_bytes, group - 1);
  }

  if (part != COMPUTE && blockIdx.x == gridDim.x - 1 && threadIdx.x < tail) {
    const u64 i = num_elements - tail + threadIdx.x;
    u32 sum = ((const u32*)y)[i];
    if (part == BOTH) fma_work(sum, ((const u32*)x)[i], alpha);
    ((u32*)dst)[i] = sum;
  }
}
