// ... as in the templates
namespace k_0123456789abcdef {
// ... as in the templates
constexpr bool kSwapped = false;
constexpr int kTileX = 128;
constexpr int kTileY = 128;
constexpr int kStages = 6;
constexpr int kClusterX = 1;
constexpr int kClusterY = 1;
constexpr int kSplits = 1;
constexpr int kStoreBuffers = 1;
constexpr bool kGrouped = false;
// ... as in the templates
constexpr int kFullArrivals = 1 + kWarp;
// ... as in the templates
  CUtensorMap x, y, d_map;
// ... as in the templates
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), 
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), 
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), 
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), 
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// ... as in the templates
  __device__ __forceinline__ uint32_t boxes(int warp) const { return base + kFirstBox + warp * kStoreBuffers * kBoxBytes; }
// ... as in the templates
      else copy_box(p.x, x, block * kBlock, tile.x, full);
      if constexpr (kClusterX > 1) copy_box_to(p.y, y, block * kBlock, tile.y + share_y, full, kAll);
      else copy_box(p.y, y, block * kBlock, tile.y, full);
// ... as in the templates
// A warp: the factors of the ring's tiles; zeros beyond the matrices.
// ... as in the templates
constexpr bool kRowsEarly = !kSwapped || kTileY <= 64;
// ... as in the templates
        upper[part] = alpha * load_shared(factors + lane.first(part) * 4);
        lower[part] = alpha * load_shared(factors + (lane.first(part) + 8) * 4);
// ... as in the templates
      for (int i = 0; i < kColumnFactors; ++i) weight[i] = load_shared(factors + (kColumnOffset + i) * 4);
// ... as in the templates
// sums += accumulators, times the factors of the block of K.
// ... as in the templates
      else factor = load_shared_pair(of.factors + (8 * octet + lane.column) * 4);
      factor.x *= of.weight[0], factor.y *= of.weight[0];
      sums[c] = fmaf(factor.x, d[c], sums[c]);
      sums[c + 1] = fmaf(factor.y, d[c + 1], sums[c + 1]);
      sums[c + 2] = fmaf(factor.x, d[c + 2], sums[c + 2]);
      sums[c + 3] = fmaf(factor.y, d[c + 3], sums[c + 3]);
// ... as in the templates
      sums[c] = fmaf(upper, d[c], sums[c]);
      sums[c + 1] = fmaf(upper, d[c + 1], sums[c + 1]);
      sums[c + 2] = fmaf(lower, d[c + 2], sums[c + 2]);
      sums[c + 3] = fmaf(lower, d[c + 3], sums[c + 3]);
// ... as in the templates
    if (thread == 0) copies_read();
// ... as in the templates
    if (thread == 0) {
// ... as in the templates
__device__ __forceinline__ void begin_products(Accumulators& d, uint64_t x, uint64_t y, int part) {
// ... as in the templates
    if (threadIdx.x % kWarp == 0) copies_stored();
// ... as in the templates
__global__ void __launch_bounds__(kThreads, 1) block_scaled_0123456789abcdef(const __grid_constant__ Params p) {
// ... as in the templates
struct Tensors { void *a, *b, *d, *scale_a, *scale_b; };
struct Integers { int64_t m, n, k, lda, ldb, ldd, scale_a_row, scale_a_block, scale_b_column, scale_b_block, max_swizzle_size, raster_order, pdl, groups, scale_b_group; };
struct Scalars { double alpha; };
// ... as in the templates
  if (n % 8 != 0 || k % 16 != 0 || (k + kBlock - 1) / kBlock < kSplits) return false;
// ... as in the templates
  auto entry = &block_scaled_0123456789abcdef;
// ... as in the templates
  for (const void* vector : { tensors.scale_a, tensors.scale_b })
// ... as in the templates
  return cudaLaunchKernelEx(&config, block_scaled_0123456789abcdef, p);
// ... as in the templates
}  // namespace k_0123456789abcdef

extern "C" int tuner_0123456789abcdef_workspace(const int64_t* integers, int64_t* bytes) {
  *bytes = 0;
  using namespace k_0123456789abcdef;
// ... as in the templates
extern "C" int tuner_0123456789abcdef_launch(void* const* tensors, const int64_t* integers, const double* scalars, void*,
                                     void* stream) {
  using namespace k_0123456789abcdef;
  return static_cast<int>(k_0123456789abcdef::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
// ... as in the templates
