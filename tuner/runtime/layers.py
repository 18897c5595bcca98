"""`tune_linear_`: make a model's linear layers call `tuner.linear`, and undo it.

Only the class of a layer changes, from `torch.nn.Linear` to `TunedLinear`, and from Transformers'
`FP8Linear` to `TunedFP8Linear`. Names, parameters,
hooks, flags, tied weights and shared layers stay. Nothing is tuned here: the problems of the layers
can be written to a file for ``tuner sweep --problems``. A layer whose problem was not tuned uses
PyTorch's kernel as before.
"""

from __future__ import annotations

import logging
import sys
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
from tuner.runtime.call import guards
from tuner.runtime.products.matmul import linear, pose

_log = logging.getLogger("tuner.runtime")

_FP8_MODULE = "transformers.integrations.finegrained_fp8"
"""Module of Transformers with the layers of fine-grained fp8."""


class TunedLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is skipped
    """A `torch.nn.Linear` that calls `tuner.linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N), as `torch.nn.Linear`."""
        if torch.jit.is_tracing():  # the trace would record a tuned kernel's output as a constant
            return super().forward(input)
        return linear(input, self.weight, self.bias)


@dataclass
class LinearCalls:
    """Calls of a model's linear layers."""

    problems: Counter[Problem] = field(default_factory=Counter)
    """Number of calls by problem, in the order of the problems' first calls."""
    others: Counter[str] = field(default_factory=Counter)
    """Number of calls without a problem, by reason."""

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
    """Names of the layers that now call `tuner.linear`."""
    left: Mapping[str, str]
    """Reasons of the linear layers that were not replaced, by name."""
    calls: LinearCalls
    """Calls of the linear layers in the runs of the examples."""


def tune_linear_(
    model: torch.nn.Module,
    examples: Iterable[Any] = (),
    *,
    problems: str | PathLike[str] | None = None,
) -> TunedLayers:
    """Make the linear layers of a model call `tuner.linear`; `restore_linear_` undoes it.

    Every `torch.nn.Linear` is replaced, the model itself included. So is every layer of
    Transformers' fine-grained fp8 with blocks of 128 x 128 and activations quantised at each call.
    Other layers are left: other classes (subclasses, other quantised layers), computed or non-plain
    weights, a replaced `forward`.

    The layers stay the same objects with the same parameters. So the state_dict's keys, copies and
    optimisers stay valid, and a second call changes nothing. A model pickled as a whole needs this
    package where it is loaded.

    PyTorch answers calls with autocast to another type, CPU tensors and untuned shapes. It also
    computes the layers in graphs of `torch.compile` and `torch.jit.trace`.

    Args:
        model: model to change in place, after the examples ran without an error.
        examples: inputs of runs before the change, in evaluation mode and without gradients. Each
            is a tuple of positional arguments, a mapping of keyword arguments, or the only
            argument. `linear_problems` records runs of your own instead.
        problems: file for the problems of the examples, for ``tuner sweep --problems``.

    Raises:
        ConfigError: when `examples` is a single example, or `problems` is given without examples.
        StoreError: when the file cannot be written.
    """
    if isinstance(examples, torch.Tensor | Mapping | str):
        kind = type(examples).__name__
        raise ConfigError(f"examples is one {kind} (allowed: a list of what each run is given)")
    with linear_problems(model) as calls, evaluated(model):
        count = 0
        for example in examples:
            run(model, example)
            count += 1
    if problems is not None:
        if not count:
            raise ConfigError(f"problems={problems} needs examples to run the model with")
        calls.write(problems)
    kinds = _kinds()
    tuned, apart = _sort_out(model, kinds)
    for reason in dict.fromkeys(apart.values()):
        names = [name for name in apart if apart[name] == reason]
        more = f" and {len(names) - 1} more" if names[1:] else ""
        _log.warning("tune_linear_ leaves %s%s alone: %s", names[0] or "the model", more, reason)
    _change({module: kinds[type(module)] for module in tuned.values()})
    return TunedLayers(tuple(tuned), apart, calls)


def restore_linear_(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `tune_linear_`: every layer is a `torch.nn.Linear` again.

    Returns:
        Names of the restored layers.

    Raises:
        TunerError: when something else has changed a layer since; names it. No layer is restored
            then.
    """
    before = {after: kind for kind, after in _kinds().items()}
    tuned: dict[str, tuple[torch.nn.Module, type[torch.nn.Module]]] = {}
    for name, module in model.named_modules():
        after = next((kind for kind in before if isinstance(module, kind)), None)
        if after is None:
            continue
        if reason := _held(module, after):
            raise TunerError(f"{name or 'the model'} cannot be restored: {reason}; undo that first")
        tuned[name] = module, after
    _change({module: before[after] for module, after in tuned.values()})
    return tuple(tuned)


@contextmanager
def linear_problems(model: torch.nn.Module) -> Iterator[LinearCalls]:
    """Record the calls of a model's linear layers: those that `tune_linear_` replaces or has
    replaced.

    Within the block the model runs without `torch.compile`. Tensors may lie on any device: the
    problems are those of the same call on a GPU.
    """
    calls = LinearCalls()

    def note(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        value = args[0] if args else options.get("input")
        calls._add(value, module.weight, module.bias)

    watched = [m for m in model.modules() if type(m) in (torch.nn.Linear, TunedLinear)]
    handles = []
    try:
        for module in watched:
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        # A graph that was compiled before does not call the hooks.
        with torch.compiler.set_stance("force_eager"):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluated(model: torch.nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode without gradients; restore each module's flag."""
    trained = [module for module in model.modules() if module.training]
    try:
        for module in trained:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True


def run(model: torch.nn.Module, example: Any) -> None:
    """Run a model with one example: a mapping, a tuple, or the only argument."""
    if isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, tuple):
        model(*example)
    else:
        model(example)


Kinds = Mapping[type[torch.nn.Module], type[torch.nn.Module]]
"""Classes of layers that are replaced, and what replaces them."""


def _kinds() -> Kinds:
    """As `Kinds`; those of Transformers where its module is imported, as it is for such a model."""
    kinds: dict[type[torch.nn.Module], type[torch.nn.Module]] = {torch.nn.Linear: TunedLinear}
    if _FP8_MODULE in sys.modules:
        from transformers.integrations.finegrained_fp8 import FP8Linear

        from tuner.runtime.engines.transformers_linear import TunedFP8Linear

        kinds[FP8Linear] = TunedFP8Linear
    return kinds


def _sort_out(
    model: torch.nn.Module, kinds: Kinds
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """The layers to replace, and reasons to leave the others, each by the layer's first name."""
    tuned: dict[str, torch.nn.Module] = {}
    apart: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) in kinds.values() or not _is_linear(module):
            continue
        if reason := _held(module, type(module) if type(module) in kinds else torch.nn.Linear):
            apart[name] = reason
        else:
            tuned[name] = module
    return tuned, apart


def _is_linear(module: torch.nn.Module) -> bool:
    """True when the module is a linear layer of any library: it has `in_features` and
    `out_features`. A wrapper has both also, but holds the layer as a child.
    """
    holds = any(type(child) in (torch.nn.Linear, TunedLinear) for child in module.children())
    return not holds and hasattr(module, "in_features") and hasattr(module, "out_features")


def _held(module: torch.nn.Module, kind: type[torch.nn.Module]) -> str:
    """Reason why a layer is not an unmodified `kind`; empty when it is one."""
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
    if kind in (torch.nn.Linear, TunedLinear):
        return ""
    from tuner.runtime.engines.transformers_linear import unserved

    return unserved(module)


def _change(kinds: Mapping[torch.nn.Module, type[torch.nn.Module]]) -> None:
    """Set the class of all modules, or of none if one fails."""
    changed: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []
    try:
        for module, kind in kinds.items():
            changed.append((module, type(module)))
            module.__class__ = kind
    except BaseException:
        for module, before in changed:
            module.__class__ = before
        raise
