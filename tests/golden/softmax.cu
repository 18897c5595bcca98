#include <cfloat>
#include <cstdint>

#include <cuda_runtime.h>

#include "arguments.h"
#include "ptx.h"

namespace k_golden {

using namespace tuner;

constexpr bool kBfloat16 = false;
constexpr int kThreadsPerRow = 32;
constexpr int kVector = 4;
constexpr int kRowsPerBlock = 4;
constexpr int kPasses = 1;
constexpr int kVectors = 8;
constexpr bool kCausal = false;

constexpr int kWarp = 32;
constexpr int kBlock = kThreadsPerRow * kRowsPerBlock;
constexpr int kLanes = kThreadsPerRow < kWarp ? kThreadsPerRow : kWarp;
constexpr int kWarpsPerRow = kThreadsPerRow / kLanes;
constexpr int kTile = kThreadsPerRow * kVector * kVectors;
constexpr int64_t kMaxCols = int64_t(1) << 30;
constexpr double kLog2E = 1.4426950408889634;

static_assert(kThreadsPerRow >= 16 && kThreadsPerRow <= 1024 &&
                  (kThreadsPerRow & (kThreadsPerRow - 1)) == 0,
              "threads_per_row is a power of two from 16 to 1024");
static_assert(kBlock % kWarp == 0 && kBlock <= 1024, "a block is 1 to 32 whole warps");
static_assert(kVector == 1 || kVector == 2 || kVector == 4 || kVector == 8, "vector_width");
static_assert(kVectors >= 1 && kVectors * kVector <= 128 &&
                  kVectors * kVector + 16 <= 65536 / kBlock,
              "the values of a thread and 16 others fit its registers");
static_assert(kPasses >= 1 && kPasses <= 3, "passes");

struct Params {
  const float* scores;
  uint16_t* probabilities;
  int rows;
  int cols;
  int64_t stride_scores;
  int64_t stride_probabilities;
  int query_rows;
  bool overlaid;
  float scale_log2;
  float factor;
};

// What one thread needs of its row. No pointer is __restrict__: the two may be one.
struct Row {
  const float* scores;
  uint16_t* probabilities;
  int visible;     // columns that the mask shows; 0 for a row beyond the last
  int writable;    // columns to write; 0 for a row beyond the last
  int cols;        // the same for all rows: loops with barriers run to it
  int thread;      // within the row
  unsigned lanes;  // of the warp, that share the row
  float scale_log2;
  float factor;
};

using Values = float[kVectors][kVector];

// The maximum starts at a finite value: -inf - -inf would poison a sum that later columns rescue.
constexpr float kLowest = -FLT_MAX;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ uint32_t pack(float low, float high) {
  return kBfloat16 ? packed_bf16(low, high) : packed_fp16(low, high);
}

__device__ __forceinline__ float lanes_max(float x, unsigned lanes) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(lanes, x, offset));
  return x;
}

__device__ __forceinline__ float lanes_sum(float x, unsigned lanes) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(lanes, x, offset);
  return x;
}

// All threads of the row have read what they read before, and may be written over.
__device__ __forceinline__ void row_barrier(Row const& row) {
  if constexpr (kWarpsPerRow > 1) {
    __syncthreads();
  } else {
    __syncwarp(row.lanes);
  }
}

struct Statistics {
  float maximum;
  float sum;  // of exp2(x - maximum)
};

// From a warp's statistics to the row's; also a row_barrier. Each call of a kernel has its own
// `Slot` of shared memory, so that no second barrier is needed.
template <int Slot>
__device__ __forceinline__ Statistics combine(Statistics mine, Row const& row) {
  if constexpr (kWarpsPerRow > 1) {
    __shared__ Statistics partial[kRowsPerBlock][kWarpsPerRow];
    const int row_of_block = threadIdx.x / kThreadsPerRow;
    const int lane = row.thread % kWarp;
    if (lane == 0) partial[row_of_block][row.thread / kWarp] = mine;
    row_barrier(row);
    const Statistics other =
        lane < kWarpsPerRow ? partial[row_of_block][lane] : Statistics{kLowest, 0.0f};
    const float maximum = lanes_max(other.maximum, row.lanes);
    return {maximum, lanes_sum(other.sum * exp2_approx(other.maximum - maximum), row.lanes)};
  } else {
    row_barrier(row);
    return mine;
  }
}

__device__ __forceinline__ int column(int first, int vector, Row const& row) {
  return first + (vector * kThreadsPerRow + row.thread) * kVector;
}

__device__ __forceinline__ void load_vector(const float* from, float (&to)[kVector]) {
  if constexpr (kVector >= 4) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  } else if constexpr (kVector == 2) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
  } else {
    to[0] = *from;
  }
}

// The tile of columns that begins at `first`, scaled; hidden columns are -inf. All reads are issued
// before the first is used: a column past the end reads the last visible vector again, because a
// predicate for each read would run out of predicate registers and serialise them.
__device__ __forceinline__ void load_tile(Row const& row, int first, Values& values) {
  if (first + kTile <= row.visible) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_vector(row.scores + column(first, v, row), values[v]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[v][i] = __fmul_rn(values[v][i], row.scale_log2);
    return;
  }
  if (first < row.visible) {
    const int last = (row.visible - 1) / kVector * kVector;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      load_vector(row.scores + min(column(first, v, row), last), values[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int remaining = row.visible - column(first, v, row);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      values[v][i] = i < remaining ? __fmul_rn(values[v][i], row.scale_log2) : -infinity();
  }
}

__device__ __forceinline__ void store_tile(Row const& row, int first, Values const& values,
                                           float factor) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int begin = column(first, v, row);
    if (begin >= row.writable) continue;
    uint16_t* to = row.probabilities + begin;
    if constexpr (kVector == 1) {
      *to = static_cast<uint16_t>(pack(values[v][0] * factor, 0.0f));
    } else {
      uint32_t packed[(kVector + 1) / 2];
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i)
        packed[i] = pack(values[v][2 * i] * factor, values[v][2 * i + 1] * factor);
      if constexpr (kVector == 2) *reinterpret_cast<uint32_t*>(to) = packed[0];
      if constexpr (kVector == 4) *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
      if constexpr (kVector == 8)
        *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

__device__ __forceinline__ float tile_max(Values const& values, float start) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int i = 0; i < kVector; ++i) start = fmaxf(start, values[v][i]);
  return start;
}

// Replaces each value by exp2(value - maximum) and returns their sum.
__device__ __forceinline__ float tile_exp(Values& values, float maximum) {
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[v][i] = exp2_approx(values[v][i] - maximum);
      sum += values[v][i];
    }
  return sum;
}

__device__ __forceinline__ void one_pass(Row const& row) {
  Values values;
  load_tile(row, 0, values);
  const float maximum = lanes_max(tile_max(values, kLowest), row.lanes);
  const float sum = lanes_sum(tile_exp(values, maximum), row.lanes);
  const Statistics all = combine<0>({maximum, sum}, row);
  store_tile(row, 0, values, row.factor * __fdividef(exp2_approx(maximum - all.maximum), all.sum));
}

// The loops over tiles are not unrolled: a tile holds the reads in flight, and ptxas spilled when
// nvcc unrolled three of them.
__device__ __forceinline__ Statistics online_statistics(Row const& row) {
  Statistics mine{kLowest, 0.0f};
#pragma unroll 1
  for (int first = 0; first < row.visible; first += kTile) {
    Values values;
    load_tile(row, first, values);
    const float maximum = tile_max(values, mine.maximum);
    mine.sum = mine.sum * exp2_approx(mine.maximum - maximum) + tile_exp(values, maximum);
    mine.maximum = maximum;
  }
  const float maximum = lanes_max(mine.maximum, row.lanes);
  const float sum = lanes_sum(mine.sum * exp2_approx(mine.maximum - maximum), row.lanes);
  return combine<0>({maximum, sum}, row);
}

__device__ __forceinline__ Statistics separate_statistics(Row const& row) {
  float maximum = kLowest;
#pragma unroll 1
  for (int first = 0; first < row.visible; first += kTile) {
    Values values;
    load_tile(row, first, values);
    maximum = tile_max(values, maximum);
  }
  maximum = combine<0>({lanes_max(maximum, row.lanes), 0.0f}, row).maximum;
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < row.visible; first += kTile) {
    Values values;
    load_tile(row, first, values);
    sum += tile_exp(values, maximum);
  }
  return combine<1>({maximum, lanes_sum(sum, row.lanes)}, row);
}

__device__ __forceinline__ void write_row(Row const& row, Statistics all, bool overlaid) {
  const float factor = __fdividef(row.factor, all.sum);
#pragma unroll 1
  for (int first = 0; first < row.cols; first += kTile) {
    Values values;
    load_tile(row, first, values);
    tile_exp(values, all.maximum);
    if (overlaid) row_barrier(row);
    store_tile(row, first, values, factor);
  }
}

__global__ void __launch_bounds__(kBlock) softmax_golden(const Params params) {
  // Nothing of the kernel before may be read sooner; the kernel after waits in the same way, so it
  // may come as soon as there is room.
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t index = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
  const bool present = index < params.rows;
  Row row;
  row.scores = params.scores + index * params.stride_scores;
  row.probabilities = params.probabilities + index * params.stride_probabilities;
  row.cols = params.cols;
  row.writable = present ? params.cols : 0;
  row.visible = row.writable;
  if constexpr (kCausal)
    row.visible = min(row.visible, static_cast<int>(index) % params.query_rows + 1);
  row.thread = threadIdx.x % kThreadsPerRow;
  const int first_lane = threadIdx.x % kWarp / kLanes * kLanes;
  row.lanes = kLanes == kWarp ? 0xffffffffu : ((1u << kLanes % kWarp) - 1u) << first_lane;
  row.scale_log2 = params.scale_log2;
  row.factor = params.factor;
  if constexpr (kPasses == 1) {
    one_pass(row);
  } else if constexpr (kPasses == 2) {
    write_row(row, online_statistics(row), params.overlaid);
  } else {
    write_row(row, separate_statistics(row), params.overlaid);
  }
}

struct Tensors { void *scores, *probabilities; };
struct Integers { int64_t rows, cols, stride_scores, stride_probabilities, query_rows, pdl; };
struct Scalars { double scale, factor; };

// A matrix of `width` bytes an element, that rows of `cols` and whole vectors fit.
inline bool fits(const void* matrix, int64_t width, int64_t stride, int64_t cols) {
  const int64_t bytes = kVector * width < 16 ? kVector * width : 16;
  return stride >= cols && stride % kVector == 0 && matrix != nullptr && reinterpret_cast<uintptr_t>(matrix) % bytes == 0;
}

inline bool valid(Tensors const& tensors, Integers const& call) {
  if (call.rows < 1 || call.rows > INT32_MAX || call.cols < 1 || call.cols > kMaxCols) return false;
  if (kPasses == 1 && call.cols > kTile) return false;
  if (!fits(tensors.scores, sizeof(float), call.stride_scores, call.cols) ||
      !fits(tensors.probabilities, sizeof(uint16_t), call.stride_probabilities, call.cols))
    return false;
  if (tensors.scores == tensors.probabilities && call.stride_probabilities != 2 * call.stride_scores) return false;
  return !kCausal || (call.query_rows >= 1 && call.query_rows <= INT32_MAX);
}

inline cudaError_t launch(Tensors const& tensors, Integers const& call, Scalars const& scalars,
                          cudaStream_t stream) {
  if (!valid(tensors, call)) return cudaErrorInvalidValue;
  Params params{};
  params.scores = static_cast<const float*>(tensors.scores);
  params.probabilities = static_cast<uint16_t*>(tensors.probabilities);
  params.rows = static_cast<int>(call.rows);
  params.cols = static_cast<int>(call.cols);
  params.stride_scores = call.stride_scores;
  params.stride_probabilities = call.stride_probabilities;
  params.query_rows = static_cast<int>(call.query_rows);
  params.overlaid = tensors.scores == tensors.probabilities;
  params.scale_log2 = static_cast<float>(scalars.scale * kLog2E);
  params.factor = static_cast<float>(scalars.factor);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((call.rows + kRowsPerBlock - 1) / kRowsPerBlock));
  config.blockDim = dim3(kBlock);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = call.pdl != 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, softmax_golden, params);
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t*, int64_t* bytes) {
  *bytes = 0;
  return 0;
}

extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers,
                                     const double* scalars, void*, void* stream) {
  using namespace k_golden;
  return static_cast<int>(k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
                                             static_cast<cudaStream_t>(stream)));
}
