// A run of bytes in buffers that lie alike modulo 16, and its whole vectors.
#pragma once
#include "ptx_peer.cuh"

constexpr u32 LINE_BYTES = 128;

struct Slice { u64 begin, end; };  // offsets in a buffer

// The whole vectors of a slice that are aligned at base; what lies in front of them and behind goes by bytes.
template <u32 VECTOR_BYTES>
PTX_INLINE Slice body_of(const u8* base, Slice slice) {
  const u64 head = (VECTOR_BYTES - (u64)(base + slice.begin)) % VECTOR_BYTES;
  const u64 left = slice.end - slice.begin;
  const u64 begin = slice.begin + (head < left ? head : left);
  return {begin, begin + (slice.end - begin) / VECTOR_BYTES * VECTOR_BYTES};
}
