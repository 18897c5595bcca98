// The runtime's hot path: from a Python call to the kernel's launch without a Python frame between.
//
// An extension module of CPython, compiled against the torch and the Python at hand. It holds a
// table from a kind of call (sizes, strides, type, device, mask, scale) to the launches that serve
// it, filled by tuner/runtime/dispatch.py. A call that it does not know, or may not answer, returns
// None, and Python decides. It never raises: whatever goes wrong here goes wrong again, and is
// judged, there.
//
// The table is guarded by the GIL, which is given up only while memory is allocated and kernels are
// launched.

#include <Python.h>

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

struct Plan {
  std::vector<int64_t> sizes, strides;
  int64_t workspace_bytes;
  bool is_nearest;
  std::vector<Step> steps;
};

// A kind of call as words: equal kinds have equal words.
struct Kind {
  uint64_t words[4 + 3 * (1 + 2 * kMaxDims)];
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

struct State {
  std::unordered_map<Kind, std::shared_ptr<Plan const>, Hash> table;
  double until = 0;
  long long hits = 0, nearest_hits = 0;
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

enum Operation : uint64_t { kAttention, kLinear, kMatmul };

struct Call {
  Kind kind;
  at::Tensor const* tensors[3];
  int count = 0;

  // False for anything that is no plain tensor of the device, alike with the first one. What a
  // kernel would not see (subclasses, transforms, modes, lazy views, other layouts) shows in the
  // keys that torch would dispatch on.
  bool add(PyObject* object) {
    if (!THPVariable_CheckExact(object)) return false;
    at::Tensor const& tensor = THPVariable_Unpack(object);
    if (!tensor.defined() || tensor.device().type() != state.device || tensor.dim() > kMaxDims)
      return false;
    auto const local = c10::impl::tls_local_dispatch_key_set();
    uint64_t const keys = ((tensor.key_set() | local.included_) - local.excluded_).raw_repr();
    if (keys & ~(state.plain | state.autocast)) return false;
    if (keys & state.autocast &&
        at::autocast::get_autocast_dtype(state.device) != tensor.scalar_type())
      return false;
    if (count && (tensor.scalar_type() != tensors[0]->scalar_type() ||
                  tensor.device() != tensors[0]->device()))
      return false;
    tensors[count++] = &tensor;
    kind.add(tensor.dim());
    for (auto size : tensor.sizes()) kind.add(size);
    for (auto stride : tensor.strides()) kind.add(stride);
    return true;
  }

  void head(Operation operation, uint64_t flags, double scale) {
    uint64_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    kind.add(operation | flags << 8);
    kind.add(bits);
  }

  void tail() {
    kind.add(static_cast<uint64_t>(tensors[0]->scalar_type()));
    kind.add(static_cast<uint64_t>(tensors[0]->device().index()));
  }
};

// (query, key, value, is_causal, scale, enable_gqa)
bool read_attention(Call& call, PyObject* const* arguments) {
  uint64_t flags = 0;
  double scale = 0;
  if (arguments[3] == Py_True) flags |= 1;
  else if (arguments[3] != Py_False) return false;
  if (arguments[5] == Py_True) flags |= 2;
  else if (arguments[5] != Py_False) return false;
  if (arguments[4] != Py_None) {
    if (!PyFloat_CheckExact(arguments[4])) return false;
    scale = PyFloat_AS_DOUBLE(arguments[4]);
    flags |= 4;
  }
  call.head(kAttention, flags, scale);
  for (int i = 0; i < 3; ++i)
    if (!call.add(arguments[i])) return false;
  call.tail();
  return true;
}

// (input, weight, bias, activation)
bool read_linear(Call& call, PyObject* const* arguments) {
  constexpr char const* kActivations[] = {"relu", "gelu", "gelu_tanh", "silu"};  // problem.ACTIVATIONS
  uint64_t flags = arguments[2] != Py_None;
  if (arguments[3] != Py_None) {
    if (!PyUnicode_CheckExact(arguments[3])) return false;
    uint64_t activation = 0;
    for (uint64_t i = 0; i < 4; ++i)
      if (!PyUnicode_CompareWithASCIIString(arguments[3], kActivations[i])) activation = i + 1;
    if (!activation) return false;
    flags |= activation << 1;
  }
  call.head(kLinear, flags, 1);
  for (int i = 0; i < (flags & 1 ? 3 : 2); ++i)
    if (!call.add(arguments[i])) return false;
  call.tail();
  return true;
}

// (input, other)
bool read_matmul(Call& call, PyObject* const* arguments) {
  call.head(kMatmul, 0, 1);
  for (int i = 0; i < 2; ++i)
    if (!call.add(arguments[i])) return false;
  call.tail();
  return true;
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

PyObject* answer(Call const& call) {
  if (now() >= state.until) Py_RETURN_NONE;
  auto const found = state.table.find(call.kind);
  if (found == state.table.end()) Py_RETURN_NONE;
  for (int i = 0; i < call.count; ++i) {
    if (c10::GradMode::is_enabled() && call.tensors[i]->requires_grad()) Py_RETURN_NONE;
    if (reinterpret_cast<uintptr_t>(call.tensors[i]->const_data_ptr()) % kAlignment) Py_RETURN_NONE;
  }
  if (may_have_tangent(call)) Py_RETURN_NONE;
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
  ++state.hits;
  state.nearest_hits += plan->is_nearest;
  return THPVariable_Wrap(std::move(out));
}

PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  // query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
  if (count != 8 || arguments[3] != Py_None) Py_RETURN_NONE;
  PyObject* const dropout = arguments[4];
  if (!PyFloat_CheckExact(dropout) || PyFloat_AS_DOUBLE(dropout) != 0) Py_RETURN_NONE;
  PyObject* const kept[] = {arguments[0], arguments[1], arguments[2],
                            arguments[5], arguments[6], arguments[7]};
  Call call;
  if (!read_attention(call, kept)) Py_RETURN_NONE;
  return answer(call);
}

PyObject* linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Call call;
  if (count != 4 || !read_linear(call, arguments)) Py_RETURN_NONE;
  return answer(call);
}

PyObject* matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  // two tensors, then the output
  if (count != 3 || arguments[2] != Py_None) Py_RETURN_NONE;
  Call call;
  if (!read_matmul(call, arguments)) Py_RETURN_NONE;
  return answer(call);
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

PyObject* put(PyObject*, PyObject* arguments) {
  // (operation, its arguments, (sizes, strides, workspace_bytes, is_nearest, steps))
  PyObject *inputs, *sizes, *strides, *steps;
  int operation, is_nearest;
  long long workspace_bytes;
  if (!PyArg_ParseTuple(arguments, "iO!(OOLpO)", &operation, &PyTuple_Type, &inputs, &sizes,
                        &strides, &workspace_bytes, &is_nearest, &steps))
    return nullptr;
  Py_ssize_t const wanted = operation == kAttention ? 6 : operation == kLinear ? 4 : 2;
  if (PyTuple_GET_SIZE(inputs) != wanted) {
    PyErr_SetString(PyExc_ValueError, "wrong number of arguments for the operation");
    return nullptr;
  }
  PyObject* items[6];
  for (Py_ssize_t i = 0; i < wanted; ++i) items[i] = PyTuple_GET_ITEM(inputs, i);
  Call call;
  bool const is_known = operation == kAttention ? read_attention(call, items)
                        : operation == kLinear  ? read_linear(call, items)
                                                : read_matmul(call, items);
  if (!is_known) Py_RETURN_FALSE;
  auto plan = std::make_shared<Plan>();
  plan->workspace_bytes = workspace_bytes;
  plan->is_nearest = is_nearest;
  if (!read_integers(sizes, plan->sizes) || !read_integers(strides, plan->strides) ||
      !read_all(steps, plan->steps, read_step))
    return nullptr;
  state.table[call.kind] = std::move(plan);
  Py_RETURN_TRUE;
}

PyObject* clear(PyObject*, PyObject*) {
  state.table.clear();
  Py_RETURN_NONE;
}

PyObject* serve_until(PyObject*, PyObject* time) {
  state.until = PyFloat_AsDouble(time);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* take_counts(PyObject*, PyObject* reset) {
  PyObject* const counts = Py_BuildValue("LL", state.hits, state.nearest_hits);
  if (PyObject_IsTrue(reset)) state.hits = state.nearest_hits = 0;
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
    {"put", put, METH_VARARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"serve_until", serve_until, METH_O, nullptr},
    {"take_counts", take_counts, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tuner_dispatcher", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tuner_dispatcher() { return PyModule_Create(&module); }
