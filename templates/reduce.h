// Stores of matrices and sums that copies add to: PTX instructions for which CUDA C++ has no function.
#pragma once

#include <cstdint>

namespace tuner {

// Four matrices of eight by eight 16-bit values, two of each a lane, as their transposes; lane 8 i + r has
// the address of column r of matrix i.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, uint32_t const (&word)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
               ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}

// The policy of a copy whose place in the L2 is kept.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Adds floats of shared memory to global memory, as a copy.
__device__ __forceinline__ void add_bytes(float* to, uint32_t from, int bytes, uint64_t policy) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;"
               ::"l"(to), "r"(from), "r"(bytes), "l"(policy) : "memory");
}

// Until all groups of this thread's copies but the last `kLater` have been read from shared memory.
template <int kLater>
__device__ __forceinline__ void copies_read_but() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory"); }

}  // namespace tuner
