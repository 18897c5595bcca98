"""Choice of the kernels to compile before a job has a GPU: those with the largest expected gain.

Problems that differ only in their sizes share kernels. The next kernel is the one with the largest
expected gain over the chosen ones, summed over the problems that it is legal for. So kernels that
serve many problems come first, then those that may be better for some. A GPU can then measure
compiled kernels without waiting for a compiler (`SweepOptions.compiled_only`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families_of
from tuner.families.base import Family, KernelSpec
from tuner.hardware import Gpu
from tuner.measurement import Provenance, Regime
from tuner.problem import Problem
from tuner.runners.predict import PredictRunner
from tuner.search.study import EFFORTS, Search
from tuner.store import Store
from tuner.tuning.sweep import Catalogue, Sweep, SweepOptions

MIN_GAIN = EFFORTS["quick"].min_gain
"""Relative gain below which a group is not worth compiling for a problem, as in a quick search."""


class _Absent(PredictRunner):
    """Runner in place of a GPU that will measure later. Sweeps can be prepared with it, but not
    run.
    """

    def __init__(self, gpu: Gpu, regime: Regime) -> None:
        super().__init__(gpu, regime)
        self.provenance = Provenance.MEASURED

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        raise BenchmarkError(f"{self.gpu.name} is not here: nothing can be measured")


@dataclass(frozen=True)
class Wanted:
    """Set of kernels that is worth compiling."""

    config: Config
    """A config that needs these kernels."""
    kernels: tuple[KernelSpec, ...]
    problems: tuple[Problem, ...]
    """Problems whose searches may try the config."""
    worth: float
    """Expected relative gain, summed over the problems: 0.02 if it is expected to save one of them
    2 %."""


def wanted(
    problems: Iterable[Problem],
    regime_of: Callable[[Problem], Regime],
    gpu: Gpu,
    store: Store,
    options: SweepOptions,
    *,
    each: int,
    catalogue: Catalogue = families_of,
    note: Callable[[str], None] = lambda text: None,
) -> list[Wanted]:
    """Kernels to compile for a job, with the largest gain first. Compiled ones are included, so
    that the same job gives the same list again.

    Args:
        problems: problems of the job.
        regime_of: regime that a problem will be timed under.
        gpu: GPU that will measure.
        store: its measurements of other problems inform the searches, beside the shipped
            recordings.
        options: options of the job's sweeps.
        each: maximum sets of kernels for one problem.
        catalogue: function that returns the families of an operation.
        note: callback for progress.

    Raises:
        ConfigError: when the options do not fit a problem.
    """
    plans: list[_Plan] = []
    every = dict.fromkeys(problems)
    for problem in every:
        regime = regime_of(problem)
        sweep = Sweep(problem, regime, _Absent(gpu, regime), store, options, catalogue=catalogue)
        plans.append(_Plan(problem, sweep.competition.plain_search()))
        note(f"the spaces of {len(plans)} of {len(every)} problems")
    sets: list[Wanted] = []
    while True:
        serving: dict[str, list[tuple[_Plan, str, str]]] = {}
        worth: dict[str, float] = {}
        for plan in plans:
            note(f"sets of kernels chosen for {len(every)} problems: {len(sets)}")
            for (name, key), gain in plan.worths().items() if plan.wants < each else ():
                label = plan.label(name, key)
                serving.setdefault(label, []).append((plan, name, key))
                worth[label] = worth.get(label, 0.0) + gain
        best = max(worth, key=lambda label: (worth[label], label), default=None)
        if best is None or worth[best] < MIN_GAIN:
            return sets
        sets.append(_take(serving[best], worth[best]))


def _take(places: Sequence[tuple[_Plan, str, str]], worth: float) -> Wanted:
    """Treat a set of kernels as measured for every problem where it is legal."""
    for plan, name, key in places:
        plan.wants += plan.worths()[name, key] >= MIN_GAIN
        plan.take(name, key)
    plan, name, key = places[0]
    family, config = plan.group(name, key)
    kernels = tuple(family.kernels(plan.problem, config).values())
    return Wanted(config, kernels, tuple(plan.problem for plan, _, _ in places), worth)


@dataclass(eq=False)
class _Plan:
    """A problem's search, and the groups that are treated as measured."""

    problem: Problem
    search: Search
    taken: dict[str, list[str]] = field(default_factory=dict)
    wants: int = 0
    """Chosen groups from which the problem expects a gain."""
    _worths: Mapping[tuple[str, str], float] | None = None
    _labels: dict[tuple[str, str], str] = field(default_factory=dict)

    def worths(self) -> Mapping[tuple[str, str], float]:
        """Expected gains of the remaining groups."""
        if self._worths is None:
            self._worths = self.search.worths(self.taken)
        return self._worths

    def take(self, name: str, key: str) -> None:
        self.taken.setdefault(name, []).append(key)
        self._worths = None

    def group(self, name: str, key: str) -> tuple[Family, Config]:
        """Family and first config of a group."""
        member = next(m for m in self.search.members if m.family.name == name)
        return member.family, member.groups[key][0]

    def label(self, name: str, key: str) -> str:
        """Label that is equal for groups of equal kernels, even of different problems."""
        if (name, key) not in self._labels:
            family, config = self.group(name, key)
            specs = family.kernels(self.problem, config).values()
            self._labels[name, key] = "\n".join(sorted(spec.key for spec in specs))
        return self._labels[name, key]
