"""e4m3 tensors with factors of blocks: activations are quantised, weights read back."""

from __future__ import annotations

from math import ceil

import torch
from torch.nn import functional

from tuner.errors import ConfigError
from tuner.problem import SCALE_BLOCK
from tuner.runtime import quantiser

RECIPROCAL = 1 / 448
"""Of the largest e4m3 number. PyTorch's division by a number is this product on a GPU, and a division
on a CPU: the product has the same bits on both."""
MIN_MAXIMUM = 1e-4
"""A block whose elements are all smaller has the factor of this maximum: none is zero."""


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, and a factor for each block: its largest magnitude times 1 / 448.

    One kernel where it is built and serves these rows (`quantiser`), else PyTorch's operations;
    both give the same bits.

    Args:
        rows: (M, K), bf16.

    Returns:
        (M, K) float8_e4m3fn, and (M, K / 128), rounded up, fp32, the rows' factors side by side,
        as the products' operands have them.
    """
    found = quantiser.run(rows, composed)
    return composed(rows) if found is None else found


def composed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantised` by PyTorch's operations.

    Rounded are, in fp32, the factor's product, each element's quotient, and that to e4m3, to
    nearest even. A NaN makes its block NaN.
    """
    m, k = rows.shape
    blocks = ceil(k / SCALE_BLOCK)
    padded = functional.pad(rows.float(), (0, blocks * SCALE_BLOCK - k)).view(m, blocks, -1)
    largest = padded.abs().amax(-1).clamp_min(MIN_MAXIMUM)
    scale = quantiser.empty_factors(rows)
    torch.mul(largest, RECIPROCAL, out=scale)
    elements = (padded / scale.unsqueeze(-1)).view(m, -1)[:, :k]
    return elements.to(torch.float8_e4m3fn).contiguous(), scale


def dequantised_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(M, K) in bf16 of e4m3 rows and their blocks' factors."""
    each = scale.repeat_interleave(SCALE_BLOCK, 1)[:, : rows.shape[1]]
    return (rows.float() * each).to(torch.bfloat16)


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(N, K) in bf16 of e4m3 weights and their blocks' factors."""
    n, k = weight.shape
    each = scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return (weight.float() * each).to(torch.bfloat16)


def check(input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse what is no input, weight and weight_scale of `tuner.linear`.

    Raises:
        ConfigError: says which types or shapes are wrong, and what is allowed.
    """
    types = (input.dtype, weight.dtype, scale.dtype)
    if types != (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        found = ", ".join(str(one).removeprefix("torch.") for one in types)
        raise ConfigError(f"{found} (allowed: bf16 input, float8_e4m3fn weight, fp32 weight_scale)")
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[-1]:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise ConfigError(f"{shapes} make no product (allowed: (..., K) and (N, K))")
    wanted = tuple(ceil(size / SCALE_BLOCK) for size in weight.shape)
    if tuple(scale.shape) != wanted:
        raise ConfigError(f"weight_scale is {tuple(scale.shape)} (allowed: {wanted})")
