// From a plan to its launches. Needs no GIL.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "table.h"

namespace tuner {

// Inputs, output, workspace, log-sum-exp (tuner/runtime/call/plan.py, Step.tensors).
constexpr int kMaxAddresses = kMaxInputs + 3;
constexpr int kMaxTensors = 16;
constexpr int kMaxIntegers = 64;

using CurrentStream = int (*)(int32_t, void**);
using Bind = int (*)(int32_t);

inline CurrentStream current_stream = nullptr;
inline Bind bind = nullptr;

// A thread that has called nothing of CUDA yet has no current context; an output from the
// allocator's cache needs none, but a kernel's launch function encodes TMA descriptors in it.
inline void bind_thread(int32_t index) {
  static thread_local bool is_bound = false;
  if (!is_bound) is_bound = bind(index) == 0;  // if not: the launch says why
}

struct Outputs {
  at::Tensor out, lse;  // undefined where a launch was refused, or it was not wanted
};

inline bool launch(Step const& step, int64_t length, char* const* addresses, char* workspace,
                   void* stream) {
  void* tensors[kMaxTensors];
  int64_t integers[kMaxIntegers];
  for (size_t i = 0; i < step.tensors.size(); ++i) {
    auto const& [which, offset] = step.tensors[i];
    // A null address stays null: it says that the tensor is not wanted.
    tensors[i] = addresses[which] ? addresses[which] + offset.at(length) : nullptr;
  }
  for (size_t i = 0; i < step.integers.size(); ++i) integers[i] = step.integers[i].at(length);
  char* const own = workspace ? workspace + step.workspace_at : nullptr;
  return step.launch(tensors, integers, step.scalars.data(), own, stream) == 0;
}

inline Outputs enqueue(Plan const& plan, Call const& call, bool wants_lse) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor const& first = *call.tensors[0];
  c10::DeviceGuard guard(first.device());
  bind_thread(first.device().index());
  Outputs made{at::empty_strided(plan.sizes, plan.strides, first.options()), {}};
  if (wants_lse)
    made.lse = at::empty(c10::IntArrayRef(plan.sizes).slice(0, 3), first.options().dtype(at::kFloat));
  at::Tensor workspace;
  if (plan.workspace_bytes)
    workspace = at::empty({plan.workspace_bytes}, first.options().dtype(at::kByte));
  char* addresses[kMaxAddresses] = {};
  int count = 0;
  for (int i = 0; i < call.count; ++i)
    addresses[count++] = static_cast<char*>(const_cast<void*>(call.tensors[i]->const_data_ptr()));
  addresses[count++] = static_cast<char*>(made.out.mutable_data_ptr());
  char* const base = plan.workspace_bytes ? static_cast<char*>(workspace.mutable_data_ptr()) : nullptr;
  addresses[count++] = base;
  if (wants_lse) addresses[count] = static_cast<char*>(made.lse.mutable_data_ptr());
  void* stream = nullptr;
  if (current_stream(first.device().index(), &stream)) return {};
  for (Step const& step : plan.steps)
    if (!launch(step, call.length, addresses, base, stream)) return {};
  return made;
}

// The plan's output, counted; nothing where Python meets what went wrong too, and says what it is:
// out of memory, a lost context, a refused launch.
inline Outputs run(Plan const& plan, Call const& call, bool wants_lse = false) {
  Outputs made;
  try {
    made = enqueue(plan, call, wants_lse);
  } catch (...) {
    return {};
  }
  if (made.out.defined()) table().count_hit(plan);
  return made;
}

// `out` with the strides of at::empty_like(like), which is what tracing is told. Outputs of narrower
// values stay as they are: in the order of the query's dimensions.
inline at::Tensor laid_out_as(at::Tensor const& like, at::Tensor out) {
  if (out.strides() == like.strides() || out.sizes() != like.sizes()) return out;
  at::AutoDispatchBelowADInplaceOrView below;
  bool const is_dense = like.is_non_overlapping_and_dense();
  at::Tensor const wanted = is_dense ? like : at::empty_like(like);
  bool is_alike = true;
  for (int64_t i = 0; i < out.dim(); ++i)
    is_alike &= out.size(i) == 1 || out.stride(i) == wanted.stride(i);
  if (is_alike) return out;
  return (is_dense ? at::empty_like(like) : wanted).copy_(out);
}

}  // namespace tuner
