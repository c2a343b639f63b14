// How long does one tile take when the TMA moves it as a 1-D bulk copy, and nothing overlaps?
//
// Moves      num_steps tiles, one after another, by one CTA. A pool tile's first word is the index of the
//            next tile, so no address is known before the previous step has ended. A step of LEG
//              LOAD   global -> shared; ends when every thread may read the tile and has read its index
//              STORE  shared -> global; ends when the tile's writes are complete. Every step stores pool tile
//                     0; the indices of all tiles lie in shared memory beforehand
//              COPY   LOAD, then STORE of the loaded tile to the same index of dst
// In flight  one tile, one request.
// Needs      sm_90. pool and dst 16-byte aligned, num_tiles x TILE_BYTES each. TILE_BYTES a multiple of 16.
// Barriers   full: 1 arrival (thread 0, with expect_tx of TILE_BYTES) and TILE_BYTES bytes; one phase per
//            load, so the parity flips every load. Thread 0 waits for what it asked for (full, wait_group 0),
//            then one __syncthreads tells the others: the same in every chain. A ring whose consumers all
//            wait on full[] saves that last one.
// Proxies    every thread reads the index with a plain load, and the slot is overwritten by the async proxy
//            two steps later: fence.proxy.async in between, issued while the next tile is under way.
// Shared     dynamic: two slots of TILE_BYTES, used in turn, so that a slow reader of the last index is never
//            overwritten; LEG STORE: then num_tiles indices of 4 bytes. Static: full, padded to 128 bytes.
// Result     result[0] SM cycles, result[1] nanoseconds, result[2] the index after the last step.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DTILE_BYTES=4096 -DTHREADS=128 -DLEG=LOAD chain_bulk.cu
// Launch     one CTA of THREADS threads, the shared memory above.
#include "ptx.cuh"

enum Leg { LOAD, STORE, COPY };

constexpr Leg leg = LEG;

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");

extern __shared__ __align__(128) u8 slots[];
__shared__ u64 full;

__device__ __forceinline__ void load_tile(u32 slot, const u8* src, u32 phase) {
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(smem_addr(&full), TILE_BYTES);
    cp_async_bulk_shared_global(slot, src, TILE_BYTES, smem_addr(&full));
  }
  fence_proxy_async_shared_cta();  // my read of the last index comes before the copy that overwrites it
  if (threadIdx.x == 0) {
    wait_parity(smem_addr(&full), phase);
  }
  __syncthreads();
}

__device__ __forceinline__ void store_tile(u8* dst, u32 slot) {
  if (threadIdx.x == 0) {
    cp_async_bulk_global_shared(dst, slot, TILE_BYTES);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
tma_chain_bulk(u8* dst, const u8* pool, u32 num_tiles, u32 num_steps, u64* result) {
  const u32 first_slot = smem_addr(slots);
  const u32 indices = first_slot + 2 * TILE_BYTES;
  if (threadIdx.x == 0) {
    mbarrier_init(smem_addr(&full), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full at cluster scope: it must find it initialised
  }
  if (leg == STORE) {
    load_tile(first_slot, pool, 0);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < num_tiles; i += THREADS)
      st_shared(indices + i * 4, b32x1{*(const u32*)(pool + (u64)i * TILE_BYTES)});
  }
  __syncthreads();

  b32x1 index{0};
  const u64 start_ns = globaltimer_now();
  const u64 start_cycles = clock64_now();
#pragma unroll 1
  for (u32 step = 0; step < num_steps; ++step) {
    const u64 offset = (u64)index.x * TILE_BYTES;
    const u32 slot = leg == STORE ? first_slot : first_slot + (step & 1) * TILE_BYTES;
    if (leg != STORE) {
      load_tile(slot, pool + offset, step & 1);
      ld_shared(index, slot);
    }
    if (leg != LOAD) store_tile(dst + offset, slot);
    if (leg == STORE) ld_shared(index, indices + index.x * 4);
  }
  const u64 end_cycles = clock64_now();
  const u64 end_ns = globaltimer_now();

  if (threadIdx.x == 0) {
    result[0] = end_cycles - start_cycles;
    result[1] = end_ns - start_ns;
    result[2] = index.x;
  }
}
