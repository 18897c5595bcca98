"""The part of cuBLASLt's C interface that products need: list algorithms, rebuild one, launch it.

The library is the one that torch has loaded, through ctypes: no further package, and the version
that PyTorch's own products run with. Numbers are those of ``cublasLt.h`` of CUDA 12.9 to 13.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.hardware import TMA_ALIGNMENT_BYTES
from tuner.problem import E4M3, GemmProblem

#: cudaDataType_t of each type.
DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14, E4M3: 28}
COMPUTE_32F = 68
TRANSPOSED = 1
#: cublasLtEpilogue_t by `GemmProblem.epilogue`; its GELU is the one by tanh. A residual is C, which
#: the product is added to.
EPILOGUES = {
    "": 1,
    "residual": 1,
    "bias": 4,
    "bias_residual": 4,
    "relu": 2,
    "bias_relu": 6,
    "gelu_tanh": 32,
    "bias_gelu_tanh": 36,
}
#: cublasLtMatmulDescAttributes_t.
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE = 17, 18, 25, 26
A_SCALE_MODE, B_SCALE_MODE = 31, 32
OUTER_VECTOR = 3
"""cublasLtMatmulMatrixScale_t: an fp32 factor of each row of A, of each column of B."""
BATCH_COUNT, BATCH_STRIDE = 5, 6
"""cublasLtMatrixLayoutAttribute_t."""
MAX_WORKSPACE, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t."""
#: cublasLtMatmulAlgoConfigAttributes_t: parameter -> number and type. `algorithm` is the id.
ATTRIBUTES: Mapping[str, tuple[int, Any]] = {
    "algorithm": (0, ctypes.c_int32),
    "tile": (1, ctypes.c_uint32),
    "split_k": (2, ctypes.c_int32),
    "reduction": (3, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32),
    "custom": (5, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "inner_shape": (7, ctypes.c_uint16),
    "cluster_shape": (8, ctypes.c_uint16),
}
#: cublasStatus_t.
STATUSES = {
    1: "not initialized",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}
_UNBOUND = 256
"""Stands for the addresses of a bias and of factors until a call has them."""


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_P, _I, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "Create": (_P,),
    "MatmulDescCreate": (_P, _I, _I),
    "MatmulDescSetAttribute": (_P, _I, _P, _SIZE),
    "MatmulDescDestroy": (_P,),
    "MatrixLayoutCreate": (_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatrixLayoutSetAttribute": (_P, _I, _P, _SIZE),
    "MatrixLayoutDestroy": (_P,),
    "MatmulPreferenceCreate": (_P,),
    "MatmulPreferenceSetAttribute": (_P, _I, _P, _SIZE),
    "MatmulPreferenceDestroy": (_P,),
    "MatmulAlgoGetHeuristic": (*[_P] * 7, _I, _P, _P),
    "MatmulAlgoInit": (_P, *[_I] * 7, _P),
    "MatmulAlgoCheck": (_P,) * 8,
    "MatmulAlgoConfigGetAttribute": (_P, _I, _P, _SIZE, _P),
    "MatmulAlgoConfigSetAttribute": (_P, _I, _P, _SIZE),
    "Matmul": (*[_P] * 14, _SIZE, _P),
}


class Library:
    """The functions, with errors for statuses.

    Args:
        functions: the loaded library, or a fake in tests.
    """

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """As ``130100`` of 13.1.0."""
        return int(self._functions.cublasLtGetVersion())

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``cublasLt`` + `name`.

        Raises:
            RuntimeError: when it does not succeed.
        """
        status = getattr(self._functions, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: {STATUSES.get(status, f'status {status}')}")

    def made(self, owner: object, name: str, *arguments: Any) -> ctypes.c_void_p:
        """A new descriptor, destroyed when its owner is."""
        handle = ctypes.c_void_p()
        self.call(f"{name}Create", ctypes.byref(handle), *arguments)
        weakref.finalize(owner, self.call, f"{name}Destroy", handle).atexit = False
        return handle

    def put(self, name: str, where: Any, attribute: int, value: Any) -> None:
        """Set an attribute to a ctypes number."""
        self.call(
            f"{name}SetAttribute", where, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )

    def handle(self, device: int) -> ctypes.c_void_p:
        """The handle of a device, which is the current one; kept for the process."""
        with self._lock:
            if device not in self._handles:
                fresh = ctypes.c_void_p()
                self.call("Create", ctypes.byref(fresh))
                self._handles[device] = fresh
            return self._handles[device]


@cache
def library() -> Library:
    """The library that torch has loaded.

    Raises:
        OSError: when it has loaded none.
    """
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    loaded = ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    loaded.cublasLtGetVersion.restype = ctypes.c_size_t
    for name, signature in _SIGNATURES.items():
        getattr(loaded, f"cublasLt{name}").argtypes = signature
    return Library(loaded)


class LtDescriptors:
    """Descriptors of a problem, for all of its algorithms and calls.

    cuBLASLt's matrices lie by columns. A row-major D is its transpose by columns, so the product is
    D^T = B^T A^T. The library's A is our B, and its rows are our columns.

    Args:
        library: loaded library.
        problem: problem to compute.
        device: current CUDA device.
    """

    def __init__(self, library: Library, problem: GemmProblem, device: int) -> None:
        self._library, self._problem = library, problem
        self._handle = library.handle(device)
        self._description = library.made(self, "MatmulDesc", COMPUTE_32F, DATA_TYPES["float32"])
        self._bound: dict[int, int] = {}
        self._lock = threading.Lock()
        n, m, k = problem.n, problem.m, problem.k
        is_a_transposed = problem.layout_b == "col"
        is_b_transposed = problem.layout_a == "col"
        self._a = self._layout(problem.dtype, *((k, n) if is_a_transposed else (n, k)))
        self._b = self._layout(problem.dtype, *((m, k) if is_b_transposed else (k, m)))
        self._d = self._layout(problem.dtype_d, n, m)
        for attribute, is_on in ((TRANSA, is_a_transposed), (TRANSB, is_b_transposed)):
            self._describe(attribute, ctypes.c_int32(TRANSPOSED * is_on))
        self._describe(EPILOGUE, ctypes.c_uint32(EPILOGUES[problem.epilogue]))
        if problem.has_bias:
            self._describe(BIAS_DATA_TYPE, ctypes.c_int32(DATA_TYPES[problem.dtype]))
            self.bind(BIAS_POINTER, _UNBOUND)
        if problem.scales:
            self._describe(FAST_ACCUM, ctypes.c_int8(problem.fast_accum))
            for attribute in (A_SCALE_POINTER, B_SCALE_POINTER):
                self.bind(attribute, _UNBOUND)
        if problem.scales == "row":
            for attribute in (A_SCALE_MODE, B_SCALE_MODE):
                self._describe(attribute, ctypes.c_int32(OUTER_VECTOR))

    def _layout(self, dtype: str, rows: int, columns: int) -> ctypes.c_void_p:
        kind = DATA_TYPES[dtype]
        layout = self._library.made(self, "MatrixLayout", kind, rows, columns, rows)
        if (batch := self._problem.batch) > 1:
            put = self._library.put
            put("MatrixLayout", layout, BATCH_COUNT, ctypes.c_int32(batch))
            put("MatrixLayout", layout, BATCH_STRIDE, ctypes.c_int64(rows * columns))
        return layout

    def _describe(self, attribute: int, value: Any) -> None:
        self._library.put("MatmulDesc", self._description, attribute, value)

    def bind(self, attribute: int, address: int) -> None:
        """Give an operand of the epilogue its address, unless it has it."""
        if self._bound.get(attribute) != address:
            self._describe(attribute, ctypes.c_void_p(address))
            self._bound[attribute] = address

    @property
    def _matrices(self) -> tuple[ctypes.c_void_p, ...]:
        return self._a, self._b, self._d, self._d

    def heuristics(self, count: int, max_workspace: int) -> list[Heuristic]:
        """The library's recommendations for operands at any address that TMA can read, best first.

        Raises:
            RuntimeError: when it has nothing.
        """
        owner = Algorithm()  # lives as long as this call
        preference = self._library.made(owner, "MatmulPreference")
        put = self._library.put
        put("MatmulPreference", preference, MAX_WORKSPACE, ctypes.c_uint64(max_workspace))
        for attribute in MIN_ALIGNMENTS:
            put("MatmulPreference", preference, attribute, ctypes.c_uint32(TMA_ALIGNMENT_BYTES))
        results, returned = (Heuristic * count)(), ctypes.c_int()
        self._library.call(
            "MatmulAlgoGetHeuristic",
            *(self._handle, self._description, *self._matrices, preference),
            *(count, results, ctypes.byref(returned)),
        )
        return [r for r in results[: returned.value] if not r.state]

    def attributes(self, algorithm: Algorithm) -> dict[str, int]:
        """The numbers that rebuild an algorithm, by `ATTRIBUTES`."""
        numbers = {}
        for name, (number, kind) in ATTRIBUTES.items():
            value, written = kind(), ctypes.c_size_t()
            self._library.call(
                "MatmulAlgoConfigGetAttribute",
                *(ctypes.byref(algorithm), number),
                *(ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)),
            )
            numbers[name] = int(value.value)
        return numbers

    def rebuilt(self, attributes: Mapping[str, int]) -> Heuristic:
        """The algorithm of `attributes` with the workspace that it needs here.

        Raises:
            RuntimeError: when the library refuses it for this problem.
        """
        problem, algo, checked = self._problem, Algorithm(), Heuristic()
        kinds = (problem.dtype, problem.dtype, problem.dtype_d, problem.dtype_d)
        self._library.call(
            "MatmulAlgoInit",
            *(self._handle, COMPUTE_32F, DATA_TYPES["float32"], *map(DATA_TYPES.get, kinds)),
            *(attributes["algorithm"], ctypes.byref(algo)),
        )
        for name, (number, kind) in ATTRIBUTES.items():
            if name != "algorithm":
                self._library.put(
                    "MatmulAlgoConfig", ctypes.byref(algo), number, kind(attributes[name])
                )
        self._library.call(
            "MatmulAlgoCheck",
            *(self._handle, self._description, *self._matrices),
            *(ctypes.byref(algo), ctypes.byref(checked)),
        )
        checked.algorithm = algo
        return checked

    def launch(
        self,
        algorithm: Heuristic,
        addresses: Mapping[str, int],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue the product.

        Args:
            algorithm: algorithm from `heuristics` or `rebuilt`.
            addresses: device addresses of the problem's operands, by name.
            workspace: address of as many bytes as `algorithm` needs.
            stream: CUDA stream.

        Raises:
            RuntimeError: when the library refuses it.
        """
        out = addresses["d"]
        residual = addresses.get("residual")
        with self._lock:  # the addresses of one call are another's until it is enqueued
            for name, attribute in (
                ("bias", BIAS_POINTER),
                ("scale_b", A_SCALE_POINTER),
                ("scale_a", B_SCALE_POINTER),
            ):
                if name in addresses:
                    self.bind(attribute, addresses[name])
            self._library.call(
                "Matmul",
                *(self._handle, self._description, ctypes.byref(_ONE)),
                *(addresses["b"], self._a, addresses["a"], self._b),
                ctypes.byref(_ZERO if residual is None else _ONE),
                *(out if residual is None else residual, self._d, out, self._d),
                *(ctypes.byref(algorithm.algorithm), workspace, algorithm.workspace_bytes, stream),
            )


_ZERO, _ONE = ctypes.c_float(0.0), ctypes.c_float(1.0)
