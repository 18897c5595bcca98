#include <atomic>
#include <cstdint>

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/numeric_types.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "arguments.h"

namespace k_golden {

using Element = cutlass::bfloat16_t;
using Tile = cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<64>>;
using Cluster = cute::Shape<cute::Int<2>, cute::Int<1>, cute::_1>;
constexpr int64_t kTmaAlignment = 16;
constexpr int kAlignment = kTmaAlignment / sizeof(Element);
constexpr int kSmemCapacity = 232448;
// Layouts by pointer make the grouped collectives; M and N are the kernel's, after the swap.
using LayoutA = cutlass::layout::RowMajor*;
using LayoutB = cutlass::layout::ColumnMajor*;
using LayoutD = cutlass::layout::RowMajor*;

// The groups, read from the offsets where they are asked for.
struct Groups {
  using UnderlyingProblemShape = cute::Shape<int, int, int>;
  int count = 1;
  int rows = 0;
  int n = 0;
  int k = 0;
  int const* offsets = nullptr;

  CUTLASS_HOST_DEVICE int groups() const { return count; }
  CUTLASS_HOST_DEVICE int start(int group) const {
    int const row = offsets[group];
    return row < 0 ? 0 : row > rows ? rows : row;
  }
  CUTLASS_HOST_DEVICE UnderlyingProblemShape get_problem_shape(int group) const {
    int const left = start(group + 1) - start(group);
    int const own = left > 0 ? left : 0;
    return cute::make_shape(own, n, k);
  }
  CUTLASS_HOST_DEVICE UnderlyingProblemShape get_host_problem_shape(int) const { return {}; }
  CUTLASS_HOST_DEVICE bool is_host_problem_shape_available() const { return false; }
};

using BaseEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    void, LayoutD, kAlignment, Element, LayoutD, kAlignment,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;

// Where a group's part of D lies and where it ends, computed and not read from arrays.
struct Epilogue : BaseEpilogue {
  struct Arguments : BaseEpilogue::Arguments {
    Element* d = nullptr;
  };
  struct Params : BaseEpilogue::Params {
    Groups groups;
    Element* d = nullptr;
  };
  using BaseEpilogue::BaseEpilogue;

  static Params to_underlying_arguments(Groups const& groups, Arguments const& args, void* workspace) {
    return {BaseEpilogue::to_underlying_arguments(groups, args, workspace), groups, args.d};
  }

  template <bool kIsLoad, class Storage, class Problem>
  CUTLASS_DEVICE void tensormaps_perform_update(Storage& storage, Params const& params,
                                                cute::TmaDescriptor const*, Problem problem, int group,
                                                int warp_group) {
    using namespace cute;
    if (kIsLoad || !elect_one_sync()) return;
    int64_t const leading = params.groups.n;
    typename BaseEpilogue::InternalStrideD stride{};
    get<0>(stride) = leading;
    Element* const nowhere = nullptr;
    auto const matrix = make_tensor(
        nowhere, make_layout(make_shape(uint32_t(get<0>(problem)), uint32_t(get<1>(problem)), Int<1>{}),
                             stride));
    array<uint32_t, 5> extents = {1, 1, 1, 1, 1};
    array<uint64_t, 5> strides = {0, 0, 0, 0, 0};
    cute::detail::fill_tma_gmem_shape_stride(params.tma_store_d, matrix, extents, strides);
    for (uint64_t& each : strides) each *= sizeof(Element);
    auto& descriptor = storage.smem_tensormap_D[warp_group];
    tma_descriptor_replace_addr_in_shared_mem(descriptor, params.d + params.groups.start(group) * leading);
    tma_descriptor_replace_dims_strides_in_shared_mem(descriptor, extents, strides);
  }
};

using BaseMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    Element, LayoutA, kAlignment, Element, LayoutB, kAlignment, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename BaseEpilogue::SharedStorage)>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;

// Loads through two descriptors of whole matrices. A tile at the end of a group also loads rows of the
// next one: they make rows and columns of D that are not stored.
struct Mainloop : BaseMainloop {
  struct Arguments {
    Element const* a = nullptr;
    Element const* b = nullptr;
  };
  struct Params : BaseMainloop::Params {
    Groups groups;
  };

  static Params to_underlying_arguments(Groups const& groups, Arguments const& args, void*) {
    using namespace cute;
    using Pointer = typename BaseMainloop::InternalElementA const*;
    auto const matrix = [&](Element const* start, int rows) {
      typename BaseMainloop::InternalStrideA stride{};
      get<0>(stride) = int64_t(groups.k);
      return make_tensor(reinterpret_cast<Pointer>(start), make_shape(rows, groups.k, 1), stride);
    };
    auto const rows = matrix(args.a, groups.rows), weights = matrix(args.b, groups.count * groups.n);
    Params params{};
    params.tma_load_a = make_tma_copy(
        typename BaseMainloop::GmemTiledCopyA{}, rows,
        typename BaseMainloop::SmemLayoutA{}(_, _, Int<0>{}),
        make_shape(shape<0>(Tile{}), shape<2>(Tile{})), size<1>(Cluster{}));
    params.tma_load_b = make_tma_copy(
        typename BaseMainloop::GmemTiledCopyB{}, weights,
        typename BaseMainloop::SmemLayoutB{}(_, _, Int<0>{}),
        make_shape(shape<1>(Tile{}), shape<2>(Tile{})), size<0>(Cluster{}));
    params.groups = groups;
    return params;
  }
  static size_t get_workspace_size(Groups const&, Arguments const&, int) { return 0; }
  static cutlass::Status initialize_workspace(Groups const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  static bool can_implement(Groups const&, Arguments const&) { return true; }

  // Tiles of both operands, from the rows of each matrix on where a group begins.
  template <class Problem>
  CUTLASS_DEVICE static auto tiles(Problem const& problem, Params const& params, int first_a, int first_b) {
    using namespace cute;
    using X = Underscore;
    auto const [m, n, k, l] = problem;
    int const one = 1;
    auto a = domain_offset(make_coord(first_a, _0{}, _0{}),
                           params.tma_load_a.get_tma_tensor(make_shape(m, k, one)));
    auto b = domain_offset(make_coord(first_b, _0{}, _0{}),
                           params.tma_load_b.get_tma_tensor(make_shape(n, k, one)));
    return make_tuple(local_tile(a, Tile{}, make_coord(_, _, _), Step<_1, X, _1>{}),
                      local_tile(b, Tile{}, make_coord(_, _, _), Step<X, _1, _1>{}));
  }
  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const& params) const {
    return tiles(problem, params, 0, 0);
  }
  template <class Tensors, class Problem>
  CUTLASS_DEVICE Tensors tensors_perform_update(Tensors const&, Params const& params,
                                                Problem const& problem, int group) {
    int const row = params.groups.start(group), weight = group * params.groups.n;
    return tiles(problem, params, row, weight);
  }

  template <class Storage>
  CUTLASS_DEVICE auto tensormaps_init(Params const& params, Storage&, int, int) {
    auto const* const a = params.tma_load_a.get_tma_descriptor();
    auto const* const b = params.tma_load_b.get_tma_descriptor();
    if (cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(a);
      cute::prefetch_tma_descriptor(b);
    }
    __syncwarp();
    return cute::make_tuple(a, b);
  }
  template <class... Any>
  CUTLASS_DEVICE void tensormaps_perform_update(Any const&...) {}
  template <class... Any>
  CUTLASS_DEVICE void tensormaps_cp_fence_release(Any const&...) {}
  template <class... Any>
  CUTLASS_DEVICE void tensormaps_fence_acquire(Any const&...) {}
};

struct kernel_golden : cutlass::gemm::kernel::GemmUniversal<Groups, Mainloop, Epilogue> {};
using Kernel = kernel_golden;
constexpr int kClusterSize = 2;
constexpr int kKnownDevices = 64;
static_assert(Kernel::SharedStorageSize <= kSmemCapacity, "tile and stages exceed shared memory");

// Statuses are negative, CUDA errors positive: the caller tells them apart by sign.
inline int status_code(cutlass::Status status) { return -static_cast<int>(status); }

inline cudaLaunchConfig_t launch_config(dim3 grid, cudaLaunchAttribute* cluster) {
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim.x = 2;
  cluster->val.clusterDim.y = 1;
  cluster->val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.attrs = cluster;
  config.numAttrs = 1;
  return config;
}

// Allows the kernel its shared memory, and asks how many of its clusters the device holds at once:
// without that number the persistent grid is sized for a part with 18 multiprocessors in each GPC.
// Once a device, as it costs microseconds.
inline cudaError_t prepare(int device, int* clusters) {
  static std::atomic<int> known[kKnownDevices];
  if (device < kKnownDevices && (*clusters = known[device].load()) > 0) return cudaSuccess;
  auto entry = &cutlass::device_kernel<Kernel>;
  cudaError_t error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           Kernel::SharedStorageSize);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t const config = launch_config(dim3(2, 1, 1), &cluster);
  error = cudaOccupancyMaxActiveClusters(clusters, entry, &config);
  if (error == cudaSuccess && *clusters < 1) error = cudaErrorLaunchOutOfResources;
  if (error == cudaSuccess && device < kKnownDevices) known[device].store(*clusters);
  return error;
}

inline int hardware(int64_t sm_count, cutlass::KernelHardwareInfo& info) {
  int device = 0, present = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&present, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = prepare(device, &clusters);
  if (error != cudaSuccess) return static_cast<int>(error);
  info.device_id = device;
  info.sm_count = sm_count > 0 && sm_count < present ? static_cast<int>(sm_count) : present;
  info.max_active_clusters =
      clusters * kClusterSize <= info.sm_count ? clusters : info.sm_count / kClusterSize;
  return info.max_active_clusters > 0 ? 0 : status_code(cutlass::Status::kErrorInvalidProblem);
}

using tuner::view;
struct Tensors { void *a, *b, *offsets, *d; };
struct Integers { int64_t m, n, k, groups, raster_order, sm_count; };
struct Scalars { double alpha; };

inline Kernel::Arguments arguments(Tensors const& tensors, Integers const& call, Scalars const& scalars,
                                   cutlass::KernelHardwareInfo const& info) {
  Kernel::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  args.problem_shape = {static_cast<int>(call.groups), static_cast<int>(call.m), static_cast<int>(call.n),
                        static_cast<int>(call.k), static_cast<int const*>(tensors.offsets)};
  args.mainloop.a = static_cast<Element const*>(tensors.a);
  args.mainloop.b = static_cast<Element const*>(tensors.b);
  args.epilogue.d = static_cast<Element*>(tensors.d);
  // An address for the descriptor that the device completes: never used, but it must be aligned.
  args.epilogue.ptr_D = static_cast<Element**>(tensors.d);
  args.epilogue.thread.alpha = static_cast<float>(scalars.alpha);
  args.epilogue.thread.beta = 0.0f;
  args.hw_info = info;
  using Raster = decltype(args.scheduler.raster_order);
  args.scheduler.raster_order = call.raster_order == 1 ? Raster::AlongM : Raster::AlongN;
  return args;
}

inline cutlass::Status check(Integers const& call) {
  for (int64_t extent : {call.m, call.n, call.k, call.groups})
    if (extent < 1 || extent > INT32_MAX) return cutlass::Status::kErrorInvalidProblem;
  if (call.n * call.groups > INT32_MAX || call.raster_order < 1 || call.raster_order > 2)
    return cutlass::Status::kErrorInvalidProblem;
  const bool aligned = call.n % kAlignment == 0 && call.k % kAlignment == 0;
  return aligned ? cutlass::Status::kSuccess : cutlass::Status::kErrorMisalignedOperand;
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t* integers, int64_t* bytes) {
  using namespace k_golden;
  *bytes = 0;
  auto const& call = view<Integers>(integers);
  if (cutlass::Status status = check(call); status != cutlass::Status::kSuccess)
    return status_code(status);
  cutlass::KernelHardwareInfo info;
  if (int code = hardware(call.sm_count, info)) return code;
  *bytes = static_cast<int64_t>(Kernel::get_workspace_size(arguments(Tensors{}, call, Scalars{}, info)));
  return 0;
}

extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers,
                                     const double* scalars, void* workspace, void* stream) {
  using namespace k_golden;
  auto const& operands = view<Tensors>(tensors);
  auto const misses = [](void* tensor, int64_t alignment) {
    return tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % alignment != 0;
  };
  if (misses(operands.a, kTmaAlignment) || misses(operands.b, kTmaAlignment) ||
      misses(operands.offsets, sizeof(int)) || misses(operands.d, kTmaAlignment))
    return status_code(cutlass::Status::kErrorMisalignedOperand);
  auto const& call = view<Integers>(integers);
  if (cutlass::Status status = check(call); status != cutlass::Status::kSuccess)
    return status_code(status);
  if (workspace == nullptr) return status_code(cutlass::Status::kErrorWorkspaceNull);
  cutlass::KernelHardwareInfo info;
  if (int code = hardware(call.sm_count, info)) return code;
  Kernel::Arguments args = arguments(operands, call, view<Scalars>(scalars), info);
  if (!Kernel::can_implement(args)) return status_code(cutlass::Status::kInvalid);
  Kernel::Params const params = Kernel::to_underlying_arguments(args, workspace);
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config = launch_config(Kernel::get_grid_shape(params), &cluster);
  config.stream = static_cast<cudaStream_t>(stream);
  return static_cast<int>(cudaLaunchKernelEx(&config, &cutlass::device_kernel<Kernel>, params));
}
