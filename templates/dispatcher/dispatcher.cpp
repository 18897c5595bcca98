// The runtime's hot path: from a call to the kernel's launch without a Python frame between.
//
// An extension module of CPython, compiled against the torch and the Python at hand. It holds a
// table (table.h), filled by tuner/runtime/call/dispatch.py: from a kind of call (sizes, strides, types,
// device, mask, scale, ...) to the launches that serve it, or to the reason why none does. Two ways
// lead to it: the functions below, which `tuner.attention`, `linear` and `matmul` call, and the
// operators of torch that `tuner.enable` overrides (operators.h).
//
// Of the functions: a call that was refused before is counted by its reason, and returns what
// PyTorch's function returns, or False where that is to be called from Python. One that is not in
// the table, or may not be answered, returns None, and Python decides. They never raise: whatever
// goes wrong here goes wrong again, and is judged, there.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/python_variable.h>

#include "launch.h"
#include "operators.h"
#include "table.h"

namespace {

using namespace tuner;

bool add(Call& call, PyObject* object) {
  return THPVariable_CheckExact(object) && call.add(THPVariable_Unpack(object));
}

bool read_flag(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

// What a function returns; an undefined tensor in an exception's place.
template <class Function>
at::Tensor without_gil(Function function) {
  at::Tensor out;
  Py_BEGIN_ALLOW_THREADS;
  try {
    out = function();
  } catch (...) {
    out.reset();
  }
  Py_END_ALLOW_THREADS;
  return out;
}

// (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
bool read_attention(Operation operation, Call& call, PyObject* const* arguments) {
  for (int i = 0; i < 4; ++i)
    if (!THPVariable_CheckExact(arguments[i]) && (i < 3 || arguments[i] != Py_None)) return false;
  if (!PyFloat_CheckExact(arguments[4])) return false;
  if (arguments[6] != Py_None && !PyFloat_CheckExact(arguments[6])) return false;
  bool is_causal, enable_gqa;
  if (!read_flag(arguments[5], is_causal) || !read_flag(arguments[7], enable_gqa)) return false;
  at::Tensor const* const mask =
      arguments[3] != Py_None ? &THPVariable_Unpack(arguments[3]) : nullptr;
  double const scale = arguments[6] != Py_None ? PyFloat_AS_DOUBLE(arguments[6]) : 0;
  return read_attention(operation, call, THPVariable_Unpack(arguments[0]),
                        THPVariable_Unpack(arguments[1]), THPVariable_Unpack(arguments[2]), mask,
                        PyFloat_AS_DOUBLE(arguments[4]), is_causal,
                        arguments[6] != Py_None ? &scale : nullptr, enable_gqa,
                        operation != kAttention);
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
    if (!add(call, arguments[i])) return false;
  call.finish(kLinear, flags, 1);
  return true;
}

// (input, other)
bool read_matmul(Call& call, PyObject* const* arguments) {
  for (int i = 0; i < 2; ++i)
    if (!add(call, arguments[i])) return false;
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

// True for weights whose rows are a vocabulary of a size that is not a multiple of 8: Python
// multiplies them in two parts (tuner/runtime/products/matmul.py).
bool is_unaligned(at::Tensor const& weight) {
  constexpr int64_t kAligned = 8, kLong = 16384;
  return weight.dim() == 2 && weight.size(0) >= kLong && weight.size(0) % kAligned != 0;
}

// PyTorch's answer to a call that was read; undefined where Python is to ask for it: it raises as
// PyTorch does, and sees modes of __torch_function__.
at::Tensor pytorchs(Operation operation, Call const& call, PyObject* const* arguments) {
  if (at::impl::torch_function_mode_enabled()) return {};
  Native native;
  // Torch takes the GIL where the number of a tensor's owners becomes 1 or leaves it, for the
  // Python object's sake. These owners live as long as the call, so that it does so never.
  at::Tensor tensors[kMaxInputs];
  for (int i = 0; i < call.count; ++i) tensors[i] = *call.tensors[i];
  auto const optional = [&](int i) { return i < call.count ? Optional(tensors[i]) : Optional(); };
  if (operation == kLinear) {
    if (arguments[3] != Py_None || is_unaligned(tensors[1])) return {};  // None: no activation
    Optional const bias = optional(2);
    return without_gil([&] { return at::linear(tensors[0], tensors[1], bias); });
  }
  if (operation == kMatmul) return without_gil([&] { return at::matmul(tensors[0], tensors[1]); });
  Optional const mask = optional(3);
  double const dropout_p = PyFloat_AS_DOUBLE(arguments[4]);
  bool const is_causal = arguments[5] == Py_True, enable_gqa = arguments[7] == Py_True;
  std::optional<double> scale;
  if (arguments[6] != Py_None) scale = PyFloat_AS_DOUBLE(arguments[6]);
  Arguments const given{tensors[0], tensors[1], tensors[2], mask,
                        dropout_p,  is_causal,  scale,      enable_gqa};
  return without_gil([&] {
    return handed_over(given, true, [&](Optional const& safe) {
      return at::scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], safe, dropout_p,
                                              is_causal, scale, enable_gqa);
    });
  });
}

template <Operation operation>
PyObject* serve(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Call call;
  // Behind the two tensors of a matrix product comes the output that it is to be written to.
  bool const is_known = operation == kMatmul ? count == 3 && arguments[2] == Py_None
                                             : count == wanted(operation);
  if (!is_known || !read(operation, call, arguments) || call.may_have_tangent()) Py_RETURN_NONE;
  Found const found = table().find(call);
  at::Tensor out;
  if (found.is_refused) {
    out = pytorchs(operation, call, arguments);
    if (!out.defined()) Py_RETURN_FALSE;
  } else {
    if (!found.plan) Py_RETURN_NONE;
    out = without_gil([&] { return run(*found.plan, call).out; });
    if (!out.defined()) Py_RETURN_NONE;
  }
  return THPVariable_Wrap(std::move(out));
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

// (base, slope)
Line read_line(PyObject* item) {
  long long base = 0, slope = 0;
  PyArg_ParseTuple(item, "LL", &base, &slope);
  return {base, slope};
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
    PyObject* offset = nullptr;
    if (!PyArg_ParseTuple(one, "iO", &which, &offset)) return std::pair<int, Line>{};
    if (which < 0 || which >= kMaxAddresses)
      PyErr_SetString(PyExc_ValueError, "a step names an address that no call has");
    return std::pair<int, Line>(which, read_line(offset));
  };
  if (!read_all(tensors, step.tensors, pair) || !read_all(integers, step.integers, read_line) ||
      !read_all(scalars, step.scalars, PyFloat_AsDouble))
    return step;
  if (step.tensors.size() > kMaxTensors || step.integers.size() > kMaxIntegers)
    PyErr_SetString(PyExc_ValueError, "a step has too many tensors or integers");
  return step;
}

// Of an operation and a tuple of its arguments; false with an error where they are too few.
bool read_call(Call& call, int operation, PyObject* arguments, bool& is_known) {
  auto const which = static_cast<Operation>(operation);
  if (operation < 0 || which >= kOperations || PyTuple_GET_SIZE(arguments) != wanted(which)) {
    PyErr_SetString(PyExc_ValueError, "wrong number of arguments for the operation");
    return false;
  }
  is_known = read(which, call, PySequence_Fast_ITEMS(arguments));
  return true;
}

// The call's own length, or the range that was given, where the call has a length within it.
std::pair<int64_t, int64_t> lengths(Call const& call, long long first, long long last) {
  if (first <= call.length && call.length <= last && call.length) return {first, last};
  return {call.length, call.length};
}

PyObject* put(PyObject*, PyObject* arguments) {
  // (operation, its arguments, (sizes, strides, workspace_bytes, source, steps), first length,
  // last length, generation)
  PyObject *inputs, *sizes, *strides, *steps;
  int operation, source;
  long long workspace_bytes, first, last, generation;
  if (!PyArg_ParseTuple(arguments, "iO!(OOLiO)LLL", &operation, &PyTuple_Type, &inputs, &sizes,
                        &strides, &workspace_bytes, &source, &steps, &first, &last, &generation))
    return nullptr;
  Call call;
  bool is_known = false;
  if (!read_call(call, operation, inputs, is_known)) return nullptr;
  bool const is_product = operation == kLinear || operation == kMatmul;
  bool const is_plain = is_product || !(call.kind.words[0] >> 8 & kHasDropout);
  if (!is_known || !is_plain) Py_RETURN_FALSE;
  auto plan = std::make_shared<Plan>();
  plan->workspace_bytes = workspace_bytes;
  plan->source = std::clamp<int>(source, kExact, kPortfolio);
  if (!read_integers(sizes, plan->sizes) || !read_integers(strides, plan->strides) ||
      !read_all(steps, plan->steps, read_step))
    return nullptr;
  // It serves such calls once they want no gradient and start where a kernel can read.
  call.kind.words[0] &= ~(static_cast<uint64_t>(kWantsGradient | kIsMisaligned) << 8);
  auto const [begin, end] = lengths(call, first, last);
  return PyBool_FromLong(table().put(call.kind, end, {begin, std::move(plan), 0, 0}, generation));
}

PyObject* refuse(PyObject*, PyObject* arguments) {
  // (operation, its arguments, position of the reason, until, first length, last length, generation)
  PyObject* inputs;
  int operation;
  Py_ssize_t reason;
  double until;
  long long first, last, generation;
  if (!PyArg_ParseTuple(arguments, "iO!ndLLL", &operation, &PyTuple_Type, &inputs, &reason, &until,
                        &first, &last, &generation))
    return nullptr;
  Call call;
  bool is_known = false;
  if (!read_call(call, operation, inputs, is_known)) return nullptr;
  if (!is_known || reason < 0 || reason >= static_cast<Py_ssize_t>(kMaxReasons)) Py_RETURN_FALSE;
  bool const is_product = operation == kLinear || operation == kMatmul;
  if (!is_product && call.is_misaligned()) Py_RETURN_FALSE;  // Python copies the tensors
  auto const [begin, end] = lengths(call, first, last);
  Entry entry{begin, nullptr, static_cast<size_t>(reason), until};
  return PyBool_FromLong(table().put(call.kind, end, std::move(entry), generation));
}

PyObject* clear(PyObject*, PyObject*) {
  table().clear();
  Py_RETURN_NONE;
}

PyObject* generation(PyObject*, PyObject*) { return PyLong_FromLongLong(table().generation()); }

PyObject* serve_until(PyObject*, PyObject* arguments) {
  // (plans, refusals)
  double plans, refusals;
  if (!PyArg_ParseTuple(arguments, "dd", &plans, &refusals)) return nullptr;
  table().plans_until = plans;
  table().refusals_until = refusals;
  Py_RETURN_NONE;
}

PyObject* take_counts(PyObject*, PyObject* reset) {
  // (hits by source, refused calls by reason)
  int const is_reset = PyObject_IsTrue(reset);
  if (is_reset < 0) return nullptr;
  auto const take = [&](std::atomic<long long>& count) {
    return PyLong_FromLongLong(is_reset ? count.exchange(0) : count.load());
  };
  auto& refused = table().refused;
  PyObject* const counts = PyTuple_New(refused.size());
  if (!counts) return nullptr;
  for (size_t i = 0; i < refused.size(); ++i) {
    PyObject* const count = take(refused[i]);
    if (!count) {
      Py_DECREF(counts);
      return nullptr;
    }
    PyTuple_SET_ITEM(counts, i, count);
  }
  auto& hits = table().hits;
  return Py_BuildValue("NNN", take(hits[kExact]), take(hits[kPortfolio]), counts);
}

PyObject* exchange_native(PyObject*, PyObject* value) {
  // Sets whether this thread's attention stays PyTorch's; returns what it was.
  int const is_now = PyObject_IsTrue(value);
  if (is_now < 0) return nullptr;
  return PyBool_FromLong(std::exchange(is_native, is_now != 0));
}

PyObject* install_overrides(PyObject*, PyObject* function) {
  // Overrides torch's operators; the function is asked about calls that are not in the table.
  Py_INCREF(function);
  Py_XDECREF(ask.exchange(function));
  try {
    return PyBool_FromLong(install());
  } catch (std::exception const& error) {
    uninstall();
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* remove_overrides(PyObject*, PyObject*) {
  uninstall();
  Py_RETURN_NONE;
}

PyObject* start(PyObject*, PyObject* arguments) {
  // (device type, addresses of the functions that give the current stream and bind a thread)
  char const* type;
  PyObject *stream, *binder;
  if (!PyArg_ParseTuple(arguments, "sOO", &type, &stream, &binder)) return nullptr;
  bool const is_cuda = !std::strcmp(type, "cuda");
  current_stream = reinterpret_cast<CurrentStream>(PyLong_AsVoidPtr(stream));
  bind = reinterpret_cast<Bind>(PyLong_AsVoidPtr(binder));
  if (PyErr_Occurred()) return nullptr;
  auto const bits = [](DispatchKey key) { return DispatchKeySet(key).raw_repr(); };
  device.type = is_cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  device.backend = is_cuda ? DispatchKey::CUDA : DispatchKey::CPU;
  device.plain = bits(DispatchKey::ADInplaceOrView) | bits(DispatchKey::BackendSelect) |
                 bits(device.backend) |
                 bits(is_cuda ? DispatchKey::AutogradCUDA : DispatchKey::AutogradCPU);
  device.autocast = bits(is_cuda ? DispatchKey::AutocastCUDA : DispatchKey::AutocastCPU);
  watch_forks();
  Py_RETURN_NONE;
}

template <class Function>
PyCFunction as_c(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, nullptr},
    {"attention", as_c(serve<kAttention>), METH_FASTCALL, nullptr},
    {"linear", as_c(serve<kLinear>), METH_FASTCALL, nullptr},
    {"matmul", as_c(serve<kMatmul>), METH_FASTCALL, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"refuse", refuse, METH_VARARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"generation", generation, METH_NOARGS, nullptr},
    {"serve_until", serve_until, METH_VARARGS, nullptr},
    {"take_counts", take_counts, METH_O, nullptr},
    {"exchange_native", exchange_native, METH_O, nullptr},
    {"install_overrides", install_overrides, METH_O, nullptr},
    {"remove_overrides", remove_overrides, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tuner_dispatcher", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_tuner_dispatcher() { return PyModule_Create(&definition); }
