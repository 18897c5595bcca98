"""Attention under a window or a soft cap as operators of torch, for graphs of torch.compile.

Each call of a graph chooses at run time: a tuned kernel if there is one, else PyTorch's operations.
These are slower than those that a graph holds without the operators. So graphs hold them only where
kernels of the call's kind are proven when the graph is traced. They are separate from
`tuner::attention`, whose fallback is one operator of PyTorch's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import torch
from torch.library import Library, register_autograd

from tuner.errors import ConfigError, TunerError
from tuner.families.attention_instances import INSTANCES, instance
from tuner.families.by_operation import AttentionDomain, Mask, Phase, rules
from tuner.families.target import Target
from tuner.hardware import HOPPER, Gpu
from tuner.problem import AttentionBackwardProblem, DType
from tuner.runtime.attention.attention_call import AttentionCall
from tuner.runtime.attention.composed import (
    BackwardInputs,
    Extras,
    compose_with_lse,
    differentiate,
)
from tuner.runtime.attention.operators import Tensors, define, is_operable, run_with_lse
from tuner.runtime.call import counters, devices, guards, handed_over, proven_kernels, serving
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.training.gradients import run_gradients

_INPUTS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "bool is_causal, float? scale, SymInt left, SymInt right, float softcap"
_SCHEMAS = {
    "window_attention": f"({_INPUTS}, {_OPTIONS}) -> Tensor",
    "window_attention_with_lse": f"({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    "window_attention_backward": f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
}
_library = Library("tuner", "FRAGMENT")


def operate(call: AttentionCall) -> torch.Tensor | None:
    """A call of `tuner.attention` through the operators; None if PyTorch's operations suit a graph
    better, which Inductor fuses. Only facts that hold for all calls of a graph are checked.
    """
    inputs, head_dim = call.tensors, call.query.shape[3]
    extras, softcap = call.extras, call.extras.softcap
    if call.attn_mask is not None or call.dropout_p or not is_operable(*inputs, call.enable_gqa):
        return None
    is_windowed = extras.left >= 0 or (extras.right >= 0 and not call.is_causal)
    if head_dim % 8 or head_dim > INSTANCES[-1]:
        return None
    columns, wants_gradient = instance(head_dim), guards.wants_gradient(*inputs)
    if wants_gradient and torch.are_deterministic_algorithms_enabled():
        return None
    # A branch makes each name: comparisons of dynamic options are symbolic, not booleans.
    window, cap = "window" if is_windowed else "", "softcap" if softcap > 0 else ""
    query, is_causal = call.query, call.is_causal
    if not _is_proven(query.device, query.dtype, columns, is_causal, window, cap, wants_gradient):
        return None
    options = call.is_causal, call.scale, extras.left, extras.right, softcap
    if not wants_gradient:
        out: torch.Tensor = torch.ops.tuner.window_attention(*inputs, *options)
        return out
    out, _ = torch.ops.tuner.window_attention_with_lse(*inputs, *options)
    return out


def _is_proven(
    device: torch.device,
    dtype: torch.dtype,
    columns: int,
    is_causal: bool,
    window: str,
    softcap: str,
    wants_gradient: bool,
) -> bool:
    """True when proven kernels of a kind of call are on this machine, for a Hopper GPU.

    The kind's gradients have a kernel in the portfolio. Where they are wanted it is proven, and so
    is one of prompts forward; elsewhere one forward. Read once, when a graph is traced.

    Args:
        device: device of the tensors.
        dtype: their type.
        columns: columns of the kernels' instance.
        is_causal: mask of the attention.
        window: a name under a window, else empty.
        softcap: a name with a soft cap, else empty.
        wants_gradient: the graph computes gradients.
    """
    kind = columns, is_causal, bool(window), bool(softcap)
    if not (gradients := _gradients(guards.DTYPES[dtype], *kind)):
        return False
    try:
        gpu = devices.gpu_of(-1 if device.index is None else device.index)
        if gpu.compute_capability != HOPPER:
            return False
        if wants_gradient and not any(proven_kernels.is_proven(one, gpu) for one in gradients):
            return False
        return _has_forward(gpu, guards.DTYPES[dtype], *kind, wants_gradient)
    except (RuntimeError, AssertionError, TunerError):  # no such GPU, or a damaged file
        return False


# As `torch.compiler.assume_constant_result`, which imports all of dynamo.
_is_proven._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _gradients(
    dtype: DType, columns: int, is_causal: bool, is_windowed: bool, has_softcap: bool
) -> list[Target]:
    """Kernels of gradients of a kind of call, not deterministic and of equal lengths."""
    kind = columns, is_causal, is_windowed, has_softcap, False, False
    return [
        target
        for rule in rules({AttentionBackwardProblem.op})
        for target in rule.targets()
        if isinstance(small := target.problem, AttentionBackwardProblem)
        and small.dtype == dtype
        and (small.head_dim, small.is_causal, small.is_windowed, small.softcap > 0) == kind[:4]
        and (small.is_varlen, small.is_deterministic) == kind[4:]
    ]


def _has_forward(
    gpu: Gpu,
    dtype: DType,
    columns: int,
    is_causal: bool,
    is_windowed: bool,
    has_softcap: bool,
    of_prompts: bool,
) -> bool:
    """True when a forward kernel of a kind is proven, `of_prompts` one of prompts."""
    mask: Mask = "windowed" if is_windowed else "causal" if is_causal else "full"
    phases: tuple[Phase, ...] = ("prompt",) if of_prompts else get_args(Phase)
    return any(
        proven_kernels.has_proven(problem, gpu)
        for phase in phases
        for problem in AttentionDomain(columns, mask, phase, has_softcap).problems(dtype)
        if problem.is_causal == is_causal
    )


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    *extras: Any,
) -> AttentionCall:
    guards.check_heads(query, key, value)
    options = None, 0.0, is_causal, scale, query.shape[1] != key.shape[1]
    return AttentionCall(query, key, value, *options, Extras(*extras))


def _attention(*arguments: Any) -> torch.Tensor:
    call = _call(*arguments)
    out = serving.answer(call)
    return guards.laid_out_as(call.query, call.by_pytorch() if out is None else out)


def _attention_with_lse(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(*handed_over.checked(*arguments[:3]), *arguments[3:])
    plan = serving.writing_lse(call, serving.find(call))
    compose = partial(compose_with_lse, call.attended)
    return run_with_lse(plan, *call.tensors, compose)


def _attention_backward(grad_out: torch.Tensor, *arguments: Any) -> Tensors:
    grad_out, query, key, value, out = handed_over.checked(grad_out, *arguments[:4])
    lse, *options = arguments[4:]
    call = _call(query, key, value, *options)
    recorded = BackwardInputs(out, lse, grad_out)
    grads = run_gradients(call.attended, recorded)
    if isinstance(grads, Refusal):
        counters.count_fallback(grads.reason)
        grads = differentiate(call.attended, recorded)
    pairs = zip(call.tensors, grads, strict=True)
    return tuple(guards.laid_out_as(tensor, grad) for tensor, grad in pairs)


define(_library, _SCHEMAS, _attention, _attention_with_lse, _attention_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.left, ctx.right, ctx.softcap = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad_out: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    options = ctx.is_causal, ctx.scale, ctx.left, ctx.right, ctx.softcap
    tensors = grad_out, *ctx.saved_tensors
    return (*torch.ops.tuner.window_attention_backward(*tensors, *options), *(None,) * 5)


def _refuse(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
    """A second derivative.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "a graph's attention under a window or a soft cap has no second derivatives (allowed: "
        "outside of torch.compile)"
    )


register_autograd(
    "tuner::window_attention_with_lse", _differentiate, setup_context=_keep, lib=_library
)
register_autograd("tuner::window_attention_backward", _refuse, lib=_library)
