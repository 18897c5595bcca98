"""Ranges of key lengths of a growing cache that one plan serves, and its launches over them.

In a generation the cache grows with every token. The launches differ in few numbers, sizes and
strides, each a linear function of the length: a base and a slope. So the dispatcher computes them,
and Python looks a plan up once for a block of lengths. A block has 64 lengths, or up to an eighth
of its shortest length if that is more.

A plan is looked up at both ends of a range and in its middle. It serves the range if every number
of its launches lies on one line there. Tests prove for the families here that the numbers then lie
on that line at every length.

The dispatcher counts calls of different lengths as one kind when their strides are equal or follow
from the sizes. `over` makes tensors of another length by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tuner.problem import AttentionProblem, Problem
from tuner.runtime.call.plan import KernelPlan

MIN_BLOCK = 64
"""Lengths in the smallest block."""

Line = tuple[int, int]
"""Base and slope of a launch's number: base + slope * length."""
WireStep = tuple[int, tuple[tuple[int, Line], ...], tuple[Line, ...], tuple[float, ...], int]
"""A step in the dispatcher's form:

- address of the launch function;
- for each tensor the index of the call's address and the offset in bytes;
- integers;
- scalars;
- offset in the workspace, bytes."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Launches of a plan at all lengths from `first` to `last`."""

    first: int
    last: int
    steps: tuple[WireStep, ...]


def grows(problem: Problem) -> bool:
    """True when the keys are a cache whose length changes from call to call."""
    return isinstance(problem, AttentionProblem) and problem.seqlen_q != problem.seqlen_kv


def block(length: int, width: int = 0) -> tuple[int, int]:
    """First and last length of the block that holds `length`.

    Args:
        length: keys, at least 1.
        width: lengths in a block; 0: chosen by the length.
    """
    width = width or max(MIN_BLOCK, 1 << max(0, length.bit_length() - 4))
    first = length // width * width
    return max(1, first), first + width - 1


def between(length: int, decided: Iterable[int], width: int = 0) -> tuple[int, int]:
    """The part of the block of `length` without the other lengths in `decided`."""
    first, last = block(length, width)
    for other in decided:
        if other < length:
            first = max(first, other + 1)
        elif other > length:
            last = min(last, other - 1)
        else:
            return length, length
    return first, last


def constant(plan: KernelPlan) -> tuple[WireStep, ...]:
    """A plan's launches as constants, equal at every length."""
    return _lines(((0, plan),)) or ()


def over(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Meta tensor of keys or values of another length that the dispatcher counts as the same kind.

    Args:
        tensor: (B, HKV, SKV, D).
        length: keys in place of SKV.
    """
    batch, heads, rows, width = tensor.shape
    strides = tensor.stride()
    if strides == (heads * rows * width, rows * width, width, 1):  # as (B, H, S, D)
        strides = heads * length * width, length * width, width, 1
    elif strides == (heads * rows * width, width, heads * width, 1):  # as (B, S, H, D)
        strides = heads * length * width, width, heads * width, 1
    shape = batch, heads, length, width
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


def served(
    plan: KernelPlan,
    length: int,
    ends: tuple[int, int],
    resolved: Callable[[int], KernelPlan | None],
) -> Lengths | None:
    """The plan's launches over a range of lengths, or None when it serves only its own length.

    Args:
        plan: plan for `length`.
        length: keys of its problem.
        ends: first and last length of the range.
        resolved: function that gives the plan of another length, None if its config is another.
    """
    first, last = ends
    if first == last:
        return None
    plans = {length: plan}
    for other in (first, last, (first + last) // 2):
        neighbour = plans.get(other) or resolved(other)
        if neighbour is None:
            return None
        plans[other] = neighbour
    steps = _lines(sorted(plans.items()))
    return None if steps is None else Lengths(first, last, steps)


def _lines(plans: Sequence[tuple[int, KernelPlan]]) -> tuple[WireStep, ...] | None:
    """The steps of plans as linear functions of the length; None when one is not linear."""
    if len({_shape(plan) for _, plan in plans}) > 1:
        return None
    lengths = [length for length, _ in plans]
    steps: list[WireStep] = []
    for each in zip(*(plan.steps for _, plan in plans), strict=True):
        if len({(s.kernel.address, s.scalars, s.workspace_at) for s in each}) > 1:
            return None
        if len({tuple(which for which, _ in s.tensors) for s in each}) > 1:
            return None
        offsets = _fit(lengths, [[at for _, at in s.tensors] for s in each])
        integers = _fit(lengths, [s.integers for s in each])
        if offsets is None or integers is None:
            return None
        one = each[0]
        tensors = zip((which for which, _ in one.tensors), offsets, strict=True)
        steps.append((one.kernel.address, tuple(tensors), integers, one.scalars, one.workspace_at))
    return tuple(steps)


def _shape(plan: KernelPlan) -> Any:
    """Parts of a plan that must be equal at every length."""
    counts = tuple((len(step.tensors), len(step.integers)) for step in plan.steps)
    return plan.shape, plan.strides, plan.workspace_bytes, counts


def _fit(lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> tuple[Line, ...] | None:
    """For each column, the line through its values at these ascending lengths; None when one is not
    a line of whole numbers.
    """
    fitted: list[Line] = []
    for values in zip(*rows, strict=True):
        slope, offset = 0, 0
        if len(lengths) > 1:
            slope, offset = divmod(values[-1] - values[0], lengths[-1] - lengths[0])
        base = values[0] - slope * lengths[0]
        on_line = (base + slope * x == y for x, y in zip(lengths, values, strict=True))
        if offset or not all(on_line):
            return None
        fitted.append((base, slope))
    return tuple(fitted)
