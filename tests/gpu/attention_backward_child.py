"""Runs kernels of gradients on their problems, in a process that may hang or die.

Called by `test_attention_backward_gpu.py` with a JSON of artifacts and draws on the standard input;
prints a line of JSON for each draw.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from tuner.compile.artifacts import ArtifactCache
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.problem import AttentionBackwardProblem, problem_from_json

WIDE = torch.float64
REPEATS = 3


def drawn(problem: AttentionBackwardProblem, seed: int) -> dict[str, Any]:
    """Query, key, value and the output's gradient, laid out as the problem's."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = {}
    for operand in problem.inputs:
        if operand.name in ("query", "key", "value", "grad_out"):
            values = torch.randn(operand.shape, device="cuda", generator=generator)
            made[operand.name] = empty(operand).copy_(values)
    return made


def empty(operand: Any) -> Any:
    dtype = getattr(torch, operand.dtype)
    return torch.empty_strided(operand.shape, operand.strides, dtype=dtype, device="cuda")


def hidden(problem: AttentionBackwardProblem) -> Any:
    """(SQ, SKV): which keys a query does not see."""
    left, right = problem.visible
    rows = torch.arange(problem.seqlen_q, device="cuda")[:, None]
    keys = torch.arange(problem.seqlen_kv, device="cuda")
    return (keys < rows - left) | (keys > rows + right)


def exact(problem: AttentionBackwardProblem, tensors: dict[str, Any], scale: float) -> dict:
    """Output, log-sum-exp and gradients in float64, a query head at a time."""
    names = ("query", "key", "value", "grad_out")
    query, key, value, grad_out = (tensors[name] for name in names)
    found = {name: torch.zeros(tensors[name].shape, dtype=WIDE, device="cuda") for name in names}
    lse = torch.zeros(query.shape[:3], dtype=WIDE, device="cuda")
    mask, group = hidden(problem), problem.heads_q // problem.heads_kv
    for batch in range(problem.batch):
        for head in range(problem.heads_q):
            at, of = (batch, head), (batch, head // group)
            q, k, v, g = (t.to(WIDE) for t in (query[at], key[of], value[of], grad_out[at]))
            scores = (q @ k.mT * scale).masked_fill(mask, -math.inf)
            lse[at] = scores.logsumexp(-1)
            weights = (scores - lse[at].masked_fill(lse[at] == -math.inf, 0)[:, None]).exp()
            out = weights @ v
            inner = (g * out).sum(-1, keepdim=True)
            derivative = weights * (g @ v.mT - inner) * scale
            found["query"][at] = derivative @ k
            found["key"][of] += derivative.mT @ q
            found["value"][of] += weights.mT @ g
            found["grad_out"][at] = out
    return {"out": found.pop("grad_out"), "lse": lse, **found}


def peers(problem: AttentionBackwardProblem, tensors: dict[str, Any], scale: float) -> Any:
    """FlashAttention-2's gradients from its own forward pass; None where its mask is another."""
    is_masked = problem.is_causal or problem.is_windowed
    if is_masked and problem.seqlen_q != problem.seqlen_kv:
        return None
    sides = problem.visible if problem.is_windowed else (None, None)
    window = dict(zip(("window_size_left", "window_size_right"), sides, strict=True))
    names = ("query", "key", "value", "grad_out")
    query, key, value, grad = (tensors[name].transpose(1, 2) for name in names)
    lengths = problem.seqlen_q, problem.seqlen_kv
    aten = torch.ops.aten
    out, lse, *state, _ = aten._flash_attention_forward(
        *(query, key, value, None, None, *lengths, 0.0, problem.is_causal, False),
        scale=scale,
        **window,
    )
    grads = aten._flash_attention_backward(
        *(grad, query, key, value, out, lse, None, None, *lengths, 0.0, problem.is_causal, *state),
        scale=scale,
        **window,
    )
    return [t.transpose(1, 2) for t in grads]


def rounded(problem: AttentionBackwardProblem, tensors: dict, wanted: dict, scale: float) -> list:
    """Gradients in fp32 with probabilities and derivatives rounded, as every kernel has them."""
    dtype = tensors["query"].dtype
    names = ("query", "key", "value", "grad_out")
    query, key, value, grad_out = (tensors[name].float() for name in names)
    group = problem.heads_q // problem.heads_kv
    keys, values = (t.repeat_interleave(group, 1) for t in (key, value))
    lse = wanted["lse"].float().masked_fill(wanted["lse"] == -math.inf, math.inf)
    scores = (query @ keys.mT * scale - lse[..., None]).masked_fill(hidden(problem), -math.inf)
    weights = scores.exp()
    inner = (grad_out * wanted["out"].to(dtype).float()).sum(-1, keepdim=True)
    derivative = (weights * (grad_out @ values.mT - inner)).to(dtype).float()
    folded = [
        t.unflatten(1, (problem.heads_kv, group)).sum(2)
        for t in (derivative.mT @ query * scale, weights.to(dtype).float().mT @ grad_out)
    ]
    return [t.to(dtype) for t in (derivative @ keys * scale, *folded)]


def error(found: Any, wanted: Any) -> float:
    """Relative Frobenius error; absolute where all that is wanted is zero."""
    norm = float(wanted.norm())
    return float((found.to(WIDE) - wanted).norm()) / (norm if norm > 1e-12 else 1.0)


def check(kernel: Any, config: Config, problem: AttentionBackwardProblem, repeats: int) -> dict:
    scale = 1.1 / math.sqrt(problem.head_dim)
    tensors = drawn(problem, 7)
    wanted = exact(problem, tensors, scale)
    buffers = dict(tensors)
    operands = {operand.name: operand for operand in problem.operands}
    buffers["out"] = empty(operands["out"]).copy_(wanted["out"])
    buffers["logsumexp"] = wanted["lse"].float().contiguous()
    (launch,) = family("fused_attention_backward").launches(problem, config, scale)
    size = kernel.workspace_bytes(launch.integers)
    runs: list[list[Any]] = []
    for _ in range(1 + repeats):
        outs = {o.name: empty(o).fill_(math.nan) for o in problem.outputs}
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")
        tensors_of = {**buffers, **outs}
        pointers = [tensors_of[ref.operand].data_ptr() for ref in launch.tensors]
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(pointers, launch.integers, launch.scalars, workspace.data_ptr(), stream)
        torch.cuda.synchronize()
        runs.append(list(outs.values()))
    gradients = [wanted[name] for name in ("query", "key", "value")]
    flash = peers(problem, tensors, scale)
    other = rounded(problem, tensors, wanted, scale) if flash is None else flash
    return {
        "errors": [error(a, b) for a, b in zip(runs[0], gradients, strict=True)],
        "others": [error(a, b) for a, b in zip(other, gradients, strict=True)],
        "has_peer": flash is not None,
        "same": [all(torch.equal(run[i], runs[0][i]) for run in runs) for i in range(3)],
        "finite": all(bool(t.isfinite().all()) for t in runs[0]),
    }


def main(wanted: dict[str, Any]) -> None:
    artifacts, kernels = ArtifactCache(Path(wanted["artifacts"])), dict[str, Any]()
    for draw in wanted["draws"]:
        key, problem = draw["key"], problem_from_json(draw["problem"])
        assert isinstance(problem, AttentionBackwardProblem)
        if key not in kernels:
            artifact = artifacts.find(key)
            assert artifact is not None
            kernels[key] = load(artifact)
        found = check(kernels[key], Config.from_json(draw["config"]), problem, REPEATS)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin))
