// Attention that PyTorch answers, as its fused kernels read it rightly: the rules, and the faults
// that they are for, are those of tuner/runtime/call/handed_over.py.

#pragma once

#include <optional>
#include <tuple>

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/any.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include "call.h"

namespace tuner {

using Optional = std::optional<at::Tensor>;

struct Arguments {
  at::Tensor const &query, &key, &value;
  Optional const& mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> const& scale;
  bool enable_gqa;

  bool read(Operation operation, Call& call, bool is_below_autograd) const {
    return read_attention(operation, call, query, key, value, given(), dropout_p, is_causal,
                          scale ? &*scale : nullptr, enable_gqa, is_below_autograd);
  }

  at::Tensor const* given() const { return mask && mask->defined() ? &*mask : nullptr; }
};

// One element of each broadcast dimension but the last.
inline at::Tensor once(at::Tensor tensor) {
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i)
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) tensor = tensor.narrow(i, 0, 1);
  return tensor;
}

// Elements that fill up a row to a multiple of 16 bytes.
inline int64_t padding(int64_t width, size_t itemsize) {
  int64_t const step = kAlignment / itemsize;
  return (step - width % step) % step;
}

// A differentiable copy whose start and rows are aligned.
inline at::Tensor copied(at::Tensor const& tensor) {
  if (!tensor.dim()) return tensor.clone();
  at::Tensor const rows = once(tensor);
  int64_t const width = tensor.size(-1), more = padding(width, tensor.itemsize());
  at::Tensor copy;
  if (more) {
    copy = at::constant_pad_nd(rows, {0, more}).narrow(-1, 0, width);
  } else {
    copy = rows.clone();
    if (copy.stride(-1) != 1 || !is_aligned(copy))  // of rows that overlap
      copy = rows.clone(at::MemoryFormat::Contiguous);
  }
  return copy.expand(tensor.sizes());
}

inline at::Tensor aligned(at::Tensor const& tensor) {
  return is_aligned(tensor) ? tensor : copied(tensor);
}

// A mask that starts where own kernels read.
inline Optional started(Optional const& mask) {
  return mask && mask->defined() && is_off(*mask) ? Optional(copied(*mask)) : mask;
}

// False for a mask with terms whose rows are not aligned, or that is expanded over the keys.
inline bool is_aligned_mask(at::Tensor const& mask) {
  if (!mask.is_floating_point() || !mask.dim()) return true;
  return has_aligned_rows(mask) && (mask.size(-1) < 2 || mask.stride(-1) != 0);
}

// The mask; one with a single column, expanded over the keys.
inline Optional over_keys(Arguments const& given) {
  at::Tensor const* const mask = given.given();
  if (!mask || !mask->dim() || mask->size(-1) != 1 || given.key.dim() < 2) return given.mask;
  auto sizes = mask->sizes().vec();
  sizes.back() = given.key.size(-2);
  return mask->expand(sizes);
}

// False for sizes that PyTorch's fused kernels fail on, though one may be chosen for them.
inline bool fits(Arguments const& given) {
  auto const q = given.query.sizes(), k = given.key.sizes(), v = given.value.sizes();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4) return true;
  if (!given.query.numel() || !given.key.numel() || !given.value.numel()) return false;
  if (k[0] != q[0] || k[3] != q[3] || v.slice(0, 3) != k.slice(0, 3) || q[1] % k[1]) return false;
  at::Tensor const* const mask = given.given();
  if (!mask) return true;
  if (mask->device() != given.query.device() || mask->dim() > 4) return false;
  int64_t const whole[] = {q[0], q[1], q[2], k[2]};
  for (int64_t i = 1; i <= mask->dim(); ++i)
    if (mask->size(-i) != 1 && mask->size(-i) != whole[4 - i]) return false;
  return true;
}

// True for a boolean mask that cuDNN's kernel may ignore in rows that see no key.
inline bool may_ignore(Arguments const& given) {
  at::Tensor const* const mask = given.given();
  if (!mask || mask->is_nested() || mask->scalar_type() != at::kBool || given.query.dim() != 4)
    return false;
  auto const type = given.query.scalar_type();
  return given.query.device().type() == device.type && (type == at::kHalf || type == at::kBFloat16) &&
         at::globalContext().userEnabledCuDNNSDP();
}

// A boolean mask as terms of the scores: 0 where a query sees a key.
inline at::Tensor terms_of(at::Tensor const& mask, at::ScalarType type, bool is_plain) {
  at::Tensor const zero = at::scalar_tensor(0, mask.options().dtype(type));
  double const hidden = -std::numeric_limits<double>::infinity();
  if (!is_plain || !mask.dim()) return at::where(mask, zero, hidden);  // sizes may be symbols
  int64_t const width = mask.size(-1), more = padding(width, zero.itemsize());
  at::Tensor rows = once(mask);
  if (more) rows = at::constant_pad_nd(rows, {0, more});
  return at::where(rows, zero, hidden).narrow(-1, 0, width).expand(mask.sizes());
}

inline at::Tensor by_math(Arguments const& given) {
  // PyTorch divides by the number of grouped heads.
  bool const is_grouped = given.enable_gqa && given.key.dim() > 2 && given.key.sym_size(-3) != 0;
  return std::get<0>(at::_scaled_dot_product_attention_math(
      given.query, given.key, given.value, given.mask, given.dropout_p, given.is_causal, {},
      given.scale, is_grouped));
}

inline bool wants_gradient(Arguments const& given) {
  return c10::GradMode::is_enabled() && (given.query.requires_grad() || given.key.requires_grad() ||
                                         given.value.requires_grad());
}

// PyTorch's answer: `attend` is its function of a mask. Query, key and value are aligned.
//
// is_plain: they are plain tensors of the device; else they may be a trace's.
template <class Attend>
at::Tensor handed_over(Arguments const& given, bool is_plain, Attend attend) {
  bool const is_elsewhere = given.given() && given.given()->device() != given.query.device();
  if (is_elsewhere || (is_plain && !fits(given))) return by_math(given);
  Optional const mask = is_plain ? over_keys(given) : given.mask;
  if (may_ignore(given)) {
    if (wants_gradient(given)) {
      at::Tensor const hidden = mask->any(-1, true).logical_not();
      return attend(mask).masked_fill(hidden, 0);
    }
    return attend(terms_of(*mask, given.query.scalar_type(), is_plain));
  }
  if (is_plain && given.given() && !is_aligned_mask(*mask)) return attend(copied(*mask));
  return attend(mask);
}

}  // namespace tuner
