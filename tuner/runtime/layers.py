"""`tune_linear_`: a model whose linear layers call `tuner.linear`, and the way back.

A layer stays the object that it is. Its class alone changes, from `torch.nn.Linear` to
`TunedLinear`, so that names, parameters, hooks, flags, tied weights and shared layers are never
touched, and what undoes it has nothing to remember. Tuning is no part of it: the problems that the
layers pose are written down for ``tuner sweep --problems``, and a layer whose problem nobody tuned
computes what it did before, by PyTorch's kernel.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parametrize

from tuner.base import output
from tuner.errors import ConfigError, TunerError
from tuner.problem import Problem, listing
from tuner.runtime import guards
from tuner.runtime.products import linear, pose

_log = logging.getLogger("tuner.runtime")


class TunedLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is skipped
    """A `torch.nn.Linear` that calls `tuner.linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N), as `torch.nn.Linear`."""
        if torch.jit.is_tracing():  # a tuned kernel's output would be taken for a constant
            return super().forward(input)
        return linear(input, self.weight, self.bias)


@dataclass
class LinearCalls:
    """Calls of a model's linear layers."""

    problems: Counter[Problem] = field(default_factory=Counter)
    """Calls by the problem that they pose, in the order in which those first came."""
    others: Counter[str] = field(default_factory=Counter)
    """Calls that pose none, by the reason."""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the problems as a list for ``tuner sweep --problems``.

        Raises:
            StoreError: when the file cannot be written.
        """
        output.write(Path(path), listing(self.problems))

    def _add(self, input: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        tensors = (input, weight) if bias is None else (input, weight, bias)
        if refusal := guards.unplain(tensors) or guards.recast(input):
            self.others[refusal.reason] += 1
            return
        try:
            self.problems[pose(input, weight.t(), bias).problem] += 1
        except ConfigError as exc:
            self.others[str(exc)] += 1


@dataclass(frozen=True)
class TunedLayers:
    """Result of `tune_linear_`."""

    replaced: tuple[str, ...]
    """Names of the layers that call `tuner.linear` from now on."""
    left: Mapping[str, str]
    """Names of linear layers that stay as they are, each with the reason."""
    calls: LinearCalls
    """Calls of the linear layers that the examples made."""


def tune_linear_(
    model: torch.nn.Module,
    examples: Iterable[Any] = (),
    *,
    problems: str | PathLike[str] | None = None,
) -> TunedLayers:
    """Have the linear layers of a model call `tuner.linear`; `restore_linear_` undoes it.

    Replaced is every `torch.nn.Linear`, the model itself if it is one. Left alone are layers of
    other classes (subclasses, quantised ones), and those whose weight is computed or no plain
    tensor, or whose `forward` was replaced. The layers stay the same objects with the same
    parameters, so that the state_dict's keys, copies and optimisers stay what they were; a second
    call finds nothing to do. A model pickled as a whole needs this package where it is loaded.

    Gradients, autocast to another type, CPU tensors and shapes without a tuned kernel are
    PyTorch's, and so is what `torch.compile` and `torch.jit.trace` make of the layers.

    Args:
        model: changed in place, when all else went well.
        examples: what the model is run with before, in evaluation mode and without gradients: of
            each run a tuple of positional arguments, a mapping of keyword arguments, or the only
            argument. `linear_problems` watches runs of one's own instead.
        problems: a file to write the problems of the examples to, for ``tuner sweep --problems``.

    Raises:
        ConfigError: when `examples` is an example itself, or there is none to write problems of.
        StoreError: when the file cannot be written.
    """
    if isinstance(examples, torch.Tensor | Mapping | str):
        kind = type(examples).__name__
        raise ConfigError(f"examples is one {kind} (allowed: a list of what each run is given)")
    with linear_problems(model) as calls, _evaluated(model):
        count = 0
        for example in examples:
            _run(model, example)
            count += 1
    if problems is not None:
        if not count:
            raise ConfigError(f"problems={problems} needs examples to run the model with")
        calls.write(problems)
    chosen, left = _sort_out(model)
    for reason in dict.fromkeys(left.values()):
        names = [name for name in left if left[name] == reason]
        more = f" and {len(names) - 1} more" if names[1:] else ""
        _log.warning("tune_linear_ leaves %s%s alone: %s", names[0] or "the model", more, reason)
    _change(chosen.values(), TunedLinear)
    return TunedLayers(tuple(chosen), left, calls)


def restore_linear_(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `tune_linear_`: every layer is a `torch.nn.Linear` again.

    Returns:
        Names of the layers that were changed back.

    Raises:
        TunerError: when something else took hold of a layer meanwhile; names it. Nothing is
            changed then.
    """
    tuned = {name: m for name, m in model.named_modules() if isinstance(m, TunedLinear)}
    for name, module in tuned.items():
        if reason := _held(module, TunedLinear):
            raise TunerError(f"{name or 'the model'} cannot be restored: {reason}; undo that first")
    _change(tuned.values(), torch.nn.Linear)
    return tuple(tuned)


@contextmanager
def linear_problems(model: torch.nn.Module) -> Iterator[LinearCalls]:
    """Note what a model's linear layers are called with: those that `tune_linear_` replaces, or
    has replaced.

    The model runs as it does without `torch.compile` meanwhile. Of tensors on any device the
    problems are those that a GPU would be asked for.
    """
    calls = LinearCalls()

    def note(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = args[0] if args else options.get("input")
        calls._add(given, module.weight, module.bias)

    watched = [m for m in model.modules() if type(m) in (torch.nn.Linear, TunedLinear)]
    handles = []
    try:
        for module in watched:
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        # A graph that was compiled before does not know of the hooks.
        with torch.compiler.set_stance("force_eager"):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluated(model: torch.nn.Module) -> Iterator[None]:
    """The model as for inference; each module's flag is as it was afterwards."""
    trained = [module for module in model.modules() if module.training]
    try:
        for module in trained:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True


def _run(model: torch.nn.Module, example: Any) -> None:
    if isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, tuple):
        model(*example)
    else:
        model(example)


def _sort_out(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """The layers to replace, and the reasons of the others, by their first names."""
    chosen: dict[str, torch.nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is TunedLinear or not _is_linear(module):
            continue
        if reason := _held(module, torch.nn.Linear):
            left[name] = reason
        else:
            chosen[name] = module
    return chosen, left


def _is_linear(module: torch.nn.Module) -> bool:
    """True when it is a linear layer of any make: those of quantising libraries, too, tell both
    sizes; so do wrappers of a layer, which are judged by what they hold.
    """
    holds = any(type(child) in (torch.nn.Linear, TunedLinear) for child in module.children())
    return not holds and hasattr(module, "in_features") and hasattr(module, "out_features")


def _held(module: torch.nn.Module, kind: type[torch.nn.Module]) -> str:
    """Why a layer is not simply a `kind`; empty where it is."""
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    if type(module) is not kind:
        return f"it is a {type(module).__module__}.{type(module).__qualname__}"
    if "forward" in vars(module):
        return "its forward was replaced"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"its {name} is computed before each call"
        tensor = module._parameters[name]
        if tensor is not None and type(tensor) is not torch.nn.Parameter:
            return f"its {name} is a {type(tensor).__name__}"
    return ""


def _change(modules: Iterable[torch.nn.Module], kind: type[torch.nn.Module]) -> None:
    """Give modules another class: all of them or none."""
    changed: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []
    try:
        for module in modules:
            changed.append((module, type(module)))
            module.__class__ = kind
    except BaseException:
        for module, before in changed:
            module.__class__ = before
        raise
