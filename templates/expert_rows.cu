// The rows of a mixture of experts around its grouped products, for tokens of which each has `top_k` slots: a
// slot is a token and one of its experts. Sizes of the experts are computed and read on the device.
//
//   place    the row of each slot, expert after expert and in an expert by slot, and the experts' offsets
//   copy     each token's row to its slots' rows, as it is or in e4m3 with factors of blocks
//   gate     silu(gate) * up of each row, as bf16 or in e4m3 with factors of blocks
//   combine  each token's sum of its slots' rows by their weights, in fp32 and in the order of the slots
//
// A slot whose expert is out of range has no row (-1). Rows that no slot has are neither read nor written. All
// results are the same from run to run. e4m3 and factors are those of `block_quantiser.cu`, of rows in bf16.
//
// Compiled with TUNER_KERNEL, the end of its functions' names.
//
// Arguments (their order: tuner/compile/single.py)
//   experts        of each slot, int32 or int64 (place)
//   rows           bf16, 16-byte aligned: the tokens' (copy), gate and up side by side (gate), the experts' (combine)
//   offsets        int32, G + 1: first row of each expert, and the last one's end (written by place, read by gate)
//   places         int32, a slot's row or -1 (written by place, read by copy and combine)
//   counts         int32, of each chunk of slots and expert (place)
//   weights        of each slot, bf16 or fp32 (combine)
//   out            rows that are written: bf16, 16-byte aligned; e4m3, 8-byte aligned
//   factors        fp32, of e4m3 rows (copy, gate)
//   stage          as below
//   row_count      slots of place and gate, tokens of copy and combine
//   part_count     experts of place and gate, slots of a token of copy and combine
//   columns        of the rows that are written, a multiple of 8
//   row_stride     between the tokens' rows (copy), a multiple of 8; all others are contiguous
//   block_stride   of the factors between blocks of columns; rows lie side by side. 0: out is bf16
//   width          bytes of an expert's number (4, 8), of a weight (2, 4)
//   pdl            1: launch with programmatic stream serialization
// Tensors of other stages are null.
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "ptx.h"

namespace {

using namespace tuner;

// As `arguments.cu.j2` makes them: a test compares both.
struct Tensors { void *experts, *rows, *offsets, *places, *counts, *weights, *out, *factors; };
struct Integers { int64_t stage, row_count, part_count, columns, row_stride, block_stride, width, pdl; };

enum Stage { kPlace, kCopy, kGate, kCombine };

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kMaxExperts = 512;
constexpr int kMaxTopK = kWarp;
// place: slots of a thread block, and of each of its warps.
constexpr int kPlaceThreads = 1024, kPlaceWarps = kPlaceThreads / kWarp;
constexpr int kTurns = 4;
constexpr int kWarpSlots = kTurns * kWarp, kChunk = kPlaceWarps * kWarpSlots;
// The others: columns of a lane and of a thread block.
constexpr int kThreads = 128, kVector = 8, kColumns = kThreads * kVector;
constexpr int kUnder = 4;  // rows that a lane of combine has under way

constexpr float kMinMaximum = 1e-4f;
constexpr float kReciprocal = 1.0f / 448.0f;  // of the largest e4m3 number
constexpr int kBlock = 128;                   // columns of a factor
constexpr int kLanes = kBlock / kVector;      // of a block of columns

static_assert(kMaxExperts <= kPlaceThreads, "a thread for each expert");
static_assert(kChunk < 1 << 16, "counts of a chunk");

// Experts that are out of range are -1.
__device__ __forceinline__ int expert_of(const void* experts, int bytes, int64_t slot, int64_t slots, int count) {
  if (slot >= slots) return -1;
  const int64_t expert = bytes == 8 ? static_cast<const int64_t*>(experts)[slot] : static_cast<const int32_t*>(experts)[slot];
  return expert < 0 || expert >= count ? -1 : static_cast<int>(expert);
}

__global__ void __launch_bounds__(kPlaceThreads) count(const void* experts, int bytes, int* counts, int64_t slots, int experts_count) {
  __shared__ int found[kMaxExperts];
  grid_dependency_wait();
  grid_dependency_launch();
  if (threadIdx.x < kMaxExperts) found[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t slot = int64_t(blockIdx.x) * kChunk + turn * kPlaceThreads + threadIdx.x;
    const int expert = expert_of(experts, bytes, slot, slots, experts_count);
    if (expert >= 0) atomicAdd(&found[expert], 1);
  }
  __syncthreads();
  if (threadIdx.x < experts_count) counts[int64_t(blockIdx.x) * experts_count + threadIdx.x] = found[threadIdx.x];
}

// A thread block places a chunk of slots: behind the rows of the experts before, of the chunks before, of the warps
// before and of the slots before.
__global__ void __launch_bounds__(kPlaceThreads) place(const void* experts, int bytes, int* offsets, int* places, const int* counts,
                                                       int64_t slots, int experts_count) {
  __shared__ uint16_t before[kPlaceWarps][kMaxExperts];  // rows of an expert in the warps before
  __shared__ int first[kMaxExperts];
  __shared__ int sums[kPlaceWarps];
  grid_dependency_wait();
  grid_dependency_launch();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int expert = lane; expert < experts_count; expert += kWarp) before[warp][expert] = 0;
  __syncwarp();
  const int64_t start = int64_t(blockIdx.x) * kChunk + warp * kWarpSlots + lane;
  int expert[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) expert[turn] = expert_of(experts, bytes, start + turn * kWarp, slots, experts_count);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const unsigned alike = __match_any_sync(kAll, expert[turn]);
    if (expert[turn] >= 0 && __ffs(alike) - 1 == lane) before[warp][expert[turn]] += __popc(alike);
    __syncwarp();
  }
  __syncthreads();

  const int own = threadIdx.x;  // expert
  int chunk = 0, earlier = 0, total = 0;
  if (own < experts_count) {
    for (int w = 0; w < kPlaceWarps; ++w) {
      const int rows = before[w][own];
      before[w][own] = static_cast<uint16_t>(chunk);
      chunk += rows;
    }
    total = chunk;
    if (gridDim.x > 1) {
      total = 0;
#pragma unroll 8
      for (int other = 0; other < gridDim.x; ++other) {
        const int rows = counts[int64_t(other) * experts_count + own];
        if (other < blockIdx.x) earlier += rows;
        total += rows;
      }
    }
  }
  int through = total;  // the experts up to this one
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(kAll, through, step);
    if (lane >= step) through += below;
  }
  if (lane == kWarp - 1) sums[warp] = through;
  __syncthreads();
  if (own < experts_count) {
    for (int w = 0; w < warp; ++w) through += sums[w];
    first[own] = through - total + earlier;
    if (blockIdx.x == 0) {
      offsets[own + 1] = through;
      if (own == 0) offsets[0] = 0;
    }
  }
  __syncthreads();

#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const unsigned alike = __match_any_sync(kAll, expert[turn]);
    const int64_t slot = start + turn * kWarp;
    int row = -1;
    if (expert[turn] >= 0) row = first[expert[turn]] + before[warp][expert[turn]] + __popc(alike & ((1u << lane) - 1));
    __syncwarp();
    if (expert[turn] >= 0 && __ffs(alike) - 1 == lane) before[warp][expert[turn]] += __popc(alike);
    __syncwarp();
    if (slot < slots) places[slot] = row;
  }
}

// A lane's columns in e4m3, and the factor of its block, which `kLanes` lanes share. All lanes of a warp call it.
__device__ __forceinline__ uint2 quantised(const uint4& raw, float& factor) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
  __nv_bfloat162 largest = __habs2(pairs[0]);
#pragma unroll
  for (int pair = 1; pair < kVector / 2; ++pair) largest = __hmax2_nan(largest, __habs2(pairs[pair]));
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) largest = __hmax2_nan(largest, __shfl_xor_sync(kAll, largest, step));
  const float maximum = __bfloat162float(__hmax_nan(largest.x, largest.y));
  factor = (maximum < kMinMaximum ? kMinMaximum : maximum) * kReciprocal;
  uint32_t word[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 low = __bfloat1622float2(pairs[2 * half]), high = __bfloat1622float2(pairs[2 * half + 1]);
    word[half] = packed_e4m3(__fdiv_rn(low.x, factor), __fdiv_rn(low.y, factor)) |
                 packed_e4m3(__fdiv_rn(high.x, factor), __fdiv_rn(high.y, factor)) << 16;
  }
  return make_uint2(word[0], word[1]);
}

template <bool kQuantises>
__global__ void __launch_bounds__(kThreads) copy(const __nv_bfloat16* __restrict__ rows, const int* __restrict__ places, void* __restrict__ copies,
                                                 float* __restrict__ factors, int top_k, int columns, int64_t stride, int64_t block) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarp, column = blockIdx.y * kColumns + threadIdx.x * kVector;
  const bool has = column < columns;
  const uint4 raw = has ? *reinterpret_cast<const uint4*>(rows + token * stride + column) : uint4{};
  const int mine = lane < top_k ? places[token * top_k + lane] : -1;
  uint2 small{};
  float factor = 0.0f;
  if constexpr (kQuantises) small = quantised(raw, factor);
  for (int slot = 0; slot < top_k; ++slot) {
    const int64_t row = __shfl_sync(kAll, mine, slot);
    if (row < 0 || !has) continue;
    if constexpr (kQuantises) {
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(copies) + row * columns + column) = small;
      if (lane % kLanes == 0) factors[column / kBlock * block + row] = factor;
    } else {
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(copies) + row * columns + column) = raw;
    }
  }
}

__device__ __forceinline__ float gated(float gate, float up) { return __fdiv_rn(gate, 1.0f + expf(-gate)) * up; }

template <bool kQuantises>
__global__ void __launch_bounds__(kThreads) gate(const __nv_bfloat16* __restrict__ both, const int* __restrict__ offsets, void* __restrict__ products,
                                                 float* __restrict__ factors, int experts_count, int columns, int64_t block) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t row = blockIdx.x;
  if (row >= offsets[experts_count]) return;
  const int lane = threadIdx.x % kWarp, column = blockIdx.y * kColumns + threadIdx.x * kVector;
  const bool has = column < columns;
  const __nv_bfloat16* at = both + row * 2 * columns + column;
  const uint4 left = has ? *reinterpret_cast<const uint4*>(at) : uint4{};
  const uint4 right = has ? *reinterpret_cast<const uint4*>(at + columns) : uint4{};
  const __nv_bfloat162* gates = reinterpret_cast<const __nv_bfloat162*>(&left);
  const __nv_bfloat162* ups = reinterpret_cast<const __nv_bfloat162*>(&right);
  uint4 raw;
  __nv_bfloat162* results = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int pair = 0; pair < kVector / 2; ++pair) {
    const float2 g = __bfloat1622float2(gates[pair]), u = __bfloat1622float2(ups[pair]);
    results[pair] = __floats2bfloat162_rn(gated(g.x, u.x), gated(g.y, u.y));
  }
  if constexpr (kQuantises) {
    float factor;
    const uint2 small = quantised(raw, factor);
    if (!has) return;
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(products) + row * columns + column) = small;
    if (lane % kLanes == 0) factors[column / kBlock * block + row] = factor;
  } else if (has) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(products) + row * columns + column) = raw;
  }
}

__global__ void __launch_bounds__(kThreads) combine(const __nv_bfloat16* __restrict__ rows, const int* __restrict__ places,
                                                    const void* __restrict__ weights, int bytes, __nv_bfloat16* __restrict__ sums, int top_k,
                                                    int columns) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarp, column = blockIdx.y * kColumns + threadIdx.x * kVector;
  const bool has = column < columns;
  int mine = -1;
  float weight = 0.0f;
  if (lane < top_k) {
    const int64_t slot = token * top_k + lane;
    mine = places[slot];
    weight = bytes == 4 ? static_cast<const float*>(weights)[slot] : __bfloat162float(static_cast<const __nv_bfloat16*>(weights)[slot]);
  }
  float sum[kVector] = {};
  for (int start = 0; start < top_k; start += kUnder) {
    uint4 raw[kUnder];
    int row[kUnder];
#pragma unroll
    for (int i = 0; i < kUnder; ++i) {
      row[i] = __shfl_sync(kAll, mine, (start + i) % kWarp);
      if (start + i >= top_k) row[i] = -1;
      raw[i] = has && row[i] >= 0 ? *reinterpret_cast<const uint4*>(rows + int64_t(row[i]) * columns + column) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kUnder; ++i) {
      const float by = __shfl_sync(kAll, weight, (start + i) % kWarp);
      if (row[i] < 0) continue;
      const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw[i]);
#pragma unroll
      for (int pair = 0; pair < kVector / 2; ++pair) {
        const float2 x = __bfloat1622float2(pairs[pair]);
        sum[2 * pair] = fmaf(by, x.x, sum[2 * pair]);
        sum[2 * pair + 1] = fmaf(by, x.y, sum[2 * pair + 1]);
      }
    }
  }
  if (!has) return;
  uint4 result;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&result);
#pragma unroll
  for (int pair = 0; pair < kVector / 2; ++pair) pairs[pair] = __floats2bfloat162_rn(sum[2 * pair], sum[2 * pair + 1]);
  *reinterpret_cast<uint4*>(sums + token * columns + column) = result;
}

bool valid(Integers const& call) {
  const int64_t rows = call.row_count, parts = call.part_count, columns = call.columns, block = call.block_stride;
  if (call.stage < kPlace || call.stage > kCombine || rows < 1 || rows > (1 << 30) || parts < 1) return false;
  if (call.stage == kPlace) return parts <= kMaxExperts && (call.width == 4 || call.width == 8);
  if (columns < 1 || columns > (1 << 25) || columns % kVector != 0) return false;
  const bool by_token = call.stage != kGate;
  if (parts > (by_token ? kMaxTopK : kMaxExperts)) return false;
  const int64_t slots = by_token ? rows * parts : rows;
  if (slots > (1 << 30)) return false;
  if (call.stage == kCombine) return call.width == 2 || call.width == 4;
  if (call.stage == kCopy &&
      (call.row_stride < columns || call.row_stride % kVector != 0 || call.row_stride >= (int64_t(1) << 36)))
    return false;
  return block == 0 || (block >= slots && block < (int64_t(1) << 36));
}

bool misses(const void* tensor, uintptr_t alignment) {
  return tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % alignment != 0;
}

// Whether a tensor that the stage uses is missing or misaligned.
bool misses(Tensors const& tensors, Integers const& call) {
  if (call.stage == kPlace)
    return misses(tensors.experts, call.width) || misses(tensors.offsets, 4) || misses(tensors.places, 4) || misses(tensors.counts, 4);
  const bool is_small = call.block_stride != 0 && call.stage != kCombine;
  if (misses(tensors.rows, 16) || misses(tensors.out, is_small ? 8 : 16)) return true;
  if (misses(call.stage == kGate ? tensors.offsets : tensors.places, 4)) return true;
  return call.stage == kCombine ? misses(tensors.weights, call.width) : is_small && misses(tensors.factors, 4);
}

cudaError_t launch(Tensors const& tensors, Integers const& call, cudaStream_t stream) {
  if (!valid(call)) return cudaErrorInvalidValue;
  if (misses(tensors, call)) return cudaErrorMisalignedAddress;
  const int parts = static_cast<int>(call.part_count), columns = static_cast<int>(call.columns), width = static_cast<int>(call.width);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = call.pdl != 0;
  const void *experts = tensors.experts, *weights = tensors.weights;
  const __nv_bfloat16* rows = static_cast<const __nv_bfloat16*>(tensors.rows);
  int *offsets = static_cast<int*>(tensors.offsets), *places = static_cast<int*>(tensors.places), *counts = static_cast<int*>(tensors.counts);
  const int *from = offsets, *at = places, *counted = counts;
  float* factors = static_cast<float*>(tensors.factors);
  if (call.stage == kPlace) {
    config.gridDim = dim3(static_cast<unsigned>((call.row_count + kChunk - 1) / kChunk));
    config.blockDim = dim3(kPlaceThreads);
    if (config.gridDim.x > 1)
      if (cudaError_t error = cudaLaunchKernelEx(&config, count, experts, width, counts, call.row_count, parts); error != cudaSuccess) return error;
    return cudaLaunchKernelEx(&config, place, experts, width, offsets, places, counted, call.row_count, parts);
  }
  config.gridDim = dim3(static_cast<unsigned>(call.row_count), (columns + kColumns - 1) / kColumns);
  config.blockDim = dim3(kThreads);
  if (call.stage == kCombine)
    return cudaLaunchKernelEx(&config, combine, rows, at, weights, width, static_cast<__nv_bfloat16*>(tensors.out), parts, columns);
  const bool is_small = call.block_stride != 0;
  if (call.stage == kCopy)
    return cudaLaunchKernelEx(&config, is_small ? copy<true> : copy<false>, rows, at, tensors.out, factors, parts, columns, call.row_stride,
                              call.block_stride);
  return cudaLaunchKernelEx(&config, is_small ? gate<true> : gate<false>, rows, from, tensors.out, factors, parts, columns, call.block_stride);
}

}  // namespace

#include "exported.h"
