"""Sums with a residual and their RMS norms, whose bits do not depend on the number of rows.

A program of the kernel has one row. Its order of additions follows from the number of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tuner.runtime.call import guards

MAX_COLUMNS = 16384
"""Columns of a row, which one program holds in registers."""


def fits(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """True for tensors that `add_and_normalise` takes: dense, of one half-precision type."""
    tensors = x, residual, weight
    is_alike = x.shape == residual.shape and weight.shape == x.shape[-1:]
    return (
        is_alike
        and 0 < x.shape[-1] <= MAX_COLUMNS
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.is_contiguous() and tensor.dtype == x.dtype for tensor in tensors)
        and x.is_cuda
        and not guards.is_misaligned(tensors)
    )


def add_and_normalise(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """Add x to the residual, in its type, and write the sums' weighted RMS norms to x.

    Args:
        x: (..., H), as `fits` takes it.
        residual: (..., H).
        weight: (H,).
        epsilon: term beside the mean of the squares.
    """
    columns = x.shape[-1]
    if not x.numel():
        return
    block = triton.next_power_of_2(columns)
    warps = 8 if block >= 4096 else 4
    _add_and_normalise[x.numel() // columns,](
        x, residual, weight, epsilon, columns, block, num_warps=warps
    )


# Triton compiles annotations, too: only its own names are allowed.
@triton.jit  # type: ignore[untyped-decorator]
def _add_and_normalise(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    is_column = column < COLUMNS
    at = tl.program_id(0).to(tl.int64) * COLUMNS + column
    term = tl.load(x + at, is_column, 0.0).to(tl.float32)
    whole = tl.load(residual + at, is_column, 0.0).to(tl.float32) + term
    rounded = whole.to(x.dtype.element_ty)
    tl.store(residual + at, rounded, is_column)
    exact = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / COLUMNS + epsilon)
    scale = tl.load(weight + column, is_column, 0.0).to(tl.float32)
    tl.store(x + at, (exact * factor * scale).to(x.dtype.element_ty), is_column)
