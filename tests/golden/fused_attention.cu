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
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

namespace k_golden {
using namespace cute;
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
// Of two groups that take turns the first alone asks whether K and V are there: the other follows.
constexpr bool kFirstPolls = kPingPong && kGroups == 2;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
// Keys and values of the heads that are worked on together under a causal mask: they stay in L2.
constexpr int64_t kSectionBytes = 32 << 20;

// The widest swizzle that divides rows of kColumns elements.
template <int kColumns, class T = Element, int kBytes = kColumns * int(sizeof(T))>
using SmemAtom = cute::conditional_t<kBytes % 128 == 0, GMMA::Layout_K_SW128_Atom<T>,
    cute::conditional_t<kBytes % 64 == 0, GMMA::Layout_K_SW64_Atom<T>, GMMA::Layout_K_SW32_Atom<T>>>;
using SmemLayoutQ = decltype(tile_to_shape(SmemAtom<kD>{}, Shape<Int<kTileM>, Int<kD>>{}));
using SmemLayoutKV = decltype(tile_to_shape(SmemAtom<kD>{}, Shape<Int<kTileN>, Int<kD>, Int<kStages>>{}));
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
inline int64_t image_bytes(int64_t const*) { return 0; }

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

struct Params {
  TmaQ q;
  TmaKV k, v;
  Out* out;
  int64_t out_batch, out_head, out_row;
  float* lse;
  int* counter;        // of tiles handed out, beyond each block's first
  float* partial;      // (splits, B, H, SQ, D)
  float* partial_lse;  // (splits, B, H, SQ), base 2
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
    int lane;  // a (batch, head)
    if constexpr (kCausal) {
      // Sections of heads that share the L2; in each the longest tiles of all heads come first.
      int const lanes = p.batch * (p.heads / kPack), per_section = p.section * p.m_blocks;
      int const section = index / per_section, within = index - section * per_section;
      int const here = min(p.section, lanes - section * p.section);
      t.m_block = p.m_blocks - 1 - within / here;
      lane = section * p.section + within % here;
    } else {
      p.by_m_blocks(lane, t.m_block, index);
    }
    p.by_heads(t.batch, t.head, lane);
    int const last_row = ((t.m_block + 1) * kTileM - 1) / kPack;
    t.last = (end_key(p, p.seqlen_kv, last_row) + kTileN - 1) / kTileN;
    // Beyond the last key lies nothing: where the window has passed it, there are no tiles.
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
CUTE_DEVICE float const& score_scale(Params const& p, Tile const& t, int row) {
  return p.scale_log2;
}
CUTE_DEVICE float value_scale(Params const& p, Tile const& t) {
  return 1.f;
}

// What a block of a cluster leaves to the others.
struct Share {
  static constexpr int kRow = kD + 8;  // padded: the rows of a warp lie in different banks
  float out[kClusters ? kTileM * kRow : 1];
  float lse[kClusters ? kTileM : 1];  // base 2
};

// What a warp group leaves to the one that shares its rows: each thread to the one in its place.
struct Partner {
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
    Share share;  // once nobody reads the operands any more
  };
  Partner partner[kKeyGroups > 1 ? kKeyGroups - 1 : 1];
  uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t tile_full[2], tile_empty[2], tile_wanted;
  Tile tile[2];
};

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// A place in a ring and the parity of its round; runs on from tile to tile.
struct Ring {
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

CUTE_DEVICE float exp2_mufu(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
}
CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 1);
}
// Order of the consumer groups' GEMMs: each waits on its own named barrier, then frees the next's.
CUTE_DEVICE void turn_wait(int group) {
  if constexpr (kPingPong) cutlass::arch::NamedBarrier::sync(256, group);
}
CUTE_DEVICE void turn_pass(int group) {
  if constexpr (kPingPong) cutlass::arch::NamedBarrier::arrive(256, group + 1 == kGroups ? 0 : group + 1);
}

// Until what is before this launch in the stream has ended: before it a thread touches nothing in
// memory but the parameters. Takes no time unless launched as programmatic dependent.
CUTE_DEVICE void await_stream() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// CUTLASS's barriers alone do not keep the compiler from moving plain loads and stores past them.
CUTE_DEVICE void keep_order() { asm volatile("" ::: "memory"); }

// The host's compiler need not see what only the device runs: reading it took a quarter of a unit's
// time.
#if defined(__CUDA_ARCH__)
// The producing thread's state, which runs on from tile to tile.
struct Producer {
  Ring k, v;
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

    auto load = [&](auto const& tma, auto const& source, auto const& target, uint64_t* full, uint64_t* empty, Ring& at, int n) {
      Empty::wait(&empty[at.stage()], at.phase() ^ 1);
      Full::arrive_and_expect_tx(&full[at.stage()], kv_bytes);
      copy(tma.with(full[at.stage()], 0, TMA::CacheHintSm90::EVICT_LAST), source(_, _, _, n), target(_, _, _, at.stage()));
      at.next();
    };
    await_stream();
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

using Pair = cutlass::Array<Element, 2>;
template <class To = Element>
CUTE_DEVICE cutlass::Array<To, 2> round_pair(float x, float y) {
  cutlass::Array<float, 2> pair;
  pair[0] = x, pair[1] = y;
  return cutlass::NumericArrayConverter<To, float, 2>{}(pair);
}

// Statistics of a thread's two rows. Mode 0 of the scores is ((2 columns, 2 rows, N/8 octets)).
struct Softmax {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
  float shift[2];   // what is taken from the scaled scores
  float factor[2];  // what O must be multiplied by

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
        factor[r] = maximum[r] == top ? 1.f : exp2_mufu((maximum[r] - top) * scale_log2);
        sum[r] *= factor[r];
      }
      maximum[r] = top;
      shift[r] = top == -INFINITY ? 0.f : top * scale_log2 - kLift;
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
        x = exp2_mufu(fmaf(x, scale_log2, -shift[r]));
        y = exp2_mufu(fmaf(y, scale_log2, -shift[r]));
        sum[r] += x;
        sum[r] += y;
      }
    }
  }

  // Leaves O, not yet divided, and the statistics to the group that shares the rows.
  template <class Fragment>
  CUTE_DEVICE void leave(Partner& partner, Fragment const& out, int thread) const {
    CUTE_UNROLL
    for (int i = 0; i < kD / 2; ++i) partner.value[i][thread] = out(i);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      partner.value[kD / 2 + r][thread] = maximum[r];
      partner.value[kD / 2 + 2 + r][thread] = sum[r];
    }
    keep_order();
  }
  // Adds to O and the statistics what another group has left.
  template <class Fragment>
  CUTE_DEVICE void take_up(Partner const& partner, Fragment& out, int thread, float scale_log2) {
    keep_order();
    float theirs[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const other = partner.value[kD / 2 + r][thread], top = fmaxf(maximum[r], other);
      factor[r] = maximum[r] == top ? 1.f : exp2_mufu((maximum[r] - top) * scale_log2);
      theirs[r] = other == top ? 1.f : exp2_mufu((other - top) * scale_log2);
      maximum[r] = top;
      sum[r] = sum[r] * factor[r] + partner.value[kD / 2 + 2 + r][thread] * theirs[r];
    }
    CUTE_UNROLL
    for (int i = 0; i < kD / 2; ++i) {
      int const r = i / 2 % 2;  // a thread's accumulators are (2 columns, 2 rows, octets)
      out(i) = out(i) * factor[r] + partner.value[i][thread] * theirs[r];
    }
  }
};

// With a soft cap: tanh(scale / softcap * score) of every score. From an exponential and a
// reciprocal it is wrong by 4e-7 at most; tanh.approx is by 2^-11 of itself, which a cap of 50 makes
// 2 % of a probability.
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

// Four lanes of a quad hold 2 columns each of 4 octets; afterwards lane q holds octet q.
CUTE_DEVICE void transpose_quad(uint32_t (&word)[4]) {
  int const q = threadIdx.x % 4;
  CUTE_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t const mine = q & step ? word[i] : word[i + step];
      uint32_t const other = __shfl_xor_sync(0xffffffffu, mine, step);
      if (q & step) word[i] = other;
      else word[i + step] = other;
    }
  }
}

// O and the log-sum-exp of a thread's two rows, straight from registers.
template <class Fragment>
CUTE_DEVICE void store(Params const& p, Storage& s, Tile const& t, Fragment const& out, int row0, Softmax const& softmax, float const& scale_log2, float const (&norm)[2]) {
  int const q = threadIdx.x % 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const row = row0 + 8 * r, seq = row / kPack, head = t.head * kPack + row % kPack;
    bool const is_row = seq < p.seqlen_q;
    auto lse = [&] {  // base 2; -inf where no key was seen
      float const shift = softmax.maximum[r] == -INFINITY ? 0.f : softmax.maximum[r] * scale_log2;
      return shift + log2f(softmax.sum[r]);
    };
    int64_t const at = (int64_t(t.batch) * p.heads + head) * p.seqlen_q + seq;
    if (kSplits && p.splits > 1) {
      int const here = row - t.m_block * kTileM;
      int64_t const partial = int64_t(t.split) * p.batch * p.heads * p.seqlen_q + at;
      bool const is_shared = kClusters && p.is_clustered;
      float* const target = is_shared ? s.share.out + here * Share::kRow : p.partial + partial * p.head_dim;
      if (is_row && q == 0) *(is_shared ? s.share.lse + here : p.partial_lse + partial) = lse();
      CUTE_UNROLL
      for (int j = 0; j < kD / 8; ++j) {
        if (is_row && 8 * j < p.head_dim) {
          *reinterpret_cast<float2*>(target + 8 * j + 2 * q) =
              make_float2(out(make_coord(0, r, j), 0, 0) * norm[r], out(make_coord(1, r, j), 0, 0) * norm[r]);
        }
      }
      continue;
    }
    if (p.lse && is_row && q == 0) p.lse[at] = lse() * kLn2;
    Out* const target = p.out + t.batch * p.out_batch + head * p.out_head + seq * p.out_row;
    CUTE_UNROLL
    for (int g = 0; g < kD / 32; ++g) {
      uint32_t word[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        auto const packed = round_pair<Out>(out(make_coord(0, r, 4 * g + i), 0, 0) * norm[r],
                                            out(make_coord(1, r, 4 * g + i), 0, 0) * norm[r]);
        word[i] = reinterpret_cast<uint32_t const&>(packed);
      }
      transpose_quad(word);
      int const column = 32 * g + 8 * q;
      if (is_row && column < p.head_dim) {
        *reinterpret_cast<uint4*>(target + column) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// A consumer warp group's state, which runs on from tile to tile.
struct Consumer {
  Ring k, v;
  uint32_t q_phase = 0;

  CUTE_DEVICE void work(Params const& p, Storage& s, Tile const& t) {
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
    float const& scale_log2 = score_scale(p, t, row0);
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
            Pair const packed = round_pair(scores(make_coord(0, r, 2 * kk + half), 0, 0),
                                           scores(make_coord(1, r, 2 * kk + half), 0, 0));
            tOrP(make_coord(0, r, half), 0, kk) = packed[0];
            tOrP(make_coord(1, r, half), 0, kk) = packed[1];
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
        release(&s.q_empty);
      }
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
          turn_wait(group);
          issue_qk(tSrS, k.stage());
          if (!kFirstPolls || group == 0) Full::wait(&s.v_full[v.stage()], v.phase());
          issue_pv();
          turn_pass(group);
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
          asm volatile("" : "+f"(softmax.shift[0]), "+f"(softmax.shift[1]));
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
          Ring const held = k;
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
        softmax.leave(s.partner[key_group - 1], tOrO, row_tid);
        cutlass::arch::NamedBarrier::arrive(128 * kKeyGroups, row_group);
        return;
      }
      cutlass::arch::NamedBarrier::sync(128 * kKeyGroups, row_group);
      for (int i = 0; i + 1 < kKeyGroups; ++i) softmax.take_up(s.partner[i], tOrO, row_tid, scale_log2);
    }
    float norm[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      softmax.sum[r] = quad_sum(softmax.sum[r]);
      norm[r] = softmax.sum[r] > 0.f ? out_scale / softmax.sum[r] : 0.f;
    }
    if (kClusters && p.is_clustered) {
      cutlass::arch::NamedBarrier::sync(128 * kGroups, kGroups);
      keep_order();
    }
    await_stream();
    store(p, s, t, tOrO, row0, softmax, scale_log2, norm);
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
    keep_order();
    s.tile[round % 2] = t;
    keep_order();
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

// Calls work(tile) for every tile of this block, in the producing thread and in the consumer warps.
template <bool kIsConsumer, class Work>
CUTE_DEVICE void for_each_tile(Params const& p, Storage& s, Work&& work) {
  if constexpr (kPersistent) {
    for (int round = 0;; ++round) {
      Empty::wait(&s.tile_full[round % 2], round / 2 % 2);
      keep_order();
      Tile const& t = s.tile[round % 2];
      if (t.m_block < 0) break;
      // The producer reads it where it lies, having few registers; so do consumers that have none
      // to spare, or a sequence's own lengths to keep.
      if constexpr (kIsConsumer && true) work(Tile(t));
      else work(t);
      if constexpr (kIsConsumer) {
        __syncwarp();
        keep_order();
        if (threadIdx.x % 32 == 0) Empty::arrive(&s.tile_empty[round % 2]);
      } else if constexpr (kProducerReturns) {
        keep_order();
        Empty::arrive(&s.tile_empty[round % 2]);
      }
    }
  } else {
    work(Tile::at(p, blockIdx.x));
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
  uint32_t at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(cast_smem_ptr_to_uint(&mine)), "r"(block));
  if constexpr (sizeof(T) == 4) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
  } else {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
    return x;
  }
}

// The outputs of a cluster's splits, weighted by exp of their log-sum-exp: each block its part of
// the tile, four columns a thread at a time.
CUTE_DEVICE void combine_cluster(Params const& p, Storage& s) {
  constexpr int kMostSplits = 16;
  Tile const t = Tile::at(p, blockIdx.x);
  int const rows = min(kTileM, p.seqlen_q * kPack - t.m_block * kTileM), fours = p.head_dim / 4;
  int const part = (rows * fours + p.splits - 1) / p.splits, begin = t.split * part;
  for (int item = begin + threadIdx.x - 128; item < min(begin + part, rows * fours); item += 128 * kGroups) {
    int const here = item / fours, column = item % fours * 4;
    float weight[kMostSplits], top = -INFINITY, total = 0.f;
    // Always as many loads as there may be splits, all in flight at once: a branch would put each
    // after the one before.
    CUTE_UNROLL
    for (int i = 0; i < kMostSplits; ++i) {
      float const lse = remote(s.share.lse[here], min(i, p.splits - 1));
      weight[i] = i < p.splits ? lse : -INFINITY;
      top = fmaxf(top, weight[i]);
    }
    float const shift = top == -INFINITY ? 0.f : top;
    float4 const& mine = reinterpret_cast<float4 const&>(s.share.out[here * Share::kRow + column]);
    float4 sum{};
    CUTE_UNROLL
    for (int i = 0; i < kMostSplits; ++i) {
      float const w = exp2_mufu(weight[i] - shift);
      total += w;
      add(sum, w, remote(mine, min(i, p.splits - 1)));
    }
    int const row = t.m_block * kTileM + here, seq = row / kPack, head = t.head * kPack + row % kPack;
    if (column == 0 && p.lse) {
      p.lse[(int64_t(t.batch) * p.heads + head) * p.seqlen_q + seq] = (shift + log2f(total)) * kLn2;
    }
    store_four(p, t.batch, head, seq, column, sum, total > 0.f ? 1.f / total : 0.f);
  }
}

// Every thread of the cluster comes here twice: when the shares stand, and when all were read.
CUTE_DEVICE void cluster_meets() {
  __syncwarp();
  keep_order();
  cluster_arrive();
  cluster_wait();
  keep_order();
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
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x < 128) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) {
        Producer producer;
        for_each_tile<false>(p, s, [&](Tile const& t) { producer.load(p, s, t); });
      } else if (kPersistent && threadIdx.x == 32) {
        await_stream();
        schedule(p, s);
      }
      if (kClusters && p.is_clustered) {
        cluster_meets();
        cluster_meets();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      if constexpr (kPingPong) {
        if (threadIdx.x / 128 == kGroups) cutlass::arch::NamedBarrier::arrive(256, 0);
      }
      Consumer consumer;
      for_each_tile<true>(p, s, [&](Tile const& t) { consumer.work(p, s, t); });
      if constexpr (kPingPong) {
        // Balances the last turn_pass to group 0, on which nobody waits any more.
        if (threadIdx.x / 128 == 1) cutlass::arch::NamedBarrier::sync(256, 0);
      }
      if (kClusters && p.is_clustered) {
        cluster_meets();
        combine_cluster(p, s);
        cluster_meets();
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
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) *p.counter = 0;
}

// The splits of a row, weighted by exp of their log-sum-exp: a warp a row.
template <class Kernel>
__global__ void __launch_bounds__(128) combine(CUTE_GRID_CONSTANT Params const p) {
#if defined(__CUDA_ARCH__)
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  int64_t const rows = int64_t(p.batch) * p.heads * p.seqlen_q, row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (row >= rows) return;
  float top = -INFINITY;
  for (int i = lane; i < p.splits; i += 32) top = fmaxf(top, p.partial_lse[i * rows + row]);
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  float const shift = top == -INFINITY ? 0.f : top;
  constexpr int kFours = (kD + 127) / 128, kInFlight = 16 / kFours;
  float4 sum[kFours] = {};
  float total = 0.f;
  for (int first = 0; first < p.splits; first += 32) {
    int const here = min(32, p.splits - first);
    float const own = lane < here ? exp2_mufu(p.partial_lse[(first + lane) * rows + row] - shift) : 0.f;
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
  int const seq = row % p.seqlen_q, head = row / p.seqlen_q % p.heads, batch = row / p.seqlen_q / p.heads;
  if (lane == 0 && p.lse) p.lse[row] = (shift + log2f(total)) * kLn2;
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

inline int64_t partial_rows(int64_t const* n) { return n[18] > 1 && !n[20] ? n[18] * n[0] * n[1] * n[3] : 0; }

// What one call passes. Descriptors and parameters follow from it and from nothing else.
struct Call {
  void const* tensors[5];
  int64_t n[21];
  double scalars[1];
  void* workspace;

  bool operator==(Call const& other) const { return std::memcmp(this, &other, sizeof(Call)) == 0; }
};

inline Params params_of(Call const& call) {
  int64_t const* n = call.n;
  Params p;
  p.batch = n[0], p.heads = n[1], p.heads_kv = n[2], p.seqlen_q = n[3], p.seqlen_kv = n[4], p.head_dim = n[5];
  auto data = [&](int index) { return static_cast<Element const*>(call.tensors[index]); };
  p.q = make_tma_copy(SM90_TMA_LOAD{},
                      global_tensor(data(0), rows_q(p.seqlen_q), rows_q_stride(n[7], n[8]), p.head_dim, p.heads / kPack, p.batch,
                                    n[7] * kPack, n[6]),
                      SmemLayoutQ{}, tile_q<kTileM>(), _1{});
  auto keys = [&](int index, int64_t const* stride) {
    return make_tma_copy(SM90_TMA_LOAD{},
                         global_tensor(data(index), p.seqlen_kv, stride[2], p.head_dim, p.heads_kv, p.batch, stride[1], stride[0]),
                         SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kD>>{}, _1{});
  };
  p.k = keys(1, n + 9);
  p.v = keys(2, n + 12);
  p.out = static_cast<Out*>(const_cast<void*>(call.tensors[3]));
  p.out_batch = n[15], p.out_head = n[16], p.out_row = n[17];
  p.lse = static_cast<float*>(const_cast<void*>(call.tensors[4]));
  p.splits = n[18], p.is_clustered = n[20];
  p.counter = static_cast<int*>(call.workspace);
  p.partial = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + kCounterBytes + image_bytes(n));
  p.partial_lse = p.partial + partial_rows(n) * p.head_dim;
  int const heads = p.heads / kPack, lanes = p.batch * heads;
  p.m_blocks = (p.seqlen_q * kPack + kTileM - 1) / kTileM;
  p.tiles = p.m_blocks * lanes * p.splits;
  int64_t const kv_bytes = int64_t(2 * sizeof(Element)) * p.seqlen_kv * p.head_dim;
  p.section = int(std::min<int64_t>(lanes, std::max<int64_t>(1, kSectionBytes / kv_bytes) * (heads / p.heads_kv)));
  p.by_m_blocks = cutlass::FastDivmod(p.m_blocks);
  p.by_splits = cutlass::FastDivmod(p.splits);
  p.by_heads = cutlass::FastDivmod(heads);
  p.scale_log2 = float(call.scalars[0]) * kLog2E;
  return p;
}

// The parameters of a call; those of this thread's last calls are kept: three descriptors cost the
// host as much as the launch.
inline Params const& parameters(Call const& call) {
  static thread_local std::vector<std::pair<Call, Params>> kept(16);
  uintptr_t const mixed = reinterpret_cast<uintptr_t>(call.tensors[0]) ^ reinterpret_cast<uintptr_t>(call.tensors[3]) * 31;
  auto& [known, params] = kept[mixed * 0x9e3779b97f4a7c15u >> 60];
  if (!(known == call)) params = params_of(call), known = call;
  return params;
}

inline int launch(void* const* tensors, int64_t const* n, double const* scalars, void* workspace, cudaStream_t stream) {
  if ((!kSplits && n[18] != 1) || (!kClusters && n[20])) return cudaErrorInvalidValue;
  Call call;
  std::copy_n(tensors, std::size(call.tensors), call.tensors);
  std::copy_n(n, std::size(call.n), call.n);
  std::copy_n(scalars, std::size(call.scalars), call.scalars);
  call.workspace = workspace;
  Params const& p = parameters(call);
  int multiprocessors;
  if (int e = prepare(multiprocessors)) return e;
  if constexpr (kDynamic) {
    if (int e = launch_one(clear_counter<kernel_golden>, 1, 1, 32, 0, n[19], p, stream)) return e;
  }
  int const blocks = kPersistent ? std::min(p.tiles, multiprocessors * kBlocksPerSm) : p.tiles;
  int const cluster = p.is_clustered ? p.splits : 1;
  if (int e = launch_one(fused_attention<kernel_golden>, blocks, cluster, kThreads, sizeof(Storage), kDynamic || n[19], p, stream)) return e;
  if (p.splits == 1 || p.is_clustered) return 0;
  return launch_one(combine<kernel_golden>, (int64_t(p.batch) * p.heads * p.seqlen_q + 3) / 4, 1, 128, 0, true, p, stream);
}
}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const* integers, int64_t* bytes) {
  *bytes = k_golden::kCounterBytes + k_golden::image_bytes(integers) + k_golden::partial_rows(integers) * (integers[5] + 1) * int64_t(sizeof(float));
  return 0;
}
extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers, double const* scalars, void* workspace, void* stream) {
  return k_golden::launch(tensors, integers, scalars, workspace, static_cast<cudaStream_t>(stream));
}
