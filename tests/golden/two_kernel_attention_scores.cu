#include <algorithm>
#include <atomic>
#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include "attention.h"
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

namespace k_golden {
using namespace cute;
using namespace tuner;
struct Tensors { void *query, *key, *probabilities, *statistics, *bias; };
struct Integers { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, first_head, head_count, first_row, row_count, pdl, query_batch, query_head, query_row, key_batch, key_head, key_row, splits, bias_batch, bias_head, bias_row; };
struct Scalars { double scale, softcap; };
using Element = cutlass::half_t;
constexpr int kTileN = 128, kColumns = 64, kGroups = 2, kStages = 3;
constexpr int kBlocksPerSm = 1, kThreads = 128 * (kGroups + 1), kRows = 64;
constexpr bool kCausal = true;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kImage = kRows * kTileN;  // elements of P that a warp group writes or reads at once
// K or V.
using SmemLayoutKV = decltype(tile_to_shape(SmemAtom<kColumns, Element>{}, Shape<Int<kTileN>, Int<kColumns>, Int<kStages>>{}));

CUTE_HOST_DEVICE auto global_tensor(Element const* data, int rows, int64_t stride, int d, int heads, int batch,
                                    int64_t head_stride, int64_t batch_stride) {
  return make_tensor(make_gmem_ptr(data), make_shape(rows, d, heads, batch),
                     make_stride(stride, _1{}, head_stride, batch_stride));
}
using Gmem = decltype(global_tensor(nullptr, 1, 1, 1, 1, 1, 1, 1));
using TmaKV = decltype(make_tma_copy(SM90_TMA_LOAD{}, Gmem{}, SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kColumns>>{}, _1{}));

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// A place in the ring and the parity of its round.
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  CUTE_DEVICE void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// The launch's part of the problem: `head_count` heads from `first_head` on, 64-row `blocks` from
// `first_block` on.
struct Part {
  int batch, heads, heads_kv, seqlen_q, seqlen_kv, head_dim;
  int first_head, head_count, first_block, blocks, tiles;

  Part() = default;
  explicit Part(Integers const& n)
      : batch(n.batch), heads(n.heads_q), heads_kv(n.heads_kv), seqlen_q(n.seqlen_q), seqlen_kv(n.seqlen_kv),
        head_dim(n.head_dim), first_head(n.first_head), head_count(n.head_count), first_block(n.first_row / kRows),
        blocks((n.row_count + kRows - 1) / kRows), tiles((n.seqlen_kv + kTileN - 1) / kTileN) {}

  // Tiles of keys that some row of a block of the launch sees; none beyond its last block.
  CUTE_DEVICE int tiles_of(int block) const {
    if (block >= blocks) return 0;
    if constexpr (!kCausal) return tiles;
    return (min(seqlen_kv, (first_block + block + 1) * kRows) + kTileN - 1) / kTileN;
  }
  // The same of the blocks that a thread block works on.
  CUTE_DEVICE int tiles_from(int block) const { return tiles_of(min(block + kGroups, blocks) - 1); }
  // Where the first tile of a block lies among the images.
  CUTE_DEVICE int64_t image(int head_index, int block) const { return (int64_t(head_index) * blocks + block) * tiles; }
};

CUTE_DEVICE void release(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Empty::arrive(empty);
}
using SmemLayoutQ = decltype(tile_to_shape(SmemAtom<kColumns, Element>{}, Shape<Int<kRows>, Int<kColumns>, Int<kGroups>>{}));
using TmaQ = decltype(make_tma_copy(SM90_TMA_LOAD{}, Gmem{}, SmemLayoutQ{}(_, _, 0), Shape<Int<kRows>, Int<kColumns>>{}, _1{}));
using Mma = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kTileN>, Int<kColumns>>>()));
constexpr int kImages = 2;  // that a warp group holds: one is filled while the other is stored

struct Params : Part {
  TmaQ q;
  TmaKV k;
  Element* probabilities;
  float2* statistics;
  float scale_log2;  // of the scores, or of what the soft cap makes of them
  float cap_log2;    // -2 scale / softcap
  Element const* bias;
  int64_t bias_batch, bias_head, bias_row;
  bool is_bias_aligned;  // its rows start at multiples of 16 bytes
};

struct Storage {
  alignas(1024) cute::array_aligned<Element, kGroups * kImages * kImage, 1024> images;
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutQ>, 1024> q;
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> k;
  uint64_t q_full, full[kStages], empty[kStages];
};

// What a block works on: 64-row blocks from `block` on of one head, tiles of keys [first, last).
struct Work {
  int head_index, block, first, last;
  CUTE_DEVICE explicit Work(Params const& p) {
    head_index = blockIdx.x;
    // The longest rows of a causal mask come first.
    block = (kCausal ? gridDim.y - 1 - blockIdx.y : blockIdx.y) * kGroups;
    int const all = p.tiles_from(block), share = (all + gridDim.z - 1) / gridDim.z;
    first = min(int(blockIdx.z) * share, all);
    last = min(first + share, all);
  }
};

// The host's compiler need not see what only the device runs.
#if defined(__CUDA_ARCH__)
// Scaled maxima beyond this are subtracted before the scale: rounded, their product is off by as much
// as 2^-13 here, and by thousands where scores reach 1e11, which no exponential holds.
constexpr float kLargeShift = 4096.f;

CUTE_DEVICE void produce(Params const& p, Storage& s, Work const& w) {
  if (w.first == w.last) return;
  int const head_index = p.first_head + w.head_index, batch = head_index / p.heads, head = head_index % p.heads;
  Tensor gQ = local_tile(p.q.get_tma_tensor(make_shape(p.seqlen_q, p.head_dim, p.heads, p.batch))(_, _, head, batch),
                         Shape<Int<kRows>, Int<kColumns>>{}, make_coord(_, 0));
  Tensor gK = local_tile(p.k.get_tma_tensor(make_shape(p.seqlen_kv, p.head_dim, p.heads_kv, p.batch))(_, _, head / (p.heads / p.heads_kv), batch),
                         Shape<Int<kTileN>, Int<kColumns>>{}, make_coord(_, 0));
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(s.k.data()), SmemLayoutKV{});
  auto slice_q = p.q.get_slice(0);
  auto slice_k = p.k.get_slice(0);
  Tensor tQg = slice_q.partition_S(gQ);
  Tensor tQs = slice_q.partition_D(sQ);
  Tensor tKg = slice_k.partition_S(gK);
  Tensor tKs = slice_k.partition_D(sK);
  Full::arrive_and_expect_tx(&s.q_full, kGroups * kRows * kColumns * sizeof(Element));
  for (int g = 0; g < kGroups; ++g) {
    copy(p.q.with(s.q_full, 0, TMA::CacheHintSm90::EVICT_FIRST), tQg(_, _, _, p.first_block + w.block + g), tQs(_, _, _, g));
  }
  PipelineState k;
  for (int n = w.first; n < w.last; ++n, k.next()) {
    Empty::wait(&s.empty[k.stage], k.phase ^ 1);
    Full::arrive_and_expect_tx(&s.full[k.stage], kTileN * kColumns * sizeof(Element));
    copy(p.k.with(s.full[k.stage], 0, TMA::CacheHintSm90::EVICT_LAST), tKg(_, _, _, n), tKs(_, _, _, k.stage));
  }
}

// What becomes of the scores between product and mask, in this order: soft cap, bias, ALiBi. A thread
// has rows row0 and row0 + 8, and of each octet of keys two.
struct Modifiers {
  Params const& p;
  Element const* bias[2];               // of each row, from the lane's first octet on
  uint32_t held[kTileN / 32][2][4];     // a tile's: lane q of a quad has octet 4 i + q

  CUTE_DEVICE Modifiers(Params const& p, Work const& w, int row0) : p(p) {
    int const head_index = p.first_head + w.head_index, head = head_index % p.heads;
    Element const* const matrix = p.bias + head_index / p.heads * p.bias_batch + head * p.bias_head + 8 * (threadIdx.x % 4);
    // Rows beyond the last query, which nobody stores, take its bias.
    for (int r = 0; r < 2; ++r) bias[r] = matrix + min(row0 + 8 * r, p.seqlen_q - 1) * p.bias_row;
  }

  // Begins to load what tile n is to be given.
  CUTE_DEVICE void load(int n) {
    int const first = n * kTileN;
    if (p.is_bias_aligned && first + kTileN <= p.seqlen_kv) {
      CUTE_UNROLL
      for (int i = 0; i < kTileN / 32; ++i) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          auto& word = held[i][r];
          uint4 const four = load_once(bias[r] + first + 32 * i);
          word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
        }
      }
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 32; ++i) {
      int const keys = p.seqlen_kv - first - 32 * i - 8 * int(threadIdx.x % 4);  // that the octet has
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        auto const* const data = reinterpret_cast<uint16_t const*>(bias[r] + first + 32 * i);
        CUTE_UNROLL
        for (int k = 0; k < 4; ++k) {
          uint32_t const low = 2 * k < keys ? data[2 * k] : 0, high = 2 * k + 1 < keys ? data[2 * k + 1] : 0;
          held[i][r][k] = high << 16 | low;
        }
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE void apply(Scores& scores, int n) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = capped(scores(i), p.cap_log2);
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 32; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        transpose_quad(held[i][r]);
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          auto const added = cutlass::NumericArrayConverter<float, Element, 2>{}(
              reinterpret_cast<cutlass::Array<Element, 2> const&>(held[i][r][j]));
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float& score = scores(make_coord(c, r, 4 * i + j), 0, 0);
            score = fmaf(score, p.scale_log2, added[c] * kLog2E);
          }
        }
      }
    }
  }

  // What `apply` leaves to be multiplied, for scores to base 2.
  CUTE_DEVICE float scale() const { return 1.f; }
};

// Hides the keys from `keys` on, and under a causal mask those beyond their row.
template <class Scores>
CUTE_DEVICE void mask(Scores& scores, int keys, int row0, int col0) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const limit = (kCausal ? min(keys, row0 + 8 * r + 1) : keys) - col0 - 2 * int(threadIdx.x % 4);
    CUTE_UNROLL
    for (int j = 0; j < kTileN / 8; ++j) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c >= limit) scores(make_coord(c, r, j), 0, 0) = -INFINITY;
      }
    }
  }
}

CUTE_DEVICE void consume(Params const& p, Storage& s, Work const& w) {
  int const group = cutlass::canonical_warp_group_idx() - 1, block = w.block + group;
  int const tid = threadIdx.x % 128, lane = threadIdx.x % 32, warp_row = tid / 32 * 16;
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(s.k.data()), SmemLayoutKV{});
  Mma mma;
  auto slice = mma.get_slice(tid);
  Tensor tSrQ = slice.partition_fragment_A(sQ)(_, _, _, group);
  Tensor tSrK = slice.partition_fragment_B(sK);
  Tensor tSrS = partition_fragment_C(mma, Shape<Int<kRows>, Int<kTileN>>{});
  int const first_row = (p.first_block + block) * kRows, row0 = first_row + warp_row + lane / 4;
  // Tiles below `unmasked` are seen whole by every row, those from `seen` on by none.
  int const unmasked = (kCausal ? min(p.seqlen_kv, first_row + 1) : p.seqlen_kv) / kTileN;
  int const seen = p.tiles_of(block);
  Modifiers modifiers(p, w, row0);
  PipelineState k;

  auto issue = [&](auto& scores) {
    warpgroup_fence_operand(scores);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int kk = 0; kk < size<2>(tSrQ); ++kk) {
      cute::gemm(mma, tSrQ(_, _, kk), tSrK(_, _, kk, k.stage), scores);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  Element* const images = s.images.data() + group * kImages * kImage;
  Element* const target = p.probabilities + p.image(w.head_index, block) * kImage + warp_row * 64;
  float2* const statistics = p.statistics + p.image(w.head_index, block) * kRows + warp_row + lane / 4;
  // Elements before this lane's row of a matrix store: 64 a row, 8 of them swizzled by the row.
  int const matrix_row = (warp_row + lane % 16) * 64;
  int parity = 0;
  auto finish = [&](auto& scores, int n, int stage) {
    warpgroup_fence_operand(scores);
    release(&s.empty[stage]);
    if (n >= seen) return;
    modifiers.apply(scores, n);
    if (n >= unmasked) mask(scores, p.seqlen_kv, row0, n * kTileN);
    float maximum[2], shift[2], sum[2] = {0.f, 0.f};
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float top = -INFINITY;
      CUTE_UNROLL
      for (int j = 0; j < kTileN / 8; ++j) {
        top = fmaxf(top, fmaxf(scores(make_coord(0, r, j), 0, 0), scores(make_coord(1, r, j), 0, 0)));
      }
      top = quad_max(top);
      maximum[r] = top;  // -inf: no key of the tile is seen
      shift[r] = top == -INFINITY ? 0.f : top * modifiers.scale();
    }
    if (fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kLargeShift) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const base = maximum[r] == -INFINITY ? 0.f : maximum[r];
        CUTE_UNROLL
        for (int j = 0; j < kTileN / 8; ++j) {
          scores(make_coord(0, r, j), 0, 0) -= base;
          scores(make_coord(1, r, j), 0, 0) -= base;
        }
        shift[r] = 0.f;
      }
    }
    // The image that was filled two tiles ago has left.
    if (lane == 0) tma_store_wait<kImages - 1>();
    __syncwarp();
    Element* const image = images + parity * kImage;
    parity ^= 1;
    CUTE_UNROLL
    for (int j = 0; j < kTileN / 8; j += 2) {
      uint32_t word[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const r = i % 2, octet = j + i / 2;
        float const x = exp2_approx(fmaf(scores(make_coord(0, r, octet), 0, 0), modifiers.scale(), -shift[r]));
        float const y = exp2_approx(fmaf(scores(make_coord(1, r, octet), 0, 0), modifiers.scale(), -shift[r]));
        sum[r] += x;
        sum[r] += y;
        word[i] = pack<Element>(x, y);
      }
      int const unit = (j % 8 + lane / 16) ^ (lane % 8);
      Element* const octets = image + matrix_row + j / 8 * (kRows * 64) + unit * 8;
      SM90_U32x4_STSM_N::copy(word[0], word[1], word[2], word[3], *reinterpret_cast<uint128_t*>(octets));
    }
    async_copy_fence();
    __syncwarp();
    if (lane == 0) {
      CUTE_UNROLL
      for (int i = 0; i < kTileN / 64; ++i) {
        int const offset = i * kRows * 64;
        SM90_BULK_COPY_S2G::copy(image + warp_row * 64 + offset, target + int64_t(n) * kImage + offset, 16 * 128);
      }
      copies_commit();
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const total = quad_sum(sum[r]);
      if (lane % 4 == 0) statistics[n * kRows + 8 * r] = make_float2(maximum[r], total);
    }
  };

  if (w.first == w.last) return;
  Full::wait(&s.q_full, 0);
  // Finishes `scores` of tile n while the next tile's come to `other`. At the end there is none: the
  // last tile's are computed once more and dropped, which keeps what is in flight the same on every
  // path.
  Tensor tSrT = make_fragment_like(tSrS);
  int n = w.first;
  auto step = [&](auto& scores, auto& other) {
    int const held = k.stage;
    bool const is_last = n + 1 == w.last;
    if (!is_last) {
      k.next();
      Full::wait(&s.full[k.stage], k.phase);
    }
    issue(other);
    if (n < seen) modifiers.load(n);
    warpgroup_wait<1>();
    finish(scores, n++, held);
    return is_last;
  };
  Full::wait(&s.full[k.stage], k.phase);
  issue(tSrS);
  while (true) {
    if (step(tSrS, tSrT)) {
      warpgroup_wait<0>();
      break;
    }
    if (step(tSrT, tSrS)) {
      warpgroup_wait<0>();
      break;
    }
  }
  if (lane == 0) copies_read();
}

#endif

struct kernel_golden {
  __device__ __forceinline__ static void run(Params const& p) {
#if defined(__CUDA_ARCH__)
    extern __shared__ __align__(1024) unsigned char raw[];
    Storage& s = *reinterpret_cast<Storage*>(raw);
    if (threadIdx.x == 0) {
      Full::init(&s.q_full, 1);
      for (int i = 0; i < kStages; ++i) {
        Full::init(&s.full[i], 1);
        Empty::init(&s.empty[i], 4 * kGroups);
      }
      cutlass::arch::fence_barrier_init();
      prefetch_tma_descriptor(p.q.get_tma_descriptor());
      prefetch_tma_descriptor(p.k.get_tma_descriptor());
    }
    __syncthreads();
    Work const w(p);
    grid_dependency_wait();
    grid_dependency_launch();
    if (threadIdx.x < 128) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) produce(p, s, w);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(p, s, w);
    }
#endif
  }
};

inline Params params_of(Tensors const& tensors, Integers const& n, Scalars const& scalars) {
  Params p;
  static_cast<Part&>(p) = Part(n);
  auto elements = [](void* tensor) { return static_cast<Element const*>(tensor); };
  p.q = make_tma_copy(SM90_TMA_LOAD{}, global_tensor(elements(tensors.query), p.seqlen_q, n.query_row, p.head_dim, p.heads, p.batch, n.query_head, n.query_batch),
                      SmemLayoutQ{}(_, _, 0), Shape<Int<kRows>, Int<kColumns>>{}, _1{});
  p.k = make_tma_copy(SM90_TMA_LOAD{}, global_tensor(elements(tensors.key), p.seqlen_kv, n.key_row, p.head_dim, p.heads_kv, p.batch, n.key_head, n.key_batch),
                      SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kColumns>>{}, _1{});
  p.probabilities = static_cast<Element*>(tensors.probabilities);
  p.statistics = static_cast<float2*>(tensors.statistics);
  p.scale_log2 = float(scalars.scale) * kLog2E;
  // The kernel's scores are tanh(..), in [-1, 1]; tanh(x) = 2 / (1 + exp(-2 x)) - 1.
  p.scale_log2 = float(scalars.softcap) * kLog2E;
  p.cap_log2 = float(-2 * scalars.scale / scalars.softcap) * kLog2E;
  p.bias = elements(tensors.bias);
  p.bias_batch = n.bias_batch, p.bias_head = n.bias_head, p.bias_row = n.bias_row;
  int64_t const steps = p.bias_batch | p.bias_head | p.bias_row;  // elements; 8 of them are 16 bytes
  p.is_bias_aligned = reinterpret_cast<uintptr_t>(p.bias) % 16 == 0 && steps % 8 == 0;
  return p;
}
inline int depth(Params const&, Integers const& n) { return n.splits; }

static_assert(sizeof(Storage) == 132096, "shared memory is not what the family counts");
template <class Kernel>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) two_kernel_scores(CUTE_GRID_CONSTANT Params const params) {
  Kernel::run(params);
}

// Allows the kernel its shared memory on the current device, once.
inline int prepare() {
  static std::atomic<bool> is_known[64];
  int device;
  if (auto e = cudaGetDevice(&device)) return e;
  if (device < 64 && is_known[device].load(std::memory_order_relaxed)) return 0;
  if (auto e = cudaFuncSetAttribute(two_kernel_scores<kernel_golden>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage))) return e;
  if (device < 64) is_known[device].store(true, std::memory_order_relaxed);
  return 0;
}

inline int launch(Tensors const& tensors, Integers const& n, Scalars const& scalars, cudaStream_t stream) {
  Params const p = params_of(tensors, n, scalars);
  if (int e = prepare()) return e;
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.head_count, (p.blocks + kGroups - 1) / kGroups, depth(p, n));
  config.blockDim = dim3(kThreads), config.dynamicSmemBytes = sizeof(Storage), config.stream = stream;
  config.attrs = &dependent, config.numAttrs = n.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, two_kernel_scores<kernel_golden>, p);
}
}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const*, int64_t* bytes) {
  *bytes = 0;
  return 0;
}
extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers, double const* scalars, void*, void* stream) {
  using namespace k_golden;
  return k_golden::launch(view<Tensors>(tensors), view<Integers>(integers), view<Scalars>(scalars),
                            static_cast<cudaStream_t>(stream));
}
