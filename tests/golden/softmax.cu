// ... as in the templates
namespace k_golden {
// ... as in the templates
constexpr bool kBfloat16 = false;
constexpr int kThreadsPerRow = 32;
constexpr int kVector = 4;
constexpr int kRowsPerBlock = 4;
constexpr int kPasses = 1;
constexpr int kVectors = 8;
constexpr bool kCausal = false;
// ... as in the templates
__global__ void __launch_bounds__(kBlock) softmax_golden(const Params params) {
// ... as in the templates
struct Tensors { void *scores, *probabilities; };
struct Integers { int64_t rows, cols, stride_scores, stride_probabilities, query_rows, pdl; };
struct Scalars { double scale, factor; };
// ... as in the templates
  return cudaLaunchKernelEx(&config, softmax_golden, params);
// ... as in the templates
}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t*, int64_t* bytes) {
// ... as in the templates
extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers,
                                     const double* scalars, void*, void* stream) {
  using namespace k_golden;
  return static_cast<int>(k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
// ... as in the templates
