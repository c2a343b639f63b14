// AllReduce of small messages, how fast when every rank sends all of its message to every other?
//
// Moves      each rank sends its S bytes to each of N - 1 peers: own src -> registers -> remote scratch
//            memory. (N - 1) S per rank, against 2 (N - 1) / N S of a two-shot, for one trip instead of two.
// Computes   x[0] + x[1] + ... + x[N - 1] (by rank) in float32, rounded to ELEMENT once, on every rank by
//            itself: the same bits on all ranks, every time.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA and term.
// Needs      sm_80; peer access to the others' scratch memory and pads. Any count, any alignment of src and
//            dst to whole elements; vectors where they lie alike modulo 16. src may be dst.
// Barriers   one of the slot over all ranks (signals.cuh) per turn, when the terms have been sent. None
//            before and none after: scratch memory has two sides, and each turn writes to the one that the
//            last turn but one has read. On all ranks that one is over:
//            - in the same call: this CTA has met the others in the turn between, which they entered behind
//              it; a CTA has the same place in every turn.
//            - first turn of a call, and the last call had several: all CTAs met in the last of them.
//            - first turn, and the last call had but one: there this rank met at least one CTA of every
//              rank, which ran when the call before, with all its CTAs, had ended there. Grids may differ.
//            - second turn: this CTA has met the others in the first, when their last call had ended.
//            So turns are counted through all calls. Every CTA takes part in every turn, with a piece or
//            without, and counts alike, in own memory, where a replayed graph goes on.
// Shared     none. Scratch memory: the one-shots' own, [2][N] of SHOT_BYTES, PIECE_BYTES of it per CTA.
//            Nobody else uses it, so other ways may come in between.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DTHREADS=256 -DUNROLL=2 -DPIECE_BYTES=4096
//            -DSHOT_BYTES=262144 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_ONESHOT=512
//            -DSIGNAL_STEP_TERMS=8 oneshot.cu
// Launch     the same grid on every rank, at most SIGNAL_SLOTS - SIGNAL_ONESHOT and SHOT_BYTES / PIECE_BYTES
//            CTAs, all resident; THREADS threads. num_turns: CTAs times turns are enough for all pieces.
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
