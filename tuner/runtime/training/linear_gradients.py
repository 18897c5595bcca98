"""`linear` as a function of autograd, whose three products may each be a tuned kernel.

For an input X (M, K), a weight W (N, K) and the output's gradient G (M, N):

| product | formula | `GemmProblem` | `layout_a`, `layout_b` |
|---|---|---|---|
| output | X W^T + bias | M, N, K | row, col |
| gradient of the input | G W | M, K, N | row, row |
| gradient of the weight | G^T X | N, K, M | col, row |

PyTorch sums the bias's gradient. Rows of G are not aligned if N is not a multiple of 8. They are
then copied into aligned ones. G W is then the sum of two products, the second over the last few
columns of G. cuBLAS takes several times as long without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.nn import functional

ALIGNED = 8
"""Elements that rows of a matrix in 16 bits are aligned by, for the loads of 16 bytes."""


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
        rows = _aligned(grad.reshape(-1, grad.shape[-1]))
        return (
            _of_input(rows, weight, matmul).view(input.shape) if wants_input else None,
            matmul(rows.t(), input.reshape(-1, input.shape[-1])) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
        )


def _of_input(
    rows: torch.Tensor, weight: torch.Tensor, matmul: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """(M, N) by (N, K), over a multiple of `ALIGNED` and the rest."""
    at = rows.shape[-1] // ALIGNED * ALIGNED
    if at in (0, rows.shape[-1]):
        return matmul(rows, weight)
    return torch.addmm(matmul(rows[:, :at], weight[:at]), rows[:, at:], weight[at:])


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """(M, N) with aligned rows: a copy where N is not a multiple of `ALIGNED`, if it has memory."""
    columns = rows.shape[-1]
    if columns % ALIGNED:
        with suppress(torch.OutOfMemoryError):
            return functional.pad(rows, (0, -columns % ALIGNED))[:, :columns]
    return rows
