"""Budgets of a sweep, one search a family, and each family's share.

The unit of search is a *group*: candidates that share their compiled kernels, so that the costly
part (compiling) is spent once. A group is one trial of its family's Optuna study
(`samplers.GroupStudy`). Its value is the logarithm of the best latency among its run-time variants.
The sampler `model` proposes the group with the largest expected gain over all families: a
Gaussian-process residual over each family's cost model (`surrogate`). It ends when no gain worth
its compile is expected. The other samplers are for comparison (`scripts/bench search`): random,
the cost models' order, and Optuna's TPE and GP from the families' seeds on.
Studies live in memory: measurements are told again from the store, which alone is durable.
`storage` keeps copies of the studies for Optuna's tools.
"""

from __future__ import annotations

import importlib.util
import math
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.base.printable import one_line
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Family, group_by_kernels
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.search.samplers import GroupStudy, ModelSampler
    from tuner.search.surrogate import Past, Surrogate


@dataclass(frozen=True)
class Effort:
    """Every budget of a sweep. A trial is one group of candidates that share their kernels."""

    trials: Mapping[str, int]
    """Trials an own family, by operation; the families of a problem share the sum."""
    stage_trials: int
    """Trials for each stage of a composite family."""
    stage_keep: int
    """Best configs of each stage that a composite family is built from."""
    seeds: int
    """Trials every family gets before its results decide its share; with `model`, trials for each
    family that may be compiled before any result."""
    least_gain: float
    """Share of the time that a trial must be expected to save; below, `model` ends."""
    hopeless: float
    """A family whose best estimate is so many times the best of all is left out unless named."""
    heat: int
    """Candidates of a trial timed first; the others only where one of these comes within
    `RACE_MARGIN` of its family's best. 0 times all."""
    finalists: int
    """Own candidates timed again beside the vendors' kernels."""
    rounds: int
    """Interleaved rounds of the final pass."""
    predicted: int
    """Trials ranked by their estimates where nothing can be timed."""


#: Quick: at most 16 kernels a family of attention or 40 of GEMM. It ends where no further group is
#: expected to save 0.2 %: replayed on 19 recordings (`scripts/bench search --stopping`) with 16
#: compiles at once that takes 149 groups where 0.1 % takes 169 and loses nothing (0.5 %: 128, and
#: 0.5 % on one of them); with 4 at once it takes 118 for 133 and loses 1.4 % on one. Full: 200
#: groups a family, which enumerates every space that is not larger.
EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        trials={"attention": 16, "gemm": 40, "swiglu": 40, "grouped_gemm": 40, "softmax": 16},
        stage_trials=4,
        stage_keep=2,
        seeds=6,
        least_gain=0.002,
        hopeless=2.5,
        heat=2,
        finalists=4,
        rounds=20,
        predicted=2,
    ),
    "full": Effort(
        trials={"attention": 200, "gemm": 200, "swiglu": 200, "grouped_gemm": 200, "softmax": 200},
        stage_trials=48,
        stage_keep=4,
        seeds=12,
        least_gain=0.0,
        hopeless=math.inf,
        heat=0,
        finalists=8,
        rounds=40,
        predicted=16,
    ),
}
DEFAULT_TRIALS = 40

SAMPLERS = ("model", "tpe", "gp", "cost", "random")
RACE_MARGIN = 0.1
"""Of 173 recorded GEMM kernels the first 2 of up to 8 run-time variants come within 0.5 % of the
best variant in the median and 7 % in nine of ten; racing them times 40 % and loses no winner."""
PROMISE_EXPONENT = 4
"""A family twice as slow as the best one gets 1/16 of its share."""
UNSERVED = 1.0
"""Worth of the first group of a problem, beside any saving: without one it is not tuned at all."""
HOPELESS = 0.01
"""Share of a family of which nothing has passed yet, once its seeds are measured."""


def effort(name: str) -> Effort:
    """The budgets of an effort by name.

    Raises:
        ConfigError: when the name is not known.
    """
    if name not in EFFORTS:
        raise ConfigError(f"effort={name} is not known (allowed: {', '.join(EFFORTS)})")
    return EFFORTS[name]


def sampler_name(given: str | None) -> str:
    """Which sampler searches: as given, else as set, else `model`.

    Raises:
        ConfigError: when it is not known, or needs a package that is not installed.
    """
    name = given or settings.sampler() or "model"
    if name not in SAMPLERS:
        raise ConfigError(f"sampler={name} is not known (allowed: {', '.join(SAMPLERS)})")
    missing = [m for m in ("torch", "scipy") if importlib.util.find_spec(m) is None]
    if name == "gp" and missing:
        raise ConfigError(f"sampler=gp needs {' and '.join(missing)} (or use sampler=model)")
    return name


def least_estimate_us(
    family: Family, problem: Problem, gpu: Gpu, catalogue: Callable[[str], Mapping[str, Family]]
) -> float:
    """The least estimated time of a family's configs; of a composite one, its stages' sum.

    Args:
        family: an own one that serves the problem.
        problem: what is computed.
        gpu: where.
        catalogue: the families of an operation, for stages.
    """
    stages = family.stages(problem).values()
    if stages:
        return sum(
            min(
                least_estimate_us(member, stage, gpu, catalogue)
                for member in catalogue(stage.op).values()
                if not member.is_vendor and not member.supports(stage, gpu)
            )
            for stage in stages
        )
    space = family.space(problem, gpu)
    return min((family.predict_us(problem, c, gpu) for c in space), default=math.inf)


class FamilySearch:
    """What is known of one family's groups. Deterministic for equal results and seed."""

    def __init__(
        self,
        family: Family,
        problem: Problem,
        gpu: Gpu,
        space: Sequence[Config],
        *,
        seeds: int,
        sampler: str,
        seed: int,
        heat: int = 0,
        history: Iterable[Measurement] = (),
    ) -> None:
        """Group and rank the space.

        Args:
            family: whose configs they are.
            problem: what is computed.
            gpu: where.
            space: the candidates.
            seeds: of the family's own suggestions that lead the ranking.
            sampler: one of `SAMPLERS`.
            seed: of what is drawn.
            heat: as `Effort.heat`.
            history: measurements of other problems, which `model` learns from.
        """
        self.family = family
        self.problem = problem
        self.groups: dict[str, list[Config]] = {
            family.compile_digest(group[0]): group for group in group_by_kernels(family, space)
        }
        self.best_us = math.inf
        self.seen: dict[str, Measurement] = {}
        """Measurements by the digest of their config."""
        self.model: ModelSampler | None = None
        self._heat = heat
        self._survivors: list[str] = []
        self._is_known = False
        estimates = {
            config.digest: family.predict_us(problem, config, gpu)
            for group in self.groups.values()
            for config in group
        }
        for group in self.groups.values():
            group.sort(key=lambda config: estimates[config.digest])
        self._predicted = {key: estimates[group[0].digest] for key, group in self.groups.items()}
        self.trials = self._study(problem, gpu, space, seeds, sampler, seed, history)

    def _study(
        self,
        problem: Problem,
        gpu: Gpu,
        space: Sequence[Config],
        seeds: int,
        sampler: str,
        seed: int,
        history: Iterable[Measurement],
    ) -> GroupStudy:
        from tuner.search import samplers, surrogate

        features = {
            key: surrogate.features_of(self.family, group[0]) for key, group in self.groups.items()
        }
        seed += zlib.crc32(self.family.name.encode())
        if sampler == "model":
            past = _past(self.family, gpu, history)
            made = surrogate.Surrogate(problem, features, self._predicted, past)
            groups = samplers.Groups(features, dict.fromkeys(sorted(self.groups, key=made.mean)))
            self.model = samplers.ModelSampler(groups, made)
            return samplers.GroupStudy(groups, self.model)
        if sampler == "random":
            order = random.Random(seed).sample(list(self.groups), len(self.groups))
        else:
            suggested = self.family.seeds(problem, gpu, space, seeds)
            first = [self.family.compile_digest(config) for config in suggested]
            rest = sorted(self.groups, key=lambda key: self._predicted[key])
            order = [key for key in dict.fromkeys(first + rest) if key in self.groups]
        groups = samplers.Groups(features, dict.fromkeys(order))
        if sampler in samplers.MISSES:
            return samplers.GroupStudy(
                groups,
                samplers.library_sampler(sampler, seed),
                startup=samplers.STARTUP,
                attempts=samplers.MISSES[sampler],
            )
        return samplers.GroupStudy(groups, samplers.OrderSampler(groups))

    @property
    def surrogate(self) -> Surrogate | None:
        """The surrogate of the sampler `model`; None for another sampler."""
        return None if self.model is None else self.model.surrogate

    @property
    def finished(self) -> int:
        """Groups with a result."""
        return len(self.trials.groups.values)

    @property
    def pending(self) -> list[str]:
        """Keys of the groups that were asked for and have no result yet."""
        return [key for key in self.trials.groups.running if key not in self._survivors]

    @property
    def started(self) -> int:
        return self.finished + len(self.trials.groups.running)

    @property
    def underway(self) -> list[str]:
        """Keys of the groups that are started and not finished."""
        return list(self.trials.groups.running)

    @property
    def open(self) -> list[str]:
        """Keys of the groups that are neither finished nor running, most promising first."""
        return list(self.trials.groups.open)

    def missing(self, key: str) -> list[Config]:
        """What is to be measured next of a group: a first heat, or all that is left."""
        left = [config for config in self.groups[key] if config.digest not in self.seen]
        is_first = self._heat > 0 and len(left) == len(self.groups[key])
        return left[: self._heat] if is_first else left

    def take(self, key: str | None = None) -> list[Config]:
        """Start an open group, by default the sampler's next one; its configs to measure."""
        return self.missing(self.trials.start(key))

    def take_survivor(self) -> list[Config] | None:
        """Configs left of a group whose first heat did well; it is compiled already."""
        return self.missing(self._survivors.pop(0)) if self._survivors else None

    def tell_known(self, measurements: Iterable[Measurement]) -> None:
        """Take in measurements from the store; their trials are marked so."""
        self._is_known = True
        self.tell(measurements)
        self._is_known = False

    def tell(self, measurements: Iterable[Measurement]) -> None:
        """Take in measurements; those of configs outside the space are ignored."""
        touched: dict[str, None] = {}
        for measurement in measurements:
            key = self.family.compile_digest(measurement.config)
            if key not in self.groups or measurement.config not in self.groups[key]:
                continue
            self.seen[measurement.config.digest] = measurement
            if measurement.latency_us is not None and measurement.ok:
                self.best_us = min(self.best_us, measurement.latency_us)
            touched.setdefault(key)
        for key in touched:
            if key in self.trials.groups.values:
                continue
            if not self.missing(key) or self._has_lost(key):
                self._finish(key)
            elif key in self.pending:
                self._survivors.append(key)

    def _has_lost(self, key: str) -> bool:
        """Whether a first heat was timed, and none of it is worth timing the rest for."""
        seen = [self.seen[c.digest] for c in self.groups[key] if c.digest in self.seen]
        if not self._heat or len(seen) < self._heat:
            return False
        value = _value(seen)
        return value is None or value > math.log((1 + RACE_MARGIN) * self.best_us)

    def _finish(self, key: str) -> None:
        seen = [self.seen[c.digest] for c in self.groups[key] if c.digest in self.seen]
        if key in self.trials.groups.open:
            self.trials.start(key)
        if key in self._survivors:
            self._survivors.remove(key)
        self.trials.finish(key, _value(seen), self._attributes(key, seen))

    def _attributes(self, key: str, seen: Sequence[Measurement]) -> dict[str, Any]:
        """User attributes of a finished trial."""
        runtime = self.family.runtime_parameters
        times = [m.latency_us for m in seen if m.ok and m.latency_us is not None]
        found: dict[str, Any] = {
            "provenance": seen[0].provenance.value,
            "from_store": self._is_known,
            "predicted_us": self._predicted[key],
            "variants": [
                {
                    "params": {k: v for k, v in m.config.params.items() if k in runtime},
                    "status": m.status.value,
                    "latency_us": m.latency_us,
                }
                for m in seen
            ],
        }
        if times:
            return {**found, "latency_us": min(times)}
        failed = next((m for m in seen if m.log.strip()), seen[0])
        log = next(iter(failed.log.strip().splitlines()), "")
        reason = f"{failed.status.value}: {log}" if log else failed.status.value
        return {**found, "reason": one_line(reason)}


def _value(measurements: Iterable[Measurement]) -> float | None:
    """The logarithm of the best time; None where nothing passed."""
    times = [m.latency_us for m in measurements if m.ok and m.latency_us is not None]
    return math.log(min(times)) if times else None


def _past(family: Family, gpu: Gpu, history: Iterable[Measurement]) -> list[Past]:
    """What other problems' measurements say of the family's cost model, a problem each."""
    from tuner.search.surrogate import Past, features_of

    problems: dict[Problem, list[Measurement]] = {}
    for m in history:
        if m.config.family == family.name:
            problems.setdefault(m.problem, []).append(m)
    found = []
    for problem, measured in problems.items():
        by_config = {m.config: m for m in measured}
        features, errors = [], []
        for group in group_by_kernels(family, by_config):
            value = _value(by_config[config] for config in group)
            if value is not None:
                predicted = min(family.predict_us(problem, config, gpu) for config in group)
                features.append(features_of(family, group[0]))
                errors.append(value - math.log(predicted))
        found.append(Past(problem, features, errors))
    return found


@dataclass
class Search:
    """The families of one problem over one budget.

    With `model`, the group of largest expected gain is next, of whichever family. With another
    sampler every family gets its seeds; a family whose groups fit its equal share of the budget
    is enumerated; the rest goes one by one to the family with the largest promise / (trials + 1),
    promise being (best latency of all / best latency of the family) ** `PROMISE_EXPONENT`.
    """

    members: list[FamilySearch]
    total: int
    seeds: int
    least_gain: float = 0.0
    """Share of the time that a group must be expected to save; below, `model` ends."""
    told: int = field(default=0, init=False)
    """Trials that came from the store."""

    @property
    def spent(self) -> int:
        return sum(member.started for member in self.members)

    @property
    def pending(self) -> int:
        """Groups that were asked for and have no result yet."""
        return sum(len(member.pending) for member in self.members)

    @property
    def goal(self) -> int:
        """Trials after which the search ends at the latest."""
        return min(self.total, sum(len(member.groups) for member in self.members))

    @property
    def at_once(self) -> int:
        """Groups to have in flight at most: all that there are where all will be measured, else
        half of the budget, so that the other half knows results.
        """
        groups = sum(len(member.groups) for member in self.members)
        is_enumerated = groups <= self.total and not self.least_gain
        return max(1, groups if is_enumerated else math.ceil(self.total / 2))

    def ask(self) -> list[Config] | None:
        """Take the next group, or the rest of one that did well in its first heat; None when the
        budget or every space is used up, or no gain worth its compile is expected.
        """
        for member in self.members:
            if (rest := member.take_survivor()) is not None:
                return rest
        if self.spent >= self.total:
            return None
        if any(member.surrogate is None for member in self.members):
            return self._ask_in_turn()
        chosen = self._most_gain({})
        return None if chosen is None else chosen[0].take()

    def tell(self, measurements: Sequence[Measurement]) -> None:
        for member in self.members:
            member.tell(m for m in measurements if m.config.family == member.family.name)

    def tell_known(self, measurements: Sequence[Measurement]) -> None:
        """Tell what the store holds before the first `ask`."""
        for member in self.members:
            member.tell_known(m for m in measurements if m.config.family == member.family.name)
        self.told = self.spent

    def ahead(self) -> list[list[Config]]:
        """Groups that will be asked for first: what may be compiled before the search."""
        left = self.total - self.spent
        groups: list[list[Config]] = []
        if any(member.surrogate is None for member in self.members):
            for member in self.members:
                wanted = self._wanted(member) - member.started
                taken = member.open[: max(0, min(wanted, left - len(groups)))]
                groups += [member.missing(key) for key in taken]
            return groups
        taken_of: dict[str, list[str]] = {}
        while len(groups) < min(left, self.seeds * len(self.members)):
            chosen = self._most_gain(taken_of)
            if chosen is None:
                break
            member, key = chosen
            taken_of.setdefault(member.family.name, []).append(key)
            groups.append(member.missing(key))
        return groups

    def worths(self, taken: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], float]:
        """What each open group is worth beside others that are thought of as measured: the share
        of the time that it is expected to save over them; where there are none, over the group
        that is expected to be slowest, and `UNSERVED`. By family and key.

        Args:
            taken: the others, keys by family.
        """
        means = {
            (member.family.name, key): member.surrogate.mean(key)
            for member in self.members
            if member.surrogate is not None
            for key in member.open
        }
        known = [means[name, key] for name, keys in taken.items() for key in keys]
        measured = min((member.best_us for member in self.members), default=math.inf)
        if not known and math.isinf(measured):
            slowest = max(means.values(), default=0.0)
            return {place: UNSERVED + slowest - mean for place, mean in means.items()}
        best = min([*known, *([math.log(measured)] if math.isfinite(measured) else [])])
        found: dict[tuple[str, str], float] = {}
        for member in self.members:
            assumed = taken.get(member.family.name, ())
            keys = [key for key in member.open if key not in assumed]
            if keys and member.surrogate is not None:
                gains = member.surrogate.gains(keys, best, [*member.underway, *assumed])
                found |= {(member.family.name, key): gain for key, gain in gains.items()}
        return found

    # By expected gain

    def _most_gain(self, taken: Mapping[str, Sequence[str]]) -> tuple[FamilySearch, str] | None:
        """The open group that is expected to gain most, and its family.

        Args:
            taken: groups to think of as pending, by family.
        """
        if not self.members:
            return None
        best = self._best()
        found: tuple[float, FamilySearch, str] | None = None
        for member in self.members:
            if member.model is None:
                continue
            offer = member.model.offer(best, taken.get(member.family.name, ()))
            if offer is not None and (found is None or offer[0] > found[0]):
                found = offer[0], member, offer[1]
        if found is None or found[0] < self.least_gain:
            return None
        return found[1:]

    def _best(self) -> float:
        """Logarithm of the best time so far; before there is one, of the best expected."""
        best_us = min(member.best_us for member in self.members)
        if math.isfinite(best_us):
            return math.log(best_us)
        return min(
            member.surrogate.mean(key)
            for member in self.members
            if member.surrogate is not None
            for key in member.groups
        )

    # In turn

    def _ask_in_turn(self) -> list[Config] | None:
        member = self._next()
        if member is None:
            return None
        by_rank = member.started < self.seeds or self._is_enumerated(member)
        return member.take(member.open[0] if by_rank else None)

    @property
    def _share(self) -> int:
        return max(1, self.total // len(self.members))

    def _is_enumerated(self, member: FamilySearch) -> bool:
        return len(member.groups) <= self._share

    def _wanted(self, member: FamilySearch) -> int:
        """Groups that a family is certain to get."""
        return len(member.groups) if self._is_enumerated(member) else min(self.seeds, self._share)

    def _next(self) -> FamilySearch | None:
        available = [member for member in self.members if member.open]
        if not available:
            return None
        seeding = [m for m in available if m.started < min(self.seeds, self._share)]
        enumerated = [m for m in available if self._is_enumerated(m)]
        for waiting in (seeding, enumerated):
            if waiting:
                return min(waiting, key=lambda m: (m.started, m.family.name))
        best = min(member.best_us for member in self.members)
        return max(available, key=lambda m: (_promise(m, best) / (m.started + 1), m.family.name))


def _promise(member: FamilySearch, best_us: float) -> float:
    if math.isinf(member.best_us):
        return HOPELESS if member.finished else 1.0
    return (best_us / member.best_us) ** PROMISE_EXPONENT
