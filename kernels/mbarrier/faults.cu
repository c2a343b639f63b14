// How does a ring of stages break, and what does each mistake look like from outside?
//
// The pipeline is complete and correct. FAULT names one mistake, made where its name stands below; faults.py
// says each in a sentence. The answers are in tests/kernels/test_deadlocks.py: what the emulated GPU reports,
// and what the bounded waits of watchdog.cuh record.
//
// Moves      num_tiles x TILE_BYTES of u32 from src, doubled, to dst: cp.async.bulk into a stage, doubled in
//            place, cp.async.bulk out of it.
// In flight  NUM_STAGES x TILE_BYTES of loads per CTA.
// Needs      sm_90. src and dst 16-byte aligned, not overlapping.
// Barriers   full[s]: 1 arrival (the producer, with expect_tx of TILE_BYTES) and those bytes.
//            empty[s]: WARPS arrivals, one per consumer warp, once its bulk store has read its part.
//            Both complete once per use of stage s. Consumers await full[s] with parity 0 first; the
//            producer awaits empty[s] with parity 1, which a fresh barrier answers at once. Parities flip at
//            each wrap of the ring.
// Proxies    generic writes (doubling) -> async reads (bulk store): fence.proxy.async by each writer.
// Shared     dynamic: stages, NUM_STAGES x TILE_BYTES; static: full[], empty[].
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=4096 -DNUM_STAGES=2 -DWARPS=4 -DFAULT=NONE
//            faults.cu
// Launch     any grid (CTAs stride over the tiles), (1 + WARPS) x 32 threads, NUM_STAGES x TILE_BYTES of
//            dynamic shared memory.
#include "ptx.cuh"

enum Fault {
  NONE,
  BYTES_SHORT, BYTES_OVER, LOAD_MISSING, ARRIVE_MISSING, PRODUCER_NOT_REACHED, PRODUCER_LEAVES_EARLY,
  ARRIVALS_SHORT, ARRIVALS_OVER, RELEASE_MISSING, EVERY_LANE_RELEASES,
  INIT_MISSING, INIT_NOT_SYNCED, FULL_NOT_AWAITED, EMPTY_NOT_AWAITED, WRONG_BARRIER, PARITY_NOT_FLIPPED,
  COMMIT_AFTER_WAIT
};

static_assert(NUM_STAGES >= 2, "a wait on the wrong barrier needs a second one");
static_assert(TILE_BYTES % (WARPS * 128) == 0, "each consumer warp takes an equal part, a word per lane");

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];
__shared__ u64 empty[NUM_STAGES];

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
PTX_INLINE u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

PTX_INLINE void init_barriers() {
  constexpr u32 releases = FAULT == ARRIVALS_SHORT ? WARPS + 1 : FAULT == ARRIVALS_OVER ? WARPS - 1 : WARPS;
  for (u32 s = 0; s < NUM_STAGES; ++s) {
    if constexpr (FAULT != INIT_MISSING) mbarrier_init(full_at(s), 1);
    mbarrier_init(empty_at(s), releases);
  }
  fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
}

PTX_INLINE void produce(const u8* src, u32 num_tiles) {  // one thread
  constexpr u32 announced_bytes = FAULT == BYTES_SHORT ? TILE_BYTES - 16
                                : FAULT == BYTES_OVER  ? TILE_BYTES + 16 : TILE_BYTES;
  const u32 end = FAULT == PRODUCER_LEAVES_EARLY ? num_tiles - gridDim.x : num_tiles;
  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x; tile < end; tile += gridDim.x) {
    if constexpr (FAULT != EMPTY_NOT_AWAITED) wait_parity(empty_at(s), phase ^ 1);
    if constexpr (FAULT == ARRIVE_MISSING) mbarrier_expect_tx(full_at(s), announced_bytes);
    else mbarrier_arrive_expect_tx(full_at(s), announced_bytes);
    if (FAULT != LOAD_MISSING || tile + gridDim.x < num_tiles)  // the last one is forgotten
      cp_async_bulk_shared_global(stage_at(s), src + (u64)tile * TILE_BYTES, TILE_BYTES, full_at(s));
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

PTX_INLINE void consume(u8* dst, u32 num_tiles) {  // each of WARPS warps
  constexpr u32 PART_BYTES = TILE_BYTES / WARPS;
  const u32 lane = threadIdx.x % 32, part = threadIdx.x / 32 * PART_BYTES;
  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    if constexpr (FAULT == WRONG_BARRIER) wait_parity(full_at((s + 1) % NUM_STAGES), phase);
    else if constexpr (FAULT != FULL_NOT_AWAITED) wait_parity(full_at(s), phase);

    for (u32 at = lane * 4; at < PART_BYTES; at += 128) {
      b32x1 word;
      ld_shared(word, stage_at(s) + part + at);
      st_shared(stage_at(s) + part + at, b32x1{2 * word.x});
    }
    fence_proxy_async_shared_cta();  // this lane's words, before the bulk store below reads them
    __syncwarp();

    if (lane == 0) {
      cp_async_bulk_global_shared(dst + (u64)tile * TILE_BYTES + part, stage_at(s) + part, PART_BYTES);
      if constexpr (FAULT != COMMIT_AFTER_WAIT) cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<0>();  // the part has been read: the stage may be overwritten
      if constexpr (FAULT == COMMIT_AFTER_WAIT) cp_async_bulk_commit_group();
    }
    const bool releases = FAULT == EVERY_LANE_RELEASES || (FAULT != RELEASE_MISSING && lane == 0);
    if (releases) mbarrier_arrive(empty_at(s));
    if (++s == NUM_STAGES) {
      s = 0;
      if constexpr (FAULT != PARITY_NOT_FLIPPED) phase ^= 1;
    }
  }
}

extern "C" __global__ void __launch_bounds__((1 + WARPS) * 32)
mbarrier_faults(u8* dst, const u8* src, u32 num_tiles) {
  if (threadIdx.x == 0) init_barriers();
  if constexpr (FAULT != INIT_NOT_SYNCED) __syncthreads();

  const bool produces = FAULT != PRODUCER_NOT_REACHED && threadIdx.x == WARPS * 32;
  if (threadIdx.x < WARPS * 32) consume(dst, num_tiles);
  else if (produces) produce(src, num_tiles);
}
