// One thin function per PTX instruction that the kernels use: same name, destination first.
//
// The only include of a kernel, and it includes nothing: NVRTC's wheel brings no headers. Addresses in shared
// memory are the 32-bit ones of the shared window (smem_addr). Whatever touches memory or synchronises is
// volatile with a "memory" clobber, so the compiler keeps the order in which a kernel says things.
#pragma once
#define PTX_INLINE __device__ __forceinline__

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// cuTensorMapEncodeTiled fills it on the host; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { u64 opaque[16]; };

// What one load or store moves per thread: 4, 8, 16 or 32 bytes.
struct b32x1 { u32 x; };
struct b32x2 { u32 x, y; };
struct b32x4 { u32 x, y, z, w; };
struct b32x8 { b32x4 low, high; };

PTX_INLINE u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- ld and st: global memory, one overload per width -------------------------------------------
PTX_INLINE void ld_global(b32x1& dst, const void* src) {
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(dst.x) : "l"(src) : "memory");
}
PTX_INLINE void ld_global(b32x2& dst, const void* src) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(dst.x), "=r"(dst.y) : "l"(src) : "memory");
}
PTX_INLINE void ld_global(b32x4& dst, const void* src) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void ld_global(b32x8& dst, const void* src) {  // sm_100 and later
  asm volatile("ld.global.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(dst.low.x), "=r"(dst.low.y), "=r"(dst.low.z), "=r"(dst.low.w), "=r"(dst.high.x),
                 "=r"(dst.high.y), "=r"(dst.high.z), "=r"(dst.high.w) : "l"(src) : "memory");
}

// .nc: nobody writes these bytes while the kernel runs, so the load may use the read-only path.
PTX_INLINE void ld_global_nc(b32x1& dst, const void* src) {
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(dst.x) : "l"(src) : "memory");
}
PTX_INLINE void ld_global_nc(b32x2& dst, const void* src) {
  asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(dst.x), "=r"(dst.y) : "l"(src) : "memory");
}
PTX_INLINE void ld_global_nc(b32x4& dst, const void* src) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void ld_global_nc(b32x8& dst, const void* src) {  // sm_100 and later
  asm volatile("ld.global.nc.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(dst.low.x), "=r"(dst.low.y), "=r"(dst.low.z), "=r"(dst.low.w), "=r"(dst.high.x),
                 "=r"(dst.high.y), "=r"(dst.high.z), "=r"(dst.high.w) : "l"(src) : "memory");
}

// .cg: cached in L2, not in L1.
PTX_INLINE void ld_global_cg(b32x4& dst, const void* src) {
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}

PTX_INLINE void st_global(void* dst, const b32x1& src) {
  asm volatile("st.global.b32 [%0], %1;" :: "l"(dst), "r"(src.x) : "memory");
}
PTX_INLINE void st_global(void* dst, const b32x2& src) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(dst), "r"(src.x), "r"(src.y) : "memory");
}
PTX_INLINE void st_global(void* dst, const b32x4& src) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w) : "memory");
}
PTX_INLINE void st_global(void* dst, const b32x8& src) {  // sm_100 and later
  asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
               :: "l"(dst), "r"(src.low.x), "r"(src.low.y), "r"(src.low.z), "r"(src.low.w),
                  "r"(src.high.x), "r"(src.high.y), "r"(src.high.z), "r"(src.high.w) : "memory");
}

// ---- ld and st: shared memory, at most 16 bytes per thread --------------------------------------
PTX_INLINE void ld_shared(b32x1& dst, u32 src) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(dst.x) : "r"(src) : "memory");
}
PTX_INLINE void ld_shared(b32x2& dst, u32 src) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(dst.x), "=r"(dst.y) : "r"(src) : "memory");
}
PTX_INLINE void ld_shared(b32x4& dst, u32 src) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "r"(src) : "memory");
}
PTX_INLINE void st_shared(u32 dst, const b32x1& src) {
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(dst), "r"(src.x) : "memory");
}
PTX_INLINE void st_shared(u32 dst, const b32x2& src) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(dst), "r"(src.x), "r"(src.y) : "memory");
}
PTX_INLINE void st_shared(u32 dst, const b32x4& src) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w) : "memory");
}

// ---- cp.async: global to shared without registers, sm_80 and later ------------------------------
template <u32 BYTES>  // 4, 8 or 16
PTX_INLINE void cp_async_ca(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(dst), "l"(src), "n"(BYTES) : "memory");
}
template <u32 BYTES>  // 16 only
PTX_INLINE void cp_async_cg(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" :: "r"(dst), "l"(src), "n"(BYTES) : "memory");
}
PTX_INLINE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 PENDING>  // returns when at most PENDING of this thread's newest groups are incomplete
PTX_INLINE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// ---- mbarrier, sm_90 forms ----------------------------------------------------------------------
PTX_INLINE void mbarrier_init(u32 mbar, u32 arrival_count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(mbar), "r"(arrival_count) : "memory");
}
PTX_INLINE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX_INLINE void mbarrier_arrive_expect_tx(u32 mbar, u32 tx_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
               :: "r"(mbar), "r"(tx_bytes) : "memory");
}
PTX_INLINE bool mbarrier_try_wait_parity(u32 mbar, u32 parity) {  // false: not yet, ask again
  u32 done;
  asm volatile("{\n\t.reg .pred complete;\n\t"
               "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 complete, [%1], %2;\n\t"
               "selp.b32 %0, 1, 0, complete;\n\t}"
               : "=r"(done) : "r"(mbar), "r"(parity) : "memory");
  return done != 0;
}

// ---- cp.async.bulk: the TMA, sm_90 and later ----------------------------------------------------
// Loads name shared::cta (PTX 8.6 and later): from the older shared::cluster, ptxas makes a call for sm_120.

PTX_INLINE void cp_async_bulk_shared_global(u32 dst, const void* src, u32 num_bytes, u32 mbar) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(dst), "l"(src), "r"(num_bytes), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_global_shared(void* dst, u32 src, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(dst), "r"(src), "r"(num_bytes) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_2d_shared_global(u32 dst, const TensorMap* map, u32 column, u32 row,
                                                      u32 mbar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(dst), "l"(map), "r"(column), "r"(row), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_2d_global_shared(const TensorMap* map, u32 column, u32 row, u32 src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(column), "r"(row), "r"(src) : "memory");
}
PTX_INLINE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <u32 PENDING>  // ... groups whose writes this thread cannot see yet
PTX_INLINE void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(PENDING) : "memory");
}
template <u32 PENDING>  // ... groups whose sources are still being read
PTX_INLINE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

// ---- fences and clocks --------------------------------------------------------------------------
// Orders generic accesses (ld, st, cp.async) to this CTA's shared memory before later bulk and tensor copies.
PTX_INLINE void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
PTX_INLINE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

PTX_INLINE u64 clock64_now() {  // SM cycles; never subtract across SMs
  u64 cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles) :: "memory");
  return cycles;
}
PTX_INLINE u64 globaltimer_now() {  // nanoseconds; ticks 32 ns to 1 us apart
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) :: "memory");
  return ns;
}
