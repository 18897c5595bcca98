// A lane of a warp that copies for all.
#pragma once

#include <cstdint>

namespace tuner {

// True for one lane of a whole warp, always the same. The compiler knows that it is one: it issues that lane's
// copies by TMA without a loop over lanes, which takes about 100 clocks a copy.
__device__ __forceinline__ bool elect_lane() {
  uint32_t is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_elected));
  return is_elected != 0;
}

}  // namespace tuner
