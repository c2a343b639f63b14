// What the kernels of an AllGather share: where the shards lie, how bytes of any number and alignment move.
//
// Rank r's shard is [offset[r], offset[r + 1]) of dst, on every rank. So a shard has the same alignment
// modulo 16 wherever it is copied, whatever its length. Only the caller's src may lie otherwise: then each
// CTA first copies its slice of it to its place in the own dst, before the entry barrier, while peers still
// are on their way. A pull places every src that is not in its place already: its peers read dst. After the
// barrier all traffic is between places that are alike modulo 16, in 16-byte vectors.
#pragma once
#include "signals.cuh"
#include "slice.cuh"

struct Gather {          // by value in the parameters: nothing to upload, nothing to load
  u8* dst[WORLD_SIZE];   // of every rank as this GPU sees it, congruent modulo 16
  u64 offset[WORLD_SIZE + 1];
};

// Rank r begins with peer r + 1, then r + 2: at any time each port serves about one rank. In a common order
// all of them would meet at one port after the other.
PTX_INLINE u8* peer_dst(const Gather& gather, u32 rank, u32 turn) {
  return gather.dst[(rank + turn) % WORLD_SIZE];
}

// This CTA's part of a shard, in offsets in dst: the same on every rank, so that the barrier of a slot is
// enough. Cut at lines.
PTX_INLINE Slice slice_of(const Gather& gather, u32 shard) {
  const u64 begin = gather.offset[shard], end = gather.offset[shard + 1];
  const u64 first_line = begin / LINE_BYTES;
  const u32 num_lines = (u32)((end + LINE_BYTES - 1) / LINE_BYTES - first_line);
  const u32 lines = (num_lines + gridDim.x - 1) / gridDim.x;
  const u64 from = (first_line + (u64)blockIdx.x * lines) * LINE_BYTES, to = from + (u64)lines * LINE_BYTES;
  const Slice slice = {from < begin ? begin : from, to < end ? to : end};
  return slice.begin < slice.end ? slice : Slice{end, end};
}

// Fewer than a vector's bytes on each side: one warp moves them, a lane per byte. store(at, value) for each.
template <class Store>
PTX_INLINE void move_edges(u32 warp, const u8* src, Slice slice, Slice body, Store store) {
  const u32 lane = threadIdx.x % 32;
  const bool head = lane < 16;
  const u64 at = head ? slice.begin + lane : body.end + (lane - 16);
  if (threadIdx.x / 32 != warp || at >= (head ? body.begin : slice.end)) return;
  u8 byte;
  ld_global(byte, src + at);
  store(at, byte);
}

// Rounds of UNROLL loads, then UNROLL times store(at, value): the loads of a thread are under way together.
// In the last round so are those that are left; only they are compared with the end one by one.
template <class Vector, class Store>
PTX_INLINE void move_body(const u8* src, Slice body, Store store) {
  constexpr u32 STEP = THREADS * sizeof(Vector);
  u64 at = body.begin + threadIdx.x * sizeof(Vector);
  const auto round = [&](bool whole) {
    Vector v[UNROLL];
#pragma unroll
    for (u32 k = 0; k < UNROLL; ++k)
      if (whole || at + k * STEP < body.end) ld_global(v[k], src + at + k * STEP);
#pragma unroll
    for (u32 k = 0; k < UNROLL; ++k)
      if (whole || at + k * STEP < body.end) store(at + k * STEP, v[k]);
  };
#pragma unroll 1
  for (; at + (UNROLL - 1) * STEP < body.end; at += UNROLL * STEP) round(true);
  round(false);
}

template <class Vector, class Store>
PTX_INLINE void move(const u8* src, Slice slice, Store store) {
  const Slice body = body_of<sizeof(Vector)>(src, slice);
  move_edges(0, src, slice, body, store);
  move_body<Vector>(src, body, store);
}

// A byte to every rank, from its first turn on: 0 is the own. For edges.
PTX_INLINE void store_from_turn(u32 first, const Gather& gather, u32 rank, u64 at, u8 byte) {
#pragma unroll 1
  for (u32 turn = first; turn < WORLD_SIZE; ++turn) st_global(peer_dst(gather, rank, turn) + at, byte);
}

// Copies this CTA's slice of the own shard, base + at to dst + at, where the two are not alike modulo 16: by
// the widest access that both sides allow.
PTX_INLINE void place_unaligned(const Gather& gather, const u8* base, u32 rank) {
  u8* const dst = gather.dst[rank];
  const Slice slice = slice_of(gather, rank);
  const auto store = [=](u64 at, const auto& value) { st_global(dst + at, value); };
  const u32 apart = (u32)(dst - base);
  if (apart % 4 == 0) move<b32x1>(base, slice, store);
  else if (apart % 2 == 0) move<u16>(base, slice, store);
  else move<u8>(base, slice, store);
}

// Where the slice can be read in vectors, at offsets of dst: src if that is aligned like its place, else the
// own dst, to which it is copied.
PTX_INLINE const u8* own_source(const Gather& gather, const u8* src, u32 rank) {
  const u8* const base = src - gather.offset[rank];
  if ((u32)(base - gather.dst[rank]) % 16 == 0) return base;
  place_unaligned(gather, base, rank);
  return gather.dst[rank];
}

// Copies the slice from src to its place in the own dst, unless it is there already.
PTX_INLINE void place_own(const Gather& gather, const u8* src, u32 rank) {
  u8* const dst = gather.dst[rank];
  const u8* const source = own_source(gather, src, rank);
  const auto store = [=](u64 at, const auto& value) { st_global(dst + at, value); };
  if (source != dst) move<b32x4>(source, slice_of(gather, rank), store);
}
