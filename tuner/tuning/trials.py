"""Problems that a kernel is proven on: drawn by a seed from all of its domain, edges planted.

Sizes, strides and counts of heads are arguments of a launch, so a kernel's domain is all of them.
Each *axis* has values that errors hide at: one query, one key, lengths beside a tile's edge, head
dimensions below the compiled one, odd counts of heads, every legal ratio of heads, the most splits.
Each value is in one trial at least; the others are drawn. A trial is bounded in memory and time.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from tuner.config import Config, Value
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.problem import LAYOUTS, AttentionProblem
from tuner.problem.attention import MAX_HEAD_DIM, Axes
from tuner.selection.kernels import Target

MAX_FLOPS = 1 << 32
"""Of a trial's problem without its mask: its reference in fp64 takes four passes of as many."""
MAX_BYTES = 96 << 20
"""Of a trial's operands, and of the outputs of its splits."""
MAX_LENGTH = 4096
"""Of a drawn sequence; planted ones may be longer."""
MAX_LSE_ROWS = 1 << 15
"""Of a trial with log-sum-exp, which is compared on the host."""
_ATTEMPTS = 1000
_BATCHES = (1, 2, 3, 5, 8, 17, 32)
#: Query and key heads as public models have them: Falcon's 71 on 1, Qwen2.5's 14 on 2 and 28 on
#: 4, GPT-2 XL's 25 on 25.
_HEADS = ((71, 1), (14, 2), (28, 4), (25, 25), (1, 1), (16, 16))
#: Further ratios: multiples of the heads that share a tile, on each of these key heads.
_RATIOS, _KEY_HEADS = (1, 2, 3, 5, 7), (1, 2, 5)
#: Values that are tried of a run-time parameter whose domain is a range, beside its last.
_OF_RANGE = (1, 2, 3, 7, 16, 17, 64)
_SOFTCAPS = (50.0, 5.0)
#: Longest planted sequence of keys.
_LONG = 16384 + 1

Fact = tuple[str, Hashable]
"""An axis and a value there."""


@dataclass(frozen=True)
class Trial:
    """One problem, the config that a kernel is called with, and the optional output."""

    problem: AttentionProblem
    config: Config
    with_lse: bool
    """The log-sum-exp is wanted."""

    def facts(self, family: Family, gpu: Gpu) -> set[Fact]:
        """The value on each axis."""
        problem, config = self.problem, self.config
        longer = problem.seqlen_q - problem.seqlen_kv
        tiling = family.tiling(config)
        tiles = -(-problem.seqlen_q * tiling.packed // tiling.rows) * problem.batch
        return {
            ("head_dim", problem.head_dim),
            ("heads", (problem.heads_q, problem.heads_kv)),
            ("batch", problem.batch),
            ("seqlen_q", problem.seqlen_q),
            ("seqlen_kv", problem.seqlen_kv),
            ("longer", (longer > 0) - (longer < 0)),
            ("fills_chip", tiles * problem.heads_q // tiling.packed > 2 * gpu.sm_count),
            ("layout", problem.layout),
            ("window", (problem.window_left >= 0, problem.window_right >= 0)),
            ("softcap", problem.softcap),
            ("operand", problem.bias or problem.mask),
            ("schedule", _schedule(family, config)),
            ("with_lse", self.with_lse),
        }

    def label(self) -> str:
        """Short text for people."""
        runtime = ",".join(f"{k}={v}" for k, v in sorted(self.config.params.items()))
        return f"{self.problem.label()} with {runtime}{' and log-sum-exp' * self.with_lse}"


def trials(target: Target, gpu: Gpu, count: int, seed: int) -> list[Trial]:
    """At least `count` trials of a kernel; more where the planted values need them.

    Args:
        target: the kernel.
        gpu: where it runs.
        count: trials.
        seed: equal seeds draw equal trials.
    """
    # Equal for both types: what fails in one is looked at in the other.
    draw = _Draw(target, gpu, random.Random(f"{seed}:{target.config.digest}"))
    found: dict[Trial, None] = {}
    seen: set[Fact] = set()
    for name, values in draw.axes.items():
        for value in values:
            if (name, value) not in seen and (trial := draw.one({name: value})) is not None:
                found[trial] = None
                seen |= trial.facts(target.family, gpu)
    for _ in range(_ATTEMPTS):
        if len(found) >= count:
            break
        if (trial := draw.one({})) is not None:
            found[trial] = None
    return list(found)


class _Draw:
    """Draws trials of one kernel."""

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        self._target, self._gpu, self._rng = target, gpu, rng
        family = self._family = target.family
        names = family.runtime_parameters
        compiled = {k: v for k, v in target.config.params.items() if k not in names}
        self._compiled = Config(target.config.family, compiled, target.config.stages)
        tiling = family.tiling(target.config)
        self._packed = tiling.packed
        queries = max(1, tiling.rows // tiling.packed)
        heads = list(dict.fromkeys(self._heads()))
        heads_q, heads_kv = heads[0]
        usual = replace(target.problem, heads_q=heads_q, heads_kv=heads_kv)
        self.axes: Mapping[str, Sequence[Any]] = {
            "head_dim": [d for d in range(8, MAX_HEAD_DIM + 1, 8) if self._holds(d)],
            "heads": heads,
            "batch": _BATCHES,
            "seqlen_q": _edges(queries),
            "seqlen_kv": [*_edges(tiling.keys), _LONG],
            "longer": (-1, 0, 1),
            "fills_chip": (False, True),
            "layout": ("bshd",) if target.problem.is_varlen else LAYOUTS,
            "window": self._windows(),
            "softcap": _SOFTCAPS if target.problem.softcap else (0.0,),
            "operand": get_args(Axes)[1:] if target.problem.mask_operand else ("",),
            "schedule": [one for one in _schedules(family) if self._config(usual, one)],
            "with_lse": (False, True),
        }

    def one(self, planted: Mapping[str, Any]) -> Trial | None:
        """A trial with given values on some axes; None where none was found."""
        for _ in range(_ATTEMPTS):
            values = {**{name: self._value(name) for name in self.axes}, **planted}
            problem = self._problem(values, planted)
            if problem is None or not _is_small(problem, values["schedule"]):
                continue
            rows = problem.batch * problem.heads_q * problem.seqlen_q
            if values["with_lse"] and rows > MAX_LSE_ROWS:
                continue
            config = self._config(problem, values["schedule"])
            if config is not None:
                return Trial(problem, config, values["with_lse"])
        return None

    def _value(self, name: str) -> Any:
        """One of an axis's values half of the time; of sizes anything the other half."""
        if name in ("seqlen_q", "seqlen_kv") and self._rng.random() < 0.5:
            return round(2 ** self._rng.uniform(0, MAX_LENGTH.bit_length() - 1))
        if name == "batch" and self._rng.random() < 0.5:
            return self._rng.randint(1, 4)
        return self._rng.choice(self.axes[name])

    def _problem(
        self, values: Mapping[str, Any], planted: Mapping[str, Any]
    ) -> AttentionProblem | None:
        rng, (heads_q, heads_kv) = self._rng, values["heads"]
        seqlen_q, seqlen_kv = values["seqlen_q"], values["seqlen_kv"]
        if planted.get("longer") == 0 or (rng.random() < 0.25 and "longer" not in planted):
            if "seqlen_q" in planted:
                seqlen_kv = seqlen_q
            else:
                seqlen_q = seqlen_kv
        elements = values["batch"] * heads_q * seqlen_q * values["head_dim"]
        if 4 * elements * seqlen_kv > MAX_FLOPS:
            return None
        has_left, has_right = values["window"]
        span = max(seqlen_q, seqlen_kv)
        problem = replace(
            self._target.problem,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            head_dim=values["head_dim"],
            batch=values["batch"],
            heads_q=heads_q,
            heads_kv=heads_kv,
            layout=values["layout"],
            window_left=rng.randrange(span) if has_left else -1,
            window_right=rng.randrange(span) if has_right else -1,
            softcap=values["softcap"],
            bias=values["operand"] if self._target.problem.bias else "",
            mask=values["operand"] if self._target.problem.mask else "",
        )
        drawn = Trial(problem, self._compiled, values["with_lse"]).facts(self._family, self._gpu)
        wanted = {(name, value) for name, value in planted.items() if name != "schedule"}
        return problem if wanted <= drawn else None

    def _config(
        self, problem: AttentionProblem, schedule: Sequence[tuple[str, Value]]
    ) -> Config | None:
        """The kernel's config for a problem; None where it is another kernel's, or not legal."""
        family, config = self._family, self._carried(problem)
        if config is None:
            return None
        config = Config(config.family, {**config.params, **dict(schedule)}, config.stages)
        if family.violations(problem, config, self._gpu):
            return None
        return config if family.kernels(problem, config) == self._target.kernels else None

    def _carried(self, problem: AttentionProblem) -> Config | None:
        """The compiled kernel as it is called for a problem, without run-time parameters."""
        found = self._family.scheduled(problem, self._compiled, self._gpu)
        names = self._family.runtime_parameters
        for config in found:
            params = {name: value for name, value in config.params.items() if name not in names}
            return Config(config.family, params, config.stages)
        return None

    def _holds(self, head_dim: int) -> bool:
        problem = replace(self._target.problem, head_dim=head_dim)
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _heads(self) -> Iterator[tuple[int, int]]:
        ratios = [(n * self._packed * heads, heads) for n in _RATIOS for heads in _KEY_HEADS]
        for heads_q, heads_kv in (*_HEADS, *ratios):
            problem = replace(self._target.problem, heads_q=heads_q, heads_kv=heads_kv)
            if self._carried(problem) is not None:
                yield heads_q, heads_kv

    def _windows(self) -> Sequence[tuple[bool, bool]]:
        """Which sides a window has."""
        if not self._target.problem.is_windowed:
            return ((False, False),)
        if self._target.problem.is_causal:
            return ((True, False),)
        return (True, False), (False, True), (True, True)


def _is_small(problem: AttentionProblem, schedule: Sequence[tuple[str, Value]]) -> bool:
    splits = int(dict(schedule).get("splits", 1))
    partial = 4 * splits * problem.output.elements if splits > 1 else 0
    operands = sum(operand.bytes for operand in problem.operands)
    return problem.flops <= MAX_FLOPS and operands + partial <= MAX_BYTES


def _edges(tile: int) -> list[int]:
    """One, and the lengths beside the edges of a tile."""
    near = (tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 1, 5 * tile)
    return sorted({1, *(length for length in near if length > 0)})


def _schedules(family: Family) -> Iterator[tuple[tuple[str, Value], ...]]:
    """Every setting of the run-time parameters worth trying, legal at some problem or not."""
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


def _schedule(family: Family, config: Config) -> tuple[tuple[str, Value], ...]:
    names = sorted(family.runtime_parameters & config.params.keys())
    return tuple((name, config[name]) for name in names)
