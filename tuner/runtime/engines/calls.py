"""Calls of an engine's attention layers, and the choice of a kernel once a step.

Nothing here imports an engine. A *step* is one metadata object of the engine: all layers of a kind
share its table, lengths and choices. A *form* is the options of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

import torch

from tuner import settings
from tuner.errors import ConfigError
from tuner.problem import E4M3, AttentionProblem
from tuner.runtime.attention.composed import Extras
from tuner.runtime.attention.paged import PagedCall, paged_call, prepare
from tuner.runtime.attention.paged_arguments import checked
from tuner.runtime.attention.paged_composed import output_type
from tuner.runtime.call import counters, devices, guards, invariance, proven_kernels
from tuner.runtime.call.plan import KernelPlan
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.table import table
from tuner.selection.engine_ratios import is_wide_chunk

_ROUNDED = 16
"""Values between two powers of two that longest lengths are rounded up to, at most; this limits the
number of sized plans."""


class ServingEngine(NamedTuple):
    """An engine's name, and what follows from it."""

    name: str

    @property
    def others(self) -> str:
        """Name of the kernel that answers refused calls."""
        return f"{self.name}'s own FlashAttention"

    @property
    def setting(self) -> str:
        """Variable that limits the queries of a sequence."""
        return f"TUNER_{self.name.upper()}_QUERIES"


class CacheLayout(NamedTuple):
    """How an engine's cache holds its keys and values, in one tensor or in two."""

    pages: Callable[..., tuple[torch.Tensor, torch.Tensor] | None]
    """Keys and values (pages, page size, HKV, D), as views of the cache; None where the cache lies
    in an unknown way."""
    starts: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Tensors that begin at the first key and at the first value."""


@dataclass(slots=True)
class EngineStep:
    """One metadata object of the engine."""

    engine: ServingEngine
    table: torch.Tensor
    """int32 (B, columns): pages of each sequence."""
    used: torch.Tensor
    """int32 (B,): keys of each sequence."""
    starts: torch.Tensor
    queries: int
    """Queries of the longest sequence."""
    keys: int
    """Keys of the longest sequence, or more."""
    is_causal: bool
    refusal: Refusal | None
    """Reason why no layer of the step is served."""
    is_captured: bool = False
    """True for a graph that serves all shorter lengths, too."""
    decisions: dict[Any, KernelPlan | Refusal] = field(default_factory=dict)
    refusals: dict[Any, Refusal] = field(default_factory=dict)
    """Reasons why the engine answers layers of a kind."""
    served: int = 0
    refused: int = 0


class Form(NamedTuple):
    """The options of a layer."""

    scale: float
    extras: Extras
    sinks: torch.Tensor | None
    """fp32 (H,)."""
    layout: CacheLayout
    scales: tuple[torch.Tensor, ...] = ()
    """Factors of e4m3 queries, keys and values: fp32 (H,), (HKV,) and (HKV,)."""


def rounded(keys: int, room: int) -> int:
    """`keys` rounded up to a step of `_ROUNDED`, to `room` at most."""
    width = max(1, (1 << max(0, keys - 1).bit_length()) // _ROUNDED)
    return min(room, -(-keys // width) * width)


def run(
    step: EngineStep,
    form: Form,
    kind: Any,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> bool:
    """Write a layer's output by a tuned kernel; False and a counted reason when there is none.

    Args:
        step: the call's step.
        form: the layer's options.
        kind: key, equal for layers with equal forms.
        query: (tokens or more, H, D).
        cache: the engine's, with the step's keys and values, as the form's layout takes it.
        out: (tokens or more, H, D), contiguous.
    """
    decision = decide(step, form, kind, query, cache, out)
    if isinstance(decision, KernelPlan):
        keys, values = form.layout.starts(*cache)
        if guards.is_misaligned((query, keys, values, out)):
            decision = Refusal(Kind.MISALIGNED)
        else:
            inputs = query, keys, values, step.table, step.used, step.starts
            extra = () if form.sinks is None else (form.sinks,)
            answer = table.run_into(decision, out, None, *inputs, *extra, *form.scales)
            if not isinstance(answer, Refusal):
                step.served += 1
                return True
            decision = step.refusal = answer  # the next step looks up again
    else:
        step.refusals[kind] = decision
    refuse(decision, step)
    return False


def decide(
    step: EngineStep,
    form: Form,
    kind: Any,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> KernelPlan | Refusal:
    """The loaded kernel that serves a call, or the reason why none does.

    Arguments are as of `run`; the tensors' contents are not read.
    """
    key = kind, *_lies(query), *map(_lies, cache), *_lies(out)
    decision = step.decisions.get(key)
    if decision is None:
        decision = step.decisions[key] = _decided(step, form, query, cache, out)
    return decision


def refuse(reason: Refusal, step: EngineStep) -> None:
    """Count a call that the engine answers itself.

    Raises:
        NotInvariantError: in the mode of `tuner.deterministic`.
    """
    invariance.forbid(reason.reason)
    step.refused += 1
    counters.count_fallback(reason.reason, step.engine.others)


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _decided(
    step: EngineStep,
    form: Form,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> KernelPlan | Refusal:
    if step.refusal is not None:
        return step.refusal
    pages = form.layout.pages(*cache)
    if pages is None:
        return Refusal(Kind.CACHE_LAYOUT, f"{tuple(cache[0].shape)}")
    dtype = pages[0].dtype
    if dtype != query.dtype:
        return Refusal(Kind.CACHE_TYPE, f"{dtype}, {query.dtype}")
    if (limit := max_queries(step.engine.setting)) is not None and step.queries > limit:
        return Refusal(Kind.QUERIES, f"{step.engine.setting}={limit}")
    like = query.shape, output_type(query)
    if (out.shape, out.dtype) != like or not out.is_contiguous():
        return Refusal(Kind.TENSORS, f"output {out.dtype} {tuple(out.shape)}")
    try:
        call = _call(step, form, query, *pages)
        is_all = limit is not None or invariance.is_on()
        refusal = None if is_all else engines_own(call, step.is_captured)
    except ConfigError as exc:
        return Refusal(Kind.TENSORS, str(exc))
    except proven_kernels.FAULTS as exc:
        return proven_kernels.damaged(call.pose().problem, exc)
    return prepare(call) if refusal is None else refusal


def engines_own(call: PagedCall, is_captured: bool) -> Refusal | None:
    """The reason why the engine's own kernel answers a call faster, by measured ratios; else None.

    Kinds of calls that were not measured are tuned kernels', but for e4m3 and for prompts above
    D = 64.

    Args:
        call: a layer's call.
        is_captured: as of `EngineStep`.

    Raises:
        ConfigError: on types or sizes that no tuned kernel supports.
        StoreError: when a shipped portfolio is damaged.
    """
    problem = call.pose().problem
    assert isinstance(problem, AttentionProblem)
    gpu = devices.gpu_of(call.query.get_device())
    if (is_engines := proven_kernels.is_engines(problem, gpu, is_captured)) is not None:
        return Refusal(Kind.ENGINES, problem.label()) if is_engines else None
    if problem.dtype == E4M3:
        return Refusal(Kind.SLOW_TYPE, E4M3)
    if is_wide_chunk(problem):
        return Refusal(Kind.SLOW_CHUNKS, f"D={problem.head_dim}")
    return None


def _call(
    step: EngineStep, form: Form, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> PagedCall:
    """The call of a layer.

    Raises:
        ConfigError: on tensors that no tuned kernel takes.
    """
    longest = rounded(step.keys, step.table.shape[1] * keys.shape[1])
    of_step = step.table, step.used, step.starts
    checked(query, keys, values, *of_step, form.sinks, step.queries, longest)
    tensors = query, keys, values, *of_step, form.sinks
    options = step.is_causal, form.extras, form.scale
    call = paged_call(*tensors, step.queries, longest, *options)
    return call._replace(descales=form.scales)


@cache
def max_queries(setting: str) -> int | None:
    """An engine's setting, read once.

    Raises:
        ConfigError: when it is out of range.
    """
    return settings.max_queries(setting)


def masks(metadata: Any, read: frozenset[str]) -> list[str]:
    """Fields of a step's metadata that may be masks: set, and not among those that are `read`."""
    return [
        name
        for name, default in _others(metadata.__class__, read)
        if (value := getattr(metadata, name)) is not None
        and value is not default
        and (isinstance(value, torch.Tensor) or value != default)
    ]


@cache
def _others(kind: type, read: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(kind) if field.name not in read)
