"""Attention as operators of torch, so that a traced model holds one node.

`tuner::attention` and `tuner::attention_with_lse` choose at run time: a tuned kernel if there is
one, else PyTorch's, on every device. They are defined on a bare `Library`, whose dispatch costs a
fraction of that of `torch.library.custom_op`. Eager calls of `tuner.attention` without a gradient
do not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.library import Library, register_autograd

from tuner.errors import ConfigError
from tuner.runtime.attention.attention_call import AttentionCall, find_plan, without_lse
from tuner.runtime.attention.bias import as_operand
from tuner.runtime.attention.composed import NONE, Attended, BackwardInputs
from tuner.runtime.call import counters, devices, dispatch, guards, handed_over, native
from tuner.runtime.call.plan import Plan
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.call.serving import find, serve
from tuner.runtime.call.table import table
from tuner.runtime.training import autograd
from tuner.runtime.training.gradients import gradients

_INPUTS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "bool is_causal=False, float? scale=None"
_SCHEMAS = {
    "attention": f"({_INPUTS}, {_OPTIONS}, Tensor? attn_mask=None) -> Tensor",
    "attention_with_lse": f"({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    "attention_backward": f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
}
_library = Library("tuner", "FRAGMENT")

Tensors = tuple[torch.Tensor, ...]


def operate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """Attention through the operators, or None when PyTorch's attention suits a graph better.

    None means that no tuned kernel takes such tensors, or no fused kernel computes the wanted
    gradient. Only facts that hold for all calls of a graph are checked; each call chooses its
    kernel.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        attn_mask: mask, as of `tuner.attention`; None: no mask.
        dropout_p: dropout, which no operator has.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.
    """
    if dropout_p or not is_operable(query, key, value, enable_gqa):
        return None
    out: torch.Tensor | None = None
    if attn_mask is not None:
        is_operand = attn_mask.dtype in (torch.bool, query.dtype) and attn_mask.dim() in (2, 3, 4)
        if is_operand and not is_causal and not guards.wants_gradient(query, key, value, attn_mask):
            out = torch.ops.tuner.attention(query, key, value, False, scale, attn_mask)
    elif not guards.wants_gradient(query, key, value):
        out = torch.ops.tuner.attention(query, key, value, is_causal, scale)
    elif autograd.has_backward(query, key, is_causal):
        out, _ = torch.ops.tuner.attention_with_lse(query, key, value, is_causal, scale)
    return out


def is_operable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> bool:
    """True for tensors that a tuned kernel may take, judged by facts that a graph keeps."""
    if any(t.dim() != 4 or t.device.type != devices.TYPE for t in (query, key, value)):
        return False
    heads, heads_kv = query.shape[1], key.shape[1]
    return (
        query.dtype in guards.DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and (heads == heads_kv or (enable_gqa and heads % heads_kv == 0))
    )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    guards.check_heads(query, key, value)
    is_grouped = query.shape[1] != key.shape[1]
    out = _tuned(query, key, value, attn_mask, is_causal, scale, is_grouped)
    if out is None:
        options = attn_mask, 0.0, is_causal, scale, is_grouped
        out = native.attend(query, key, value, *options)
    return guards.laid_out_as(query, out)


def _tuned(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    is_grouped: bool,
) -> torch.Tensor | None:
    """A tuned kernel's output, or None and a counted reason."""
    arguments = query, key, value, attn_mask, 0.0, is_causal, scale, is_grouped
    # With a gradient the dispatcher's refusals do not hold: this operator has its own backward.
    is_alike = not guards.wants_gradient(query, key, value)
    generation = table.refresh(query)
    known = dispatch.attention(*arguments) if is_alike else None
    if known is not None:
        return None if known is dispatch.REFUSED else known
    operand = None if attn_mask is None else as_operand(attn_mask, query, key, is_causal)
    call = AttentionCall(*arguments, NONE, operand)
    plan = find(call)
    out = plan if isinstance(plan, Refusal) else table.run(plan, *call.inputs)
    if not isinstance(out, Refusal):
        return out
    copy = call.realigned() if handed_over.is_checked(*call.inputs) else None
    if copy is not None:
        return serve(copy)
    if is_alike:
        dispatch.refuse("attention", arguments, out, generation)
    else:
        counters.count_fallback(out.reason)
    return None


def _attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    guards.check_heads(query, key, value)
    query, key, value = handed_over.checked(query, key, value)
    plan = find_plan(query, key, value, is_causal, scale)
    call = Attended(query, key, value, is_causal, scale)
    compose = partial(autograd.forward_with_lse, call)
    return run_with_lse(plan, query, key, value, compose)


def run_with_lse(
    plan: Plan | Refusal,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    compose: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, laid out as the query, and log-sum-exp, (B, H, SQ), by a plan's kernel.

    Args:
        plan: plan, or why there is none.
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as the key.
        compose: both by PyTorch, for what the plan refuses; the reason is counted.
    """
    answer: tuple[torch.Tensor, torch.Tensor] | Refusal
    if isinstance(plan, Refusal):
        answer = plan
    else:
        answer = table.run_with_lse(plan, query, key, value) if plan.has_lse else without_lse(plan)
    if isinstance(answer, Refusal):
        counters.count_fallback(answer.reason)
        answer = compose()
    out, lse = answer
    return guards.laid_out_as(query, out), lse.contiguous()


def _attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensors:
    guards.check_heads(query, key, value)
    inputs = query, key, value
    grad_out, query, key, value, out = handed_over.checked(grad_out, *inputs, out)
    call, recorded = (
        Attended(query, key, value, is_causal, scale),
        BackwardInputs(out, lse, grad_out),
    )
    grads = gradients(call, recorded) or autograd.backward(call, recorded)
    return tuple(guards.laid_out_as(t, g) for t, g in zip(inputs, grads, strict=True))


def _fake_attention(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query)


def _fake_attention_with_lse(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


def _fake_attention_backward(grad_out: torch.Tensor, *arguments: Any) -> Tensors:
    return tuple(torch.empty_like(t) for t in arguments[:3])


def define(
    library: Library, schemas: Mapping[str, str], *real: Callable[..., torch.Tensor | Tensors]
) -> None:
    """Define attention, attention with its log-sum-exp, and its gradients, in this order.

    Args:
        library: fragment of the library ``tuner``.
        schemas: arguments and results by the operators' names.
        real: implementations for every device, in the order of the schemas.
    """
    fakes = _fake_attention, _fake_attention_with_lse, _fake_attention_backward
    for (name, schema), function, fake in zip(schemas.items(), real, fakes, strict=True):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        # As `register_fake`, which looks for its caller's source through all the program's modules.
        library.impl(name, fake, "Meta")


define(_library, _SCHEMAS, _attention, _attention_with_lse, _attention_backward)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.is_causal, ctx.scale, attn_mask = inputs
    ctx.is_masked = attn_mask is not None
    ctx.save_for_backward(*tensors)


def _recompute(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    """Backward of `tuner::attention`: a second forward pass writes the log-sum-exp.

    Raises:
        ConfigError: when there is a mask.
    """
    if ctx.is_masked:
        raise ConfigError("tuner::attention has no gradient with attn_mask (allowed: no mask)")
    options = ctx.is_causal, ctx.scale
    out, lse = torch.ops.tuner.attention_with_lse(*ctx.saved_tensors, *options)
    grads = torch.ops.tuner.attention_backward(grad_out, *ctx.saved_tensors, out, lse, *options)
    return (*grads, None, None, None)


def _keep_outputs(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad_out: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    options = ctx.is_causal, ctx.scale
    grads = torch.ops.tuner.attention_backward(grad_out, *ctx.saved_tensors, *options)
    return (*grads, None, None)


def _keep_for_second(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    grad_out, query, key, value, _, _, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(grad_out, query, key, value)


def _differentiate_twice(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    options = ctx.is_causal, ctx.scale
    seconds = autograd.second_backward(grads, ctx.saved_tensors, *options)
    # Output and log-sum-exp depend on the inputs: recomputing both gives the full derivative.
    return (*seconds, None, None, None, None)


register_autograd("tuner::attention", _recompute, setup_context=_keep_inputs, lib=_library)
register_autograd(
    "tuner::attention_with_lse", _differentiate, setup_context=_keep_outputs, lib=_library
)
register_autograd(
    "tuner::attention_backward", _differentiate_twice, setup_context=_keep_for_second, lib=_library
)


def _autocast(name: str, device: str) -> None:
    """Register autocast for an operator, which casts its inputs as those of PyTorch's attention."""
    operator = getattr(torch.ops.tuner, name).default
    key = f"Autocast{device.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
    ) -> torch.Tensor | Tensors:
        inputs = guards.autocast(device, query, key, value)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*inputs, *options)

    _library.impl(name, cast, key)


for _name in ("attention", "attention_with_lse"):
    for _device in ("cuda", "cpu"):
        _autocast(_name, _device)
