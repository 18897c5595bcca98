"""Rules for shapes that nobody tuned, made from measured ones (`tuner.selection.rule` says what
they are).

Each kind is made and judged by leave-one-out: each problem is answered by the rule of the others,
and the answer's time there is compared with the best time measured there. The kind of the smallest
mean regret is kept, and its regret with it.

A time is that of the final pass, in which finalists and vendors' kernels were timed side by side.
The others' quick times are brought to it by what finalists, or vendors' kernels, took longer there
in the median: a quick pass meets a chip that is cooler and clocked higher, by up to 17 % where the
power limit rules, and not by the same for own kernels and vendors'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import Problem
from tuner.selection import nearest
from tuner.selection.rule import (
    UNMEASURED,
    Regret,
    Rule,
    carried,
    find,
    first_legal,
    holds,
    is_size,
)
from tuner.store.entry import is_vendor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEPT = 8
"""Configs of an answer, best first: not each of them is legal everywhere."""
DEPTH = 4
"""Questions of a tree at most."""
FAILED = math.log(4.0)
"""Regret of a config where it failed or is not legal."""


@dataclass(frozen=True)
class Sample:
    """The times measured of one problem."""

    problem: Problem
    times: Mapping[Config, float]
    """Microseconds; those that no rule answers with too: they can be the best there is."""
    failed: frozenset[Config] = frozenset()

    @classmethod
    def of(cls, problem: Problem, measured: Sequence[Measurement]) -> Sample:
        """From its final pass, and its quick one brought to it."""
        passed = [m for m in measured if m.ok and m.latency_us is not None]
        quick = {m.config: m.latency_us for m in passed if not m.is_final and m.latency_us}
        final = {m.config: m.latency_us for m in passed if m.is_final and m.latency_us}
        longer: dict[bool, list[float]] = {True: [], False: []}
        for config in final.keys() & quick.keys():
            longer[is_vendor(config)].append(final[config] / quick[config])
        every = median([*longer[True], *longer[False]] or [1.0])
        factor = {kind: median(ratios or [every]) for kind, ratios in longer.items()}
        times = {config: us * factor[is_vendor(config)] for config, us in quick.items()} | final
        failed = {m.config for m in measured if not m.ok} - set(times)
        return cls(problem, times, frozenset(failed))

    @property
    def best_us(self) -> float:
        return min(self.times.values())

    @cached_property
    def unavoidable(self) -> float:
        """Least regret that an answer can have; 0 where none was measured."""
        times = [us for config, us in self.times.items() if answers_everywhere(config)]
        return math.log(min(times, default=self.best_us) / self.best_us)

    def regret(self, config: Config) -> float | None:
        """Logarithm of a config's time over the best; None where it was not measured."""
        config = carried(config, self.problem)
        if config in self.times:
            return math.log(self.times[config] / self.best_us)
        return FAILED if config in self.failed else None


def fit(samples: Sequence[Sample], gpu: Gpu, regime: Regime) -> Rule:
    """The rule of the kind whose mean regret is smallest.

    Args:
        samples: of one operation, a problem each.
        gpu: where they were measured.
        regime: how they were timed.

    Raises:
        ConfigError: when fewer than two problems were measured.
    """
    if len(samples) < 2:
        raise ConfigError(f"{len(samples)} problems were measured: a rule needs 2 or more")
    table = _Table(samples)
    judged = {kind: _leave_one_out(kind, table, gpu) for kind in _MAKERS}
    best = min(judged, key=lambda name: judged[name].expected)
    others = {name: round(judged[name].mean, 4) for name in judged if name != best}
    body = _MAKERS[best](table, range(len(samples)))
    problems = [sample.problem.to_json() for sample in samples]
    return Rule(samples[0].problem.op, gpu, regime, best, body, problems, judged[best], others)


class _Table:
    """The regret of every config that can be an answer at every problem, computed once: rules of
    all but one problem look at other rows of it.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        import numpy as np

        self.samples = samples
        self.facts = [sample.problem.to_json() for sample in samples]
        configs = {c for sample in samples for c in sample.times if answers_everywhere(c)}
        self.configs = sorted(configs, key=lambda config: config.digest)
        self._vendors = [config for config in self.configs if is_vendor(config)]
        found = [[sample.regret(config) for config in self.configs] for sample in samples]
        self._regrets = np.array([[UNMEASURED if r is None else r for r in row] for row in found])
        self._timed = np.array([[c in sample.times for c in self.configs] for sample in samples])

    def _scores(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Mean regret of each config over some problems; infinite where it was timed at none.
        Rounded, so that equal ones are equal in whatever order they are added.
        """
        scores: NDArray[np.float64] = self._regrets[rows].mean(axis=0).round(12)
        scores[~self._timed[rows].any(axis=0)] = math.inf
        return scores

    def least(self, rows: Sequence[int]) -> float:
        """The least mean regret that one config has over some problems."""
        return float(self._scores(rows).min())

    def best(self, rows: Sequence[int]) -> list[Config]:
        """The configs of least mean regret over some problems, a vendor's at the end at the latest,
        which is legal where no own one is.
        """
        scores = self._scores(rows)
        order = scores.argsort(kind="stable")
        ranked = [self.configs[i] for i in order if scores[i] < math.inf]
        vendors = [config for config in ranked if config in self._vendors]
        return list(dict.fromkeys([*ranked[: KEPT - 1], *vendors[:1]]))


def _leave_one_out(kind: str, table: _Table, gpu: Gpu) -> Regret:
    regrets: list[float] = []
    leasts: list[float] = []
    each: list[dict[str, Any]] = []
    for left_out, sample in enumerate(table.samples):
        body = _MAKERS[kind](table, [i for i in range(len(table.samples)) if i != left_out])
        configs, _ = find(kind, body, sample.problem, gpu)
        config = first_legal(configs, sample.problem, gpu)
        found = FAILED if config is None else sample.regret(config)
        least = math.exp(sample.unavoidable) - 1
        if found is not None:
            regrets.append(math.exp(found) - 1)
            leasts.append(least)
        each.append(
            {
                "problem": sample.problem.label(),
                "answer": None if config is None else config.to_json(),
                "regret": None if found is None else round(regrets[-1], 4),
                "unavoidable": round(least, 4),
            }
        )
    mean = sum(regrets) / len(regrets) if regrets else math.inf
    unavoidable = sum(leasts) / len(leasts) if leasts else 0.0
    worst = max(regrets, default=math.inf)
    farthest = max(_away(sample, table.samples) for sample in table.samples)
    unmeasured = len(each) - len(regrets)
    return Regret(mean, worst, len(regrets), unmeasured, unavoidable, farthest, each)


def _away(sample: Sample, samples: Sequence[Sample]) -> float:
    """Doublings to the nearest of the others."""
    others = [other.problem for other in samples if other is not sample]
    return min(nearest.doublings(sample.problem, other) for other in others)


def answers_everywhere(config: Config) -> bool:
    """Whether a config can be an answer: a vendor's kernel from a package of its own is not
    everywhere.
    """
    return not is_vendor(config) or nearest.is_pytorchs(config)


# The measured problems, weighted


def _weighted(table: _Table, rows: Sequence[int]) -> Any:
    """What was among the best anywhere, and its regret beside other answers everywhere."""
    chosen = sorted({c for i in rows for c in table.best([i])}, key=lambda config: config.digest)
    problems = []
    for i in rows:
        sample = table.samples[i]
        found = {str(at): sample.regret(config) for at, config in enumerate(chosen)}
        regrets = {at: r - sample.unavoidable for at, r in found.items() if r is not None}
        problems.append(
            {"problem": table.facts[i], "regrets": {at: round(r, 4) for at, r in regrets.items()}}
        )
    return {"configs": [config.to_json() for config in chosen], "problems": problems}


# The nearest measured problem


def _nearest(table: _Table, rows: Sequence[int]) -> Any:
    return [
        {"problem": table.facts[i], "configs": [c.to_json() for c in table.best([i])]} for i in rows
    ]


# A tree


def _tree(table: _Table, rows: Sequence[int], depth: int = DEPTH) -> Any:
    """A node: a question with two branches, or the configs of a leaf."""
    leaf = {"configs": [config.to_json() for config in table.best(rows)]}
    if depth == 0 or len(rows) < 2:
        return leaf
    total = table.least(rows) * len(rows)
    best: tuple[float, str, Any, list[int], list[int]] | None = None
    for name, limit in _questions([table.facts[i] for i in rows]):
        yes = [i for i in rows if holds(table.facts[i], name, limit)]
        no = [i for i in rows if not holds(table.facts[i], name, limit)]
        left = sum(table.least(side) * len(side) for side in (yes, no))
        if left < total - 1e-9 and (best is None or left < best[0]):
            best = left, name, limit, yes, no
    if best is None:
        return leaf
    _, name, limit, yes, no = best
    asked = "at_most" if is_size(limit) else "is"
    return {
        "field": name,
        asked: limit,
        "yes": _tree(table, yes, depth - 1),
        "no": _tree(table, no, depth - 1),
    }


def _questions(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """(field, limit) that divide the problems: between two sizes, or one of several choices."""
    found: list[tuple[str, Any]] = []
    for name in {name: None for known in facts for name in known}:
        # None where a feature is off: before all choices, and beyond every size.
        values = sorted({f.get(name) for f in facts}, key=lambda v: (str(type(v)), v))
        sizes: list[Any] = [value for value in values if is_size(value)]
        if sizes:
            middles = [math.isqrt(a * b) for a, b in pairwise(sizes)]
            found += [(name, middle) for middle in middles]
            found += [(name, sizes[-1])] if None in values else []
        elif len(values) > 1:
            found += [(name, value) for value in values[1:]]
    return found


_MAKERS: Mapping[str, Callable[[_Table, Sequence[int]], Any]] = {
    "weighted": _weighted,
    "nearest": _nearest,
    "tree": _tree,
}
"""What makes the body of each of `rule.KINDS`."""
