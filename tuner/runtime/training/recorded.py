"""Calls that autograd records: output and gradients by kernels, second derivatives by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tuner.runtime.call.refusal import Refusal

Tensors = tuple[torch.Tensor, ...]


def recorded(
    inputs: Tensors,
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor] | Refusal],
    backward: Callable[[Tensors, Any, Any, Any], Tensors | Refusal],
    compose: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """The output, recorded by autograd; None if the kernel refuses.

    Args:
        inputs: query, key and value.
        forward: output and log-sum-exp of three tensors, or a refusal.
        backward: gradients from the tensors, the output, its log-sum-exp and its gradient, or a
            refusal.
        compose: output by PyTorch's operations.
    """
    with torch.no_grad():
        outs = forward(*(t.detach() for t in inputs))
    if isinstance(outs, Refusal):
        return None
    out: torch.Tensor = _Attention.apply(*inputs, *outs, backward, compose)
    return out


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        query, key, value, out, lse, ctx.differentiate, ctx.compose = arguments
        ctx.save_for_backward(query, key, value, out, lse)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        *inputs, out, lse = ctx.saved_tensors
        grads: Tensors | Refusal | None = None
        if not torch.is_grad_enabled():  # else second derivatives are wanted
            grads = ctx.differentiate(tuple(inputs), out, lse, grad_out)
        if grads is None or isinstance(grads, Refusal):
            grads = _recomputed(ctx.compose, inputs, grad_out)
        return (*grads, None, None, None, None)


def _recomputed(compose: Callable[..., torch.Tensor], inputs: Any, grad_out: Any) -> Tensors:
    """Gradients through PyTorch's operations, differentiable where that is wanted."""
    is_second = torch.is_grad_enabled()
    # PyTorch's fused kernels have no second derivatives.
    kernels = sdpa_kernel(SDPBackend.MATH) if is_second else nullcontext()
    with torch.enable_grad(), kernels:
        leaves = inputs if is_second else [t.detach().requires_grad_() for t in inputs]
        leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in leaves]
        out = compose(*leaves)
        grads: Tensors = torch.autograd.grad(out, leaves, grad_out, create_graph=is_second)
        return grads
