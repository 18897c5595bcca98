// What `tuner.enable` registers with torch's dispatcher: see tuner/runtime/enable.py.
//
// Called with the GIL or without, by any thread. What the table does not know is asked of Python,
// under the GIL; what Python does not serve goes to PyTorch's kernel.

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>
#include <torch/version.h>

#include <memory>
#include <optional>
#include <tuple>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>

#include "handed_over.h"
#include "launch.h"

namespace tuner {

// Whether attention that this thread calls stays PyTorch's: see tuner/runtime/call/native.py.
inline thread_local bool is_native = false;

struct Native {
  bool const before = std::exchange(is_native, true);
  ~Native() { is_native = before; }
};

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11  // other operators

inline bool install() { return false; }
inline void uninstall() {}
inline std::atomic<PyObject*> ask{nullptr};

#else

// Python's (operation, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
// None, or the output and the log-sum-exp or None.
inline std::atomic<PyObject*> ask{nullptr};

// A tensor's object; of a subclass, which torch has dealt with before it came here, a plain alias.
inline PyObject* wrapped(at::Tensor const& tensor) {
  PyObject* const object = THPVariable_Wrap(tensor);
  if (!object || THPVariable_CheckExact(object)) return object;
  Py_DECREF(object);
  at::AutoDispatchBelowADInplaceOrView below;
  return THPVariable_Wrap(at::alias(tensor));
}

inline at::Tensor unwrapped(PyObject* object) {
  return THPVariable_Check(object) ? THPVariable_Unpack(object) : at::Tensor();
}

// A thread that outlives the interpreter must not wait for its GIL.
inline bool has_python() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// What Python makes of a call that the table does not know; it tells the table.
inline Outputs asked(Operation operation, Arguments const& given) {
  if (!has_python()) return {};
  pybind11::gil_scoped_acquire gil;
  PyObject* const function = ask.load();
  if (!function) return {};
  c10::AutoGradMode no_gradient(false);  // the operator that was called has them
  auto const object = [](PyObject* made) {
    if (!made) throw python_error();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  };
  try {
    pybind11::object mask = pybind11::none(), scale = pybind11::none();
    if (given.given()) mask = object(wrapped(*given.given()));
    if (given.scale) scale = object(PyFloat_FromDouble(*given.scale));
    auto const answer = object(PyObject_CallFunction(
        function, "iNNNOdOOO", static_cast<int>(operation), wrapped(given.query),
        wrapped(given.key), wrapped(given.value), mask.ptr(), given.dropout_p,
        given.is_causal ? Py_True : Py_False, scale.ptr(), given.enable_gqa ? Py_True : Py_False));
    if (!PyTuple_Check(answer.ptr()) || PyTuple_GET_SIZE(answer.ptr()) != 2) return {};
    return {unwrapped(PyTuple_GET_ITEM(answer.ptr(), 0)), unwrapped(PyTuple_GET_ITEM(answer.ptr(), 1))};
  } catch (python_error& error) {
    error.persist();
    throw;
  }
}

// A tuned kernel's outputs, laid out as the query; nothing, counted, where the call is PyTorch's.
inline Outputs tuned(Operation operation, Arguments const& given, Call const& call) {
  bool const wants_lse = operation != kAttention;
  Found const found = table().find(call);
  if (found.is_refused) return {};
  Outputs made;
  if (found.plan) made = run(*found.plan, call, wants_lse);
  if (!made.out.defined()) made = asked(operation, given);
  if (made.out.defined()) made.out = laid_out_as(given.query, std::move(made.out));
  return made;
}

// Whether the program lets PyTorch choose a fused kernel for such a call (torch.nn.attention.
// sdpa_kernel, torch.backends.cuda.enable_flash_sdp): flash takes no mask.
inline bool may_be_fused(Arguments const& given) {
  auto const& context = at::globalContext();
  if (context.userEnabledCuDNNSDP()) return true;
  bool const is_flash = !given.given() && !(given.is_causal && given.query.dim() == 4 &&
                                            given.key.dim() == 4 && given.query.size(2) != given.key.size(2));
  return is_flash && context.userEnabledFlashSDP();
}

// True for a mask of booleans that is expanded over the keys: a query sees all keys or none.
// Transformers builds one while it traces an encoder. PyTorch's fused kernels refuse its strides, and
// the composite that is left takes several times as long.
inline bool hides_whole_rows(Arguments const& given) {
  at::Tensor const* const mask = given.given();
  if (!mask || given.is_causal || mask->is_nested() || mask->dim() < 2 ||
      mask->scalar_type() != at::kBool)
    return false;
  auto const keys = mask->sym_size(-1).maybe_as_int();
  return mask->sym_stride(-1).maybe_as_int() == 0 && !(keys && *keys < 2);
}

// aten::scaled_dot_product_attention. Calls that autograd records go on to a backend's operator.
inline at::Tensor attend(at::Tensor const& query, at::Tensor const& key, at::Tensor const& value,
                         Optional const& mask, double dropout_p, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  auto const attend = [&](Optional const& safe) {
    return at::native::scaled_dot_product_attention(query, key, value, safe, dropout_p, is_causal,
                                                    scale, enable_gqa);
  };
  if (is_native) return attend(mask);  // handed over by who asks for it
  Arguments const given{query, key, value, mask, dropout_p, is_causal, scale, enable_gqa};
  if (hides_whole_rows(given)) {
    at::Tensor const out = at::scaled_dot_product_attention(query, key, value, {}, dropout_p, false,
                                                            scale, enable_gqa);
    return out.masked_fill(mask->narrow(-1, 0, 1).logical_not(), 0);
  }
  Call call;
  bool const is_plain = given.read(kAttention, call, false) && !call.may_have_tangent();
  if (is_plain && call.is_misaligned()) {
    return at::scaled_dot_product_attention(aligned(query), aligned(key), aligned(value),
                                            started(mask), dropout_p, is_causal, scale, enable_gqa);
  }
  if (!is_plain || call.wants_gradient() || !may_be_fused(given))
    return handed_over(given, is_plain, attend);
  if (auto made = tuned(kAttention, given, call); made.out.defined()) return std::move(made.out);
  Native native;  // it was counted
  return handed_over(given, is_plain, attend);
}

// An operator of PyTorch's backends. The override stands at BackendSelect, the last key before the
// backend's own kernel, which no such operator has a kernel for: whatever kernel the backend has at
// the time of a call, a provider's of flash attention say, answers what is not served.
template <class Result, class... Given>
class Backend {
 public:
  explicit Backend(char const* name) : name_(name) {}

  char const* name() const { return name_; }

  // False where PyTorch has no such kernel for the device.
  bool find() {
    auto const found = c10::Dispatcher::singleton().findSchemaOrThrow(name_, "");
    if (!operation_) operation_ = found.template typed<Result(Given...)>();
    return found.hasKernelForDispatchKey(device.backend);
  }

  Result call(DispatchKeySet keys, Given... given) const {
    constexpr DispatchKeySet kBelow(DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect);
    return operation_->redispatch(keys & kBelow, given...);
  }

 private:
  char const* const name_;
  std::optional<c10::TypedOperatorHandle<Result(Given...)>> operation_;
};

using Nine = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt,
                        at::Tensor, at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Scale = std::optional<double>;
using Input = at::Tensor const&;

inline Backend<Nine, Input, Input, Input, double, bool, bool, Scale> flash_backend{
    "aten::_scaled_dot_product_flash_attention"};
inline Backend<Nine, Input, Input, Input, Optional const&, bool, double, bool, bool, Scale>
    cudnn_backend{"aten::_scaled_dot_product_cudnn_attention"};
inline Backend<Four, Input, Input, Input, Optional const&, bool, double, bool, Scale>
    efficient_backend{"aten::_scaled_dot_product_efficient_attention"};

// A call of a backend's operator, of which copies are made below autograd.
class Behind {
 public:
  Behind(Operation operation, Arguments const& given)
      : operation_(operation), given_(given), is_plain_(given.read(operation, call_, true)) {}

  bool needs_copies() const { return is_plain_ && call_.is_misaligned(); }

  // The outputs by a tuned kernel; zeros where there are no keys; or nothing.
  Outputs made(bool may_be_tuned, bool wants_lse) const {
    if (!is_plain_) return {};
    if (!fits(given_)) {  // raises what PyTorch does, unless there is nothing to compute
      double const none = -std::numeric_limits<double>::infinity();
      auto const options = given_.query.options().dtype(at::kFloat);
      at::Tensor const out = by_math(given_);
      if (!wants_lse) return {out, {}};
      return {out, at::full(given_.query.sizes().slice(0, 3), none, options)};
    }
    return !is_native && may_be_tuned ? tuned(operation_, given_, call_) : Outputs{};
  }

  // The mask as the backend's own kernel reads it.
  Optional mask() const {
    at::Tensor const* const mask = given_.given();
    return is_plain_ && mask && !is_aligned_mask(*mask) ? Optional(copied(*mask)) : given_.mask;
  }

 private:
  Operation const operation_;
  Arguments const& given_;
  Call call_;
  bool const is_plain_;
};

inline at::Tensor unused(at::Tensor const& like, c10::IntArrayRef sizes, c10::ScalarType type) {
  return at::empty(sizes, like.options().dtype(type));
}

inline Nine flash(DispatchKeySet keys, at::Tensor const& query, at::Tensor const& key,
                  at::Tensor const& value, double dropout_p, bool is_causal, bool return_debug_mask,
                  std::optional<double> scale) {
  Optional const none;
  Arguments const given{query, key, value, none, dropout_p, is_causal, scale, true};
  Behind const call(kFlash, given);
  if (call.needs_copies())
    return flash(keys, aligned(query), aligned(key), aligned(value), dropout_p, is_causal,
                 return_debug_mask, scale);
  Outputs const made = call.made(!return_debug_mask, true);
  if (!made.out.defined())
    return flash_backend.call(keys, query, key, value, dropout_p, is_causal, return_debug_mask,
                              scale);
  return {made.out, made.lse, {}, {}, query.size(2), key.size(2),
          unused(query, {2}, at::kUInt64), unused(query, {}, at::kUInt64),
          unused(query, {0}, query.scalar_type())};
}

inline Nine cudnn(DispatchKeySet keys, at::Tensor const& query, at::Tensor const& key,
                  at::Tensor const& value, Optional const& mask, bool compute_lse,
                  double dropout_p, bool is_causal, bool return_debug_mask,
                  std::optional<double> scale) {
  Arguments const given{query, key, value, mask, dropout_p, is_causal, scale, true};
  Behind const call(compute_lse ? kCudnnWithLse : kAttention, given);
  if (call.needs_copies())
    return cudnn(keys, aligned(query), aligned(key), aligned(value), started(mask), compute_lse,
                 dropout_p, is_causal, return_debug_mask, scale);
  Outputs const made = call.made(!return_debug_mask, compute_lse);
  if (!made.out.defined())
    return cudnn_backend.call(keys, query, key, value, call.mask(), compute_lse, dropout_p,
                              is_causal, return_debug_mask, scale);
  at::Tensor const lse = made.lse.defined() ? made.lse.unsqueeze(-1) : at::Tensor();
  return {made.out, lse, {}, {}, query.size(2), key.size(2), unused(query, {}, at::kLong),
          unused(query, {}, at::kLong), {}};
}

// `out` as tracing is told of it: rows of all heads lie together, whatever the query has.
inline at::Tensor rows_together(at::Tensor const& out) {
  at::AutoDispatchBelowADInplaceOrView below;
  return out.transpose(1, 2).contiguous().transpose(1, 2);
}

inline Four efficient(DispatchKeySet keys, at::Tensor const& query, at::Tensor const& key,
                      at::Tensor const& value, Optional const& mask, bool compute_lse,
                      double dropout_p, bool is_causal, std::optional<double> scale) {
  Arguments const given{query, key, value, mask, dropout_p, is_causal, scale, true};
  Behind const call(kAttention, given);
  if (call.needs_copies())
    return efficient(keys, aligned(query), aligned(key), aligned(value), started(mask), compute_lse,
                     dropout_p, is_causal, scale);
  Outputs made;
  if (!compute_lse) made = call.made(true, false);  // its log-sum-exp has rows of its own
  if (!made.out.defined())
    return efficient_backend.call(keys, query, key, value, mask, compute_lse, dropout_p, is_causal,
                                  scale);
  return {rows_together(made.out), unused(query, {query.size(0), query.size(1), 0}, at::kFloat),
          unused(query, {}, at::kLong), unused(query, {}, at::kLong)};
}

inline std::mutex installing;
inline std::unique_ptr<torch::Library> overrides, backend_overrides;

// Torch warns of a kernel that replaces another: here it is meant.
class Silent : public c10::WarningHandler {
  void process(c10::Warning const&) override {}
};

inline std::unique_ptr<torch::Library> library(DispatchKey key) {
  return std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

inline void uninstall() {
  std::scoped_lock lock(installing);
  backend_overrides.reset();
  overrides.reset();
}

// False where this torch cannot.
inline bool install() {
  std::scoped_lock lock(installing);
  if (overrides) return true;
  backend_overrides = library(DispatchKey::BackendSelect);
  auto const put = [](auto& backend, auto kernel) {
    if (backend.find()) backend_overrides->impl(backend.name() + std::strlen("aten::"), kernel);
  };
  put(flash_backend, TORCH_FN(flash));
  put(cudnn_backend, TORCH_FN(cudnn));
  put(efficient_backend, TORCH_FN(efficient));
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  overrides = library(DispatchKey::CompositeImplicitAutograd);
  overrides->impl("scaled_dot_product_attention", TORCH_FN(attend));
  return true;
}

#endif

}  // namespace tuner
