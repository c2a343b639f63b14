// AllReduce of small messages, how fast when every rank sends all of its message to every other?
//
// Moves      each rank sends its S bytes to each of N - 1 peers: own src -> registers -> remote scratch
//            memory. (N - 1) S per rank, against 2 (N - 1) / N S of a two-shot, for one trip instead of two.
// Computes   x[0] + x[1] + ... + x[N - 1] (by rank) in float32, rounded to ELEMENT once, on every rank by
//            itself: the same bits on all ranks, every time.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA and term.
// Needs      sm_80; peer access to the others' scratch memory and pads. Any count, any alignment of src and
//            dst to whole elements; vectors where they lie alike modulo 16. src may be dst.
// Barriers   one of the slot over all ranks (signals.cuh) per turn, between sending and adding; none at the
//            end. A fast rank sends the next turn while a slow one adds, so there are two sides, A and B, and
//            turns take them alternately. Two ranks, three calls of one turn each; | is a barrier:
//
//              rank 0   send A | add A, send B, wait | add B, send A, wait | add A
//              rank 1   send A | slow: add A, send B | add B, send A       | add A
//
//            Rank 0 must not send to A again while rank 1 adds A. It sends behind the barrier of the turn in
//            between, and whoever came to that one was done with A: in the same call this CTA, whose place is
//            the same in every turn; in an earlier call all CTAs, since launches follow each other (so grids
//            may differ).
//            The side is the parity of all turns so far, the same for all CTAs of all ranks. Each channel
//            counts them in own memory, where a replayed graph goes on. Every CTA takes part in every turn,
//            with a piece or without. Channels beyond the grid are counted on, too: a later call may have a
//            CTA for them.
// Shared     none. Scratch memory: the one-shots' own, [2][N] of SHOT_BYTES, PIECE_BYTES of it per CTA.
//            Nobody else uses it, so other ways may come in between.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DTHREADS=256 -DUNROLL=2 -DPIECE_BYTES=4096
//            -DSHOT_BYTES=262144 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_ONESHOT=512
//            -DSIGNAL_STEP_TERMS=8 oneshot.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS - SIGNAL_ONESHOT and SHOT_BYTES / PIECE_BYTES
//            CTAs, all resident; THREADS threads. origin, the same on every rank: dst modulo 128, or any
//            multiple of an element where dst differs. num_turns, the same on every rank: ceil(pieces / CTAs)
//            with pieces = ceil((origin + count x bytes of an element) / PIECE_BYTES); more does no harm.
#include "reduce.cuh"

struct Buffers {           // by value in the parameters
  const u8* src;           // count elements
  u8* dst;
  u8* shots[WORLD_SIZE];   // every rank's, as this GPU sees them
  u64 count;
  u64 origin;              // of pieces (reduce.cuh)
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
oneshot(const __grid_constant__ Buffers buffers, SignalControl* control, u32 num_turns, u32 rank) {
  Signals signals = open_signals(control, rank);
  u32* const counts = control->epochs + SIGNAL_ONESHOT;
  const u32 before = counts[blockIdx.x];
  const Slice message = {0, buffers.count * ELEMENT_BYTES};

  for (u32 turn = 0; turn < num_turns; ++turn) {
    const Piece piece = piece_of((u32)buffers.origin, message, (u64)turn * gridDim.x + blockIdx.x);
    const u64 side = (u64)((before + turn) % 2 * WORLD_SIZE) * SHOT_BYTES + blockIdx.x * (u64)PIECE_BYTES;
    const auto place = [&](u32 owner, u32 writer) {
      return base_of(buffers.shots[owner] + side + writer * (u64)SHOT_BYTES, piece);
    };
    u8* peers[WORLD_SIZE - 1];  // from the next one on: at any time each port serves about one rank
#pragma unroll
    for (u32 i = 1; i < WORLD_SIZE; ++i) peers[i - 1] = place((rank + i) % WORLD_SIZE, rank);
    sum_piece(peers, {buffers.src}, piece.bytes);
    if (!sync_ranks(signals, SIGNAL_STEP_TERMS, turn + 1)) return;

    const u8* terms[WORLD_SIZE];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) terms[r] = r == rank ? buffers.src : place(rank, r);
    sum_piece({buffers.dst}, terms, piece.bytes);
  }
  close_signals(signals);
  // Each CTA counts for its own channel and for those beyond the grid: nobody reads another's in this call.
  const u32 step = THREADS * gridDim.x;
  for (u32 c = blockIdx.x + threadIdx.x * gridDim.x; c < SIGNAL_SLOTS - SIGNAL_ONESHOT; c += step)
    counts[c] = before + num_turns;
}
