"""Errors of our own gradients beside FlashAttention-2's, against float64.

``scripts/bench backward --errors N`` draws N problems of the rule's own kernels that
FlashAttention-2 computes as well. Both read FlashAttention-2's output and log-sum-exp. An error is
the relative Frobenius norm of a gradient's difference from that of float64.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.config import Config
from tuner.families import family
from tuner.families.fused_attention_backward.rule import KERNELS, BackwardKind, kind_of
from tuner.problem import AttentionBackwardProblem

MARGIN = 1.2
"""Largest error over FlashAttention-2's that a problem is counted as near."""
GRADIENTS = ("query", "key", "value")
_HEADS = ((1, 1), (2, 2), (3, 1), (4, 2), (8, 2), (8, 8), (7, 1))


def drawn(count: int, seed: str) -> list[AttentionBackwardProblem]:
    """Problems in the kinds of `KERNELS`, taking turns; equal seeds draw equal problems."""
    rng, kinds = random.Random(f"backward errors {seed}"), [k for k in KERNELS if not k.has_softcap]
    found: list[AttentionBackwardProblem] = []
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        problem = _one(rng, kind)
        if kind_of(problem) == kind:
            found.append(problem)
    return found


def _one(rng: random.Random, kind: BackwardKind) -> AttentionBackwardProblem:
    length = rng.choice((rng.randint(2, 200), rng.randint(200, 1500), 64 * rng.randint(1, 16)))
    other = length if kind.is_causal or kind.is_windowed else rng.choice((length, length + 33))
    heads_q, heads_kv = rng.choice(_HEADS)
    return AttentionBackwardProblem(
        seqlen_q=length,
        seqlen_kv=other,
        head_dim=rng.choice((kind.columns, kind.columns - 8 * rng.randint(0, 3))),
        batch=rng.choice((1, 2, 3)),
        heads_q=heads_q,
        heads_kv=heads_kv,
        is_causal=kind.is_causal,
        dtype=rng.choice(("bfloat16", "float16")),
        layout="bshd" if kind.is_varlen else rng.choice(("bhsd", "bshd", "bshd_bhsd")),
        # A causal window of no further key has no derivatives.
        window_left=max(1, rng.randrange(length)) if kind.is_windowed else -1,
        window_right=rng.randrange(length) if kind.is_windowed and not kind.is_causal else -1,
        is_deterministic=kind.is_deterministic,
        is_varlen=kind.is_varlen,
    )


def inputs_of(problem: AttentionBackwardProblem, seed: int) -> list[Any]:
    """Inputs in the problem's order: drawn, and what FlashAttention-2's forward pass leaves; under
    a soft cap, which it lacks, what PyTorch's operations leave.
    """
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    made: dict[str, Any] = {}
    for operand in problem.inputs:
        if operand.name in (*GRADIENTS, "grad_out"):
            values = torch.randn(operand.shape, device="cuda", generator=generator)
            made[operand.name] = empty(operand).copy_(values)
    starts = []
    if problem.is_varlen:
        for lengths in (problem.forward.lengths_q, problem.forward.lengths_kv):
            ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
            starts.append(ends.cuda())
    (laid,) = (operand for operand in problem.inputs if operand.name == "out")
    tensors = [made[name] for name in GRADIENTS]
    if problem.softcap:
        out, lse = capped(problem, tensors)
        return [*tensors, empty(laid).copy_(out), lse, made["grad_out"]]
    rows = [t.transpose(1, 2) for t in tensors]
    if problem.is_varlen:
        rows = [t[0] for t in rows]
    sides = problem.visible if problem.is_windowed else (None, None)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(*rows, *(starts or (None, None)), problem.seqlen_q, problem.seqlen_kv),
        *(0.0, problem.is_causal, False),
        scale=1 / math.sqrt(problem.head_dim),
        **dict(zip(("window_size_left", "window_size_right"), sides, strict=True)),
    )
    if problem.is_varlen:
        out, lse = out[None], lse[None]
    out = empty(laid).copy_(out.transpose(1, 2))
    return [*tensors, out, lse.contiguous(), made["grad_out"], *starts]


def capped(problem: AttentionBackwardProblem, tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Output and log-sum-exp under a soft cap in fp32, a head at a time."""
    import torch

    query, key, value = tensors
    out = torch.empty(query.shape, device="cuda")
    lse = torch.empty(query.shape[:3], device="cuda")
    group, cap = problem.heads_q // problem.heads_kv, problem.softcap
    mask = hidden(problem)
    for batch in range(problem.batch):
        for head in range(problem.heads_q):
            keys, values = (t[batch, head // group].float() for t in (key, value))
            scores = query[batch, head].float() @ keys.mT / math.sqrt(problem.head_dim)
            scores = (cap * torch.tanh(scores / cap)).masked_fill(mask, -math.inf)
            lse[batch, head] = scores.logsumexp(-1)
            out[batch, head] = scores.softmax(-1) @ values
    return out, lse


def hidden(problem: AttentionBackwardProblem) -> Any:
    """(SQ, SKV), true where a query does not see a key."""
    import torch

    left, right = problem.visible
    rows = torch.arange(problem.seqlen_q, device="cuda")[:, None]
    columns = torch.arange(problem.seqlen_kv, device="cuda")
    return (columns < rows - left) | (columns > rows + right)


def empty(operand: Any) -> Any:
    """Memory of an operand on the GPU."""
    import torch

    dtype = getattr(torch, operand.dtype)
    return torch.empty_strided(operand.shape, operand.strides, dtype=dtype, device="cuda")


def exact(problem: AttentionBackwardProblem, inputs: Sequence[Any]) -> list[Any]:
    """Gradients in float64."""
    import torch

    wide = [t.double() for t in (*inputs[:3], inputs[5])]
    found = [torch.zeros_like(t) for t in wide[:3]]
    for queries, keys in sequences(problem):
        spans = (queries, keys, keys, queries)
        q, k, v, grad = (t[:, :, span] for t, span in zip(wide, spans, strict=True))
        group = problem.heads_q // problem.heads_kv
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        many = [t.repeat_interleave(group, 1) for t in leaves[1:]]
        scores = leaves[0] @ many[0].mT / math.sqrt(problem.head_dim)
        left, right = problem.visible
        rows = torch.arange(q.shape[2], device="cuda")[:, None]
        columns = torch.arange(k.shape[2], device="cuda")
        hidden = (columns < rows - left) | (columns > rows + right)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        grads = torch.autograd.grad(weights @ many[1], leaves, grad)
        for made, span, part in zip(found, spans[:3], grads, strict=True):
            made[:, :, span] = part
    return found


def sequences(problem: AttentionBackwardProblem) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each packed sequence; of other problems all rows."""
    if not problem.is_varlen:
        yield slice(0, problem.seqlen_q), slice(0, problem.seqlen_kv)
        return
    queries = keys = 0
    forward = problem.forward
    for of_queries, of_keys in zip(forward.lengths_q, forward.lengths_kv, strict=True):
        yield slice(queries, queries + of_queries), slice(keys, keys + of_keys)
        queries, keys = queries + of_queries, keys + of_keys


def error(found: Any, wanted: Any) -> float:
    """Relative Frobenius error."""
    return float((found.double() - wanted).norm() / wanted.norm())


def row(problem: AttentionBackwardProblem, own: Any, seed: int) -> dict[str, Any]:
    """Errors of one problem.

    Args:
        problem: problem to compute.
        own: function that makes the own kernel's call of inputs.
        seed: random seed of the inputs.
    """
    inputs = inputs_of(problem, seed)
    wanted = exact(problem, inputs)
    config = Config("sdpa_backward", {"kernel": "flash2"})
    flash2 = family(config.family).vendor_call(problem, config, 1 / math.sqrt(problem.head_dim))
    if isinstance(flash2, str):
        return {"problem": problem.label(), "refused": flash2}
    made = {"own": own(inputs)(), "flash2": flash2(*inputs)}
    errors = {
        name: [error(a, b) for a, b in zip(grads, wanted, strict=True)]
        for name, grads in made.items()
    }
    ratios = [a / b for a, b in zip(errors["own"], errors["flash2"], strict=True)]
    return {"problem": problem.label(), **errors, "ratios": ratios}


def is_near(row: Mapping[str, Any]) -> bool:
    """True if no gradient's error is beyond the margin, or not a number."""
    return all(ratio <= MARGIN for ratio in row.get("ratios", (math.inf,)))


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Number of problems, and the ratios of the errors: median, largest, the problems beyond."""
    judged = [one for one in rows if "ratios" in one]
    lines = [f"{len(judged)} problems beside FlashAttention-2, {len(rows) - len(judged)} refused"]
    for index, name in enumerate(GRADIENTS):
        ratios = sorted(one["ratios"][index] for one in judged)
        if ratios:
            median = statistics.median(ratios)
            lines.append(f"  gradient of {name}: median {median:.3f}, largest {ratios[-1]:.3f}")
    beyond = [one for one in judged if not is_near(one)]
    lines.append(f"  {len(beyond)} beyond {MARGIN}")
    lines += [f"    {one['problem']}: {[f'{r:.3f}' for r in one['ratios']]}" for one in beyond]
    return "\n".join(lines)
