"""Which few configurations serve a list of shapes, each within a given loss of the best known one.

Times are measured ones (quick passes of the store, else of the shipped recordings) and, for what
was not measured at a shape, the search's own belief: the cost model corrected by what was measured
there and at other shapes (`tuner.search.surrogate`). Every number says which of the two it is. Left
out of its history, the belief's first choice took 1.6 % more than the best recorded attention
kernel in the mean over 11 problems (worst 5.1 %), where the cost model's took 6.4 % more (worst 15
%); over the two recorded GEMMs 11 and 2 %. Attention kernels that it held to be within 3 % of its
choice were 3.3 % behind the recorded best in the mean, 14 % at worst: what is predicted is a plan
for measuring, not a measurement.

The choice is greedy set cover: the configuration that serves most of the shapes that are left, of
equals the one with more measured times, then the one with the smaller loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.config import Config
from tuner.families import families, families_of
from tuner.families.base import Family, without_fallbacks
from tuner.families.vendor import BESIDE_PYTORCH
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem
from tuner.search.family_search import FamilySearch
from tuner.store.entry import is_vendor, vendor_name


@dataclass(frozen=True)
class Time:
    """What a configuration takes for a problem."""

    us: float
    provenance: Provenance
    """`MEASURED` or `PREDICTED`."""


@dataclass(frozen=True)
class Times:
    """What is known of one problem."""

    problem: Problem
    by_config: Mapping[Config, Time]
    elsewhere: tuple[str, float] | None = None
    """A measured kernel of a package that not every machine has, and its microseconds, where it
    was faster than every configuration that can be chosen."""

    @property
    def best_us(self) -> float:
        """Of the measured ones where there are any: an estimate does not beat a measurement."""
        measured = [t.us for t in self.by_config.values() if t.provenance is Provenance.MEASURED]
        return min(measured or [t.us for t in self.by_config.values()], default=math.inf)


@dataclass(frozen=True)
class Served:
    """A problem and what its configuration takes there."""

    problem: Problem
    time: Time
    loss: float
    """Its time over the best known one, less 1; below 0 where an estimate is under it."""
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
class Choice:
    """A configuration of the plan and the problems that it serves."""

    config: Config
    served: tuple[Served, ...]

    @property
    def kernels(self) -> int:
        """Distinct kernels to compile for its problems; 0 of a vendor's."""
        family = families()[self.config.family]
        found = {
            spec for s in self.served for spec in family.kernels(s.problem, self.config).values()
        }
        return len(found)

    @property
    def worst_loss(self) -> float:
        return max(s.loss for s in self.served)

    @property
    def measured(self) -> int:
        """Problems at which its time was measured."""
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
class Plan:
    """The configurations, the one chosen first at the top."""

    within: float
    choices: tuple[Choice, ...]
    unserved: tuple[Problem, ...]
    """Problems of which nothing is measured and nothing can be predicted."""

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
    """What is known of each problem.

    Args:
        problems: of one operation.
        gpu: where.
        measured: the quick pass of every problem known (`transfer.measured`), others' too: they
            correct the predictions.
        predict: estimate what was not measured: half a second to two a problem.
        note: told after each problem how many are done.
    """
    found: list[Times] = []
    every = dict.fromkeys(problems)
    for problem in every:
        found.append(_times(problem, gpu, measured, predict))
        note(f"{len(found)} of {len(every)} shapes")
    return found


def _times(
    problem: Problem, gpu: Gpu, measured: Mapping[Problem, Sequence[Measurement]], predict: bool
) -> Times:
    rows = measured.get(problem, ())
    passed = {m.config: m.latency_us for m in rows if m.ok and m.latency_us is not None}
    known = families()
    found: dict[Config, Time] = {}
    if predict:
        past = [m for other, ms in measured.items() if other != problem for m in ms]
        own = [f for f in families_of(problem.op).values() if not f.is_vendor]
        for family in without_fallbacks([f for f in own if not f.supports(problem, gpu)]):
            found |= _predicted(family, problem, gpu, past, passed)
    for config, us in passed.items():
        family_of = known.get(config.family)
        # A vendor's kernel from a package of its own is not everywhere.
        is_there = not is_vendor(config) or config.get("kernel") not in BESIDE_PYTORCH
        if family_of and is_there and family_of.accepts(problem, config, gpu):
            found[config] = Time(us, Provenance.MEASURED)
    for config in {m.config for m in rows if not m.ok} - passed.keys():
        found.pop(config, None)
    known_best = Times(problem, found).best_us
    peers = [(us, vendor_name(c)) for c, us in passed.items() if is_vendor(c)]
    us, name = min(peers, default=(math.inf, ""))
    return Times(problem, found, (name, us) if us < known_best else None)


def _predicted(
    family: Family,
    problem: Problem,
    gpu: Gpu,
    past: Sequence[Measurement],
    passed: Mapping[Config, float],
) -> dict[Config, Time]:
    """A family's space as the search believes it, given what was measured; nothing of composite
    ones, whose stages are tuned first.
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
    found = {}
    for key, group in search.groups.items():
        # The belief is about a group's best variant; the others stand to it as the model says.
        factor = math.exp(search.surrogate.mean(key)) / family.predict_us(problem, group[0], gpu)
        for config in group:
            estimate = factor * family.predict_us(problem, config, gpu)
            found[config] = Time(estimate, Provenance.PREDICTED)
    return found


def plan(known: Sequence[Times], within: float) -> Plan:
    """Choose configurations that serve every problem within a loss.

    Args:
        known: of each problem.
        within: loss that is allowed, as a part: 0.03 for 3 %.
    """
    left = {t.problem: t for t in known if t.by_config}
    serves: dict[Config, dict[Problem, Served]] = {}
    for t in left.values():
        limit = (1 + within) * t.best_us
        for config, time in t.by_config.items():
            if time.us <= limit:
                served = Served(t.problem, time, time.us / t.best_us - 1, t.elsewhere)
                serves.setdefault(config, {})[t.problem] = served
    chosen: list[Config] = []
    open_ = set(left)
    while open_:
        config = min(
            serves, key=lambda c: _rank(c, [serves[c][p] for p in serves[c].keys() & open_])
        )
        chosen.append(config)
        open_ -= serves[config].keys()
    for config in list(chosen):  # later ones may serve all that an earlier one was taken for
        others = {problem for c in chosen if c != config for problem in serves[c]}
        if serves[config].keys() <= others:
            chosen.remove(config)
    choices = _assign(list(left), chosen, serves)
    return Plan(within, choices, tuple(t.problem for t in known if not t.by_config))


def _rank(config: Config, served: Sequence[Served]) -> tuple[int, int, float, str]:
    """Smaller is better."""
    measured = sum(s.time.provenance is Provenance.MEASURED for s in served)
    loss = sum(max(0.0, s.loss) for s in served)
    return -len(served), -measured, loss, config.digest


def _assign(
    problems: Sequence[Problem],
    chosen: Sequence[Config],
    serves: Mapping[Config, Mapping[Problem, Served]],
) -> tuple[Choice, ...]:
    """Each problem to the chosen configuration of least loss there, a measured one before a
    predicted one. None is left without a problem: each serves one that the others do not.
    """
    mine: dict[Config, list[Served]] = {config: [] for config in chosen}
    for problem in problems:
        able = [config for config in chosen if problem in serves[config]]
        best = min(able, key=lambda c: _preference(serves[c][problem]))
        mine[best].append(serves[best][problem])
    return tuple(Choice(config, tuple(found)) for config, found in mine.items())


def _preference(served: Served) -> tuple[bool, float]:
    return served.time.provenance is not Provenance.MEASURED, served.loss
