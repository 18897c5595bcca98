"""Search of one family: its groups, their measurements, and races of their run-time variants."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.base.printable import one_line
from tuner.config import Config
from tuner.families.base import Family, group_by_kernels
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.problem.base import doublings

if TYPE_CHECKING:
    from tuner.search.samplers import GroupStudy, ModelSampler
    from tuner.search.surrogate import Past, Surrogate

LEADING = 6
"""First groups that `model` chooses by expected time, all in flight at once; expected improvement
chooses the others. Expected improvement alone would try the most unusual groups first. Simulated
sweeps of 29 recordings took 27.8, 23.6 and 21.2 s on 16 cores with the first 8, 6 and 4, and lost
0.13, 0.23 and 0.26 %. Within 1 % of the best were 54, 53 and 51 of 58."""
RACE_MARGIN = 0.1
"""Largest lead of the family's best time over a group's first variants at which the others are
timed. Source: 173 recorded GEMM kernels. The better of the first 2 of up to 8 variants is within
0.5 % of the best one in the median, within 7 % in nine of ten. Racing times 40 % of the variants
and loses no winner."""


class FamilySearch:
    """Search state of one family's groups. Deterministic for equal results and seed."""

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
        raced: int = 0,
        history: Iterable[Measurement] = (),
        expected_us: Mapping[Config, float] | None = None,
    ) -> None:
        """Group and rank the space.

        Args:
            family: family of the candidates.
            problem: problem that is tuned.
            gpu: device the candidates are compiled and timed for.
            space: the candidates.
            seeds: number of the family's own suggestions that lead the ranking.
            sampler: one of `SAMPLERS`.
            seed: seed of random draws.
            raced: as `Effort.raced`.
            history: measurements of other problems, which `model` learns from.
            expected_us: times that a portfolio's rates give for configs of the space, microseconds.
        """
        self.family = family
        self.problem = problem
        self.groups: dict[str, list[Config]] = {
            family.compile_digest(group[0]): group for group in group_by_kernels(family, space)
        }
        self.best_us = math.inf
        self.seen: dict[str, Measurement] = {}
        """Measurements by their config's digest."""
        self.extra: set[str] = set()
        """Compiled groups begun beside the budget."""
        self.model: ModelSampler | None = None
        self._raced = raced
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
        rates = {family.compile_digest(c): math.log(us) for c, us in (expected_us or {}).items()}
        self.trials = self._study(problem, gpu, space, seeds, sampler, seed, history, rates)

    def _study(
        self,
        problem: Problem,
        gpu: Gpu,
        space: Sequence[Config],
        seeds: int,
        sampler: str,
        seed: int,
        history: Iterable[Measurement],
        rates: Mapping[str, float],
    ) -> GroupStudy:
        from tuner.search import samplers, surrogate

        features = {
            key: surrogate.features_of(self.family, group[0]) for key, group in self.groups.items()
        }
        seed += zlib.crc32(self.family.name.encode())
        if sampler == "model":
            past = _past(self.family, problem, gpu, history)
            model = surrogate.Surrogate(problem, features, self._predicted, past)
            for key in rates.keys() & features.keys():
                model.expect(key, rates[key])
            groups = samplers.Groups(features, dict.fromkeys(sorted(self.groups, key=model.mean)))
            self.model = samplers.ModelSampler(groups, model, LEADING)
            return samplers.GroupStudy(groups, self.model)
        if sampler == "random":
            order = random.Random(seed).sample(list(self.groups), len(self.groups))
        else:
            suggested = self.family.seeds(problem, gpu, space, seeds)
            first = [self.family.compile_digest(config) for config in suggested]
            queue = sorted(self.groups, key=lambda key: self._predicted[key])
            order = [key for key in dict.fromkeys(first + queue) if key in self.groups]
        groups = samplers.Groups(features, dict.fromkeys(order))
        if sampler == "cmaes":
            return samplers.PositionStudy(groups, seed)
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
        """Number of groups with a result."""
        return len(self.trials.groups.values)

    @property
    def pending(self) -> list[str]:
        """Keys of the groups that were requested and have no result yet."""
        return [key for key in self.trials.groups.running if key not in self._survivors]

    @property
    def started(self) -> int:
        """Number of groups that were started within the budget."""
        return self.finished + len(self.trials.groups.running) - len(self.extra)

    @property
    def uncompiled(self) -> int:
        """Number of groups with a result for which nothing was compiled."""
        count = 0
        for key in self.trials.groups.values:
            tried = [self.seen[c.digest] for c in self.groups[key] if c.digest in self.seen]
            count += not any(m.compile_cpu_s for m in tried)
        return count

    @property
    def underway(self) -> list[str]:
        """Keys of the groups that are started and not finished."""
        return list(self.trials.groups.running)

    @property
    def open(self) -> list[str]:
        """Keys of the groups that are neither finished nor running, most promising first."""
        return list(self.trials.groups.open)

    def missing(self, key: str) -> list[Config]:
        """Configs of a group to measure next: the first variants of its race, or all others."""
        open = [config for config in self.groups[key] if config.digest not in self.seen]
        is_first = self._raced > 0 and len(open) == len(self.groups[key])
        return open[: self._raced] if is_first else open

    def take(self, key: str | None = None) -> list[Config]:
        """Start an open group, by default the sampler's next; returns its configs to measure."""
        return self.missing(self.trials.start(key))

    def take_extra(self, key: str) -> list[Config]:
        """Start an open group beside the budget, since its kernels are compiled; returns its
        configs to measure.
        """
        self.extra.add(key)
        return self.take(key)

    def take_survivor(self) -> list[Config] | None:
        """Remaining configs of a compiled group whose first variants were near the best."""
        return self.missing(self._survivors.pop(0)) if self._survivors else None

    def tell_known(self, measurements: Iterable[Measurement]) -> None:
        """Add measurements from the store; their trials are marked as known."""
        self._is_known = True
        self.tell(measurements)
        self._is_known = False

    def tell(self, measurements: Iterable[Measurement]) -> None:
        """Add measurements; configs outside the space are ignored."""
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
        """True if a group's first variants were timed, and all are slower than `RACE_MARGIN`."""
        tried = [self.seen[c.digest] for c in self.groups[key] if c.digest in self.seen]
        if not self._raced or len(tried) < self._raced:
            return False
        value = _value(tried)
        return value is None or value > math.log((1 + RACE_MARGIN) * self.best_us)

    def _finish(self, key: str) -> None:
        tried = [self.seen[c.digest] for c in self.groups[key] if c.digest in self.seen]
        if key in self.trials.groups.open:
            self.trials.start(key)
        if key in self._survivors:
            self._survivors.remove(key)
        self.trials.finish(key, _value(tried), self._attributes(key, tried))

    def _attributes(self, key: str, measurements: Sequence[Measurement]) -> dict[str, Any]:
        """User attributes of a finished trial."""
        runtime = self.family.runtime_parameters
        times = [m.latency_us for m in measurements if m.ok and m.latency_us is not None]
        facts: dict[str, Any] = {
            "provenance": measurements[0].provenance.value,
            "from_store": self._is_known,
            "predicted_us": self._predicted[key],
            "variants": [
                {
                    "params": {k: v for k, v in m.config.params.items() if k in runtime},
                    "status": m.status.value,
                    "latency_us": m.latency_us,
                }
                for m in measurements
            ],
        }
        if times:
            return {**facts, "latency_us": min(times)}
        failed = next((m for m in measurements if m.log.strip()), measurements[0])
        log = next(iter(failed.log.strip().splitlines()), "")
        reason = f"{failed.status.value}: {log}" if log else failed.status.value
        return {**facts, "reason": one_line(reason)}


def _value(measurements: Iterable[Measurement]) -> float | None:
    """Logarithm of the best time in microseconds; None when no candidate passed."""
    times = [m.latency_us for m in measurements if m.ok and m.latency_us is not None]
    return math.log(min(times)) if times else None


def _past(family: Family, problem: Problem, gpu: Gpu, history: Iterable[Measurement]) -> list[Past]:
    """Errors of the family's cost model at the nearest other problems, one item for each."""
    from tuner.search.surrogate import MAX_PAST, Past, features_of

    problems: dict[Problem, list[Measurement]] = {}
    for m in history:
        if m.config.family == family.name:
            problems.setdefault(m.problem, []).append(m)
    past, room = list[Past](), MAX_PAST
    for other in sorted(problems, key=lambda other: (doublings(problem, other), other.key)):
        by_config = {m.config: m for m in problems[other]}
        features, errors = [], []
        for group in group_by_kernels(family, by_config):
            value = _value(by_config[config] for config in group)
            if value is not None:
                predicted = min(family.predict_us(other, config, gpu) for config in group)
                features.append(features_of(family, group[0]))
                errors.append(value - math.log(predicted))
        past.append(Past(other, features, errors))
        room -= len(errors)
        if room <= 0:
            break
    return past
