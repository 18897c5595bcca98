// ... as in the templates
namespace k_golden {
// ... as in the templates
struct Tensors { void *query, *key, *value, *out, *lse; };
struct Integers { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row, out_batch, out_head, out_row, splits, pdl, clustered; };
struct Scalars { double scale; };
using Element = cutlass::half_t;  // of Q, K, V and P
using Out = Element;
constexpr int kTileN = 128, kD = 64, kPack = 1;
constexpr int kGroups = 2, kStages = 2;
constexpr int kKeyGroups = 1, kRowGroups = kGroups / kKeyGroups, kTileM = 64 * kRowGroups;
constexpr int kScoreBuffers = 1, kBlocksPerSm = 1;
constexpr bool kCausal = false;
constexpr bool kWindowed = false;
constexpr bool kQInRegisters = false;
constexpr bool kPingPong = true;
constexpr bool kPersistent = false;
// Whether blocks may share the keys of a tile.
constexpr bool kSplits = !kPersistent;
// Combining them in a cluster takes registers that more groups do not have.
constexpr bool kClusters = kSplits && kGroups == 1;
// Tiles of unlike lengths are handed out by a counter, tiles of one length by their index.
constexpr bool kDynamic = kPersistent && kCausal;
// ... as in the templates
constexpr bool kProducerReturns = kPersistent && !kDynamic && false;
// Probabilities times 2^kLift: the largest is 256 of e4m3's 448, and 2^-14 is still a normal number.
constexpr float kLift = 0;
// ... as in the templates
constexpr float kLeastResidual = -8;
// ... as in the templates
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
// ... as in the templates
using SmemLayoutO = decltype(tile_to_shape(SmemAtom<kD, Out>{}, Shape<_16, Int<kD>>{}));  // a warp's rows
using SmemLayoutVt = decltype(composition(
    SmemLayoutKV{}, make_layout(Shape<Int<kD>, Int<kTileN>, Int<kStages>>{},
                                Stride<Int<kTileN>, _1, Int<kTileN * kD>>{})));
using GroupLayout = Layout<Shape<Int<kRowGroups>, _1, _1>>;
using AtomQK = decltype(GMMA::ss_op_selector<Element, Element, float, Shape<Int<kTileM>, Int<kTileN>, Int<kD>>>());
// ... as in the templates
    GMMA::rs_op_selector<Element, Element, float, Shape<Int<kTileM>, Int<kD>, Int<kTileN>>,
                         GMMA::Major::K, GMMA::Major::MN>(), GroupLayout{}));
// ... as in the templates
using GmemQ = decltype(global_tensor((Element const*)nullptr, rows_q(1), rows_q_stride(1, 1), 1, 1, 1, 1, 1));
// ... as in the templates
    if constexpr (kCausal) {
      // Sections of heads that share the L2; in each the longest tiles of all heads come first.
      int const all_heads = p.batch * (p.heads / kPack), per_section = p.section * p.m_blocks;
// ... as in the templates
    int const last_row = ((t.m_block + 1) * kTileM - 1) / kPack;
    t.last = (end_key(p, p.seqlen_kv, last_row) + kTileN - 1) / kTileN;
    // A window that lies past the last key has no tiles.
    t.first = kWindowed ? min(first_key(p, t.m_block * kTileM / kPack) / kTileN, t.last) : 0;
// ... as in the templates
CUTE_DEVICE float const& score_scale(Params const& p, int batch, int head) {
// ... as in the templates
  static constexpr int kRow = kD + 8;  // padded: the rows of a warp lie in different banks
// ... as in the templates
  static constexpr int kValues = kKeyGroups > 1 ? kD / 2 + 4 : 1;  // of O, then maxima, then sums
// ... as in the templates
    alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> v;
// ... as in the templates
    auto const shape_q = make_shape(rows_q(p.seqlen_q), p.head_dim, p.heads / kPack, p.batch);
    auto const shape_kv = make_shape(p.seqlen_kv, p.head_dim, p.heads_kv, p.batch);
    auto const tile_kv = Shape<Int<kTileN>, Int<kD>>{};
    int const head_kv = t.head / (p.heads / kPack / p.heads_kv);
// ... as in the templates
    Tensor gV = local_tile(p.v.get_tma_tensor(shape_kv)(_, _, head_kv, t.batch), tile_kv, make_coord(_, 0));
// ... as in the templates
    Tensor sV = make_tensor(make_smem_ptr(s.operands.v.data()), SmemLayoutKV{});
// ... as in the templates
    constexpr uint32_t q_bytes = kTileM * kD * sizeof(Element), kv_bytes = kTileN * kD * sizeof(Element);
// ... as in the templates
      Full::arrive_and_expect_tx(&full[at.stage()], kv_bytes);
// ... as in the templates
    load(p.k, tKg, tKs, s.k_full, s.k_empty, k, n);
// ... as in the templates
      load(p.k, tKg, tKs, s.k_full, s.k_empty, k, n - 1);
      load(p.v, tVg, tVs, s.v_full, s.v_empty, v, n);
// ... as in the templates
    load(p.v, tVg, tVs, s.v_full, s.v_empty, v, n);
// ... as in the templates
  float factor[2];  // what O must be multiplied by
// ... as in the templates
  CUTE_DEVICE void maxima(Scores const& scores, float scale_log2) {
// ... as in the templates
        factor[r] = maximum[r] == top ? 1.f : exp2_approx((maximum[r] - top) * scale_log2);
// ... as in the templates
      float const rounded = scaled(top, scale_log2) - kLift;  // not in the choice: it would be a branch
// ... as in the templates
  CUTE_DEVICE void exponentials(Scores& scores, float scale_log2) {
// ... as in the templates
        x = exp2_approx(fmaf(x, scale_log2, -shift[r]));
        y = exp2_approx(fmaf(y, scale_log2, -shift[r]));
// ... as in the templates
    for (int i = 0; i < kD / 2; ++i) partials.value[i][thread] = out(i);
// ... as in the templates
      partials.value[kD / 2 + r][thread] = maximum[r];
      partials.value[kD / 2 + 2 + r][thread] = sum[r];
// ... as in the templates
      float const other = partials.value[kD / 2 + r][thread], top = fmaxf(maximum[r], other);
// ... as in the templates
      sum[r] = sum[r] * factor[r] + partials.value[kD / 2 + 2 + r][thread] * theirs[r];
// ... as in the templates
    for (int i = 0; i < kD / 2; ++i) {
// ... as in the templates
CUTE_DEVICE void mask(Scores& scores, Params const& p, int const& keys, int row0, int col0) {
// ... as in the templates
    int const row = (row0 + 8 * r) / kPack, first = col0 + 2 * (lane % 4);
// ... as in the templates
  return (shift + log2f(sum)) * kLn2;
// ... as in the templates
  int const here = row - t.m_block * kTileM;
  if (kClusters && p.is_clustered) return {s.cluster.out + here * ClusterPartials::kRow, s.cluster.statistics + here};
  int64_t const partial = int64_t(t.split) * p.batch * p.heads * p.seqlen_q + at;
  return {p.partial + partial * p.head_dim, p.partial_statistics + partial};
// ... as in the templates
CUTE_DEVICE void store(Params const& p, Storage& s, Tile const& t, Fragment const& out, int row0, Softmax const& softmax, float const& scale_log2, float const (&norm)[2]) {
// ... as in the templates
    int const row = row0 + 8 * r, seq = row / kPack, head = t.head * kPack + row % kPack;
    bool const is_row = seq < p.seqlen_q;
// ... as in the templates
      float const sum = softmax.sum[r] * exp2_approx(-softmax.residual(r, scale_log2));
// ... as in the templates
      for (int j = 0; j < kD / 8; ++j) {
        if (is_row && 8 * j < p.head_dim) {
          *reinterpret_cast<float2*>(target.out + 8 * j + 2 * q) =
// ... as in the templates
    if (p.lse && is_row && q == 0) p.lse[at] = log_sum_exp(softmax.maximum[r], softmax.sum[r], scale_log2);
// ... as in the templates
    for (int g = 0; g < kD / 32; ++g) {
// ... as in the templates
      int const column = 32 * g + 8 * q;
// ... as in the templates
  static constexpr int kColumns = kD / 32;  // of O, that a lane has: 32 apart
// ... as in the templates
  CUTE_DEVICE static float score(Params const& p, Element const* query, Element const* keys, int key, int end) {
// ... as in the templates
    return sum;
// ... as in the templates
    Element const* const query = p.query.row_of(t.batch, head, seq);
    Element const* const keys = p.key.row_of(t.batch, head_kv, 0);
    Element const* const values = p.value.row_of(t.batch, head_kv, 0);
    int const begin = max(first_key(p, seq), t.first * kTileN);
    int const end = min(end_key(p, p.seqlen_kv, seq), t.last * kTileN);
    float const scale_log2 = score_scale(p, t.batch, head);
    for (int first = begin; vote(first < end); first += 32) maximum = fmaxf(maximum, score(p, query, keys, first + lane, end));
// ... as in the templates
      float const below = score(p, query, keys, first + lane, end) - maximum;
// ... as in the templates
          bool const is_seen = weight > 0.f && lane + 32 * c < p.head_dim;
          int64_t const at = is_seen ? (first + i) * p.value.row + lane + 32 * c : 0;
// ... as in the templates
    int const row = warp_row + i, seq = row / kPack, head = t.head * kPack + row % kPack;
    bool const is_flagged = (i < 8 ? flagged[0] : flagged[1]) >> 4 * (i % 8) & 1;
    if (!vote(is_flagged && seq < p.seqlen_q)) continue;
    Recomputed const again(p, t, head, seq);
    float const norm = value_scale(p, t) / again.sum, sum = again.sum * exp2f(kLift);
    int64_t const at = row_index(p, t, head, seq);
    bool const is_partial = kSplits && p.splits > 1;
// ... as in the templates
        if (lane + 32 * c < p.head_dim) target.out[lane + 32 * c] = again.out[c] * norm;
// ... as in the templates
        if (lane + 32 * c < p.head_dim) out_row(p, t, head, seq)[lane + 32 * c] = Out(again.out[c] * norm);
// ... as in the templates
    Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<kTileM>, Int<kD>>{});
// ... as in the templates
    int const group_row = t.m_block * kTileM + row_group * 64;
    int const row0 = group_row + (tid % 128) / 32 * 16 + (tid % 32) / 4;
    float const& scale_log2 = score_scale(p, t.batch, t.head * kPack + row0 % kPack);
// ... as in the templates
      for (int kk = 0; kk < size<2>(tOrP); ++kk) {
// ... as in the templates
    int const& keys = p.seqlen_kv;
    int const unmasked = end_key(p, keys, group_row / kPack) / kTileN;
    int const opened = (first_key(p, (group_row + 63) / kPack) + kTileN - 1) / kTileN;
// ... as in the templates
      for (int j = 0; j < kD / 8; ++j) {
// ... as in the templates
      if (n >= unmasked || (kWindowed && n < opened)) mask(scores, p, keys, row0, n * kTileN);
// ... as in the templates
          issue_pv();
// ... as in the templates
          if constexpr (decltype(is_masked)::value) mask(tSrS, p, keys, row0, n * kTileN);
// ... as in the templates
          constexpr int kEarly = kOctets * 50 / 100;
// ... as in the templates
        if constexpr (kCausal || kWindowed) {
          while (n - kKeyGroups >= max(first, unmasked)) step(true_type{});
// ... as in the templates
          while (n - kKeyGroups >= max(first, opened)) step(false_type{});
          while (n - kKeyGroups >= first) step(true_type{});
        } else {
          while (n - kKeyGroups >= first) step(false_type{});
// ... as in the templates
          issue_pv();
// ... as in the templates
          if (n >= unmasked || (kWindowed && n < opened)) mask(scores, p, keys, row0, n * kTileN);
// ... as in the templates
      for (int i = 0; i + 1 < kKeyGroups; ++i) softmax.merge_partials(s.groups[i], tOrO, row_tid, scale_log2);
// ... as in the templates
    unsigned const flagged[2] = {__ballot_sync(kAllLanes, softmax.residual(0, scale_log2) < kLeastResidual),
                                 __ballot_sync(kAllLanes, softmax.residual(1, scale_log2) < kLeastResidual)};
    if (flagged[0] | flagged[1]) {
      int const warp_row = again.m_block * kTileM + (threadIdx.x - 128) / 32 % (4 * kRowGroups) * 16;
// ... as in the templates
    s.tile[round % 2] = t;
    compiler_fence();
    Empty::arrive(&s.tile_full[round % 2]);
// ... as in the templates
      index = gridDim.x + atomicAdd(p.counter, 1);
// ... as in the templates
      if constexpr (kIsConsumer && true) work(Tile(t), t);
// ... as in the templates
  int const rows = min(kTileM, p.seqlen_q * kPack - t.m_block * kTileM), fours = p.head_dim / 4;
// ... as in the templates
    int const row = t.m_block * kTileM + here, seq = row / kPack, head = t.head * kPack + row % kPack;
// ... as in the templates
struct kernel_golden {
// ... as in the templates
        Empty::init(&s.tile_empty[i], 4 * kGroups + kProducerReturns);
// ... as in the templates
      } else if (kPersistent && threadIdx.x == 32) {
// ... as in the templates
  int64_t const rows = int64_t(p.batch) * p.heads * p.seqlen_q, row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
// ... as in the templates
  for (int i = lane; i < p.splits; i += 32) top = fmaxf(top, p.partial_statistics[i * rows + row].x);
// ... as in the templates
  constexpr int kFours = (kD + 127) / 128, kInFlight = 16 / kFours;
// ... as in the templates
  for (int first = 0; first < p.splits; first += 32) {
    int const here = min(32, p.splits - first);
// ... as in the templates
          int const column = min(4 * lane + 128 * c, p.head_dim - 4);
          x[j][c] = *reinterpret_cast<float4 const*>(p.partial + at * p.head_dim + column);
// ... as in the templates
  for (int c = 0; c < (kD + 127) / 128; ++c) {
    int const column = 4 * lane + 128 * c;
    if (column < p.head_dim) store_four(p, batch, head, seq, column, sum[c], norm);
// ... as in the templates
  if (auto e = cudaFuncSetAttribute(fused_attention<kernel_golden>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage))) return e;
  if constexpr (kClusters) {
    if (auto e = cudaFuncSetAttribute(fused_attention<kernel_golden>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
// ... as in the templates
  return n.splits > 1 && !n.clustered ? n.splits * n.batch * n.heads_q * n.seqlen_q : 0;
// ... as in the templates
                      global_tensor(p.query.data, rows_q(p.seqlen_q), rows_q_stride(p.query.head, p.query.row), p.head_dim,
                                    p.heads / kPack, p.batch, p.query.head * kPack, p.query.batch),
// ... as in the templates
                         global_tensor(of.data, p.seqlen_kv, of.row, p.head_dim, p.heads_kv, p.batch, of.head, of.batch),
// ... as in the templates
  p.k = keys(p.key);
  p.v = keys(p.value);
// ... as in the templates
  p.partial_statistics = reinterpret_cast<float2*>(p.partial + partial_rows(n) * p.head_dim);
  int const heads = p.heads / kPack, all_heads = p.batch * heads;
  p.m_blocks = (p.seqlen_q * kPack + kTileM - 1) / kTileM;
  p.tiles = p.m_blocks * all_heads * p.splits;
  int64_t const kv_bytes = int64_t(2 * sizeof(Element)) * p.seqlen_kv * p.head_dim;
// ... as in the templates
    if (int e = launch_one(clear_counter<kernel_golden>, 1, 1, 32, 0, n.pdl, p, stream)) return e;
// ... as in the templates
  if (int e = launch_one(fused_attention<kernel_golden>, blocks, cluster, kThreads, sizeof(Storage), kDynamic || n.pdl, p, stream)) return e;
  if (p.splits == 1 || p.is_clustered) return 0;
  return launch_one(combine<kernel_golden>, (int64_t(p.batch) * p.heads * p.seqlen_q + 3) / 4, 1, 128, 0, true, p, stream);
}
}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const* integers, int64_t* bytes) {
  using namespace k_golden;
  Integers const& n = view<Integers>(integers);
  *bytes = kCounterBytes + image_bytes(n) + partial_rows(n) * (n.head_dim + 2) * int64_t(sizeof(float));
// ... as in the templates
extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers, double const* scalars, void* workspace, void* stream) {
  using namespace k_golden;
  return k_golden::launch({view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars), workspace},
// ... as in the templates
