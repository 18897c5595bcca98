"""`linear` as a function of autograd, whose three products may each be a tuned kernel.

For an input X (M, K), a weight W (N, K) and the output's gradient G (M, N):

| product | formula | `GemmProblem` | `layout_a`, `layout_b` |
|---|---|---|---|
| output | X W^T + bias | M, N, K | row, col |
| gradient of the input | G W | M, K, N | row, row |
| gradient of the weight | G^T X | N, K, M | col, row |

PyTorch sums the bias's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Products(NamedTuple):
    """Functions that compute the products, each by a tuned kernel or PyTorch's."""

    linear: Callable[..., torch.Tensor]
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LinearFunction(torch.autograd.Function):  # type: ignore[misc]  # torch is skipped
    """X W^T + bias. Second derivatives are those of PyTorch's products."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        products: Products,
    ) -> torch.Tensor:
        """(..., K) and (N, K) to (..., N)."""
        ctx.save_for_backward(input, weight)
        ctx.products = products
        return products.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input, weight and bias, those that are wanted."""
        input, weight = ctx.saved_tensors
        matmul = ctx.products.matmul
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            matmul(grad, weight) if wants_input else None,
            matmul(rows.t(), input.reshape(-1, input.shape[-1])) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
        )
