"""Inputs of gradients of attention, and errors beside FlashAttention-2's, against float64.

An error is the relative Frobenius norm of a gradient's difference from that of float64.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.call_times import distance
from benchmarks.rows import Row
from tuner.families.fused_attention_backward.rule import KERNELS, BackwardKind, kind_of
from tuner.problem import AttentionBackwardProblem

MARGIN = 1.2
"""Largest error over FlashAttention-2's that a problem is counted as near."""
GRADIENTS = ("query", "key", "value")
_HEADS = ((1, 1), (2, 2), (3, 1), (4, 2), (8, 2), (8, 8), (7, 1))


def drawn(count: int, seed: str) -> list[AttentionBackwardProblem]:
    """Problems in the kinds of `KERNELS`, taking turns; equal seeds draw equal problems."""
    rng, kinds = random.Random(f"backward errors {seed}"), [k for k in KERNELS if not k.has_softcap]
    problems: list[AttentionBackwardProblem] = []
    while len(problems) < count:
        kind = kinds[len(problems) % len(kinds)]
        problem = _draw(rng, kind)
        if kind_of(problem) == kind:
            problems.append(problem)
    return problems


def _draw(rng: random.Random, kind: BackwardKind) -> AttentionBackwardProblem:
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


def exact(problem: AttentionBackwardProblem, inputs: Sequence[Any]) -> list[Any]:
    """Gradients in float64, by PyTorch's operations."""
    import torch

    wide = [t.double() for t in (*inputs[:3], inputs[5])]
    gradients = [torch.zeros_like(t) for t in wide[:3]]
    for queries, keys in sequences(problem):
        spans = queries, keys, keys, queries
        *parts, grad = (t[:, :, span] for t, span in zip(wide, spans, strict=True))
        leaves = [t.detach().requires_grad_() for t in parts]
        mask = ~hidden(problem, grad.shape[2], parts[1].shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=mask, enable_gqa=True, scale=1 / math.sqrt(problem.head_dim)
        )
        grads = torch.autograd.grad(out, leaves, grad)
        for gradient, span, part in zip(gradients, spans[:3], grads, strict=True):
            gradient[:, :, span] = part
    return gradients


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


def row(
    problem: AttentionBackwardProblem, inputs: Sequence[Any], gradients: Mapping[str, Any]
) -> Row:
    """Errors of one problem, and those of the tuner over FlashAttention-2's."""
    wanted = exact(problem, inputs)
    errors = {name: list(map(distance, each, wanted)) for name, each in gradients.items()}
    ratios = [own / peer for own, peer in zip(errors["tuner"], errors["flash2"], strict=True)]
    is_near = all(ratio <= MARGIN for ratio in ratios)  # not where one is not a number
    return {"figures": {**errors, "ratios": ratios}, "wrong": [] if is_near else ["tuner"]}


def line(row: Row) -> str:
    """Ratios of one problem's errors."""
    ratios = (f"{name} {ratio:.3f}" for name, ratio in zip(GRADIENTS, ratios_of(row), strict=False))
    return f"{row['case']}: {', '.join(ratios)}{' beyond' * bool(row['wrong'])}"


def ratios_of(row: Row) -> list[float]:
    """Errors of the three gradients over FlashAttention-2's; none where one has none."""
    ratios: list[float] = row.get("figures", {}).get("ratios", [])
    return ratios


def table(rows: Sequence[Row]) -> list[str]:
    """Ratios of the errors: median, largest, and the problems beyond the margin."""
    judged = [row for row in rows if ratios_of(row)]
    lines = [f"{len(judged)} problems beside FlashAttention-2, {len(rows) - len(judged)} without"]
    for index, name in enumerate(GRADIENTS if judged else ()):
        ratios = sorted(ratios_of(row)[index] for row in judged)
        median = statistics.median(ratios)
        lines.append(f"  gradient of {name}: median {median:.3f}, largest {ratios[-1]:.3f}")
    beyond = [row for row in judged if row["wrong"]]
    return [*lines, f"  {len(beyond)} beyond {MARGIN}", *(f"    {line(row)}" for row in beyond)]
