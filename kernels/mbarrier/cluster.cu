// What does a tile cost that several CTAs need, when each loads a part of it and multicasts it to all?
//
// Computes   dst[r, i] = 0, then WORK times fmaf(alpha[r], x[i], dst[r, i]), float32, for every row r. The
//            CTA of rank c in its cluster computes row c of each group of CLUSTER_SIZE rows.
// Moves      per group of CLUSTER_SIZE rows: x once, global -> shared of all CTAs of the cluster, each asking
//            for 1 / CLUSTER_SIZE of each tile by a multicast cp.async.bulk; each row shared -> global by
//            cp.async.bulk. MULTICAST=0: each CTA loads the whole tile, so x is read CLUSTER_SIZE times. The
//            last num_elements % 4 elements of a row: through one thread each.
// In flight  NUM_STAGES x TILE_BYTES into each CTA.
// Needs      sm_90. x, dst and the rows of dst (pitch elements apart) 16-byte aligned.
// Barriers   full[s]: FULL_ARRIVALS = 1 (this CTA's producer, with expect_tx of the whole tile) and the bytes
//            of all slices, whoever asked for them. empty[s]: EMPTY_ARRIVALS, one from each CTA that the
//            multicast overwrites: all must have read the stage. A faster peer's bytes may land before this
//            CTA's expect_tx, but not a phase early: that peer waited for our release of the stage. Parities:
//            consumers phase, producer phase ^ 1 (a stage is free before its first use).
// Clusters   the first cluster barrier: every CTA has started and initialised its barriers. The last one:
//            nobody leaves while a peer may still arrive on its barriers.
// Proxies    async write -> generic read: full[s]. Generic write -> bulk store, and generic read -> multicast
//            by any CTA: the proxy fence of every consumer, then the barrier or the arrival.
// Shared     dynamic: stage s at s x STAGE_BYTES. Static: full[], empty[], padded to STAGE_ALIGN bytes.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DCLUSTER_SIZE=2 -DMULTICAST=1 -DTILE_BYTES=4096
//            -DNUM_STAGES=4 -DSTAGE_BYTES=4096 -DSTAGE_ALIGN=128 -DTHREADS=160 -DWORK=1 -DPART=BOTH
//            -DFULL_ARRIVALS=1 -DFULL_TX_BYTES=4096 -DEMPTY_ARRIVALS=2 cluster.cu
// Launch     a grid of whole clusters, which stride over rows and tiles; THREADS threads, NUM_STAGES x
//            STAGE_BYTES of dynamic shared memory.
#include "ptx.cuh"

enum Part { BOTH, COPY, COMPUTE };
constexpr Part part = PART;
constexpr u32 COPIES = FULL_TX_BYTES / TILE_BYTES;  // of a tile, that complete on full[s]; none for COMPUTE
constexpr u32 CONSUMERS = THREADS - 32;  // warp 0 produces
constexpr u32 SLICE_BYTES = MULTICAST ? TILE_BYTES / CLUSTER_SIZE : TILE_BYTES;
constexpr u32 STORES_IN_FLIGHT = NUM_STAGES > 1 ? 1 : 0;  // released at the next store: take 3 stages or more

static_assert(TILE_BYTES % (16 * CLUSTER_SIZE) == 0, "each slice is whole 16-byte units");

extern __shared__ __align__(STAGE_ALIGN) u8 stages[];
__shared__ u64 full[NUM_STAGES], empty[NUM_STAGES];

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * STAGE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }
PTX_INLINE u32 empty_at(u32 s) { return smem_addr(empty) + s * 8; }

struct Work {  // item i: tile i % num_tiles of the rows of group i / num_tiles; the same items for all ranks
  u64 row_bytes;  // of whole 16-byte units
  u32 num_tiles, items;
};

PTX_INLINE u32 bytes_of(u32 tile, u64 row_bytes) {
  return min(row_bytes - (u64)tile * TILE_BYTES, (u64)TILE_BYTES);
}

PTX_INLINE void load_slice(u32 s, const u8* tile, u32 tile_bytes, u32 rank) {
  const u32 begin = MULTICAST ? rank * SLICE_BYTES : 0;
  if (begin >= tile_bytes) return;  // a short tile has no bytes for this rank to ask for
  const u32 num_bytes = min(tile_bytes - begin, SLICE_BYTES);
  if constexpr (MULTICAST)
    cp_async_bulk_shared_global_multicast(stage_at(s) + begin, tile + begin, num_bytes, full_at(s),
                                          (1u << CLUSTER_SIZE) - 1);
  else
    cp_async_bulk_shared_global(stage_at(s), tile, num_bytes, full_at(s));
}

PTX_INLINE void produce(const u8* x, const Work& work, u32 rank) {  // one thread
  u32 s = 0, phase = 0;
  for (u32 item = blockIdx.x / CLUSTER_SIZE; item < work.items; item += gridDim.x / CLUSTER_SIZE) {
    const u32 tile = item % work.num_tiles, tile_bytes = bytes_of(tile, work.row_bytes);
    wait_parity_cluster(empty_at(s), phase ^ 1);  // other CTAs arrive there: acquire at their scope
    mbarrier_arrive_expect_tx(full_at(s), COPIES * tile_bytes);
    if (part != COMPUTE) load_slice(s, x + (u64)tile * TILE_BYTES, tile_bytes, rank);
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
}

PTX_INLINE u32 scaled(u32 x, float alpha) {
  float sum = 0;
#pragma unroll 4
  for (u32 w = 0; w < WORK; ++w) sum = fmaf(alpha, __uint_as_float(x), sum);
  return __float_as_uint(sum);
}

PTX_INLINE void scale_tile(u32 stage, u32 tile_bytes, float alpha) {  // in place
#pragma unroll 1
  for (u32 at = (threadIdx.x - 32) * 16; at < tile_bytes; at += CONSUMERS * 16) {
    b32x4 v;
    ld_shared(v, stage + at);
    st_shared(stage + at,
              b32x4{scaled(v.x, alpha), scaled(v.y, alpha), scaled(v.z, alpha), scaled(v.w, alpha)});
  }
}

PTX_INLINE void release(u32 s) {  // the stage has been read here: tell every CTA that writes it
  if constexpr (!MULTICAST) return (void)mbarrier_arrive(empty_at(s));
  fence_release_shared_cta();  // once, for all the arrivals
  for (u32 peer = 0; peer < CLUSTER_SIZE; ++peer)
    mbarrier_arrive_relaxed_shared_cluster(mapa_shared_cluster(empty_at(s), peer));
}

PTX_INLINE void consume(u8* dst, const float* alpha, const Work& work, u64 pitch_bytes, u32 rank) {
  u32 s = 0, phase = 0, first = blockIdx.x / CLUSTER_SIZE;
  for (u32 item = first; item < work.items; item += gridDim.x / CLUSTER_SIZE) {
    const u32 tile = item % work.num_tiles, tile_bytes = bytes_of(tile, work.row_bytes);
    const u32 row = item / work.num_tiles * CLUSTER_SIZE + rank;
    const float row_alpha = alpha[row];
    u8* row_at = dst + row * pitch_bytes;
    wait_parity_cluster(full_at(s), phase);
    if (part != COPY) scale_tile(stage_at(s), tile_bytes, row_alpha);
    fence_proxy_async_shared_cta();  // my accesses come before the bulk store and the next multicast
    bar_sync(1, CONSUMERS);
    if (threadIdx.x == 32) {
      if (part != COMPUTE)
        cp_async_bulk_global_shared(row_at + (u64)tile * TILE_BYTES, stage_at(s), tile_bytes);
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<STORES_IN_FLIGHT>();
      if (STORES_IN_FLIGHT == 0 || item != first) release((s + NUM_STAGES - STORES_IN_FLIGHT) % NUM_STAGES);
    }
    if (++s == NUM_STAGES) s = 0, phase ^= 1;
  }
  if (threadIdx.x == 32) cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it
}

extern "C" __global__ void __cluster_dims__(CLUSTER_SIZE) __launch_bounds__(THREADS)
mbarrier_cluster(u8* dst, const float* alpha, const u8* x, u32 num_rows, u64 num_elements, u64 pitch) {
  const u32 rank = mov_cluster_ctarank(), tail = num_elements % 4;
  const u64 row_bytes = (num_elements - tail) * 4;
  const u32 num_tiles = (row_bytes + TILE_BYTES - 1) / TILE_BYTES;
  const Work work = {row_bytes, num_tiles, num_rows / CLUSTER_SIZE * num_tiles};

  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s)
      mbarrier_init(full_at(s), FULL_ARRIVALS), mbarrier_init(empty_at(s), EMPTY_ARRIVALS);
    fence_mbarrier_init();  // for the peers, who arrive there and count bytes there, at cluster scope
  }
  if (part == COMPUTE)  // nothing is loaded: compute on numbers from 1 to 2
    for (u32 i = threadIdx.x; i < NUM_STAGES * STAGE_BYTES / 4; i += THREADS)
      st_shared(stage_at(0) + i * 4, b32x1{0x3f800000 | i * 2654435761u >> 9});
  barrier_cluster_arrive();
  barrier_cluster_wait();

  if (threadIdx.x >= 32) consume(dst, alpha, work, pitch * 4, rank);
  else if (threadIdx.x == 0) produce(x, work, rank);
  for (u32 row = blockIdx.x; part != COMPUTE && row < num_rows && threadIdx.x < tail; row += gridDim.x) {
    const u64 i = row_bytes / 4 + threadIdx.x;
    ((u32*)dst)[row * pitch + i] = part == COPY ? ((u32*)x)[i] : scaled(((u32*)x)[i], alpha[row]);
  }
  __syncwarp();  // the cluster barriers are aligned: the whole warp, together
  barrier_cluster_arrive();
  barrier_cluster_wait();
}
