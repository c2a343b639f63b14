// The ring of ranks: who sends what in which step, and the words that say so.
//
// Rank r sends to its next, r + 1, and gets from its previous, r - 1. In step s it sends chunk r - 1 - s
// (modulo WORLD_SIZE): its own part of it in step 0, what has come plus its own part in steps 1 to
// WORLD_SIZE - 2, into the scratch memory of the next. After step WORLD_SIZE - 1 chunk r is complete on rank
// r, which is where a reduce-scatter ends. The all-gather goes on: steps WORLD_SIZE - 1 to 2 WORLD_SIZE - 3
// send complete chunks, into the dst of the next. So a rank sends 2 (WORLD_SIZE - 1) times.
//
// A channel is a CTA, and goes its own way around the ring with the pieces that are its own. It has two words
// on each side, both only grow, and nothing is reset (signals.cuh):
//   data   written by the previous: so many pieces have come. Waited for before every use of what came.
//   room   written by the next: so many pieces in its scratch memory have been used. There are NUM_SLOTS
//          slots, so a step waits for the use of what the same slot had before.
// Why that is enough, without a barrier. Every complete piece has in it what every rank gave, so it comes
// after all reads that made it, on all ranks: each has handed it on by a release that the next one acquired.
// A call ends on a rank when it has all complete pieces, empty ones too. So
//   - no rank reads scratch memory any more when a call ends on any: the next one finds all slots free;
//   - a rank that gets a complete piece knows by it that the one it sends it on to has begun and has read its
//     own part: its dst may be overwritten, also where it is its src.
// A reduce-scatter ends before a rank knows of others than its previous: it needs a barrier behind it.
// Pieces of a channel are counted in 32 bits: enough below 512 GiB, even if they are lines.
//
// Macros: those of reduce.cuh; NUM_SLOTS, pieces of a channel in scratch memory, 2 or more; SCATTER_ONLY, 1
// for a ReduceScatter, else 0; SIGNAL_RING_DATA and SIGNAL_RING_ROOM, the first slots of data and room words;
// SIGNAL_STEP_REDUCE_SCATTER, _ALL_GATHER, _ROOM and _EXIT, labels (signals.cuh).
#pragma once
#include "reduce.cuh"

constexpr u32 SCATTER_STEPS = WORLD_SIZE - 1;    // sends until chunk r is complete on rank r
constexpr u32 ALL_STEPS = 2 * (WORLD_SIZE - 1);  // ... until every chunk is, on every rank

static_assert(NUM_SLOTS >= 2,
              "NUM_SLOTS must be 2 or more: a rank frees a slot in the step that sends, with one all wait");

PTX_INLINE u32 chunk_in(u32 rank, u32 step) { return (rank + 2 * WORLD_SIZE - 1 - step) % WORLD_SIZE; }

struct RingBuffers {  // by value in the parameters
  const u8* src;      // count elements
  u8* dst;            // count elements; SCATTER_ONLY: those of the own chunk
  u8* next_dst;       // as this GPU sees it
  u8* scratch;        // mine, and the next rank's
  u8* next_scratch;
  u64 count;
  u64 origin;         // of pieces (reduce.cuh)
};

// A channel's words, as one thread holds them: thread 0 those of the data, thread 1 those of the room.
struct Ring {
  SignalControl* control;
  u32 slot;         // of the word that this thread waits for
  u32 peer;         // who writes it
  const u32* mine;  // that word, in my pad
  u32* theirs;      // the word that this thread writes, in a peer's pad
  u32 epoch;        // of both when the call began: every channel counts alike on all ranks
  u32 done;         // signals of the call that this thread has given: its own word is epoch + done there
};

PTX_INLINE bool speaks() { return threadIdx.x < 2; }

PTX_INLINE Ring open_ring(SignalControl* control, u32 rank) {
  const u32 next = (rank + 1) % WORLD_SIZE, previous = (rank + WORLD_SIZE - 1) % WORLD_SIZE;
  const bool data = threadIdx.x == 0;
  const u32 slot = (data ? SIGNAL_RING_DATA : SIGNAL_RING_ROOM) + blockIdx.x;
  const u32 from = data ? previous : next, to = data ? next : previous;
  Ring ring = {control, slot, from, nullptr, nullptr, 0, 0};
  if (speaks()) {
    ring.mine = control->pads[rank] + slot * WORLD_SIZE + from;
    ring.theirs = control->pads[to] + slot * WORLD_SIZE + rank;
    ring.epoch = control->epochs[slot];
  }
  return ring;
}

// Before step `step` of a piece: what it uses has come, where it writes is free. `sent`: pieces that this
// channel has sent in the call, `into_scratch` of them into scratch memory. The whole CTA calls it. False:
// the host has aborted, leave the kernel.
PTX_INLINE bool await_step(const Ring& ring, u32 step, u32 sent, u32 into_scratch) {
  const bool data = threadIdx.x == 0, scatter = step <= SCATTER_STEPS;
  const bool needed = data ? step > 0 : step < SCATTER_STEPS && into_scratch >= NUM_SLOTS;
  bool alive = true;
  if (speaks() && needed)  // both in one loop: lanes of a warp
    alive = wait_word(ring.control, ring.slot, ring.peer, ring.mine,
                      ring.epoch + (data ? sent : into_scratch - NUM_SLOTS + 1),
                      !data     ? SIGNAL_STEP_ROOM
                      : scatter ? SIGNAL_STEP_REDUCE_SCATTER
                                : SIGNAL_STEP_ALL_GATHER,
                      scatter ? step : step - SCATTER_STEPS);
  return !__syncthreads_or(!alive);  // what one has acquired, for all
}

// After step `step` of `steps`: tell the next what it got, and the previous what was used. The whole CTA
// calls it. Thread 0 and thread 1 are lanes of a warp: one membar for both words.
PTX_INLINE void signal_step(Ring& ring, u32 step, u32 steps) {
  __syncthreads();  // the accesses of all threads, before the releases of two
  const bool sends = step < steps, uses = step > 0 && step <= SCATTER_STEPS;
  if (speaks() && (threadIdx.x == 0 ? sends : uses)) st_release_sys(ring.theirs, ring.epoch + ++ring.done);
}

// At the end: the next call goes on from here.
PTX_INLINE void close_ring(const Ring& ring) {
  if (speaks()) ring.control->epochs[ring.slot] = ring.epoch + ring.done;
}

// All steps of the channel's pieces. sum({dst...}, {src...}, slice) moves, and adds where there are several
// sources: sum_piece, or another way to do the same. False: the host has aborted.
template <class Sum>
PTX_INLINE bool go_around(const RingBuffers& buffers, SignalControl* control, u32 num_pieces, u32 rank,
                          Sum& sum) {
  constexpr u32 STEPS = SCATTER_ONLY ? SCATTER_STEPS : ALL_STEPS;
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
      if (!await_step(ring, step, sent, into_scratch)) return false;
      u8* const to = base_of(slot(buffers.next_scratch, into_scratch), piece);
      const u8* const came = base_of(slot(buffers.scratch, into_scratch - 1), piece);
      if (step == 0) sum({to}, {src}, piece.bytes);
      else if (step < SCATTER_STEPS) sum({to}, {came, src}, piece.bytes);
      else if (SCATTER_ONLY) sum({dst}, {came, src}, piece.bytes);
      else if (step == SCATTER_STEPS) sum({dst, buffers.next_dst}, {came, src}, piece.bytes);
      else if (step < STEPS) sum({buffers.next_dst}, {dst}, piece.bytes);
      signal_step(ring, step, STEPS);
      sent += step < STEPS, into_scratch += step < SCATTER_STEPS;
    }
  }
  close_ring(ring);
  if (!SCATTER_ONLY) return true;
  Signals signals = open_signals(control, rank);  // a rank that has its chunk does not know that others have
  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return false;
  close_signals(signals);
  return true;
}
