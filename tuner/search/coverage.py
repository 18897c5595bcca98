"""Few configurations that cover a list of shapes, each within a given loss of the best known one.

Times are measured, or predicted by the search's surrogate: the cost model corrected by measurements
at this shape and at others (`tuner.search.surrogate`). Measured times come from the quick passes of
the store or of the shipped recordings. Every number says which kind it is.

A prediction is a plan for measuring. Loss of its first choice against the best recorded kernel,
with the problem's own results left out:

| problems | surrogate, mean (worst) | cost model, mean (worst) |
|---|---|---|
| attention, 11 | 1.6 % (5.1 %) | 6.4 % (15 %) |
| GEMM, 2 | 11 % and 2 % | |

Attention kernels predicted within 3 % of that choice lost 3.3 % in the mean, 14 % at worst.

The choice is greedy set cover: first the configuration that serves most of the remaining shapes.
Ties go to more measured times, then to the smaller loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.config import Config
from tuner.families import families, families_of
from tuner.families.base import Family, without_fallbacks
from tuner.families.peers import BESIDE_PYTORCH
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem
from tuner.search.family_search import FamilySearch
from tuner.store.entry import is_vendor, vendor_name


@dataclass(frozen=True)
class Time:
    """Time of a configuration for a problem, microseconds."""

    us: float
    provenance: Provenance
    """`MEASURED` or `PREDICTED`."""


@dataclass(frozen=True)
class Times:
    """Known times of one problem, by configuration."""

    problem: Problem
    by_config: Mapping[Config, Time]
    elsewhere: tuple[str, float] | None = None
    """Name and microseconds of a measured kernel from an optional package, if it was faster than
    every configuration that can be chosen."""

    @property
    def best_us(self) -> float:
        """Best measured time, microseconds; without measurements the best predicted one."""
        measured = [t.us for t in self.by_config.values() if t.provenance is Provenance.MEASURED]
        return min(measured or [t.us for t in self.by_config.values()], default=math.inf)


@dataclass(frozen=True)
class CoveredProblem:
    """A problem and the time of its configuration."""

    problem: Problem
    time: Time
    loss: float
    """Time over the best known one, less 1; negative for an estimate below it."""
    elsewhere: tuple[str, float] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": self.problem.label(),
            "us": round(self.time.us, 3),
            "loss": round(self.loss, 4),
            "from": str(self.time.provenance),
            "faster_elsewhere": self.elsewhere
            and {"kernel": self.elsewhere[0], "us": self.elsewhere[1]},
        }


@dataclass(frozen=True)
class PlannedConfig:
    """A configuration of the plan and the problems that it serves."""

    config: Config
    served: tuple[CoveredProblem, ...]

    @property
    def kernels(self) -> int:
        """Distinct kernels to compile for its problems; 0 for a vendor's configuration."""
        family = families()[self.config.family]
        specs = {
            spec for s in self.served for spec in family.kernels(s.problem, self.config).values()
        }
        return len(specs)

    @property
    def worst_loss(self) -> float:
        return max(s.loss for s in self.served)

    @property
    def measured(self) -> int:
        """Number of its problems with a measured time."""
        return sum(s.time.provenance is Provenance.MEASURED for s in self.served)

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(),
            "kernels": self.kernels,
            "measured": self.measured,
            "worst_loss": round(self.worst_loss, 4),
            "shapes": [s.to_json() for s in self.served],
        }


@dataclass(frozen=True)
class CoveragePlan:
    """The configurations, in the order of the choice."""

    within: float
    choices: tuple[PlannedConfig, ...]
    unserved: tuple[Problem, ...]
    """Problems without measured or predicted times."""

    def to_json(self) -> dict[str, Any]:
        return {
            "within": self.within,
            "configurations": [choice.to_json() for choice in self.choices],
            "unserved": [problem.label() for problem in self.unserved],
        }


def times(
    problems: Iterable[Problem],
    gpu: Gpu,
    measured: Mapping[Problem, Sequence[Measurement]],
    *,
    predict: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> list[Times]:
    """Known times of each problem.

    Args:
        problems: problems of one operation.
        gpu: GPU of the times.
        measured: the quick pass of every known problem (`history.measured`); other problems'
            results correct the predictions.
        predict: also predict times that were not measured, in half a second to two a problem.
        note: called after each problem with the number of problems done.
    """
    times: list[Times] = []
    every = dict.fromkeys(problems)
    for problem in every:
        times.append(_times(problem, gpu, measured, predict))
        note(f"{len(times)} of {len(every)} shapes")
    return times


def _times(
    problem: Problem, gpu: Gpu, measured: Mapping[Problem, Sequence[Measurement]], predict: bool
) -> Times:
    rows = measured.get(problem, ())
    passed = {m.config: m.latency_us for m in rows if m.ok and m.latency_us is not None}
    members = families()
    timed: dict[Config, Time] = {}
    if predict:
        past = [m for other, ms in measured.items() if other != problem for m in ms]
        own = [f for f in families_of(problem.op).values() if not f.is_vendor]
        for family in without_fallbacks([f for f in own if not f.supports(problem, gpu)]):
            timed |= _predicted(family, problem, gpu, past, passed)
    for config, us in passed.items():
        family_of = members.get(config.family)
        # Not every machine has the package of such a vendor's kernel.
        is_there = not is_vendor(config) or config.get("kernel") not in BESIDE_PYTORCH
        if family_of and is_there and family_of.accepts(problem, config, gpu):
            timed[config] = Time(us, Provenance.MEASURED)
    for config in {m.config for m in rows if not m.ok} - passed.keys():
        timed.pop(config, None)
    known_best = Times(problem, timed).best_us
    peers = [(us, vendor_name(c)) for c, us in passed.items() if is_vendor(c)]
    us, name = min(peers, default=(math.inf, ""))
    return Times(problem, timed, (name, us) if us < known_best else None)


def _predicted(
    family: Family,
    problem: Problem,
    gpu: Gpu,
    past: Sequence[Measurement],
    passed: Mapping[Config, float],
) -> dict[Config, Time]:
    """Predicted times over a family's space; empty for composite families, whose stages are tuned
    first.
    """
    if family.stages(problem):
        return {}
    space = family.space(problem, gpu)
    if not space:
        return {}
    own = [m for m in past if m.config.family == family.name]
    own = [m for m in own if family.accepts(m.problem, m.config, gpu)]
    search = FamilySearch(
        family, problem, gpu, space, seeds=0, sampler="model", seed=0, history=own
    )
    if search.surrogate is None:
        return {}
    for key, group in search.groups.items():
        if us := [passed[config] for config in group if config in passed]:
            search.surrogate.observe(key, math.log(min(us)))
    times = {}
    for key, group in search.groups.items():
        # The surrogate predicts a group's best variant; the cost model scales the other variants.
        factor = math.exp(search.surrogate.mean(key)) / family.predict_us(problem, group[0], gpu)
        for config in group:
            estimate = factor * family.predict_us(problem, config, gpu)
            times[config] = Time(estimate, Provenance.PREDICTED)
    return times


def plan(times: Sequence[Times], within: float) -> CoveragePlan:
    """Choose configurations that serve every problem within a loss.

    Args:
        times: known times of each problem.
        within: allowed loss as a fraction: 0.03 for 3 %.
    """
    open = {t.problem: t for t in times if t.by_config}
    serves: dict[Config, dict[Problem, CoveredProblem]] = {}
    for t in open.values():
        limit = (1 + within) * t.best_us
        for config, time in t.by_config.items():
            if time.us <= limit:
                served = CoveredProblem(t.problem, time, time.us / t.best_us - 1, t.elsewhere)
                serves.setdefault(config, {})[t.problem] = served
    picked: list[Config] = []
    open_ = set(open)
    while open_:
        config = min(
            serves, key=lambda c: _rank(c, [serves[c][p] for p in serves[c].keys() & open_])
        )
        picked.append(config)
        open_ -= serves[config].keys()
    for config in list(picked):  # later ones may serve all that an earlier one was taken for
        covered = {problem for c in picked if c != config for problem in serves[c]}
        if serves[config].keys() <= covered:
            picked.remove(config)
    choices = _assign(list(open), picked, serves)
    return CoveragePlan(within, choices, tuple(t.problem for t in times if not t.by_config))


def _rank(config: Config, served: Sequence[CoveredProblem]) -> tuple[int, int, float, str]:
    """Sort key of a configuration; smaller is better."""
    measured = sum(s.time.provenance is Provenance.MEASURED for s in served)
    loss = sum(max(0.0, s.loss) for s in served)
    return -len(served), -measured, loss, config.digest


def _assign(
    problems: Sequence[Problem],
    kernels: Sequence[Config],
    serves: Mapping[Config, Mapping[Problem, CoveredProblem]],
) -> tuple[PlannedConfig, ...]:
    """Assign each problem to the chosen configuration with the least loss, measured before
    predicted. Every configuration serves a problem that the others do not.
    """
    mine: dict[Config, list[CoveredProblem]] = {config: [] for config in kernels}
    for problem in problems:
        able = [config for config in kernels if problem in serves[config]]
        best = min(able, key=lambda c: _preference(serves[c][problem]))
        mine[best].append(serves[best][problem])
    return tuple(PlannedConfig(config, tuple(own)) for config, own in mine.items())


def _preference(served: CoveredProblem) -> tuple[bool, float]:
    return served.time.provenance is not Provenance.MEASURED, served.loss
