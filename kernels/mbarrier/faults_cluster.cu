// How does a ring between two CTAs of a cluster break, and what does each mistake look like from outside?
//
// As faults.cu, for mistakes that need a peer: the pipeline is complete and correct, and FAULT names one
// mistake, made where its name stands below; faults_cluster.py says each in a sentence.
//
// Moves      num_tiles x TILE_BYTES of u32 from src, doubled, to dst. CTA 0 of each cluster loads a tile into
//            registers and stores it into a stage of CTA 1, which reads it and stores the doubled words.
// In flight  nothing: loads and stores of threads. NUM_STAGES tiles may wait in CTA 1.
// Needs      sm_90. src and dst 16-byte aligned, not overlapping.
// Barriers   full[s], in CTA 1: WARPS arrivals, one per producer warp, from CTA 0. empty[s], in CTA 0: WARPS
//            arrivals, one per consumer warp, from CTA 1. Both complete once per use of stage s; parities as
//            in faults.cu. Waits acquire at cluster scope, since what they wait for was released there.
// Clusters   the entry barrier: both CTAs have started, and their barriers are initialised. Its arrival is
//            relaxed: the init fence has released what the peer must see. The exit barrier: nobody leaves
//            while the peer may still arrive on its barriers.
// Shared     static: stages, NUM_STAGES x TILE_BYTES; full[], empty[].
// Compile    nvcc -arch=sm_90a -cubin -I../include -DNUM_STAGES=2 -DWARPS=4 -DFAULT=NONE faults_cluster.cu
// Launch     2 CTAs per cluster (clusters stride over the tiles), WARPS x 32 threads.
#include "ptx.cuh"

enum Fault {
  NONE,
  INIT_FENCE_MISSING, ENTRY_BARRIER_MISSING, EXIT_BARRIER_MISSING,
  RELEASED_TO_ITSELF, ARRIVALS_OF_TWO, SCOPE_TOO_NARROW, ADDRESS_TAKEN_FOR_OWN
};

constexpr u32 THREADS = WARPS * 32;
constexpr u32 TILE_BYTES = THREADS * 16;

__shared__ __align__(16) u8 stages[NUM_STAGES * TILE_BYTES];
__shared__ u64 full[NUM_STAGES];
__shared__ u64 empty[NUM_STAGES];

PTX_INLINE u32 slot_at(u32 s) { return smem_addr(stages) + s * TILE_BYTES + threadIdx.x * 16; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
PTX_INLINE u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

PTX_INLINE void init_barriers() {  // one thread
  constexpr u32 releases = FAULT == ARRIVALS_OF_TWO ? 2 * WARPS : WARPS;
  for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), WARPS), mbarrier_init(empty_at(s), releases);
  if constexpr (FAULT != INIT_FENCE_MISSING) fence_mbarrier_init();  // for the peer, who arrives on them
}

PTX_INLINE void arrive_at_peer(u32 mbar, u32 peer) {  // one lane, for its warp
  __syncwarp();
  if (threadIdx.x % 32) return;
  if constexpr (FAULT == ADDRESS_TAKEN_FOR_OWN) mbarrier_arrive(mapa_shared_cluster(mbar, peer));
  else mbarrier_arrive_shared_cluster(mapa_shared_cluster(mbar, peer));
}

PTX_INLINE void produce(const u8* src, u32 num_tiles) {  // all threads of CTA 0
  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x / 2; tile < num_tiles; tile += gridDim.x / 2) {
    b32x4 words;
    ld_global(words, src + (u64)tile * TILE_BYTES + threadIdx.x * 16);
    wait_parity_cluster(empty_at(s), phase ^ 1);
    st_shared_cluster(mapa_shared_cluster(slot_at(s), 1), words);
    arrive_at_peer(full_at(s), 1);
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

PTX_INLINE void consume(u8* dst, u32 num_tiles) {  // all threads of CTA 1
  u32 s = 0, phase = 0;
  for (u32 tile = blockIdx.x / 2; tile < num_tiles; tile += gridDim.x / 2) {
    if constexpr (FAULT == SCOPE_TOO_NARROW) wait_parity(full_at(s), phase);
    else wait_parity_cluster(full_at(s), phase);
    b32x4 words;
    ld_shared(words, slot_at(s));
    arrive_at_peer(empty_at(s), FAULT == RELEASED_TO_ITSELF ? 1 : 0);
    st_global(dst + (u64)tile * TILE_BYTES + threadIdx.x * 16,
              b32x4{2 * words.x, 2 * words.y, 2 * words.z, 2 * words.w});
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(THREADS)
mbarrier_faults_cluster(u8* dst, const u8* src, u32 num_tiles) {
  if (threadIdx.x == 0) init_barriers();
  __syncthreads();
  if constexpr (FAULT != ENTRY_BARRIER_MISSING) {
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
  }
  if (mov_cluster_ctarank() == 0) produce(src, num_tiles);
  else consume(dst, num_tiles);
  if constexpr (FAULT != EXIT_BARRIER_MISSING) {
    barrier_cluster_arrive();
    barrier_cluster_wait();
  }
}
