"""Gradients of attention by a measured backward kernel, or by one that the rule chooses
(`tuner.families.by_operation`); own or a vendor's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.problem import AttentionBackwardProblem, AttentionProblem
from tuner.runtime.attention.attention_call import AttentionCall, pose, scale_of
from tuner.runtime.attention.composed import NONE, Attended, BackwardInputs, Extras
from tuner.runtime.call import guards
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.call.serving import PlannedCall, find, writing_lse
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
            operand.name: at
            for operand, own in zip(problem.operands, laid, strict=True)
            if (at := guards.along(operand, own)) != operand.strides
        }
        return Posed(problem, posed.scale, strides=strides)


def is_differentiable(call: Attended) -> bool:
    """True when the operators have a faster backward kernel than PyTorch's attention.

    It is a measured kernel that can run here, or one by the rule or cuDNN's where the work is
    large. The forward pass then keeps its log-sum-exp.
    """
    query, key, is_causal = call.query, call.key, call.is_causal
    if query.dtype not in guards.DTYPES or query.dim() != 4:
        return False
    plan = find(gradients_of(call, _unrecorded(query)))
    if isinstance(plan, Plan) and (not plan.by_portfolio or has_much_work(query, key, is_causal)):
        return True
    return gains_by_cudnn(call)


def gradients(call: Attended, recorded: BackwardInputs) -> Three | None:
    """Gradients of query, key and value, or None when PyTorch's kernels are to compute them.

    A program that asks for deterministic algorithms gets kernels measured for deterministic
    gradients.
    """
    if recorded.lse.dtype != torch.float32 or call.query.dtype not in guards.DTYPES:
        return None  # of a composition in another precision
    grads = run_gradients(call, recorded)
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
    plan, attended = writing_lse(call, find(call)), call.attended
    if not isinstance(plan, Plan) or not plan.has_lse:
        return None
    if not isinstance(find(gradients_of(attended, _unrecorded(call.query))), Plan):
        return None

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
        return table.run_with_lse(plan, *inputs)

    def backward(inputs: Tensors, out: Any, lse: Any, grad_out: Any) -> Tensors | Refusal:
        query, key, value = inputs
        call = attended._replace(query=query, key=key, value=value)
        return run_gradients(call, BackwardInputs(out, lse, grad_out))

    def compose(*inputs: torch.Tensor) -> torch.Tensor:
        options = dict(zip(("query", "key", "value"), inputs, strict=True))
        return call._replace(**options).by_pytorch()

    return recorded(call.tensors, forward, backward, compose)


def gradients_of(call: Attended, recorded: BackwardInputs) -> GradientsCall:
    """The call of a forward call's gradients, deterministic where the program asks for it."""
    query, key, value, is_causal, scale, extras = call
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    tensors = query, key, value, *recorded
    return GradientsCall(*tensors, is_causal, scale, is_deterministic, extras)


def run_gradients(call: Attended, recorded: BackwardInputs) -> Tensors | Refusal:
    """Gradients of query, key and value by a tuned kernel, or the reason why there is none."""
    posed = gradients_of(call, recorded)
    plan = find(posed)
    return table.run_all(plan, *posed.inputs) if isinstance(plan, Plan) else plan


def _unrecorded(query: torch.Tensor) -> BackwardInputs:
    """Stand-ins for a backward pass that is only looked up."""
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
    return BackwardInputs(query, lse, query)
