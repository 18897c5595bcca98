"""Budgets of a sweep, and the search over all families of a problem.

The unit of search is a *group*: candidates that share their compiled kernels, so each kernel is
compiled once. A group is one trial of its family's Optuna study (`samplers.GroupStudy`). Its value
is the logarithm of the best latency among its run-time variants.

The sampler `model` uses a Gaussian-process residual over each family's cost model (`surrogate`). It
proposes the groups with the least expected times first, then the group with the largest expected
gain over all families. It ends when no expected gain is worth a compile. Other samplers are for
comparison (`scripts/bench tuner --preset recorded`): random, the cost models' order, and Optuna's
TPE, GP and CMA-ES, started from the families' seeds.

Studies live in memory; only the store is durable, and a new search reads its measurements.
`storage` copies the studies for Optuna's tools.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.base.install import install_command
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import PROBLEMS, Problem
from tuner.search.expectation import Credit, Saving, credit
from tuner.search.family_search import LEADING, FamilySearch

if TYPE_CHECKING:
    from tuner.search.samplers import Offer


@dataclass(frozen=True)
class Effort:
    """Budgets of a sweep. A trial is one group of candidates that share their kernels."""

    trials: Mapping[str, int]
    """Trials for each own family, by operation; a problem's families share the sum."""
    stage_trials: int
    """Trials for each stage of a composite family."""
    stage_keep: int
    """Best configs of each stage that a composite family is built from."""
    seeds: int
    """Trials of every family before its results decide its share. With `model`: trials of each
    family that may be compiled before any result."""
    min_gain: float
    """Share of the time that a trial must be expected to save; below, `model` ends."""
    price: float
    """Share of the time that a second of waiting must be expected to save (`stopping`); 0 waits."""
    target_s: float
    """Seconds of a sweep after which a second of waiting costs `stopping.LATE` times as much."""
    cutoff: float
    """Cutoff: a family whose best estimate exceeds the best of all by this factor is left out,
    unless named."""
    raced: int
    """Candidates of a trial that race: the others are timed only if one of these comes within
    `family_search.RACE_MARGIN` of its family's best. 0 times all."""
    finalists: int
    """Own candidates timed again beside the vendors' kernels."""
    rounds: int
    """Interleaved rounds of the final pass."""
    predicted: int
    """Trials ranked by their estimates if nothing can be timed."""


#: Quick: at most 16 kernels for each family of attention, 40 for GEMM. A group is started if it is
#: expected to save 0.2 %, by what came in recorded searches. Waiting costs 0.1 % a second.
#: Simulated on 16 cores (`scripts/bench tuner --preset recorded`, 39 recordings), half of the
#: searches end within 23 s, nine of ten within 37 s, and one in ten loses 0.9 %. Waiting for all
#: kernels takes 26 s and loses 0.4 %. Twice the price takes 19 s and loses 1.6 % in one of ten.
#: Full: 200 groups for each family, which enumerates all smaller spaces, and all compiles are
#: waited for.
EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        trials=dict.fromkeys(("attention", "attention_backward", "softmax"), 16),
        stage_trials=4,
        stage_keep=2,
        seeds=6,
        min_gain=0.002,
        price=0.001,
        target_s=55.0,
        cutoff=2.5,
        raced=2,
        finalists=4,
        rounds=20,
        predicted=2,
    ),
    "full": Effort(
        trials=dict.fromkeys(PROBLEMS, 200),
        stage_trials=48,
        stage_keep=4,
        seeds=12,
        min_gain=0.0,
        price=0.0,
        target_s=math.inf,
        cutoff=math.inf,
        raced=0,
        finalists=8,
        rounds=40,
        predicted=16,
    ),
}
DEFAULT_TRIALS = 40
"""Trials of an operation that an effort does not name."""

Place = tuple[str, str]
"""A group: name of its family, and key."""

SAMPLERS = ("model", "tpe", "gp", "cmaes", "cost", "random")
NEEDED = {"gp": ("torch", "scipy"), "cmaes": ("cmaes",)}
"""Packages that Optuna's samplers need."""
TOGETHER = 4
"""Groups that are begun together after the first ones: they share the compiler's units."""
COMPILED_GAIN, COMPILED_AT_ONCE = 0.0002, 2
"""Share of the time that a group of compiled kernels must be expected to save, and most of them in
flight. To check and time one takes a fifth of a second, at the price of a second of `quick`."""
MAX_JUDGED = 64
"""Most groups whose joint gain is sampled."""
PROMISE_EXPONENT = 4
"""A family twice as slow as the best one gets 1/16 of its share."""
COLD_START = 1.0
"""Worth of a problem's first group, added to any saving: without a group it is not tuned."""
FAILED_PROMISE = 0.01
"""Promise of a family whose seeds are measured and none of them passed."""


def effort(name: str) -> Effort:
    """The budgets of an effort by name.

    Raises:
        ConfigError: on an unknown name.
    """
    if name not in EFFORTS:
        raise ConfigError(f"effort={name} is not known (allowed: {', '.join(EFFORTS)})")
    return EFFORTS[name]


def sampler_name(given: str | None) -> str:
    """Name of the sampler: the given one, that of the settings, or `model`.

    Raises:
        ConfigError: when it is unknown, or needs a package that is not installed.
    """
    name = given or settings.sampler() or "model"
    if name not in SAMPLERS:
        raise ConfigError(f"sampler={name} is not known (allowed: {', '.join(SAMPLERS)})")
    missing = [m for m in NEEDED.get(name, ()) if importlib.util.find_spec(m) is None]
    if missing:
        command = install_command(*missing)
        raise ConfigError(
            f"sampler={name} needs {' and '.join(missing)}: {command} (or use sampler=model)"
        )
    return name


def min_estimate_us(
    family: Family, problem: Problem, gpu: Gpu, catalogue: Callable[[str], Mapping[str, Family]]
) -> float:
    """Least estimated time of a family's configs, microseconds; for a composite family the sum of
    its stages.

    Args:
        family: own family that serves the problem.
        problem: problem to estimate.
        gpu: GPU to estimate for.
        catalogue: gives the families of an operation, for stages.
    """
    stages = family.stages(problem).values()
    if stages:
        return sum(
            min(
                min_estimate_us(member, stage, gpu, catalogue)
                for member in catalogue(stage.op).values()
                if not member.is_vendor and not member.supports(stage, gpu)
            )
            for stage in stages
        )
    space = family.space(problem, gpu)
    return min((family.predict_us(problem, c, gpu) for c in space), default=math.inf)


@dataclass
class Search:
    """Search over the families of one problem with one budget.

    With `model`, the group with the least expected time over all families is next; after `LEADING`
    groups the one with the largest expected gain.

    With another sampler every family gets its seeds. A family whose groups fit its equal share of
    the budget is enumerated. The remaining trials go one by one to the family with the largest
    promise / (trials + 1). The promise is (best latency of all / best latency of the family) **
    `PROMISE_EXPONENT`.
    """

    members: list[FamilySearch]
    total: int
    seeds: int
    min_gain: float = 0.0
    """Share of the time that a group must be expected to save; below it `model` ends."""
    told: int = field(default=0, init=False)
    """Number of trials that came from the store."""
    _leading: set[Place] = field(default_factory=set, init=False)
    """The first `LEADING` groups that were begun within the budget."""
    _asks: bool = field(default=True, init=False)
    """False until there is room for `TOGETHER` groups again."""

    @property
    def spent(self) -> int:
        return sum(member.started for member in self.members)

    @property
    def pending(self) -> int:
        """Number of groups that were requested and have no result yet."""
        return sum(len(member.pending) for member in self.members)

    @property
    def pending_extra(self) -> int:
        """Number of pending groups that were begun beside the budget."""
        return sum(key in member.extra for member in self.members for key in member.pending)

    @property
    def done(self) -> int:
        """Number of groups within the budget that have a result."""
        return self.spent - self.pending + self.pending_extra

    @property
    def goal(self) -> int:
        """Largest number of trials of the search."""
        return min(self.total, sum(len(member.groups) for member in self.members))

    @property
    def at_once(self) -> int:
        """Most groups in flight: all of them if all will be measured, else half of the budget.

        No more than the first ones if the expected gain decides about further groups.
        """
        groups = sum(len(member.groups) for member in self.members)
        is_enumerated = groups <= self.total and not self.min_gain
        half = max(1, groups if is_enumerated else math.ceil(self.total / 2))
        return min(half, LEADING) if self.min_gain and self.is_modelled else half

    @property
    def leads(self) -> bool:
        """True while one of the first `LEADING` groups has no result."""
        return any(
            (member.family.name, key) in self._leading
            for member in self.members
            for key in member.pending
        )

    @property
    def credit(self) -> Credit:
        """Share of an expected gain that came in recorded searches with as many results."""
        return credit(sum(member.finished for member in self.members))

    def ask(self) -> list[Config] | None:
        """Configs to measure next: a new group's, or the other variants of a group near the best.

        None when the budget or every space is used up, or no expected gain is worth a compile.
        """
        for member in self.members:
            if (group := member.take_survivor()) is not None:
                return group
        if self.spent >= self.total:
            return None
        if any(member.surrogate is None for member in self.members):
            return self._ask_in_turn()
        room = self.at_once - self.pending + self.pending_extra
        self._asks = room >= TOGETHER or self.spent < LEADING or (self._asks and room > 0)
        pick = self._offered({}) if self._asks else None
        self._asks = pick is not None and room > 1
        if pick is None:
            return None
        member, key = pick
        self._begin(member, key)
        return member.take()

    def _begin(self, member: FamilySearch, key: str) -> None:
        if self.spent < LEADING:
            self._leading.add((member.family.name, key))

    def ask_compiled(self, compiled: Collection[Place]) -> list[Config] | None:
        """Configs of the compiled group with the largest expected gain, beside the budget: it costs
        no compile, and the GPU waits for compilers.

        None if enough of them are in flight, without a time, or where no gain is worth it.

        Args:
            compiled: groups whose kernels are compiled.
        """
        if not self.is_modelled or math.isinf(self.best_us):
            return None
        if self.pending_extra >= COMPILED_AT_ONCE:
            return None
        offers: list[tuple[float, FamilySearch, str]] = []
        for member in self.members:
            keys = [key for key in member.open if (member.family.name, key) in compiled]
            if keys and member.surrogate is not None:
                gains = member.surrogate.gains(keys, math.log(self.best_us), member.underway)
                best = max(keys, key=gains.__getitem__)
                if gains[best] >= COMPILED_GAIN:
                    offers.append((gains[best], member, best))
        if not offers:
            return None
        _, pick, key = max(offers, key=lambda offer: offer[0])
        return pick.take_extra(key)

    def take(self, config: Config) -> list[Config]:
        """Start the group of a config out of order; returns its configs to measure."""
        for member in self.members:
            if member.family.name == config.family:
                key = member.family.compile_digest(config)
                if key not in member.trials.groups.open:
                    return []
                self._begin(member, key)
                return member.take(key)
        return []

    def tell(self, measurements: Sequence[Measurement]) -> None:
        for member in self.members:
            member.tell(m for m in measurements if m.config.family == member.family.name)

    def tell_known(self, measurements: Sequence[Measurement]) -> None:
        """Add the store's measurements, before the first `ask`."""
        for member in self.members:
            member.tell_known(m for m in measurements if m.config.family == member.family.name)
        self.told = self.spent

    def first_groups(self) -> list[list[Config]]:
        """Groups that `ask` will return first, which may be compiled before the search."""
        budget = self.total - self.spent
        groups: list[list[Config]] = []
        if any(member.surrogate is None for member in self.members):
            for member in self.members:
                count = self._wanted(member) - member.started
                keys = member.open[: max(0, min(count, budget - len(groups)))]
                groups += [member.missing(key) for key in keys]
            return groups
        taken_of: dict[str, list[str]] = {}
        while len(groups) < min(budget, self.at_once, 2 * LEADING):
            pick = self._offered(taken_of)
            if pick is None:
                break
            member, key = pick
            taken_of.setdefault(member.family.name, []).append(key)
            groups.append(member.missing(key))
        return groups

    def worths(self, taken: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], float]:
        """Worth of each open group, by family and key: share of the time that it may save.

        The expected saving is over the groups of `taken`, assumed to be measured. Without any it is
        over the group expected to be slowest, plus `COLD_START`.

        Args:
            taken: keys of these groups, by family.
        """
        means = {
            (member.family.name, key): member.surrogate.mean(key)
            for member in self.members
            if member.surrogate is not None
            for key in member.open
        }
        values = [means[name, key] for name, keys in taken.items() for key in keys]
        measured = self.best_us
        if not values and math.isinf(measured):
            slowest = max(means.values(), default=0.0)
            return {place: COLD_START + slowest - mean for place, mean in means.items()}
        best = min([*values, *([math.log(measured)] if math.isfinite(measured) else [])])
        worth: dict[tuple[str, str], float] = {}
        for member in self.members:
            assumed = taken.get(member.family.name, ())
            keys = [key for key in member.open if key not in assumed]
            if keys and member.surrogate is not None:
                gains = member.surrogate.gains(keys, best, [*member.underway, *assumed])
                worth |= {(member.family.name, key): gain for key, gain in gains.items()}
        return worth

    @property
    def is_modelled(self) -> bool:
        """True if every family's sampler is `model`."""
        return bool(self.members) and all(member.surrogate is not None for member in self.members)

    @property
    def best_us(self) -> float:
        """Best time so far, microseconds; infinite without one."""
        return min((member.best_us for member in self.members), default=math.inf)

    def joint_gains(self, places: Sequence[Place]) -> list[float]:
        """Expected improvement on the best time by the first one, two, ... of some groups together.

        An improvement is a difference of logarithms: about the share of the time that is saved.

        Args:
            places: groups of families with a surrogate.
        """
        if math.isinf(self.best_us):
            return [math.inf] * len(places)
        least: Any = math.inf
        drawn: dict[Place, Any] = {}
        for seed, member in enumerate(self.members):
            keys = [key for name, key in places if name == member.family.name]
            if keys and member.surrogate is not None:
                columns = member.surrogate.draws(keys, seed).T
                drawn |= {
                    (member.family.name, key): c for key, c in zip(keys, columns, strict=True)
                }
        gains = []
        for place in places:
            least = drawn[place].clip(max=least)
            gains.append(float((math.log(self.best_us) - least).clip(min=0.0).mean()))
        return gains

    def expected_saving(self) -> Saving | None:
        """Share of the best time that the groups without a result are expected to save.

        The `MAX_JUDGED` most promising groups count, together. None without a model or a time.
        """
        if not self.is_modelled or math.isinf(self.best_us):
            return None
        gains: dict[Place, float] = {}
        for member in self.members:
            keys = [*member.open, *member.underway]
            if keys and member.surrogate is not None:
                found = member.surrogate.gains(keys, math.log(self.best_us))
                gains |= {(member.family.name, key): gain for key, gain in found.items()}
        top = sorted(gains, key=lambda place: -gains[place])[:MAX_JUDGED]
        promised = -math.expm1(-self.joint_gains(top)[-1]) if top else 0.0
        return Saving(promised, promised * self.credit.share, promised * self.credit.share_p90)

    # By expected gain

    def _offered(self, taken: Mapping[str, Sequence[str]]) -> tuple[FamilySearch, str] | None:
        """The open group to begin next, and its family; None when no gain is worth a compile.

        The first `LEADING` groups are those with the least expected times, later ones those with
        the largest expected gain, of which `credit` counts.

        Args:
            taken: keys of groups to count as pending, by family.
        """
        if not self.members:
            return None
        best = self._best()
        leads = self.spent + sum(map(len, taken.values())) < LEADING
        offers: list[tuple[FamilySearch, Offer]] = []
        for member in self.members:
            if member.model is not None:
                assumed = taken.get(member.family.name, ())
                offer = member.model.offer(best, assumed, leads=leads)
                if offer is not None:
                    offers.append((member, offer))
        most = max((offer.most_gain for _, offer in offers), default=-1.0)
        if most * (1.0 if leads else self.credit.share) < self.min_gain:
            return None
        if leads:
            member, offer = min(offers, key=lambda pair: pair[1].mean)
        else:
            member, offer = max(offers, key=lambda pair: pair[1].gain)
        return member, offer.key

    def _best(self) -> float:
        """Logarithm of the best time so far; without one, of the best expected time."""
        if math.isfinite(self.best_us):
            return math.log(self.best_us)
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
        """Number of groups that a family gets in any case."""
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
        return max(
            available, key=lambda m: (_promise(m, self.best_us) / (m.started + 1), m.family.name)
        )


def _promise(member: FamilySearch, best_us: float) -> float:
    if math.isinf(member.best_us):
        return FAILED_PROMISE if member.finished else 1.0
    return (best_us / member.best_us) ** PROMISE_EXPONENT
