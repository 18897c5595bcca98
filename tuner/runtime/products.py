"""`linear` and `matmul`: the tuned GEMM where one was measured fastest, PyTorch's elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from tuner.errors import ConfigError
from tuner.problem import ACTIVATIONS, GemmProblem, Major
from tuner.runtime import counters, dispatch, guards
from tuner.runtime.plan import Plan
from tuner.runtime.table import table

_Matrix = tuple[int, int, int, Major]
"""Batch, rows, columns and storage order."""

_PYTORCHS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda product: product,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda product: functional.gelu(product, approximate="tanh"),
    "silu": functional.silu,
}
"""PyTorch's own activations."""


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear`, and an activation, by the fastest kernel measured on this GPU.

    A bias and an activation are parts of one kernel where that was tuned: each combination is a
    problem of its own (`GemmProblem.epilogue`). Whatever has no tuned kernel that won (other types,
    gradients, cuBLAS faster, ...) is PyTorch's `linear` with these same arguments, then its own
    activation, counted by its reason (`tuner.stats`).

    Args:
        input: (..., K), fp16 or bf16, contiguous.
        weight: (N, K), contiguous.
        bias: (N), contiguous.
        activation: relu, gelu (by erf, PyTorch's default), gelu_tanh or silu.

    Returns:
        (..., N)

    Raises:
        ConfigError: when there is no such activation.
    """
    if not torch.compiler.is_compiling():
        product = dispatch.linear(input, weight, bias, activation)
        if product is not None:
            return product
        if activation not in _PYTORCHS:
            allowed = ", ".join(ACTIVATIONS)
            raise ConfigError(f"activation={activation} is not known (allowed: {allowed}, None)")
        served = _serve("linear", input, weight, bias, activation)
        if not isinstance(served, str):
            return served
        counters.count_fallback(served)
    return _PYTORCHS[activation](functional.linear(input, weight, bias))


def matmul(
    input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.matmul` by the fastest kernel measured on this GPU.

    As `linear`; served are (..., M, K) @ (K, N) and (..., M, K) @ (..., K, N) with equal batch
    dimensions, each matrix dense in rows or in columns.
    """
    if not torch.compiler.is_compiling():
        product = dispatch.matmul(input, other, out)
        if product is not None:
            return product
        served = _serve("matmul", input, other) if out is None else "out is given"
        if not isinstance(served, str):
            return served
        counters.count_fallback(served)
    return torch.matmul(input, other, out=out)


def _serve(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor | str:
    """The tuned kernel's product, or why there is none."""
    tensors = (a, b) if bias is None else (a, b, bias)
    if reason := guards.unserved(*tensors):
        return reason
    kind = (name, activation, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))
    plan = table.get(kind)
    if plan is None:
        second = b.t() if name == "linear" and b.dim() == 2 else b
        shape = (*a.shape[:-1], *second.shape[-1:])
        arguments = (a, b, bias, activation) if name == "linear" else (a, b)

        def pose() -> GemmProblem:
            return problem_of(a, second, bias, activation)

        plan = table.find_out(kind, (name, arguments), pose, 1.0, a.get_device(), shape)
    if not isinstance(plan, Plan):
        return plan
    return guards.misaligned(*tensors) or guards.deferred(*tensors) or table.run(plan, *tensors)


def problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> GemmProblem:
    """The problem of activation(a @ b + bias).

    Raises:
        ConfigError: when they pose none: types, sizes or strides that no tuned kernel has.
    """
    if min(a.dim(), b.dim()) < 2 or a.numel() == 0 or b.numel() == 0:
        raise ConfigError("they are not matrices, or are empty")
    guards.check_alike(a, b)
    if bias is not None:
        guards.check_alike(a, bias)
        if bias.shape != b.shape[-1:] or not bias.is_contiguous():
            raise ConfigError("the bias is no contiguous vector of the output's columns")
    if b.dim() == 2 and a.dim() > 2:  # one matrix of all rows
        if not a.is_contiguous():
            raise ConfigError("the rows of all batches are not contiguous")
        a = a.view(-1, a.shape[-1])
    batch, m, k, layout_a = _matrix(a, "row")
    batch_b, k_b, n, layout_b = _matrix(b, "col")
    if a.shape[:-2] != b.shape[:-2] or k != k_b:
        raise ConfigError(f"{tuple(a.shape)} @ {tuple(b.shape)} is no product, or broadcasts")
    return GemmProblem(
        m=m,
        n=n,
        k=k,
        batch=batch_b if batch == 1 else batch,
        dtype=guards.DTYPES[a.dtype],
        layout_a=layout_a,
        layout_b=layout_b,
        epilogue="_".join(filter(None, ("" if bias is None else "bias", activation))),
    )


def _matrix(tensor: torch.Tensor, preferred: Major) -> _Matrix:
    """What `tensor` is, a stack of dense matrices; in `preferred` order where both hold."""
    *lead, rows, cols = tensor.shape
    orders: tuple[Major, ...] = ("row", "col") if preferred == "row" else ("col", "row")
    for order in orders:
        inner = (cols, 1) if order == "row" else (1, rows)
        outer = [rows * cols * math.prod(lead[i + 1 :]) for i in range(len(lead))]
        if guards.lies(tensor, (*outer, *inner)):
            return math.prod(lead), rows, cols, order
    raise ConfigError("a matrix is dense neither in rows nor in columns")
