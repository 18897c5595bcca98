// Instructions of a main loop that is not CUTLASS's: barriers in shared memory, copies that arrive at them,
// clusters, products of warp groups. `tests/compile/block_scaled_emulator.h` has the same functions for a
// host.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace tuner {

// Bytes of K that WGMMA's operands lie in, a row after the other: the widest swizzle.
constexpr int kSwizzleBytes = 128;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t block_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of a cluster, whole warps; what they wrote to shared memory before is seen by all after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `threads` threads that name the same barrier, whole warps.
__device__ __forceinline__ void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What `init_barrier` did is seen by the cluster and by copies.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Until the phase of this parity has ended. Of a barrier just made, the phase of parity 1 has.
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of another block; `barrier` is of `in_block`. What it says is that this thread's reads have
// ended: to make its writes seen there would take a fence of the whole GPU.
__device__ __forceinline__ void arrive_in_block(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// An arrival, and bytes that copies are to bring before the phase ends.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// An arrival once this thread's `copy_float`s so far have come.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four bytes, or zero.
__device__ __forceinline__ void copy_float(uint32_t to, const float* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}

// A box of a matrix by TMA.
__device__ __forceinline__ void copy_box(CUtensorMap const& map, uint32_t to, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3 }], [%4];"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// The same, to this place in each of the cluster's `blocks`, a bit each; it arrives at the barrier of each.
__device__ __forceinline__ void copy_box_to(CUtensorMap const& map, uint32_t to, int column, int row, uint32_t barrier,
                                            uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, { %2, %3 }], [%4], %5;"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks) : "memory");
}

// A box of a matrix to the L2.
__device__ __forceinline__ void fetch_box(CUtensorMap const& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, { %1, %2 }];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}

__device__ __forceinline__ float load_shared(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 { %0, %1 }, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// Of another block; `from` is of `in_block`.
__device__ __forceinline__ float load_cluster_float(uint32_t from) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

// Operand of WGMMA: rows of 128 bytes along K, swizzled, eight of them 1024 bytes.
__device__ __forceinline__ uint64_t k_major_operand(uint32_t address) {
  return (uint64_t(1) << 62) | (uint64_t(8 * kSwizzleBytes / 16) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) / 16);
}

// Before the first product of a group: what ordinary instructions did to the accumulators comes first.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Keeps the compiler from moving what reads or writes an accumulator past it.
__device__ __forceinline__ void accumulator_fence(float& x) { asm volatile("" : "+f"(x)::"memory"); }

// A box of a matrix from shared memory by TMA; what lies beyond the matrix is left.
__device__ __forceinline__ void store_box(CUtensorMap const& map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, { %1, %2 }], [%3];"
               ::"l"(&map), "r"(column), "r"(row), "r"(from) : "memory");
}

// Eight by eight 16-bit values of a warp, two a lane, rows for columns.
__device__ __forceinline__ uint32_t transposed(uint32_t both) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(both));
  return both;
}

}  // namespace tuner
