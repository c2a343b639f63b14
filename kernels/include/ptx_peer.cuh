// The instructions that talk to other GPUs, as thin as those of ptx.cuh: system scope, multimem, and the
// widths that ragged shards need.
#pragma once
#include "ptx.cuh"

// ---- ld and st at system scope: morally strong between threads of any two GPUs -------------------
PTX_INLINE u32 ld_relaxed_sys(const u32* src) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(src) : "memory");
  return value;
}
PTX_INLINE u32 ld_acquire_sys(const u32* src) {  // what the value's writer had released is seen after it
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(src) : "memory");
  return value;
}
PTX_INLINE u64 ld_acquire_sys(const u64* src) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(src) : "memory");
  return value;
}
PTX_INLINE void st_relaxed_sys(u32* dst, u32 value) {  // orders nothing
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(dst), "r"(value) : "memory");
}
PTX_INLINE void st_release_sys(u32* dst, u32 value) {  // what this thread has done and seen comes before it
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(dst), "r"(value) : "memory");
}
PTX_INLINE void st_release_sys(u8* dst, u8 value) {
  asm volatile("st.release.sys.global.b8 [%0], %1;" :: "l"(dst), "r"((u32)value) : "memory");
}

// ---- ld and st of elements below 4 bytes ---------------------------------------------------------
PTX_INLINE void ld_global(u8& dst, const void* src) {
  u32 value;
  asm volatile("ld.global.b8 %0, [%1];" : "=r"(value) : "l"(src) : "memory");
  dst = (u8)value;
}
PTX_INLINE void ld_global(u16& dst, const void* src) {
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(dst) : "l"(src) : "memory");
}
PTX_INLINE void st_global(void* dst, const u8& src) {
  asm volatile("st.global.b8 [%0], %1;" :: "l"(dst), "r"((u32)src) : "memory");
}
PTX_INLINE void st_global(void* dst, const u16& src) {
  asm volatile("st.global.b16 [%0], %1;" :: "l"(dst), "h"(src) : "memory");
}

// ---- multimem: one access, every GPU bound to the multicast address; sm_90 and later -------------
// Elements of all GPUs, added in an order that the switch chooses; halves in float32 (.acc::f32).
PTX_INLINE void multimem_ld_reduce_add_v4_f32(b32x4& dst, const void* src) {
  asm volatile("multimem.ld_reduce.weak.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void multimem_ld_reduce_add_acc_f32_v4_f16x2(b32x4& dst, const void* src) {
  asm volatile("multimem.ld_reduce.weak.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void multimem_ld_reduce_add_acc_f32_v4_bf16x2(b32x4& dst, const void* src) {
  asm volatile("multimem.ld_reduce.weak.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void multimem_st(void* dst, const b32x4& src) {  // the type only gives the width: bits are moved
  asm volatile("multimem.st.weak.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w) : "memory");
}

// ---- fences between ways to memory ---------------------------------------------------------------
// Generic accesses to global memory (also those that an acquire has made known) before later bulk copies, and
// the other way round. sm_90 and later.
PTX_INLINE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Accesses through one virtual address of a byte before accesses through another, like a multicast address.
PTX_INLINE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }
