"""Trials for a kernel's proof: problems drawn by a seed from its whole domain, with planted edge
cases.

Sizes, strides and head counts are launch arguments, so a kernel's domain covers all of them. Each
*axis* has values at which errors are likely:

- attention: one query, one key, lengths beside a tile's edge
- heads: dimensions below the compiled one, odd counts, every legal ratio; the most splits
- gradients of attention: as attention
- products: one row, extents beside a tile's edge, odd multiples of the alignment, a vocabulary's
  columns, rows that lie apart
- grouped products: one group, more than a warp's lanes and than rows, groups of unlike rows, empty
  ones

Each value is in at least one trial, and the other values are drawn. A trial is bounded in memory
and time.
"""

from __future__ import annotations

import importlib
import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families.base import Family, Strides
from tuner.families.target import Target
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem

MAX_FLOPS = 1 << 32
"""Maximum FLOPs of a trial's problem without its mask. The fp64 reference takes four times as
many."""
MAX_BYTES = 96 << 20
"""Maximum bytes of a trial's operands, and of the outputs of its splits."""
MAX_MASK_PAIRS = 1 << 23
"""Maximum queries times keys of all block-sparse masks of a trial, which the host draws."""
MAX_ATTEMPTS = 1000
"""Draws of which the first that is legal becomes a trial."""
#: Values to try of a run-time parameter whose domain is a range, beside its last.
_OF_RANGE = (1, 2, 3, 7, 16, 17, 64)

Fact = tuple[str, Hashable]
"""Value on an axis."""


@dataclass(frozen=True)
class Trial:
    """Problem, config of the kernel's call, and whether the optional output is requested."""

    problem: Problem
    config: Config
    with_lse: bool = False
    """True if attention's log-sum-exp is requested."""
    apart: tuple[int, int] = (0, 0)
    """Padding elements between the rows of a GEMM's A, and between those of its weights."""

    @property
    def strides(self) -> Strides:
        """Strides of the tensors that differ from the problem's."""
        given_strides = {}
        for operand, apart in zip(self.problem.operands, self.apart, strict=False):
            if apart:
                row = sorted(operand.strides)[1]
                given_strides[operand.name] = tuple(
                    row + apart if stride == row else stride for stride in operand.strides
                )
        return given_strides

    def label(self) -> str:
        """Short description."""
        runtime = ",".join(f"{k}={v}" for k, v in sorted(self.config.params.items()))
        more = " and log-sum-exp" * self.with_lse
        more += f", rows {self.apart} apart" if any(self.apart) else ""
        return f"{self.problem.label()} with {runtime}{more}"


class Draw(ABC):
    """Draws trials of one kernel."""

    axes: dict[str, Sequence[Any]]

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        self._target, self._gpu, self._rng = target, gpu, rng
        family = self._family = target.family
        names = family.runtime_parameters
        compiled = {k: v for k, v in target.config.params.items() if k not in names}
        self._compiled = Config(target.config.family, compiled, target.config.stages)

    def one(self, planted: Mapping[str, Any]) -> Trial | None:
        """Trial with given values on some axes; None if none was found."""
        for _ in range(MAX_ATTEMPTS):
            values = {**{name: self._value(name) for name in self.axes}, **planted}
            if (trial := self._trial(values, planted)) is not None:
                return trial
        return None

    @abstractmethod
    def facts(self, trial: Trial) -> set[Fact]:
        """Values of a trial on each axis."""

    @abstractmethod
    def _value(self, name: str) -> Any:
        """Draw a value of an axis."""

    @abstractmethod
    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        """Trial of these values; None if they cannot be combined."""

    def _config(self, problem: Problem, schedule: Sequence[tuple[str, Value]]) -> Config | None:
        """Config of the kernel for a problem; None if it belongs to another kernel or is not
        legal.
        """
        family, config = self._family, self._carried(problem)
        if config is None:
            return None
        config = Config(config.family, {**config.params, **dict(schedule)}, config.stages)
        if family.violations(problem, config, self._gpu):
            return None
        return config if family.kernels(problem, config) == self._target.kernels else None

    def _carried(self, problem: Problem) -> Config | None:
        """Config of the compiled kernel for a problem, without run-time parameters."""
        moved = self._family.scheduled(problem, self._compiled, self._gpu)
        names = self._family.runtime_parameters
        for config in moved:
            params = {name: value for name, value in config.params.items() if name not in names}
            return Config(config.family, params, config.stages)
        return None


def is_small(problem: Problem, schedule: Sequence[tuple[str, Value]]) -> bool:
    """True within `MAX_FLOPS`, `MAX_BYTES` and `MAX_MASK_PAIRS`."""
    if isinstance(problem, AttentionProblem) and problem.block_mask:
        batches, heads, *_ = problem.block_shape
        if batches * heads * problem.seqlen_q * problem.seqlen_kv > MAX_MASK_PAIRS:
            return False
    splits = int(dict(schedule).get("splits", 1))
    partial = 4 * splits * problem.output.elements if splits > 1 else 0
    operands = sum(operand.bytes for operand in problem.operands)
    return problem.flops <= MAX_FLOPS and operands + partial <= MAX_BYTES


def edges(tile: int) -> list[int]:
    """One, and the lengths beside the edges of a tile."""
    near = (tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 1, 5 * tile)
    return sorted({1, *(length for length in near if length > 0)})


def schedules(family: Family) -> Iterator[tuple[tuple[str, Value], ...]]:
    """Every setting of the run-time parameters to try, legal for some problem or not."""
    pools: list[list[Value | None]] = []
    names = sorted(family.runtime_parameters)
    for name in names:
        domain = family.domains[name]
        known: Sequence[Value] = domain
        if isinstance(domain, range):
            known = sorted({value for value in (*_OF_RANGE, domain[-1]) if value in domain})
        pools.append([*known, *([None] if name in family.optional else [])])
    for values in product(*pools):
        named = zip(names, values, strict=True)
        yield tuple((name, value) for name, value in named if value is not None)


def schedule_of(family: Family, config: Config) -> tuple[tuple[str, Value], ...]:
    """Run-time parameters of a config, by name."""
    names = sorted(family.runtime_parameters & config.params.keys())
    return tuple((name, config[name]) for name in names)


def trials(target: Target, gpu: Gpu, count: int, seed: int) -> list[Trial]:
    """At least `count` trials of a kernel; more if the planted values need them.

    Args:
        target: kernel to prove.
        gpu: GPU that it runs on.
        count: minimum number of trials.
        seed: random seed; equal seeds draw equal trials.
    """
    draw = draw_of(target, gpu, seed)
    drawn: dict[Trial, None] = {}
    facts: set[Fact] = set()
    for name, values in draw.axes.items():
        for value in values:
            if (name, value) not in facts and (trial := draw.one({name: value})) is not None:
                drawn[trial] = None
                facts |= draw.facts(trial)
    for _ in range(MAX_ATTEMPTS):
        if len(drawn) >= count:
            break
        if (trial := draw.one({})) is not None:
            drawn[trial] = None
    return list(drawn)


def draw_of(target: Target, gpu: Gpu, seed: int) -> Draw:
    """Draw of a kernel's trials; arguments as of `trials`.

    Raises:
        ConfigError: when its family has no draws.
    """
    module, _, name = target.family.proof_draws.partition(":")
    if not name:
        raise ConfigError(f"{target.family.name} has no trials (wanted: Family.proof_draws)")
    kind: type[Draw] = getattr(importlib.import_module(f"tuner.families.{module}"), name)
    # Equal for both types, so that a failure in one can be compared with the other.
    return kind(target, gpu, random.Random(f"{seed}:{target.config.digest}"))
