// One thin function per PTX instruction that the kernels use: same name, destination first.
//
// The only include of a kernel, and it includes nothing: NVRTC's wheel brings no headers. Addresses in shared
// memory are the 32-bit ones of the shared window (smem_addr). Whatever touches memory or synchronises is
// volatile with a "memory" clobber, so the compiler keeps the order in which a kernel says things.
#pragma once
#define PTX_INLINE __device__ __forceinline__

using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
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

// .cs: streaming, evicted first. .cv: fetched again whatever a cache holds. .L1::no_allocate: past L1.
PTX_INLINE void ld_global_cs(b32x4& dst, const void* src) {
  asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void ld_global_cv(b32x4& dst, const void* src) {
  asm volatile("ld.global.cv.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "l"(src) : "memory");
}
PTX_INLINE void ld_global_nc_no_allocate(b32x4& dst, const void* src) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
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

PTX_INLINE void st_global_cs(void* dst, const b32x4& src) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w) : "memory");
}
PTX_INLINE void st_global_wt(void* dst, const b32x4& src) {
  asm volatile("st.global.wt.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w) : "memory");
}

PTX_INLINE void red_global_add_f32(float* dst, float value) {  // relaxed, at the scope of the GPU
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(dst), "f"(value) : "memory");
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
template <u32 BYTES>  // reads src_bytes of BYTES (none: src is not touched), zeros the rest
PTX_INLINE void cp_async_ca(u32 dst, const void* src, u32 src_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               :: "r"(dst), "l"(src), "n"(BYTES), "r"(src_bytes) : "memory");
}
PTX_INLINE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 PENDING>  // returns when at most PENDING of this thread's newest groups are incomplete
PTX_INLINE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// Arrives on the mbarrier when this thread's earlier cp.async have landed; .noinc: that arrival is one of the
// count given at init.
PTX_INLINE void cp_async_mbarrier_arrive_noinc(u32 mbar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(mbar) : "memory");
}

// ---- bar.sync: NUM_THREADS threads meet at one of 16 hardware barriers --------------------------
PTX_INLINE void bar_sync(u32 barrier, u32 num_threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(num_threads) : "memory");
}
PTX_INLINE void bar_arrive(u32 barrier, u32 num_threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(num_threads) : "memory");
}

// ---- mbarrier: sm_80 and later ------------------------------------------------------------------
PTX_INLINE void mbarrier_init(u32 mbar, u32 arrival_count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(mbar), "r"(arrival_count) : "memory");
}
PTX_INLINE void mbarrier_inval(u32 mbar) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(mbar) : "memory");
}
PTX_INLINE u64 mbarrier_arrive(u32 mbar) {  // the state before the arrival
  u64 state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(mbar) : "memory");
  return state;
}
PTX_INLINE bool mbarrier_test_wait_parity(u32 mbar, u32 parity) {  // never blocks
  u32 done;
  asm volatile("{\n\t.reg .pred complete;\n\t"
               "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
               "selp.b32 %0, 1, 0, complete;\n\t}"
               : "=r"(done) : "r"(mbar), "r"(parity) : "memory");
  return done != 0;
}

// ---- mbarrier: sm_90 forms ----------------------------------------------------------------------
PTX_INLINE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX_INLINE void mbarrier_expect_tx(u32 mbar, u32 tx_bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :: "r"(mbar), "r"(tx_bytes) : "memory");
}
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
// The wait for arrivals of other CTAs of the cluster: fence_acquire_shared_cluster comes after it.
PTX_INLINE bool mbarrier_try_wait_parity_relaxed_cluster(u32 mbar, u32 parity) {
  u32 done;
  asm volatile("{\n\t.reg .pred complete;\n\t"
               "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 complete, [%1], %2;\n\t"
               "selp.b32 %0, 1, 0, complete;\n\t}"
               : "=r"(done) : "r"(mbar), "r"(parity) : "memory");
  return done != 0;
}
// The fences of relaxed arrivals and waits, for what lies in shared memory only: an arrival with
// .release.cluster costs a MEMBAR.ALL.GPU, a wait with .acquire.cluster an L1 flush.
PTX_INLINE void fence_acquire_shared_cluster() {
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}
PTX_INLINE void fence_release_shared_cta() {  // what this CTA's own shared memory holds, and was read of it
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}

// The loop that every consumer needs: returns when the phase of this parity has completed. try_wait sleeps in
// between; before sm_90 there is only test_wait, which asks again and again.
#ifdef WATCHDOG_NS
#include "watchdog.cuh"  // the same two loops with a bound, for tests of kernels that hang
#else
PTX_INLINE void wait_parity(u32 mbar, u32 parity) {
#if __CUDA_ARCH__ >= 900
  while (!mbarrier_try_wait_parity(mbar, parity)) {}
#else
  while (!mbarrier_test_wait_parity(mbar, parity)) {}
#endif
}
PTX_INLINE void wait_parity_cluster(u32 mbar, u32 parity) {
  while (!mbarrier_try_wait_parity_relaxed_cluster(mbar, parity)) {}
  fence_acquire_shared_cluster();
}
#endif

// ---- clusters: sm_90 and later. A u32 from mapa is the address of the same variable in another CTA
PTX_INLINE u32 mov_cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank) :: "memory");
  return rank;
}
PTX_INLINE u32 mapa_shared_cluster(u32 addr, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(addr), "r"(rank) : "memory");
  return mapped;
}
PTX_INLINE void barrier_cluster_arrive() {  // release: what came before is seen by those who wait
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
PTX_INLINE void barrier_cluster_arrive_relaxed() {  // ... nothing is: for what a fence has released already
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
PTX_INLINE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
PTX_INLINE void ld_shared_cluster(b32x4& dst, u32 src) {
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst.x), "=r"(dst.y), "=r"(dst.z), "=r"(dst.w) : "r"(src) : "memory");
}
PTX_INLINE void st_shared_cluster(u32 dst, const b32x4& src) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w) : "memory");
}
PTX_INLINE void st_async_shared_cluster(u32 dst, const b32x4& src, u32 mbar) {  // completes 16 bytes on mbar
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(dst), "r"(src.x), "r"(src.y), "r"(src.z), "r"(src.w), "r"(mbar) : "memory");
}
PTX_INLINE void mbarrier_arrive_shared_cluster(u32 mbar) {  // releases stores to other CTAs, too
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(mbar) : "memory");
}
PTX_INLINE void mbarrier_arrive_relaxed_shared_cluster(u32 mbar) {  // after fence_release_shared_cta
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" :: "r"(mbar) : "memory");
}

// ---- cp.async.bulk: the TMA, sm_90 and later ----------------------------------------------------
// Loads name shared::cta (PTX 8.6 and later): from the older shared::cluster, ptxas makes a call for sm_120.
PTX_INLINE void cp_async_bulk_shared_global(u32 dst, const void* src, u32 num_bytes, u32 mbar) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(dst), "l"(src), "r"(num_bytes), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_shared_global_cache_hint(u32 dst, const void* src, u32 num_bytes, u32 mbar,
                                                       u64 policy) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               :: "r"(dst), "l"(src), "r"(num_bytes), "r"(mbar), "l"(policy) : "memory");
}
// Lands at the same offset in every CTA whose bit of cta_mask is set, and completes on mbar's place there.
PTX_INLINE void cp_async_bulk_shared_global_multicast(u32 dst, const void* src, u32 num_bytes, u32 mbar,
                                                      u16 cta_mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1], %2, [%3], %4;"
               :: "r"(dst), "l"(src), "r"(num_bytes), "r"(mbar), "h"(cta_mask) : "memory");
}
PTX_INLINE void cp_async_bulk_shared_cluster_shared_cta(u32 dst, u32 src, u32 num_bytes, u32 mbar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(dst), "r"(src), "r"(num_bytes), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_global_shared(void* dst, u32 src, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(dst), "r"(src), "r"(num_bytes) : "memory");
}
PTX_INLINE void cp_reduce_async_bulk_global_shared_add_f32(void* dst, u32 src, u32 num_bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(dst), "r"(src), "r"(num_bytes) : "memory");
}
PTX_INLINE void cp_async_bulk_prefetch_L2_global(const void* src, u32 num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(src), "r"(num_bytes) : "memory");
}
PTX_INLINE u64 createpolicy_fractional_L2_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy) :: "memory");
  return policy;
}
PTX_INLINE u64 createpolicy_fractional_L2_evict_last() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy) :: "memory");
  return policy;
}

// ---- cp.async.bulk.tensor: coordinates in elements, the innermost first -------------------------
PTX_INLINE void cp_async_bulk_tensor_1d_shared_global(u32 dst, const TensorMap* map, i32 c0, u32 mbar) {
  asm volatile("cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2}], [%3];"
               :: "r"(dst), "l"(map), "r"(c0), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_2d_shared_global(u32 dst, const TensorMap* map, i32 c0, i32 c1,
                                                      u32 mbar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_3d_shared_global(u32 dst, const TensorMap* map, i32 c0, i32 c1, i32 c2,
                                                      u32 mbar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_4d_shared_global(u32 dst, const TensorMap* map, i32 c0, i32 c1, i32 c2,
                                                      i32 c3, u32 mbar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];"
               :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_5d_shared_global(u32 dst, const TensorMap* map, i32 c0, i32 c1, i32 c2,
                                                      i32 c3, i32 c4, u32 mbar) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
               :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(mbar) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_2d_shared_global_cache_hint(u32 dst, const TensorMap* map, i32 c0,
                                                                 i32 c1, u32 mbar, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(mbar), "l"(policy) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_2d_shared_global_multicast(u32 dst, const TensorMap* map, i32 c0, i32 c1,
                                                                u32 mbar, u16 cta_mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(mbar), "h"(cta_mask) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_1d_global_shared(const TensorMap* map, i32 c0, u32 src) {
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];"
               :: "l"(map), "r"(c0), "r"(src) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_2d_global_shared(const TensorMap* map, i32 c0, i32 c1, u32 src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(c0), "r"(c1), "r"(src) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_3d_global_shared(const TensorMap* map, i32 c0, i32 c1, i32 c2, u32 src) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
               :: "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(src) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_4d_global_shared(const TensorMap* map, i32 c0, i32 c1, i32 c2, i32 c3,
                                                      u32 src) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
               :: "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src) : "memory");
}
PTX_INLINE void cp_async_bulk_tensor_5d_global_shared(const TensorMap* map, i32 c0, i32 c1, i32 c2, i32 c3,
                                                      i32 c4, u32 src) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
               :: "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(src) : "memory");
}
// The element type, and with it the type of the addition, is the map's.
PTX_INLINE void cp_reduce_async_bulk_tensor_2d_global_shared_add(const TensorMap* map, i32 c0, i32 c1,
                                                                 u32 src) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(c0), "r"(c1), "r"(src) : "memory");
}
PTX_INLINE void cp_async_bulk_prefetch_tensor_2d_L2_global(const TensorMap* map, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
               :: "l"(map), "r"(c0), "r"(c1) : "memory");
}
PTX_INLINE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
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

// ---- tensormap: a map edited in shared memory, published in global memory -----------------------
PTX_INLINE void tensormap_replace_global_address(u32 map, const void* address) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
               :: "r"(map), "l"(address) : "memory");
}
template <u32 ORDINAL>
PTX_INLINE void tensormap_replace_global_dim(u32 map, u32 elements) {
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;"
               :: "r"(map), "n"(ORDINAL), "r"(elements) : "memory");
}
template <u32 ORDINAL>  // of dimension ORDINAL + 1
PTX_INLINE void tensormap_replace_global_stride(u32 map, u64 stride_bytes) {
  asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;"
               :: "r"(map), "n"(ORDINAL), "l"(stride_bytes) : "memory");
}
// Copies the map to global memory and releases it to the tensormap proxy; the whole warp executes it.
PTX_INLINE void tensormap_cp_fenceproxy(TensorMap* dst, u32 src) {
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
               "[%0], [%1], 128;" :: "l"(dst), "r"(src) : "memory");
}
PTX_INLINE void fence_proxy_tensormap_acquire(const TensorMap* map) {  // before the first copy through it
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}
PTX_INLINE void fence_proxy_tensormap_acquire_sys(const TensorMap* map) {  // ... that the host has written
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" :: "l"(map) : "memory");
}

// ---- registers and matrices ---------------------------------------------------------------------
template <u32 REGISTERS>  // per thread; a whole warpgroup takes more from the CTA's pool ...
PTX_INLINE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS) : "memory");
}
template <u32 REGISTERS>  // ... or gives some back
PTX_INLINE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS) : "memory");
}
// Four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i.
PTX_INLINE void ldmatrix_x4(u32 (&dst)[4], u32 src) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(dst[0]), "=r"(dst[1]), "=r"(dst[2]), "=r"(dst[3]) : "r"(src) : "memory");
}
PTX_INLINE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {  // d += a b
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]) : "memory");
}

// ---- fences and clocks --------------------------------------------------------------------------
// Orders generic accesses (ld, st, cp.async) to this CTA's shared memory before later bulk and tensor copies.
PTX_INLINE void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
PTX_INLINE void fence_proxy_async_shared_cluster() {  // the same for shared memory of the cluster's CTAs
  asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
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
