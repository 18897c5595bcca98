"""Gradients of attention by a measured backward kernel, or by one that the rule chooses
(`tuner.families.fused_attention_backward.rule`); own or a vendor's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.problem import AttentionBackwardProblem, AttentionProblem
from tuner.runtime.attention.attention_call import AttentionCall, pose, scale_of
from tuner.runtime.attention.composed import NONE, Extras
from tuner.runtime.call import guards
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.call.serving import PlannedCall, find
from tuner.runtime.call.table import table
from tuner.runtime.training.autograd import Three, gains_by_cudnn, has_much_work
from tuner.runtime.training.recorded import Tensors, recorded


class _Gradients(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    is_causal: bool
    scale: float | None
    is_deterministic: bool
    extras: Extras = NONE


class GradientsCall(_Gradients, PlannedCall):
    """A call of ``tuner::attention_backward``."""

    __slots__ = ()
    aligned = 6

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value, self.out, self.lse, self.grad_out

    def refusal(self) -> Refusal | None:
        return None if self.scale is None else guards.unscaled(self.scale)

    def kind(self) -> Hashable:
        options = self.is_causal, self.scale, self.is_deterministic, self.extras
        return PlannedCall.key(self, *options)  # whose name here is a tensor's

    def pose(self) -> Posed:
        query, key, value, out, lse, grad_out = self.inputs
        scale, extras = scale_of(query, self.scale), self.extras
        posed = pose(query, key, value, self.is_causal, scale, extras=extras)
        if not isinstance(posed.problem, AttentionProblem):
            raise ConfigError(f"{posed.problem.op} has no gradients")
        problem = AttentionBackwardProblem.of(posed.problem, self.is_deterministic)
        guards.check_alike(query, out, grad_out)
        if out.shape != query.shape or grad_out.shape != query.shape:
            raise ConfigError("output and its gradient are not of the query's shape")
        if problem.heads_kv != key.shape[1]:
            raise ConfigError("keys and values are expanded over heads, their gradients are not")
        if lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ConfigError("the log-sum-exp is not contiguous fp32")
        # Gradients lie as `torch.empty_like` of their tensors.
        laid = [tensor.stride() for tensor in self.inputs]
        laid += [guards.dense(t.shape, t.stride()) for t in (query, key, value)]
        strides = {
            operand.name: found
            for operand, own in zip(problem.operands, laid, strict=True)
            if (found := guards.along(operand, own)) != operand.strides
        }
        return Posed(problem, posed.scale, strides=strides)


def is_differentiable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> bool:
    """True when the operators have a faster backward kernel than PyTorch's attention.

    It is a measured kernel that can run here, or one by the rule or cuDNN's where the work is
    large. The forward pass then keeps its log-sum-exp.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
    """
    if query.dtype not in guards.DTYPES or query.dim() != 4:
        return False
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    call = GradientsCall(query, key, value, query, lse, query, is_causal, scale, is_deterministic)
    plan = find(call)
    if isinstance(plan, Plan) and (not plan.by_portfolio or has_much_work(query, key, is_causal)):
        return True
    return gains_by_cudnn(query, key, value, is_causal, scale)


def gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Three | None:
    """Gradients of query, key and value, or None when PyTorch's kernels are to compute them.

    A program that asks for deterministic algorithms gets kernels measured for deterministic
    gradients.

    Args:
        grad_out: (B, H, SQ, D), gradient of the output.
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        out: (B, H, SQ, D), attention's output.
        lse: its log-sum-exp, fp32 (B, H, SQ).
        is_causal: mask of the attention.
        scale: factor of the scores.
    """
    if lse.dtype != torch.float32 or query.dtype not in guards.DTYPES:
        return None  # of a composition in another precision
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    tensors = query, key, value, out, lse, grad_out
    call = GradientsCall(*tensors, is_causal, scale, is_deterministic)
    plan = find(call)
    if not isinstance(plan, Plan):
        return None
    grads = table.run_all(plan, *call.inputs)
    if isinstance(grads, Refusal):
        return None
    grad_query, grad_key, grad_value = grads
    return grad_query, grad_key, grad_value


def attend_extras(call: AttentionCall) -> torch.Tensor | None:
    """A tuned kernel's output under a window or a soft cap whose gradients have a kernel too; None
    where PyTorch's operations are to compute both.
    """
    if call.attn_mask is not None or call.dropout_p:
        return None
    query, key, value = call.tensors
    plan = find(call)
    if not isinstance(plan, Plan) or not plan.has_lse:
        return None
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
    if not isinstance(find(gradients_of(call, (query, key, value), query, lse, query)), Plan):
        return None

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
        return table.run_with_lse(plan, *inputs)

    def backward(inputs: Tensors, out: Any, lse: Any, grad_out: Any) -> Tensors | Refusal:
        posed = gradients_of(call, inputs, out, lse, grad_out)
        found = find(posed)
        return table.run_all(found, *posed.inputs) if isinstance(found, Plan) else found

    def compose(*inputs: torch.Tensor) -> torch.Tensor:
        options = dict(zip(("query", "key", "value"), inputs, strict=True))
        return call._replace(**options).by_pytorch()

    return recorded((query, key, value), forward, backward, compose)


def gradients_of(
    call: AttentionCall, inputs: Tensors, out: Any, lse: Any, grad_out: Any
) -> GradientsCall:
    """The call of a forward call's gradients, deterministic where the program asks for it."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    options = call.is_causal, call.scale, is_deterministic, call.extras
    query, key, value = inputs
    return GradientsCall(query, key, value, out, lse, grad_out, *options)
