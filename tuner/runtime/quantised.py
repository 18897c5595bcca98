"""Attention of e4m3 tensors with descale factors: the tuned kernel, or PyTorch's on bf16 copies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn.functional import scaled_dot_product_attention

from tuner.errors import ConfigError
from tuner.problem import E4M3, AttentionProblem, DType
from tuner.runtime import counters, guards, native
from tuner.runtime.attention_plan import problem_of
from tuner.runtime.plan import Plan
from tuner.runtime.refusal import Refusal, once
from tuner.runtime.table import table

DTYPES: Mapping[torch.dtype, DType] = {torch.float8_e4m3fn: E4M3}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    tensors: Tensors,
    descales: tuple[torch.Tensor | None, ...],
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V of what quantised tensors stand for, as bf16.

    Args:
        tensors: query, key and value as `attention` takes them, float8_e4m3fn.
        descales: positive fp32 factors, (B, H) of the query, (B, HKV) of key and value.
        is_causal: as in `attention`.
        scale: as in `attention`.
        enable_gqa: as in `attention`.

    Raises:
        ConfigError: when a tensor is no e4m3, or a factor is missing or has another shape or type.
    """
    factors = _checked(tensors, descales)
    if not torch.compiler.is_compiling():
        out = _serve(tensors, factors, is_causal, scale, enable_gqa)
        if not isinstance(out, Refusal):
            return out
        counters.count_fallback(out.reason)
    query, key, value = (
        (tensor.float() * factor[..., None, None]).to(torch.bfloat16)
        for tensor, factor in zip(tensors, factors, strict=True)
    )
    arguments = query, key, value, None, 0.0, is_causal
    if torch.compiler.is_compiling():
        return scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)
    return native.attend(*arguments, scale, enable_gqa)


def _checked(tensors: Tensors, descales: tuple[torch.Tensor | None, ...]) -> Tensors:
    found = []
    for name, tensor, factor in zip("qkv", tensors, descales, strict=True):
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"descale factors are for float8_e4m3fn tensors, {name} is {tensor.dtype}"
            )
        if tensor.dim() != 4:
            raise ConfigError(f"{name} is {tuple(tensor.shape)} (allowed: (B, H, S, D))")
        wanted = tuple(tensor.shape[:2])
        if factor is None:
            raise ConfigError(f"descale_{name} is missing (allowed: fp32 {wanted})")
        if factor.dtype != torch.float32 or tuple(factor.shape) != wanted:
            shape = tuple(factor.shape)
            raise ConfigError(
                f"descale_{name} is {factor.dtype} {shape} (allowed: torch.float32 {wanted})"
            )
        found.append(factor.contiguous())
    query, key, value = found
    return query, key, value


def _serve(
    tensors: Tensors, factors: Tensors, is_causal: bool, scale: float | None, enable_gqa: bool
) -> torch.Tensor | Refusal:
    """The tuned kernel's output, or why there is none."""
    if reason := guards.unserved(*tensors, *factors):
        return once(reason)
    if guards.wants_gradient(*tensors, *factors):
        return once("a gradient is wanted: e4m3 kernels have no backward pass")
    if scale is not None and not scale > 0:  # NaN too
        return once(guards.SCALE)
    devices = tuple(t.device for t in (*tensors, *factors))
    layouts = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    kind = (E4M3, *layouts, *devices, is_causal, scale, enable_gqa)
    plan = table.get(kind)
    if plan is None:
        plan = table.find_out(
            kind,
            None,
            lambda: _problem(tensors, factors, is_causal, enable_gqa),
            1 / math.sqrt(tensors[0].shape[-1] or 1) if scale is None else float(scale),
            tensors[0].get_device(),
        )
    if not isinstance(plan, Plan):
        return plan
    if reason := guards.misaligned(*tensors):
        return once(reason)
    return table.run(plan, *tensors, *factors)


def _problem(
    tensors: Tensors, factors: Tensors, is_causal: bool, enable_gqa: bool
) -> AttentionProblem:
    if len({t.device for t in (*tensors, *factors)}) > 1:
        raise ConfigError("tensors and factors differ in device")
    return problem_of(*tensors, bool(is_causal), enable_gqa, dtypes=DTYPES)
