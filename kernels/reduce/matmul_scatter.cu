// How does a matrix product with sums over the ranks end, if no rank ever writes its part of C to own memory?
//
// Computes   C = sum over ranks r of A_r x B_r^T: the second layer of an MLP whose k is cut over the ranks.
//            A_r (m x k_r) and B_r (n x k_r) are bfloat16, C is float32, and so is what travels. Rank r gets
//            its rows of C: m / N of them, the first m % N ranks one more.
// Order      P[0] + P[1] + ... + P[N - 1] (by rank) in float32, where P[r] = A_r x B_r^T is rounded as the
//            tensor cores do it, in the order of mbarrier/matmul.cu: bit for bit what that kernel and a
//            ReduceScatter by way `direct` give, the same every time.
// Moves      A, B: global -> shared, by cp.async; shared -> registers by ldmatrix. P, but for the own rows:
//            registers -> remote scratch memory. Own rows: registers, and scratch memory -> registers -> dst.
//            Apart from operands, a rank reads and writes what its rows are made of, not C: unfused, m n
//            floats are written and read once more.
// In flight  (NUM_STAGES - 1) x 16384 bytes per CTA, then 512 bytes per warp and term.
// Needs      sm_80; peer access to the others' scratch memory and pads. k_r a multiple of 8, A and B aligned
//            to 16 bytes. Ragged tiles: what lies outside is loaded as zeros and not stored.
// Barriers   a word per peer and turn (signals.cuh). In a turn CTA b of each rank computes tile b of every
//            rank's rows, its own last, and signals each owner when its tile is there. Then it waits for the
//            others' parts of its own tile and adds; its own part has never left the registers. The next
//            turn uses the other side of scratch memory; the one after it the first again, which the owner
//            has read before it signalled in the one between. At the end a barrier over all ranks: scratch
//            memory is free.
// Shared     dynamic: stage s at s x 16384, A's block first. Scratch memory: [CTA][2 sides][N] of TILE_BYTES,
//            fragments as registers hold them.
// Compile    nvcc -arch=sm_80 -cubin -I../include -DNUM_STAGES=3 -DTHREADS=128 -DWORLD_SIZE=8
//            -DSIGNAL_SLOTS=640 -DSIGNAL_PADS_OFFSET=128 -DSIGNAL_EPOCHS_OFFSET=256
//            -DSIGNAL_RECORDS_OFFSET=2816 -DSIGNAL_STEP_EXIT=2 -DSIGNAL_STEP_TERMS=8 matmul_scatter.cu
// Launch     the same grid on every rank, at most a CTA per slot, all resident; THREADS threads, NUM_STAGES x
//            16384 of dynamic shared memory.
#include "signals.cuh"
#include "tile.cuh"

struct Product {             // by value in the parameters
  Operands operands;         // this rank's
  u8* dst;                   // own rows of C
  u8* scratch[WORLD_SIZE];   // every rank's, as this GPU sees it
  u64 m, n;
};

PTX_INLINE u32 rows_before(u64 m, u32 rank) {
  return (u32)(m / WORLD_SIZE * rank + (rank < m % WORLD_SIZE ? rank : m % WORLD_SIZE));
}

PTX_INLINE Tile tile_of(const Product& product, u32 owner, u32 index) {
  const u32 begin = rows_before(product.m, owner), end = rows_before(product.m, owner + 1);
  const u32 n = (u32)product.n, tiles_n = (n + BLOCK - 1) / BLOCK;
  const u32 row = begin + index / tiles_n * BLOCK, column = index % tiles_n * BLOCK;
  const u32 rows = row < end ? end - row : 0, columns = n - column;
  return {row, rows < BLOCK ? rows : BLOCK, column, columns < BLOCK ? columns : BLOCK};
}

PTX_INLINE void send(u8* slot, const Tile& tile, Fragments& acc) {
  for_fragments(tile, acc, [=](u32, u32, u32 at, const float (&part)[4]) {
    st_global(slot + at, b32x4{__float_as_uint(part[0]), __float_as_uint(part[1]), __float_as_uint(part[2]),
                               __float_as_uint(part[3])});
  });
}

// The terms of all ranks, the own one from registers, in order of rank.
PTX_INLINE void add(const Product& product, const u8* slots, const Tile& tile, Fragments& acc, u32 rank) {
  const u32 begin = rows_before(product.m, rank);
  for_fragments(tile, acc, [=](u32 row, u32 column, u32 at, const float (&own)[4]) {
    b32x4 terms[WORLD_SIZE] = {};
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r)
      if (r != rank) ld_global(terms[r], slots + r * (u64)TILE_BYTES + at);
    float sum[4];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
      const u32 came[4] = {terms[r].x, terms[r].y, terms[r].z, terms[r].w};
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const float term = r == rank ? own[e] : __uint_as_float(came[e]);
        sum[e] = r == 0 ? term : sum[e] + term;
      }
    }
#pragma unroll
    for (u32 e = 0; e < 4; e += 2) {
      if (row + e * 4 >= tile.rows) continue;
      u8* const to = product.dst + ((tile.row - begin + row + e * 4) * product.n + tile.column + column) * 4;
      const b32x2 pair = {__float_as_uint(sum[e]), __float_as_uint(sum[e + 1])};
      if (product.n % 2 == 0) st_global(to, pair);
      else st_global(to, b32x1{pair.x});
      if (product.n % 2 != 0 && column + 1 < tile.columns) st_global(to + 4, b32x1{pair.y});
    }
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul_scatter(const __grid_constant__ Product product, SignalControl* control, u32 num_turns, u32 rank) {
  Signals signals = open_signals(control, rank);
  for (u32 turn = 0; turn < num_turns; ++turn) {
    ++signals.epoch;
    const u64 side = (u64)(blockIdx.x * 2 + turn % 2) * WORLD_SIZE * TILE_BYTES;
#pragma unroll 1
    for (u32 i = 1; i <= WORLD_SIZE; ++i) {
      const u32 owner = (rank + i) % WORLD_SIZE;  // each rank begins with another: every port serves one
      const Tile tile = tile_of(product, owner, turn * gridDim.x + blockIdx.x);
      Fragments acc = {};
      if (tile.rows > 0) compute(acc, product.operands, tile);
      if (owner != rank) {
        send(product.scratch[owner] + side + rank * (u64)TILE_BYTES, tile, acc);
        __syncthreads();  // the stores of all threads, before the release of one
        if (threadIdx.x == owner) signal_peer(signals);
      } else {
        const bool aborted = has_peer(signals) && !wait_peer(signals, SIGNAL_STEP_TERMS, turn + 1);
        if (__syncthreads_or(aborted)) return;
        add(product, product.scratch[rank] + side, tile, acc, rank);
      }
    }
  }
  if (sync_ranks(signals, SIGNAL_STEP_EXIT)) close_signals(signals);
}
