"""A call of attention: the problem that its tensors describe, and the plan that serves it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import torch

from tuner.errors import ConfigError
from tuner.problem import AttentionProblem, DType, Layout
from tuner.runtime.attention.bias import axes_of, fills_the_gpu, steps_of
from tuner.runtime.attention.bias import over as mask_over
from tuner.runtime.attention.composed import NONE, Attended, Extras, compose
from tuner.runtime.call import (
    devices,
    finite_gradients,
    guards,
    handed_over,
    invariance,
    native,
)
from tuner.runtime.call.lengths import over
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, find, writing_lse
from tuner.runtime.call.table import DispatchedCall, table
from tuner.runtime.training.autograd import has_backward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Arguments = tuple[*Tensors, torch.Tensor | None, float, bool, float | None, bool]
"""Arguments of `scaled_dot_product_attention`."""
TOO_FEW_TILES = Refusal(Kind.BOTTOM_RIGHT, "too few queries for kernels that do not split the keys")


class _Attention(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    extras: Extras = NONE
    operand: torch.Tensor | Refusal | None = None
    """`attn_mask` as `as_operand` makes it, or the reason why no kernel takes it. None without a
    mask, and where the window of `extras` contains it."""
    needs_lse: bool = False


class AttentionCall(_Attention, Call):
    """A call of `tuner.attention`, with its tensors after autocast."""

    __slots__ = ()
    aligned = 4
    copied = "query", "key", "value"
    pytorch_aligns = True

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        tensors, mask = (self.query, self.key, self.value), self.operand
        return (*tensors, mask) if isinstance(mask, torch.Tensor) else tensors

    @property
    def tensors(self) -> Tensors:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def attended(self) -> Attended:
        """The call without its mask and its dropout."""
        query, key, value = self.tensors
        return Attended(query, key, value, self.is_causal, self.scale, self.extras)

    @property
    def arguments(self) -> Arguments:
        """Arguments of PyTorch's attention."""
        options = self.attn_mask, self.dropout_p, self.is_causal, self.scale, self.enable_gqa
        return self.query, self.key, self.value, *options

    @property
    def dispatched(self) -> DispatchedCall | None:
        """None also where `native.attend` must see each call: the dispatcher would hand an equal
        one to PyTorch's choice, whose gradients may be NaN.
        """
        if self.needs_lse or self.extras != NONE or finite_gradients.is_needed(*self.arguments):
            return None
        return "attention", self.arguments

    def refusal(self) -> Refusal | None:
        if self.dropout_p:
            return Refusal(Kind.DROPOUT)
        if self.attn_mask is not None:
            if isinstance(self.operand, Refusal):
                return self.operand
            if self._is_lower_right and not fills_the_gpu(self.query):
                return TOO_FEW_TILES
            if guards.wants_gradient(*self.inputs):
                return Refusal(Kind.GRADIENT, "tuned kernels have none for an attn_mask")
        return None if self.scale is None else guards.unscaled(self.scale)

    def kind(self) -> Hashable:
        query, key, value, _, _, is_causal, scale, enable_gqa, extras, mask, needs_lse = self
        options = is_causal, scale, enable_gqa, extras
        of_mask = (mask.dtype, steps_of(mask)) if isinstance(mask, torch.Tensor) else None
        kind = _kind(query, key, value, options, of_mask)
        return (kind, "log-sum-exp") if needs_lse else kind

    @property
    def _mask(self) -> torch.Tensor | None:
        """The mask operand; None without one."""
        return self.operand if isinstance(self.operand, torch.Tensor) else None

    def pose(self) -> Posed:
        causal, scale = self.is_causal, scale_of(self.query, self.scale)
        options = self.enable_gqa, self.extras
        posed = pose(*self.tensors, causal, scale, *options, mask=self._mask)
        return self.measurable(replace(posed, needs_lse=self.needs_lse))

    def pose_over(self, length: int) -> Posed:
        query, key, value = self.tensors
        query = torch.empty_strided(query.shape, query.stride(), dtype=query.dtype, device="meta")
        operand = self.operand
        if self.attn_mask is not None and isinstance(operand, torch.Tensor):
            operand = mask_over(self.attn_mask, operand, key.shape[2], length)
        key, value = over(key, length), over(value, length)
        return self._replace(query=query, key=key, value=value, operand=operand).pose()

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        inputs = self.inputs
        if self.operand is not None or not guards.wants_gradient(*inputs):
            return table.run(plan, *inputs)
        if self.value.shape[-1] != self.query.shape[-1]:
            return Refusal(Kind.GRADIENT, "values of another width have no backward kernel")
        if self.extras != NONE:
            return Refusal(
                Kind.GRADIENT, "PyTorch has no backward kernel for a window or a soft cap"
            )
        answer = writing_lse(self, plan)
        if isinstance(answer, Refusal):
            return answer
        if not answer.has_lse:
            return without_lse(answer)
        if not has_backward(self.query, self.key, self.is_causal):
            return Refusal(Kind.GRADIENT, "PyTorch has no fused backward kernel for such shapes")
        out: torch.Tensor = torch.ops.tuner.attention_with_lse(*inputs, self.is_causal, self.scale)[
            0
        ]
        return out

    def realigned(self) -> Self | None:
        copy, mask = Call.realigned(self), self._mask
        if mask is None or not handed_over.is_off(mask):
            return copy
        return (copy or self)._replace(operand=handed_over.copied(mask))

    @property
    def _is_lower_right(self) -> bool:
        """True if the window is `attn_mask`, a lower-right bias, and nothing else."""
        if self.attn_mask is None or self.operand is not None:
            return False
        return self.extras == Extras(right=self.key.shape[2] - self.query.shape[2])

    def by_pytorch(self) -> torch.Tensor:
        if self.extras == NONE or self._is_lower_right:
            return native.attend(*self.arguments)
        out: torch.Tensor = native.call(compose, *self.arguments, self.extras)
        return out


def _kind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Hashable, mask: Hashable
) -> tuple[Any, ...]:
    return (
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
        options,
        mask,
    )


def known(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """The short way of a plain call without gradients and mask that was made before, without the
    dispatcher: half the time of `serving.answer` and `native.attend`.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.

    Returns:
        A kernel's output; None where others must look.
    """
    tensors = query, key, value
    is_plain = type(query) is type(key) is type(value) is torch.Tensor
    if not is_plain or guards.wants_gradient(*tensors):
        return None
    if devices.is_autocast():
        return None
    try:
        kind = _kind(query, key, value, (is_causal, scale, enable_gqa, NONE), None)
        if guards.is_misaligned(tensors):
            return None
    except RuntimeError:  # sparse and nested tensors have no strides, a transform's no memory
        return None
    table.refresh(query)
    plan = table.get(kind)
    if not isinstance(plan, Plan):
        return None
    out = guards.unready(tensors) or table.run(plan, *tensors)
    return None if isinstance(out, Refusal) else out


def without_lse(plan: Plan) -> Refusal:
    """Refusal of a plan whose kernel writes no log-sum-exp."""
    return Refusal(Kind.GRADIENT, f"{plan.config.family} does not write the log-sum-exp")


def scale_of(query: torch.Tensor, scale: float | None) -> float:
    """The scale of the scores: 1/sqrt(D) when None."""
    return 1 / math.sqrt(query.shape[-1] or 1) if scale is None else float(scale)


def find_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = True,
    extras: Extras = NONE,
) -> Plan | Refusal:
    """Plan for attention of such tensors without a mask and for its log-sum-exp, or the reason why
    there is none.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.
        extras: window and soft cap.
    """
    call = AttentionCall(query, key, value, None, 0.0, is_causal, scale, enable_gqa, extras)
    return writing_lse(call, find(call))


def pose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
    enable_gqa: bool = True,
    extras: Extras = NONE,
    dtypes: Mapping[torch.dtype, DType] = guards.DTYPES,
    mask: torch.Tensor | None = None,
) -> Posed:
    """The problem that these tensors describe, and their strides.

    The problem has the nearest of the layouts, so the choice of a kernel does not depend on
    strides. The output has the order of ``torch.empty_like(query)``, as PyTorch's kernels write
    it. Keys and values that are expanded over all heads count as one head.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: (B, HKV, SKV, DV).
        is_causal: query i sees keys 0..i.
        scale: factor of the scores.
        enable_gqa: let HKV be a divisor of H.
        extras: window and soft cap.
        dtypes: types that kernels take, and their names in a problem.
        mask: operand as `as_operand` makes it; None: no mask.

    Raises:
        ConfigError: on types, sizes or strides that no tuned kernel supports.
    """
    if any(t.dim() != 4 or t.numel() == 0 for t in (query, key, value)):
        raise ConfigError("they are not 4-D (B, H, S, D), or are empty")
    guards.check_alike(query, key, value, dtypes=dtypes)
    if key.shape[:3] != value.shape[:3] or query.shape[::3] != key.shape[::3]:
        raise ConfigError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "are not (B, H, SQ, D), (B, HKV, SKV, D) and (B, HKV, SKV, DV)"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ConfigError("heads are grouped without enable_gqa")
    is_one_head = key.shape[1] > 1 and key.stride(1) == value.stride(1) == 0
    if is_one_head:
        key, value = key[:, :1], value[:, :1]
    problem = AttentionProblem(
        seqlen_q=query.shape[2],
        seqlen_kv=key.shape[2],
        head_dim=query.shape[3],
        batch=query.shape[0],
        heads_q=query.shape[1],
        heads_kv=key.shape[1],
        is_causal=bool(is_causal),
        dtype=dtypes[query.dtype],
        layout=_nearest_layout(query, key),
        window_left=extras.left,
        window_right=extras.right,
        softcap=extras.softcap,
        bias="" if mask is None or mask.dtype == torch.bool else axes_of(mask),
        mask="" if mask is None or mask.dtype != torch.bool else axes_of(mask),
        value_dim=value.shape[3],
    )
    problem = of_one_layer(problem, extras)
    *operands, out = problem.matrices
    strides: dict[str, tuple[int, ...]] = {}
    for operand, tensor in zip(operands, (query, key, value), strict=True):
        # Tensors of more heads than the operand's are for families that look at strides alone.
        if is_one_head or not guards.lies(tensor, operand.strides):
            strides[operand.name] = guards.along(operand, tensor.stride())
    if not guards.lies(query, operands[0].strides):
        strides[out.name] = guards.along(out, guards.dense(out.shape, query.stride()))
    if mask is not None and (masked := problem.mask_operand) is not None:
        steps = guards.along(masked, steps_of(mask))
        if steps != masked.strides:
            strides[masked.name] = steps
    return Posed(problem, scale, strides=strides)


def of_one_layer(problem: AttentionProblem, extras: Extras) -> AttentionProblem:
    """The problem of a call. In the mode of `tuner.deterministic` one of few keys, of which a
    window hides none, is of the layer of longer ones.
    """
    if extras.left < 0 or not invariance.is_on():
        return problem
    return problem.windowed(extras.left, extras.right)


def _nearest_layout(query: torch.Tensor, key: torch.Tensor) -> Layout:
    """Layout with the tensors' order of heads and tokens; a dimension of one has any order."""
    orders: list[Layout | Literal[""]] = []
    for tensor in (query, key):
        heads, tokens = tensor.stride()[1:3]
        is_either = 1 in tensor.shape[1:3]
        orders.append("" if is_either else "bshd" if heads < tokens else "bhsd")
    of_queries, of_keys = orders
    if of_queries == "bshd" and of_keys == "bhsd":
        return "bshd_bhsd"
    return of_queries or of_keys or "bhsd"
