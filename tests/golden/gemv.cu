#include <atomic>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "pipeline.h"
#include "ptx.h"

namespace k_golden {

using namespace tuner;

constexpr int kWarps = 8;
constexpr int kKWarps = 8;
constexpr int kRowTiles = 2;
constexpr int kPieces = 4;
constexpr int kStages = 3;
constexpr int kBlocksPerSm = 2;
constexpr bool kWide = false;
constexpr int kMaxM = kWide ? 16 : 8;

using Input = __half;
using Output = __half;

constexpr int kWarp = 32;
constexpr int kConsumers = kWarps * kWarp;
constexpr int kThreads = kConsumers + kWarp;
constexpr int kPieceK = 32;  // four lanes of a row, eight elements each
constexpr int kWarpK = kPieceK * kPieces;
constexpr int kStepK = kWarpK * kKWarps;
constexpr int kWarpRows = 8 * kRowTiles;
constexpr int kRows = kWarpRows * (kWarps / kKWarps);
// Rows of shared memory start 64 bytes apart, modulo 128: the eight lanes of two rows read every bank.
constexpr int odd_pitch(int bytes) { return (bytes + 127) / 128 * 128 + 64; }
__host__ __device__ constexpr int a_rows(int m) { return kWide ? 16 : m; }
constexpr int kPitch = odd_pitch(kStepK * 2);
constexpr int kStageBytes = kRows * kPitch;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kMaxSmem = 232448 - 1024;
constexpr int kKnownDevices = 64;

static_assert(kWarps % kKWarps == 0 && kThreads <= 1024, "k_warps divides warps, up to 1024 threads");
static_assert(kStages >= 2, "a step is copied while another is used");

enum NamedBarrier { kConsumersMeet = 1 };

struct Params {
  const Input* a;
  const Input* b;
  Output* d;
  const Input* bias;
  const Output* residual;
  int m, n, k;
  int tiles;    // blocks of rows of B
  int padded_k;  // whole steps of K
  int pitch_a;   // bytes between A's rows in shared memory
  int lead;
  int64_t lda, ldb, ldd, batch_a, batch_b, batch_d;
  float alpha, beta;
};

// The warps that multiply, without the one that copies.
__device__ __forceinline__ void meet() { named_barrier(kConsumersMeet, kConsumers); }

struct Lane {
  int row, column;  // of eight rows, and the first of eight elements among 32
  int warp_k, warp_n;

  __device__ __forceinline__ Lane()
      : row(threadIdx.x % kWarp / 4), column(threadIdx.x % 4 * 8),
        warp_k(threadIdx.x / kWarp % kKWarps), warp_n(threadIdx.x / kWarp / kKWarps) {}
};

// Of a row tile: of the first and of the second half of each piece. An instruction has 16 rows: with up to
// 8 the first half's are its rows 0-7 and the second half's its rows 8-15, and the others mean nothing.
using Sums = float[kRowTiles][2][4];

// A in shared memory holds what a lane gives to an instruction as 16 contiguous bytes: two elements each of
// row g, row g + 8, row g, row g + 8. For up to 8 rows those of the other half of the piece are in row g +
// 8's place, so that one read serves both instructions; else each half has a plane of its own. Zero from K
// to the next multiple of `padded`. By all consumers.
__device__ __forceinline__ void keep_a(Params const& p, char* to) {
  const Input* a = p.a + blockIdx.y * p.batch_a;
  const int vectors = p.padded_k / 8;
  for (int row = 0; row < p.m; ++row)
    for (int i = threadIdx.x; i < vectors; i += kConsumers) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (i * 8 < p.k) v = __ldcg(reinterpret_cast<const uint4*>(a + row * p.lda + i * 8));
      if constexpr (kWide) {
        auto* first = reinterpret_cast<uint32_t*>(to + row % 8 * p.pitch_a + i * 16) + row / 8;
        auto* second = first + 2 * p.pitch_a;  // eight rows further
        first[0] = v.x, first[2] = v.y, second[0] = v.z, second[2] = v.w;
      } else {
        *reinterpret_cast<uint4*>(to + row * p.pitch_a + i * 16) = make_uint4(v.x, v.z, v.y, v.w);
      }
    }
  meet();
}

// A warp's pieces of one step. `a` is where the lane reads A; rows beyond M read another's and are not
// stored.
template <class Weights>
__device__ __forceinline__ void add_step(Params const& p, uint32_t a, Weights&& weights, Sums& sums) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const uint4 first = load_shared_words(a + piece * kPieceK * 2);
    const uint4 second = kWide ? load_shared_words(a + piece * kPieceK * 2 + 8 * p.pitch_a) : first;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint4 w = weights(tile, piece);
      multiply_fp16(sums[tile][0], first, w.x, w.y);
      multiply_fp16(sums[tile][1], second, w.z, w.w);
    }
  }
}

__device__ __forceinline__ float activated(float x) {
  return x;
}

// Adds what the warps have of a block's rows, in a fixed order, and stores the result. Two buffers in
// turn: who writes one again has met all that read it.
__device__ __forceinline__ void finish(Params const& p, Lane const& lane, int tile, float* parts, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < (kWide ? 2 : 1); ++half) {
      const int m = lane.row + 8 * half, other = kWide ? 2 * half : 2;
      if (m < p.m)
        *reinterpret_cast<float2*>(parts + (lane.warp_k * p.m + m) * kRows + lane.warp_n * kWarpRows + 8 * i +
                                   lane.column / 4) =
            make_float2(sums[i][0][2 * half] + sums[i][1][other],
                        sums[i][0][2 * half + 1] + sums[i][1][other + 1]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[i][j / 4][j % 4] = 0.0f;
  }
  meet();
  for (int i = threadIdx.x; i < p.m * kRows; i += kConsumers) {
    const int64_t m = i / kRows, n = int64_t(tile) * kRows + i % kRows;
    if (n >= p.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kKWarps; ++warp) sum += parts[warp * p.m * kRows + i];
    float x = p.alpha * sum;
    const int64_t at = blockIdx.y * p.batch_d + m * p.ldd + n;
    p.d[at] = static_cast<Output>(activated(x));
  }
}

__device__ __forceinline__ const Input* row_of(Params const& p, int row) {
  return p.b + blockIdx.y * p.batch_b + min(row, p.n - 1) * p.ldb;
}

// Weights that the L2 fetches while the kernel in front still runs: nothing is read of them yet, and what
// that kernel writes goes through the L2.
__device__ __forceinline__ void fetch_ahead(Params const& p) {
  const int bytes = 2 * min(p.lead, p.k);
  for (int row = threadIdx.x; row < kRows && bytes > 0; row += kThreads)
    fetch_bytes(row_of(p, blockIdx.x * kRows + row), bytes);
}

__device__ __forceinline__ void wait_for_kernel_in_front() {
  grid_dependency_wait();
  // The kernel behind waits in the same way: it may come as soon as there is room.
  grid_dependency_launch();
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) gemv_golden(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  char* const kept = shared + kRingBytes;
  float* parts = reinterpret_cast<float*>(kept + a_rows(p.m) * p.pitch_a);
  const int part_of_parts = kKWarps * p.m * kRows;
  const uint64_t policy = evict_first_policy();  // B is read once
  const Lane lane;
  // Rows beyond M read the last one.
  const uint32_t a = shared_address(kept) + (kWide ? lane.row : min(lane.row, p.m - 1)) * p.pitch_a +
                     (lane.warp_k * kWarpK + lane.column) * 2;
  Sums sums{};
  int parity = 0;
  fetch_ahead(p);
  __shared__ uint64_t full[kStages], free[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared_address(full + stage), 1);
      init_barrier(shared_address(free + stage), kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_kernel_in_front();
  int stage = 0, phase = 0;
  const auto advance = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };
  if (threadIdx.x >= kConsumers) {
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x)
      for (int k = 0; k < p.k; k += kStepK, advance()) {
        const uint32_t barrier = shared_address(full + stage);
        wait_for(shared_address(free + stage), phase ^ 1);  // the first time round it is
        const int bytes = 2 * min(kStepK, p.k - k);
        if (threadIdx.x == kConsumers) arrive_expecting(barrier, bytes * kRows);
        __syncwarp();
        for (int row = threadIdx.x - kConsumers; row < kRows; row += kWarp)
          copy_bytes(shared_address(shared) + stage * kStageBytes + row * kPitch, row_of(p, tile * kRows + row) + k, bytes,
                     barrier, policy);
      }
    return;
  }
  keep_a(p, kept);
  const uint32_t mine = shared_address(shared) + (lane.warp_n * kWarpRows + lane.row) * kPitch +
                        (lane.warp_k * kWarpK + lane.column) * 2;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    for (int k = 0; k < p.k; k += kStepK, advance()) {
      const uint32_t b = mine + stage * kStageBytes;
      const int left = p.k - k - lane.warp_k * kWarpK - lane.column;
      const bool whole = p.k - k >= kStepK;
      wait_for(shared_address(full + stage), phase);
      add_step(p, a + k * 2,
               [&](int i, int piece) {
                 const uint4 w = load_shared_words(b + 8 * i * kPitch + piece * kPieceK * 2);
                 // Beyond K is what was there before: not even zero times it is sure to be zero.
                 return whole || piece * kPieceK < left ? w : make_uint4(0, 0, 0, 0);
               }, sums);
      async_copy_fence();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) arrive(shared_address(free + stage));
    }
    finish(p, lane, tile, parts + (parity ^= 1) * part_of_parts, sums);
  }
}

inline int padded(int64_t k) { return static_cast<int>((k + kStepK - 1) / kStepK * kStepK); }

inline int64_t smem_bytes(int64_t m, int64_t k) {
  return kRingBytes + int64_t(a_rows(m)) * odd_pitch(padded(k) * 2) + 2 * 4 * kKWarps * m * kRows;
}

struct Tensors { void *a, *b, *d; };
struct Integers { int64_t m, n, k, batch, lda, ldb, ldd, batch_a, batch_b, batch_d, persistent, pdl, lead; };
struct Scalars { double alpha; };

inline bool valid(Integers const& call) {
  for (int64_t extent : {call.m, call.n, call.k, call.batch})
    if (extent < 1 || extent > INT32_MAX) return false;
  const int64_t m = call.m, n = call.n, k = call.k, batch = call.batch;
  if (m > kMaxM || k % 8 != 0 || k > kMaxSmem || batch > 65535 || smem_bytes(m, k) > kMaxSmem) return false;
  if (call.lda < k || call.ldb < k || call.ldd < n || call.lda % 8 != 0 || call.ldb % 8 != 0)
    return false;
  return (batch == 1 || (call.batch_a % 8 == 0 && call.batch_b % 8 == 0)) && call.lead >= 0 &&
         call.lead % 8 == 0 && call.lead <= INT32_MAX;
}

// Multiprocessors, and all of their shared memory for this kernel; asked for once a device.
inline cudaError_t prepare(int* multiprocessors) {
  static std::atomic<int> known[kKnownDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kKnownDevices && (*multiprocessors = known[device].load()) > 0) return cudaSuccess;
  auto entry = &gemv_golden;
  error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSmem);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && device < kKnownDevices) known[device].store(*multiprocessors);
  return error;
}

inline cudaError_t launch(Tensors const& tensors, Integers const& call, Scalars const& scalars,
                          cudaStream_t stream) {
  if (!valid(call)) return cudaErrorInvalidValue;
  for (const void* tensor : {tensors.a, tensors.b, tensors.d})
    if (tensor == nullptr) return cudaErrorMisalignedAddress;
  if ((reinterpret_cast<uintptr_t>(tensors.a) | reinterpret_cast<uintptr_t>(tensors.b)) % 16 != 0)
    return cudaErrorMisalignedAddress;
  int multiprocessors = 0;
  if (cudaError_t error = prepare(&multiprocessors); error != cudaSuccess) return error;
  const bool batched = call.batch > 1;
  Params p{};
  p.a = static_cast<const Input*>(tensors.a);
  p.b = static_cast<const Input*>(tensors.b);
  p.d = static_cast<Output*>(tensors.d);
  p.m = static_cast<int>(call.m);
  p.n = static_cast<int>(call.n);
  p.k = static_cast<int>(call.k);
  p.tiles = (p.n - 1) / kRows + 1;
  p.padded_k = padded(p.k);
  p.pitch_a = odd_pitch(p.padded_k * 2);
  p.lead = call.pdl != 0 ? static_cast<int>(call.lead) : 0;
  p.lda = call.lda;
  p.ldb = call.ldb;
  p.ldd = call.ldd;
  p.batch_a = batched ? call.batch_a : 0;
  p.batch_b = batched ? call.batch_b : 0;
  p.batch_d = batched ? call.batch_d : 0;
  p.alpha = static_cast<float>(scalars.alpha);
  const int resident = multiprocessors * kBlocksPerSm;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(call.persistent != 0 && p.tiles > resident ? resident : p.tiles,
                        static_cast<unsigned>(call.batch));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes(p.m, p.k));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = call.pdl != 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, gemv_golden, p);
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t* integers, int64_t* bytes) {
  *bytes = 0;
  using namespace k_golden;
  return valid(view<Integers>(integers)) ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers,
                                     const double* scalars, void*, void* stream) {
  using namespace k_golden;
  return static_cast<int>(k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
                                             static_cast<cudaStream_t>(stream)));
}
