"""`swiglu`: both up projections and SwiGLU by a tuned kernel if it was measured fastest, else by
PyTorch's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.nn import functional

from tuner.errors import ConfigError
from tuner.families.peers.swiglu import of_pairs, pairs
from tuner.problem import SwigluProblem
from tuner.runtime.call import guards, serving
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.call.serving import Call
from tuner.runtime.call.table import table


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The weights of `swiglu` from both projections; call it once, when they are loaded.

    Args:
        gate: (N, K), N a multiple of 32.
        up: (N, K), as `gate`.

    Returns:
        (2 N, K), contiguous, in the order of `SwigluProblem`.

    Raises:
        ConfigError: when the shapes are not as above.
    """
    if gate.dim() != 2 or gate.shape != up.shape or gate.shape[0] % 32:
        shapes = f"{tuple(gate.shape)} and {tuple(up.shape)}"
        raise ConfigError(
            f"{shapes} cannot be interleaved (allowed: twice (N, K), N a multiple of 32)"
        )
    n, k = gate.shape
    pair = torch.stack((gate, up)).view(2, n // 32, 4, 8, k)
    return pair.permute(1, 3, 2, 0, 4).reshape(2 * n, k)


def swiglu(input: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """silu(input @ gate^T) * (input @ up^T) by the fastest kernel measured on this GPU.

    It is one kernel if that was measured fastest. Otherwise PyTorch computes a product and
    element-wise kernels, and the call is counted by its reason (`tuner.stats`).

    Args:
        input: (..., K), fp16 or bf16, contiguous.
        weights: (2 N, K), as made by `interleave`.

    Returns:
        (..., N), of the input's type.

    Raises:
        ConfigError: when the weights' shape is not as above.
        RuntimeError: PyTorch's own, when the input does not fit the weights.
    """
    return serving.serve(SwigluCall(input, weights))


class _Gated(NamedTuple):
    input: torch.Tensor
    weights: torch.Tensor


class SwigluCall(_Gated, Call):
    """A call of `swiglu`."""

    __slots__ = ()
    aligned = 2

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self

    def kind(self) -> Hashable:
        return self.key()

    def pose(self) -> Posed:
        shape = (*self.input.shape[:-1], self.weights.shape[0] // 2)
        posed = Posed(swiglu_problem_of(self.input, self.weights), shape=shape)
        return self.measurable(posed)

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        return guards.deferred(*self) or table.run(plan, *self)

    def by_pytorch(self) -> torch.Tensor:
        shape = tuple(self.weights.shape)
        if len(shape) != 2 or shape[0] % 64:
            allowed = "(2 N, K), N a multiple of 32, as made by `interleave`"
            raise ConfigError(f"the weights of swiglu are {shape} (allowed: {allowed})")
        pair = functional.linear(self.input, self.weights)
        is_plain = not torch.compiler.is_compiling() and guards.unserved(self) is None
        if is_plain and not guards.wants_gradient(*self):
            out: torch.Tensor = of_pairs(pair)
            return out
        gate, up = pairs(pair)
        return (functional.silu(gate) * up).flatten(-3)


def swiglu_problem_of(a: torch.Tensor, weights: torch.Tensor) -> SwigluProblem:
    """The problem of a call of `swiglu`.

    Args:
        a: (..., K), fp16 or bf16, contiguous.
        weights: (2 N, K), of the same type, contiguous.

    Raises:
        ConfigError: on types, sizes or strides that no tuned kernel supports.
    """
    if a.dim() < 2 or weights.dim() != 2 or a.numel() == 0 or weights.numel() == 0:
        raise ConfigError("they are not matrices, or are empty")
    guards.check_alike(a, weights)
    k = a.shape[-1]
    if weights.shape[1] != k or weights.shape[0] % 2:
        raise ConfigError(f"the weights are {tuple(weights.shape)} (allowed: (2 N, {k}))")
    if not (a.is_contiguous() and weights.is_contiguous()):
        raise ConfigError("the rows are not contiguous")
    return SwigluProblem(
        m=a.numel() // k, n=weights.shape[0] // 2, k=k, dtype=guards.DTYPES[a.dtype]
    )
