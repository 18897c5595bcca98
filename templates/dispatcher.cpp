// The runtime's hot path: from a Python call to the kernel's launch without a Python frame between.
//
// An extension module of CPython, compiled against the torch and the Python at hand. It holds two
// tables, filled by tuner/runtime/dispatch.py: from a kind of call (sizes, strides, types, device,
// mask, scale, ...) to the launches that serve it, and to the reason why none does. A call that was
// refused before returns False, counted by its reason, and is PyTorch's. One that is in neither
// table, or may not be answered, returns None, and Python decides. It never raises: whatever goes
// wrong here goes wrong again, and is judged, there.
//
// The tables are guarded by the GIL, which is given up only while memory is allocated and kernels
// are launched.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// TMA reads from multiples of this (tuner/hardware.py).
constexpr uintptr_t kAlignment = 16;
// Inputs, output, workspace, log-sum-exp (tuner/runtime/plan.py, Step.tensors).
constexpr int kMaxAddresses = 6;
constexpr int kMaxTensors = 16;
constexpr int kMaxDims = 8;
// Attention's query, key, value and mask.
constexpr int kMaxInputs = 4;
// Refusals kept; more start over, so that a server of ever new shapes stays small.
constexpr size_t kMaxRefusals = 4096;

using Launch = int (*)(void* const*, int64_t const*, double const*, void*, void*);
using CurrentStream = int (*)(int32_t, void**);
using Bind = int (*)(int32_t);

struct Step {
  Launch launch;
  std::vector<std::pair<int, int64_t>> tensors;
  std::vector<int64_t> integers;
  std::vector<double> scalars;
  int64_t workspace_at;
};

// Where a plan's configuration comes from: measured, measured for a neighbour, selected.
enum Source : int { kExact, kNearest, kPortfolio, kSources };

struct Plan {
  std::vector<int64_t> sizes, strides;
  int64_t workspace_bytes;
  int source;
  std::vector<Step> steps;
};

// A kind of call as words: equal kinds have equal words.
struct Kind {
  uint64_t words[2 + kMaxInputs * (1 + 2 * kMaxDims)];
  int count = 0;

  void add(uint64_t word) { words[count++] = word; }
  bool operator==(Kind const& other) const {
    return count == other.count && !std::memcmp(words, other.words, count * sizeof(uint64_t));
  }
};

struct Hash {
  size_t operator()(Kind const& kind) const {
    uint64_t hash = kind.count;
    for (int i = 0; i < kind.count; ++i) {
      hash = (hash ^ kind.words[i]) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Refusal {
  size_t reason;  // position in State.refused
  double until;
};

struct State {
  std::unordered_map<Kind, std::shared_ptr<Plan const>, Hash> plans;
  std::unordered_map<Kind, Refusal, Hash> refusals;
  long long generation = 0;                   // of both tables: how often they were cleared
  double plans_until = 0, refusals_until = 0;  // calls are answered from each up to this time
  long long hits[kSources] = {};  // by source
  std::vector<long long> refused;  // calls by reason
  c10::DeviceType device = c10::DeviceType::CUDA;
  CurrentStream current_stream = nullptr;
  Bind bind = nullptr;
  uint64_t plain = 0, autocast = 0;  // keys as bits
};

State state;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// OPERATIONS of tuner/runtime/dispatch.py. The last three are PyTorch's operators that tuner.enable
// stands before, of which only refusals are known.
enum Operation : uint64_t { kAttention, kLinear, kMatmul, kFlash, kCudnn, kCudnnWithLse };

enum Flag : uint64_t {
  kIsCausal = 1, kIsGrouped = 2, kHasScale = 4, kHasDropout = 8, kHasMask = 16,  // attention
  kHasBias = 1, kActivation = 2,                                                 // linear
  kWantsGradient = 1 << 6, kIsMisaligned = 1 << 7  // of the tensors: no plan is for these
};

struct Call {
  Kind kind;
  at::Tensor const* tensors[kMaxInputs];
  int count = 0;

  Call() { kind.count = 2; }

  // False for anything that is no plain tensor of the device. What a kernel would not see
  // (subclasses, transforms, modes, lazy views, other layouts) shows in the keys that torch would
  // dispatch on.
  bool add(PyObject* object, bool is_cast = true) {
    if (!THPVariable_CheckExact(object)) return false;
    at::Tensor const& tensor = THPVariable_Unpack(object);
    if (!tensor.defined() || tensor.device().type() != state.device || tensor.dim() > kMaxDims)
      return false;
    auto const local = c10::impl::tls_local_dispatch_key_set();
    uint64_t const keys = ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
    if (keys & ~(state.plain | state.autocast)) return false;
    if (is_cast && keys & state.autocast &&
        at::autocast::get_autocast_dtype(state.device) != tensor.scalar_type())
      return false;
    tensors[count++] = &tensor;
    kind.add(tensor.dim() | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
             static_cast<uint64_t>(static_cast<uint8_t>(tensor.device().index())) << 16);
    for (auto size : tensor.sizes()) kind.add(size);
    for (auto stride : tensor.strides()) kind.add(stride);
    return true;
  }

  // Once all tensors are added.
  void finish(Operation operation, uint64_t flags, double scale) {
    for (int i = 0; i < count; ++i) {
      if (c10::GradMode::is_enabled() && tensors[i]->requires_grad()) flags |= kWantsGradient;
      if (reinterpret_cast<uintptr_t>(tensors[i]->const_data_ptr()) % kAlignment)
        flags |= kIsMisaligned;
    }
    kind.words[0] = operation | flags << 8;
    std::memcpy(&kind.words[1], &scale, sizeof scale);
  }
};

// (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
bool read_attention(Operation operation, Call& call, PyObject* const* arguments) {
  uint64_t flags = 0;
  double scale = 0;
  for (int i = 0; i < 3; ++i)
    if (!call.add(arguments[i])) return false;
  if (arguments[3] != Py_None) {
    if (!call.add(arguments[3], false)) return false;  // autocast leaves its type to PyTorch
    flags |= kHasMask;
  }
  if (!PyFloat_CheckExact(arguments[4])) return false;
  if (PyFloat_AS_DOUBLE(arguments[4]) != 0) flags |= kHasDropout;
  if (arguments[5] == Py_True) flags |= kIsCausal;
  else if (arguments[5] != Py_False) return false;
  if (arguments[6] != Py_None) {
    if (!PyFloat_CheckExact(arguments[6])) return false;
    scale = PyFloat_AS_DOUBLE(arguments[6]);
    flags |= kHasScale;
  }
  if (arguments[7] == Py_True) flags |= kIsGrouped;
  else if (arguments[7] != Py_False) return false;
  call.finish(operation, flags, scale);
  return true;
}

// (input, weight, bias, activation)
bool read_linear(Call& call, PyObject* const* arguments) {
  constexpr char const* kActivations[] = {"relu", "gelu", "gelu_tanh", "silu"};  // problem.ACTIVATIONS
  uint64_t flags = arguments[2] != Py_None ? kHasBias : 0;
  if (arguments[3] != Py_None) {
    if (!PyUnicode_CheckExact(arguments[3])) return false;
    uint64_t activation = 0;
    for (uint64_t i = 0; i < 4; ++i)
      if (!PyUnicode_CompareWithASCIIString(arguments[3], kActivations[i])) activation = i + 1;
    if (!activation) return false;
    flags |= activation * kActivation;
  }
  for (int i = 0; i < (flags & kHasBias ? 3 : 2); ++i)
    if (!call.add(arguments[i])) return false;
  call.finish(kLinear, flags, 1);
  return true;
}

// (input, other)
bool read_matmul(Call& call, PyObject* const* arguments) {
  for (int i = 0; i < 2; ++i)
    if (!call.add(arguments[i])) return false;
  call.finish(kMatmul, 0, 1);
  return true;
}

// Arguments that an operation is read from.
Py_ssize_t wanted(Operation operation) {
  return operation == kLinear ? 4 : operation == kMatmul ? 2 : 8;
}

bool read(Operation operation, Call& call, PyObject* const* arguments) {
  if (operation == kLinear) return read_linear(call, arguments);
  if (operation == kMatmul) return read_matmul(call, arguments);
  return read_attention(operation, call, arguments);
}

// A thread that has called nothing of CUDA yet has no current context; an output from the
// allocator's cache needs none, but a kernel's launch function encodes TMA descriptors in it.
void bind_thread(int32_t device) {
  static thread_local bool is_bound = false;
  if (!is_bound) is_bound = state.bind(device) == 0;  // if not: the launch says why
}

// Undefined when a launch was refused.
at::Tensor enqueue(Plan const& plan, Call const& call) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor const& first = *call.tensors[0];
  c10::DeviceGuard guard(first.device());
  bind_thread(first.device().index());
  at::Tensor out = at::empty_strided(plan.sizes, plan.strides, first.options());
  at::Tensor workspace;
  if (plan.workspace_bytes)
    workspace = at::empty({plan.workspace_bytes}, first.options().dtype(at::kByte));
  char* addresses[kMaxAddresses] = {};
  int count = 0;
  for (int i = 0; i < call.count; ++i)
    addresses[count++] = static_cast<char*>(const_cast<void*>(call.tensors[i]->const_data_ptr()));
  addresses[count++] = static_cast<char*>(out.mutable_data_ptr());
  char* const base = plan.workspace_bytes ? static_cast<char*>(workspace.mutable_data_ptr()) : nullptr;
  addresses[count++] = base;  // then nothing: no log-sum-exp is wanted
  void* stream = nullptr;
  if (state.current_stream(first.device().index(), &stream)) return {};
  for (Step const& step : plan.steps) {
    void* tensors[kMaxTensors];
    for (size_t i = 0; i < step.tensors.size(); ++i) {
      auto const [which, offset] = step.tensors[i];
      tensors[i] = addresses[which] ? addresses[which] + offset : nullptr;
    }
    if (step.launch(tensors, step.integers.data(), step.scalars.data(),
                    base ? base + step.workspace_at : nullptr, stream))
      return {};
  }
  return out;
}

// A dual tensor of forward-mode differentiation shows neither in its keys nor in requires_grad. To
// ask whether any level is open takes one mutex a call, to ask each tensor for its tangent one each;
// tensors that autograd knows nothing of have none.
bool may_have_tangent(Call const& call) {
  for (int i = 0; i < call.count; ++i)
    if (call.tensors[i]->unsafeGetTensorImpl()->autograd_meta())
      return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  return false;
}

bool is_refused(Call const& call, double time) {
  auto const found = state.refusals.find(call.kind);
  if (found == state.refusals.end() || time >= found->second.until) return false;
  ++state.refused[found->second.reason];
  return true;
}

PyObject* answer(Call const& call) {
  double const time = now();
  if (time >= state.refusals_until || may_have_tangent(call)) Py_RETURN_NONE;
  auto const found = state.plans.find(call.kind);
  if (found == state.plans.end() || time >= state.plans_until) {
    if (is_refused(call, time)) Py_RETURN_FALSE;
    Py_RETURN_NONE;
  }
  auto const plan = found->second;  // held: another thread may clear the table meanwhile
  at::Tensor out;
  Py_BEGIN_ALLOW_THREADS;
  try {
    out = enqueue(*plan, call);
  } catch (...) {  // out of memory, a lost context: Python meets it too, and says which
    out.reset();
  }
  Py_END_ALLOW_THREADS;
  if (!out.defined()) Py_RETURN_NONE;
  ++state.hits[plan->source];
  return THPVariable_Wrap(std::move(out));
}

PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Call call;
  if (count != wanted(kAttention) || !read(kAttention, call, arguments)) Py_RETURN_NONE;
  return answer(call);
}

PyObject* linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Call call;
  if (count != wanted(kLinear) || !read(kLinear, call, arguments)) Py_RETURN_NONE;
  return answer(call);
}

PyObject* matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  // two tensors, then the output
  Call call;
  if (count != 3 || arguments[2] != Py_None || !read(kMatmul, call, arguments)) Py_RETURN_NONE;
  return answer(call);
}

PyObject* refuses(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  // an operation of PyTorch's, then its arguments
  Call call;
  if (count != 1 + wanted(kFlash) || !PyLong_CheckExact(arguments[0])) Py_RETURN_FALSE;
  auto const operation = static_cast<Operation>(PyLong_AsLong(arguments[0]));
  if (!read_attention(operation, call, arguments + 1) || may_have_tangent(call)) Py_RETURN_FALSE;
  double const time = now();
  return PyBool_FromLong(time < state.refusals_until && is_refused(call, time));
}

template <class Value, class Read>
bool read_all(PyObject* sequence, std::vector<Value>& values, Read read) {
  PyObject* const items = PySequence_Fast(sequence, "a sequence is wanted");
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items) && !PyErr_Occurred(); ++i)
    values.push_back(read(PySequence_Fast_GET_ITEM(items, i)));
  Py_DECREF(items);
  return !PyErr_Occurred();
}

bool read_integers(PyObject* sequence, std::vector<int64_t>& values) {
  return read_all(sequence, values, PyLong_AsLongLong);
}

Step read_step(PyObject* item) {
  Step step{};
  PyObject *address, *tensors, *integers, *scalars;
  long long workspace_at;
  if (!PyArg_ParseTuple(item, "OOOOL", &address, &tensors, &integers, &scalars, &workspace_at))
    return step;
  step.launch = reinterpret_cast<Launch>(PyLong_AsVoidPtr(address));
  step.workspace_at = workspace_at;
  auto const pair = [](PyObject* one) {
    int which = 0;
    long long offset = 0;
    if (PyArg_ParseTuple(one, "iL", &which, &offset) && (which < 0 || which >= kMaxAddresses))
      PyErr_SetString(PyExc_ValueError, "a step names an address that no call has");
    return std::pair<int, int64_t>(which, offset);
  };
  if (read_all(tensors, step.tensors, pair) && step.tensors.size() > kMaxTensors)
    PyErr_SetString(PyExc_ValueError, "a step has too many tensors");
  if (!PyErr_Occurred() && read_integers(integers, step.integers))
    read_all(scalars, step.scalars, PyFloat_AsDouble);
  return step;
}

// Of an operation and a tuple of its arguments; false with an error where they are too few.
bool read_call(Call& call, int operation, PyObject* arguments, bool& is_known) {
  auto const which = static_cast<Operation>(operation);
  if (which > kCudnnWithLse || PyTuple_GET_SIZE(arguments) != wanted(which)) {
    PyErr_SetString(PyExc_ValueError, "wrong number of arguments for the operation");
    return false;
  }
  is_known = read(which, call, PySequence_Fast_ITEMS(arguments));
  return true;
}

PyObject* put(PyObject*, PyObject* arguments) {
  // (operation, its arguments, (sizes, strides, workspace_bytes, source, steps))
  PyObject *inputs, *sizes, *strides, *steps;
  int operation, source;
  long long workspace_bytes;
  if (!PyArg_ParseTuple(arguments, "iO!(OOLiO)", &operation, &PyTuple_Type, &inputs, &sizes,
                        &strides, &workspace_bytes, &source, &steps))
    return nullptr;
  Call call;
  bool is_known = false;
  if (!read_call(call, operation, inputs, is_known)) return nullptr;
  bool const is_plain = operation != kAttention || !(call.kind.words[0] >> 8 & kHasMask + kHasDropout);
  if (!is_known || operation > kMatmul || !is_plain) Py_RETURN_FALSE;
  auto plan = std::make_shared<Plan>();
  plan->workspace_bytes = workspace_bytes;
  plan->source = std::clamp<int>(source, kExact, kPortfolio);
  if (!read_integers(sizes, plan->sizes) || !read_integers(strides, plan->strides) ||
      !read_all(steps, plan->steps, read_step))
    return nullptr;
  // It serves such calls once they want no gradient and start where a kernel can read.
  call.kind.words[0] &= ~(static_cast<uint64_t>(kWantsGradient | kIsMisaligned) << 8);
  state.plans[call.kind] = std::move(plan);
  Py_RETURN_TRUE;
}

PyObject* refuse(PyObject*, PyObject* arguments) {
  // (operation, its arguments, position of the reason, until, generation)
  PyObject* inputs;
  int operation;
  Py_ssize_t reason;
  double until;
  long long generation;
  if (!PyArg_ParseTuple(arguments, "iO!ndL", &operation, &PyTuple_Type, &inputs, &reason, &until,
                        &generation))
    return nullptr;
  Call call;
  bool is_known = false;
  if (!read_call(call, operation, inputs, is_known)) return nullptr;
  // What was found out before the tables were cleared is worth nothing.
  if (!is_known || generation != state.generation || reason < 0) Py_RETURN_FALSE;
  if (state.refusals.size() >= kMaxRefusals) state.refusals.clear();
  if (state.refused.size() <= static_cast<size_t>(reason)) state.refused.resize(reason + 1);
  state.refusals[call.kind] = {static_cast<size_t>(reason), until};
  Py_RETURN_TRUE;
}

PyObject* clear(PyObject*, PyObject*) {
  state.plans.clear();
  state.refusals.clear();
  ++state.generation;
  Py_RETURN_NONE;
}

PyObject* generation(PyObject*, PyObject*) { return PyLong_FromLongLong(state.generation); }

PyObject* serve_until(PyObject*, PyObject* arguments) {
  // (plans, refusals)
  if (!PyArg_ParseTuple(arguments, "dd", &state.plans_until, &state.refusals_until)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* take_counts(PyObject*, PyObject* reset) {
  // hits, those of them by a neighbour's kernels and by a portfolio's, refused calls by reason
  PyObject* const refused = PyTuple_New(state.refused.size());
  if (!refused) return nullptr;
  for (size_t i = 0; i < state.refused.size(); ++i) {
    PyObject* const count = PyLong_FromLongLong(state.refused[i]);
    if (!count) {
      Py_DECREF(refused);
      return nullptr;
    }
    PyTuple_SET_ITEM(refused, i, count);
  }
  auto const& hits = state.hits;
  PyObject* const counts = Py_BuildValue("LLLN", hits[kExact] + hits[kNearest] + hits[kPortfolio],
                                         hits[kNearest], hits[kPortfolio], refused);
  if (counts && PyObject_IsTrue(reset)) {
    std::fill_n(state.hits, int{kSources}, 0);
    state.refused.assign(state.refused.size(), 0);
  }
  return counts;
}

PyObject* start(PyObject*, PyObject* arguments) {
  // (device type, addresses of the functions that give the current stream and bind a thread)
  char const* device;
  PyObject *stream, *bind;
  if (!PyArg_ParseTuple(arguments, "sOO", &device, &stream, &bind)) return nullptr;
  bool const is_cuda = !std::strcmp(device, "cuda");
  state.device = is_cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  state.current_stream = reinterpret_cast<CurrentStream>(PyLong_AsVoidPtr(stream));
  state.bind = reinterpret_cast<Bind>(PyLong_AsVoidPtr(bind));
  if (PyErr_Occurred()) return nullptr;
  auto const bits = [](DispatchKey key) { return DispatchKeySet(key).raw_repr(); };
  state.plain = bits(DispatchKey::ADInplaceOrView) | bits(DispatchKey::BackendSelect) |
                (is_cuda ? bits(DispatchKey::CUDA) | bits(DispatchKey::AutogradCUDA)
                         : bits(DispatchKey::CPU) | bits(DispatchKey::AutogradCPU));
  state.autocast = bits(is_cuda ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU);
  Py_RETURN_NONE;
}

template <class Function>
PyCFunction as_c(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, nullptr},
    {"attention", as_c(attention), METH_FASTCALL, nullptr},
    {"linear", as_c(linear), METH_FASTCALL, nullptr},
    {"matmul", as_c(matmul), METH_FASTCALL, nullptr},
    {"refuses", as_c(refuses), METH_FASTCALL, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"refuse", refuse, METH_VARARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"generation", generation, METH_NOARGS, nullptr},
    {"serve_until", serve_until, METH_VARARGS, nullptr},
    {"take_counts", take_counts, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tuner_dispatcher", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tuner_dispatcher() { return PyModule_Create(&module); }
