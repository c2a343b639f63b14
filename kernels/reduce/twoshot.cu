// AllReduce and ReduceScatter, how fast when every rank gets all terms of its chunk at once?
//
// Moves      each rank sends each peer its part of that peer's chunk: own src -> registers -> remote scratch
//            memory, (N - 1) / N S bytes. Then it sends the sum of its chunk to all: registers -> remote dst,
//            as much again; a ReduceScatter keeps it.
// Computes   chunk c is x[0] + x[1] + ... + x[N - 1] (by rank) in float32, rounded to ELEMENT once, on rank c
//            and nowhere else: the same bits on all ranks, every time.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA, then as many of every term.
// Needs      sm_80; peer access to the others' scratch memory, pads and dst. Any count, any alignment of src
//            and dst to whole elements; vectors where they lie alike modulo 16. src may be dst, for a
//            ReduceScatter its chunk.
// Barriers   of the slot over all ranks (signals.cuh). One per turn, when the terms have been sent: CTA b of
//            all ranks sends the terms of piece j of every chunk, then adds piece j of its own. It may store
//            to a peer's dst behind it: the peer's CTA b has read its own part of that piece there, and no
//            other does. The next turn uses the other side of scratch memory; the one after it the first
//            again, which all have read before they came to the next one's barrier. One at the end: dst is
//            complete, and scratch memory free.
// Shared     none. Scratch memory: [CTA][2 sides][N] of PIECE_BYTES.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DSCATTER_ONLY=0 -DTHREADS=256 -DUNROLL=2
//            -DPIECE_BYTES=16384 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_STEP_EXIT=2
//            -DSIGNAL_STEP_TERMS=8 twoshot.cu
// Launch     the same grid on every rank, at most a CTA per slot of barriers (128 here), all resident;
//            THREADS threads. origin, the same on every rank: dst modulo 128, or any multiple of an element
//            where dst differs; 0 for a ReduceScatter. num_pieces, the same on every rank: over all chunks
//            the largest ceil(((origin + begin) % 128 + length) / PIECE_BYTES), in bytes; more does no harm.
#include "reduce.cuh"

struct Buffers {            // by value in the parameters
  const u8* src;            // count elements
  u8* dst[WORLD_SIZE];      // every rank's as this GPU sees it; SCATTER_ONLY: the own one, for its chunk
  u8* scratch[WORLD_SIZE];
  u64 count;
  u64 origin;               // of pieces (reduce.cuh)
};

// While there are warps enough, each peer has a team of its own: their loads are under way together.
constexpr u32 WARPS = THREADS / 32;
constexpr u32 TEAMS = WARPS < WORLD_SIZE - 1 ? WARPS : WORLD_SIZE - 1;
constexpr u32 TEAM = WARPS / TEAMS * 32;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
twoshot(const __grid_constant__ Buffers buffers, SignalControl* control, u32 num_pieces, u32 rank) {
  Signals signals = open_signals(control, rank);
  const u8* const src = buffers.src;
  const u32 team = threadIdx.x / TEAM;

  u32 turn = 0;
  for (u32 j = blockIdx.x; j < num_pieces; j += gridDim.x, ++turn) {
    const auto piece_in = [&](u32 owner) {
      return piece_of((u32)buffers.origin, chunk_of(buffers.count, owner), j);
    };
    const auto place = [&](u32 owner, u32 writer, const Piece& piece) {
      const u32 slot = (blockIdx.x * 2 + turn % 2) * WORLD_SIZE + writer;
      return base_of(buffers.scratch[owner] + slot * (u64)PIECE_BYTES, piece);
    };
#pragma unroll 1
    for (u32 i = 1 + team; team < TEAMS && i < WORLD_SIZE; i += TEAMS) {
      const u32 owner = (rank + i) % WORLD_SIZE;  // each rank begins with another: every port serves one
      const Piece piece = piece_in(owner);
      sum_piece<TEAM>({place(owner, rank, piece)}, {src}, piece.bytes);
    }
    if (!sync_ranks(signals, SIGNAL_STEP_TERMS, turn + 1)) return;

    const Piece piece = piece_in(rank);
    const u8* terms[WORLD_SIZE];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) terms[r] = r == rank ? src : place(rank, r, piece);
    if (SCATTER_ONLY) {
      u8* const dst = buffers.dst[rank] - chunk_of(buffers.count, rank).begin;
      sum_piece({dst}, terms, piece.bytes);
    } else {
      u8* targets[WORLD_SIZE];
#pragma unroll
      for (u32 i = 0; i < WORLD_SIZE; ++i) targets[i] = buffers.dst[(rank + 1 + i) % WORLD_SIZE];
      sum_piece(targets, terms, piece.bytes);
    }
  }
  if (sync_ranks(signals, SIGNAL_STEP_EXIT)) close_signals(signals);
}
