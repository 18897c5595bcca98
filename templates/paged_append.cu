// New keys and values of packed sequences, written to a paged cache, with rotary embedding of queries and keys.
// Sequence b has the tokens starts[b]..starts[b + 1], whose keys are the last ones of its used[b]. A thread has two
// vectors of eight elements of a head: the two that are rotated into each other, or neighbours. Products and sums are
// rounded one by one in fp32, then once to the result's type, so that results have the bits of PyTorch's operations.
// A token behind the last sequence, or whose key has no place in table, cache or angles, writes nothing.
//
// Compiled with TUNER_KERNEL, the end of its functions' names.
//
// Arguments (their order: tuner/compile/single.py)
//   query, key, value                  (tokens, heads, D) of fp16 or bf16
//   cosine, sine                       fp32 (positions, R / 2), contiguous
//   table, used, starts                int32 (B, columns), (B), (B + 1); starts may be null: `queries` tokens each
//   factor_q, factor_k, factor_v       fp32, one a head; of e4m3 results
//   out, key_cache, value_cache        of the inputs' type or e4m3: (tokens, H, D), (pages, page size, HKV, D)
//   is_bf16, is_e4m3, interleaves      types; 1: elements 2 i and 2 i + 1 are a pair, 0: i and i + R / 2
//   tokens .. columns                  sizes; head_dim D and rotary_dim R are multiples of 16
//   table_row .. value_cache_head      strides in elements, multiples of 8; elements of a head lie side by side
//   pdl                                1: launch with programmatic stream serialization
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "arguments.h"
#include "ptx.h"

namespace {

using namespace tuner;

// As `arguments.cu.j2` makes them: a test compares both.
struct Tensors { void *query, *key, *value, *cosine, *sine, *table, *used, *starts, *factor_q, *factor_k, *factor_v, *out, *key_cache, *value_cache; };
struct Integers { int64_t is_bf16, is_e4m3, interleaves, tokens, batch, queries, heads_q, heads_kv, head_dim, rotary_dim, positions, page_size, pages, columns, table_row, query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head, key_cache_page, key_cache_slot, key_cache_head, value_cache_page, value_cache_slot, value_cache_head, pdl; };

constexpr int kVector = 8;
constexpr int kThreads = 256;

__device__ float2 wide(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 wide(__half2 pair) { return __half22float2(pair); }
__device__ void narrow(__nv_bfloat162& pair, float low, float high) { pair = __floats2bfloat162_rn(low, high); }
__device__ void narrow(__half2& pair, float low, float high) { pair = __floats2half2_rn(low, high); }

template <class Pair>
__device__ void read(float (&of)[kVector], void const* row, int vector) {
  uint4 const raw = static_cast<uint4 const*>(row)[vector];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    float2 const two = wide(reinterpret_cast<Pair const*>(&raw)[i]);
    of[2 * i] = two.x, of[2 * i + 1] = two.y;
  }
}

template <class Pair, bool kE4m3>
__device__ void write(float const (&of)[kVector], void* row, int vector, float factor) {
  if constexpr (kE4m3) {
    uint32_t two[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) two[i] = packed_e4m3(__fdiv_rn(of[2 * i], factor), __fdiv_rn(of[2 * i + 1], factor));
    static_cast<uint2*>(row)[vector] = make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
  } else {
    uint4 raw;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) narrow(reinterpret_cast<Pair*>(&raw)[i], of[2 * i], of[2 * i + 1]);
    static_cast<uint4*>(row)[vector] = raw;
  }
}

__device__ void rotate(float& x, float& y, float cosine, float sine) {
  float const low = __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
  y = __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
  x = low;
}

template <class Pair, bool kE4m3>
__global__ void __launch_bounds__(kThreads) append(Tensors const t, Integers const n) {
  grid_dependency_wait();
  grid_dependency_launch();
  int const token = blockIdx.x, batch = n.batch;
  int const* const starts = static_cast<int const*>(t.starts);
  int sequence = 0;
  if (starts == nullptr) {
    sequence = token / int(n.queries);
  } else {  // as many end before the token
    for (int first = 0; first < batch; first += kThreads) {
      int const other = first + threadIdx.x;
      sequence += __syncthreads_count(other < batch && starts[other + 1] <= token);
    }
  }
  if (sequence >= batch) return;
  int const end = starts == nullptr ? (sequence + 1) * int(n.queries) : starts[sequence + 1];
  int const position = static_cast<int const*>(t.used)[sequence] - (end - token);
  int const column = position / int(n.page_size), slot = position % int(n.page_size), rotary_dim = n.rotary_dim;
  if (position < 0 || column >= n.columns || (rotary_dim > 0 && position >= n.positions)) return;
  int const page = static_cast<int const*>(t.table)[sequence * n.table_row + column];
  if (page < 0 || page >= n.pages) return;

  int const pairs = int(n.head_dim) / (2 * kVector), item = blockIdx.y * kThreads + threadIdx.x;
  int const heads_q = n.heads_q, heads_kv = n.heads_kv;
  if (item >= pairs * (heads_q + 2 * heads_kv)) return;
  int head = item / pairs;
  int const pair = item % pairs;
  constexpr int kBytes = kE4m3 ? 1 : 2;  // of an element of the result
  char const* source;
  char* target;
  float const* factors;
  bool is_rotated = 2 * kVector * pair < rotary_dim;
  if (head < heads_q) {
    source = static_cast<char const*>(t.query) + 2 * (token * n.query_row + head * n.query_head);
    target = static_cast<char*>(t.out) + kBytes * (token * n.out_row + head * n.out_head);
    factors = static_cast<float const*>(t.factor_q);
  } else if (head < heads_q + heads_kv) {
    head -= heads_q;
    source = static_cast<char const*>(t.key) + 2 * (token * n.key_row + head * n.key_head);
    target = static_cast<char*>(t.key_cache) + kBytes * (page * n.key_cache_page + slot * n.key_cache_slot + head * n.key_cache_head);
    factors = static_cast<float const*>(t.factor_k);
  } else {
    head -= heads_q + heads_kv;
    source = static_cast<char const*>(t.value) + 2 * (token * n.value_row + head * n.value_head);
    target = static_cast<char*>(t.value_cache) + kBytes * (page * n.value_cache_page + slot * n.value_cache_slot + head * n.value_cache_head);
    factors = static_cast<float const*>(t.factor_v);
    is_rotated = false;
  }
  bool const is_halved = is_rotated && n.interleaves == 0;
  int const first = is_halved ? pair : 2 * pair, second = is_halved ? pair + rotary_dim / (2 * kVector) : first + 1;
  float of[kVector], with[kVector];
  read<Pair>(of, source, first);
  read<Pair>(with, source, second);
  if (is_rotated) {
    int64_t const angle = position * int64_t(rotary_dim / 2) + kVector * pair;
    float const* const cosine = static_cast<float const*>(t.cosine) + angle;
    float const* const sine = static_cast<float const*>(t.sine) + angle;
    if (is_halved) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) rotate(of[i], with[i], cosine[i], sine[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        rotate(of[2 * i], of[2 * i + 1], cosine[i], sine[i]);
        rotate(with[2 * i], with[2 * i + 1], cosine[kVector / 2 + i], sine[kVector / 2 + i]);
      }
    }
  }
  float const factor = kE4m3 ? factors[head] : 1.f;
  write<Pair, kE4m3>(of, target, first, factor);
  write<Pair, kE4m3>(with, target, second, factor);
}

bool valid(Integers const& n) {
  constexpr int64_t kMost = int64_t(1) << 30, kFar = int64_t(1) << 40;
  int64_t const sizes[] = {n.tokens, n.batch, n.heads_q, n.heads_kv, n.head_dim, n.page_size, n.pages, n.columns};
  for (int64_t size : sizes) {
    if (size < 1 || size > kMost) return false;
  }
  int64_t const strides[] = {n.query_row, n.query_head, n.key_row, n.key_head, n.value_row, n.value_head, n.out_row, n.out_head,
                             n.key_cache_page, n.key_cache_slot, n.key_cache_head, n.value_cache_page, n.value_cache_slot, n.value_cache_head};
  for (int64_t stride : strides) {
    if (stride < 0 || stride > kFar || stride % kVector != 0) return false;
  }
  bool const is_even = n.queries >= 0 && n.queries <= kMost && n.table_row >= 0 && n.table_row <= kFar;
  bool const turns = n.rotary_dim >= 0 && n.rotary_dim <= n.head_dim && n.rotary_dim % (2 * kVector) == 0 && n.positions >= 0 && n.positions <= kMost;
  return is_even && turns && n.head_dim <= 1024 && n.head_dim % (2 * kVector) == 0 && (n.heads_q + 2 * n.heads_kv) <= 4096 &&
         n.columns * n.page_size <= kMost;
}

bool misses(void const* tensor, uintptr_t alignment) { return tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % alignment != 0; }

cudaError_t launch(Tensors const& t, Integers const& n, cudaStream_t stream) {
  if (!valid(n) || (t.starts == nullptr && n.queries < 1)) return cudaErrorInvalidValue;
  uintptr_t const alignment = n.is_e4m3 ? 8 : 16;
  if (misses(t.query, 16) || misses(t.key, 16) || misses(t.value, 16) || misses(t.out, alignment) || misses(t.key_cache, alignment) ||
      misses(t.value_cache, alignment) || misses(t.table, 4) || misses(t.used, 4) || (t.starts != nullptr && misses(t.starts, 4))) {
    return cudaErrorMisalignedAddress;
  }
  if (n.rotary_dim > 0 && (misses(t.cosine, 4) || misses(t.sine, 4))) return cudaErrorMisalignedAddress;
  if (n.is_e4m3 && (misses(t.factor_q, 4) || misses(t.factor_k, 4) || misses(t.factor_v, 4))) return cudaErrorMisalignedAddress;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  int64_t const items = n.head_dim / (2 * kVector) * (n.heads_q + 2 * n.heads_kv);
  config.gridDim = dim3(unsigned(n.tokens), unsigned((items + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = n.pdl != 0;
  auto const kernel = n.is_bf16 ? (n.is_e4m3 ? append<__nv_bfloat162, true> : append<__nv_bfloat162, false>)
                                : (n.is_e4m3 ? append<__half2, true> : append<__half2, false>);
  return cudaLaunchKernelEx(&config, kernel, t, n);
}

}  // namespace

#include "exported.h"
