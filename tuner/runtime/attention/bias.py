"""`attn_mask` as the mask operand of tuned kernels, as a window, or as a tensor to compute with."""

from __future__ import annotations

import torch

from tuner.problem import Axes
from tuner.runtime.call.refusal import Kind, Refusal

MIN_LOWER_RIGHT_TILES = 132
"""Fewest tiles of 64 queries under a lower-right bias: one for each multiprocessor of an H100.
Kernels with windows do not split the keys. FlashAttention-2, which PyTorch calls, splits them."""


def as_operand(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> torch.Tensor | Refusal:
    """The mask as a view (B, H, SQ, SKV), or the reason why no tuned kernel takes it.

    Args:
        mask: (SQ, SKV) with heads and batch before them; each dimension is of full size or 1. The
            elements are booleans, or numbers of the query's type that are added to the scores.
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        is_causal: True where a causal mask is wanted beside it, which no kernel has.
    """
    if is_causal:  # PyTorch's documentation forbids both
        return Refusal(Kind.MASK, "beside is_causal")
    if type(mask) is not torch.Tensor or mask.layout is not torch.strided:
        return Refusal(Kind.MASK, "it is no plain tensor")
    if mask.dtype not in (query.dtype, torch.bool) or mask.device != query.device:
        return Refusal(Kind.MASK, "it is not boolean or of the query's type, and on its device")
    if mask.dim() not in (2, 3, 4) or query.dim() != 4 or key.dim() != 4:
        return Refusal(Kind.MASK, "it is not (SQ, SKV) with heads and batch before them")
    whole = mask[(None,) * (4 - mask.dim())]
    sizes = (*query.shape[:3], key.shape[2])
    if any(size not in (1, full) for size, full in zip(whole.shape, sizes, strict=True)):
        return Refusal(Kind.MASK, "it does not broadcast to the scores")
    return whole


def steps_of(operand: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides of a mask operand along batch, head, query and key, in elements; 0 along broadcast
    dimensions.
    """
    sizes = zip(operand.shape, operand.stride(), strict=True)
    batch, head, query, key = (0 if size == 1 else stride for size, stride in sizes)
    return batch, head, query, key


def axes_of(operand: torch.Tensor) -> Axes:
    """Name of the operand's axes in a problem; see `AttentionProblem`."""
    batch, head, query, _ = (step != 0 for step in steps_of(operand))
    axes: dict[tuple[bool, bool], tuple[Axes, Axes]] = {
        (False, False): ("1", "k"),
        (True, False): ("b", "bk"),
        (False, True): ("h", "hk"),
        (True, True): ("bh", "bhk"),
    }
    return axes[batch, head][not query]


def over(mask: torch.Tensor, operand: torch.Tensor, length: int, keys: int) -> torch.Tensor:
    """Meta tensor of a mask operand over another number of keys, with the strides that the
    dispatcher counts as the same kind of call (`tuner.runtime.call.lengths`).

    Args:
        mask: `attn_mask` as it was given.
        operand: the result of `as_operand` for it.
        length: number of its keys.
        keys: number of keys in place of `length`.
    """
    *sizes, last = operand.shape
    if last != length:
        return operand
    shape = (*sizes, keys)
    if mask.is_contiguous():
        return torch.empty(shape, dtype=operand.dtype, device="meta")
    return torch.empty_strided(shape, operand.stride(), dtype=operand.dtype, device="meta")


def causal_right(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> int | None:
    """Keys behind key i that query i sees under a `CausalBias` of these tensors' lengths.

    It is 0 for a top-left mask, or for equal lengths. None for other masks, and where the first
    queries see no key: PyTorch has no output there.
    """
    if type(mask) is torch.Tensor or query.dim() != 4 or key.dim() != 4:
        return None
    # All of Dynamo comes with it, a second more for each process that imports the runtime.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    queries, keys = query.shape[2], key.shape[2]
    if not isinstance(mask, CausalBias) or (mask.seq_len_q, mask.seq_len_kv) != (queries, keys):
        return None
    if mask.variant == CausalVariant.UPPER_LEFT:
        return 0
    return keys - queries if keys >= queries else None


def fills_the_gpu(query: torch.Tensor) -> bool:
    """True if queries (B, H, SQ, D) have `MIN_LOWER_RIGHT_TILES` tiles."""
    batch, heads, queries, _ = query.shape
    return bool(batch * heads * -(-queries // 64) >= MIN_LOWER_RIGHT_TILES)


def with_elements(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The mask; a `CausalBias` becomes booleans (SQ, SKV). It has no elements of its own: only
    `scaled_dot_product_attention` interprets it.
    """
    if type(mask) is torch.Tensor:
        return mask
    # All of Dynamo comes with it, a second more for each process that imports the runtime.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return mask
    is_lower_right = mask.variant == CausalVariant.LOWER_RIGHT
    visible = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device)
    return visible.tril(mask.seq_len_kv - mask.seq_len_q if is_lower_right else 0)
