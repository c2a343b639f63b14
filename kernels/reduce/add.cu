// The adder that a copy engine does not have: what does an AllReduce by copies pay for its sums?
//
// Moves      N terms of a chunk -> registers -> the own dst, all in the own memory: N num_bytes read,
//            num_bytes written. What brings the terms and takes the sums away are copies (copy_engine.py).
// Computes   terms[0] + terms[1] + ... + terms[N - 1] in float32, rounded to ELEMENT once.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA and term.
// Needs      sm_80. Any number and alignment of whole elements: vectors where terms and dst lie alike modulo
//            16. One of the terms may be dst.
// Barriers   none: the stream waits for the copies, and copies for the kernel. When the host has aborted, the
//            stream was let go without them: then nothing is added.
// Shared     none.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DTHREADS=256 -DUNROLL=2 -DPIECE_BYTES=8192
//            -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2816 add.cu
// Launch     any number of CTAs; THREADS threads.
#include "reduce.cuh"

struct Buffers {  // by value in the parameters
  const u8* terms[WORLD_SIZE];
  u8* dst;
  u64 num_bytes;
};

extern "C" __global__ void __launch_bounds__(THREADS)
add(const __grid_constant__ Buffers buffers, const SignalControl* control) {
  if (__syncthreads_or(threadIdx.x == 0 && ld_relaxed_sys(&control->abort) != 0)) return;
  const u32 origin = (u32)((u64)buffers.dst % LINE_BYTES);
  u8* const targets[] = {buffers.dst};
  for (u64 j = blockIdx.x;; j += gridDim.x) {
    const Slice piece = piece_of(origin, {0, buffers.num_bytes}, j).bytes;
    if (piece.begin >= piece.end) return;
    sum_piece(targets, buffers.terms, piece);
  }
}
