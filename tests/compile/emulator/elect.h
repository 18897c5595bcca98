// What `templates/elect.h` has: a whole warp meets.
#pragma once

#include "pipeline.h"

namespace tuner {
inline bool elect_lane() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}
}  // namespace tuner
