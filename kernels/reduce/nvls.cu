// AllReduce, how fast when the switch adds: one load that brings the sum, one store that lands on every GPU?
//
// Moves      rank r has chunk r: it loads the sum of all ranks' terms through a multicast address and stores
//            it through another: N times global -> switch -> registers -> switch -> N times global. A rank
//            sends S bytes of terms as answers, and S / N of sums. Terms that lie elsewhere are copied to the
//            own dst first: src -> registers -> dst.
// Computes   x[0] + ... + x[N - 1] in an order that the switch chooses, in float32: how often halves are
//            rounded, and whether subnormals are kept, the ISA leaves open. One rank computes an element and
//            all get it, so all have the same bits; another run or machine may give others. The ends of a
//            chunk, fewer than 16 bytes each: in order of rank.
// In flight  THREADS x UNROLL x 16 bytes of sums per CTA.
// Needs      sm_90; dst, and terms, in memory with a multicast address (NVSwitch); both lie alike modulo 16.
//            Any count, any alignment to whole elements: no form of multimem has two bytes, so the ends go
//            through the peers' own addresses.
// Barriers   of the slot over all ranks (signals.cuh). Entry: all terms are in their places, every dst may be
//            overwritten. Exit: all sums have landed here. A chunk is read and written by its rank alone, so
//            terms may be in dst.
// Proxies    a multicast address is an alias of the ranks' own: fence.proxy.alias at both barriers. Accesses
//            are weak, for the barriers order them; ptxas makes LDGMC.STRONG.SYS of either ld_reduce.
// Shared     none.
// Compile    nvcc -arch=sm_90a -cubin -I../include -DELEMENT=bf16 -DTHREADS=256 -DUNROLL=4
//            -DPIECE_BYTES=16384 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_STEP_ENTRY=1
//            -DSIGNAL_STEP_EXIT=2 nvls.cu
// Launch     the same grid on every rank, at most a CTA per slot of barriers (128 here), all resident;
//            THREADS threads. origin, the same on every rank: dst modulo 128. num_pieces, the same on every
//            rank: over all chunks the largest ceil(((origin + begin) % 128 + length) / PIECE_BYTES), in
//            bytes; more does no harm.
#include "reduce.cuh"

static_assert(PIECE_BYTES == THREADS * UNROLL * 16, "a piece is UNROLL vectors of every thread");

struct Buffers {                // by value in the parameters
  u8* dst[WORLD_SIZE];          // count elements of every rank, as this GPU sees them
  const u8* terms[WORLD_SIZE];  // may be dst
  u8* multicast_dst;            // of all ranks at once
  const u8* multicast_terms;
  const u8* unplaced;           // own terms that are copied to the own dst first, or null; terms is dst then
  u64 count;
  u64 origin;                   // of pieces (reduce.cuh)
};

PTX_INLINE void load_sum(f32, b32x4& sum, const u8* at) {
  multimem_ld_reduce_add_v4_f32(sum, at);
}
PTX_INLINE void load_sum(f16, b32x4& sum, const u8* at) {
  multimem_ld_reduce_add_acc_f32_v4_f16x2(sum, at);
}
PTX_INLINE void load_sum(bf16, b32x4& sum, const u8* at) {
  multimem_ld_reduce_add_acc_f32_v4_bf16x2(sum, at);
}

// The barrier, also between accesses through multicast addresses and through the ranks' own. The ISA
// ("Causality Order") wants an alias fence on the way. Here one warp makes it for all threads: after the
// bar.sync, before the release.
PTX_INLINE bool sync_aliases(Signals& signals, u32 step) {
  __syncthreads();
  if (has_peer(signals)) fence_proxy_alias();
  return sync_ranks(signals, step);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
nvls(const __grid_constant__ Buffers buffers, SignalControl* control, u32 num_pieces, u32 rank) {
  Signals signals = open_signals(control, rank);
  u8* const own = buffers.dst[rank];
  if (buffers.unplaced != nullptr) {  // what this slot's CTAs will load, on whatever rank they are
    for (u32 owner = 0; owner < WORLD_SIZE; ++owner) {
      const Slice chunk = chunk_of(buffers.count, owner);
      for (u32 j = blockIdx.x; j < num_pieces; j += gridDim.x)
        sum_piece({own}, {buffers.unplaced}, piece_of((u32)buffers.origin, chunk, j).bytes);
    }
  }
  if (!sync_aliases(signals, SIGNAL_STEP_ENTRY)) return;

  const Slice chunk = chunk_of(buffers.count, rank);
  for (u32 j = blockIdx.x; j < num_pieces; j += gridDim.x) {
    const Slice piece = piece_of((u32)buffers.origin, chunk, j).bytes, body = body_of<16>(own, piece);
    const u64 first = body.begin + threadIdx.x * 16;
    b32x4 sums[UNROLL];
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
      const u64 at = first + i * THREADS * 16;
      if (at < body.end) load_sum(ELEMENT{}, sums[i], buffers.multicast_terms + at);
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i) {
      const u64 at = first + i * THREADS * 16;
      if (at < body.end) multimem_st(buffers.multicast_dst + at, sums[i]);
    }
    sum_edges(buffers.dst, buffers.terms, piece, body);
  }
  if (!sync_aliases(signals, SIGNAL_STEP_EXIT)) return;
  close_signals(signals);
}
