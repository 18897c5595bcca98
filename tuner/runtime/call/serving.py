"""The steps of every call: guards, key, table, alignment, launch. PyTorch answers the others.

Each operation of the runtime has one class of `Call`, a `NamedTuple`: one is made for every call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch

from tuner import settings
from tuner.errors import ConfigError
from tuner.runtime.call import counters, dispatch, guards, handed_over, invariance
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.table import DispatchedCall, table

_WHEREVER_THEY_LIE = frozenset({Kind.MISS, Kind.PORTFOLIO, Kind.TIMED, Kind.VENDOR})
"""Reasons that hold for copies of a call's tensors, too."""


class PlannedCall(ABC):
    """Tensors and options of one call that a plan is looked up for."""

    __slots__ = ()
    aligned: ClassVar[int]
    """Number of leading `inputs` whose addresses must be multiples of 16 bytes."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Input tensors of a kernel, in the order of the problem's operands."""

    @property
    def dispatched(self) -> DispatchedCall | None:
        """The call in the C++ dispatcher's form; None: the dispatcher has no such operation."""
        return None

    def refusal(self) -> Refusal | None:
        """Reason why no kernel of any store takes the call; else None."""
        return None

    @abstractmethod
    def kind(self) -> Hashable:
        """Key of the call: calls with equal keys have equal problems and share a plan."""

    def key(self, *options: Hashable) -> Hashable:
        """A `kind` made of the inputs' sizes, strides, types and devices, and of `options`."""
        tensors = [(t.shape, t.stride(), t.dtype, t.device) for t in self.inputs]
        return type(self), options, *tensors

    @abstractmethod
    def pose(self) -> Posed:
        """The problem of the call.

        Raises:
            ConfigError: when no tuned kernel supports such types, sizes or strides.
        """

    def pose_over(self, length: int) -> Posed:
        """As `pose`, over a cache of another length that the dispatcher counts as the same kind.

        Args:
            length: keys of the cache.

        Raises:
            ConfigError: when the operation has no growing cache.
        """
        raise ConfigError(f"{type(self).__name__} has no cache")


class Call(PlannedCall):
    """A call that PyTorch answers where no plan does."""

    __slots__ = ()
    copied: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that are copied where they are not aligned."""
    pytorch_aligns: ClassVar[bool] = False
    """True if `by_pytorch` copies them itself."""

    def measurable(self, posed: Posed) -> Posed:
        """The problem with a function that times the call, if ``TUNER_BENCHMARK`` is set."""
        inputs = self.inputs
        if (
            not settings.benchmark()
            or invariance.is_on()
            or inputs[0].is_meta
            or guards.wants_gradient(*inputs)
        ):
            return posed
        return replace(posed, run=self._timed)

    def _timed(self, plan: Plan | None) -> torch.Tensor:
        """One uncounted call by a plan, or by PyTorch for None."""
        with torch.no_grad():
            return self.by_pytorch() if plan is None else plan.run_uncounted(*self.inputs)

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        """The plan's output, or the reason why it cannot serve this call."""
        return table.run(plan, *self.inputs)

    def realigned(self) -> Self | None:
        """The call on aligned copies of `copied`; None where none is needed."""
        tensors = [getattr(self, name) for name in self.copied]
        if all(map(handed_over.is_aligned, tensors)):
            return None
        copies = dict(zip(self.copied, handed_over.aligned(*tensors), strict=True))
        return cast(Self, self._replace(**copies))  # type: ignore[attr-defined]

    @abstractmethod
    def by_pytorch(self) -> Any:
        """PyTorch's answer to the call."""


def serve(call: Call) -> torch.Tensor:
    """The output of a call, by a tuned kernel or by PyTorch; by PyTorch in a torch.compile graph.

    Raises:
        PyTorch's errors for arguments that it refuses, and CUDA errors of earlier kernels.
    """
    if torch.compiler.is_compiling():
        invariance.forbid("a graph of torch.compile has PyTorch's operations")
        out: torch.Tensor | None = None
    else:
        out = answer(call)
    return call.by_pytorch() if out is None else out


def answer(call: Call) -> torch.Tensor | None:
    """A tuned kernel's output, or None and a counted reason when PyTorch must answer.

    Attention of tensors that are not aligned is answered from copies, if need be by PyTorch.

    Args:
        call: its tensors may be any.
    """
    inputs = call.inputs
    generation = table.refresh(inputs[0])
    plan = _find(call, inputs)
    out = plan if isinstance(plan, Refusal) else call.run(plan)
    if not isinstance(out, Refusal):
        return out
    if call.copied and not (call.pytorch_aligns and out.kind in _WHEREVER_THEY_LIE):
        copy = call.realigned() if handed_over.is_checked(*inputs) else None
        if copy is not None:
            return serve(copy)
    if invariance.was_on:
        invariance.forbid(out.reason, inputs[0])
    if (dispatched := call.dispatched) is None:
        counters.count_fallback(out.reason)
    else:
        dispatch.refuse(*dispatched, out, generation)
    return None


def find(call: PlannedCall) -> Plan | Refusal:
    """The plan that serves a call, or the reason why there is none; runs and counts nothing.

    The store is checked for changes, if that is due. Gradients and autocast are not checked here,
    but in `Call.run`.
    """
    inputs = call.inputs
    table.refresh(inputs[0])
    plan = _find(call, inputs)
    if isinstance(plan, Refusal) and invariance.was_on:
        invariance.forbid(plan.reason)
    return plan


def writing_lse(call: Any, plan: Plan | Refusal) -> Plan | Refusal:
    """The plan of a call; in place of a peer's, which writes no log-sum-exp, the next answer's.

    Args:
        call: a call with a field `needs_lse`.
        plan: result of `find`.
    """
    is_peers = isinstance(plan, Plan) and not plan.has_lse and plan.owner not in ("", "pytorch")
    return find(call._replace(needs_lse=True)) if is_peers else plan


def _find(call: PlannedCall, inputs: tuple[torch.Tensor, ...]) -> Plan | Refusal:
    """As `find`, after a look at the store. A refused kind needs no look at torch's state."""
    refusal = guards.unplain(inputs) or call.refusal()
    if refusal is not None:
        return refusal
    kind = call.kind()
    plan = table.get(kind)
    refusal = plan if isinstance(plan, Refusal) else guards.unready(inputs)
    if refusal is not None:
        return refusal
    if plan is None:
        device = inputs[0].get_device()
        plan = table.find_out(kind, call.dispatched, call.pose, device, call.pose_over)
    if not isinstance(plan, Refusal) and guards.is_misaligned(inputs[: call.aligned]):
        return Refusal(Kind.MISALIGNED)
    return plan
