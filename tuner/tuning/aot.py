"""Which kernels to compile before a job has its GPU: those that its searches expect most from.

Problems that differ in their sizes share kernels. The next kernel has the largest expected
gain over the chosen ones, summed over the problems that it is legal for. Kernels that serve many
problems come first, then those that may be better at some. A GPU then measures compiled kernels
without waiting for a compiler (`SweepOptions.compiled_only`).
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
"""Share of the time below which a problem expects nothing of a group, as a quick search."""


class _Absent(PredictRunner):
    """Stands for a GPU that will measure: a sweep may be begun on it, never run."""

    def __init__(self, gpu: Gpu, regime: Regime) -> None:
        super().__init__(gpu, regime)
        self.provenance = Provenance.MEASURED

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        raise BenchmarkError(f"{self.gpu.name} is not here: nothing can be measured")


@dataclass(frozen=True)
class Wanted:
    """A set of kernels worth compiling."""

    config: Config
    """One that needs them."""
    kernels: tuple[KernelSpec, ...]
    problems: tuple[Problem, ...]
    """Those whose searches may try it."""
    worth: float
    """Expected gain, summed over them: 0.02 where it is expected to save one of them 2 %."""


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
    """Kernels to compile for a job, most valuable first; compiled ones included, so that
    the same job wants the same again.

    Args:
        problems: of the job.
        regime_of: how each will be timed.
        gpu: where.
        store: what it and the shipped recordings hold of other problems is learned from.
        options: of the job's sweeps.
        each: sets of kernels that are wanted for one problem at most.
        catalogue: finds the families of an operation.
        note: told, again and again, how far it is.

    Raises:
        ConfigError: when the options do not suit a problem.
    """
    plans: list[_Plan] = []
    every = dict.fromkeys(problems)
    for problem in every:
        regime = regime_of(problem)
        sweep = Sweep(problem, regime, _Absent(gpu, regime), store, options, catalogue=catalogue)
        plans.append(_Plan(problem, sweep.competition.plain_search()))
        note(f"the spaces of {len(plans)} of {len(every)} problems")
    found: list[Wanted] = []
    while True:
        serving: dict[str, list[tuple[_Plan, str, str]]] = {}
        worth: dict[str, float] = {}
        for plan in plans:
            note(f"sets of kernels chosen for {len(every)} problems: {len(found)}")
            for (name, key), gain in plan.worths().items() if plan.wants < each else ():
                label = plan.label(name, key)
                serving.setdefault(label, []).append((plan, name, key))
                worth[label] = worth.get(label, 0.0) + gain
        best = max(worth, key=lambda label: (worth[label], label), default=None)
        if best is None or worth[best] < MIN_GAIN:
            return found
        found.append(_take(serving[best], worth[best]))


def _take(places: Sequence[tuple[_Plan, str, str]], worth: float) -> Wanted:
    """Think of a set of kernels as measured wherever it is legal."""
    for plan, name, key in places:
        plan.wants += plan.worths()[name, key] >= MIN_GAIN
        plan.take(name, key)
    plan, name, key = places[0]
    family, config = plan.group(name, key)
    kernels = tuple(family.kernels(plan.problem, config).values())
    return Wanted(config, kernels, tuple(plan.problem for plan, _, _ in places), worth)


@dataclass(eq=False)
class _Plan:
    """One problem: its search, and the groups that are thought of as measured."""

    problem: Problem
    search: Search
    taken: dict[str, list[str]] = field(default_factory=dict)
    wants: int = 0
    """Groups that were chosen and that it expects something of."""
    _worths: Mapping[tuple[str, str], float] | None = None
    _labels: dict[tuple[str, str], str] = field(default_factory=dict)

    def worths(self) -> Mapping[tuple[str, str], float]:
        """Values of the groups that are left."""
        if self._worths is None:
            self._worths = self.search.worths(self.taken)
        return self._worths

    def take(self, name: str, key: str) -> None:
        self.taken.setdefault(name, []).append(key)
        self._worths = None

    def group(self, name: str, key: str) -> tuple[Family, Config]:
        """A group's family and its first config."""
        member = next(m for m in self.search.members if m.family.name == name)
        return member.family, member.groups[key][0]

    def label(self, name: str, key: str) -> str:
        """Equal for groups of equal kernels, whatever problem they are for."""
        if (name, key) not in self._labels:
            family, config = self.group(name, key)
            specs = family.kernels(self.problem, config).values()
            self._labels[name, key] = "\n".join(sorted(spec.key for spec in specs))
        return self._labels[name, key]
