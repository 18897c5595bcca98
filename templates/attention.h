// What the attention kernels share beside their loops.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_conversion.h>

#include "arguments.h"
#include "ptx.h"
#include "warp.h"

namespace tuner {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// The widest swizzle that divides rows of kColumns elements.
template <int kColumns, class T, int kBytes = kColumns * int(sizeof(T))>
using SmemAtom = cute::conditional_t<kBytes % 128 == 0, cute::GMMA::Layout_K_SW128_Atom<T>,
    cute::conditional_t<kBytes % 64 == 0, cute::GMMA::Layout_K_SW64_Atom<T>, cute::GMMA::Layout_K_SW32_Atom<T>>>;

// tanh(scale / softcap * score), given -2 scale / softcap to base 2. From an exponential and a
// reciprocal it is wrong by 4e-7 at most; tanh.approx is by 2^-11 of itself, which a cap of 50 makes
// 2 % of a probability.
__device__ __forceinline__ float capped(float score, float cap_log2) {
  float const grown = 1.f + exp2_approx(score * cap_log2);  // infinite for the lowest scores
  return fmaf(2.f, reciprocal_approx(grown), -1.f);
}

// Two numbers, rounded, in one register.
template <class To>
CUTE_DEVICE uint32_t pack(float x, float y) {
  cutlass::Array<float, 2> pair;
  pair[0] = x, pair[1] = y;
  auto const rounded = cutlass::NumericArrayConverter<To, float, 2>{}(pair);
  return reinterpret_cast<uint32_t const&>(rounded);
}

}  // namespace tuner
