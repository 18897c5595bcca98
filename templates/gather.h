// Copies of 16 bytes a thread from global to shared memory.
#pragma once

#include <cstdint>

namespace tuner {

// 16 bytes that leave the L1 to others, or zeros; addresses are multiples of 16.
__device__ __forceinline__ void copy_sixteen(uint32_t to, void const* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

}  // namespace tuner
