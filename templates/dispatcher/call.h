// A call as the dispatcher's table knows it: tensors, and the words that tell it from others.

#pragma once

#include <cstdint>
#include <cstring>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

namespace tuner {

using c10::DispatchKey;
using c10::DispatchKeySet;

// TMA reads from multiples of this (tuner/hardware.py).
constexpr uintptr_t kAlignment = 16;
constexpr int kMaxDims = 8;
// Attention's query, key, value and mask.
constexpr int kMaxInputs = 4;

// OPERATIONS of tuner/runtime/call/dispatch.py. The last two are backends of PyTorch's attention that
// return the log-sum-exp.
enum Operation : uint64_t { kAttention, kLinear, kMatmul, kFlash, kCudnnWithLse, kOperations };

enum Flag : uint64_t {
  kIsCausal = 1, kIsGrouped = 2, kHasScale = 4, kHasDropout = 8, kHasMask = 16,  // attention
  kHasBias = 1, kActivation = 2,                                                 // linear
  kWantsGradient = 1 << 6, kIsMisaligned = 1 << 7  // of the tensors: no plan is for these
};

// In the place of a tensor's first stride: the strides follow from the sizes.
constexpr uint64_t kContiguous = 1ull << 63;        // as (B, H, S, D)
constexpr uint64_t kTransposed = kContiguous | 1;   // as (B, S, H, D), seen as (B, H, S, D)
// In the place of a size: the call's `length`.
constexpr uint64_t kLength = 1ull << 63;

// The device whose tensors are served; set once, by `start`.
struct Device {
  c10::DeviceType type = c10::DeviceType::CUDA;
  DispatchKey backend = DispatchKey::CUDA;
  uint64_t plain = 0, autocast = 0;  // keys as bits
};

inline Device device;

inline bool is_off(at::Tensor const& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment;
}

// True when every row starts at a multiple of 16 bytes.
inline bool has_aligned_rows(at::Tensor const& tensor) {
  auto const sizes = tensor.sizes(), strides = tensor.strides();
  int64_t bits = 0;
  for (size_t i = 0; i + 1 < sizes.size(); ++i)
    if (sizes[i] != 1) bits |= strides[i];
  uintptr_t const start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return (start | static_cast<uintptr_t>(bits) * tensor.itemsize()) % kAlignment == 0;
}

// True as well for an empty tensor, and for one whose rows PyTorch pads or leaves to its `math`.
inline bool is_aligned(at::Tensor const& tensor) {
  auto const sizes = tensor.sizes(), strides = tensor.strides();
  if (sizes.empty() || !tensor.numel() || strides.back() != 1) return true;
  return sizes.back() * tensor.itemsize() % kAlignment || has_aligned_rows(tensor);
}

// A kind of call as words: equal kinds have equal words.
struct Kind {
  uint64_t words[2 + kMaxInputs * (1 + 2 * kMaxDims)];
  int count = 2;

  void add(uint64_t word) { words[count++] = word; }
  bool operator==(Kind const& other) const {
    return count == other.count && !std::memcmp(words, other.words, count * sizeof(uint64_t));
  }
};

struct Hash {
  size_t operator()(Kind const& kind) const {
    // Lanes of their own: a product waits for the one before it in its lane only.
    constexpr int kLanes = 4;
    uint64_t lanes[kLanes] = {static_cast<uint64_t>(kind.count), 1, 2, 3};
    for (int i = 0; i < kind.count; ++i) mix(lanes[i % kLanes], kind.words[i]);
    for (int i = 1; i < kLanes; ++i) mix(lanes[0], lanes[i]);
    return lanes[0];
  }

 private:
  static void mix(uint64_t& hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
};

struct Call {
  Kind kind;
  at::Tensor const* tensors[kMaxInputs];
  int count = 0;
  int64_t length = 0;  // keys of a cache that grows, which the kind leaves out; else 0
  // Keys that the thread adds and leaves out.
  c10::impl::LocalDispatchKeySet const local = c10::impl::tls_local_dispatch_key_set();

  // False for anything that is no plain tensor of the device. What a kernel would not see
  // (subclasses, transforms, modes, lazy views, other layouts) shows in the keys that torch would
  // dispatch on.
  bool add(at::Tensor const& tensor, bool is_cast = true) {
    if (!tensor.defined() || tensor.device().type() != device.type || tensor.dim() > kMaxDims)
      return false;
    uint64_t const keys = ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
    if (keys & ~(device.plain | device.autocast)) return false;
    if (is_cast && keys & device.autocast &&
        at::autocast::get_autocast_dtype(device.type) != tensor.scalar_type())
      return false;
    tensors[count++] = &tensor;
    return true;
  }

  bool is_misaligned() const { return kind.words[0] >> 8 & kIsMisaligned; }

  bool wants_gradient() const {
    if (!c10::GradMode::is_enabled()) return false;
    for (int i = 0; i < count; ++i)
      if (tensors[i]->requires_grad()) return true;
    return false;
  }

  // A dual tensor of forward-mode differentiation shows neither in its keys nor in requires_grad.
  // To ask whether any level is open takes one mutex a call, to ask each tensor for its tangent one
  // each; tensors that autograd knows nothing of have none.
  bool may_have_tangent() const {
    for (int i = 0; i < count; ++i)
      if (tensors[i]->unsafeGetTensorImpl()->autograd_meta())
        return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
    return false;
  }

  // Once all tensors are added. Gradients are those of the operation, not of what it is part of.
  void finish(Operation operation, uint64_t flags, double scale, bool is_below_autograd = false) {
    bool const is_attention = operation != kLinear && operation != kMatmul;
    length = is_attention ? growing() : 0;
    for (int i = 0; i < count; ++i) {
      add_layout(*tensors[i], i);
      bool const is_matrix = is_attention && i < 3;
      if (is_matrix ? !is_aligned(*tensors[i]) : is_off(*tensors[i])) flags |= kIsMisaligned;
    }
    if (!is_below_autograd && wants_gradient()) flags |= kWantsGradient;
    kind.words[0] = operation | flags << 8;
    std::memcpy(&kind.words[1], &scale, sizeof scale);
  }

 private:
  // Keys of a cache that is longer or shorter than the queries; else 0: attention over itself.
  int64_t growing() const {
    at::Tensor const &query = *tensors[0], &key = *tensors[1], &value = *tensors[2];
    bool const has_heads = query.dim() == 4 && key.dim() == 4 && value.dim() == 4;
    bool const is_cache = has_heads && key.sizes().slice(0, 3) == value.sizes().slice(0, 3) &&
                          query.size(2) != key.size(2) && key.numel();  // values may be narrower
    return is_cache ? key.size(2) : 0;
  }

  void add_layout(at::Tensor const& tensor, int position) {
    int64_t const dims = tensor.dim();
    kind.add(dims | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
             static_cast<uint64_t>(static_cast<uint8_t>(tensor.device().index())) << 16);
    // Of keys and values the rows grow, of a mask the columns.
    int64_t const grows = length && position ? (position < 3 ? 2 : dims - 1) : -1;
    auto const sizes = tensor.sizes(), strides = tensor.strides();
    bool const is_grown = grows >= 0 && sizes[grows] == length;
    for (int64_t i = 0; i < dims; ++i) kind.add(is_grown && i == grows ? kLength : sizes[i]);
    if (is_grown && position < 3) {
      int64_t const rows = sizes[2], width = sizes[3];
      if (strides[3] == 1 && strides[2] == width && strides[1] == rows * width &&
          strides[0] == sizes[1] * rows * width)
        return kind.add(kContiguous);
      if (strides[3] == 1 && strides[2] == sizes[1] * width && strides[1] == width &&
          strides[0] == sizes[1] * rows * width)
        return kind.add(kTransposed);
    } else if (is_grown && tensor.is_contiguous()) {
      return kind.add(kContiguous);
    }
    for (auto stride : strides) kind.add(stride);
  }
};

// The arguments of attention, as torch has them; false where they are not the dispatcher's.
// Grouped heads are a flag only where they are grouped: a call without groups may be told so.
inline bool read_attention(Operation operation, Call& call, at::Tensor const& query,
                           at::Tensor const& key, at::Tensor const& value, at::Tensor const* mask,
                           double dropout_p, bool is_causal, double const* scale, bool enable_gqa,
                           bool is_below_autograd = false) {
  if (!call.add(query) || !call.add(key) || !call.add(value)) return false;
  if (mask && !call.add(*mask, false)) return false;  // autocast leaves its type to PyTorch
  bool const has_heads = query.dim() == 4 && key.dim() == 4;
  bool const is_grouped = enable_gqa && !(has_heads && query.size(1) == key.size(1));
  uint64_t const flags = is_causal * kIsCausal | is_grouped * kIsGrouped |
                         (scale != nullptr) * kHasScale | (dropout_p != 0) * kHasDropout |
                         (mask != nullptr) * kHasMask;
  call.finish(operation, flags, scale ? *scale : 0, is_below_autograd);
  return true;
}

}  // namespace tuner
