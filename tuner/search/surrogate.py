"""Surrogate of a family: a Gaussian-process residual over the family's cost model.

The logarithm of a group's time is the cost model's plus an error. The error is a Gaussian process
over the family's finite list of groups. Its covariance decreases with the distance between two
configs and between two problems. Results of other problems condition it once; each result of this
problem is a rank-one update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.config import Config, Value
from tuner.families.base import Family
from tuner.problem import Problem
from tuner.problem.base import doublings

Features = Mapping[str, Value]
Array = NDArray[np.float64]

#: Standard deviations of the error, in natural logarithms: of a problem, of a config within it, and
#: of two timings of one config. These and the two length scales were chosen by `scripts/bench
#: search` on recorded sweeps, with each problem's own results left out. A factor of two in any of
#: them changes little.
PROBLEM_ERROR = 0.2
CONFIG_ERROR = 0.15
NOISE = 0.01
#: Noise of another problem's result, for effects of a config at that problem only. With `NOISE` in
#: its place the groups of recorded problems were ranked worse.
PAST_NOISE = 0.1
#: Weight of the deviations above as a prior, in results.
CONFIDENCE = 8.0
#: Length scales: distances over which the correlation falls by a factor e. Between configs a
#: doubled parameter or another choice counts 1. Between problems a doubled extent, or another mask,
#: type or layout, counts 1.
CONFIG_LENGTH = 3.0
PROBLEM_LENGTH = 10.0
#: Correlation of one problem's results in two environments.
SAME_PROBLEM = 0.97
#: Most results of other problems, nearest problems first. Conditioning takes time with their cube,
#: half a second for this many.
MAX_PAST = 1500
RATES_NOISE = 0.07
"""Deviation of a time that a portfolio's rates give, of one kernel. Their errors at problems that
were left out are 3 to 7 % in the median (``cache/portfolio/``)."""
DRAWS = 4096
"""Joint samples of several groups' times: enough to know a gain of 0.1 % to a tenth of it."""


@dataclass(frozen=True)
class Past:
    """Results of one other problem, or of this problem in another environment."""

    problem: Problem
    features: Sequence[Features]
    """Features of each group that passed."""
    errors: Sequence[float]
    """Logarithm of each group's time over the cost model's."""


def features_of(family: Family, config: Config) -> dict[str, Value]:
    """Features of a config's group: compile-time parameters, and the stages of a composite."""
    stages = {f"stage {name}": stage.digest for name, stage in config.stages.items()}
    params = {k: v for k, v in config.params.items() if k not in family.runtime_parameters}
    return {**params, **stages}


class Surrogate:
    """Mean and covariance of the logarithm of the time, over the groups of one family."""

    def __init__(
        self,
        problem: Problem,
        features: Mapping[str, Features],
        predicted: Mapping[str, float],
        past: Iterable[Past] = (),
    ) -> None:
        """Start from the cost model, and condition on the results of other problems.

        Args:
            problem: problem to be searched.
            features: features of each group, by its key.
            predicted: the cost model's time of each group, microseconds.
            past: results of other problems.
        """
        self._row = {key: row for row, key in enumerate(features)}
        rows = list(features.values())
        self._mean: Array = np.log([predicted[key] for key in features])
        self._covariance = _config_covariance(rows, rows)
        self._surprises: list[float] = []
        near = _nearest(problem, past)
        if near:
            rows_of = [row for p in near for row in p.features]
            owner = np.repeat(np.arange(len(near)), [len(p.features) for p in near])
            between = np.array([[_likeness(a.problem, b.problem) for b in near] for a in near])
            among = SAME_PROBLEM * np.array([_likeness(problem, p.problem) for p in near])
            covariance = _config_covariance(rows_of, rows_of) * between[np.ix_(owner, owner)]
            noise = np.array([NOISE if p.problem == problem else PAST_NOISE for p in near])
            covariance[np.diag_indices_from(covariance)] += noise[owner] ** 2
            shared = _config_covariance(rows, rows_of) * among[owner]
            root = np.linalg.cholesky(covariance)
            half = np.linalg.solve(root, shared.T)
            errors = np.concatenate([p.errors for p in near])
            self._mean = self._mean + half.T @ np.linalg.solve(root, errors)
            self._covariance = self._covariance - half.T @ half

    def observe(self, key: str, value: float) -> None:
        """Add a result: the logarithm of a group's time in microseconds."""
        row = self._row[key]
        expected = float(self._covariance[row, row]) + NOISE**2
        self._surprises.append((value - float(self._mean[row])) ** 2 / expected)
        self._condition(row, value, NOISE)

    def expect(self, key: str, value: float) -> None:
        """Add the time that a portfolio's rates give for a group: a logarithm of microseconds."""
        self._condition(self._row[key], value, RATES_NOISE)

    def _condition(self, row: int, value: float, noise: float) -> None:
        gain = self._gain(self._covariance, row, noise)
        self._mean = self._mean + gain * (value - self._mean[row])
        self._covariance = self._covariance - np.outer(gain, self._covariance[row])

    @staticmethod
    def _gain(covariance: Array, row: int, noise: float = NOISE) -> Array:
        gain: Array = covariance[:, row] / (covariance[row, row] + noise**2)
        return gain

    @property
    def _inflation(self) -> float:
        """Variance of the results over the variance of the prior."""
        return (CONFIDENCE + sum(self._surprises)) / (CONFIDENCE + len(self._surprises))

    def mean(self, key: str) -> float:
        """Expected logarithm of a group's time."""
        return float(self._mean[self._row[key]])

    def gains(
        self, keys: Sequence[str], best: float, pending: Iterable[str] = ()
    ) -> dict[str, float]:
        """Expected improvement of each of `keys` on `best`, a logarithm of microseconds.

        An improvement is about the share of the time that is saved. Pending groups are assumed to
        have their expected times.
        """
        covariance = self._covariance
        for key in pending:
            row = self._row[key]
            covariance = covariance - np.outer(self._gain(covariance, row), covariance[row])
        rows = [self._row[key] for key in keys]
        deviations = np.sqrt(np.maximum(self._inflation * covariance[rows, rows], 1e-12))
        improvements = best - self._mean[rows]
        return {
            key: _expected_improvement(float(improvement), float(deviation))
            for key, improvement, deviation in zip(keys, improvements, deviations, strict=True)
        }

    def draws(self, keys: Sequence[str], seed: int) -> Array:
        """Joint samples of the logarithms of the times of `keys`, (`DRAWS`, keys). Equal for equal
        seeds.
        """
        rows = [self._row[key] for key in keys]
        covariance = self._inflation * self._covariance[np.ix_(rows, rows)]
        sizes, axes = np.linalg.eigh(covariance)
        root = axes * np.sqrt(np.maximum(sizes, 0.0))
        half = np.random.default_rng(seed).standard_normal((DRAWS // 2, len(rows)))
        normals = np.concatenate([half, -half])
        drawn: Array = self._mean[rows] + normals @ root.T
        return drawn


def _expected_improvement(improvement: float, deviation: float) -> float:
    z = improvement / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return improvement * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density


def _config_covariance(first: Sequence[Features], second: Sequence[Features]) -> Array:
    distance = np.zeros((len(first), len(second)))
    for name in sorted({name for row in (*first, *second) for name in row}):
        distance += _parameter_distance(
            [row.get(name) for row in first], [row.get(name) for row in second]
        )
    covariance: Array = PROBLEM_ERROR**2 + CONFIG_ERROR**2 * np.exp(-distance / CONFIG_LENGTH)
    return covariance


def _parameter_distance(first: Sequence[Value | None], second: Sequence[Value | None]) -> Array:
    """Distances between the values of a parameter: doublings between numbers, 1 between other
    choices, one of which is a missing parameter. Sums of absolute differences keep the covariance
    positive definite.
    """
    values = [*first, *second]
    present = [value for value in values if value is not None]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in present):
        middle = float(np.mean([math.log2(1 + int(value)) for value in present]))
        sizes = np.array([middle if v is None else math.log2(1 + int(v)) for v in values])
        absent = np.array([value is None for value in values])
        numbers: Array = _differences(sizes, len(first)) + _differences(absent, len(first))
        return numbers
    codes = {value: code for code, value in enumerate(dict.fromkeys(values))}
    distance: Array = 1.0 * (_differences([codes[value] for value in values], len(first)) != 0)
    return distance


def _differences(values: Sequence[float] | Array, split: int) -> Array:
    array = np.asarray(values, dtype=float)
    difference: Array = np.abs(array[:split, None] - array[None, split:])
    return difference


def _likeness(first: Problem, second: Problem) -> float:
    return math.exp(-doublings(first, second) / PROBLEM_LENGTH)


def _nearest(problem: Problem, past: Iterable[Past]) -> list[Past]:
    """Results of the nearest problems, at most `MAX_PAST` of them."""
    near: list[Past] = []
    room = MAX_PAST
    for one in sorted(past, key=lambda p: (doublings(problem, p.problem), p.problem.key)):
        if one.errors and len(one.errors) <= room:
            near.append(one)
            room -= len(one.errors)
    return near
