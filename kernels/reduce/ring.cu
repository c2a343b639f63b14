// AllReduce and ReduceScatter, how fast when threads add what comes around a ring?
//
// Moves      each rank sends 2 (N - 1) chunks of S / N bytes to its next, N - 1 for a ReduceScatter: own and
//            local scratch memory -> registers -> remote scratch memory, then own dst -> registers -> remote
//            dst. No rank gets more from a peer than it sends: every link carries the same.
// Computes   chunk c is x[c + 1] + x[c + 2] + ... + x[c] (ranks modulo N), each addition in float32 and
//            rounded to ELEMENT: what travels is of that type. Fixed by the ranks alone: the same bits every
//            time, and everywhere, since each chunk is computed by one rank at a time and then copied.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA and source.
// Needs      sm_80; peer access to the next rank's scratch memory, pad and dst. Any count, any alignment of
//            src and dst to whole elements; vectors where they lie alike modulo 16. src may be dst.
// Barriers   data and room of the channel (ring.cuh), per piece and step: 3 (N - 1) signals. A ReduceScatter
//            ends with one of its slot over all ranks (signals.cuh), after which scratch memory is free
//            again.
// Shared     none. Scratch memory: NUM_SLOTS slots of PIECE_BYTES per channel.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DSCATTER_ONLY=0 -DTHREADS=256 -DUNROLL=4
//            -DPIECE_BYTES=65536 -DNUM_SLOTS=2 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_RING_DATA=128
//            -DSIGNAL_RING_ROOM=256 -DSIGNAL_STEP_EXIT=2 -DSIGNAL_STEP_REDUCE_SCATTER=3
//            -DSIGNAL_STEP_ALL_GATHER=4 -DSIGNAL_STEP_ROOM=5 ring.cu
// Launch     the same grid on every rank, at most SIGNAL_RING_ROOM - SIGNAL_RING_DATA CTAs, all resident;
//            THREADS threads. origin, the same on every rank: dst modulo 128, or any multiple of an element
//            where dst differs; 0 for a ReduceScatter. num_pieces, the same on every rank: over all chunks
//            the largest ceil(((origin + begin) % 128 + length) / PIECE_BYTES), in bytes; more does no harm.
#include "ring.cuh"

struct Threads {
  template <u32 TARGETS, u32 SOURCES>
  PTX_INLINE void operator()(u8* const (&dst)[TARGETS], const u8* const (&src)[SOURCES], Slice piece) const {
    sum_piece(dst, src, piece);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ring(const __grid_constant__ RingBuffers buffers, SignalControl* control, u32 num_pieces, u32 rank) {
  const Threads threads;
  go_around(buffers, control, num_pieces, rank, threads);
}
