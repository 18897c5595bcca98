// ... as in the templates
namespace k_KERNEL_ID {
// ... as in the templates
struct Tensors { void *query, *key, *value, *out, *logsumexp, *grad_out, *grad_query, *grad_key, *grad_value; };
struct Integers { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row, out_batch, out_head, out_row, grad_out_batch, grad_out_head, grad_out_row, grad_query_batch, grad_query_head, grad_query_row, grad_key_batch, grad_key_head, grad_key_row, grad_value_batch, grad_value_head, grad_value_row, pdl, section_heads; };
struct Scalars { double scale; };
using Element = cutlass::half_t;
constexpr int kGroups = 2, kTileM = 64, kD = 128;
// ... as in the templates
constexpr int kStages = 2, kDsStages = 2;
constexpr bool kCausal = false;
constexpr bool kWindowed = false;
constexpr bool kSwapDq = false;
constexpr bool kOrdered = false;
constexpr bool kDirect = false;
constexpr bool kTransposeDs = false;
// Whether a group may write dS while another reads it.
constexpr bool kWaitsForDs = kDsStages == 1 || kIsWide || false;
constexpr int kOctets = kQueries / 8, kEarlyOctets = kOctets * 0 / 100;
// ... as in the templates
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
// ... as in the templates
constexpr auto kMajorDs = GMMA::Major::MN;
using MmaDq = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kPart>, Int<kTileN>>,
    kMajorDs, GMMA::Major::MN>()));
// ... as in the templates
    int const first_key = t.n_block * kTileN, last_key = min(first_key + kTileN, p.seqlen_kv) - 1;
    t.last = p.m_blocks;
// ... as in the templates
    bool found = first_key + kTileN > p.seqlen_kv;
// ... as in the templates
    if (key >= p.seqlen_kv) end = 0;
// ... as in the templates
  uint64_t ds_full[kDsStages], ds_empty[kDsStages], p_full, p_empty, sums_full[kGroups], sums_empty[kGroups];
};
static_assert(sizeof(Storage) == 198656);
// ... as in the templates
  auto const shape_q = make_shape(p.seqlen_q, p.head_dim, p.heads, p.batch);
  auto const shape_kv = make_shape(p.seqlen_kv, p.head_dim, p.heads_kv, p.batch);
// ... as in the templates
      release(&s.sums_full[group]);
// ... as in the templates
      Element* const target = to.row_of(t.batch, t.head_kv, key);
// ... as in the templates
        if (key < p.seqlen_kv && column < p.head_dim) {
// ... as in the templates
    bool const is_there = row < kTileM && query < p.seqlen_q && column < p.head_dim;
    out[i] = is_there ? *reinterpret_cast<uint4 const*>(p.out.row_of(batch, head, query) + column) : make_uint4(0, 0, 0, 0);
    grad[i] = is_there ? *reinterpret_cast<uint4 const*>(p.grad_out.row_of(batch, head, query) + column) : make_uint4(0, 0, 0, 0);
// ... as in the templates
    bool const is_row = query < p.seqlen_q;
// ... as in the templates
      float const lse = is_row ? p.lse[(int64_t(batch) * p.heads + head) * p.seqlen_q + query] : -INFINITY;
// ... as in the templates
  int const vectors = p.head_dim / 8, rows = min(kTileM, p.seqlen_q - m_block * kTileM);
// ... as in the templates
    *reinterpret_cast<uint4*>(p.grad_query.row_of(batch, head, m_block * kTileM + row) + column) =
// ... as in the templates
struct kernel_KERNEL_ID {
// ... as in the templates
  if (auto e = cudaFuncSetAttribute(fused_attention_backward<kernel_KERNEL_ID>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage))) return e;
// ... as in the templates
    return make_tma_copy(SM90_TMA_LOAD{}, global_tensor(of, p.seqlen_q, p.head_dim, p.heads, p.batch), SmemLayoutQ{}(_, _, 0),
// ... as in the templates
  p.k = make_tma_copy(SM90_TMA_LOAD{}, global_tensor(key, p.seqlen_kv, p.head_dim, p.heads_kv, p.batch), SmemLayoutK{},
                      Shape<Int<kTileN>, Int<kD>>{}, _1{});
  p.v = make_tma_copy(SM90_TMA_LOAD{}, global_tensor(value, p.seqlen_kv, p.head_dim, p.heads_kv, p.batch), SmemLayoutV{},
// ... as in the templates
  if (int e = launch_one(prepare_rows<kernel_KERNEL_ID>, rows, kRowThreads, 0, n.pdl, p, stream)) return e;
  if (int e = launch_one(fused_attention_backward<kernel_KERNEL_ID>, blocks, kThreads, sizeof(Storage), true, p, stream)) return e;
  return launch_one(finish_rows<kernel_KERNEL_ID>, rows, 128 * kGroups, 0, true, p, stream);
}
}  // namespace k_KERNEL_ID

extern "C" int tuner_KERNEL_ID_workspace(int64_t const* integers, int64_t* bytes) {
  using namespace k_KERNEL_ID;
// ... as in the templates
extern "C" int tuner_KERNEL_ID_launch(void* const* tensors, int64_t const* integers, double const* scalars, void* workspace, void* stream) {
  using namespace k_KERNEL_ID;
  return k_KERNEL_ID::launch({view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars), workspace},
// ... as in the templates
