"""Attention under a window or a soft cap as operators of torch, for graphs of torch.compile.

Each call of a graph chooses at run time: a tuned kernel if there is one, else PyTorch's operations.
They are separate from `tuner::attention`, whose fallback is one operator of PyTorch's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.library import Library, register_autograd

from tuner.errors import ConfigError
from tuner.families.fused_attention_backward import INSTANCES, instance
from tuner.runtime import counters, guards, serving
from tuner.runtime.attention_plan import AttentionCall
from tuner.runtime.composed import Extras, compose_with_lse, differentiate
from tuner.runtime.gradients import gradients_of
from tuner.runtime.operators import Tensors, define, is_operable, run_with_lse
from tuner.runtime.plan import Plan
from tuner.runtime.refusal import Refusal
from tuner.runtime.table import table
from tuner.selection.backward import KERNELS

_INPUTS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "bool is_causal, float? scale, SymInt left, SymInt right, float softcap"
_SCHEMAS = {
    "window_attention": f"({_INPUTS}, {_OPTIONS}) -> Tensor",
    "window_attention_with_lse": f"({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    "window_attention_backward": f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
}
_library = Library("tuner", "FRAGMENT")

#: (head dimension, is causal, is windowed, has a soft cap) of calls whose gradients have a kernel
#: in the portfolio. Other graphs hold PyTorch's operations, which Inductor fuses.
_SERVED = frozenset(
    (head_dim, kind.is_causal, kind.is_windowed, kind.has_softcap)
    for kind in KERNELS
    for head_dim in range(8, INSTANCES[-1] + 1, 8)
    if kind.columns == instance(head_dim) and not (kind.is_varlen or kind.is_deterministic)
)


def operate(call: AttentionCall) -> torch.Tensor | None:
    """A call of `tuner.attention` through the operators; None if PyTorch's operations suit a graph
    better. Only facts that hold for all calls of a graph are checked.
    """
    inputs, head_dim = call[:3], call.query.shape[3]
    extras, softcap = call.extras, call.extras.softcap
    if call.attn_mask is not None or call.dropout_p or not is_operable(*inputs, call.enable_gqa):
        return None
    is_windowed = extras.left >= 0 or (extras.right >= 0 and not call.is_causal)
    if (head_dim, call.is_causal, is_windowed, softcap > 0) not in _SERVED:
        return None
    options = call.is_causal, call.scale, extras.left, extras.right, softcap
    if not guards.wants_gradient(*inputs):
        out: torch.Tensor = torch.ops.tuner.window_attention(*inputs, *options)
        return out
    out, _ = torch.ops.tuner.window_attention_with_lse(*inputs, *options)
    return out


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
    call = _call(*arguments)
    table.refresh(call.query)
    plan = serving.find(call)
    compose = partial(compose_with_lse, *call[:3], call.is_causal, call.scale, call.extras)
    return run_with_lse(plan, *call[:3], compose)


def _attention_backward(grad_out: torch.Tensor, *arguments: Any) -> Tensors:
    query, key, value, out, lse, *options = arguments
    call = _call(query, key, value, *options)
    inputs = query, key, value
    posed = gradients_of(call, inputs, out, lse, grad_out)
    table.refresh(query)
    plan = serving.find(posed)
    grads = table.run_all(plan, *posed.inputs) if isinstance(plan, Plan) else plan
    if isinstance(grads, Refusal):
        counters.count_fallback(grads.reason)
        tensors = grad_out, *inputs, out, lse
        grads = differentiate(*tensors, call.is_causal, call.scale, call.extras)
    return tuple(guards.laid_out_as(t, g) for t, g in zip(inputs, grads, strict=True))


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
