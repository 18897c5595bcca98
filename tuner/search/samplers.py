"""Optuna samplers over the groups of one family: the tuner's own and Optuna's."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from tuner.config import Value
from tuner.search.surrogate import Features, Surrogate

STARTUP = 6
"""Finished groups of a family before TPE or the GP proposes; the family's ranking starts."""
ABSENT = "(absent)"
"""Categorical choice for a parameter that a config does not have."""
MISSES = {"tpe": 12, "gp": 3}
"""Rejected proposals (illegal or already explored) before the ranking decides. A proposal of TPE is
a new draw and takes 1 to 35 ms; the GP often repeats itself and takes 70 to 350 ms."""
KERNEL = "kernel"
"""User attribute of a trial: digest of the group's compiled kernels."""


@dataclass
class Groups:
    """Groups of one family, each open, running or finished."""

    features: Mapping[str, Features]
    """Compile-time parameters of each group, by its key."""
    open: dict[str, None]
    """Keys of the open groups in the family's ranking, most promising first."""
    running: dict[str, optuna.Trial] = field(default_factory=dict)
    values: dict[str, float | None] = field(default_factory=dict)
    """Logarithm of the best time of each finished group; None when no candidate passed."""

    @cached_property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        """Categorical distribution of each parameter: all its values in the family's space."""
        values = choices_of(list(self.features.values()))
        return {name: CategoricalDistribution(choices) for name, choices in values.items()}

    @property
    def worst(self) -> float | None:
        """Largest value so far; None without one."""
        return max((v for v in self.values.values() if v is not None), default=None)

    def params(self, key: str) -> dict[str, Value]:
        """Parameters of a group's trial."""
        row = self.features[key]
        return {
            name: row.get(name, ABSENT)
            for name, distribution in self.distributions.items()
            if name in row or ABSENT in distribution.choices
        }


class GroupSampler(BaseSampler):  # type: ignore[misc]  # Optuna is untyped here
    """Base of the samplers that propose one of a finite list of groups, all parameters at once."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    @abstractmethod
    def propose(self) -> str:
        """Key of the group to evaluate next."""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return dict(self.groups.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self.groups.params(self.propose())

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise ValueError(f"{param_name} is not a parameter of the group that was proposed")


class OrderSampler(GroupSampler):
    """Sampler that proposes the ranking's first open group, or one that the search names."""

    named: str | None = None

    def propose(self) -> str:
        return self.named or next(iter(self.groups.open))


@dataclass(frozen=True)
class Offer:
    """The group that a `ModelSampler` would begin next."""

    key: str
    mean: float
    """Expected logarithm of its time."""
    gain: float
    """Its expected improvement."""
    most_gain: float
    """The largest expected improvement of any open group of the family."""


class ModelSampler(GroupSampler):
    """The open group with the least expected time under the surrogate; once some groups are
    begun, that with the largest expected improvement.

    Args:
        groups: state of the groups.
        surrogate: surrogate of the family.
        leading: groups of the least expected times before expected improvement decides.
    """

    def __init__(self, groups: Groups, surrogate: Surrogate, leading: int = 0) -> None:
        super().__init__(groups)
        self.surrogate, self._leading = surrogate, leading
        self._offered: str | None = None

    def offer(
        self, best: float, assumed: Collection[str] = (), *, leads: bool = False
    ) -> Offer | None:
        """The best open group; None when no group is open.

        The next trial has this group, unless `assumed` is given.

        Args:
            best: logarithm of the time to improve on; several families may share it.
            assumed: open groups to count as running.
            leads: choose by the least expected time.
        """
        keys = [key for key in self.groups.open if key not in assumed]
        if not keys:
            return None
        gains = self.surrogate.gains(keys, best, [*self.groups.running, *assumed])
        most = max(keys, key=lambda key: gains[key])
        key = min(keys, key=self.surrogate.mean) if leads else most
        if not assumed:
            self._offered = key
        return Offer(key, self.surrogate.mean(key), gains[key], gains[most])

    def propose(self) -> str:
        if self._offered not in self.groups.open:
            begun = len(self.groups.values) + len(self.groups.running)
            self.offer(self._best(), leads=begun < self._leading)
        assert self._offered is not None
        return self._offered

    def _best(self) -> float:
        """Least value so far; without one the least expected value."""
        values = [value for value in self.groups.values.values() if value is not None]
        return min(values) if values else min(map(self.surrogate.mean, self.groups.features))

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._offered = None
        if state == TrialState.COMPLETE and values is not None:
            self.surrogate.observe(trial.user_attrs[KERNEL], values[0])


def library_sampler(name: str, seed: int) -> BaseSampler:
    """Optuna's own sampler.

    Args:
        name: tpe, gp or cmaes.
        seed: seed of random draws.
    """
    if name == "cmaes":
        return optuna.samplers.CmaEsSampler(
            seed=seed, n_startup_trials=0, warn_independent_sampling=False
        )
    if name == "gp":
        return optuna.samplers.GPSampler(
            seed=seed, n_startup_trials=STARTUP, warn_independent_sampling=False
        )
    return optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True
    )


class GroupStudy:
    """Optuna study in memory whose trials are the groups of one family.

    Minimises the logarithm of microseconds. Deterministic for equal results and seed.
    """

    def __init__(
        self, groups: Groups, sampler: BaseSampler, *, startup: int = 0, attempts: int = 1
    ) -> None:
        """Begin without a trial.

        Args:
            groups: the groups; this study updates their state.
            sampler: sampler that proposes groups.
            startup: finished groups before the sampler is used; the ranking starts.
            attempts: rejected proposals before the ranking decides.
        """
        self.groups = groups
        self._sampler = sampler
        self._order = OrderSampler(groups)
        self._startup = startup
        self._attempts = attempts

    @cached_property
    def study(self) -> optuna.Study:
        """The study itself."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return optuna.create_study(sampler=self._sampler, direction="minimize")

    def start(self, key: str | None = None) -> str:
        """Begin a trial; returns the key of its group.

        Args:
            key: an open group; None lets the sampler propose.
        """
        if key is None and len(self.groups.values) >= self._startup:
            for _ in range(self._attempts):
                trial, drawn = self._draw()
                if drawn in self.groups.open:
                    return self._begin(trial, drawn)
                self._reject(trial, drawn)
        self._order.named = key
        self.study.sampler = self._order
        try:
            trial, drawn = self._draw()
        finally:
            self.study.sampler = self._sampler
        assert drawn is not None
        return self._begin(trial, drawn)

    def _begin(self, trial: optuna.Trial, key: str) -> str:
        del self.groups.open[key]
        self.groups.running[key] = trial
        trial.set_user_attr(KERNEL, key)
        return key

    def _draw(self) -> tuple[optuna.Trial, str | None]:
        """A trial, and the key of its group, None when no config has these parameters.

        A parameter that does not apply to the values chosen so far is not suggested.
        """
        trial = self.study.ask()
        keys, legal = list(self.groups.features), True
        for name, distribution in self.groups.distributions.items():
            if all(name not in self.groups.features[key] for key in keys):
                continue
            choice = trial.suggest_categorical(name, distribution.choices)
            fitting = [key for key in keys if self.groups.features[key].get(name, ABSENT) == choice]
            keys, legal = fitting or keys, legal and bool(fitting)
        return trial, keys[0] if legal else None

    def _reject(self, trial: optuna.Trial, key: str | None) -> None:
        """End a trial that cannot be evaluated; the budget is not charged."""
        if key is not None:  # explored already: nothing to learn from it
            self.study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_user_attr("reason", "no legal config has these values")
        self._tell(trial, None)

    def finish(self, key: str, value: float | None, attributes: Mapping[str, Any]) -> None:
        """End a group's trial.

        Args:
            key: a running group.
            value: logarithm of its best time; None when nothing passed.
            attributes: user attributes of the trial.
        """
        trial = self.groups.running.pop(key)
        self.groups.values[key] = value
        for name, attribute in attributes.items():
            trial.set_user_attr(name, attribute)
        self._tell(trial, value)

    def _tell(self, trial: optuna.Trial, value: float | None) -> None:
        """Report a trial's value.

        An infeasible trial is reported with the worst value so far, because the GP and the
        surrogate learn from values only. Without any value it fails, and no sampler learns from it.
        """
        trial.set_constraint("runs", 1.0 if value is None else -1.0)  # feasible at or below zero
        told = self.groups.worst if value is None else value
        state = TrialState.FAIL if told is None else TrialState.COMPLETE
        self.study.tell(trial, told, state=state)

    def abandon(self, reason: str) -> None:
        """Fail the running trials.

        Args:
            reason: user attribute of each trial.
        """
        while self.groups.running:
            _, trial = self.groups.running.popitem()
            trial.set_user_attr("reason", reason)
            self.study.tell(trial, state=TrialState.FAIL)


class PositionStudy(GroupStudy):
    """Study with numeric parameters, for CMA-ES.

    A parameter is the index of its value among its choices. The open group nearest to a proposal is
    evaluated.
    """

    def __init__(self, groups: Groups, seed: int) -> None:
        """Begin without a trial.

        Args:
            groups: the groups; this study updates their state.
            seed: seed of random draws.
        """
        choices = {n: list(d.choices) for n, d in groups.distributions.items()}
        self._last = {name: len(values) - 1 for name, values in choices.items() if len(values) > 1}
        self._positions = {
            key: {
                name: choices[name].index(groups.params(key).get(name, choices[name][0])) * 1.0
                for name in self._last
            }
            for key in groups.features
        }
        super().__init__(groups, library_sampler("cmaes", seed), startup=STARTUP)

    def start(self, key: str | None = None) -> str:
        if key is None and (len(self.groups.values) < self._startup or not self._last):
            key = next(iter(self.groups.open))
        if key is not None:
            self.study.enqueue_trial(self._positions[key])
        trial = self.study.ask()
        drawn = {n: trial.suggest_float(n, 0.0, last) for n, last in self._last.items()}
        return self._begin(trial, self._nearest(drawn) if key is None else key)

    def _tell(self, trial: optuna.Trial, value: float | None) -> None:
        with warnings.catch_warnings():
            # CMA-ES reads no constraint: it learns from the worst value, reported for a failure
            warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
            super()._tell(trial, value)

    def _nearest(self, drawn: Mapping[str, float]) -> str:
        def distance(key: str) -> float:
            mine = self._positions[key]
            return sum(abs(mine[name] - drawn[name]) / self._last[name] for name in drawn)

        return min(self.groups.open, key=distance)


def choices_of(features: Sequence[Features]) -> dict[str, tuple[Value, ...]]:
    """Values of each parameter; parameters that every config has come first.

    So a conditional parameter comes after those that it depends on. It has the choice `ABSENT` only
    if earlier parameters do not determine whether it applies.
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
        if any(len(kinds) == 2 for kinds in presence.values()):
            ordered.append(ABSENT)
        choices[name] = tuple(ordered)
    return choices
