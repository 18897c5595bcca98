"""Optuna over the groups of one family: the samplers that the tuner's own is compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.config import Value

if TYPE_CHECKING:
    import optuna

    from tuner.search.surrogate import Features

STARTUP = 6
"""Results of a family before Optuna is asked; until then the family's ranking goes on."""
ABSENT = "(absent)"
"""Choice that stands for a parameter which a config does not have."""
MISSES = {"tpe": 12, "gp": 3}
"""Suggestions outside the legal space or already explored before the ranking decides. TPE draws
anew each time, for 1 to 35 ms; the GP comes back to the same place, for 70 to 350 ms."""


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


class OptunaSampler:
    """Optuna over the groups of one family: categoricals, each the union of the values that the
    family's space holds; a parameter that does not apply to the values chosen so far is not
    suggested.
    """

    def __init__(self, groups: Mapping[str, Features], sampler: str, seed: int) -> None:
        """Build the distributions.

        Args:
            groups: what tells the groups apart, by their keys.
            sampler: tpe or gp.
            seed: of the sampler.
        """
        self._features = groups
        self._choices = _choices(list(groups.values()))
        self._study = create_study(sampler, seed)
        self._attempts = MISSES[sampler]
        self._pending: dict[str, optuna.Trial] = {}
        self._worst = 0.0

    def suggest(self, among: Collection[str]) -> str | None:
        """One of `among`; None when no attempt led to one."""
        import optuna

        for _ in range(self._attempts):
            trial, key = self._draw()
            if key is None:
                self._complete(trial, None)
            elif key in among:
                self._pending[key] = trial
                return key
            else:  # Explored already: nothing to learn from it.
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return None

    def _draw(self) -> tuple[optuna.Trial, str | None]:
        """A trial; the key of its group, or None when no config is like it."""
        trial = self._study.ask()
        left, legal = list(self._features), True
        for name, choices in self._choices.items():
            if all(name not in self._features[key] for key in left):
                continue
            choice = trial.suggest_categorical(name, choices)
            kept = [key for key in left if self._features[key].get(name, ABSENT) == choice]
            left, legal = kept or left, legal and bool(kept)
        return trial, left[0] if legal else None

    def tell(self, key: str, value: float | None) -> None:
        """Tell a group's value; None when it failed."""
        trial = self._pending.pop(key, None)
        if trial is None:
            self._add(key, value)
        else:
            self._complete(trial, value)

    def _complete(self, trial: optuna.Trial, value: float | None) -> None:
        trial.set_constraint("runs", _constraint(value))
        self._study.tell(trial, self._impute(value))

    def _add(self, key: str, value: float | None) -> None:
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
