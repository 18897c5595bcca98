// ... as in the templates
namespace k_golden {
// ... as in the templates
struct Tensors { void *query, *key, *probabilities, *statistics, *bias; };
struct Integers { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, first_head, head_count, first_row, row_count, pdl, query_batch, query_head, query_row, key_batch, key_head, key_row, splits, bias_batch, bias_head, bias_row; };
struct Scalars { double scale, softcap; };
using Element = cutlass::half_t;
constexpr int kTileN = 128, kColumns = 64, kGroups = 2, kStages = 3;
constexpr int kBlocksPerSm = 1, kThreads = 128 * (kGroups + 1), kRows = 64;
constexpr bool kCausal = true;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
// ... as in the templates
  CUTE_DEVICE float scale() const { return 1.f; }
// ... as in the templates
struct kernel_golden {
// ... as in the templates
static_assert(sizeof(Storage) == 132096, "shared memory is not what the family counts");
template <class Kernel>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) two_kernel_scores(CUTE_GRID_CONSTANT Params const params) {
// ... as in the templates
  if (auto e = cudaFuncSetAttribute(two_kernel_scores<kernel_golden>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage))) return e;
// ... as in the templates
  return cudaLaunchKernelEx(&config, two_kernel_scores<kernel_golden>, p);
}
}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const*, int64_t* bytes) {
// ... as in the templates
extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers, double const* scalars, void*, void* stream) {
  using namespace k_golden;
  return k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
// ... as in the templates
