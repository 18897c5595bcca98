// What the lanes of a warp do together. A quad is four neighbouring lanes: they hold a row of a
// WGMMA's accumulator, two columns each of every octet.
#pragma once

#include <cstdint>

namespace tuner {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 2);
  return x + __shfl_xor_sync(kAllLanes, x, 1);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Four lanes of a quad hold two columns each of four octets; afterwards lane q holds octet q. And
// back.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
  int const q = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t const mine = q & step ? word[i] : word[i + step];
      uint32_t const other = __shfl_xor_sync(kAllLanes, mine, step);
      if (q & step) word[i] = other;
      else word[i + step] = other;
    }
  }
}

}  // namespace tuner
