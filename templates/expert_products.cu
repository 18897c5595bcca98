// Both products of a mixture of experts whose experts have few rows each, in bf16 with fp32 sums. A *tile* is up to
// `tile_rows` rows of one expert. Rows, slots and places are those of `expert_rows.cu`.
//
//   place the slots' places and the experts' offsets, of up to 512 slots, and what follows
//   list  the slot of each row, and the tiles
//   up    silu(gate) * up of each row's token: weights (G, 2 I, H), gate before up
//   down  the product of each row: weights (G, H, I)
//
// A thread block has a tile and some columns. Its warps multiply 32 of the weights' rows each, as the left operand of
// mma.sync, and the tile's rows are the right one. The weights are read once a tile. Where there are few thread blocks,
// groups of warps share the depth, and the first adds their sums. All results are the same from run to run.
//
// Compiled with TUNER_KERNEL, the end of its functions' names.
//
// Arguments (their order: tuner/compile/single.py)
//   rows         bf16, 16-byte aligned: the tokens' (up), or one for each place (down)
//   weights      bf16, 16-byte aligned, contiguous
//   experts      of each slot, int32 or int64; out of range: none (place)
//   offsets      int32, G + 1: first row of each expert, and the last one's end (written by place)
//   places       int32, a slot's row or -1 (written by place, read by list)
//   order        int32, a row's slot (written by place and list, read by up)
//   tiles        int32 pairs, expert and first row of each tile; expert -1 behind the last (written by both)
//   out          bf16, 16-byte aligned: a row for each place
//   stage        as below
//   slot_count   tokens times slots of a token
//   top_k        slots of a token
//   expert_count G
//   columns      of out, a multiple of 8
//   depth        of the sums, a multiple of 8
//   row_stride   between rows, a multiple of 8
//   tile_rows    16, 32 or 64
//   tile_count   tiles, or more
//   width        bytes of an expert's number, 4 or 8 (place)
//   is_narrow    1: half the columns a thread block, and up to three groups of two warps
//   pdl          1: launch with programmatic stream serialization
// Tensors of other stages are null.
#include <atomic>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "ptx.h"

namespace {

using namespace tuner;

// As `arguments.cu.j2` makes them: a test compares both.
struct Tensors { void *experts, *rows, *weights, *offsets, *places, *order, *tiles, *out; };
struct Integers { int64_t stage, slot_count, top_k, expert_count, columns, depth, row_stride, tile_rows, tile_count, width, is_narrow, pdl; };

enum Stage { kPlace, kList, kUp, kDown };

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarp = 32, kVector = 8;
constexpr int kMaxExperts = 512, kListThreads = 512, kListWarps = kListThreads / kWarp;
constexpr int kDepth = 64;              // of a step
constexpr int kLine = 2 * kDepth;       // bytes of a row of a step
constexpr int kChunks = kLine / 16;     // copies of a thread's 16 bytes that make a row
constexpr int kKnownDevices = 64;

static_assert(kMaxExperts == kListThreads, "a thread for each expert");

using Element = __nv_bfloat16;

// Sum of a thread's value and those of the threads before it; `sums` is the block's. All threads call it.
__device__ __forceinline__ int sum_through(int value, int* sums, int& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += below;
  }
  __syncthreads();
  if (lane == kWarp - 1) sums[warp] = value;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kListWarps; ++w) {
    if (w < warp) value += sums[w];
    total += sums[w];
  }
  return value;
}

// With `kPlaces` the experts of the slots are given, and one thread block computes offsets and places first.
template <bool kPlaces>
__global__ void __launch_bounds__(kListThreads) list(const void* __restrict__ experts, int width, int* __restrict__ offsets, int* __restrict__ places,
                                                     int* __restrict__ order, int2* __restrict__ tiles, int64_t slots, int experts_count,
                                                     int tile_rows, int tile_count) {
  __shared__ int sums[kListWarps], owners[kListThreads], firsts[kMaxExperts];
  grid_dependency_wait();
  grid_dependency_launch();
  const int own = threadIdx.x;  // slot, and expert
  const int64_t slot = int64_t(blockIdx.x) * kListThreads + own;
  int first = 0, rows = 0, total;
  if constexpr (kPlaces) {
    int expert = -1;
    if (slot < slots) {
      const int64_t named = width == 8 ? static_cast<const int64_t*>(experts)[slot] : static_cast<const int32_t*>(experts)[slot];
      if (named >= 0 && named < experts_count) expert = static_cast<int>(named);
    }
    owners[own] = expert;
    __syncthreads();
    int before = 0;  // slots of the same expert
    for (int other = 0; other < slots; ++other) {
      const int owner = owners[other];
      before += owner == expert && other < own;
      rows += owner == own;
    }
    if (own >= experts_count) rows = 0;
    const int through = sum_through(rows, sums, total);
    first = through - rows;
    firsts[own] = first;
    if (own == 0) offsets[0] = 0;
    if (own < experts_count) offsets[own + 1] = through;
    __syncthreads();
    const int place = expert < 0 ? -1 : firsts[expert] + before;
    if (slot < slots) places[slot] = place;
    if (place >= 0) order[place] = own;
  } else {
    if (slot < slots)
      if (const int place = places[slot]; place >= 0) order[place] = static_cast<int>(slot);
    if (blockIdx.x != 0) return;
    if (own < experts_count) {
      first = offsets[own];
      rows = offsets[own + 1] - first;
    }
  }
  const int count = (rows + tile_rows - 1) / tile_rows;
  const int start = sum_through(count, sums, total) - count;
  for (int i = 0; i < count; ++i)
    if (start + i < tile_count) tiles[start + i] = make_int2(own, first + i * tile_rows);
  for (int i = total + own; i < tile_count; i += kListThreads) tiles[i] = make_int2(-1, 0);
}

// 16 bytes to shared memory; zeros where they are not there.
__device__ __forceinline__ void copy_vector(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
__device__ __forceinline__ void wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

__device__ __forceinline__ uint4 load_matrices(uint32_t from) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}

// Byte of a vector in a step's rows: the eight vectors of a row are swizzled by the row.
__device__ __forceinline__ uint32_t at(int row, int chunk) { return row * kLine + ((chunk ^ (row & 7)) << 4); }

__device__ __forceinline__ float gated(float gate, float up) { return __fdiv_rn(gate, 1.0f + expf(-gate)) * up; }

template <int kRows, int kWarps, bool kIsUp>
struct Product {
  static constexpr int kGroups = kWarps == 2 && kRows <= 32 ? 3 : 1;  // of warps that share the depth
  static constexpr int kThreads = kWarps * kWarp;                    // of a group
  static constexpr int kHalf = kWarps * 16, kWeights = 2 * kHalf;  // the weights' rows of a step; gate and up, or side by side
  static constexpr int kWidth = kIsUp ? kHalf : kWeights;          // columns of out
  static constexpr int kLines = kThreads / kChunks;                // rows that the threads copy at once
  static constexpr int kTurns = kHalf / kLines;
  static constexpr int kRowTurns = (kRows + kLines - 1) / kLines;
  static constexpr int kStages = kGroups > 1 ? 3 : kWarps == 2 ? 6 : 4;
  static constexpr int kStageBytes = (kWeights + kRows) * kLine;
  static constexpr int kGroupBytes = kStages * kStageBytes, kSharedBytes = kGroups * kGroupBytes;
  static constexpr int kSums = kRows;  // of a thread
  static constexpr int kPitch = kWidth + kVector;  // of a row of the results in shared memory
  static_assert(kRows * kPitch * int(sizeof(Element)) <= kSharedBytes, "results lie over the stages");
  static_assert((kGroups - 1) * kSums * kThreads * int(sizeof(float)) <= kSharedBytes, "sums lie over the stages");
  static_assert(kLines % 8 == 0, "a thread's rows are swizzled alike");
};

// Waits for the threads of a group.
template <int kGroups, int kThreads>
__device__ __forceinline__ void meet(int group) {
  if constexpr (kGroups == 1) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
  }
}

template <int kRows, int kWarps, bool kIsUp>
__global__ void __launch_bounds__(Product<kRows, kWarps, kIsUp>::kThreads * Product<kRows, kWarps, kIsUp>::kGroups) product(const Element* __restrict__ rows, const Element* __restrict__ weights,
                                                          const int* __restrict__ offsets, const int* __restrict__ order,
                                                          const int2* __restrict__ tiles, Element* __restrict__ out, int top_k, int columns,
                                                          int depth, int64_t row_stride) {
  using P = Product<kRows, kWarps, kIsUp>;
  extern __shared__ __align__(128) uint8_t shared[];
  grid_dependency_wait();
  grid_dependency_launch();
  const int2 tile = tiles[blockIdx.x];
  if (tile.x < 0) return;
  const int left = min(kRows, offsets[tile.x + 1] - tile.y);
  const int group = threadIdx.x / P::kThreads, thread = threadIdx.x % P::kThreads;
  const int line = thread / kChunks, chunk = thread % kChunks;
  const int first = blockIdx.y * P::kWidth;
  const Element* const matrix = weights + int64_t(tile.x) * (kIsUp ? 2 : 1) * columns * depth + chunk * kVector;
  const Element* const low = matrix + int64_t(first + line) * depth;
  const Element* const high = matrix + int64_t((kIsUp ? columns + first : first + P::kHalf) + line) * depth;
  const int low_rows = columns - first - line, high_rows = kIsUp ? low_rows : low_rows - P::kHalf;
  const Element* x[P::kRowTurns];
#pragma unroll
  for (int turn = 0; turn < P::kRowTurns; ++turn) {
    const int row = line + turn * P::kLines;
    const int64_t index = row >= left ? 0 : kIsUp ? order[tile.y + row] / top_k : tile.y + row;
    x[turn] = rows + index * row_stride + chunk * kVector;
  }
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + group * P::kGroupBytes;
  const uint32_t mine = at(line, chunk);
  const int all_steps = (depth + kDepth - 1) / kDepth, steps = (all_steps + P::kGroups - 1 - group) / P::kGroups;

  auto const load = [&](int step) {
    const int k = (step * P::kGroups + group) * kDepth;
    const bool is_inside = k + chunk * kVector < depth;
    const uint32_t to = base + step % P::kStages * P::kStageBytes + mine;
#pragma unroll
    for (int turn = 0; turn < P::kTurns; ++turn) {
      const int row = turn * P::kLines;
      const bool has_low = is_inside && row < low_rows, has_high = is_inside && row < high_rows;
      copy_vector(to + row * kLine, has_low ? low + int64_t(row) * depth + k : weights, has_low);
      copy_vector(to + (P::kHalf + row) * kLine, has_high ? high + int64_t(row) * depth + k : weights, has_high);
    }
#pragma unroll
    for (int turn = 0; turn < P::kRowTurns; ++turn) {
      const int row = line + turn * P::kLines;
      if (row >= kRows) break;
      const bool has = is_inside && row < left;
      copy_vector(to + (P::kWeights + turn * P::kLines) * kLine, has ? x[turn] + k : rows, has);
    }
  };

  float sums[2][kRows / 8][4] = {};
  const int warp = thread / kWarp, lane = thread % kWarp;
  for (int step = 0; step < P::kStages - 1; ++step) {
    if (step < steps) load(step);
    commit();
  }
  for (int step = 0; step < steps; ++step) {
    wait_but<P::kStages - 2>();
    meet<P::kGroups, P::kThreads>(group);
    if (step + P::kStages - 1 < steps) load(step + P::kStages - 1);
    commit();
    const uint32_t from = base + step % P::kStages * P::kStageBytes;
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
      const int row = warp * 16 + lane % 16;
      uint4 a[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) a[half] = load_matrices(from + at(half * P::kHalf + row, 2 * part + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kRows / 16; ++pair) {
        const int column = pair * 16 + lane / 16 * 8 + lane % 8;
        const uint4 b = load_matrices(from + P::kWeights * kLine + at(column, 2 * part + lane / 8 % 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_bf16(sums[half][2 * pair], a[half], b.x, b.y);
          multiply_bf16(sums[half][2 * pair + 1], a[half], b.z, b.w);
        }
      }
    }
  }
  wait_but<0>();
  __syncthreads();
  if constexpr (P::kGroups > 1) {
    float* const parts = reinterpret_cast<float*>(shared) + thread;
    float* const flat = &sums[0][0][0];
#pragma unroll
    for (int i = 0; i < P::kSums; ++i)
      if (group != 0) parts[((group - 1) * P::kSums + i) * P::kThreads] = flat[i];
    __syncthreads();
    if (group != 0) return;
#pragma unroll
    for (int other = 0; other < P::kGroups - 1; ++other)
#pragma unroll
      for (int i = 0; i < P::kSums; ++i) flat[i] += parts[(other * P::kSums + i) * P::kThreads];
    meet<P::kGroups, P::kThreads>(group);
  }

  Element* const results = reinterpret_cast<Element*>(shared);
#pragma unroll
  for (int pair = 0; pair < kRows / 8; ++pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = pair * 8 + lane % 4 * 2 + i % 2, column = warp * 16 + lane / 4 + i / 2 * 8;
      if constexpr (kIsUp) {
        results[row * P::kPitch + column] = __float2bfloat16_rn(gated(sums[0][pair][i], sums[1][pair][i]));
      } else {
        results[row * P::kPitch + column] = __float2bfloat16_rn(sums[0][pair][i]);
        results[row * P::kPitch + P::kHalf + column] = __float2bfloat16_rn(sums[1][pair][i]);
      }
    }
  }
  meet<P::kGroups, P::kThreads>(group);
  constexpr int kVectors = P::kWidth / kVector;
  for (int i = thread; i < left * kVectors; i += P::kThreads) {
    const int row = i / kVectors, column = i % kVectors * kVector;
    if (first + column < columns)
      *reinterpret_cast<uint4*>(out + int64_t(tile.y + row) * columns + first + column) =
          *reinterpret_cast<const uint4*>(results + row * P::kPitch + column);
  }
}

// Allows the kernel its shared memory, once a device.
template <int kRows, int kWarps, bool kIsUp>
cudaError_t prepare() {
  static std::atomic<bool> known[kKnownDevices];
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kKnownDevices && known[device].load()) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(product<kRows, kWarps, kIsUp>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 Product<kRows, kWarps, kIsUp>::kSharedBytes);
  if (error == cudaSuccess && device < kKnownDevices) known[device].store(true);
  return error;
}

template <int kRows, int kWarps, bool kIsUp>
cudaError_t launch(Tensors const& tensors, Integers const& call, cudaLaunchConfig_t& config) {
  using P = Product<kRows, kWarps, kIsUp>;
  if (cudaError_t error = prepare<kRows, kWarps, kIsUp>(); error != cudaSuccess) return error;
  config.gridDim = dim3(static_cast<unsigned>(call.tile_count), static_cast<unsigned>((call.columns + P::kWidth - 1) / P::kWidth));
  config.blockDim = dim3(P::kThreads * P::kGroups);
  config.dynamicSmemBytes = P::kSharedBytes;
  const Element *rows = static_cast<const Element*>(tensors.rows), *weights = static_cast<const Element*>(tensors.weights);
  const int *offsets = static_cast<const int*>(tensors.offsets), *order = static_cast<const int*>(tensors.order);
  return cudaLaunchKernelEx(&config, product<kRows, kWarps, kIsUp>, rows, weights, offsets, order, static_cast<const int2*>(tensors.tiles),
                            static_cast<Element*>(tensors.out), static_cast<int>(call.top_k), static_cast<int>(call.columns),
                            static_cast<int>(call.depth), call.row_stride);
}

template <int kRows>
cudaError_t launch(Tensors const& tensors, Integers const& call, cudaLaunchConfig_t& config) {
  const bool is_up = call.stage == kUp;
  if (call.is_narrow) return is_up ? launch<kRows, 2, true>(tensors, call, config) : launch<kRows, 2, false>(tensors, call, config);
  return is_up ? launch<kRows, 4, true>(tensors, call, config) : launch<kRows, 4, false>(tensors, call, config);
}

constexpr int64_t kMaxColumns = int64_t(65535) * 2 * 16;  // of a grid's blocks along y, the narrowest

bool valid(Integers const& call) {
  const bool is_known = call.stage >= kPlace && call.stage <= kDown && (call.tile_rows == 16 || call.tile_rows == 32 || call.tile_rows == 64);
  if (!is_known || call.slot_count < 1 || call.slot_count > (1 << 30) || call.top_k < 1 || call.top_k > call.slot_count) return false;
  if (call.expert_count < 1 || call.expert_count > kMaxExperts || call.tile_count < 1 || call.tile_count > (1 << 30)) return false;
  if (call.stage == kPlace) return call.slot_count <= kListThreads && (call.width == 4 || call.width == 8);
  if (call.stage == kList) return true;
  const bool is_cut = call.columns % kVector != 0 || call.depth % kVector != 0 || call.row_stride % kVector != 0;
  return !is_cut && call.columns >= 1 && call.columns <= kMaxColumns && call.depth >= 1 && call.depth < (1 << 21) && call.row_stride >= 0 &&
         call.row_stride < (int64_t(1) << 36);
}

bool misses(const void* tensor, uintptr_t alignment) {
  return tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % alignment != 0;
}

cudaError_t launch(Tensors const& tensors, Integers const& call, cudaStream_t stream) {
  if (!valid(call)) return cudaErrorInvalidValue;
  if (misses(tensors.offsets, 4) || misses(tensors.order, 4) || misses(tensors.tiles, 8)) return cudaErrorMisalignedAddress;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = call.pdl != 0;
  if (call.stage == kPlace || call.stage == kList) {
    const bool places = call.stage == kPlace;
    if (misses(tensors.places, 4) || (places && misses(tensors.experts, call.width))) return cudaErrorMisalignedAddress;
    config.gridDim = dim3(static_cast<unsigned>((call.slot_count + kListThreads - 1) / kListThreads));
    config.blockDim = dim3(kListThreads);
    return cudaLaunchKernelEx(&config, places ? list<true> : list<false>, static_cast<const void*>(tensors.experts), static_cast<int>(call.width),
                              static_cast<int*>(tensors.offsets), static_cast<int*>(tensors.places), static_cast<int*>(tensors.order),
                              static_cast<int2*>(tensors.tiles), call.slot_count, static_cast<int>(call.expert_count),
                              static_cast<int>(call.tile_rows), static_cast<int>(call.tile_count));
  }
  if (misses(tensors.rows, 16) || misses(tensors.weights, 16) || misses(tensors.out, 16)) return cudaErrorMisalignedAddress;
  switch (call.tile_rows) {
    case 16: return launch<16>(tensors, call, config);
    case 32: return launch<32>(tensors, call, config);
    default: return launch<64>(tensors, call, config);
  }
}

}  // namespace

#include "exported.h"
