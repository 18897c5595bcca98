"""Tensors of a drawn call as its model would pass them, and the problem in them.

They are views: of one projection, of the beginning of a longer cache, or (B, S, H, D) seen as (B,
H, S, D). `tuner.problem.population` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tuner.errors import ConfigError
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem
from tuner.problem.population import LOWER_RIGHT, PADDING, POSITIONS, ModelCall
from tuner.runtime.attention.attention_call import pose, scale_of
from tuner.runtime.attention.bias import as_operand
from tuner.runtime.attention.composed import Extras
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.products.gated import swiglu_problem_of
from tuner.runtime.products.matmul import pose as product_of

COLD_BYTES, MAX_COPIES = 160 << 20, 40
"""Caches and weights come from memory, not from the L2: copies in turn, three times its 50 MB.
Small calls have fewer bytes in as many copies as a graph has calls: `time_calls` evicts them."""


@dataclass(frozen=True)
class Inputs:
    """One copy of a call's tensors."""

    tensors: tuple[Any, ...]
    """Query, key and value; or input, weight and bias (None where there is none)."""
    source: Any
    """Tensor that the element-wise kernel reads; it writes the first of `tensors`."""
    mask: Any = None
    whole_mask: Any = None
    """Mask that PyTorch is given: `mask`, with a window as booleans."""
    seen: Any = None
    """(B or 1, H or 1, SQ, 1): rows with a visible key; None: all. Other rows have no defined
    value: PyTorch's kernels differ there.
    """


def made(call: ModelCall, device: str, copies: int) -> list[Inputs]:
    """So many copies of a call's tensors, normal but for zeros in the bias of positions."""
    build = _attention_inputs if call.views else _product_inputs
    built = [build(call, device) for _ in range(copies)]
    first = built[0]
    masks = {"mask": first.mask, "whole_mask": first.whole_mask, "seen": first.seen}
    return [replace(one, **masks) for one in built]


def copies_of(call: ModelCall) -> int:
    """Copies that leave nothing of one in the L2 when its turn comes again; 1 of prompts, whose
    tensors were just written.
    """
    if call.views and call.kind not in ("decoding", "cross"):
        return 1
    return max(1, min(MAX_COPIES, COLD_BYTES // max(1, call.bytes)))


def _attention_inputs(call: ModelCall, device: str) -> Inputs:
    dtype = getattr(torch, call.problem.to_json()["dtype"])
    meta = device == "meta"
    buffers = {
        name: torch.empty(size, dtype=dtype, device=device)
        if meta
        else torch.randn(size, dtype=dtype, device=device)
        for name, size in call.buffers.items()
    }
    tensors = tuple(
        torch.as_strided(buffers[v.buffer], v.shape, v.strides, v.offset) for v in call.views
    )
    source = tensors[0] if meta else tensors[0].clone(memory_format=torch.contiguous_format)
    mask = _mask(call, dtype, device)
    whole = _with_window(call, mask, device)
    seen = None
    if not meta and whole is not None and whole.dtype == torch.bool:
        seen = whole[(None,) * (4 - whole.dim())].any(-1, keepdim=True)
    return Inputs(tensors, source, mask, whole, None if seen is None or seen.all() else seen)


def _mask(call: ModelCall, dtype: torch.dtype, device: str) -> Any:
    """The tensor that `ModelCall.mask` names, as `attn_mask` takes it."""
    problem = call.problem
    assert isinstance(problem, AttentionProblem)
    if call.mask == PADDING:
        ends = [problem.seqlen_kv - i * problem.seqlen_kv // (2 * problem.batch)
                for i in range(problem.batch)]  # fmt: skip
        keys = torch.arange(problem.seqlen_kv, device=device)
        return (keys < torch.tensor(ends, device=device)[:, None])[:, None, None]
    if call.mask == LOWER_RIGHT:
        return _diagonal(problem, device) <= problem.seqlen_kv - problem.seqlen_q
    if call.mask != POSITIONS:
        return None
    heads, rows, keys = problem.heads_q, problem.seqlen_q, problem.seqlen_kv
    if device == "meta":
        return torch.empty(1, heads, rows, keys, dtype=dtype, device=device)
    away = _diagonal(problem, device) - (keys - rows)
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
    bias = torch.empty(1, heads, rows, keys, dtype=dtype, device=device)
    for head in range(heads):
        bias[0, head] = (-away.abs() * slopes[head]).to(dtype)
    return bias.masked_fill_(away > 0, -torch.inf) if call.kind != "encoding" else bias


def _with_window(call: ModelCall, mask: Any, device: str) -> Any:
    """The mask with the problem's window as booleans; the mask itself without a window."""
    problem = call.problem
    assert isinstance(problem, AttentionProblem)
    if not problem.is_windowed:
        return mask
    left, right = problem.visible
    away = _diagonal(problem, device)
    window = (away >= -left) & (away <= right)
    return window if mask is None else mask & window


def _diagonal(problem: AttentionProblem, device: str) -> Any:
    """(SQ, SKV): how many keys behind a query's own place a key lies."""
    rows, keys = (torch.arange(n, device=device) for n in (problem.seqlen_q, problem.seqlen_kv))
    return keys - rows[:, None]


def _product_inputs(call: ModelCall, device: str) -> Inputs:
    problem = call.problem
    dtype = getattr(torch, problem.to_json()["dtype"])

    def random(*shape: int, scale: float = 1.0) -> Any:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device).mul_(scale)

    assert isinstance(problem, GemmProblem | SwigluProblem)
    rows = problem.n * (2 if isinstance(problem, SwigluProblem) else 1)
    is_biased = isinstance(problem, GemmProblem) and problem.has_bias
    bias = random(problem.n) if is_biased else None
    source = random(problem.m, problem.k)
    x = source if device == "meta" else source.clone()
    return Inputs((x, random(rows, problem.k, scale=problem.k**-0.5), bias), source)


def posed(call: ModelCall) -> Problem:
    """The problem that the runtime reads off such tensors.

    Raises:
        ConfigError: when it reads none, with the runtime's reason.
    """
    inputs = (_attention_inputs if call.views else _product_inputs)(call, "meta")
    problem = call.problem
    if isinstance(problem, SwigluProblem):
        return swiglu_problem_of(*inputs.tensors[:2])
    if isinstance(problem, GemmProblem):
        x, weight, bias = inputs.tensors
        return product_of(x, weight.t(), bias, problem.activation or None).problem
    assert isinstance(problem, AttentionProblem)
    query, key, value = inputs.tensors
    mask = None
    if inputs.mask is not None:
        found = as_operand(inputs.mask, query, key, problem.is_causal)
        if isinstance(found, Refusal):
            raise ConfigError(found.reason)
        mask = found
    extras = Extras(problem.window_left, problem.window_right, problem.softcap)
    scale = scale_of(query, None)
    return pose(query, key, value, problem.is_causal, scale, extras=extras, mask=mask).problem
