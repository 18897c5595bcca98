"""Quantised inputs, and attention as FlashAttention-3 computes it from them; on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tuner.problem import AttentionProblem

from .cases import Case

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
    """What quantised elements stand for, in fp64."""
    return tensor.double() * factors.double()[..., None, None]


def visible(problem: AttentionProblem, device: torch.device) -> Tensor:
    """(SQ, SKV): which keys each query sees."""
    seen = torch.ones(problem.seqlen_q, problem.seqlen_kv, dtype=torch.bool, device=device)
    return seen.tril() if problem.is_causal else seen


def flash_attention_3(case: Case, tensors: Mapping[str, Tensor], tile_n: int) -> Tensor:
    """Its online softmax over tiles of keys from the last to the first: e4m3 probabilities against
    the maximum so far, the row's sum of them unrounded, a bf16 output. Sums are exact here, which
    its accumulators' are not.

    Args:
        case: the problem and the scale.
        tensors: query, key and value, fp64, restored.
        tile_n: keys a step.
    """
    problem = case.problem
    group = problem.heads_q // problem.heads_kv
    query = tensors["query"] * case.scale
    key, value = (tensors[name].repeat_interleave(group, 1) for name in ("key", "value"))
    scores = (query @ key.mT).masked_fill_(~visible(problem, query.device), -math.inf)
    # Its values keep their factor apart; a factor of a whole head does not change what P rounds to.
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
