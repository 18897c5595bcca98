// ... as in the templates
namespace k_golden {

using Element = cutlass::bfloat16_t;
using Tile = cute::Shape<cute::Int<128>, cute::Int<128>, cute::Int<64>>;
using Cluster = cute::Shape<cute::Int<2>, cute::Int<1>, cute::_1>;
// ... as in the templates
using LayoutD = cutlass::layout::RowMajor*;
// ... as in the templates
    return cute::make_shape(own, n, k);
// ... as in the templates
    cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
// ... as in the templates
  template <bool kIsLoad, class Storage, class Problem>
  CUTLASS_DEVICE void tensormaps_perform_update(Storage& storage, Params const& params,
                                                cute::TmaDescriptor const*, Problem problem, int group,
// ... as in the templates
    get<0>(stride) = leading;
// ... as in the templates
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
// ... as in the templates
        typename BaseMainloop::GmemTiledCopyA{}, rows,
// ... as in the templates
        typename BaseMainloop::GmemTiledCopyB{}, weights,
// ... as in the templates
    return tiles(problem, params, row, weight);
// ... as in the templates
struct kernel_golden : cutlass::gemm::kernel::GemmUniversal<Groups, Mainloop, Epilogue> {};
using Kernel = kernel_golden;
constexpr int kClusterSize = 2;
// ... as in the templates
  cluster->val.clusterDim.x = 2;
  cluster->val.clusterDim.y = 1;
// ... as in the templates
  cudaLaunchConfig_t const config = launch_config(dim3(2, 1, 1), &cluster);
// ... as in the templates
struct Tensors { void *a, *b, *offsets, *d; };
struct Integers { int64_t m, n, k, groups, raster_order, sm_count; };
struct Scalars { double alpha; };
// ... as in the templates
}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t* integers, int64_t* bytes) {
  using namespace k_golden;
// ... as in the templates
extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers,
                                     const double* scalars, void* workspace, void* stream) {
  using namespace k_golden;
// ... as in the templates
