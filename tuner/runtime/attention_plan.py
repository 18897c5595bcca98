"""The plan that serves attention of given tensors, and the problem that they pose."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tuner.errors import ConfigError
from tuner.problem import LAYOUTS, AttentionProblem, Bias, DType
from tuner.runtime import guards
from tuner.runtime.bias import axes_of
from tuner.runtime.composed import NONE, Extras
from tuner.runtime.plan import Plan
from tuner.runtime.refusal import Refusal, once
from tuner.runtime.table import table


def find_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = True,
    extras: Extras = NONE,
    bias: torch.Tensor | None = None,
) -> Plan | Refusal:
    """What serves such tensors, or the reason that nothing does; runs and counts nothing.

    Looks neither at gradients nor at autocast: the caller does. `bias` is one of `as_bias`.
    """
    inputs = (query, key, value) if bias is None else (query, key, value, bias)
    if reason := guards.unserved(*inputs):
        return once(reason)
    axes: Bias = "" if bias is None else axes_of(bias)
    if scale is not None and not scale > 0:  # NaN too
        return Refusal(guards.SCALE)
    kind = (
        query.shape,
        key.shape,
        value.shape,
        query.stride(),
        key.stride(),
        value.stride(),
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        is_causal,
        scale,
        enable_gqa,
        extras,
        axes,
    )
    plan = table.get(kind)
    if plan is None:
        plan = table.find_out(
            kind,
            # The dispatcher knows of plain calls alone.
            ("attention", (query, key, value, None, 0.0, is_causal, scale, enable_gqa))
            if extras == NONE and not axes
            else None,
            lambda: problem_of(query, key, value, bool(is_causal), enable_gqa, extras, bias=axes),
            1 / math.sqrt(query.shape[-1] or 1) if scale is None else float(scale),
            query.get_device(),
        )
    if isinstance(plan, Plan) and (reason := guards.misaligned(*inputs)):
        return Refusal(reason)
    return plan


def problem_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    enable_gqa: bool = True,
    extras: Extras = NONE,
    dtypes: Mapping[torch.dtype, DType] = guards.DTYPES,
    bias: Bias = "",
) -> AttentionProblem:
    """The problem that these tensors pose.

    Raises:
        ConfigError: when they pose none: types, sizes or strides that no tuned kernel has.
    """
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.numel() == 0 for t in tensors):
        raise ConfigError("they are not 4-D (B, H, S, D), or are empty")
    guards.check_alike(*tensors, dtypes=dtypes)
    if key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        raise ConfigError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "are not (B, H, SQ, D) and twice (B, HKV, SKV, D)"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ConfigError("heads are grouped without enable_gqa")
    for layout in LAYOUTS:
        problem = AttentionProblem(
            seqlen_q=query.shape[2],
            seqlen_kv=key.shape[2],
            head_dim=query.shape[3],
            batch=query.shape[0],
            heads_q=query.shape[1],
            heads_kv=key.shape[1],
            is_causal=is_causal,
            dtype=dtypes[query.dtype],
            layout=layout,
            window_left=extras.left,
            window_right=extras.right,
            softcap=extras.softcap,
            bias=bias,
        )
        operands = zip(problem.matrices[:3], tensors, strict=True)
        if all(guards.lies(tensor, operand.strides) for operand, tensor in operands):
            return problem
    raise ConfigError(f"their strides are of no layout (allowed: {', '.join(LAYOUTS)})")
