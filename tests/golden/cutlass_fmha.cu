// The softmax takes scale * maximum, which is rounded, off scale * score: where that is not rounded
// too, large scores leave a difference that no exponential holds.
// nvcc: -fmad=false
#include <cstdint>

#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/bfloat16.h"
#include "cutlass/device_kernel.h"
#include "cutlass/half.h"
#include "cutlass/kernel_hardware_info.h"

#include "collective/fmha_fusion.hpp"
#include "kernel/fmha_kernel_builder.hpp"

namespace k_golden {

using Element = cutlass::half_t;
using cutlass::fmha::kernel::Option;
using cutlass::fmha::kernel::Tag;

// Which keys a query sees. The example's masks do not combine, and its causal one counts too few
// masked tiles where tile_m and tile_n are not multiples of each other, hence one of our own.
struct Mask : cutlass::fmha::collective::DefaultFusion {
  static constexpr bool kCausal = false;
  static constexpr bool kResidual = false;

  // K/V tiles that the block visits: none lies wholly right of the diagonal of its last row.
  template <class Coord, class Tile, class Problem>
  CUTLASS_DEVICE int get_trip_count(Coord const& coord, Tile const& tile, Problem const& problem) {
    int const tile_n = cute::get<1>(tile);
    int columns = cute::get<3>(problem);
    if constexpr (kCausal) {
      int const rows_end = (int(cute::get<0>(coord)) + 1) * int(cute::get<0>(tile));
      columns = cute::min(columns, cute::min(rows_end, int(cute::get<2>(problem))));
    }
    return cute::ceil_div(columns, tile_n);
  }

  // Leading tiles of which every row of the block sees every key. Without a mask the count is 0 and
  // all tiles are "masked" (by nothing), so that only one of the two main loops is emitted.
  template <class Coord, class Tile, class Problem>
  CUTLASS_DEVICE int get_unmasked_trip_count(Coord const& coord, Tile const& tile, Problem const& problem) {
    if constexpr (!kCausal && !kResidual) {
      return 0;
    }
    int const tile_n = cute::get<1>(tile);
    int count = int(cute::get<3>(problem)) / tile_n;
    if constexpr (kCausal) {
      int const first_row = int(cute::get<0>(coord)) * int(cute::get<0>(tile));
      count = cute::min(count, (first_row + 1) / tile_n);
    }
    return count;
  }

  template <class Coord, class Tile, class Problem>
  CUTLASS_DEVICE int get_masked_trip_count(Coord const& coord, Tile const& tile, Problem const& problem) {
    return get_trip_count(coord, tile, problem) - get_unmasked_trip_count(coord, tile, problem);
  }

  template <class Scores, class Index, class Problem>
  CUTLASS_DEVICE void before_softmax(Scores& scores, Index const& index, Problem const& problem) {
    if constexpr (kCausal || kResidual) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(scores); i++) {
        auto const position = index(i);
        bool is_visible = true;
        if constexpr (kResidual) {
          is_visible = cute::get<1>(position) < cute::get<3>(problem);
        }
        if constexpr (kCausal) {
          is_visible = is_visible && cute::get<1>(position) <= cute::get<0>(position);
        }
        if (!is_visible) {
          scores(i) = -INFINITY;
        }
      }
    }
  }
};

using RowStride = cute::tuple<int, cute::_1, cute::tuple<int, int>>;
using TileShape = cute::Shape<cute::Int<64>, cute::Int<128>, cute::Int<64>>;

template <class Schedule, class... Options>
using Builder = cutlass::fmha::kernel::FmhaBuilder<Element, float, float, TileShape, RowStride, RowStride,
                                                   RowStride, Mask, Schedule, Options...>;
using Base = Builder<cutlass::gemm::KernelTma,
                     Option<Tag::kBlocksPerSM, cute::Int<3>>,
                     Option<Tag::kStagesQ, cute::Int<1>>,
                     Option<Tag::kStagesKV, cute::Int<4>>>::Kernel;
// A struct of its own, so that ptxas names it shortly.
struct kernel_golden : Base {};
using Kernel = kernel_golden;

struct Integers {
  int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim;
  int64_t query[3], key[3], value[3], out[3];  // strides: batch, head, row
  int64_t sm_count;
};

constexpr int64_t kMaxInt = INT32_MAX;

constexpr int failed(cutlass::Status status) { return -static_cast<int>(status); }

// TMA and the collectives' 32-bit strides: extents in range, strides whole 16-byte units.
inline cutlass::Status check(Integers const& n, void* const* tensors) {
  for (int64_t extent : {n.batch, n.heads_q, n.heads_kv, n.seqlen_q, n.seqlen_kv, n.head_dim}) {
    if (extent < 1 || extent > kMaxInt) return cutlass::Status::kErrorInvalidProblem;
  }
  if (n.heads_q % n.heads_kv != 0 || n.head_dim > 64) {
    return cutlass::Status::kErrorInvalidProblem;
  }
  if (!Mask::kResidual && n.seqlen_kv % 128 != 0) {
    return cutlass::Status::kErrorInvalidProblem;
  }
  constexpr int kUnit = 16 / sizeof(Element);
  bool is_aligned = n.head_dim % kUnit == 0;
  for (auto const* strides : {n.query, n.key, n.value, n.out}) {
    for (int i = 0; i < 3; i++) {
      is_aligned = is_aligned && strides[i] >= 0 && strides[i] % kUnit == 0;
    }
  }
  for (int i = 0; i < 4; i++) {
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(tensors[i]) % 16 == 0;
  }
  return is_aligned ? cutlass::Status::kSuccess : cutlass::Status::kErrorMisalignedOperand;
}

// One tensor's strides over the two outer modes that the collectives iterate.
struct Outer {
  int64_t first, second;
};

// The collectives know two outer modes, and the same coordinate indexes all four tensors. Without
// grouped heads they are (B, H). With them they are (H / HKV, B x HKV): the query heads of a group
// share a key head by a stride of 0, and batch and key head make one mode where they nest.
inline bool nests(Integers const& n, int64_t const* strides, int64_t group) {
  return n.batch == 1 || n.heads_kv == 1 || strides[0] == n.heads_kv * group * strides[1];
}

inline Outer outer(Integers const& n, int64_t const* strides, bool is_query) {
  if (n.heads_q == n.heads_kv) {
    return {n.batch > 1 ? strides[0] : 0, n.heads_q > 1 ? strides[1] : 0};
  }
  int64_t const group = is_query ? n.heads_q / n.heads_kv : 1;
  int64_t const second = n.heads_kv > 1 ? group * strides[1] : n.batch > 1 ? strides[0] : 0;
  return {is_query ? strides[1] : 0, second};
}

inline bool fits(Outer const& o, int64_t const* strides) {
  return o.first <= kMaxInt && o.second <= kMaxInt && strides[2] <= kMaxInt;
}

inline RowStride row_stride(Outer const& o, int64_t const* strides) {
  return cute::make_stride(int(strides[2]), cute::_1{}, cute::make_stride(int(o.first), int(o.second)));
}

inline int launch(void* const* tensors, int64_t const* integers, double const* scalars,
                  void* workspace, cudaStream_t stream) {
  Integers const& n = *reinterpret_cast<Integers const*>(integers);
  if (cutlass::Status status = check(n, tensors); status != cutlass::Status::kSuccess) {
    return failed(status);
  }
  // The running maximum is taken before scaling: right for positive scales only.
  if (!(scalars[0] > 0.0)) return failed(cutlass::Status::kErrorInvalidProblem);
  if (workspace == nullptr) return failed(cutlass::Status::kErrorWorkspaceNull);

  bool const is_grouped = n.heads_q != n.heads_kv;
  int64_t const group = n.heads_q / n.heads_kv;
  if (is_grouped && !(nests(n, n.query, group) && nests(n, n.out, group) && nests(n, n.key, 1) &&
                      nests(n, n.value, 1))) {
    return failed(cutlass::Status::kErrorNotSupported);
  }
  int64_t const first = is_grouped ? group : n.batch;
  int64_t const second = is_grouped ? n.batch * n.heads_kv : n.heads_q;
  Outer const query = outer(n, n.query, true), key = outer(n, n.key, false);
  Outer const value = outer(n, n.value, false), out = outer(n, n.out, true);
  if (second > kMaxInt || first * second > kMaxInt || !fits(query, n.query) || !fits(key, n.key) ||
      !fits(value, n.value) || !fits(out, n.out) || first * second * n.seqlen_q > kMaxInt) {
    return failed(cutlass::Status::kErrorInvalidProblem);
  }

  cutlass::KernelHardwareInfo hardware;
  hardware.sm_count = int(n.sm_count);
  if (hardware.sm_count <= 0) {
    cudaError_t error = cudaGetDevice(&hardware.device_id);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount,
                                   hardware.device_id);
    if (error != cudaSuccess) return error;
  }

  auto* lse = static_cast<float*>(workspace);
  typename Kernel::Arguments arguments{
      {int(first), int(second), int(n.seqlen_q), int(n.seqlen_kv), int(n.head_dim)},
      {static_cast<Element const*>(tensors[0]), row_stride(query, n.query),
       static_cast<Element const*>(tensors[1]), row_stride(key, n.key),
       static_cast<Element const*>(tensors[2]), row_stride(value, n.value)},
      {static_cast<Element*>(tensors[3]), row_stride(out, n.out), lse,
       cute::make_stride(cute::_1{}, cute::make_stride(int(second * n.seqlen_q), int(n.seqlen_q)))},
      hardware};
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, workspace);
  // The collectives derive the scale from D; the caller's goes in its place.
  params.mainloop.scale_softmax = float(scalars[0]);
  params.mainloop.scale_softmax_log2 = float(scalars[0] * 1.4426950408889634);

  auto* function = cutlass::device_kernel<Kernel>;
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           Kernel::SharedStorageSize);
  if (error != cudaSuccess) return error;
  dim3 const grid = Kernel::get_grid_shape(params);
  if (grid.y > 65535 || grid.z > 65535) return failed(cutlass::Status::kErrorInvalidProblem);
  void* arguments_of_kernel[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<void const*>(function), grid, Kernel::get_block_shape(),
                          arguments_of_kernel, Kernel::SharedStorageSize, stream);
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const* integers, int64_t* bytes) {
  auto const& n = *reinterpret_cast<k_golden::Integers const*>(integers);
  *bytes = n.batch * n.heads_q * n.seqlen_q * int64_t(sizeof(float));
  return 0;
}

extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers,
                                     double const* scalars, void* workspace, void* stream) {
  return k_golden::launch(tensors, integers, scalars, workspace,
                            static_cast<cudaStream_t>(stream));
}

// Dynamic shared memory of a launch, for tests.
extern "C" int tuner_golden_smem_bytes() { return k_golden::Kernel::SharedStorageSize; }
