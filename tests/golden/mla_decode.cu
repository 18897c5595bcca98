// ... as in the templates
namespace k_golden {
// ... as in the templates
using Element = __half;
// ... as in the templates
constexpr int kCluster = 1;
constexpr bool kWholeRows = false;
// ... as in the templates
  int page_size, box;   // rows that a copy brings
// ... as in the templates
// d = x y, or += x y: 64 rows, 64 columns, 16 of K.
__device__ __forceinline__ void multiply_scores(float (&d)[32], uint64_t x, uint64_t y, int adds) {
// ... as in the templates
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
// ... as in the templates
// d = x y, or += x y: 64 rows, 256 columns, 16 of K.
__device__ __forceinline__ void multiply_values(float (&d)[128], uint64_t x, uint64_t y, int adds) {
// ... as in the templates
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), 
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), 
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), 
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), 
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), 
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), 
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), 
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), 
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), 
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), 
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), 
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), 
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// ... as in the templates
// d = x y, or += x y: 64 rows, 256 columns, 16 of K.
__device__ __forceinline__ void multiply_own_values(float (&d)[128], uint32_t const (&x)[4], uint64_t y, int adds) {
// ... as in the templates
      "setp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, { %128, %129, %130, %131 }, %132, p, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), 
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), 
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), 
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), 
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), 
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), 
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), 
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), 
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), 
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), 
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), 
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), 
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), 
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), 
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), 
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(adds));
// ... as in the templates
// A box of the cache, to the same place in each block of the cluster.
// ... as in the templates
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, { %2, %3, %4 }], [%5], %6;"
      ::"r"(to), "l"(&map), "r"(column), "r"(slot), "r"(page), "r"(barrier), "l"(policy) : "memory");
// ... as in the templates
      if (!kWholeRows || chunk % kHalf == 0 && chunk <= kHalf) wait_for(memory.full(kGroup, chunk), counter / kStages % 2);
// ... as in the templates
      most = __fmul_rn(quad_max(most), p.scale_log2);
// ... as in the templates
        score = exp2_approx(__fmul_rn(score, p.scale_log2) - shift);
// ... as in the templates
        word[i] = packed_fp16(s[first], s[first + 1]);
// ... as in the templates
      const float factor = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
// ... as in the templates
          word[j] = packed_fp16(o[16 * i + 4 * j + 2 * r] * factor, o[16 * i + 4 * j + 2 * r + 1] * factor);
// ... as in the templates
__global__ void __launch_bounds__(kThreads, 1) mla_decode_golden(const __grid_constant__ Params p) {
// ... as in the templates
      for (int chunk = 0; chunk < kChunks; ++chunk) init_barrier(memory.full(stage, chunk), 1);
// ... as in the templates
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks) combine_golden(const __grid_constant__ Params p) {
// ... as in the templates
    const float factor = mine.sum > 0.0f ? 1.0f / mine.sum : 0.0f;
    uint2 words;
    words.x = packed_fp16(mine.total.x * factor, mine.total.y * factor);
    words.y = packed_fp16(mine.total.z * factor, mine.total.w * factor);
// ... as in the templates
inline bool aligned(int64_t elements) { return elements >= 0 && elements % 8 == 0 && elements < (int64_t(1) << 38); }

struct Tensors { void *query, *cache, *block_table, *lengths, *out, *lse; };
struct Integers { int64_t batch, queries, heads, page_size, pages, query_batch, query_row, query_head, cache_page, cache_slot, table_row, out_batch, out_row, out_head, lse_batch, lse_head, tile_overhead, cut_overhead, pdl; };
struct Scalars { double scale; };
// ... as in the templates
  const auto type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
// ... as in the templates
  error = cudaFuncSetAttribute(&mla_decode_golden, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
// ... as in the templates
  for (const void* tensor : {tensors.query, tensors.cache, tensors.out, tensors.block_table, tensors.lengths})
// ... as in the templates
  if (error == cudaSuccess) error = describe(&p.cache, tensors.cache, 3, of_cache, cache_strides, cache_box);
// ... as in the templates
  error = launch_one(mla_decode_golden, p.shares * p.row_blocks, kThreads, kSmemBytes, kCluster, call.pdl != 0, p, stream);
  if (error != cudaSuccess || p.shares == 1) return error;
  return launch_one(combine_golden, kCombineBlocks * multiprocessors, kCombineThreads, 0, 1, true, p, stream);
// ... as in the templates
}  // namespace k_golden

extern "C" int tuner_golden_workspace(const int64_t* integers, int64_t* bytes) {
  using namespace k_golden;
// ... as in the templates
extern "C" int tuner_golden_launch(void* const* tensors, const int64_t* integers, const double* scalars, void* workspace,
                                     void* stream) {
  using namespace k_golden;
  return static_cast<int>(k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars), workspace,
// ... as in the templates
