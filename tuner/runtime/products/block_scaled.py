"""e4m3 tensors with block-wise scales: quantisation of activations, dequantisation of weights."""

from __future__ import annotations

from math import ceil

import torch
from torch.nn import functional

from tuner.errors import ConfigError
from tuner.problem import SCALE_BLOCK
from tuner.runtime.products import quantiser

RECIPROCAL = 1 / 448
"""Reciprocal of the largest e4m3 number. PyTorch divides by multiplying with it on a GPU, and truly
divides on a CPU. This product has the same bits on both."""
MIN_MAXIMUM = 1e-4
"""Smallest maximum that a block's factor is computed from, so that no factor is zero."""


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to e4m3 with a factor for each block of 128: its largest magnitude / 448.

    A kernel computes it if it is built and serves these rows (`quantiser`), else PyTorch's
    operations. Both give the same bits.

    Args:
        rows: (M, K), bf16.

    Returns:
        (M, K) float8_e4m3fn, and fp32 (M, K / 128), rounded up, with stride 1 along M, as the
        products' operands.
    """
    pair = quantiser.run(rows, composed)
    return composed(rows) if pair is None else pair


def composed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantised` by PyTorch's operations.

    The factor's product and each element's quotient are rounded in fp32, and the quotient to e4m3,
    to nearest even. A NaN makes its block NaN.
    """
    m, k = rows.shape
    blocks = ceil(k / SCALE_BLOCK)
    padded = functional.pad(rows.float(), (0, blocks * SCALE_BLOCK - k))
    padded = padded.view(m, blocks, SCALE_BLOCK)
    largest = padded.abs().amax(-1).clamp_min(MIN_MAXIMUM)
    scale = quantiser.empty_factors(m, k, rows.device)
    torch.mul(largest, RECIPROCAL, out=scale)
    elements = (padded / scale.unsqueeze(-1)).flatten(1)[:, :k]
    return elements.to(torch.float8_e4m3fn).contiguous(), scale


def dequantised_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(M, K), bf16: e4m3 rows (M, K) times their blocks' factors (M, K / 128)."""
    factor = scale.repeat_interleave(SCALE_BLOCK, 1)[:, : rows.shape[1]]
    return (rows.float() * factor).to(torch.bfloat16)


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(N, K), bf16: e4m3 weights (N, K) times their blocks' factors (N / 128, K / 128)."""
    n, k = weight.shape
    factor = scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return (weight.float() * factor).to(torch.bfloat16)


def dequantised_all(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(G, N, K), bf16: `dequantised` of each group."""
    pairs = zip(weights, scales, strict=True)
    return torch.stack([dequantised(*pair) for pair in pairs])


def check(input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Check the input, weight and weight_scale of `tuner.linear`.

    Raises:
        ConfigError: names the types or shapes that are wrong, and the allowed ones.
    """
    types = (input.dtype, weight.dtype, scale.dtype)
    if types != (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        came = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise ConfigError(f"{came} (allowed: bf16 input, float8_e4m3fn weight, fp32 weight_scale)")
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[-1]:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise ConfigError(f"{shapes} make no product (allowed: (..., K) and (N, K))")
    due = tuple(ceil(size / SCALE_BLOCK) for size in weight.shape)
    if tuple(scale.shape) != due:
        raise ConfigError(f"weight_scale is {tuple(scale.shape)} (allowed: {due})")
