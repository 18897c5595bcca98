#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>
#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/fast_math.h>
#include "attention.h"
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

namespace k_golden {
using namespace cute;
using namespace tuner;
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
constexpr int kCounterBytes = kDynamic ? 256 : 0;
// Nothing ties the consumers to the producer in a tile without keys: it says itself that it has read
// where the tile is. From the counter none is taken before it asks.
constexpr bool kProducerReturns = kPersistent && !kDynamic && false;
// Probabilities times 2^kLift: the largest is 256 of e4m3's 448, and 2^-14 is still a normal number.
constexpr float kLift = 0;
// Base-2 logarithm of the smallest largest probability, before the lift: below it too few of a row's
// others are left.
constexpr float kLeastResidual = -8;
// Of two groups that take turns the first alone asks whether K and V are there: the other follows.
constexpr bool kFirstPolls = kPingPong && kGroups == 2;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
// Keys and values of the heads that are worked on together under a causal mask: they stay in L2.
constexpr int64_t kSectionBytes = 32 << 20;

using SmemLayoutQ = decltype(tile_to_shape(SmemAtom<kD, Element>{}, Shape<Int<kTileM>, Int<kD>>{}));
using SmemLayoutKV = decltype(tile_to_shape(SmemAtom<kD, Element>{}, Shape<Int<kTileN>, Int<kD>, Int<kStages>>{}));
using SmemLayoutO = decltype(tile_to_shape(SmemAtom<kD, Out>{}, Shape<_16, Int<kD>>{}));  // a warp's rows
using SmemLayoutVt = decltype(composition(
    SmemLayoutKV{}, make_layout(Shape<Int<kD>, Int<kTileN>, Int<kStages>>{},
                                Stride<Int<kTileN>, _1, Int<kTileN * kD>>{})));
using GroupLayout = Layout<Shape<Int<kRowGroups>, _1, _1>>;
using AtomQK = decltype(GMMA::ss_op_selector<Element, Element, float, Shape<Int<kTileM>, Int<kTileN>, Int<kD>>>());
using MmaQK = decltype(make_tiled_mma(AtomQK{}, GroupLayout{}));
using MmaPV = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<Int<kTileM>, Int<kD>, Int<kTileN>>,
                         GMMA::Major::K, GMMA::Major::MN>(), GroupLayout{}));
inline int64_t image_bytes(Integers const&) { return 0; }

// Rows of Q: the sequence, or (packed heads, sequence), heads running faster.
template <class T, class Rows, class Stride>
CUTE_HOST_DEVICE auto global_tensor(T* data, Rows rows, Stride stride, int d, int heads, int batch,
                                    int64_t head_stride, int64_t batch_stride) {
  return make_tensor(make_gmem_ptr(data), make_shape(rows, d, heads, batch),
                     make_stride(stride, _1{}, head_stride, batch_stride));
}
CUTE_HOST_DEVICE auto rows_q(int seqlen) {
  if constexpr (kPack == 1) return seqlen;
  else return make_shape(Int<kPack>{}, seqlen);
}
CUTE_HOST_DEVICE auto rows_q_stride(int64_t head, int64_t row) {
  if constexpr (kPack == 1) return row;
  else return make_stride(head, row);
}
template <int kRows>
CUTE_HOST_DEVICE auto tile_q() {
  if constexpr (kPack == 1) return Shape<Int<kRows>, Int<kD>>{};
  else return Shape<Shape<Int<kPack>, Int<kRows / kPack>>, Int<kD>>{};
}
CUTE_HOST_DEVICE auto tile_q_at(int index) {
  if constexpr (kPack == 1) return make_coord(index, 0);
  else return make_coord(make_coord(0, index), 0);
}
using GmemQ = decltype(global_tensor((Element const*)nullptr, rows_q(1), rows_q_stride(1, 1), 1, 1, 1, 1, 1));
using GmemKV = decltype(global_tensor((Element const*)nullptr, 1, int64_t(1), 1, 1, 1, 1, 1));
using TmaQ = decltype(make_tma_copy(SM90_TMA_LOAD{}, GmemQ{}, SmemLayoutQ{}, tile_q<kTileM>(), _1{}));
using TmaKV = decltype(make_tma_copy(SM90_TMA_LOAD{}, GmemKV{}, SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kD>>{}, _1{}));

struct Matrices {
  Element const* data;
  int64_t batch, head, row;  // strides, elements
  CUTE_DEVICE Element const* row_of(int in_batch, int in_head, int in_row) const {
    return data + in_batch * batch + in_head * head + in_row * row;
  }
};

struct Params {
  TmaQ q;
  TmaKV k, v;
  Matrices query, key, value;
  Out* out;
  int64_t out_batch, out_head, out_row;
  float* lse;
  int* counter;                // of tiles handed out, beyond each block's first
  float* partial;              // (splits, B, H, SQ, D)
  float2* partial_statistics;  // (splits, B, H, SQ): maximum, sum of exponentials
  int batch, heads, heads_kv, seqlen_q, seqlen_kv, head_dim, splits;
  bool is_clustered;
  int m_blocks, tiles, section;
  cutlass::FastDivmod by_m_blocks, by_splits, by_heads;
  float scale_log2;  // of the scores, or of what the soft cap makes of them
};

// Queries from..to see none but keys [first_key(from), end_key(to)) of those that there are.
CUTE_DEVICE int first_key(Params const& p, int from) {
  return 0;
}
CUTE_DEVICE int end_key(Params const& p, int const& keys, int to) {
  return kCausal ? min(keys, to + 1) : keys;
}

// What a block works on: rows m_block * kTileM .. of one (packed) head, keys [first, last) in tiles.
struct Tile {
  int m_block, head, batch, split, first, last;

  CUTE_DEVICE static Tile none() { return {-1, 0, 0, 0, 0, 0}; }
  CUTE_DEVICE static Tile at(Params const& p, int index) {
    if (index >= p.tiles) return none();
    Tile t;
    // The splits of a tile are neighbours: they may be a cluster.
    t.split = 0;
    if constexpr (kSplits) p.by_splits(index, t.split, index);
    int head_index;  // of batch x heads
    if constexpr (kCausal) {
      // Sections of heads that share the L2; in each the longest tiles of all heads come first.
      int const all_heads = p.batch * (p.heads / kPack), per_section = p.section * p.m_blocks;
      int const section = index / per_section, within = index - section * per_section;
      int const here = min(p.section, all_heads - section * p.section);
      t.m_block = p.m_blocks - 1 - within / here;
      head_index = section * p.section + within % here;
    } else {
      p.by_m_blocks(head_index, t.m_block, index);
    }
    p.by_heads(t.batch, t.head, head_index);
    int const last_row = ((t.m_block + 1) * kTileM - 1) / kPack;
    t.last = (end_key(p, p.seqlen_kv, last_row) + kTileN - 1) / kTileN;
    // A window that lies past the last key has no tiles.
    t.first = kWindowed ? min(first_key(p, t.m_block * kTileM / kPack) / kTileN, t.last) : 0;
    if (kSplits && p.splits > 1) {
      int const share = (t.last - t.first + p.splits - 1) / p.splits;
      t.first = min(t.first + t.split * share, t.last);
      t.last = min(t.first + share, t.last);
    }
    return t;
  }
};

// What scores are multiplied by, to base 2, and outputs; one head's for all rows of a thread.
CUTE_DEVICE float const& score_scale(Params const& p, int batch, int head) {
  return p.scale_log2;
}
CUTE_DEVICE float value_scale(Params const& p, Tile const& t) {
  return 1.f;
}
// Partial outputs of a block, read by the other blocks of its cluster.
struct ClusterPartials {
  static constexpr int kRow = kD + 8;  // padded: the rows of a warp lie in different banks
  float out[kClusters ? kTileM * kRow : 2];
  float2 statistics[kClusters ? kTileM : 1];  // maximum, sum
};

// Partial outputs of a warp group, read by the group that shares its rows: each thread reads those of
// the thread in its place.
struct GroupPartials {
  static constexpr int kValues = kKeyGroups > 1 ? kD / 2 + 4 : 1;  // of O, then maxima, then sums
  float value[kValues][kKeyGroups > 1 ? 128 * kRowGroups : 1];
};

struct Storage {
  struct Operands {
    alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutQ>, 1024> q;
    alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> k;
    alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> v;
  };
  union {
    Operands operands;
    ClusterPartials cluster;  // once nobody reads the operands any more
  };
  GroupPartials groups[kKeyGroups > 1 ? kKeyGroups - 1 : 1];
  uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t tile_full[2], tile_empty[2], tile_wanted;
  Tile tile[2];
};

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// A place in a ring and the parity of its round; runs on from tile to tile.
struct PipelineState {
  int at = 0;
  uint32_t parity = 0;
  CUTE_DEVICE int stage() const { return at; }
  CUTE_DEVICE uint32_t phase() const { return parity; }
  template <int kPlaces = 1>
  CUTE_DEVICE void next() {
    at += kPlaces;
    if (kPlaces == 1 ? at == kStages : at >= kStages) at -= kStages, parity ^= 1;
  }
  CUTE_DEVICE void start(int stage) { at = stage; }
};

// Named barriers, beside those that CUTLASS reserves. Ping-pong and key groups exclude each other.
enum Barrier {
  kOrderOfGroup = 0,          // one a consumer group: its turn of issuing GEMMs
  kPartialsOfGroup = 0,       // one a row group: its key groups' partials are written
  kPartialsOfBlock = kGroups  // the block's partials are written
};
// Order of the consumer groups' GEMMs: each waits on its own barrier, then frees the next one's.
CUTE_DEVICE void scheduler_barrier_wait(int group) {
  if constexpr (kPingPong) cutlass::arch::NamedBarrier::sync(256, kOrderOfGroup + group);
}
CUTE_DEVICE void scheduler_barrier_arrive(int group) {
  if constexpr (kPingPong) {
    cutlass::arch::NamedBarrier::arrive(256, kOrderOfGroup + (group + 1 == kGroups ? 0 : group + 1));
  }
}
// The host's compiler need not see what only the device runs: reading it took a quarter of a unit's
// time.
#if defined(__CUDA_ARCH__)
// The producing thread's state, which runs on from tile to tile.
struct Producer {
  PipelineState k, v;
  uint32_t q_phase = 0;

  CUTE_DEVICE void load(Params const& p, Storage& s, Tile const& t) {
    if (t.first == t.last) {
      if constexpr (kDynamic) Empty::arrive(&s.tile_wanted);
      return;
    }
    auto const shape_q = make_shape(rows_q(p.seqlen_q), p.head_dim, p.heads / kPack, p.batch);
    auto const shape_kv = make_shape(p.seqlen_kv, p.head_dim, p.heads_kv, p.batch);
    auto const tile_kv = Shape<Int<kTileN>, Int<kD>>{};
    int const head_kv = t.head / (p.heads / kPack / p.heads_kv);
    auto const at = tile_q_at(t.m_block);
    Tensor gQ = local_tile(p.q.get_tma_tensor(shape_q)(_, _, t.head, t.batch), tile_q<kTileM>(), at);
    Tensor gK = local_tile(p.k.get_tma_tensor(shape_kv)(_, _, head_kv, t.batch), tile_kv, make_coord(_, 0));
    Tensor gV = local_tile(p.v.get_tma_tensor(shape_kv)(_, _, head_kv, t.batch), tile_kv, make_coord(_, 0));
    Tensor sQ = make_tensor(make_smem_ptr(s.operands.q.data()), SmemLayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(s.operands.k.data()), SmemLayoutKV{});
    Tensor sV = make_tensor(make_smem_ptr(s.operands.v.data()), SmemLayoutKV{});
    auto slice_q = p.q.get_slice(0);
    auto slice_k = p.k.get_slice(0);
    auto slice_v = p.v.get_slice(0);
    Tensor tQg = group_modes<1, 3>(slice_q.partition_S(gQ));
    Tensor tQs = group_modes<1, 3>(slice_q.partition_D(sQ));
    Tensor tKg = slice_k.partition_S(gK);
    Tensor tKs = slice_k.partition_D(sK);
    Tensor tVg = slice_v.partition_S(gV);
    Tensor tVs = slice_v.partition_D(sV);
    constexpr uint32_t q_bytes = kTileM * kD * sizeof(Element), kv_bytes = kTileN * kD * sizeof(Element);

    auto load = [&](auto const& tma, auto const& source, auto const& target, uint64_t* full, uint64_t* empty, PipelineState& at, int n) {
      Empty::wait(&empty[at.stage()], at.phase() ^ 1);
      Full::arrive_and_expect_tx(&full[at.stage()], kv_bytes);
      copy(tma.with(full[at.stage()], 0, TMA::CacheHintSm90::EVICT_LAST), source(_, _, _, n), target(_, _, _, at.stage()));
      at.next();
    };
    grid_dependency_wait();
    prefetch(p.q, tQg);
    int n = t.last - 1;
    load(p.k, tKg, tKs, s.k_full, s.k_empty, k, n);
    Empty::wait(&s.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    Full::arrive_and_expect_tx(&s.q_full, q_bytes);
    copy(p.q.with(s.q_full, 0, TMA::CacheHintSm90::EVICT_FIRST), tQg, tQs);
    for (; n > t.first; --n) {
      load(p.k, tKg, tKs, s.k_full, s.k_empty, k, n - 1);
      load(p.v, tVg, tVs, s.v_full, s.v_empty, v, n);
    }
    if constexpr (kDynamic) Empty::arrive(&s.tile_wanted);
    load(p.v, tVg, tVs, s.v_full, s.v_empty, v, n);
  }
};
// Statistics of a thread's two rows. Mode 0 of the scores is ((2 columns, 2 rows, N/8 octets)).
struct Softmax {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
  float shift[2];   // what is taken from the scaled scores
  float factor[2];  // what O must be multiplied by

  // A maximum to base 2, rounded up: no score's multiply-add with it exceeds zero.
  CUTE_DEVICE static float scaled(float maximum, float scale_log2) { return __fmul_ru(maximum, scale_log2); }
  // What the rounding left a row's largest score at, at most zero; 0 where no key was seen.
  CUTE_DEVICE float residual(int r, float scale_log2) const {
    return maximum[r] == -INFINITY ? 0.f : fmaf(maximum[r], scale_log2, -scaled(maximum[r], scale_log2));
  }

  // Takes up the maxima of new scores.
  template <bool kFirst, class Scores>
  CUTE_DEVICE void maxima(Scores const& scores, float scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float top = maximum[r];
      CUTE_UNROLL
      for (int j = 0; j < kTileN / 8; ++j) {
        top = fmaxf(top, fmaxf(scores(make_coord(0, r, j), 0, 0), scores(make_coord(1, r, j), 0, 0)));
      }
      top = quad_max(top);
      if constexpr (!kFirst) {
        factor[r] = maximum[r] == top ? 1.f : exp2_approx((maximum[r] - top) * scale_log2);
        sum[r] *= factor[r];
      }
      maximum[r] = top;
      float const rounded = scaled(top, scale_log2) - kLift;  // not in the choice: it would be a branch
      shift[r] = top == -INFINITY ? 0.f : rounded;
    }
  }

  // Turns the scores of octets [kFrom, kTo) into probabilities in place.
  template <int kFrom, int kTo, class Scores>
  CUTE_DEVICE void exponentials(Scores& scores, float scale_log2) {
    CUTE_UNROLL
    for (int j = kFrom; j < kTo; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float& x = scores(make_coord(0, r, j), 0, 0);
        float& y = scores(make_coord(1, r, j), 0, 0);
        x = exp2_approx(fmaf(x, scale_log2, -shift[r]));
        y = exp2_approx(fmaf(y, scale_log2, -shift[r]));
        sum[r] += x;
        sum[r] += y;
      }
    }
  }

  // Stores O, not yet divided, and the statistics for the group that shares the rows.
  template <class Fragment>
  CUTE_DEVICE void store_partials(GroupPartials& partials, Fragment const& out, int thread) const {
    CUTE_UNROLL
    for (int i = 0; i < kD / 2; ++i) partials.value[i][thread] = out(i);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      partials.value[kD / 2 + r][thread] = maximum[r];
      partials.value[kD / 2 + 2 + r][thread] = sum[r];
    }
    compiler_fence();
  }
  // Adds another group's O and statistics to its own.
  template <class Fragment>
  CUTE_DEVICE void merge_partials(GroupPartials const& partials, Fragment& out, int thread, float scale_log2) {
    compiler_fence();
    float theirs[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const other = partials.value[kD / 2 + r][thread], top = fmaxf(maximum[r], other);
      factor[r] = maximum[r] == top ? 1.f : exp2_approx((maximum[r] - top) * scale_log2);
      theirs[r] = other == top ? 1.f : exp2_approx((other - top) * scale_log2);
      maximum[r] = top;
      sum[r] = sum[r] * factor[r] + partials.value[kD / 2 + 2 + r][thread] * theirs[r];
    }
    CUTE_UNROLL
    for (int i = 0; i < kD / 2; ++i) {
      int const r = i / 2 % 2;  // a thread's accumulators are (2 columns, 2 rows, octets)
      out(i) = out(i) * factor[r] + partials.value[i][thread] * theirs[r];
    }
  }
};

template <class Scores>
CUTE_DEVICE void cap(Scores& scores, Params const& p) {
}

template <class Scores>
CUTE_DEVICE void mask(Scores& scores, Params const& p, int const& keys, int row0, int col0) {
  int const lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const row = (row0 + 8 * r) / kPack, first = col0 + 2 * (lane % 4);
    int const begin = first_key(p, row) - first, limit = end_key(p, keys, row) - first;
    CUTE_UNROLL
    for (int j = 0; j < kTileN / 8; ++j) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        int const key = 8 * j + c;  // after the thread's first
        if (key >= limit || (kWindowed && key < begin)) scores(make_coord(c, r, j), 0, 0) = -INFINITY;
      }
    }
  }
}
// Natural logarithm of a row's sum of exponentials; -inf where no key was seen.
CUTE_DEVICE float log_sum_exp(float maximum, float sum, float scale_log2) {
  float const shift = maximum == -INFINITY ? 0.f : Softmax::scaled(maximum, scale_log2);
  return (shift + log2f(sum)) * kLn2;
}

// Place of a row in the log-sum-exp.
CUTE_DEVICE int64_t row_index(Params const& p, Tile const& t, int head, int seq) {
  return (int64_t(t.batch) * p.heads + head) * p.seqlen_q + seq;
}
CUTE_DEVICE Out* out_row(Params const& p, Tile const& t, int head, int seq) {
  return p.out + t.batch * p.out_batch + head * p.out_head + seq * p.out_row;
}
// Where a row of a split goes: to the block's shared memory, or to the workspace.
struct Partial {
  float* out;
  float2* statistics;
};
CUTE_DEVICE Partial partial_of(Params const& p, Storage& s, Tile const& t, int row, int64_t at) {
  int const here = row - t.m_block * kTileM;
  if (kClusters && p.is_clustered) return {s.cluster.out + here * ClusterPartials::kRow, s.cluster.statistics + here};
  int64_t const partial = int64_t(t.split) * p.batch * p.heads * p.seqlen_q + at;
  return {p.partial + partial * p.head_dim, p.partial_statistics + partial};
}

// O and the log-sum-exp of a thread's two rows, straight from registers.
template <class Fragment>
CUTE_DEVICE void store(Params const& p, Storage& s, Tile const& t, Fragment const& out, int row0, Softmax const& softmax, float const& scale_log2, float const (&norm)[2]) {
  int const q = threadIdx.x % 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const row = row0 + 8 * r, seq = row / kPack, head = t.head * kPack + row % kPack;
    bool const is_row = seq < p.seqlen_q;
    int64_t const at = row_index(p, t, head, seq);
    if (kSplits && p.splits > 1) {
      Partial const target = partial_of(p, s, t, row, at);
      // Of the exact product, as partials with other maxima are.
      float const sum = softmax.sum[r] * exp2_approx(-softmax.residual(r, scale_log2));
      if (is_row && q == 0) *target.statistics = make_float2(softmax.maximum[r], sum);
      CUTE_UNROLL
      for (int j = 0; j < kD / 8; ++j) {
        if (is_row && 8 * j < p.head_dim) {
          *reinterpret_cast<float2*>(target.out + 8 * j + 2 * q) =
              make_float2(out(make_coord(0, r, j), 0, 0) * norm[r], out(make_coord(1, r, j), 0, 0) * norm[r]);
        }
      }
      continue;
    }
    if (p.lse && is_row && q == 0) p.lse[at] = log_sum_exp(softmax.maximum[r], softmax.sum[r], scale_log2);
    Out* const target = out_row(p, t, head, seq);
    CUTE_UNROLL
    for (int g = 0; g < kD / 32; ++g) {
      uint32_t word[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        word[i] = pack<Out>(out(make_coord(0, r, 4 * g + i), 0, 0) * norm[r],
                            out(make_coord(1, r, 4 * g + i), 0, 0) * norm[r]);
      }
      transpose_quad(word);
      int const column = 32 * g + 8 * q;
      if (is_row && column < p.head_dim) {
        *reinterpret_cast<uint4*>(target + column) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}
// Rows whose maximum is so large that the rounded product with the scale is off by more than P can
// hold (`Softmax::residual`): each once more, by a warp, in plain arithmetic that subtracts the
// maximum before the scale. Few models ever come here: a scaled maximum of 2^25 and more.
//
// Every branch is on a vote: what the compiler cannot see to be the same in all lanes would cost the
// main loop its uniform registers.
CUTE_DEVICE bool vote(bool mine) { return __any_sync(kAllLanes, mine); }

struct Recomputed {
  static constexpr int kColumns = kD / 32;  // of O, that a lane has: 32 apart
  float maximum = -INFINITY, sum = 0.f;     // as `Softmax` has them, of the exact product
  float out[kColumns] = {};                 // not yet divided

  // 0 beyond the last key.
  CUTE_DEVICE static float score(Params const& p, Element const* query, Element const* keys, int key, int end) {
    float sum = 0.f;
    Element const* const row = keys + min(key, end - 1) * p.key.row;
    for (int d = 0; d < p.head_dim; ++d) sum = fmaf(float(query[d]), float(row[d]), sum);
    return sum;
  }

  CUTE_DEVICE Recomputed(Params const& p, Tile const& t, int head, int seq) {
    int const lane = threadIdx.x % 32, head_kv = head / (p.heads / p.heads_kv);
    Element const* const query = p.query.row_of(t.batch, head, seq);
    Element const* const keys = p.key.row_of(t.batch, head_kv, 0);
    Element const* const values = p.value.row_of(t.batch, head_kv, 0);
    int const begin = max(first_key(p, seq), t.first * kTileN);
    int const end = min(end_key(p, p.seqlen_kv, seq), t.last * kTileN);
    float const scale_log2 = score_scale(p, t.batch, head);
    for (int first = begin; vote(first < end); first += 32) maximum = fmaxf(maximum, score(p, query, keys, first + lane, end));
    maximum = warp_max(maximum);
    for (int first = begin; vote(first < end); first += 32) {
      float const below = score(p, query, keys, first + lane, end) - maximum;
      float const mine = first + lane < end ? exp2_approx(below * scale_log2) : 0.f;
      sum += mine;
      for (int i = 0; i < 32; ++i) {
        float const weight = __shfl_sync(kAllLanes, mine, i);
        CUTE_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          bool const is_seen = weight > 0.f && lane + 32 * c < p.head_dim;
          int64_t const at = is_seen ? (first + i) * p.value.row + lane + 32 * c : 0;
          out[c] = fmaf(weight, is_seen ? float(values[at]) : 0.f, out[c]);
        }
      }
    }
    sum = warp_sum(sum);
  }
};

// Computes rows of a warp's 16 anew and stores them over what `store` left. Bit 4 i of flagged[r]
// stands for row i + 8 r.
CUTE_DEVICE void recompute(Params const& p, Storage& s, Tile const& t, int warp_row, unsigned const (&flagged)[2]) {
  int const lane = threadIdx.x % 32;
  __syncwarp();
  for (int i = 0; i < 16; ++i) {
    int const row = warp_row + i, seq = row / kPack, head = t.head * kPack + row % kPack;
    bool const is_flagged = (i < 8 ? flagged[0] : flagged[1]) >> 4 * (i % 8) & 1;
    if (!vote(is_flagged && seq < p.seqlen_q)) continue;
    Recomputed const again(p, t, head, seq);
    float const norm = value_scale(p, t) / again.sum, sum = again.sum * exp2f(kLift);
    int64_t const at = row_index(p, t, head, seq);
    bool const is_partial = kSplits && p.splits > 1;
    if (is_partial) {
      Partial const target = partial_of(p, s, t, row, at);
      if (lane == 0) *target.statistics = make_float2(again.maximum, sum);
      CUTE_UNROLL
      for (int c = 0; c < Recomputed::kColumns; ++c) {
        if (lane + 32 * c < p.head_dim) target.out[lane + 32 * c] = again.out[c] * norm;
      }
    } else {
      if (lane == 0 && p.lse) p.lse[at] = log_sum_exp(again.maximum, sum, score_scale(p, t.batch, head));
      CUTE_UNROLL
      for (int c = 0; c < Recomputed::kColumns; ++c) {
        if (lane + 32 * c < p.head_dim) out_row(p, t, head, seq)[lane + 32 * c] = Out(again.out[c] * norm);
      }
    }
  }
}
// A consumer warp group's state, which runs on from tile to tile.
struct Consumer {
  PipelineState k, v;
  uint32_t q_phase = 0;

  // `again` is the tile as it lies in shared memory: what is rarely needed is read there.
  CUTE_DEVICE void work(Params const& p, Storage& s, Tile const& t, Tile const& again) {
    int const group = cutlass::canonical_warp_group_idx() - 1;
    int const tid = threadIdx.x - 128, row_tid = tid % (128 * kRowGroups);
    int const row_group = group % kRowGroups, key_group = kKeyGroups > 1 ? group / kRowGroups : 0;
    Tensor sQ = make_tensor(make_smem_ptr(s.operands.q.data()), SmemLayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(s.operands.k.data()), SmemLayoutKV{});
    Tensor sVt = make_tensor(make_smem_ptr(s.operands.v.data()), SmemLayoutVt{});
    MmaQK mma_qk;
    MmaPV mma_pv;
    auto group_qk = mma_qk.get_slice(row_group * 128);
    auto group_pv = mma_pv.get_slice(row_group * 128);
    Tensor tSrQ = group_qk.partition_fragment_A(sQ);
    Tensor tSrK = group_qk.partition_fragment_B(sK);
    Tensor tOrV = group_pv.partition_fragment_B(sVt);
    Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<kTileM>, Int<kTileN>>{});
    Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<kTileM>, Int<kD>>{});
    Tensor tOrP = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileN / 16>>>{});
    clear(tOrO);

    int const group_row = t.m_block * kTileM + row_group * 64;
    int const row0 = group_row + (tid % 128) / 32 * 16 + (tid % 32) / 4;
    float const& scale_log2 = score_scale(p, t.batch, t.head * kPack + row0 % kPack);
    Softmax softmax;

    auto release = [&](uint64_t* empty) {
      __syncwarp();
      if (tid % 32 == 0) Empty::arrive(empty);
    };
    auto issue_qk = [&](auto& scores, int stage) {
      warpgroup_fence_operand(scores);
      warpgroup_arrive();
      mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int kk = 0; kk < size<2>(tSrQ); ++kk) {
        cute::gemm(mma_qk, tSrQ(_, _, kk), tSrK(_, _, kk, stage), scores);
        mma_qk.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    auto issue_pv = [&] {
      warpgroup_fence_operand(tOrO);
      warpgroup_fence_operand(tOrP);
      warpgroup_arrive();
      mma_pv.accumulate_ = GMMA::ScaleOut::One;
      CUTE_UNROLL
      for (int kk = 0; kk < size<2>(tOrP); ++kk) {
        cute::gemm(mma_pv, tOrP(_, _, kk), tOrV(_, _, kk, v.stage()), tOrO);
      }
      warpgroup_commit_batch();
    };
    // Blocks of keys from `opened` on and below `unmasked` are seen whole by every row of the group.
    int const& keys = p.seqlen_kv;
    int const unmasked = end_key(p, keys, group_row / kPack) / kTileN;
    int const opened = (first_key(p, (group_row + 63) / kPack) + kTileN - 1) / kTileN;
    auto values_read = [&] {
      warpgroup_fence_operand(tOrO);
      release(&s.v_empty[v.stage()]);
      v.next<kKeyGroups>();
    };
    auto to_p = [&](auto const& scores) {
      // Relabels the accumulator as the A operand: column octets 2k and 2k+1 make one K slice of 16.
      CUTE_UNROLL
      for (int kk = 0; kk < kTileN / 16; ++kk) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            recast<uint32_t>(tOrP)(make_coord(0, r, half), 0, kk) = pack<Element>(
                scores(make_coord(0, r, 2 * kk + half), 0, 0), scores(make_coord(1, r, 2 * kk + half), 0, 0));
          }
        }
      }
    };
    auto rescale_o = [&] {
      CUTE_UNROLL
      for (int j = 0; j < kD / 8; ++j) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          tOrO(make_coord(0, r, j), 0, 0) *= softmax.factor[r];
          tOrO(make_coord(1, r, j), 0, 0) *= softmax.factor[r];
        }
      }
    };

    constexpr int kOctets = kTileN / 8;
    auto first_step = [&](auto& scores, int n) {
      cap(scores, p);
      if (n >= unmasked || (kWindowed && n < opened)) mask(scores, p, keys, row0, n * kTileN);
      softmax.template maxima<true>(scores, scale_log2);
      softmax.template exponentials<0, kOctets>(scores, scale_log2);
      to_p(scores);
    };
    float out_scale = 1.f;
    int const first = t.first;
    if (first < t.last) {
      Full::wait(&s.q_full, q_phase);
      q_phase ^= 1;
    }
    if constexpr (kKeyGroups > 1) k.start(key_group), v.start(key_group);  // one tile a block
    int n = t.last - 1 - key_group;  // the block of keys whose probabilities are in P, or about to be
    if (n >= first) {
      if constexpr (kQInRegisters) {
        auto copy_q = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma_qk);
        auto thread_q = copy_q.get_thread_slice(row_tid);
        copy(copy_q, thread_q.partition_S(sQ), thread_q.retile_D(tSrQ));
      }
      // Q in registers has left shared memory once a product has read it, not when its loads were
      // issued: nothing orders these before a copy that the release lets in.
      auto queries_read = [&] {
        if constexpr (kQInRegisters) {
          async_copy_fence();
          release(&s.q_empty);
        }
      };
      Full::wait(&s.k_full[k.stage()], k.phase());
      if constexpr (kScoreBuffers == 1) {
        auto release_keys = [&] {
          release(&s.k_empty[k.stage()]);
          if (!kQInRegisters && n - kKeyGroups < first) release(&s.q_empty);
          k.next<kKeyGroups>();
        };
        auto step = [&](auto is_masked) {
          n -= kKeyGroups;
          if (!kFirstPolls || group == 0) Full::wait(&s.k_full[k.stage()], k.phase());
          scheduler_barrier_wait(group);
          issue_qk(tSrS, k.stage());
          if (!kFirstPolls || group == 0) Full::wait(&s.v_full[v.stage()], v.phase());
          issue_pv();
          scheduler_barrier_arrive(group);
          warpgroup_wait<1>();
          warpgroup_fence_operand(tSrS);
          cap(tSrS, p);
          if constexpr (decltype(is_masked)::value) mask(tSrS, p, keys, row0, n * kTileN);
          // The maxima and kEarly of the exponentials run under the GEMM that is in flight; the
          // rest is mixed with the conversions.
          softmax.template maxima<false>(tSrS, scale_log2);
          constexpr int kEarly = kOctets * 50 / 100;
          softmax.template exponentials<0, kEarly>(tSrS, scale_log2);
          warpgroup_fence_operand(tSrS);
          opaque(softmax.shift[0], softmax.shift[1]);
          release_keys();
          warpgroup_wait<0>();
          values_read();
          softmax.template exponentials<kEarly, kOctets>(tSrS, scale_log2);
          to_p(tSrS);
          rescale_o();
        };
        issue_qk(tSrS, k.stage());
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
        queries_read();
        release_keys();
        first_step(tSrS, n);
        if constexpr (kCausal || kWindowed) {
          while (n - kKeyGroups >= max(first, unmasked)) step(true_type{});
        }
        if constexpr (kWindowed) {
          while (n - kKeyGroups >= max(first, opened)) step(false_type{});
          while (n - kKeyGroups >= first) step(true_type{});
        } else {
          while (n - kKeyGroups >= first) step(false_type{});
        }
      } else {
        // Q K^T of the block after next is issued before this block's softmax. At the end there is
        // none: the last block's is computed once more and dropped, which keeps what is in flight
        // the same on every path; its keys are released only then.
        Tensor tSrT = make_fragment_like(tSrS);
        auto issue_next = [&](auto& scores) {
          PipelineState const held = k;
          bool const is_new = n > first;
          if (is_new) {
            k.next();
            Full::wait(&s.k_full[k.stage()], k.phase());
          }
          issue_qk(scores, k.stage());
          return is_new ? held.stage() : -1;
        };
        auto release_stage = [&](int stage) {
          if (stage >= 0) release(&s.k_empty[stage]);
        };
        auto step = [&](auto& scores, auto& free) {
          Full::wait(&s.v_full[v.stage()], v.phase());
          issue_pv();
          --n;
          int const stage = issue_next(free);
          warpgroup_wait<2>();
          warpgroup_fence_operand(scores);
          release_stage(stage);
          cap(scores, p);
          if (n >= unmasked || (kWindowed && n < opened)) mask(scores, p, keys, row0, n * kTileN);
          softmax.template maxima<false>(scores, scale_log2);
          softmax.template exponentials<0, kOctets>(scores, scale_log2);
          warpgroup_wait<1>();
          values_read();
          to_p(scores);
          rescale_o();
        };
        issue_qk(tSrS, k.stage());
        int const stage = issue_next(tSrT);
        warpgroup_wait<1>();
        warpgroup_fence_operand(tSrS);
        queries_read();
        release_stage(stage);
        first_step(tSrS, n);
        while (true) {
          if (n == first) {
            warpgroup_wait<0>();
            break;
          }
          step(tSrT, tSrS);
          if (n == first) {
            warpgroup_wait<0>();
            break;
          }
          step(tSrS, tSrT);
        }
      }
      Full::wait(&s.v_full[v.stage()], v.phase());
      issue_pv();
      out_scale = value_scale(p, t);
      warpgroup_wait<0>();
      values_read();
      if constexpr (kScoreBuffers == 2) {
        release(&s.k_empty[k.stage()]);
        if constexpr (!kQInRegisters) release(&s.q_empty);
        k.next();
      }
    }
    if constexpr (kKeyGroups > 1) {
      // Q is released once by every group, also by one without keys.
      if (first < t.last && key_group >= t.last - first) release(&s.q_empty);
      if (key_group > 0) {
        softmax.store_partials(s.groups[key_group - 1], tOrO, row_tid);
        cutlass::arch::NamedBarrier::arrive(128 * kKeyGroups, kPartialsOfGroup + row_group);
        return;
      }
      cutlass::arch::NamedBarrier::sync(128 * kKeyGroups, kPartialsOfGroup + row_group);
      for (int i = 0; i + 1 < kKeyGroups; ++i) softmax.merge_partials(s.groups[i], tOrO, row_tid, scale_log2);
    }
    float norm[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      softmax.sum[r] = quad_sum(softmax.sum[r]);
      norm[r] = softmax.sum[r] > 0.f ? out_scale / softmax.sum[r] : 0.f;
    }
    if (kClusters && p.is_clustered) {
      cutlass::arch::NamedBarrier::sync(128 * kGroups, kPartialsOfBlock);
      compiler_fence();
    }
    grid_dependency_wait();
    store(p, s, t, tOrO, row0, softmax, scale_log2, norm);
    unsigned const flagged[2] = {__ballot_sync(kAllLanes, softmax.residual(0, scale_log2) < kLeastResidual),
                                 __ballot_sync(kAllLanes, softmax.residual(1, scale_log2) < kLeastResidual)};
    if (flagged[0] | flagged[1]) {
      int const warp_row = again.m_block * kTileM + (threadIdx.x - 128) / 32 % (4 * kRowGroups) * 16;
      recompute(p, s, again, warp_row, flagged);
    }
  }
};
// Hands out tiles to a persistent block's producer and consumers: one thread. From the counter a
// tile is taken when the producer is about to run out of work, no earlier: whoever is done first
// gets the next one.
CUTE_DEVICE void schedule(Params const& p, Storage& s) {
  int index = blockIdx.x;
  for (int round = 0;; ++round) {
    Tile const t = Tile::at(p, index);
    Empty::wait(&s.tile_empty[round % 2], round / 2 % 2 ^ 1);
    compiler_fence();
    s.tile[round % 2] = t;
    compiler_fence();
    Empty::arrive(&s.tile_full[round % 2]);
    if (t.m_block < 0) break;
    if constexpr (kDynamic) {
      Empty::wait(&s.tile_wanted, round % 2);
      index = gridDim.x + atomicAdd(p.counter, 1);
    } else {
      index += gridDim.x;
    }
  }
}

// Calls work(tile, tile) for every tile of this block, in the producing thread and in the consumer warps.
template <bool kIsConsumer, class Work>
CUTE_DEVICE void for_each_tile(Params const& p, Storage& s, Work&& work) {
  if constexpr (kPersistent) {
    for (int round = 0;; ++round) {
      Empty::wait(&s.tile_full[round % 2], round / 2 % 2);
      compiler_fence();
      Tile const& t = s.tile[round % 2];
      if (t.m_block < 0) break;
      // The producer reads it where it lies, having few registers; so do consumers that have none
      // to spare, or a sequence's own lengths to keep.
      if constexpr (kIsConsumer && true) work(Tile(t), t);
      else work(t, t);
      if constexpr (kIsConsumer) {
        __syncwarp();
        compiler_fence();
        if (threadIdx.x % 32 == 0) Empty::arrive(&s.tile_empty[round % 2]);
      } else if constexpr (kProducerReturns) {
        compiler_fence();
        Empty::arrive(&s.tile_empty[round % 2]);
      }
    }
  } else {
    Tile const t = Tile::at(p, blockIdx.x);
    work(t, t);
  }
}
CUTE_DEVICE void add(float4& sum, float weight, float4 const& x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}
CUTE_DEVICE void store_four(Params const& p, int batch, int head, int seq, int column, float4 const& sum, float norm) {
  cutlass::Array<float, 4> four;
  four[0] = sum.x * norm, four[1] = sum.y * norm, four[2] = sum.z * norm, four[3] = sum.w * norm;
  auto const packed = cutlass::NumericArrayConverter<Out, float, 4>{}(four);
  *reinterpret_cast<uint2*>(p.out + batch * p.out_batch + head * p.out_head + seq * p.out_row + column) =
      reinterpret_cast<uint2 const&>(packed);
}

// A value in the shared memory of another block of the cluster.
template <class T>
CUTE_DEVICE T remote(T const& mine, int block) {
  return load_cluster(set_block_rank(cast_smem_ptr_to_uint(&mine), block), mine);
}

// The outputs of a cluster's splits, weighted by their sums of exponentials: each block its part of
// the tile, four columns a thread at a time.
CUTE_DEVICE void combine_cluster(Params const& p, Storage& s) {
  constexpr int kMostSplits = 16;
  Tile const t = Tile::at(p, blockIdx.x);
  int const rows = min(kTileM, p.seqlen_q * kPack - t.m_block * kTileM), fours = p.head_dim / 4;
  int const part = (rows * fours + p.splits - 1) / p.splits, begin = t.split * part;
  for (int item = begin + threadIdx.x - 128; item < min(begin + part, rows * fours); item += 128 * kGroups) {
    int const here = item / fours, column = item % fours * 4;
    float2 statistics[kMostSplits];
    float top = -INFINITY, total = 0.f;
    // Always as many loads as there may be splits, all in flight at once: a branch would put each
    // after the one before.
    CUTE_UNROLL
    for (int i = 0; i < kMostSplits; ++i) {
      statistics[i] = remote(s.cluster.statistics[here], min(i, p.splits - 1));
      if (i >= p.splits) statistics[i].y = 0.f;
      top = fmaxf(top, statistics[i].x);
    }
    int const row = t.m_block * kTileM + here, seq = row / kPack, head = t.head * kPack + row % kPack;
    float const scale_log2 = score_scale(p, t.batch, head);
    float const shift = top == -INFINITY ? 0.f : top;
    float4 const& mine = reinterpret_cast<float4 const&>(s.cluster.out[here * ClusterPartials::kRow + column]);
    float4 sum{};
    CUTE_UNROLL
    for (int i = 0; i < kMostSplits; ++i) {
      float const w = statistics[i].y * exp2_approx((statistics[i].x - shift) * scale_log2);
      total += w;
      add(sum, w, remote(mine, min(i, p.splits - 1)));
    }
    if (column == 0 && p.lse) {
      p.lse[(int64_t(t.batch) * p.heads + head) * p.seqlen_q + seq] = log_sum_exp(top, total, scale_log2);
    }
    store_four(p, t.batch, head, seq, column, sum, total > 0.f ? 1.f / total : 0.f);
  }
}

// Every thread of the cluster comes here twice: once the partials are written, and once they were
// read.
CUTE_DEVICE void cluster_sync() {
  __syncwarp();
  compiler_fence();
  cluster_arrive();
  cluster_wait();
  compiler_fence();
}
#endif

struct kernel_golden {
  __device__ __forceinline__ static void run(Params const& p) {
#if defined(__CUDA_ARCH__)
    extern __shared__ __align__(1024) unsigned char raw[];
    Storage& s = *reinterpret_cast<Storage*>(raw);
    if (threadIdx.x == 0) {
      Full::init(&s.q_full, 1);
      Empty::init(&s.q_empty, 4 * kGroups);
      for (int i = 0; i < kStages; ++i) {
        Full::init(&s.k_full[i], 1);
        Full::init(&s.v_full[i], 1);
        Empty::init(&s.k_empty[i], 4 * kRowGroups);
        Empty::init(&s.v_empty[i], 4 * kRowGroups);
      }
      for (int i = 0; i < 2; ++i) {
        Empty::init(&s.tile_full[i], 1);
        Empty::init(&s.tile_empty[i], 4 * kGroups + kProducerReturns);
      }
      Empty::init(&s.tile_wanted, 1);
      cutlass::arch::fence_barrier_init();
      prefetch_tma_descriptor(p.q.get_tma_descriptor());
      prefetch_tma_descriptor(p.k.get_tma_descriptor());
      prefetch_tma_descriptor(p.v.get_tma_descriptor());
    }
    __syncthreads();
    grid_dependency_launch();
    if (threadIdx.x < 128) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) {
        Producer producer;
        for_each_tile<false>(p, s, [&](Tile const& t, Tile const&) { producer.load(p, s, t); });
      } else if (kPersistent && threadIdx.x == 32) {
        grid_dependency_wait();
        schedule(p, s);
      }
      if (kClusters && p.is_clustered) {
        cluster_sync();
        cluster_sync();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      if constexpr (kPingPong) {
        if (threadIdx.x / 128 == kGroups) cutlass::arch::NamedBarrier::arrive(256, kOrderOfGroup);
      }
      Consumer consumer;
      for_each_tile<true>(p, s, [&](Tile const& t, Tile const& again) { consumer.work(p, s, t, again); });
      if constexpr (kPingPong) {
        // Balances the last scheduler_barrier_arrive to group 0, on which nobody waits any more.
        if (threadIdx.x / 128 == 1) cutlass::arch::NamedBarrier::sync(256, kOrderOfGroup);
      }
      if (kClusters && p.is_clustered) {
        cluster_sync();
        combine_cluster(p, s);
        cluster_sync();
      }
    }
#endif
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) fused_attention(CUTE_GRID_CONSTANT Params const params) {
  Kernel::run(params);
}

// Before the kernel above, which begins as its programmatic dependent.
template <class Kernel>
__global__ void __launch_bounds__(32) clear_counter(CUTE_GRID_CONSTANT Params const p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (threadIdx.x == 0) *p.counter = 0;
}

// The splits of a row, weighted by their sums of exponentials: a warp a row.
template <class Kernel>
__global__ void __launch_bounds__(128) combine(CUTE_GRID_CONSTANT Params const p) {
#if defined(__CUDA_ARCH__)
  grid_dependency_wait();
  grid_dependency_launch();
  int64_t const rows = int64_t(p.batch) * p.heads * p.seqlen_q, row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (row >= rows) return;
  float top = -INFINITY;
  for (int i = lane; i < p.splits; i += 32) top = fmaxf(top, p.partial_statistics[i * rows + row].x);
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  float const shift = top == -INFINITY ? 0.f : top;
  int const seq = row % p.seqlen_q, head = row / p.seqlen_q % p.heads, batch = row / p.seqlen_q / p.heads;
  float const scale_log2 = score_scale(p, batch, head);
  constexpr int kFours = (kD + 127) / 128, kInFlight = 16 / kFours;
  float4 sum[kFours] = {};
  float total = 0.f;
  for (int first = 0; first < p.splits; first += 32) {
    int const here = min(32, p.splits - first);
    float2 const statistics = p.partial_statistics[(first + min(lane, here - 1)) * rows + row];
    float const own = lane < here ? statistics.y * exp2_approx((statistics.x - shift) * scale_log2) : 0.f;
    total += own;
    for (int i = 0; i < here; i += kInFlight) {
      float4 x[kInFlight][kFours];
      CUTE_UNROLL
      for (int j = 0; j < kInFlight; ++j) {
        int64_t const at = (first + min(i + j, here - 1)) * rows + row;
        CUTE_UNROLL
        for (int c = 0; c < kFours; ++c) {
          int const column = min(4 * lane + 128 * c, p.head_dim - 4);
          x[j][c] = *reinterpret_cast<float4 const*>(p.partial + at * p.head_dim + column);
        }
      }
      CUTE_UNROLL
      for (int j = 0; j < kInFlight; ++j) {
        float const weight = __shfl_sync(0xffffffffu, own, i + j);  // 0 beyond the last
        CUTE_UNROLL
        for (int c = 0; c < kFours; ++c) add(sum[c], weight, x[j][c]);
      }
    }
  }
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  float const norm = total > 0.f ? 1.f / total : 0.f;
  if (lane == 0 && p.lse) p.lse[row] = log_sum_exp(top, total, scale_log2);
  CUTE_UNROLL
  for (int c = 0; c < (kD + 127) / 128; ++c) {
    int const column = 4 * lane + 128 * c;
    if (column < p.head_dim) store_four(p, batch, head, seq, column, sum[c], norm);
  }
#endif
}

inline int launch_one(void (*kernel)(Params), int64_t blocks, int cluster, int threads, int smem, bool is_dependent,
                      Params const& p, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(threads), config.dynamicSmemBytes = smem;
  config.stream = stream, config.attrs = attributes;
  if (is_dependent) {
    auto& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    auto& shape = attributes[config.numAttrs++];
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = cluster, shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, p);
}

// Multiprocessors of the current device; allows the kernel its shared memory and clusters of more
// than 8 there, once.
inline int prepare(int& multiprocessors) {
  static std::atomic<int> known[64];
  int device;
  if (auto e = cudaGetDevice(&device)) return e;
  multiprocessors = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (multiprocessors) return 0;
  if (auto e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (auto e = cudaFuncSetAttribute(fused_attention<kernel_golden>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage))) return e;
  if constexpr (kClusters) {
    if (auto e = cudaFuncSetAttribute(fused_attention<kernel_golden>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return e;
  }
  if (device < 64) known[device].store(multiprocessors, std::memory_order_relaxed);
  return 0;
}

inline int64_t partial_rows(Integers const& n) {
  return n.splits > 1 && !n.clustered ? n.splits * n.batch * n.heads_q * n.seqlen_q : 0;
}

// What one call passes. Descriptors and parameters follow from it and from nothing else.
struct Call {
  Tensors tensors;
  Integers integers;
  Scalars scalars;
  void* workspace;

  bool operator==(Call const& other) const { return std::memcmp(this, &other, sizeof(Call)) == 0; }
};

inline Params params_of(Call const& call) {
  Tensors const& tensors = call.tensors;
  Integers const& n = call.integers;
  Scalars const& scalars = call.scalars;
  Params p;
  p.batch = n.batch, p.heads = n.heads_q, p.heads_kv = n.heads_kv;
  p.seqlen_q = n.seqlen_q, p.seqlen_kv = n.seqlen_kv, p.head_dim = n.head_dim;
  auto elements = [](void* tensor) { return static_cast<Element const*>(tensor); };
  p.query = {elements(tensors.query), n.query_batch, n.query_head, n.query_row};
  p.key = {elements(tensors.key), n.key_batch, n.key_head, n.key_row};
  p.value = {elements(tensors.value), n.value_batch, n.value_head, n.value_row};
  p.q = make_tma_copy(SM90_TMA_LOAD{},
                      global_tensor(p.query.data, rows_q(p.seqlen_q), rows_q_stride(p.query.head, p.query.row), p.head_dim,
                                    p.heads / kPack, p.batch, p.query.head * kPack, p.query.batch),
                      SmemLayoutQ{}, tile_q<kTileM>(), _1{});
  auto keys = [&](Matrices const& of) {
    return make_tma_copy(SM90_TMA_LOAD{},
                         global_tensor(of.data, p.seqlen_kv, of.row, p.head_dim, p.heads_kv, p.batch, of.head, of.batch),
                         SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kD>>{}, _1{});
  };
  p.k = keys(p.key);
  p.v = keys(p.value);
  p.out = static_cast<Out*>(tensors.out);
  p.out_batch = n.out_batch, p.out_head = n.out_head, p.out_row = n.out_row;
  p.lse = static_cast<float*>(tensors.lse);
  p.splits = n.splits, p.is_clustered = n.clustered;
  p.counter = static_cast<int*>(call.workspace);
  p.partial = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + kCounterBytes + image_bytes(n));
  p.partial_statistics = reinterpret_cast<float2*>(p.partial + partial_rows(n) * p.head_dim);
  int const heads = p.heads / kPack, all_heads = p.batch * heads;
  p.m_blocks = (p.seqlen_q * kPack + kTileM - 1) / kTileM;
  p.tiles = p.m_blocks * all_heads * p.splits;
  int64_t const kv_bytes = int64_t(2 * sizeof(Element)) * p.seqlen_kv * p.head_dim;
  p.section = int(std::min<int64_t>(all_heads, std::max<int64_t>(1, kSectionBytes / kv_bytes) * (heads / p.heads_kv)));
  p.by_m_blocks = cutlass::FastDivmod(p.m_blocks);
  p.by_splits = cutlass::FastDivmod(p.splits);
  p.by_heads = cutlass::FastDivmod(heads);
  p.scale_log2 = float(scalars.scale) * kLog2E;
  return p;
}

// The parameters of a call; those of this thread's last calls are kept: three descriptors cost the
// host as much as the launch.
inline Params const& parameters(Call const& call) {
  static thread_local std::vector<std::pair<Call, Params>> kept(16);
  uintptr_t const mixed = reinterpret_cast<uintptr_t>(call.tensors.query) ^ reinterpret_cast<uintptr_t>(call.tensors.out) * 31;
  auto& [known, params] = kept[mixed * 0x9e3779b97f4a7c15u >> 60];
  if (!(known == call)) params = params_of(call), known = call;
  return params;
}

inline int launch(Call const& call, cudaStream_t stream) {
  Integers const& n = call.integers;
  if ((!kSplits && n.splits != 1) || (!kClusters && n.clustered)) return cudaErrorInvalidValue;
  Params const& p = parameters(call);
  int multiprocessors;
  if (int e = prepare(multiprocessors)) return e;
  if constexpr (kDynamic) {
    if (int e = launch_one(clear_counter<kernel_golden>, 1, 1, 32, 0, n.pdl, p, stream)) return e;
  }
  int const blocks = kPersistent ? std::min(p.tiles, multiprocessors * kBlocksPerSm) : p.tiles;
  int const cluster = p.is_clustered ? p.splits : 1;
  if (int e = launch_one(fused_attention<kernel_golden>, blocks, cluster, kThreads, sizeof(Storage), kDynamic || n.pdl, p, stream)) return e;
  if (p.splits == 1 || p.is_clustered) return 0;
  return launch_one(combine<kernel_golden>, (int64_t(p.batch) * p.heads * p.seqlen_q + 3) / 4, 1, 128, 0, true, p, stream);
}
}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const* integers, int64_t* bytes) {
  using namespace k_golden;
  Integers const& n = view<Integers>(integers);
  *bytes = kCounterBytes + image_bytes(n) + partial_rows(n) * (n.head_dim + 2) * int64_t(sizeof(float));
  return 0;
}
extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers, double const* scalars, void* workspace, void* stream) {
  using namespace k_golden;
  return k_golden::launch({view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars), workspace},
                            static_cast<cudaStream_t>(stream));
}
