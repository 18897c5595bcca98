"""Inputs of each kind, attention in fp64, and how far an output is from it; on any torch device."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tuner.problem import Operand

from .cases import Case

#: Bytes of fp64 scores at a time.
CHUNK_BYTES = 1 << 30
#: `dominant`: a query is this many times its key, and the mean of all keys is `KEY_MEAN`: minus a
#: key then has negative scores with nearly all, below the zeros that pad the last tile.
DOMINANCE = 4.0
KEY_MEAN = 0.5
#: `large_scores`: standard deviation of the scaled scores; 1 where inputs are normal.
LARGE = 30.0
#: Up to this size a log-sum-exp is judged by its absolute error, above by its relative one: fp32's
#: own spacing is 2e-6 to 4e-6 there, and with scores 30 times as large 1.5e-5.
LSE_LINEAR = 32.0


@dataclass(frozen=True)
class Reference:
    """What attention is, in fp64: (B, H, SQ, D) and twice (B, H, SQ)."""

    out: Tensor
    lse: Tensor
    weight: Tensor
    """Root of the sum of the squared probabilities: the standard deviation of an output element
    over normal values."""


@dataclass(frozen=True)
class Difference:
    """How far an output is from its reference."""

    frobenius: float
    """Relative Frobenius norm of the error; NaN where an element is not finite."""
    row: float
    """The worst row's: norm of its error by its own norm, or by what that is expected to be over
    normal values where chance has made it smaller."""
    not_finite: int


def draw_inputs(case: Case, tensors: Mapping[str, Tensor]) -> None:
    """Fill (B, H, S, D) views of query, key and value, whatever their strides."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    generator = torch.Generator(query.device).manual_seed(
        random.Random(case.label() + str(case.seed)).getrandbits(63)
    )
    for tensor in (query, key, value):
        for element in tensor:  # one batch element at a time: a copy of 2^32 would be large
            element.copy_(_normal(element.shape, generator))
    problem = case.problem
    if case.kind == "large_scores":
        query *= LARGE
    elif case.kind == "equal_row":
        query[:, :, equal_row(case)] = 0
    elif case.kind == "infinite_unseen":
        hidden = key[:, :, problem.seqlen_q :]
        hidden[..., ::2], hidden[..., 1::2] = math.inf, -math.inf
        hidden[:, :, ::2] = math.inf
    elif case.kind == "dominant":
        key += KEY_MEAN
        _dominate(case, query, key)


def equal_row(case: Case) -> int:
    """The query that `equal_row` makes zero."""
    return random.Random(case.label()).randrange(case.problem.seqlen_q)


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _dominate(case: Case, query: Tensor, key: Tensor) -> None:
    """Three of four queries follow a key that they see, at the borders first; the others are
    minus one."""
    problem, draw = case.problem, random.Random(case.label())
    group = problem.heads_q // problem.heads_kv
    borders = [0, problem.seqlen_kv - 1, 63, 64, 127, 128]
    targets = []
    for row in range(problem.seqlen_q):
        seen = min(row + 1, problem.seqlen_kv) if problem.is_causal else problem.seqlen_kv
        within = [border for border in (*borders, seen - 1) if border < seen]
        targets.append(draw.choice(within) if draw.random() < 0.5 else draw.randrange(seen))
    signs = torch.tensor(
        [DOMINANCE if row % 4 else -DOMINANCE for row in range(problem.seqlen_q)],
        dtype=torch.float32,
        device=query.device,
    )
    index = torch.tensor(targets, device=query.device)
    for head in range(problem.heads_q):
        query[:, head] = (key[:, head // group, index].float() * signs[:, None]).to(query.dtype)


def attention(case: Case, tensors: Mapping[str, Tensor]) -> Reference:
    """softmax(scale * Q K^T + mask) V in fp64, a few rows of one key head at a time."""
    problem = case.problem
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    wide = {"dtype": torch.float64, "device": query.device}
    out = torch.empty(problem.output.shape, **wide)
    lse, weight = (torch.empty(problem.output.shape[:3], **wide) for _ in range(2))
    group = problem.heads_q // problem.heads_kv
    step = max(1, CHUNK_BYTES // (8 * group * problem.seqlen_kv))
    columns = torch.arange(problem.seqlen_kv, device=query.device)
    for batch in range(problem.batch):
        for head_kv in range(problem.heads_kv):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            keys, values = key[batch, head_kv].double(), value[batch, head_kv].double()
            for first in range(0, problem.seqlen_q, step):
                rows = slice(first, min(first + step, problem.seqlen_q))
                seen = problem.seqlen_kv
                if problem.is_causal:
                    seen = min(seen, rows.stop)
                scores = (query[batch, heads, rows].double() * case.scale) @ keys[:seen].mT
                if problem.is_causal:
                    row = torch.arange(first, rows.stop, device=query.device)
                    scores.masked_fill_(columns[:seen] > row[:, None], -math.inf)
                top = scores.amax(-1, keepdim=True)
                scores.sub_(top).exp_()
                total = scores.sum(-1, keepdim=True)
                out[batch, heads, rows] = (scores @ values[:seen]) / total
                lse[batch, heads, rows] = (top + total.log()).squeeze(-1)
                weight[batch, heads, rows] = torch.linalg.vector_norm(scores, dim=-1)
                weight[batch, heads, rows] /= total.squeeze(-1)
    return Reference(out, lse, weight)


def difference(out: Tensor, reference: Reference) -> Difference:
    """Compare all elements, some heads at a time."""
    zero = torch.zeros((), dtype=torch.float64, device=out.device)
    squares, expected, worst, not_finite = zero, zero, zero, zero
    width = math.sqrt(out.shape[-1])
    for piece in _pieces(out.shape):
        wanted = reference.out[piece]
        wrong = out[piece].double() - wanted
        not_finite = not_finite + (~torch.isfinite(wrong)).sum()
        norms = torch.linalg.vector_norm(wrong, dim=-1)
        own = torch.linalg.vector_norm(wanted, dim=-1)
        squares, expected = squares + norms.square().sum(), expected + own.square().sum()
        relative = norms / torch.maximum(own, width * reference.weight[piece])
        worst = torch.maximum(worst, relative.nan_to_num(nan=math.inf, posinf=math.inf).max())
    return Difference(float((squares / expected).sqrt()), float(worst), int(not_finite))


def _pieces(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads that take at most `CHUNK_BYTES` in fp64."""
    batch, heads, rows, width = shape
    few = max(1, CHUNK_BYTES // (8 * rows * width))
    elements = max(1, few // heads)
    for first in range(0, batch, elements):
        for head in range(0, heads, min(few, heads)):
            yield slice(first, first + elements), slice(head, head + min(few, heads))


def lse_difference(lse: Tensor, reference: Reference) -> tuple[float, float]:
    """The worst error, and the worst one in units of what `LSE_LINEAR` allows there."""
    wrong = (lse.double() - reference.lse).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    allowed = torch.clamp(reference.lse.abs() / LSE_LINEAR, min=1.0)
    return float(wrong.max()), float((wrong / allowed).max())


def strided(operand: Operand, memory: Tensor) -> Tensor:
    """Bytes of `memory` as the logical tensor of an operand."""
    typed = memory.view(getattr(torch, operand.dtype))
    return typed.as_strided(operand.shape, operand.strides)
