"""What to evaluate next: budgets, one study a family, and the share of each family.

The unit of search is a *group*: candidates that share their compiled kernels, so that what costs
time (compiling) is spent once. A group's value is the logarithm of the best latency among its
run-time variants. A family whose groups fit its share of the budget is enumerated; a larger one
starts from the family's own seeds and goes on with Optuna's ask and tell, in memory: what was
measured before is told again from the store, which alone is durable.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families.base import Family, group_by_kernels
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem

if TYPE_CHECKING:
    import optuna


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
    """Trials every family gets before its results decide its share."""
    finalists: int
    """Own candidates timed again beside the vendors' kernels."""
    rounds: int
    """Interleaved rounds of the final pass."""
    predicted: int
    """Trials compiled and ranked where nothing can be timed."""


#: Quick: on 16 cores about 24 fused and 12 stage kernels of attention, or 40 GEMM kernels, build
#: in under four minutes (50-65 s a fused kernel, 7-25 s a GEMM). Full: 200 groups a family, which
#: enumerates every space that is not larger.
EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        trials={"attention": 16, "gemm": 40, "softmax": 16},
        stage_trials=4,
        stage_keep=2,
        seeds=6,
        finalists=4,
        rounds=20,
        predicted=2,
    ),
    "full": Effort(
        trials={"attention": 200, "gemm": 200, "softmax": 200},
        stage_trials=48,
        stage_keep=4,
        seeds=12,
        finalists=8,
        rounds=40,
        predicted=16,
    ),
}
DEFAULT_TRIALS = 40

SAMPLERS = ("tpe", "gp")
ABSENT = "(absent)"
"""Choice that stands for a parameter which a config does not have."""
STARTUP = 6
"""Results of a family before its model is asked; until then the family's ranking goes on."""
MISSES = {"tpe": 12, "gp": 3}
"""Suggestions outside the legal space or already explored before the ranking decides. TPE draws
anew each time, for 1 to 35 ms; the GP comes back to the same place, for 70 to 350 ms."""
PROMISE_EXPONENT = 4
"""A family twice as slow as the best one gets 1/16 of its share."""
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
    """Which sampler searches: as given, else as set, else gp where torch is installed.

    Raises:
        ConfigError: when it is not known, or needs a package that is not installed.
    """
    name = given or settings.sampler()
    missing = [m for m in ("torch", "scipy") if importlib.util.find_spec(m) is None]
    if name is None:
        return "tpe" if missing else "gp"
    if name not in SAMPLERS:
        raise ConfigError(f"sampler={name} is not known (allowed: {', '.join(SAMPLERS)})")
    if name == "gp" and missing:
        raise ConfigError(f"sampler=gp needs {' and '.join(missing)} (or use sampler=tpe)")
    return name


def create_study(sampler: str, seed: int) -> optuna.Study:
    """A study in memory that minimises the logarithm of microseconds."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    chosen: optuna.samplers.BaseSampler
    if sampler == "gp":
        chosen = optuna.samplers.GPSampler(
            seed=seed, n_startup_trials=STARTUP, warn_independent_sampling=False
        )
    else:
        chosen = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=STARTUP,
            multivariate=True,
            constant_liar=True,
        )
    return optuna.create_study(sampler=chosen, direction="minimize")


class Model:
    """Optuna over the groups of one family: categoricals, each the union of the values that the
    family's space holds; a parameter that does not apply to the values chosen so far is not
    suggested.
    """

    def __init__(self, groups: Mapping[str, Config], sampler: str, seed: int) -> None:
        """Build the distributions.

        Args:
            groups: a representative config of each group, with compile-time parameters only.
            sampler: one of `SAMPLERS`.
            seed: of the sampler.
        """
        self._features = {key: _features(config) for key, config in groups.items()}
        self._choices = _choices(list(self._features.values()))
        self._study = create_study(sampler, seed)
        self._worst = 0.0

    def suggest(self) -> tuple[optuna.Trial, str | None]:
        """Ask for one trial; the key of its group, or None when no config is like it."""
        trial = self._study.ask()
        left, legal = list(self._features), True
        for name, choices in self._choices.items():
            if all(name not in self._features[key] for key in left):
                continue
            choice = trial.suggest_categorical(name, choices)
            kept = [key for key in left if self._features[key].get(name, ABSENT) == choice]
            left, legal = kept or left, legal and bool(kept)
        return trial, left[0] if legal else None

    def tell(self, trial: optuna.Trial, value: float | None) -> None:
        """Tell a trial's value; None when it is infeasible: outside the legal space or failed."""
        trial.set_constraint("runs", _constraint(value))
        self._study.tell(trial, self._impute(value))

    def skip(self, trial: optuna.Trial) -> None:
        """A trial whose group is already explored: nothing to learn from it."""
        import optuna

        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def add(self, key: str, value: float | None) -> None:
        """Tell a group that the model did not suggest itself."""
        import optuna

        params = {
            name: self._features[key].get(name, ABSENT)
            for name, choices in self._choices.items()
            if name in self._features[key] or ABSENT in choices
        }
        distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(self._choices[name])
            for name in params
        }
        self._study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions=distributions,
                value=self._impute(value),
                constraints={"runs": _constraint(value)},
            )
        )

    def _impute(self, value: float | None) -> float:
        """The GP learns from values only, so an infeasible trial counts as the worst one seen."""
        if value is None:
            return self._worst
        self._worst = max(self._worst, value)
        return value


def _constraint(value: float | None) -> float:
    """Optuna: feasible at or below zero."""
    return 1.0 if value is None else -1.0


def _features(config: Config) -> dict[str, Value]:
    return {**config.params, **{f"stage {n}": c.digest for n, c in config.stages.items()}}


def _choices(features: Sequence[Mapping[str, Value]]) -> dict[str, tuple[Value, ...]]:
    """Values of each parameter; those that every config has come first, so that what applies is
    known when a conditional one's turn comes. `ABSENT` is a choice only where the parameters
    before leave open whether it applies.
    """
    counts: dict[str, int] = {}
    for row in features:
        for name in row:
            counts[name] = counts.get(name, 0) + 1
    names = sorted(counts, key=lambda name: -counts[name])
    choices: dict[str, tuple[Value, ...]] = {}
    for position, name in enumerate(names):
        values = {row[name] for row in features if name in row}
        ordered: list[Value] = sorted(values, key=lambda v: (isinstance(v, str), v))
        presence: dict[tuple[Any, ...], set[bool]] = {}
        for row in features:
            context = tuple(row.get(earlier, ABSENT) for earlier in names[:position])
            presence.setdefault(context, set()).add(name in row)
        if any(len(seen) == 2 for seen in presence.values()):
            ordered.append(ABSENT)
        choices[name] = tuple(ordered)
    return choices


class FamilySearch:
    """Which group of one family comes next. Deterministic for equal results and seed."""

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
    ) -> None:
        self.family = family
        self.groups: dict[str, list[Config]] = {
            family.compile_digest(group[0]): group for group in group_by_kernels(family, space)
        }
        self.best_us = math.inf
        self.finished = 0
        self.pending: dict[str, optuna.Trial | None] = {}
        self.seen: dict[str, Measurement] = {}
        """Measurements by the digest of their config."""
        self._open = dict.fromkeys(self._ranked(problem, gpu, space, seeds))
        self._sampler = sampler
        self._seed = seed + zlib.crc32(family.name.encode())
        self._values: dict[str, float | None] = {}
        self._model: Model | None = None

    def _ranked(self, problem: Problem, gpu: Gpu, space: Sequence[Config], seeds: int) -> list[str]:
        """Groups by promise: the family's seeds, then by the best predicted time."""
        first = [
            self.family.compile_digest(c) for c in self.family.seeds(problem, gpu, space, seeds)
        ]
        predicted = {
            key: min(self.family.predict_us(problem, config, gpu) for config in group)
            for key, group in self.groups.items()
        }
        rest = sorted(self.groups, key=lambda key: predicted[key])
        return [key for key in dict.fromkeys(first + rest) if key in self.groups]

    @property
    def started(self) -> int:
        return self.finished + len(self.pending)

    @property
    def open(self) -> int:
        return len(self._open)

    def ranked(self, count: int) -> list[list[Config]]:
        """The next groups by rank, without taking them: what may be compiled ahead."""
        return [self._missing(key) for key in list(self._open)[:count]]

    def ask(self, *, by_rank: bool) -> list[Config] | None:
        """Take a group; its candidates that have no measurement yet. None when none is left.

        Args:
            by_rank: take the most promising one instead of asking the model.
        """
        if not self._open:
            return None
        trial, key = None, next(iter(self._open))
        if not by_rank and self.finished >= STARTUP:
            trial, key = self._suggest(key)
        del self._open[key]
        self.pending[key] = trial
        return self._missing(key)

    def tell(self, measurements: Iterable[Measurement]) -> None:
        """Take in measurements; those of configs outside the space are ignored."""
        for measurement in measurements:
            key = self.family.compile_digest(measurement.config)
            if key not in self.groups or measurement.config not in self.groups[key]:
                continue
            self.seen[measurement.config.digest] = measurement
            if measurement.latency_us is not None and measurement.ok:
                self.best_us = min(self.best_us, measurement.latency_us)
            if key not in self._values and not self._missing(key):
                self._finish(key)

    def _finish(self, key: str) -> None:
        latencies = [
            m.latency_us
            for m in (self.seen[config.digest] for config in self.groups[key])
            if m.ok and m.latency_us is not None
        ]
        value = math.log(min(latencies)) if latencies else None
        self._values[key] = value
        self.finished += 1
        self._open.pop(key, None)
        trial = self.pending.pop(key, None)
        if self._model is None:
            return
        if trial is None:
            self._model.add(key, value)
        else:
            self._model.tell(trial, value)

    def _missing(self, key: str) -> list[Config]:
        return [config for config in self.groups[key] if config.digest not in self.seen]

    def _suggest(self, fallback: str) -> tuple[optuna.Trial | None, str]:
        if self._model is None:
            self._model = self._create_model()
        for _ in range(MISSES[self._sampler]):
            trial, key = self._model.suggest()
            if key in self._open:
                return trial, key
            if key is None:
                self._model.tell(trial, None)
            else:
                self._model.skip(trial)
        return None, fallback

    def _create_model(self) -> Model:
        ignored = self.family.runtime_parameters
        compiled = {
            key: Config(
                self.family.name,
                {k: v for k, v in group[0].params.items() if k not in ignored},
                group[0].stages,
            )
            for key, group in self.groups.items()
        }
        model = Model(compiled, self._sampler, self._seed)
        # Values first: an infeasible one is told as the worst of them.
        for key, value in sorted(self._values.items(), key=lambda item: item[1] is None):
            model.add(key, value)
        return model


@dataclass
class Search:
    """The families of one problem over one budget.

    Every family gets its seeds; a family whose groups fit its equal share of the budget is
    enumerated; the rest goes one by one to the family with the largest promise / (trials + 1),
    promise being (best latency of all / best latency of the family) ** `PROMISE_EXPONENT`.
    """

    members: list[FamilySearch]
    total: int
    seeds: int
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
        """Trials after which the search ends."""
        return min(self.total, sum(len(member.groups) for member in self.members))

    def ask(self) -> list[Config] | None:
        """Take the next group; None when the budget or every space is used up."""
        if self.spent >= self.total:
            return None
        member = self._next()
        if member is None:
            return None
        return member.ask(by_rank=member.started < self.seeds or self._is_enumerated(member))

    def tell(self, measurements: Sequence[Measurement]) -> None:
        for member in self.members:
            member.tell(m for m in measurements if m.config.family == member.family.name)

    def tell_known(self, measurements: Sequence[Measurement]) -> None:
        """Tell what the store holds before the first `ask`."""
        self.tell(measurements)
        self.told = self.spent

    def ahead(self) -> list[list[Config]]:
        """Groups that are certain to be asked for: what may be compiled before the search."""
        left = self.total - self.spent
        share = self._share if self.members else 0
        groups: list[list[Config]] = []
        for member in self.members:
            wanted = len(member.groups) if self._is_enumerated(member) else min(self.seeds, share)
            groups += member.ranked(max(0, min(wanted - member.started, left - len(groups))))
        return groups

    @property
    def _share(self) -> int:
        return max(1, self.total // len(self.members))

    def _is_enumerated(self, member: FamilySearch) -> bool:
        return len(member.groups) <= self._share

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
