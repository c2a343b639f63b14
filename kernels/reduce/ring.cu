// AllReduce and ReduceScatter, how fast when threads add what comes around a ring?
//
// Moves      each rank sends 2 (N - 1) chunks of S / N bytes to its next, N - 1 for a ReduceScatter: own and
//            local scratch memory -> registers -> remote scratch memory, then own dst -> registers -> remote
//            dst. No rank gets more from a peer than it sends: every link carries the same.
// Computes   chunk c is x[c + 1] + x[c + 2] + ... + x[c] (ranks modulo N), each addition in float32 and rounded
//            to ELEMENT: what travels is of that type. Fixed by the ranks alone: the same bits every time, and
//            everywhere, since each chunk is computed by one rank at a time and then copied.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA and source.
// Needs      sm_80; peer access to the next rank's scratch memory, pad and dst. Any count, any alignment of src
//            and dst to whole elements; vectors where they lie alike modulo 16. src may be dst.
// Barriers   data and room of the channel (ring.cuh), per piece and step: 3 (N - 1) signals. A ReduceScatter ends
//            with one of its slot over all ranks (signals.cuh), after which scratch memory is free again.
// Shared     none. Scratch memory: NUM_SLOTS slots of PIECE_BYTES per channel.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DSCATTER_ONLY=0 -DTHREADS=256 -DUNROLL=4
//            -DPIECE_BYTES=65536 -DNUM_SLOTS=2 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=512 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2304 -DSIGNAL_RING_DATA=128
//            -DSIGNAL_RING_ROOM=256 -DSIGNAL_STEP_EXIT=2 -DSIGNAL_STEP_REDUCE_SCATTER=3
//            -DSIGNAL_STEP_ALL_GATHER=4 -DSIGNAL_STEP_ROOM=5 ring.cu
// Launch     the same grid on every rank, at most SIGNAL_RING_ROOM - SIGNAL_RING_DATA CTAs, all resident;
//            THREADS threads. num_pieces: of the chunk that is cut into most.
#include "ring.cuh"

constexpr u32 STEPS = SCATTER_ONLY ? SCATTER_STEPS : ALL_STEPS;

struct Buffers {       // by value in the parameters
  const u8* src;       // count elements
  u8* dst;             // count elements; SCATTER_ONLY: those of the own chunk
  u8* next_dst;        // as this GPU sees it
  u8* scratch;         // mine, and the next rank's
  u8* next_scratch;
  u64 count;
  u64 origin;          // of pieces (reduce.cuh)
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ring(const __grid_constant__ Buffers buffers, SignalControl* control, u32 num_pieces, u32 rank) {
  Ring ring = open_ring(control, rank);
  const u8* const src = buffers.src;
  u8* const dst = SCATTER_ONLY ? buffers.dst - chunk_of(buffers.count, rank).begin : buffers.dst;
  const auto slot = [](u8* scratch, u32 into_scratch) {
    return scratch + (blockIdx.x * NUM_SLOTS + into_scratch % NUM_SLOTS) * (u64)PIECE_BYTES;
  };

  u32 sent = 0, into_scratch = 0;
  for (u32 j = blockIdx.x; j < num_pieces; j += gridDim.x) {
    for (u32 step = 0; step <= STEPS; ++step) {
      const Slice chunk = chunk_of(buffers.count, chunk_in(rank, step));
      const Piece piece = piece_of((u32)buffers.origin, chunk, j);
      if (!await_step(ring, step, sent, into_scratch)) return;
      u8* const to = base_of(slot(buffers.next_scratch, into_scratch), piece);
      const u8* const came = base_of(slot(buffers.scratch, into_scratch - 1), piece);
      if (step == 0) sum_piece({to}, {src}, piece.bytes);
      else if (step < SCATTER_STEPS) sum_piece({to}, {came, src}, piece.bytes);
      else if (SCATTER_ONLY) sum_piece({dst}, {came, src}, piece.bytes);
      else if (step == SCATTER_STEPS) sum_piece({dst, buffers.next_dst}, {came, src}, piece.bytes);
      else if (step < STEPS) sum_piece({buffers.next_dst}, {dst}, piece.bytes);
      signal_step(ring, step, STEPS);
      sent += step < STEPS, into_scratch += step < SCATTER_STEPS;
    }
  }
  close_ring(ring);

  if (SCATTER_ONLY) {  // a rank that has its chunk does not know that the others have theirs
    Signals signals = open_signals(control, rank);
    if (sync_ranks(signals, SIGNAL_STEP_EXIT)) close_signals(signals);
  }
}
