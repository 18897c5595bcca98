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

#include "arguments.h"

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

using tuner::view;
struct Tensors { void *query, *key, *value, *out; };
struct Integers { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row, out_batch, out_head, out_row, sm_count; };
struct Scalars { double scale; };

struct Strides {
  int64_t batch, head, row;
};

constexpr int64_t kMaxInt = INT32_MAX;

constexpr int failed(cutlass::Status status) { return -static_cast<int>(status); }

// TMA and the collectives' 32-bit strides: extents in range, strides whole 16-byte units.
inline cutlass::Status check(Integers const& n, Tensors const& tensors) {
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
  for (int64_t stride : {n.query_batch, n.query_head, n.query_row, n.key_batch, n.key_head, n.key_row,
                         n.value_batch, n.value_head, n.value_row, n.out_batch, n.out_head, n.out_row}) {
    is_aligned = is_aligned && stride >= 0 && stride % kUnit == 0;
  }
  for (void const* tensor : {tensors.query, tensors.key, tensors.value, tensors.out}) {
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
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
inline bool nests(Integers const& n, Strides const& strides, int64_t group) {
  return n.batch == 1 || n.heads_kv == 1 || strides.batch == n.heads_kv * group * strides.head;
}

inline Outer outer(Integers const& n, Strides const& strides, bool is_query) {
  if (n.heads_q == n.heads_kv) {
    return {n.batch > 1 ? strides.batch : 0, n.heads_q > 1 ? strides.head : 0};
  }
  int64_t const group = is_query ? n.heads_q / n.heads_kv : 1;
  int64_t const second = n.heads_kv > 1 ? group * strides.head : n.batch > 1 ? strides.batch : 0;
  return {is_query ? strides.head : 0, second};
}

inline bool fits(Outer const& o, Strides const& strides) {
  return o.first <= kMaxInt && o.second <= kMaxInt && strides.row <= kMaxInt;
}

inline RowStride row_stride(Outer const& o, Strides const& strides) {
  return cute::make_stride(int(strides.row), cute::_1{}, cute::make_stride(int(o.first), int(o.second)));
}

inline int launch(Tensors const& tensors, Integers const& n, Scalars const& scalars, void* workspace,
                  cudaStream_t stream) {
  if (cutlass::Status status = check(n, tensors); status != cutlass::Status::kSuccess) {
    return failed(status);
  }
  // The running maximum is taken before scaling: right for positive scales only.
  if (!(scalars.scale > 0.0)) return failed(cutlass::Status::kErrorInvalidProblem);
  if (workspace == nullptr) return failed(cutlass::Status::kErrorWorkspaceNull);

  bool const is_grouped = n.heads_q != n.heads_kv;
  int64_t const group = n.heads_q / n.heads_kv;
  Strides const of_query{n.query_batch, n.query_head, n.query_row}, of_key{n.key_batch, n.key_head, n.key_row};
  Strides const of_value{n.value_batch, n.value_head, n.value_row}, of_out{n.out_batch, n.out_head, n.out_row};
  if (is_grouped && !(nests(n, of_query, group) && nests(n, of_out, group) && nests(n, of_key, 1) &&
                      nests(n, of_value, 1))) {
    return failed(cutlass::Status::kErrorNotSupported);
  }
  int64_t const first = is_grouped ? group : n.batch;
  int64_t const second = is_grouped ? n.batch * n.heads_kv : n.heads_q;
  Outer const query = outer(n, of_query, true), key = outer(n, of_key, false);
  Outer const value = outer(n, of_value, false), out = outer(n, of_out, true);
  if (second > kMaxInt || first * second > kMaxInt || !fits(query, of_query) || !fits(key, of_key) ||
      !fits(value, of_value) || !fits(out, of_out) || first * second * n.seqlen_q > kMaxInt) {
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

  // Says so if an earlier kernel lost the context, where CUTLASS's descriptors would crash.
  auto* function = cutlass::device_kernel<Kernel>;
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           Kernel::SharedStorageSize);
  if (error != cudaSuccess) return error;

  auto* lse = static_cast<float*>(workspace);
  typename Kernel::Arguments arguments{
      {int(first), int(second), int(n.seqlen_q), int(n.seqlen_kv), int(n.head_dim)},
      {static_cast<Element const*>(tensors.query), row_stride(query, of_query),
       static_cast<Element const*>(tensors.key), row_stride(key, of_key),
       static_cast<Element const*>(tensors.value), row_stride(value, of_value)},
      {static_cast<Element*>(tensors.out), row_stride(out, of_out), lse,
       cute::make_stride(cute::_1{}, cute::make_stride(int(second * n.seqlen_q), int(n.seqlen_q)))},
      hardware};
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, workspace);
  // The collectives derive the scale from D; the caller's goes in its place.
  params.mainloop.scale_softmax = float(scalars.scale);
  params.mainloop.scale_softmax_log2 = float(scalars.scale * 1.4426950408889634);

  dim3 const grid = Kernel::get_grid_shape(params);
  if (grid.y > 65535 || grid.z > 65535) return failed(cutlass::Status::kErrorInvalidProblem);
  void* arguments_of_kernel[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<void const*>(function), grid, Kernel::get_block_shape(),
                          arguments_of_kernel, Kernel::SharedStorageSize, stream);
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const* integers, int64_t* bytes) {
  using namespace k_golden;
  auto const& n = view<Integers>(integers);
  *bytes = n.batch * n.heads_q * n.seqlen_q * int64_t(sizeof(float));
  return 0;
}

extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers,
                                     double const* scalars, void* workspace, void* stream) {
  using namespace k_golden;
  return k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars), workspace,
                            static_cast<cudaStream_t>(stream));
}

// Dynamic shared memory of a launch, for tests.
extern "C" int tuner_golden_smem_bytes() { return k_golden::Kernel::SharedStorageSize; }
