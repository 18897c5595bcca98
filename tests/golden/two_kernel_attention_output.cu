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
struct Tensors { void *probabilities, *statistics, *value, *out, *lse; };
struct Integers { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, first_head, head_count, first_row, row_count, pdl, value_batch, value_head, value_row, out_batch, out_head, out_row; };
struct Scalars { double maximum_scale; };
using Element = cutlass::half_t;
constexpr int kTileN = 128, kColumns = 64, kGroups = 2, kStages = 4;
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
using SmemLayoutP = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kTileN>, Int<kGroups * kStages>>{}));
using SmemLayoutVt = decltype(composition(
    SmemLayoutKV{}, make_layout(Shape<Int<kColumns>, Int<kTileN>, Int<kStages>>{},
                                Stride<Int<kTileN>, _1, Int<kTileN * kColumns>>{})));
using Mma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<Int<kRows>, Int<kColumns>, Int<kTileN>>,
                         GMMA::Major::K, GMMA::Major::MN>()));

struct Params : Part {
  TmaKV v;
  Element const* probabilities;
  float2 const* statistics;
  float maximum_scale;  // of the statistics' maxima, to base 2
  Element* out;
  int64_t out_batch, out_head, out_row;
  float* lse;
};

struct Storage {
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutP>, 1024> p;
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> v;
  alignas(16) float2 statistics[kStages][kGroups][kRows];
  uint64_t full[kStages], empty[kStages];
};

// What a block works on: 64-row blocks from `block` on and kColumns columns of one head.
struct Work {
  int head_index, block, slice;
  CUTE_DEVICE Work() {
    head_index = blockIdx.x;
    // The longest rows of a causal mask come first.
    block = (kCausal ? gridDim.y - 1 - blockIdx.y : blockIdx.y) * kGroups;
    slice = blockIdx.z;
  }
};

// The host's compiler need not see what only the device runs.
#if defined(__CUDA_ARCH__)
CUTE_DEVICE void produce(Params const& p, Storage& s, Work const& w) {
  int const head_index = p.first_head + w.head_index, batch = head_index / p.heads, head = head_index % p.heads;
  Tensor gV = local_tile(p.v.get_tma_tensor(make_shape(p.seqlen_kv, p.head_dim, p.heads_kv, p.batch))(_, _, head / (p.heads / p.heads_kv), batch),
                         Shape<Int<kTileN>, Int<kColumns>>{}, make_coord(_, w.slice));
  Tensor sV = make_tensor(make_smem_ptr(s.v.data()), SmemLayoutKV{});
  auto slice = p.v.get_slice(0);
  Tensor tVg = slice.partition_S(gV);
  Tensor tVs = slice.partition_D(sV);
  int const last = p.tiles_from(w.block);
  constexpr int kImageBytes = kImage * sizeof(Element), kStatisticBytes = kRows * sizeof(float2);
  auto load_values = [&](int n, int stage) {
    int groups = 0;
    for (int g = 0; g < kGroups; ++g) groups += n < p.tiles_of(w.block + g);
    Full::arrive_and_expect_tx(&s.full[stage], kTileN * kColumns * sizeof(Element) + groups * (kImageBytes + kStatisticBytes));
    copy(p.v.with(s.full[stage], 0, TMA::CacheHintSm90::EVICT_LAST), tVg(_, _, _, n), tVs(_, _, _, stage));
  };
  auto load_probabilities = [&](int n, int stage) {
    for (int g = 0; g < kGroups; ++g) {
      if (n >= p.tiles_of(w.block + g)) continue;
      int64_t const image = p.image(w.head_index, w.block + g) + n;
      SM90_BULK_COPY_G2S::copy(p.statistics + image * kRows, &s.full[stage], s.statistics[stage][g], kStatisticBytes);
      SM90_BULK_COPY_G2S::copy(p.probabilities + image * kImage, &s.full[stage], s.p.data() + (stage * kGroups + g) * kImage, kImageBytes);
    }
  };
  // Values were there before the kernel that makes the probabilities began.
  int const early = min(last, kStages);
  for (int n = 0; n < early; ++n) load_values(n, n);
  grid_dependency_wait();
  for (int n = 0; n < early; ++n) load_probabilities(n, n);
  PipelineState v;
  v.phase = 1;
  for (int n = early; n < last; ++n, v.next()) {
    Empty::wait(&s.empty[v.stage], v.phase ^ 1);
    load_values(n, v.stage);
    load_probabilities(n, v.stage);
  }
}

// (maximum, sum) of a row from those of its tiles: each lane of a quad takes every fourth.
CUTE_DEVICE float2 whole_row(Params const& p, float2 const* tile, int tiles) {
  float top = -INFINITY, sum = 0.f;
  for (int t = threadIdx.x % 4; t < tiles; t += 4) {
    float2 const of_tile = tile[int64_t(t) * kRows];
    float const grown = fmaxf(top, of_tile.x), shift = grown == -INFINITY ? 0.f : grown;
    sum = sum * exp2_approx((top - shift) * p.maximum_scale) + of_tile.y * exp2_approx((of_tile.x - shift) * p.maximum_scale);
    top = grown;
  }
  float const all = quad_max(top), shift = all == -INFINITY ? 0.f : all;
  return make_float2(shift, quad_sum(sum * exp2_approx((top - shift) * p.maximum_scale)));
}

CUTE_DEVICE void consume(Params const& p, Storage& s, Work const& w) {
  int const group = cutlass::canonical_warp_group_idx() - 1, block = w.block + group;
  int const tid = threadIdx.x % 128, q = tid % 4, row = tid / 32 * 16 + tid % 32 / 4;
  Tensor sP = make_tensor(make_smem_ptr(s.p.data()), SmemLayoutP{});
  Tensor sVt = make_tensor(make_smem_ptr(s.v.data()), SmemLayoutVt{});
  Mma mma;
  auto slice = mma.get_slice(tid);
  Tensor tOrP = slice.partition_fragment_A(sP);
  Tensor tOrV = slice.partition_fragment_B(sVt);
  Tensor tOrO = partition_fragment_C(mma, Shape<Int<kRows>, Int<kColumns>>{});
  Tensor tOrA = make_fragment_like(tOrO);  // a tile's P V
  clear(tOrO);
  // No group sees fewer tiles than the one before it: only the last one's are all loaded.
  int const last = p.tiles_of(block);
  PipelineState v;

  grid_dependency_wait();
  float2 whole[2];
  float norm[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    whole[r] = whole_row(p, p.statistics + p.image(w.head_index, block) * kRows + row + 8 * r, last);
    norm[r] = whole[r].y > 0.f ? 1.f / whole[r].y : 0.f;
  }
  auto issue = [&](auto& product) {
    warpgroup_fence_operand(product);
    warpgroup_arrive();
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int kk = 0; kk < size<2>(tOrP); ++kk) {
      cute::gemm(mma, tOrP(_, _, kk, v.stage * kGroups + group), tOrV(_, _, kk, v.stage), product);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  auto finish = [&](auto& product, int stage) {
    warpgroup_fence_operand(product);
    float weight[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const below = s.statistics[stage][group][row + 8 * r].x - whole[r].x;
      weight[r] = exp2_approx(below * p.maximum_scale) * norm[r];
    }
    async_copy_fence();
    release(&s.empty[stage]);
    CUTE_UNROLL
    for (int j = 0; j < kColumns / 8; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& sum = tOrO(make_coord(c, r, j), 0, 0);
          sum = fmaf(product(make_coord(c, r, j), 0, 0), weight[r], sum);
        }
      }
    }
  };
  int n = 0;
  // Adds `product` of tile n to the output while the next tile's comes to `other`; at the end the
  // last tile's once more, as with the scores.
  Tensor tOrB = make_fragment_like(tOrO);
  auto step = [&](auto& product, auto& other) {
    int const held = v.stage;
    bool const is_last = ++n == last;
    if (!is_last) {
      v.next();
      Full::wait(&s.full[v.stage], v.phase);
    }
    issue(other);
    warpgroup_wait<1>();
    finish(product, held);
    return is_last;
  };
  if (last > 0) {
    Full::wait(&s.full[v.stage], v.phase);
    issue(tOrA);
    while (true) {
      if (step(tOrA, tOrB)) {
        warpgroup_wait<0>();
        break;
      }
      if (step(tOrB, tOrA)) {
        warpgroup_wait<0>();
        break;
      }
    }
    v.next();
  }
  // The tiles that other groups alone see, one after the other: an early release would stand for
  // that of another group.
  for (; n < p.tiles_from(w.block); ++n, v.next()) {
    Full::wait(&s.full[v.stage], v.phase);
    release(&s.empty[v.stage]);
  }

  int const head_index = p.first_head + w.head_index, batch = head_index / p.heads, head = head_index % p.heads;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const seq = (p.first_block + block) * kRows + row + 8 * r;
    bool const is_row = block < p.blocks && seq < p.seqlen_q;
    if (is_row && q == 0 && w.slice == 0 && p.lse) {
      p.lse[int64_t(head_index) * p.seqlen_q + seq] = (whole[r].x * p.maximum_scale + log2f(whole[r].y)) * kLn2;
    }
    Element* const target = p.out + batch * p.out_batch + head * p.out_head + seq * p.out_row;
    CUTE_UNROLL
    for (int g = 0; g < kColumns / 32; ++g) {
      uint32_t word[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) word[i] = pack<Element>(tOrO(make_coord(0, r, 4 * g + i), 0, 0), tOrO(make_coord(1, r, 4 * g + i), 0, 0));
      transpose_quad(word);
      int const column = w.slice * kColumns + 32 * g + 8 * q;
      if (is_row && column < p.head_dim) {
        *reinterpret_cast<uint4*>(target + column) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

#endif

struct kernel_golden {
  __device__ __forceinline__ static void run(Params const& p) {
#if defined(__CUDA_ARCH__)
    extern __shared__ __align__(1024) unsigned char raw[];
    Storage& s = *reinterpret_cast<Storage*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        Full::init(&s.full[i], 1);
        Empty::init(&s.empty[i], 4 * kGroups);
      }
      cutlass::arch::fence_barrier_init();
      prefetch_tma_descriptor(p.v.get_tma_descriptor());
    }
    __syncthreads();
    grid_dependency_launch();
    Work const w;
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
  p.v = make_tma_copy(SM90_TMA_LOAD{},
                      global_tensor(static_cast<Element const*>(tensors.value), p.seqlen_kv, n.value_row, p.head_dim, p.heads_kv,
                                    p.batch, n.value_head, n.value_batch),
                      SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kColumns>>{}, _1{});
  p.probabilities = static_cast<Element const*>(tensors.probabilities);
  p.statistics = static_cast<float2 const*>(tensors.statistics);
  p.maximum_scale = float(scalars.maximum_scale);
  p.out = static_cast<Element*>(tensors.out);
  p.out_batch = n.out_batch, p.out_head = n.out_head, p.out_row = n.out_row;
  p.lse = static_cast<float*>(tensors.lse);
  return p;
}
inline int depth(Params const& p, Integers const&) { return (p.head_dim + kColumns - 1) / kColumns; }

static_assert(sizeof(Storage) == 201728, "shared memory is not what the family counts");
template <class Kernel>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) two_kernel_output(CUTE_GRID_CONSTANT Params const params) {
  Kernel::run(params);
}

// Allows the kernel its shared memory on the current device, once.
inline int prepare() {
  static std::atomic<bool> is_known[64];
  int device;
  if (auto e = cudaGetDevice(&device)) return e;
  if (device < 64 && is_known[device].load(std::memory_order_relaxed)) return 0;
  if (auto e = cudaFuncSetAttribute(two_kernel_output<kernel_golden>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage))) return e;
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
  return cudaLaunchKernelEx(&config, two_kernel_output<kernel_golden>, p);
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
