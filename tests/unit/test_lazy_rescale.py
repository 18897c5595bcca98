"""What lazy rescaling costs in accuracy, emulated: the figures of templates/README.md."""

from __future__ import annotations

import math

import pytest
import torch
from fused_attention_proof import cases, reference
from fused_attention_proof.prover import PEER_FACTOR

LOG2_E = 1 / math.log(2)


def emulate(
    case: cases.Case,
    tensors: dict[str, torch.Tensor],
    tile_n: int,
    threshold: float,
    sums_rounded: bool,
) -> torch.Tensor:
    """The template's arithmetic, full mask: P rounds to the inputs' type, keys from the right."""
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1).float() for t in (key, value))
    scores = query.float() @ key.mT * (case.scale * LOG2_E)
    maximum = torch.full(scores.shape[:3], -math.inf)
    total, out = torch.zeros(scores.shape[:3]), torch.zeros(query.shape)
    for first in reversed(range(0, key.shape[2], tile_n)):
        block = slice(first, first + tile_n)
        top = torch.maximum(maximum, scores[..., block].amax(-1))
        top = torch.where(top - maximum <= threshold, maximum, top)
        factor = torch.where(top == maximum, torch.ones(()), torch.exp2(maximum - top))
        exact = torch.exp2(scores[..., block] - top[..., None])
        rounded = exact.to(query.dtype).float()
        total = total * factor + (rounded if sums_rounded else exact).sum(-1)
        out = out * factor[..., None] + rounded @ value[..., block, :]
        maximum = top
    return (out / total[..., None]).to(query.dtype)


#: The first problems with dominating keys that exceeded the limit on an H200.
@pytest.mark.parametrize("length", [346, 470])
def test_only_a_sum_over_rounded_probabilities_is_as_accurate(length: int) -> None:
    case = next(
        c
        for c in cases.drawn()
        if c.kind == "dominant" and c.problem.seqlen_q == length and not c.problem.is_causal
    )
    dtype = getattr(torch, case.problem.dtype)
    names = ("query", "key", "value")
    tensors = {
        name: torch.empty(operand.shape, dtype=dtype)
        for name, operand in zip(names, case.problem.operands, strict=False)
    }
    reference.draw_inputs(case, tensors)
    truth = reference.attention(case, tensors)

    def error(threshold: float, sums_rounded: bool = False) -> float:
        out = emulate(case, tensors, 128, threshold, sums_rounded)
        return reference.difference(out, truth).frobenius

    eager = error(0.0)
    assert error(8.0) > PEER_FACTOR * eager
    assert error(8.0, sums_rounded=True) < 1.14 * eager
