// AllReduce, how fast when sums go up two binary trees and come down again?
//
// Moves      each half of the message goes up and down a tree of its own (trees.py): own src and what the
//            children sent -> registers -> the parent's scratch memory; the root's sums -> its own dst and
//            the children's, from there -> registers -> their children's dst. A rank has 2 children at most,
//            and none in one of the trees, so it sends 2 S at most. All ranks send 2 (N - 1) S, as around a
//            ring, but a piece takes 2 floor(log2 N) steps instead of 2 (N - 1).
// Computes   own + the lower child's + the higher child's, in float32, rounded to ELEMENT once on every rank
//            with children: a term is rounded floor(log2 N) times at most. Fixed by the ranks and the half:
//            the same bits every time, and everywhere, since what the root has is copied.
// In flight  THREADS x UNROLL x 16 bytes of loads per CTA and term.
// Needs      sm_80; peer access to the parents' scratch memory and pads, and to the children's dst and pads.
//            Any count, any alignment of src and dst to whole elements; vectors where they lie alike modulo
//            16. src may be dst.
// Barriers   none over all ranks. A channel is 4 CTAs, each at its own pace: up and down in two trees. Words
//            only grow (signals.cuh), and lie in the slot of the CTA that waits:
//              up, from a child       so many of its pieces are in my scratch memory
//              up, from the parent    so many of mine have been added: a child has NUM_SLOTS slots there, and
//                                     waits for the use of what the same slot had before
//              down, from the parent  so many pieces are complete in my dst
//            All words and epochs of a tree in a channel grow by the same number in a call, on all ranks.
//            A complete piece has a part from every rank: so all have begun and have read their src there,
//            and a dst may be overwritten. And whoever adds has added, so a rank that has seen all pieces
//            complete, which its CTAs have when a call ends, knows that nobody reads scratch memory any more.
// Shared     none. Scratch memory: NUM_SLOTS slots of PIECE_BYTES per channel, tree and child.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DELEMENT=bf16 -DTHREADS=256 -DUNROLL=2 -DPIECE_BYTES=32768
//            -DNUM_SLOTS=2 -DWORLD_SIZE=8 -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128
//            -DSIGNAL_EPOCHS_OFFSET=256 -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_TREE=384
//            -DSIGNAL_STEP_TREE_REDUCE=6 -DSIGNAL_STEP_TREE_BROADCAST=7 -DSIGNAL_STEP_TREE_ROOM=9 tree.cu
// Launch     the same grid on every rank, a multiple of 4, at most a CTA per slot from SIGNAL_TREE on (128
//            here), all resident; THREADS threads. origin, the same on every rank: dst modulo 128, or any
//            multiple of an element where dst differs. num_pieces of a tree, the same on every rank:
//            ceil(((origin + begin) % 128 + length) / PIECE_BYTES) of its half, in bytes; more does no harm.
//            The first half has (count + 1) / 2 elements. Parents and children: trees.py.
#include "reduce.cuh"

constexpr u32 NOBODY = 0xffffffff;

struct Branch {         // this rank in a tree
  u32 parent;           // NOBODY: the root
  u32 side;             // which of its parent's children it is
  u32 children[2];      // the lower first; NOBODY: none
  u8* parent_scratch;   // as this GPU sees them
  u8* child_dst[2];
  u64 num_pieces;       // of the tree's half
};

struct Buffers {        // by value in the parameters
  const u8* src;        // count elements
  u8* dst;
  u8* scratch;
  u64 count;
  u64 origin;           // of pieces (reduce.cuh)
  Branch branches[2];
};

// With whom thread t of a CTA speaks, and about what: 0 and 1 with the children about what they sent up, 2
// with the parent, 3 and 4 with the children about what is sent down.
struct Speaker {
  SignalControl* control;
  u32 slot, peer;
  const u32* mine;      // the peer's word in my pad
  u32* theirs;          // my word in the peer's pad; null where there is nobody to tell
};

PTX_INLINE Speaker open_speaker(SignalControl* control, u32 rank, const Branch& branch, bool up) {
  const u32 slot = SIGNAL_TREE + blockIdx.x, t = threadIdx.x;
  const bool root = branch.parent == NOBODY;
  const bool speaks = t < 2 ? up : t == 2 || (t < 5 && up == root);  // the root's sums go down at once
  Speaker speaker = {control, slot, NOBODY, nullptr, nullptr};
  if (speaks) speaker.peer = t == 2 ? branch.parent : branch.children[t < 2 ? t : t - 3];
  if (speaker.peer != NOBODY) {
    const u32 theirs = t > 2 && up ? slot + 2 : slot;
    speaker.mine = control->pads[rank] + slot * WORLD_SIZE + speaker.peer;
    speaker.theirs = t == 2 && !up ? nullptr : control->pads[speaker.peer] + theirs * WORLD_SIZE + rank;
  }
  return speaker;
}

// Before piece k of this CTA: what it adds or passes on has come, where it writes is free. The whole CTA
// calls it. False: the host has aborted, leave the kernel.
PTX_INLINE bool await_piece(const Speaker& speaker, u32 epoch, u32 k, u32 tree, bool up) {
  bool alive = true;
  if (threadIdx.x < 3 && speaker.peer != NOBODY) {
    const bool room = up && threadIdx.x == 2;
    const u32 step = up ? SIGNAL_STEP_TREE_REDUCE : SIGNAL_STEP_TREE_BROADCAST;
    if (!room || k >= NUM_SLOTS)
      alive = wait_word(speaker.control, speaker.slot, speaker.peer, speaker.mine,
                        epoch + k + 1 - (room ? NUM_SLOTS : 0), room ? SIGNAL_STEP_TREE_ROOM : step, tree);
  }
  return !__syncthreads_or(!alive);  // what a few have acquired, for all
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
tree(const __grid_constant__ Buffers buffers, SignalControl* control, u32 rank) {
  const u32 channel = blockIdx.x / 4, tree = blockIdx.x % 2;
  const bool up = blockIdx.x % 4 < 2;
  const Branch& branch = buffers.branches[tree];
  const bool root = branch.parent == NOBODY;
  const u32 children = (branch.children[0] != NOBODY) + (branch.children[1] != NOBODY);
  const u64 middle = (buffers.count + 1) / 2 * ELEMENT_BYTES;
  const Slice half = tree == 0 ? Slice{0, middle} : Slice{middle, buffers.count * ELEMENT_BYTES};

  const Speaker speaker = open_speaker(control, rank, branch, up);
  const u32 epoch = control->epochs[SIGNAL_TREE + blockIdx.x];
  const u8* const src = buffers.src;
  u8* const dst = buffers.dst;
  u8* const lower = branch.child_dst[0], *const higher = branch.child_dst[1];

  u32 k = 0;
  for (u64 j = channel; j < branch.num_pieces; j += gridDim.x / 4, ++k) {
    const Piece piece = piece_of((u32)buffers.origin, half, j);
    const auto place = [&](u8* scratch, u32 side) {
      const u32 slot = ((channel * 2 + tree) * 2 + side) * NUM_SLOTS + k % NUM_SLOTS;
      return base_of(scratch + slot * (u64)PIECE_BYTES, piece);
    };
    if (!await_piece(speaker, epoch, k, tree, up)) return;
    if (up) {
      const u8* const first = place(buffers.scratch, 0), *const second = place(buffers.scratch, 1);
      u8* const to = place(branch.parent_scratch, branch.side);
      if (root && children == 2) sum_piece({dst, lower, higher}, {src, first, second}, piece.bytes);
      else if (root) sum_piece({dst, lower}, {src, first}, piece.bytes);
      else if (children == 2) sum_piece({to}, {src, first, second}, piece.bytes);
      else if (children == 1) sum_piece({to}, {src, first}, piece.bytes);
      else sum_piece({to}, {src}, piece.bytes);
    } else if (!root) {
      const u8* const own = dst;
      if (children == 2) sum_piece({lower, higher}, {own}, piece.bytes);
      else if (children == 1) sum_piece({lower}, {own}, piece.bytes);
    }
    __syncthreads();  // the accesses of all threads, before a few lanes of one warp release them
    if (speaker.theirs != nullptr) st_release_sys(speaker.theirs, epoch + k + 1);
  }
  if (threadIdx.x == 0) control->epochs[SIGNAL_TREE + blockIdx.x] = epoch + k;
}
