"""Quantised inputs, and attention as FlashAttention-3 computes it from them; on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tuner.problem import AttentionProblem

E4M3 = torch.float8_e4m3fn
#: Largest number of e4m3.
LARGEST = 448.0
#: FlashAttention-3's `Max_offset`: probabilities are converted as 2^8 times themselves.
LIFT = 8


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, S, D) as e4m3, and fp32 factors (B, H) by which its largest element is 448."""
    factors = tensor.abs().amax((2, 3)).float() / LARGEST
    return (tensor / factors[..., None, None]).to(E4M3), factors


def restored(tensor: Tensor, factors: Tensor) -> Tensor:
    """Values of quantised elements, in fp64."""
    return tensor.double() * factors.double()[..., None, None]


def drawn(problem: AttentionProblem, kind: str) -> list[Tensor]:
    """Query, key and value of a kind of the gate's inputs, restored from e4m3; a key head for each
    query head.
    """
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(m.shape, generator=generator) for m in problem.matrices[:3]]
    group = problem.heads_q // problem.heads_kv
    made = [made[0], *(tensor.repeat_interleave(group, 1) for tensor in made[1:])]
    if kind == "large_scores":
        made[0] *= 30
    if kind == "dominant":  # each query follows a key that it sees, or turns away from it
        seen = torch.arange(problem.seqlen_q).clamp(max=problem.seqlen_kv - 1)
        signs = torch.where(torch.arange(problem.seqlen_q) % 4 == 0, -4.0, 4.0)
        made[0] = made[1][:, :, seen] * signs[:, None]
    return [restored(*quantise(tensor)) for tensor in made]


def scores_of(problem: AttentionProblem, query: Tensor, key: Tensor) -> Tensor:
    """Scaled scores, minus infinity where a query does not see a key."""
    scores = query @ key.mT * problem.head_dim**-0.5
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores.masked_fill_(~seen, -math.inf)
    return scores


def flash_attention_3(
    problem: AttentionProblem, query: Tensor, key: Tensor, value: Tensor, tile_n: int
) -> Tensor:
    """Online softmax over tiles of keys from the last to the first. Probabilities are e4m3 against
    the maximum so far, the row's sum of them is unrounded, the output bf16. Sums are exact here,
    which its accumulators' are not.

    Args:
        problem: sizes and mask.
        query: fp64, restored, as the others; a key head for each query head.
        key: keys.
        value: values.
        tile_n: keys a step.
    """
    # Values keep their factor apart; a factor of a whole head does not change what P rounds to.
    scores = scores_of(problem, query, key)
    out = torch.zeros_like(query)
    top = torch.full_like(scores[..., :1], -math.inf)
    total = torch.zeros_like(top)
    for first in range((problem.seqlen_kv - 1) // tile_n * tile_n, -1, -tile_n):
        block = scores[..., first : first + tile_n]
        higher = torch.maximum(top, block.amax(-1, keepdim=True))
        shift = torch.where(higher == -math.inf, torch.zeros_like(higher), higher)
        lifted = torch.exp(block - shift) * 2**LIFT
        factor = torch.exp(top - shift)
        total = total * factor + lifted.sum(-1, keepdim=True)
        rounded = lifted.float().to(E4M3).double()
        out = out * factor + rounded @ value[..., first : first + tile_n, :]
        top = higher
    return (out / torch.where(total > 0, total, torch.ones_like(total))).to(torch.bfloat16)
