// Rows of bf16 in e4m3, with an fp32 factor for each row and block of 128 columns: its largest magnitude times
// 1 / 448, and at least `kMinMaximum` / 448. The factors of a block of columns lie one after the other, row by
// row, as `block_scaled_gemm.cu.j2` reads them along. Elements and factors have the bits of PyTorch's operations:
// the magnitude is exact, the factor is one rounded product, each element one rounded quotient, rounded to e4m3
// to nearest even. A NaN makes its whole block NaN.
//
// Compiled with TUNER_KERNEL, the end of its functions' names.
//
// Arguments (their order: tuner/compile/block_quantiser.py)
//   rows, elements, factors   device pointers; 16-byte aligned, 8-byte aligned, 4-byte aligned
//   m, k                      rows and columns; k a multiple of 8
//   row_stride                between rows of bf16, a multiple of 8; elements are contiguous
//   block_stride              of the factors between blocks of columns; rows lie side by side
//   pdl                       1: launch with programmatic stream serialization
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "ptx.h"

namespace {

using namespace tuner;

// As `arguments.cu.j2` makes them: a test compares both.
struct Tensors { void *rows, *elements, *factors; };
struct Integers { int64_t m, k, row_stride, block_stride, pdl; };

constexpr float kMinMaximum = 1e-4f;
constexpr float kReciprocal = 1.0f / 448.0f;  // of the largest e4m3 number
constexpr int kBlock = 128;                   // columns of a factor
constexpr int kVector = 8;                    // elements that a lane reads at once
constexpr int kLanes = kBlock / kVector;      // of a block of columns
constexpr int kWarp = 32;
constexpr int kRows = 8;      // of a thread block, a warp each
constexpr int kVectors = 4;   // that a lane has under way
constexpr int kBlocks = kVectors * kWarp / kLanes;  // of columns, of a thread block

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

bool valid(Integers const& call) {
  const int64_t m = call.m, k = call.k, blocks = (k + kBlock - 1) / kBlock;
  return m >= 1 && m <= (1 << 30) && k >= 1 && k <= (1 << 25) && k % kVector == 0 && call.row_stride >= k &&
         call.row_stride % kVector == 0 && call.row_stride < (int64_t(1) << 36) && (blocks == 1 || call.block_stride >= m) &&
         call.block_stride < (int64_t(1) << 36);
}

bool misses(const void* tensor, uintptr_t alignment) {
  return tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % alignment != 0;
}

cudaError_t launch(Tensors const& tensors, Integers const& call, cudaStream_t stream) {
  if (!valid(call)) return cudaErrorInvalidValue;
  if (misses(tensors.rows, 16) || misses(tensors.elements, 8) || misses(tensors.factors, 4)) return cudaErrorMisalignedAddress;
  const int m = static_cast<int>(call.m), k = static_cast<int>(call.k);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((m + kRows - 1) / kRows, (k + kBlocks * kBlock - 1) / (kBlocks * kBlock));
  config.blockDim = dim3(kRows * kWarp);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = call.pdl != 0;
  return cudaLaunchKernelEx(&config, quantise, static_cast<const __nv_bfloat16*>(tensors.rows),
                            static_cast<uint8_t*>(tensors.elements), static_cast<float*>(tensors.factors), m, k,
                            call.row_stride, call.block_stride);
}

}  // namespace

#include "exported.h"
