// WGMMA widths beyond the powers of two and 96, 192: tile_n such as 80, 112, 160, 176.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

namespace k_golden {
using namespace cute;
using Element = cutlass::bfloat16_t;
constexpr int kTileN = 80, kD = 128;
constexpr int kGroups = 2, kStages = 2, kTileM = 64 * kGroups;
constexpr bool kCausal = true;
constexpr bool kPingPong = false;
constexpr bool kOverlap = false;
constexpr int kPolyEvery = 0;
constexpr float kLazy = 0;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

using SmemAtom = cute::conditional_t<kD % 64 == 0, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_K_SW64_Atom<Element>>;
using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileM>, Int<kD>>{}));
using SmemLayoutO = decltype(tile_to_shape(SmemAtom{}, Shape<_64, Int<kD>>{}));
using SmemLayoutKV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTileN>, Int<kD>, Int<kStages>>{}));
using SmemLayoutVt = decltype(composition(
    SmemLayoutKV{}, make_layout(Shape<Int<kD>, Int<kTileN>, Int<kStages>>{},
                                Stride<Int<kTileN>, _1, Int<kTileN * kD>>{})));
using GroupLayout = Layout<Shape<Int<kGroups>, _1, _1>>;
using MmaQK = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<Int<kTileM>, Int<kTileN>, Int<kD>>>(), GroupLayout{}));
using MmaPV = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<Int<kTileM>, Int<kD>, Int<kTileN>>,
                         GMMA::Major::K, GMMA::Major::MN>(), GroupLayout{}));
using GmemStride = Stride<int64_t, _1, int64_t, int64_t>;  // row, column, head, batch
using GmemShape = Shape<int, int, int, int>;
using GmemTensor = decltype(make_tensor(make_gmem_ptr(static_cast<Element const*>(nullptr)), GmemShape{}, GmemStride{}));
using GmemOut = decltype(make_tensor(make_gmem_ptr(static_cast<Element*>(nullptr)), GmemShape{}, GmemStride{}));
using TmaQ = decltype(make_tma_copy(SM90_TMA_LOAD{}, GmemTensor{}, SmemLayoutQ{}, Shape<Int<kTileM>, Int<kD>>{}, _1{}));
using TmaKV = decltype(make_tma_copy(SM90_TMA_LOAD{}, GmemTensor{}, SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kD>>{}, _1{}));
using TmaO = decltype(make_tma_copy(SM90_TMA_STORE{}, GmemOut{}, SmemLayoutO{}, Shape<_64, Int<kD>>{}, _1{}));

struct Params {
  TmaQ q;
  TmaKV k, v;
  TmaO o;
  int seqlen_q, seqlen_kv, head_dim, heads, heads_kv, batch, m_blocks;
  float scale_log2;
};

struct Storage {
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutQ>, 1024> q;
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> k;
  alignas(1024) cute::array_aligned<Element, cosize_v<SmemLayoutKV>, 1024> v;
  uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// 2^x on the FMA units: the floor through 1.5 * 2^23 rounded down, a cubic in the fraction (its
// largest relative error 8.8e-5 is under fp16's own 4.9e-4), the exponent added as an integer.
CUTE_DEVICE float exp2_poly(float x) {
  x = fmaxf(x, -127.f);
  float const shifted = __fadd_rd(x, 12582912.f);
  float const f = x - (shifted - 12582912.f);
  float p = fmaf(f, 0.0771191f, 0.227564f);
  p = fmaf(p, f, 0.695146f);
  p = fmaf(p, f, 1.f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}
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

CUTE_DEVICE void produce(Params const& p, Storage& s, int m_block, int head, int batch, int n_blocks) {
  Tensor gQ = local_tile(p.q.get_tma_tensor(make_shape(p.seqlen_q, p.head_dim, p.heads, p.batch))(_, _, head, batch),
                         Shape<Int<kTileM>, Int<kD>>{}, make_coord(m_block, 0));
  int const head_kv = head / (p.heads / p.heads_kv);
  auto const shape_kv = make_shape(p.seqlen_kv, p.head_dim, p.heads_kv, p.batch);
  Tensor gK = local_tile(p.k.get_tma_tensor(shape_kv)(_, _, head_kv, batch), Shape<Int<kTileN>, Int<kD>>{}, make_coord(_, 0));
  Tensor gV = local_tile(p.v.get_tma_tensor(shape_kv)(_, _, head_kv, batch), Shape<Int<kTileN>, Int<kD>>{}, make_coord(_, 0));
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(s.k.data()), SmemLayoutKV{});
  Tensor sV = make_tensor(make_smem_ptr(s.v.data()), SmemLayoutKV{});
  auto q = p.q.get_slice(0);
  auto k = p.k.get_slice(0);
  auto v = p.v.get_slice(0);
  Tensor tQg = q.partition_S(gQ);
  Tensor tQs = q.partition_D(sQ);
  Tensor tKg = k.partition_S(gK);
  Tensor tKs = k.partition_D(sK);
  Tensor tVg = v.partition_S(gV);
  Tensor tVs = v.partition_D(sV);
  constexpr uint32_t q_bytes = kTileM * kD * sizeof(Element), kv_bytes = kTileN * kD * sizeof(Element);

  Full::arrive_and_expect_tx(&s.q_full, q_bytes);
  copy(p.q.with(s.q_full), tQg, tQs);
  auto load = [&](auto const& tma, auto const& source, auto const& target, uint64_t* full, uint64_t* empty, int i, int n) {
    int const stage = i % kStages;
    Empty::wait(&empty[stage], ((i / kStages) & 1) ^ 1);
    Full::arrive_and_expect_tx(&full[stage], kv_bytes);
    copy(tma.with(full[stage]), source(_, _, _, n), target(_, _, _, stage));
  };
  load(p.k, tKg, tKs, s.k_full, s.k_empty, 0, n_blocks - 1);
  for (int i = 1; i < n_blocks; ++i) {
    load(p.k, tKg, tKs, s.k_full, s.k_empty, i, n_blocks - 1 - i);
    load(p.v, tVg, tVs, s.v_full, s.v_empty, i - 1, n_blocks - i);
  }
  load(p.v, tVg, tVs, s.v_full, s.v_empty, n_blocks - 1, 0);
}

// Scores of one row half: mode 0 of the accumulator is ((2 columns, 2 rows, N/8 column octets)).
struct Softmax {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};

  // Turns raw scores into probabilities in place; `factor` is what O must be multiplied by.
  template <bool kFirst, class Scores>
  CUTE_DEVICE bool step(Scores& scores, float scale_log2, float (&factor)[2]) {
    bool rescale = kFirst;
    float shift[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float top = maximum[r];
      CUTE_UNROLL
      for (int j = 0; j < kTileN / 8; ++j) {
        top = fmaxf(top, fmaxf(scores(make_coord(0, r, j), 0, 0), scores(make_coord(1, r, j), 0, 0)));
      }
      top = quad_max(top);
      if constexpr (!kFirst) {
        if constexpr (kLazy > 0.f) {
          // Keeping the old maximum is exact: P grows to at most 2^kLazy and the sum with it.
          if ((top - maximum[r]) * scale_log2 <= kLazy) top = maximum[r];
        }
        float const before = maximum[r];
        factor[r] = before == top ? 1.f : exp2_mufu((before - top) * scale_log2);
        rescale |= before != top;
        sum[r] *= factor[r];
      }
      maximum[r] = top;
      shift[r] = top == -INFINITY ? 0.f : top * scale_log2;
    }
    CUTE_UNROLL
    for (int j = 0; j < kTileN / 8; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& x = scores(make_coord(c, r, j), 0, 0);
          float const y = fmaf(x, scale_log2, -shift[r]);
          bool const poly = kPolyEvery > 0 && j % (kPolyEvery > 0 ? kPolyEvery : 1) == 1;
          x = poly ? exp2_poly(y) : exp2_mufu(y);
          sum[r] += x;
        }
      }
    }
    return rescale;
  }
};

template <class Scores>
CUTE_DEVICE void mask(Scores& scores, int row0, int col0, int seqlen_kv) {
  int const lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const limit = kCausal ? min(seqlen_kv, row0 + 8 * r + 1) : seqlen_kv;
    int const first = col0 + 2 * (lane % 4);
    CUTE_UNROLL
    for (int j = 0; j < kTileN / 8; ++j) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        if (first + 8 * j + c >= limit) scores(make_coord(c, r, j), 0, 0) = -INFINITY;
      }
    }
  }
}

CUTE_DEVICE void consume(Params const& p, Storage& s, int m_block, int head, int batch, int n_blocks) {
  int const group = cutlass::canonical_warp_group_idx() - 1;
  int const tid = threadIdx.x - 128;
  Tensor sQ = make_tensor(make_smem_ptr(s.q.data()), SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(s.k.data()), SmemLayoutKV{});
  Tensor sVt = make_tensor(make_smem_ptr(s.v.data()), SmemLayoutVt{});
  MmaQK mma_qk;
  MmaPV mma_pv;
  auto group_qk = mma_qk.get_slice(group * 128);
  auto group_pv = mma_pv.get_slice(group * 128);
  Tensor tSrQ = group_qk.partition_fragment_A(sQ);
  Tensor tSrK = group_qk.partition_fragment_B(sK);
  Tensor tOrV = group_pv.partition_fragment_B(sVt);
  Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<kTileM>, Int<kTileN>>{});
  Tensor tOrO = partition_fragment_C(mma_pv, Shape<Int<kTileM>, Int<kD>>{});
  Tensor tOrP = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileN / 16>>>{});
  clear(tOrO);

  int const warp_row = m_block * kTileM + group * 64 + (tid % 128) / 32 * 16;
  int const row0 = warp_row + (tid % 32) / 4;
  Softmax softmax;
  float factor[2] = {1.f, 1.f};

  auto release = [&](uint64_t* empty) {
    __syncwarp();
    if (tid % 32 == 0) Empty::arrive(empty);
  };
  auto issue_qk = [&](int i) {
    warpgroup_fence_operand(tSrS);
    warpgroup_arrive();
    mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int kk = 0; kk < size<2>(tSrQ); ++kk) {
      cute::gemm(mma_qk, tSrQ(_, _, kk), tSrK(_, _, kk, i % kStages), tSrS);
      mma_qk.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  auto issue_pv = [&](int i) {
    warpgroup_fence_operand(tOrO);
    warpgroup_fence_operand(tOrP);
    warpgroup_arrive();
    mma_pv.accumulate_ = GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int kk = 0; kk < size<2>(tOrP); ++kk) {
      cute::gemm(mma_pv, tOrP(_, _, kk), tOrV(_, _, kk, i % kStages), tOrO);
    }
    warpgroup_commit_batch();
  };
  auto needs_mask = [&](int n) {
    int const end = (n + 1) * kTileN;
    return end > p.seqlen_kv || (kCausal && end > m_block * kTileM + group * 64 + 1);
  };
  auto to_p = [&]() {
    // Relabels the accumulator as the A operand: column octets 2k and 2k+1 make one K slice of 16.
    CUTE_UNROLL
    for (int kk = 0; kk < kTileN / 16; ++kk) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          cutlass::Array<float, 2> pair;
          pair[0] = tSrS(make_coord(0, r, 2 * kk + half), 0, 0);
          pair[1] = tSrS(make_coord(1, r, 2 * kk + half), 0, 0);
          auto const packed = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
          tOrP(make_coord(0, r, half), 0, kk) = packed[0];
          tOrP(make_coord(1, r, half), 0, kk) = packed[1];
        }
      }
    }
  };
  auto rescale_o = [&]() {
    CUTE_UNROLL
    for (int j = 0; j < kD / 8; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        tOrO(make_coord(0, r, j), 0, 0) *= factor[r];
        tOrO(make_coord(1, r, j), 0, 0) *= factor[r];
      }
    }
  };

  Full::wait(&s.q_full, 0);
  Full::wait(&s.k_full[0], 0);
  turn_wait(group);
  issue_qk(0);
  turn_pass(group);
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  release(&s.k_empty[0]);
  int n = n_blocks - 1;
  if (needs_mask(n)) mask(tSrS, row0, n * kTileN, p.seqlen_kv);
  softmax.template step<true>(tSrS, p.scale_log2, factor);
  to_p();

  for (int i = 1; i < n_blocks; ++i) {
    n = n_blocks - 1 - i;
    if constexpr (kOverlap) {
      Full::wait(&s.k_full[i % kStages], (i / kStages) & 1);
      turn_wait(group);
      issue_qk(i);
      Full::wait(&s.v_full[(i - 1) % kStages], ((i - 1) / kStages) & 1);
      issue_pv(i - 1);
      turn_pass(group);
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
    } else {
      Full::wait(&s.v_full[(i - 1) % kStages], ((i - 1) / kStages) & 1);
      turn_wait(group);
      issue_pv(i - 1);
      Full::wait(&s.k_full[i % kStages], (i / kStages) & 1);
      issue_qk(i);
      turn_pass(group);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      warpgroup_fence_operand(tOrO);
      release(&s.v_empty[(i - 1) % kStages]);
    }
    release(&s.k_empty[i % kStages]);
    if (needs_mask(n)) mask(tSrS, row0, n * kTileN, p.seqlen_kv);
    bool const grew = softmax.template step<false>(tSrS, p.scale_log2, factor);
    if constexpr (kOverlap) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
      release(&s.v_empty[(i - 1) % kStages]);
    }
    to_p();
    if constexpr (kLazy > 0.f) {
      if (__any_sync(0xffffffffu, grew)) rescale_o();
    } else {
      rescale_o();
    }
  }
  int const last = n_blocks - 1;
  Full::wait(&s.v_full[last % kStages], (last / kStages) & 1);
  turn_wait(group);
  issue_pv(last);
  turn_pass(group);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    softmax.sum[r] = quad_sum(softmax.sum[r]);
    factor[r] = softmax.sum[r] > 0.f ? 1.f / softmax.sum[r] : 0.f;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(tOrO);
  rescale_o();

  // This group's rows of Q are read: O takes their place and leaves by TMA, which clips the tail.
  Tensor sO = make_tensor(make_smem_ptr(s.q.data()), SmemLayoutQ{});
  Tensor tOrOut = make_fragment_like<Element>(tOrO);
  CUTE_UNROLL
  for (int i = 0; i < size(tOrO); i += 2) {
    cutlass::Array<float, 2> pair;
    pair[0] = tOrO(i);
    pair[1] = tOrO(i + 1);
    auto const packed = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
    tOrOut(i) = packed[0];
    tOrOut(i + 1) = packed[1];
  }
  auto store = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_pv);
  auto thread_store = store.get_thread_slice(tid);
  cutlass::arch::NamedBarrier::sync(128, kGroups + group);
  copy(store, thread_store.retile_S(tOrOut), thread_store.partition_D(sO));
  tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, kGroups + group);
  if (tid % 128 == 0) {
    Tensor gO = local_tile(p.o.get_tma_tensor(make_shape(p.seqlen_q, p.head_dim, p.heads, p.batch))(_, _, head, batch),
                           Shape<_64, Int<kD>>{}, make_coord(m_block * kGroups + group, 0));
    Tensor sOg = local_tile(sO, Shape<_64, Int<kD>>{}, make_coord(group, 0));
    auto o = p.o.get_slice(0);
    copy(p.o, o.partition_S(sOg), o.partition_D(gO));
    tma_store_arrive();
    tma_store_wait<0>();
  }
}

struct kernel_golden {
  __device__ __forceinline__ static void run(Params const& p) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Storage& s = *reinterpret_cast<Storage*>(raw);
    int const m_block = kCausal ? p.m_blocks - 1 - int(blockIdx.x) : int(blockIdx.x);
    int const head = blockIdx.y, batch = blockIdx.z;
    int const keys = kCausal ? min(p.seqlen_kv, (m_block + 1) * kTileM) : p.seqlen_kv;
    int const n_blocks = (keys + kTileN - 1) / kTileN;
    if (threadIdx.x == 0) {
      Full::init(&s.q_full, 1);
      for (int i = 0; i < kStages; ++i) {
        Full::init(&s.k_full[i], 1);
        Full::init(&s.v_full[i], 1);
        Empty::init(&s.k_empty[i], 4 * kGroups);
        Empty::init(&s.v_empty[i], 4 * kGroups);
      }
      cutlass::arch::fence_barrier_init();
      prefetch_tma_descriptor(p.q.get_tma_descriptor());
      prefetch_tma_descriptor(p.k.get_tma_descriptor());
      prefetch_tma_descriptor(p.v.get_tma_descriptor());
      prefetch_tma_descriptor(p.o.get_tma_descriptor());
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) produce(p, s, m_block, head, batch, n_blocks);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      if constexpr (kPingPong) {
        if (threadIdx.x / 128 == kGroups) cutlass::arch::NamedBarrier::arrive(256, 0);
      }
      consume(p, s, m_block, head, batch, n_blocks);
      if constexpr (kPingPong) {
        // Balances the last turn_pass to group 0, on which nobody waits any more.
        if (threadIdx.x / 128 == 1) cutlass::arch::NamedBarrier::sync(256, 0);
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1) fused_attention(CUTE_GRID_CONSTANT Params const params) {
  Kernel::run(params);
}

inline int launch(void* const* tensors, int64_t const* n, double const* scalars, cudaStream_t stream) {
  Params p;
  auto tensor = [&](int index, int heads, int seqlen, int64_t const* stride) {
    return make_tensor(make_gmem_ptr(static_cast<Element const*>(tensors[index])),
                       make_shape(seqlen, int(n[5]), heads, int(n[0])),
                       make_stride(stride[2], _1{}, stride[1], stride[0]));
  };
  p.q = make_tma_copy(SM90_TMA_LOAD{}, tensor(0, n[1], n[3], n + 6), SmemLayoutQ{}, Shape<Int<kTileM>, Int<kD>>{}, _1{});
  p.k = make_tma_copy(SM90_TMA_LOAD{}, tensor(1, n[2], n[4], n + 9), SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kD>>{}, _1{});
  p.v = make_tma_copy(SM90_TMA_LOAD{}, tensor(2, n[2], n[4], n + 12), SmemLayoutKV{}(_, _, 0), Shape<Int<kTileN>, Int<kD>>{}, _1{});
  p.o = make_tma_copy(SM90_TMA_STORE{},
                      make_tensor(make_gmem_ptr(static_cast<Element*>(tensors[3])),
                                  make_shape(int(n[3]), int(n[5]), int(n[1]), int(n[0])),
                                  make_stride(n[17], _1{}, n[16], n[15])),
                      SmemLayoutO{}, Shape<_64, Int<kD>>{}, _1{});
  p.batch = n[0], p.heads = n[1], p.heads_kv = n[2], p.seqlen_q = n[3], p.seqlen_kv = n[4], p.head_dim = n[5];
  p.m_blocks = (p.seqlen_q + kTileM - 1) / kTileM;
  p.scale_log2 = float(scalars[0] * 1.4426950408889634);
  auto kernel = fused_attention<kernel_golden>;
  int const smem = sizeof(Storage);
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)) return e;
  kernel<<<dim3(p.m_blocks, p.heads, p.batch), kThreads, smem, stream>>>(p);
  return cudaGetLastError();
}
}  // namespace k_golden

extern "C" int tuner_golden_workspace(int64_t const*, int64_t* bytes) {
  *bytes = 0;
  return 0;
}
extern "C" int tuner_golden_launch(void* const* tensors, int64_t const* integers, double const* scalars, void*, void* stream) {
  return k_golden::launch(tensors, integers, scalars, static_cast<cudaStream_t>(stream));
}
