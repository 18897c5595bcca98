// Rows of bf16 in e4m3, with an fp32 factor for each row and block of 128 columns: its largest magnitude times
// 1 / 448, and at least `kMinMaximum` / 448. The factors of a block of columns lie one after the other, row by
// row, as `block_scaled_gemm.cu.j2` reads them along. Elements and factors have the bits of PyTorch's operations:
// the magnitude is exact, the factor is one rounded product, each element one rounded quotient, rounded to e4m3
// to nearest even. A NaN makes its whole block NaN.
//
// Compiled with TUNER_KERNEL, the end of its functions' names.
//
// tensors   rows, elements, factors      device pointers; 16-byte aligned, 8-byte aligned, 4-byte aligned
// integers  0 M   1 K                    rows and columns; K a multiple of 8
//           2 stride                     between rows of bf16, a multiple of 8; elements are contiguous
//           3 block                      stride of the factors between blocks of columns; rows lie side by side
//           4 pdl                        1: launch with programmatic stream serialization
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "ptx.h"

namespace {

using namespace tuner;

constexpr float kMinMaximum = 1e-4f;
constexpr float kReciprocal = 1.0f / 448.0f;  // of the largest e4m3 number
constexpr int kBlock = 128;                   // columns of a factor
constexpr int kVector = 8;                    // elements that a lane reads at once
constexpr int kLanes = kBlock / kVector;      // of a block of columns
constexpr int kWarp = 32;
constexpr int kRows = 8;      // of a thread block, a warp each
constexpr int kVectors = 4;   // that a lane has under way
constexpr int kBlocks = kVectors * kWarp / kLanes;  // of columns, of a thread block

// Two numbers as e4m3, the first in the lower byte.
__device__ __forceinline__ uint32_t packed_e4m3(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

__global__ void __launch_bounds__(kRows * kWarp) quantise(const __nv_bfloat16* rows, uint8_t* elements, float* factors, int m, int k,
                                                          int64_t stride, int64_t block_stride) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int row = blockIdx.x * kRows + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (row >= m) return;
  const int first = blockIdx.y * (kBlocks * kBlock) + lane * kVector;
  uint4 raw[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = first + i * kWarp * kVector;
    raw[i] = column < k ? *reinterpret_cast<const uint4*>(rows + row * stride + column) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = first + i * kWarp * kVector;
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw[i]);
    __nv_bfloat162 largest = __habs2(pairs[0]);
#pragma unroll
    for (int pair = 1; pair < kVector / 2; ++pair) largest = __hmax2_nan(largest, __habs2(pairs[pair]));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) largest = __hmax2_nan(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const float maximum = __bfloat162float(__hmax_nan(largest.x, largest.y));
    const float factor = (maximum < kMinMaximum ? kMinMaximum : maximum) * kReciprocal;
    if (column >= k) continue;
    uint32_t word[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 low = __bfloat1622float2(pairs[2 * half]), high = __bfloat1622float2(pairs[2 * half + 1]);
      word[half] = packed_e4m3(__fdiv_rn(low.x, factor), __fdiv_rn(low.y, factor)) |
                   packed_e4m3(__fdiv_rn(high.x, factor), __fdiv_rn(high.y, factor)) << 16;
    }
    *reinterpret_cast<uint2*>(elements + int64_t(row) * k + column) = make_uint2(word[0], word[1]);
    if (lane % kLanes == 0) factors[column / kBlock * block_stride + row] = factor;
  }
}

bool valid(const int64_t* integers) {
  const int64_t m = integers[0], k = integers[1], blocks = (k + kBlock - 1) / kBlock;
  return m >= 1 && m <= (1 << 30) && k >= 1 && k <= (1 << 25) && k % kVector == 0 && integers[2] >= k &&
         integers[2] % kVector == 0 && integers[2] < (int64_t(1) << 36) && (blocks == 1 || integers[3] >= m) &&
         integers[3] < (int64_t(1) << 36);
}

cudaError_t launch(void* const* tensors, const int64_t* integers, cudaStream_t stream) {
  if (!valid(integers)) return cudaErrorInvalidValue;
  constexpr int kAlignments[] = {16, 8, 4};
  for (int i = 0; i < 3; ++i)
    if (tensors[i] == nullptr || reinterpret_cast<uintptr_t>(tensors[i]) % kAlignments[i] != 0) return cudaErrorMisalignedAddress;
  const int m = static_cast<int>(integers[0]), k = static_cast<int>(integers[1]);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((m + kRows - 1) / kRows, (k + kBlocks * kBlock - 1) / (kBlocks * kBlock));
  config.blockDim = dim3(kRows * kWarp);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = integers[4] != 0;
  return cudaLaunchKernelEx(&config, quantise, static_cast<const __nv_bfloat16*>(tensors[0]), static_cast<uint8_t*>(tensors[1]),
                            static_cast<float*>(tensors[2]), m, k, integers[2], integers[3]);
}

}  // namespace

#define TUNER_JOIN(a, b, c) a##b##c
#define TUNER_NAME(kernel, end) TUNER_JOIN(tuner_, kernel, end)

extern "C" int TUNER_NAME(TUNER_KERNEL, _workspace)(const int64_t* integers, int64_t* bytes) {
  *bytes = 0;
  return valid(integers) ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

extern "C" int TUNER_NAME(TUNER_KERNEL, _launch)(void* const* tensors, const int64_t* integers, const double*, void*, void* stream) {
  return static_cast<int>(launch(tensors, integers, static_cast<cudaStream_t>(stream)));
}
