"""Inputs of gradients of attention, with what FlashAttention-2's forward pass leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuner.problem import AttentionBackwardProblem

GRADIENTS = ("query", "key", "value")


def inputs_of(problem: AttentionBackwardProblem, seed: int) -> list[Any]:
    """Inputs in the problem's order: drawn, and what FlashAttention-2's forward pass leaves; under
    a soft cap, which it lacks, what PyTorch's operations leave.
    """
    import torch

    torch.manual_seed(seed)
    tensors: dict[str, Any] = {
        operand.name: empty(operand).copy_(torch.randn(operand.shape, device="cuda"))
        for operand in problem.inputs
        if operand.name in (*GRADIENTS, "grad_out")
    }
    starts = []
    if problem.is_varlen:
        for lengths in (problem.forward.lengths_q, problem.forward.lengths_kv):
            ends = torch.tensor((0, *lengths), dtype=torch.int32, device="cuda")
            starts.append(ends.cumsum(0, dtype=torch.int32))
    forward = capped if problem.softcap else flash2
    out, lse = forward(problem, [tensors[name] for name in GRADIENTS], starts)
    (laid,) = (operand for operand in problem.inputs if operand.name == "out")
    leaves = [tensors[name] for name in GRADIENTS]
    return [*leaves, empty(laid).copy_(out), lse, tensors["grad_out"], *starts]


def flash2(
    problem: AttentionBackwardProblem, tensors: Sequence[Any], starts: Sequence[Any]
) -> tuple[Any, Any]:
    """Output and log-sum-exp of FlashAttention-2."""
    import torch

    laid = [t.transpose(1, 2)[0] if problem.is_varlen else t.transpose(1, 2) for t in tensors]
    sides = problem.visible if problem.is_windowed else (None, None)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(*laid, *(starts or (None, None)), problem.seqlen_q, problem.seqlen_kv),
        *(0.0, problem.is_causal, False),
        scale=1 / math.sqrt(problem.head_dim),
        **dict(zip(("window_size_left", "window_size_right"), sides, strict=True)),
    )
    if problem.is_varlen:
        out, lse = out[None], lse[None]
    return out.transpose(1, 2), lse.contiguous()


def capped(
    problem: AttentionBackwardProblem, tensors: Sequence[Any], _: Sequence[Any]
) -> tuple[Any, Any]:
    """Output and log-sum-exp in fp32, a head at a time, also under a soft cap."""
    import torch

    query, key, value = tensors
    out = torch.empty(query.shape, device="cuda")
    lse = torch.empty(query.shape[:3], device="cuda")
    group, cap = problem.heads_q // problem.heads_kv, problem.softcap
    mask = hidden(problem, problem.seqlen_q, problem.seqlen_kv)
    for batch in range(problem.batch):
        for head in range(problem.heads_q):
            keys, values = (t[batch, head // group].float() for t in (key, value))
            scores = query[batch, head].float() @ keys.mT / math.sqrt(problem.head_dim)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = scores.masked_fill(mask, -math.inf)
            lse[batch, head] = scores.logsumexp(-1)
            out[batch, head] = scores.softmax(-1) @ values
    return out, lse


def hidden(problem: AttentionBackwardProblem, queries: int, keys: int) -> Any:
    """(queries, keys), true where a query does not see a key."""
    import torch

    left, right = problem.visible
    rows = torch.arange(queries, device="cuda")[:, None]
    columns = torch.arange(keys, device="cuda")
    return (columns < rows - left) | (columns > rows + right)


def empty(operand: Any) -> Any:
    """Memory of an operand on the GPU."""
    import torch

    dtype = getattr(torch, operand.dtype)
    return torch.empty_strided(operand.shape, operand.strides, dtype=dtype, device="cuda")
