"""A rule that answers any shape of an operation: what `tuner fit` makes, as readable data.

Three kinds: `weighted`, the mean regret at the measured problems, near ones' above all, corrected
by the families' time estimates; `nearest`, what was best at the nearest measured problem; and
`tree`, a small decision tree over the problem's fields. Each answers with a list of configs, the
vendors' kernels among them, of which the first legal one serves. A rule carries its measured
regret: each problem that it was made from, answered by the rule of the others (`tuner.search.fit`).
What ships lies under ``cache/rules/``. Needs the standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from tuner.base import document, output, resources
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.base import FOREIGN
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem, problem_from_json
from tuner.selection import nearest
from tuner.store.entry import is_vendor

FORMAT = "cutlass-tuner rule"
VERSION = 3
UNMEASURED = math.log(1.3)
"""Regret that a config is taken to have at a problem where it was not measured."""
UNJUDGED = 0.1
"""Regret that an answer counts with that was not measured where it is judged."""
REACH = 0.7
"""Doublings over which a problem's weight in `weighted` falls by e. With the next two chosen by
leave-one-out over 103 recorded problems of attention, decoding and products, alike for all; with
half or twice of each no mean regret is more than 0.8 % higher, or 0.2 % lower."""
DOUBT = 0.6
"""Weight of `UNMEASURED` in a config's mean: what was measured near counts more."""
ESTIMATED = 0.5
"""Share of the estimates' differences that is believed."""
HALVES_APART = 0.25
"""Doublings between fp16 and bf16, in which a kernel does the same but for its instructions' type.
As whole ones a product was answered as one of half the rows is, not as its twin."""
_HALVES = {"float16", "bfloat16"}
LEAST_WEIGHT = 1e-3
"""Problems of less weight than this are not looked at."""
LEAST_JUDGED = 8
"""Problems below which a regret by leave-one-out is an anecdote."""


@dataclass(frozen=True)
class Choice:
    """What a rule says of a shape."""

    config: Config
    kind: str
    regret: Regret
    source: str
    """The branch or the problem that it comes from, for people."""
    doubts: tuple[str, ...] = ()
    """Why the regret may not hold for this shape."""


@dataclass(frozen=True)
class Regret:
    """What leave-one-out found: time over the best measured, less 1."""

    mean: float
    worst: float
    answered: int
    """Problems whose answer had been measured there."""
    unmeasured: int
    """Problems whose answer had not: nothing is known of its regret."""
    unavoidable: float = 0.0
    """Mean of the least that any answer could have had: what a package of its own is faster by."""
    farthest: float = 0.0
    """Doublings (`nearest.doublings`) from a problem to the nearest of the others, at most."""
    each: Sequence[Mapping[str, Any]] = ()

    @property
    def expected(self) -> float:
        """The mean, where an answer that was not measured counts as `UNJUDGED`."""
        unknown = self.unmeasured * UNJUDGED
        known = self.mean * self.answered if self.answered else 0.0
        return (known + unknown) / (self.answered + self.unmeasured)

    def to_json(self) -> dict[str, Any]:
        return {
            "judged": "leave-one-out",
            "mean": round(self.mean, 4),
            "worst": round(self.worst, 4),
            "unavoidable": round(self.unavoidable, 4),
            "answered": self.answered,
            "unmeasured": self.unmeasured,
            "farthest": round(self.farthest, 3),
            "each": list(self.each),
        }

    def text(self) -> str:
        """For people, in one line."""
        unknown = f", {self.unmeasured} more unmeasured" if self.unmeasured else ""
        least = f" ({100 * self.unavoidable:.1f} % at the least)" if self.unavoidable else ""
        return (
            f"left out: mean {100 * self.mean:.1f} %{least}, worst {100 * self.worst:.1f} % over "
            f"{self.answered} problems{unknown}"
        )


@dataclass(frozen=True)
class Rule:
    """A rule for an operation on a GPU in a regime."""

    op: str
    gpu: Gpu
    regime: Regime
    kind: str
    body: Any
    """JSON: of `weighted` configs, and the regrets of those that were measured at each problem; of
    `tree` a node, of `nearest` a list of problems with their configs."""
    problems: Sequence[Mapping[str, Any]]
    """JSON of those that it was made from."""
    regret: Regret = field(default_factory=lambda: Regret(0.0, 0.0, 0, 0))
    others: Mapping[str, float] = field(default_factory=dict)
    """Mean regret of the kinds that were not kept."""

    def answer(self, problem: Problem, gpu: Gpu | None = None) -> Choice | None:
        """The first config of the rule's list that is legal for a problem; None without one.

        Args:
            problem: what is asked.
            gpu: where it is to be legal; the rule's own by default.

        Raises:
            ConfigError: when the problem is of another operation.
        """
        if problem.op != self.op:
            raise ConfigError(f"op={problem.op} is not what the rule answers (allowed: {self.op})")
        configs, source = find(self.kind, self.body, problem, self.gpu)
        config = first_legal(configs, problem, gpu or self.gpu)
        if config is None:
            return None
        doubts = self._doubts(problem)
        own = [known for known in configs if not is_vendor(known)]
        if is_vendor(config) and own and first_legal(own, problem, gpu or self.gpu) is None:
            doubts = ("no own config of the rule is legal there: the vendor's kernel", *doubts)
        if config not in configs:
            doubts = ("carried over from problems where its parameters are others", *doubts)
        return Choice(config, self.kind, self.regret, source, doubts)

    @cached_property
    def _known(self) -> list[Problem]:
        return [problem_from_json(data) for data in self.problems]

    def away(self, problem: Problem) -> tuple[float, Problem]:
        """Doublings (`nearest.doublings`) to the nearest problem it was made from; that one."""
        distances = [nearest.doublings(problem, known) for known in self._known]
        least = min(distances)
        return least, self._known[distances.index(least)]

    def _doubts(self, problem: Problem) -> tuple[str, ...]:
        found = []
        judged = self.regret.answered
        if judged < LEAST_JUDGED:
            found.append(f"judged on {judged} problems only: too few to rely on its regret")
        facts = problem.to_json()
        for name, value in facts.items():
            seen = {known.get(name) for known in self.problems}
            is_known_size = is_size(value) and any(is_size(other) for other in seen)
            if value not in seen and not is_known_size:
                found.append(f"no problem that it was made from has {name}={value}")
        away, home = self.away(problem)
        if away > self.regret.farthest:
            found.append(
                f"{away:.1f} doublings from the nearest measured problem, {home.label()}; the "
                f"regret was judged up to {self.regret.farthest:.1f}"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "op": self.op,
            "gpu": asdict(self.gpu),
            "regime": self.regime.key,
            "kind": self.kind,
            "regret": self.regret.to_json(),
            "mean_regret_of_other_kinds": dict(self.others),
            "problems": list(self.problems),
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
                float(found["unavoidable"]),
                float(found["farthest"]),
                found["each"],
            )
            if data["kind"] not in KINDS:
                raise ConfigError(f"kind={data['kind']} (allowed: {', '.join(KINDS)})")
            op = data["op"]
            if op not in PROBLEMS:
                raise ConfigError(f"op={op} (allowed: {', '.join(PROBLEMS)})")
            if not data["problems"]:
                raise ConfigError("it names no problem that it was made from")
            known = [_problem(op, row) for row in data["problems"]]
            _check(data["kind"], data["rule"], known)
            others = data["mean_regret_of_other_kinds"]
            for mean in others.values():
                _number(mean)
            return cls(
                op,
                Gpu(**document.checked(Gpu, data["gpu"])),
                Regime.parse(data["regime"]),
                data["kind"],
                data["rule"],
                data["problems"],
                regret,
                others,
            )
        except ConfigError as exc:
            raise ConfigError(f"the rule is damaged: {exc}") from exc
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            raise ConfigError(f"the rule is damaged: {type(exc).__name__} {exc}") from exc

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            StoreError: when it cannot be written.
        """
        output.write(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Rule:
        """Read what `write` wrote.

        Raises:
            ConfigError: when it cannot be read.
        """
        try:
            return cls.from_json(document.parse(path.read_text()))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"rule {path}: {exc}") from exc


def _folder() -> Path:
    return resources.cache() / "rules"


@cache
def shipped() -> tuple[Rule, ...]:
    """The rules that ship with the package, under ``cache/rules/``.

    Raises:
        StoreError: when such a file is damaged.
    """
    try:
        return tuple(Rule.read(path) for path in sorted(_folder().glob("*.json")))
    except ConfigError as exc:
        raise StoreError(f"a shipped file cannot be read: {exc}") from exc


def first_legal(configs: Sequence[Config], problem: Problem, gpu: Gpu) -> Config | None:
    """The first config that its family accepts, as it is called there; None without one."""
    known = families()
    for config in (carried(config, problem) for config in configs):
        family = known.get(config.family)
        if family is not None and family.accepts(problem, config, gpu):
            return config
    return None


def carried(config: Config, problem: Problem) -> Config:
    """A config as it is called for a problem (`Family.carried`)."""
    family = families().get(config.family)
    try:
        return config if family is None else family.carried(problem, config)
    except FOREIGN:  # of another version of its family: as it is, and not legal
        return config


def _check(kind: str, body: Any, known: Sequence[Problem]) -> None:
    """See that a body is what `KINDS` reads; raises whatever that fails with.

    Args:
        kind: one of `KINDS`.
        body: as `Rule.body`.
        known: problems that it was made from.
    """
    if kind == "tree":
        _check_node(body, [problem.to_json() for problem in known])
        return
    rows = body if kind == "nearest" else body["problems"]
    if not rows:
        raise ConfigError("its 'rule' names no problem")
    count = 0 if kind == "nearest" else len(_configs(body["configs"]))
    for row in rows:
        _problem(known[0].op, row["problem"])
        if kind == "nearest":
            _configs(row["configs"])
            continue
        for position, regret in row["regrets"].items():
            if not 0 <= int(position) < count:
                raise ConfigError(f"a regret names config {position} of {count}")
            _number(regret)


def _check_node(node: Any, known: Sequence[Mapping[str, Any]]) -> None:
    if "field" not in node:
        _configs(node["configs"])
        return
    limit = node["at_most"] if "at_most" in node else node["is"]
    for facts in known:
        holds(facts, node["field"], limit)  # compares only what is comparable
    for answer in ("yes", "no"):
        _check_node(node[answer], known)


def _configs(rows: Sequence[Any]) -> list[Config]:
    if not rows:
        raise ConfigError("a list of configs is empty")
    return [Config.from_json(row) for row in rows]


def _problem(op: str, data: Any) -> Problem:
    problem = problem_from_json(data)
    if problem.op != op:
        raise ConfigError(f"a problem of {problem.op} in a rule of {op}")
    return problem


def _number(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"{value!r} among its regrets is no finite number")


def find(kind: str, body: Any, problem: Problem, gpu: Gpu) -> tuple[list[Config], str]:
    """What a rule's body says of a problem: configs, best first, and where it says so.

    Args:
        kind: one of `KINDS`.
        body: as `Rule.body`.
        problem: what is asked.
        gpu: where the body's problems were measured.
    """
    return KINDS[kind](body, problem, gpu)


def _find_weighted(body: Any, problem: Problem, gpu: Gpu) -> tuple[list[Config], str]:
    """By the mean over the measured problems of a config's regret beyond its estimate's, to which
    the estimate's here is added. Those that are not legal here come last.
    """
    configs = [Config.from_json(config) for config in body["configs"]]
    known = [(problem_from_json(row["problem"]), row["regrets"]) for row in body["problems"]]
    away = [_apart(problem, other) for other, _ in known]
    sums = [DOUBT * UNMEASURED] * len(configs)
    weights = [DOUBT] * len(configs)
    for far, (other, regrets) in zip(away, known, strict=True):
        weight = math.exp((min(away) - far) / REACH)
        if weight < LEAST_WEIGHT:
            continue
        there = _estimated_regrets(configs, other, gpu)
        for position, regret in regrets.items():
            i = int(position)
            sums[i] += weight * (regret - ESTIMATED * there.get(i, 0.0))
            weights[i] += weight
    here = _estimated_regrets(configs, problem, gpu)
    scores = {i: sums[i] / weights[i] + ESTIMATED * here[i] for i in here}
    ranked = sorted(scores, key=lambda i: (round(scores[i], 12), configs[i].digest))
    home = min(zip(away, (other for other, _ in known), strict=True), key=lambda row: row[0])[1]
    ranked += [i for i in range(len(configs)) if i not in scores]
    return [configs[i] for i in ranked], f"from measured problems, the nearest {home.label()}"


def _apart(one: Problem, other: Problem) -> float:
    """Doublings, of which a step from fp16 to bf16 is but a part."""
    here, there = one.to_json(), other.to_json()
    steps = sum({here[name], there.get(name)} == _HALVES for name in here if "dtype" in name)
    return nearest.doublings(one, other) - (1 - HALVES_APART) * steps


def _estimated_regrets(configs: Sequence[Config], problem: Problem, gpu: Gpu) -> dict[int, float]:
    """Logarithm of the estimated time over the least one, by position; of a vendor's kernel, which
    has no estimate, 0. Without those that are not legal.
    """
    found = {i: _estimate(config, problem, gpu) for i, config in enumerate(configs)}
    own = {i: us for i, us in found.items() if us and not is_vendor(configs[i])}
    least = min(own.values(), default=1.0)
    return {
        i: math.log(us / least) if i in own else 0.0 for i, us in found.items() if us is not None
    }


@lru_cache(1 << 15)
def _estimate(config: Config, problem: Problem, gpu: Gpu) -> float | None:
    """Estimated time of a config as it is called for a problem; None where it is not legal."""
    config = carried(config, problem)
    family = families().get(config.family)
    if family is None or not family.accepts(problem, config, gpu):
        return None
    return 0.0 if family.is_vendor else family.predict_us(problem, config, gpu)


def _find_nearest(body: Any, problem: Problem, gpu: Gpu) -> tuple[list[Config], str]:
    known = [(problem_from_json(row["problem"]), row["configs"]) for row in body]
    home, configs = min(known, key=lambda row: _away(problem, row[0]))
    return [Config.from_json(c) for c in configs], f"as at {home.label()}"


def _away(problem: Problem, other: Problem) -> tuple[float, float, str]:
    """As `tuner.selection.nearest` measures within a class, and any class before none."""
    return nearest.distance(problem, other), nearest.doublings(problem, other), other.key


def _find_in_tree(body: Any, problem: Problem, gpu: Gpu) -> tuple[list[Config], str]:
    node, path, facts = body, [], problem.to_json()
    while "field" in node:
        limit = node.get("at_most", node.get("is"))
        yes = holds(facts, node["field"], limit)
        sign = ("<=" if yes else ">") if "at_most" in node else ("=" if yes else "is not")
        path.append(f"{node['field']} {sign} {limit}")
        node = node["yes" if yes else "no"]
    return [Config.from_json(c) for c in node["configs"]], " and ".join(path) or "always"


def holds(facts: Mapping[str, Any], name: str, limit: Any) -> bool:
    """Whether a tree's question about a problem's fields is answered with yes: at most a size, or
    equal to a choice. A feature that is off has no size.
    """
    value = facts.get(name)
    if is_size(limit):
        return value is not None and bool(value <= limit)
    return bool(value == limit)


def is_size(value: Any) -> bool:
    """Whether a problem's field is a size, of which there is more and less."""
    return isinstance(value, int) and not isinstance(value, bool)


KINDS: Mapping[str, Callable[[Any, Problem, Gpu], tuple[list[Config], str]]] = {
    "weighted": _find_weighted,
    "nearest": _find_nearest,
    "tree": _find_in_tree,
}
"""What reads each kind of body."""
