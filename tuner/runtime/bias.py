"""What an `attn_mask` is: the additive bias that tuned kernels take, or a mask to compute with."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from tuner.problem import Bias
from tuner.runtime.refusal import Kind, Refusal


def as_bias(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> torch.Tensor | Refusal:
    """The mask as (B or 1, H or 1, SQ, SKV), contiguous and without a copy: axes that it is
    expanded along are left out. Or why no tuned kernel takes it.
    """
    if is_causal:  # PyTorch's documentation forbids both
        return Refusal(Kind.MASK, "beside is_causal")
    if type(mask) is not torch.Tensor or mask.layout is not torch.strided:
        return Refusal(Kind.MASK, "it is no plain tensor")
    if mask.dtype != query.dtype or mask.device != query.device:
        return Refusal(Kind.MASK, "it is not of the query's type and device")
    if mask.dim() not in (2, 3, 4) or query.dim() != 4 or key.dim() != 4:
        return Refusal(Kind.MASK, "it is not (SQ, SKV) with heads and batch before them")
    bias = mask[(None,) * (4 - mask.dim())]
    for axis in (0, 1):
        if bias.stride(axis) == 0:
            bias = bias.narrow(axis, 0, 1)
    wanted = (*query.shape[:3], key.shape[2])
    has_axes = all(size in (1, whole) for size, whole in zip(bias.shape[:2], wanted, strict=False))
    if not has_axes or bias.shape[2:] != wanted[2:] or not bias.is_contiguous():
        return Refusal(Kind.MASK, "it is not contiguous in whole rows of keys")
    return bias


def with_elements(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The mask, (SQ, SKV) of booleans in place of a `CausalBias`: that is a tensor in name only,
    which `scaled_dot_product_attention` alone understands.
    """
    if not isinstance(mask, CausalBias):
        return mask
    is_lower_right = mask.variant == CausalVariant.LOWER_RIGHT
    seen = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device)
    return seen.tril(mask.seq_len_kv - mask.seq_len_q if is_lower_right else 0)


def axes_of(bias: torch.Tensor) -> Bias:
    """What a problem calls such a bias; see `AttentionProblem`."""
    batch, heads = (size > 1 for size in bias.shape[:2])
    if batch:
        return "bh" if heads else "b"
    return "h" if heads else "1"
