"""A rule that answers any shape of an operation, made from measured ones, as readable data.

Two kinds are made: `nearest`, what was best at the nearest measured problem, and `tree`, a small
decision tree over the problem's fields. Either answers with a short list of configs, the vendors'
kernels among them, of which the first legal one serves. Both are judged by leave-one-out: each
problem is answered by the rule of the others, and the answer's time there is compared with the
best time measured there. The kind of the smaller mean regret is kept, and its regret with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner import nearest
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import Problem, problem_from_json
from tuner.store.entry import is_vendor

FORMAT = "cutlass-tuner rule"
VERSION = 1
KEPT = 8
"""Configs of an answer, best first: not each of them is legal everywhere."""
DEPTH = 4
"""Questions of a tree at most."""
UNMEASURED = math.log(1.3)
"""Regret that a config is taken to have at a problem where it was not measured; FAILED where it
failed or is not legal."""
FAILED = math.log(4.0)


@dataclass(frozen=True)
class Answer:
    """What a rule says of a shape."""

    config: Config
    kind: str
    mean_regret: float
    worst_regret: float
    source: str
    """The branch or the problem that it comes from, for people."""


@dataclass(frozen=True)
class Sample:
    """The times measured of one problem."""

    problem: Problem
    times: Mapping[Config, float]
    """Microseconds; those that no rule answers with too: they can be the best there is."""
    failed: frozenset[Config] = frozenset()

    @classmethod
    def of(cls, problem: Problem, measured: Sequence[Measurement]) -> Sample:
        """From its quick pass: own kernels and vendors' are timed alike in it."""
        passed = {m.config: m.latency_us for m in measured if m.ok and m.latency_us is not None}
        failed = {m.config for m in measured if not m.ok} - set(passed)
        return cls(problem, passed, frozenset(failed))

    @property
    def best_us(self) -> float:
        return min(self.times.values())

    def regret(self, config: Config) -> float | None:
        """Logarithm of a config's time over the best; None where it was not measured."""
        if config in self.times:
            return math.log(self.times[config] / self.best_us)
        return FAILED if config in self.failed else None


@dataclass(frozen=True)
class Regret:
    """What leave-one-out found."""

    mean: float
    worst: float
    answered: int
    """Problems whose answer had been measured there."""
    unmeasured: int
    """Problems whose answer had not: nothing is known of its regret."""
    each: Sequence[Mapping[str, Any]] = ()

    @property
    def expected(self) -> float:
        """The mean, where an answer that was not measured counts as `UNMEASURED`."""
        unknown = self.unmeasured * (math.exp(UNMEASURED) - 1)
        known = self.mean * self.answered if self.answered else 0.0
        return (known + unknown) / (self.answered + self.unmeasured)

    def to_json(self) -> dict[str, Any]:
        return {
            "judged": "leave-one-out",
            "mean": round(self.mean, 4),
            "worst": round(self.worst, 4),
            "answered": self.answered,
            "unmeasured": self.unmeasured,
            "each": list(self.each),
        }


@dataclass(frozen=True)
class Rule:
    """A rule for an operation on a GPU in a regime."""

    op: str
    gpu: Gpu
    regime: Regime
    kind: str
    body: Any
    """JSON: of `tree` a node, of `nearest` a list of problems with their configs."""
    regret: Regret = field(default_factory=lambda: Regret(0.0, 0.0, 0, 0))
    others: Mapping[str, float] = field(default_factory=dict)
    """Mean regret of the kinds that were not kept."""

    def answer(self, problem: Problem) -> Answer | None:
        """The first config of the rule's list that is legal for a problem; None without one.

        Raises:
            ConfigError: when the problem is of another operation.
        """
        if problem.op != self.op:
            raise ConfigError(f"op={problem.op} is not what the rule answers (allowed: {self.op})")
        configs, source = _KINDS[self.kind].find(self.body, problem)
        config = _first_legal(configs, problem, self.gpu)
        if config is None:
            return None
        return Answer(config, self.kind, self.regret.mean, self.regret.worst, source)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "op": self.op,
            "gpu": asdict(self.gpu),
            "regime": str(self.regime),
            "kind": self.kind,
            "regret": self.regret.to_json(),
            "mean_regret_of_other_kinds": dict(self.others),
            "rule": self.body,
        }

    @classmethod
    def from_json(cls, data: Any) -> Rule:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when it is no rule, or of another version.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ConfigError(f"not a rule (its 'format' is not '{FORMAT}')")
        if data.get("version") != VERSION:
            raise ConfigError(
                f"the rule has version {data.get('version')!r} (this tuner reads {VERSION})"
            )
        try:
            found = data["regret"]
            regret = Regret(
                float(found["mean"]),
                float(found["worst"]),
                int(found["answered"]),
                int(found["unmeasured"]),
                found["each"],
            )
            if data["kind"] not in _KINDS:
                raise ConfigError(f"kind={data['kind']} (allowed: {', '.join(_KINDS)})")
            return cls(
                str(data["op"]),
                Gpu(**data["gpu"]),
                Regime.parse(data["regime"]),
                data["kind"],
                data["rule"],
                regret,
                data["mean_regret_of_other_kinds"],
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"the rule is damaged: {type(exc).__name__} {exc}") from exc

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Rule:
        """Read what `write` wrote.

        Raises:
            ConfigError: when it cannot be read.
        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"rule {path}: {exc}") from exc


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
    judged = {name: _leave_one_out(kind, samples, gpu) for name, kind in _KINDS.items()}
    best = min(judged, key=lambda name: judged[name].expected)
    others = {name: round(judged[name].mean, 4) for name in judged if name != best}
    body = _KINDS[best].make(samples)
    return Rule(samples[0].problem.op, gpu, regime, best, body, judged[best], others)


def _leave_one_out(kind: _Kind, samples: Sequence[Sample], gpu: Gpu) -> Regret:
    regrets: list[float] = []
    each: list[dict[str, Any]] = []
    for sample in samples:
        body = kind.make([other for other in samples if other is not sample])
        configs, _ = kind.find(body, sample.problem)
        config = _first_legal(configs, sample.problem, gpu)
        found = FAILED if config is None else sample.regret(config)
        if found is not None:
            regrets.append(math.exp(found) - 1)
        each.append(
            {
                "problem": sample.problem.label(),
                "answer": None if config is None else config.to_json(),
                "regret": None if found is None else round(regrets[-1], 4),
            }
        )
    mean = sum(regrets) / len(regrets) if regrets else math.inf
    worst = max(regrets, default=math.inf)
    return Regret(mean, worst, len(regrets), len(samples) - len(regrets), each)


def _first_legal(configs: Sequence[Config], problem: Problem, gpu: Gpu) -> Config | None:
    known = families()
    for config in configs:
        family = known.get(config.family)
        if family is not None and family.accepts(problem, config, gpu):
            return config
    return None


def _best(samples: Sequence[Sample]) -> tuple[list[Config], float]:
    """The configs of least mean regret over some problems, a vendor's at the end at the latest,
    which is legal where no own one is; and the regret of the first.
    """
    scores: dict[Config, float] = {}
    for config in {c for sample in samples for c in sample.times if _serves(c)}:
        found = [sample.regret(config) for sample in samples]
        scores[config] = sum(UNMEASURED if r is None else r for r in found) / len(found)
    ranked = sorted(scores, key=lambda config: (scores[config], config.digest))
    vendors = [config for config in ranked if is_vendor(config)]
    kept = dict.fromkeys([*ranked[: KEPT - 1], *vendors[:1]])
    return list(kept), scores[ranked[0]]


def _serves(config: Config) -> bool:
    """A vendor's kernel from a package of its own is not everywhere."""
    return not is_vendor(config) or nearest.is_pytorchs(config)


# The nearest measured problem


def _nearest(samples: Sequence[Sample]) -> Any:
    return [
        {"problem": s.problem.to_json(), "configs": [c.to_json() for c in _best([s])[0]]}
        for s in samples
    ]


def _find_nearest(body: Any, problem: Problem) -> tuple[list[Config], str]:
    known = [(problem_from_json(row["problem"]), row["configs"]) for row in body]
    home, configs = min(known, key=lambda row: _away(problem, row[0]))
    return [Config.from_json(c) for c in configs], f"as at {home.label()}"


def _away(problem: Problem, other: Problem) -> tuple[float, float, str]:
    """As `tuner.nearest` measures within a class, and any class before none."""
    from tuner.surrogate import distance

    return nearest.distance(problem, other), distance(problem, other), other.key


# A tree


def _tree(samples: Sequence[Sample], depth: int = DEPTH) -> Any:
    """A node: a question with two branches, or the configs of a leaf."""
    configs, regret = _best(samples)
    leaf = {"configs": [config.to_json() for config in configs]}
    if depth == 0 or len(samples) < 2:
        return leaf
    total = regret * len(samples)
    best: tuple[float, str, Any, list[Sample], list[Sample]] | None = None
    for name, limit in _questions(samples):
        yes = [s for s in samples if _holds(s.problem, name, limit)]
        no = [s for s in samples if not _holds(s.problem, name, limit)]
        left = sum(_best(side)[1] * len(side) for side in (yes, no))
        if left < total - 1e-9 and (best is None or left < best[0]):
            best = left, name, limit, yes, no
    if best is None:
        return leaf
    _, name, limit, yes, no = best
    asked = "at_most" if _is_size(limit) else "is"
    return {
        "field": name,
        asked: limit,
        "yes": _tree(yes, depth - 1),
        "no": _tree(no, depth - 1),
    }


def _questions(samples: Sequence[Sample]) -> list[tuple[str, Any]]:
    """(field, limit) that divide the problems: between two sizes, or one of several choices."""
    found: list[tuple[str, Any]] = []
    facts = [s.problem.to_json() for s in samples]
    for name in {name: None for known in facts for name in known}:
        # None where a feature is off: before all choices, and beyond every size.
        values = sorted({f.get(name) for f in facts}, key=lambda v: (str(type(v)), v))
        sizes: list[Any] = [value for value in values if _is_size(value)]
        if sizes:
            middles = [math.isqrt(a * b) for a, b in pairwise(sizes)]
            found += [(name, middle) for middle in middles]
            found += [(name, sizes[-1])] if None in values else []
        elif len(values) > 1:
            found += [(name, value) for value in values[1:]]
    return found


def _holds(problem: Problem, name: str, limit: Any) -> bool:
    value = problem.to_json().get(name)
    if _is_size(limit):
        return value is not None and bool(value <= limit)
    return bool(value == limit)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _find_in_tree(body: Any, problem: Problem) -> tuple[list[Config], str]:
    node, path = body, []
    while "field" in node:
        limit = node.get("at_most", node.get("is"))
        holds = _holds(problem, node["field"], limit)
        sign = ("<=" if holds else ">") if "at_most" in node else ("=" if holds else "is not")
        path.append(f"{node['field']} {sign} {limit}")
        node = node["yes" if holds else "no"]
    return [Config.from_json(c) for c in node["configs"]], " and ".join(path) or "always"


@dataclass(frozen=True)
class _Kind:
    make: Callable[[Sequence[Sample]], Any]
    find: Callable[[Any, Problem], tuple[list[Config], str]]


_KINDS = {"nearest": _Kind(_nearest, _find_nearest), "tree": _Kind(_tree, _find_in_tree)}
