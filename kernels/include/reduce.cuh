// What the reductions between GPUs share: elements, how a message is cut, and the sum of a piece.
//
// A message has count elements of type ELEMENT (f32, f16 or bf16). They lie in memory and travel as such, and
// are added in float32: sum_piece adds its sources from the first to the last, then rounds once. Chunk c is
// what rank c owns: as many elements as every other, the first count % WORLD_SIZE chunks one more. A chunk is
// cut into pieces of PIECE_BYTES at lines, counted from an origin that is the same on every rank: where dst
// lies in its line, if there is one dst for all. So all ranks cut alike. Scratch memory begins at a line, and
// a piece lies there like the message modulo 16: whatever its length, vectors of 16 bytes move it, and single
// elements only its ends.
//
// Macros: ELEMENT; WORLD_SIZE (2 to 32); THREADS of a CTA, whole warps; UNROLL, vectors of each source that a
// thread has under way; PIECE_BYTES, whole lines of 128; the layout of the control block (signals.cuh). The
// kernels of kernels/reduce share one layout, C = 128 channels in their compile lines: slots from 0 on are
// for barriers over all ranks, from C on a ring's data words, from 2C on its room words, from 3C on words of
// trees, from 4C on the counts of one-shots: SIGNAL_SLOTS is 5C. Headers copied beside a kernel need no -I
// (-I. does no harm).
#pragma once
#include "signals.cuh"
#include "slice.cuh"

static_assert(WORLD_SIZE >= 2, "WORLD_SIZE must be 2 or more: one rank alone has nothing to add");

struct f32 { using Bits = b32x1; };
struct f16 { using Bits = u16; };
struct bf16 { using Bits = u16; };
using Bits = ELEMENT::Bits;
constexpr u32 ELEMENT_BYTES = sizeof(Bits);
constexpr u32 PACK = 16 / ELEMENT_BYTES;  // elements of a vector

// ---- elements to float32, exactly, and back, to the nearest, ties to even ------------------------
PTX_INLINE float widen(f32, b32x1 bits) { return __uint_as_float(bits.x); }
PTX_INLINE float widen(f16, u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
PTX_INLINE float widen(bf16, u16 bits) { return __uint_as_float((u32)bits << 16); }

PTX_INLINE b32x1 narrow(f32, float value) { return {__float_as_uint(value)}; }
PTX_INLINE u16 narrow(f16, float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
PTX_INLINE u16 narrow(bf16, float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The elements of a 32-bit word, the low half first.
PTX_INLINE void widen_word(f32, float* out, u32 word) { out[0] = __uint_as_float(word); }
PTX_INLINE void widen_word(f16, float* out, u32 word) {
  out[0] = widen(f16{}, (u16)word), out[1] = widen(f16{}, (u16)(word >> 16));
}
PTX_INLINE void widen_word(bf16, float* out, u32 word) {
  out[0] = __uint_as_float(word << 16), out[1] = __uint_as_float(word & 0xffff0000);
}
PTX_INLINE u32 narrow_word(f32, const float* in) { return __float_as_uint(in[0]); }
PTX_INLINE u32 narrow_word(f16, const float* in) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
  return word;
}
PTX_INLINE u32 narrow_word(bf16, const float* in) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
  return word;
}

// A vector's elements in float32.
struct Sums {
  float of[PACK];
};
PTX_INLINE Sums widen(const b32x4& bits) {
  constexpr u32 N = PACK / 4;  // elements of a word
  Sums sums;
  widen_word(ELEMENT{}, sums.of, bits.x), widen_word(ELEMENT{}, sums.of + N, bits.y);
  widen_word(ELEMENT{}, sums.of + 2 * N, bits.z), widen_word(ELEMENT{}, sums.of + 3 * N, bits.w);
  return sums;
}
PTX_INLINE b32x4 narrow(const Sums& sums) {
  constexpr u32 N = PACK / 4;
  return {narrow_word(ELEMENT{}, sums.of), narrow_word(ELEMENT{}, sums.of + N),
          narrow_word(ELEMENT{}, sums.of + 2 * N), narrow_word(ELEMENT{}, sums.of + 3 * N)};
}
PTX_INLINE void add(Sums& sums, const Sums& more) {
#pragma unroll
  for (u32 i = 0; i < PACK; ++i) sums.of[i] += more.of[i];
}

// The sum of as many vectors, or elements, in order. One alone keeps its bits.
template <u32 SOURCES>
PTX_INLINE b32x4 sum_of(const b32x4 (&values)[SOURCES]) {
  if constexpr (SOURCES == 1) return values[0];
  Sums sums = widen(values[0]);
#pragma unroll
  for (u32 k = 1; k < SOURCES; ++k) add(sums, widen(values[k]));
  return narrow(sums);
}
template <u32 SOURCES>
PTX_INLINE Bits sum_of(const Bits (&values)[SOURCES]) {
  if constexpr (SOURCES == 1) return values[0];
  float sum = widen(ELEMENT{}, values[0]);
#pragma unroll
  for (u32 k = 1; k < SOURCES; ++k) sum += widen(ELEMENT{}, values[k]);
  return narrow(ELEMENT{}, sum);
}

// ---- how a message is cut -------------------------------------------------------------------------
// The bytes of chunk c.
PTX_INLINE Slice chunk_of(u64 count, u32 c) {
  const u64 each = count / WORLD_SIZE, more = count % WORLD_SIZE;
  const u64 begin = c * each + (c < more ? c : more);
  return {begin * ELEMENT_BYTES, (begin + each + (c < more)) * ELEMENT_BYTES};
}

struct Piece {
  Slice bytes;  // of the message, may be empty
  u64 window;   // where its line begins, modulo 2^64: may be in front of the message
};

// Piece j of a range of a message that begins `origin` bytes into a line.
PTX_INLINE Piece piece_of(u32 origin, Slice range, u64 j) {
  static_assert(PIECE_BYTES % LINE_BYTES == 0,
                "PIECE_BYTES must be a multiple of 128: pieces are whole lines");
  const u64 skew = (origin + range.begin) % LINE_BYTES, length = range.end - range.begin;
  const u64 from = j == 0 ? 0 : j * PIECE_BYTES - skew, to = (j + 1) * PIECE_BYTES - skew;
  return {{range.begin + (from < length ? from : length), range.begin + (to < length ? to : length)},
          range.begin + j * PIECE_BYTES - skew};
}

// The pointer to which an offset in the message is added, so that the piece lies in a slot of PIECE_BYTES.
PTX_INLINE u8* base_of(u8* slot, const Piece& piece) { return slot - piece.window; }

// ---- the sum of a piece ---------------------------------------------------------------------------
// Whether the buffers lie alike modulo 16.
template <u32 TARGETS, u32 SOURCES>
PTX_INLINE bool are_alike(u8* const (&dst)[TARGETS], const u8* const (&src)[SOURCES]) {
  u64 apart = 0;
#pragma unroll
  for (u32 k = 0; k < SOURCES; ++k) apart |= (u64)src[k] ^ (u64)dst[0];
#pragma unroll
  for (u32 k = 1; k < TARGETS; ++k) apart |= (u64)dst[k] ^ (u64)dst[0];
  return apart % 16 == 0;
}

// The ends of a piece, in front of its body and behind, by single elements.
template <u32 TEAM = THREADS, u32 TARGETS, u32 SOURCES>
PTX_INLINE void sum_edges(u8* const (&dst)[TARGETS], const u8* const (&src)[SOURCES], Slice piece,
                          Slice body) {
  const u64 head = body.begin - piece.begin, edges = head + (piece.end - body.end);
#pragma unroll 1
  for (u64 edge = threadIdx.x % TEAM * ELEMENT_BYTES; edge < edges; edge += TEAM * ELEMENT_BYTES) {
    const u64 here = edge < head ? piece.begin + edge : body.end + (edge - head);
    Bits values[SOURCES];
#pragma unroll
    for (u32 k = 0; k < SOURCES; ++k) ld_global(values[k], src[k] + here);
    const Bits total = sum_of(values);
#pragma unroll
    for (u32 k = 0; k < TARGETS; ++k) st_global(dst[k] + here, total);
  }
}

// dst[k][at] = src[0][at] + src[1][at] + ..., for every element of a piece, to every dst. The piece's offsets
// are added to every pointer: each points to where the message begins, or would begin (base_of). There is no
// __syncthreads inside: what other threads stored here needs one before it is read. Each thread loads UNROLL
// vectors of all sources before it uses the first. A dst may be one of the sources. The ends of the piece go
// by single elements, and all of it where the buffers lie differently modulo 16. TEAM threads do it, all of
// the CTA or each team a piece of its own.
template <u32 TEAM = THREADS, u32 TARGETS, u32 SOURCES>
PTX_INLINE void sum_piece(u8* const (&dst)[TARGETS], const u8* const (&src)[SOURCES], Slice piece) {
  const Slice body = are_alike(dst, src) ? body_of<16>(dst[0], piece) : Slice{piece.begin, piece.begin};

  constexpr u32 STEP = TEAM * 16;
  u64 at = body.begin + threadIdx.x % TEAM * 16;
  const auto round = [&](bool whole) {
    b32x4 v[UNROLL][SOURCES];
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i)
      if (whole || at + i * STEP < body.end) {
#pragma unroll
        for (u32 k = 0; k < SOURCES; ++k) ld_global(v[i][k], src[k] + at + i * STEP);
      }
#pragma unroll
    for (u32 i = 0; i < UNROLL; ++i)
      if (whole || at + i * STEP < body.end) {
        const b32x4 total = sum_of(v[i]);
#pragma unroll
        for (u32 k = 0; k < TARGETS; ++k) st_global(dst[k] + at + i * STEP, total);
      }
  };
#pragma unroll 1
  for (; at + (UNROLL - 1) * STEP < body.end; at += UNROLL * STEP) round(true);
  if (UNROLL > 1) round(false);
  sum_edges<TEAM>(dst, src, piece, body);
}
