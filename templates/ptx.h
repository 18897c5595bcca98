// PTX instructions for which CUDA C++ has no function, and CUTLASS none or one that does more.
#pragma once

#include <cstdint>

namespace tuner {

// 2^x, wrong by two units in the last place at most; denormal numbers are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, wrong by one unit in the last place; denormal numbers are zero.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as 16-bit numbers, the first in the lower half.
__device__ __forceinline__ uint32_t packed_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ uint32_t packed_fp16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Two floats as e4m3, the first in the lower byte.
__device__ __forceinline__ uint32_t packed_e4m3(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

// Waits until the kernels before this launch in the stream have ended and what they wrote is seen;
// before that a thread touches nothing in memory but the parameters. Takes no time unless the kernel
// was launched as a programmatic dependent.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the kernel after this one in the stream begin, where it was launched as a programmatic
// dependent, once every block has come here or ended.
__device__ __forceinline__ void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;"); }

// Keeps the compiler from moving plain loads and stores past it. CUTLASS's barriers alone do not.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// Orders this thread's reads of shared memory before copies (TMA, bulk) that a later arrival at a
// barrier lets in. An arrival alone does not wait for loads that are under way.
__device__ __forceinline__ void async_copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of global memory: reads and writes of other threads that this one has seen before its copies.
__device__ __forceinline__ void async_global_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Bytes of global memory to shared memory; they count towards the barrier's. Addresses and `bytes` are
// multiples of 16.
__device__ __forceinline__ void copy_bytes(uint32_t to, void const* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_bytes(uint32_t to, void const* from, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// The policy of a copy that leaves the L2 to others.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Bytes of global memory to the L2.
__device__ __forceinline__ void fetch_bytes(void const* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Adds floats of shared memory to global memory, as a copy.
__device__ __forceinline__ void add_bytes(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// This thread's copies from shared memory so far are a group. Until all groups have been read, or been stored.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void copies_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Adds four floats to global memory, in no order.
__device__ __forceinline__ void add_to_global(float* to, float4 const& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], { %1, %2, %3, %4 };"
               ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// A counter of the GPU's blocks: what a block did before `add_release` is seen after the `load_acquire` that
// finds its addition.
__device__ __forceinline__ int load_acquire(int const* counter) {
  int found;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  return found;
}
__device__ __forceinline__ void add_release(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// 16 bytes that are read once: they leave the L1 to others.
__device__ __forceinline__ uint4 load_once(void const* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 { %0, %1, %2, %3 }, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

__device__ __forceinline__ uint4 load_shared_words(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3 }, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}

// Four matrices of eight by eight 16-bit values, two of each a lane; lane 8 i + r has the address of row r of
// matrix i.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t const (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };"
               ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}

// Values that the compiler takes for new: it neither keeps nor moves what they are made of.
__device__ __forceinline__ void opaque(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void opaque(float& x, float& y) { asm volatile("" : "+f"(x), "+f"(y)); }
// The index of a thread, read anew.
__device__ __forceinline__ int opaque_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// d += a b by tensor cores: 16 rows, 8 columns, 16 of K.
__device__ __forceinline__ void multiply_fp16(float (&d)[4], uint4 const& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bf16(float (&d)[4], uint4 const& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Values in the shared memory of a block of the cluster; the address is of `cute::set_block_rank`.
__device__ __forceinline__ float2 load_cluster(uint32_t address, float2 const&) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 { %0, %1 }, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ float4 load_cluster(uint32_t address, float4 const&) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}

}  // namespace tuner
