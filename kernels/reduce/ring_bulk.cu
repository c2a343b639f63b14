// AllReduce and ReduceScatter, how fast when the TMA carries what comes around a ring, and threads only add?
//
// Moves      as ring.cu, 2 (N - 1) chunks of S / N bytes from each rank to its next, N - 1 for a
//            ReduceScatter: own and local scratch memory -> shared -> remote scratch memory, then own dst ->
//            shared -> remote dst, by cp.async.bulk. Registers see only what is added, and the ends of pieces
//            that are no vector.
// Computes   as ring.cu, with the same bits: the sum replaces what came, in shared memory.
// In flight  NUM_STAGES tiles of TILE_BYTES per CTA and source.
// Needs      sm_90; peer access to the next rank's scratch memory, pad and dst. Any count, any alignment of
//            src and dst to whole elements; threads alone move a piece where they lie differently modulo 16.
// Barriers   full[s]: 1 arrival (the asking thread, with expect_tx of the tile's bytes from all sources) and
//            those bytes; once per use of stage s, so the awaited parity starts at 0 and flips at each wrap
//            of the stages, on through all pieces. No empty[s]: the thread that asks also stores, and
//            wait_group.read tells it that a stage has been read. Between ranks as ring.cu.
// Proxies    generic -> async, global: what threads have stored (operands, ends, a piece of a rank whose src
//            lies otherwise) and what peers have read is known by the words; one fence.proxy.async in the
//            asking thread behind them, before bulk copies read or overwrite it. Also from the peer's bulk
//            stores to our bulk loads: one proxy orders by itself only inside a CTA.
//            generic -> async, shared: each thread's sums, and its reads of the tile that the next load
//            overwrites: fence.proxy.async in each of them, before the bar.sync in front of the bulk store.
//            async -> generic: wait_group and the mbarrier, with an implicit proxy fence (PTX ISA, "Async
//            Proxy" of asynchronous copies). wait_group 0 makes all writes, also those at the next rank,
//            visible to the asking thread; bar.sync and the release of the data word hand that on.
// Shared     dynamic: stages, NUM_STAGES x 2 x TILE_BYTES (what came, own part); static: full[NUM_STAGES].
// Compile    nvcc -arch=sm_90a -cubin -I../include -DELEMENT=bf16 -DSCATTER_ONLY=0 -DTHREADS=256 -DUNROLL=4
//            -DTILE_BYTES=8192 -DNUM_STAGES=4 -DPIECE_BYTES=65536 -DNUM_SLOTS=2 -DWORLD_SIZE=8
//            -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_RING_DATA=128 -DSIGNAL_RING_ROOM=256 -DSIGNAL_STEP_EXIT=2
//            -DSIGNAL_STEP_REDUCE_SCATTER=3 -DSIGNAL_STEP_ALL_GATHER=4 -DSIGNAL_STEP_ROOM=5 ring_bulk.cu
// Launch     as ring.cu, with NUM_STAGES x 2 x TILE_BYTES of dynamic shared memory: the same grid on every
//            rank, at most SIGNAL_RING_ROOM - SIGNAL_RING_DATA CTAs, all resident; THREADS threads. origin,
//            the same on every rank: dst modulo 128, or any multiple of an element where dst differs; 0 for a
//            ReduceScatter. num_pieces, the same on every rank: over all chunks the largest ceil(((origin +
//            begin) % 128 + length) / PIECE_BYTES), in bytes; more does no harm.
#include "ring.cuh"

static_assert(TILE_BYTES % 16 == 0, "cp.async.bulk moves multiples of 16 bytes");
constexpr u32 DEFER = NUM_STAGES > 1;  // refill a stage one tile later: its stores have had time to read it

extern __shared__ __align__(128) u8 stages[];
__shared__ u64 full[NUM_STAGES];

PTX_INLINE u32 stage_at(u32 s) { return smem_addr(stages) + s * 2 * TILE_BYTES; }
PTX_INLINE u32 full_at(u32 s) { return smem_addr(full) + s * 8; }

PTX_INLINE u32 bytes_at(u64 at, Slice body) {
  return body.end - at < TILE_BYTES ? (u32)(body.end - at) : TILE_BYTES;
}

template <u32 SOURCES>
PTX_INLINE void load_tile(u32 s, const u8* const (&src)[SOURCES], u64 at, Slice body) {
  const u32 tile_bytes = bytes_at(at, body);
  mbarrier_arrive_expect_tx(full_at(s), SOURCES * tile_bytes);
#pragma unroll
  for (u32 k = 0; k < SOURCES; ++k)
    cp_async_bulk_shared_global(stage_at(s) + k * TILE_BYTES, src[k] + at, tile_bytes, full_at(s));
}

// What came, plus the own part, in place of what came.
PTX_INLINE void add_tile(u32 s, u32 tile_bytes) {
  for (u32 at = threadIdx.x * 16; at < tile_bytes; at += THREADS * 16) {
    b32x4 v[2];
    ld_shared(v[0], stage_at(s) + at), ld_shared(v[1], stage_at(s) + TILE_BYTES + at);
    st_shared(stage_at(s) + at, sum_of(v));
  }
}

struct Tiles {
  u32 s = 0, phase = 0;  // of the next tile, the same in all threads

  // As sum_piece. Thread 0 asks and stores; the others have part in sums and ends.
  template <u32 TARGETS, u32 SOURCES>
  PTX_INLINE void operator()(u8* const (&dst)[TARGETS], const u8* const (&src)[SOURCES], Slice piece) {
    const Slice body = are_alike(dst, src) ? body_of<16>(dst[0], piece) : Slice{piece.end, piece.end};
    u64 request = body.begin;  // the next tile to ask for
    u32 refill = s;
    const auto ask = [&] {
      load_tile(refill, src, request, body);
      request += TILE_BYTES;
      if (++refill == NUM_STAGES) refill = 0;
    };
    if (threadIdx.x == 0) {
      fence_proxy_async_global();  // what the words made known, before bulk copies read or overwrite it
#pragma unroll 1
      for (u32 k = 0; k < NUM_STAGES && request < body.end; ++k) ask();
    }
#pragma unroll 1
    for (u32 end = 0; end < 2; ++end)  // not alike: the first is the whole piece
      sum_piece(dst, src, end == 0 ? Slice{piece.begin, body.begin} : Slice{body.end, piece.end});

#pragma unroll 1
    for (u64 at = body.begin; at < body.end; at += TILE_BYTES) {
      const u32 tile_bytes = bytes_at(at, body);
      if (SOURCES > 1 || threadIdx.x == 0) wait_parity(full_at(s), phase);
      if (SOURCES > 1) {
        add_tile(s, tile_bytes);
        fence_proxy_async_shared_cta();  // what this thread has read and written there, before bulk copies do
        __syncthreads();
      }
      if (threadIdx.x == 0) {
#pragma unroll
        for (u32 k = 0; k < TARGETS; ++k) cp_async_bulk_global_shared(dst[k] + at, stage_at(s), tile_bytes);
        cp_async_bulk_commit_group();
        if (request < body.end && at >= body.begin + DEFER * TILE_BYTES) {
          cp_async_bulk_wait_group_read<DEFER>();  // all stores but those of this tile have read their stage
          ask();
        }
      }
      if (++s == NUM_STAGES) s = 0, phase ^= 1;
    }
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();  // every write has landed: the data word may say so
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ring_bulk(const __grid_constant__ RingBuffers buffers, SignalControl* control, u32 num_pieces, u32 rank) {
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < NUM_STAGES; ++s) mbarrier_init(full_at(s), 1);
    fence_mbarrier_init();  // the TMA counts bytes on full[] at cluster scope: it must find them initialised
  }
  __syncthreads();
  Tiles tiles;
  go_around(buffers, control, num_pieces, rank, tiles);
}
