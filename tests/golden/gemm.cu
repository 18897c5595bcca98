#include <atomic>
#include <cstdint>

#include <cuda_runtime.h>

#if !defined(__CUDA_ARCH__)
#include "host_half.h"
#endif
#include "arguments.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/numeric_types.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace k_golden {

using Input = cutlass::half_t;
using Output = float;
using Tile = cute::Shape<cute::Int<64>, cute::Int<128>, cute::Int<64>>;
using Cluster = cute::Shape<cute::Int<2>, cute::Int<1>, cute::_1>;
constexpr int64_t kTmaAlignment = 16;
constexpr int kInputAlignment = kTmaAlignment / sizeof(Input);
constexpr int kOutputAlignment = kTmaAlignment / sizeof(Output);
constexpr int kSmemCapacity = 232448;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    void, cutlass::layout::RowMajor, kOutputAlignment,
    Output, cutlass::layout::RowMajor, kOutputAlignment,
    cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    Input, cutlass::layout::RowMajor, kInputAlignment,
    Input, cutlass::layout::ColumnMajor, kInputAlignment,
    float, Tile, Cluster,
    cutlass::gemm::collective::StageCount<2>,
    cutlass::gemm::KernelTmaWarpSpecialized>::CollectiveOp;

using SchedulerTag = cutlass::gemm::PersistentScheduler;

struct kernel_golden
    : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                           SchedulerTag> {};
using Kernel = kernel_golden;
constexpr int kClusterSize = 2;
constexpr int kKnownDevices = 64;
static_assert(Kernel::SharedStorageSize <= kSmemCapacity, "tile and stages exceed shared memory");

#if defined(__CUDA_ARCH__)
}  // namespace k_golden

template __global__ void cutlass::device_kernel<k_golden::Kernel>(
    CUTLASS_GRID_CONSTANT k_golden::Kernel::Params const);

#else  // the host's half
// cutlass::device_kernel<Kernel>, found once.
inline cudaError_t find_entry(void const** entry) {
  static cudaKernel_t kernel = nullptr;
  static cudaError_t const found = tuner::find_kernel(
      "_ZN7cutlass13device_kernelIN8k_golden13kernel_goldenEEEvNT_6ParamsE", &kernel);
  *entry = kernel;
  return found;
}

// Statuses are negative, CUDA errors positive: the caller tells them apart by sign.
inline int status_code(cutlass::Status status) { return -static_cast<int>(status); }

inline cudaError_t launch_kernel(Kernel::Params const& params, cudaStream_t stream, bool pdl) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (kClusterSize > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = 2;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void const* entry = nullptr;
  if (cudaError_t error = find_entry(&entry); error != cudaSuccess) return error;
  void* given[] = {const_cast<Kernel::Params*>(&params)};
  return cudaLaunchKernelExC(&config, entry, given);
}

// Allows the kernel its shared memory, and asks how many of its clusters the device holds at once:
// without that number the persistent grid is sized for a part with 18 multiprocessors in each GPC.
// Once a device, as it costs microseconds.
inline cudaError_t prepare(int device, int* clusters) {
  static std::atomic<int> known[kKnownDevices];
  if (device < kKnownDevices && (*clusters = known[device].load()) > 0) return cudaSuccess;
  void const* entry = nullptr;
  cudaError_t error = find_entry(&entry);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Kernel::SharedStorageSize);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 2;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2, 1, 1);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.attrs = &attribute;
  config.numAttrs = 1;
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
struct Tensors { void *a, *b, *d; };
struct Integers { int64_t m, n, k, batch, lda, ldb, ldd, batch_a, batch_b, batch_d, max_swizzle_size, raster_order, decomposition_mode, splits, sm_count, pdl; };
struct Scalars { double alpha; };

inline Kernel::Arguments arguments(Tensors const& tensors, Integers const& call, Scalars const& scalars,
                                   cutlass::KernelHardwareInfo const& info) {
  const bool batched = call.batch > 1;
  const int64_t batch_a = batched ? call.batch_a : 0;
  const int64_t batch_b = batched ? call.batch_b : 0;
  const int64_t batch_d = batched ? call.batch_d : 0;
  Kernel::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = cute::make_shape(static_cast<int>(call.m), static_cast<int>(call.n),
                                        static_cast<int>(call.k), static_cast<int>(call.batch));
  args.mainloop.ptr_A = static_cast<Input const*>(tensors.a);
  args.mainloop.dA = cute::make_stride(call.lda, cute::_1{}, batch_a);
  args.mainloop.ptr_B = static_cast<Input const*>(tensors.b);
  args.mainloop.dB = cute::make_stride(call.ldb, cute::_1{}, batch_b);
  args.epilogue.thread.alpha = static_cast<float>(scalars.alpha);
  args.epilogue.thread.beta = 0.0f;
  args.epilogue.ptr_D = static_cast<Output*>(tensors.d);
  args.epilogue.dD = cute::make_stride(call.ldd, cute::_1{}, batch_d);
  args.hw_info = info;
  return args;
}

// What a TMA descriptor needs and CUTLASS does not check: it would print and go on.
inline bool aligned(int64_t elements, int64_t width) {
  const int64_t bytes = elements * width;
  return bytes >= 0 && bytes % kTmaAlignment == 0 && bytes < (int64_t(1) << 40);
}

inline cutlass::Status check(Integers const& call) {
  for (int64_t extent : {call.m, call.n, call.k, call.batch})
    if (extent < 1 || extent > INT32_MAX) return cutlass::Status::kErrorInvalidProblem;
  if (call.max_swizzle_size < 1 || call.raster_order < 0 || call.raster_order > 2 ||
      call.decomposition_mode < 0 || call.decomposition_mode > 3 || call.splits < 1)
    return cutlass::Status::kErrorInvalidProblem;
  const bool leading = aligned(call.lda, sizeof(Input)) && aligned(call.ldb, sizeof(Input)) &&
                       aligned(call.ldd, sizeof(Output));
  const bool batch = aligned(call.batch_a, sizeof(Input)) && aligned(call.batch_b, sizeof(Input)) &&
                     aligned(call.batch_d, sizeof(Output));
  if (!leading || (call.batch > 1 && !batch)) return cutlass::Status::kErrorMisalignedOperand;
  const bool fits = call.lda >= call.k &&
                    call.ldb >= call.k &&
                    call.ldd >= call.n;
  return fits ? cutlass::Status::kSuccess : cutlass::Status::kErrorInvalidLayout;
}

}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t* integers, int64_t* bytes) {
  using namespace k_golden;
  *bytes = 0;
  auto const& call = view<Integers>(integers);
  if (cutlass::Status status = check(call); status != cutlass::Status::kSuccess)
    return status_code(status);
  return 0;
}

extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers,
                                     const double* scalars, void* workspace, void* stream) {
  using namespace k_golden;
  for (size_t i = 0; i < sizeof(Tensors) / sizeof(void*); ++i)
    if (tensors[i] == nullptr || reinterpret_cast<uintptr_t>(tensors[i]) % kTmaAlignment != 0)
      return status_code(cutlass::Status::kErrorMisalignedOperand);
  auto const& call = view<Integers>(integers);
  if (cutlass::Status status = check(call); status != cutlass::Status::kSuccess)
    return status_code(status);
  cutlass::KernelHardwareInfo info;
  if (int code = hardware(call.sm_count, info)) return code;
  Kernel::Arguments args = arguments(view<Tensors>(tensors), call, view<Scalars>(scalars), info);
  if (!Kernel::can_implement(args)) return status_code(cutlass::Status::kInvalid);
  bool pdl = call.pdl != 0;
  auto queue = static_cast<cudaStream_t>(stream);
  if (cutlass::Status status = Kernel::initialize_workspace(args, workspace, queue);
      status != cutlass::Status::kSuccess)
    return status_code(status);
  return static_cast<int>(launch_kernel(Kernel::to_underlying_arguments(args, workspace), queue, pdl));
}
#endif
