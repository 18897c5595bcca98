"""Families and candidates that compete in a sweep, and their searches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.families.base import Family, without_fallbacks
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.search import hints, ranking
from tuner.search.expectation import expected
from tuner.search.family_search import FamilySearch
from tuner.search.study import (
    DEFAULT_TRIALS,
    Place,
    Search,
    effort,
    min_estimate_us,
    sampler_name,
)
from tuner.selection.portfolio import promising
from tuner.store import Store
from tuner.tuning.options import Catalogue, SweepOptions, check_families
from tuner.tuning.outcome import summary
from tuner.tuning.progress import Interruption

PORTFOLIO_FIRST = 3
"""Maximum kernels of a portfolio that are timed before the sweep waits for compiles, and that
compete beside a family's space."""


class Competition:
    """Own and vendors' families of one problem, with their measurements.

    Args:
        problem: problem to tune.
        regime: regime of the times.
        runner: runner that evaluates candidates.
        store: store with earlier measurements for the searches.
        options: options that restrict the families and candidates.
        catalogue: function that returns the families of an operation.
        interruption: interruption that ends waits early.
        note: callback for messages to the user.

    Raises:
        ConfigError: when a named family does not serve the problem.
    """

    def __init__(
        self,
        problem: Problem,
        regime: Regime,
        runner: Runner,
        store: Store,
        options: SweepOptions,
        *,
        catalogue: Catalogue,
        interruption: Interruption,
        note: Callable[[str], None],
    ) -> None:
        self.problem, self.regime, self.runner = problem, regime, runner
        self.options, self.effort = options, effort(options.effort)
        is_predicted = runner.provenance is Provenance.PREDICTED
        # Predictions are only ranked: a search does not learn from the cost model's own values.
        self.sampler = "cost" if is_predicted else sampler_name(options.sampler)
        self._store, self._catalogue = store, catalogue
        self._interruption, self._note = interruption, note
        self.members: dict[tuple[str, str], FamilySearch] = {}
        """Searches by their problem's key and their family's name."""
        self._histories: dict[Problem, Sequence[Measurement]] = {}
        self.standing: Callable[[], Config | None] = lambda: None
        """Best own config of the current decision, which is searched whatever the spaces hold."""
        # Own families as requested, and vendors'. Only vendors' if only those are named.
        every = self._catalogue(self.problem.op)
        check_families(self.options.families, self.problem.op, every)
        named = set(self.options.families)
        own = [f for f in every.values() if not f.is_vendor and (not named or f.name in named)]
        vendors = [f for f in every.values() if f.is_vendor]
        if named and not own:
            vendors = [f for f in vendors if f.name in named]
        serving = self._serving(own, self.problem)
        rivals = serving if named else self._within_cutoff(without_fallbacks(serving))
        self.own, self.vendors = rivals, self._serving(vendors, self.problem)

    def plain_search(self) -> Search:
        """Search of the own families that are not composites, which wait for their stages. It has
        the store's measurements.
        """
        return self.main_search([f for f in self.own if not f.stages(self.problem)])

    def expectation(self) -> str:
        """Text of the expected time and loss of a search of this effort. Empty for another sampler
        or budget, and if the search does not measure.
        """
        options, cores = self.options, self.runner.compiles
        is_usual = options.trials is None and options.time_limit_s is None
        if self.runner.provenance is not Provenance.MEASURED or self.sampler != "model":
            return ""
        usual = expected(self.problem.op, options.effort, cores) if is_usual else None
        return f"{self.problem.label()}: {usual.text(cores)}" if usual else ""

    # What competes

    def _within_cutoff(self, families: list[Family]) -> list[Family]:
        """Families that may win by their estimates. The others' estimates exceed the cutoff; a
        composite family also costs its stages' kernels.
        """
        gpu, problem = self.runner.gpu, self.problem
        if len(families) < 2 or math.isinf(self.effort.cutoff):
            return families
        estimates = [min_estimate_us(f, problem, gpu, self._catalogue) for f in families]
        limit = self.effort.cutoff * min(estimates)
        for family, estimate in zip(families, estimates, strict=True):
            if estimate > limit:
                ratio = estimate / min(estimates)
                self._note(f"{family.name} is left out: {ratio:.1f} times the best estimate")
        return [f for f, estimate in zip(families, estimates, strict=True) if estimate <= limit]

    def _serving(self, families: Sequence[Family], problem: Problem) -> list[Family]:
        members = []
        for family in families:
            reason = family.supports(problem, self.runner.gpu)
            if not reason and self.runner.provenance is Provenance.MEASURED:
                reason = family.lacks()
            if reason:
                stage = "" if problem == self.problem else f" for the stage {problem.op}"
                self._note(f"{family.name} does not compete{stage}: {reason}")
            else:
                members.append(family)
        return members

    def stage_families(self, sub: Problem) -> list[Family]:
        own = [f for f in self._catalogue(sub.op).values() if not f.is_vendor]
        return self._serving(own, sub)

    def best_configs(self, search: Search) -> list[Config]:
        """Best config of each of the fastest kernels."""
        best: dict[str, Measurement] = {}
        passed = [
            (m, member.family) for member in search.members for m in member.seen.values() if m.ok
        ]
        for m, family in sorted(passed, key=lambda pair: ranking.by_latency(pair[0])):
            best.setdefault(family.compile_digest(m.config), m)
        return [m.config for m in best.values()][: self.effort.stage_keep]

    # Searches

    def vendor_search(self) -> Search:
        members = self._competing(self.problem, self.vendors)
        return self._start(self.problem, members, sum(len(m.groups) for m in members))

    def main_search(self, families: Sequence[Family]) -> Search:
        """Search of the own families. Its budget is for compiles: beyond the first answer's, groups
        whose kernels were there before do not count, unless the user limits the trials.
        """
        members = self._competing(self.problem, families)
        most = self.effort.trials.get(self.problem.op, DEFAULT_TRIALS)
        total = self.options.trials or most * len(members)
        search = self._start(self.problem, members, total, self.effort.min_gain)
        if self.options.trials is None and self.runner.provenance is Provenance.MEASURED:
            ready = sum(member.uncompiled for member in members)
            search.total += max(0, ready - PORTFOLIO_FIRST)
        return search

    def stage_search(self, sub: Problem, families: Sequence[Family] | None = None) -> Search:
        if families is None:
            families = [f for f in self.stage_families(sub) if not f.stages(sub)]
        members = self._competing(sub, families)
        return self._start(sub, members, self.effort.stage_trials, self.effort.min_gain)

    def _start(
        self, problem: Problem, members: list[FamilySearch], total: int, min_gain: float = 0.0
    ) -> Search:
        """New search that has the store's measurements."""
        if self.runner.provenance is Provenance.PREDICTED:
            total = min(total, self.effort.predicted * len(members))
        search = Search(members, total, self.effort.seeds, min_gain)
        stored = self._store.measurements(
            problem=problem,
            gpu=self.runner.gpu,
            regime=self.regime,
            provenance=self.runner.provenance,
            final=False,
        )
        search.tell_known([m for m in stored if m.environment.digest == self._environment()])
        return search

    def _environment(self) -> str:
        """Digest of the machine's environment, read only where it matters."""
        return self.runner.environment.digest

    def _competing(self, problem: Problem, families: Sequence[Family]) -> list[FamilySearch]:
        members = [self._member(problem, family) for family in families]
        return [member for member in members if member.groups]

    def _member(self, problem: Problem, family: Family) -> FamilySearch:
        """Search of a family, kept from `prefetch` to `run`. A composite family's is new each
        time.
        """
        key = (problem.key, family.name)
        if key not in self.members or family.stages(problem):
            self.members[key] = FamilySearch(
                family,
                problem,
                self.runner.gpu,
                self._space(problem, family),
                seeds=self.effort.seeds,
                sampler=self.sampler,
                seed=self.options.seed,
                raced=0 if family.is_vendor else self.effort.raced,
                history=() if family.is_vendor else self.history(problem),
                expected_us=self._expected_us(problem, family),
            )
        return self.members[key]

    def history(self, problem: Problem) -> Sequence[Measurement]:
        """Measurements of other problems, read once, for the sampler that learns from them."""
        if self.sampler != "model":
            return ()
        if problem not in self._histories:
            from tuner.search.history import history

            self._histories[problem] = history(
                problem, self.runner.gpu, self.regime, self._environment, self._store
            )
        return self._histories[problem]

    def _space(self, problem: Problem, family: Family) -> Sequence[Config]:
        space = family.space(problem, self.runner.gpu)
        if problem == self.problem and not family.is_vendor:
            space = [*space, *self._beyond(family, space)]
        most = self.options.max_workspace
        if most is not None:
            space = [c for c in space if family.scratch_bytes(problem, c) <= most]
        is_slow = family.is_listed  # a library's list takes seconds
        with self._interruption.waiting() if is_slow else contextlib.nullcontext():
            space = self.runner.candidates(problem, family, space)
        if family.is_listed and space:
            self._note(f"{family.name}: {len(space)} listed by its library")
        return self.runner.compiled(problem, family, space) if self.options.compiled_only else space

    @cached_property
    def _portfolio(self) -> Mapping[Config, float]:
        """Expected microseconds of the shape's portfolio where something is measured, best first;
        one config a kernel.
        """
        problem, gpu = self.problem, self.runner.gpu
        configs: dict[tuple[str, str], tuple[Config, float]] = {}
        if self.runner.provenance is Provenance.MEASURED:
            for us, config in promising(problem, gpu):
                family = self.family(config.family)
                if family is not None and family.accepts(problem, config, gpu):
                    place = family.name, family.compile_digest(config)
                    configs.setdefault(place, (config, us))
        return dict(configs.values())

    def _expected_us(self, problem: Problem, family: Family) -> Mapping[Config, float]:
        """Times that the portfolio's rates give for a family's configs, microseconds."""
        if problem != self.problem:
            return {}
        return {c: us for c, us in self._portfolio.items() if c.family == family.name}

    @property
    def leader(self) -> Config | None:
        """Own config to compile first: the current decision's, else the portfolio's first."""
        standing = self.standing()
        named = {family.name for family in self.own}
        return standing or next((c for c in self._portfolio if c.family in named), None)

    def hinted(self, search: Search) -> list[Config]:
        """Configs that imported hints name, which are tried first."""
        configs = hints.first(self.problem, self.runner.gpu, search.members, hints.stored())
        if configs:
            self._note(f"hints are tried first: {len(configs)} of {hints.file()}")
        return configs

    def _beyond(self, family: Family, space: Sequence[Config]) -> Sequence[Config]:
        """Configs that the family's space leaves out, as it does with persistent blocks for few
        tiles: the current decision's, and the first ones of the shape's portfolio.
        """
        likely = [c for c in self._portfolio if c.family == family.name][:PORTFOLIO_FIRST]
        standing = self.standing()
        if standing is not None and standing.family == family.name:
            likely.append(standing)
        digests = {family.compile_digest(config) for config in space}
        beyond = {family.compile_digest(config): config for config in reversed(likely)}
        return [config for key, config in beyond.items() if key not in digests]

    def check_compiled(self) -> None:
        """Check that an own kernel can compete. A sweep with vendors' kernels only would waste GPU
        time.

        Raises:
            NoValidConfigError: when no own kernel is compiled.
        """
        is_plain = any(not family.stages(self.problem) for family in self.own)
        if is_plain and not self.plain_search().members:
            raise NoValidConfigError(
                f"no kernel for {self.problem.label()} is compiled, and only compiled ones may "
                "compete: compile some first (`tuner sweep --compile`)"
            )

    def seen(self, problem: Problem | None = None) -> list[Measurement]:
        """Every quick measurement that the searches have, of one problem or of all."""
        only = problem.key if problem is not None else None
        return [
            m
            for (key, _), member in self.members.items()
            if only in (None, key)
            for m in member.seen.values()
        ]

    def family(self, name: str) -> Family | None:
        """A family of the operation by name."""
        return self._catalogue(self.problem.op).get(name)

    def ready(self, wanted: Iterable[Config]) -> list[Config]:
        """Compiled configs of `wanted`, and the first `PORTFOLIO_FIRST` compiled ones of the
        shape's portfolio.
        """
        configs: dict[str, Config] = {}
        for config in (*wanted, *self._portfolio):
            member = self.members.get((self.problem.key, config.family))
            family = self.family(config.family)
            if member is None or family is None or len(configs) == PORTFOLIO_FIRST:
                continue
            key = family.compile_digest(config)
            if key in member.open and self.runner.compiled(self.problem, family, [config]):
                configs.setdefault(key, config)
        return list(configs.values())

    def compiled(self) -> set[Place]:
        """Groups of the started searches whose kernels are compiled. None where only such groups
        compete, or where the user limits the trials.
        """
        options, runner = self.options, self.runner
        is_measured = runner.provenance is Provenance.MEASURED
        if not is_measured or options.compiled_only or options.trials is not None:
            return set()
        places: set[Place] = set()
        for (problem, _), member in self.members.items():
            family = member.family
            if problem == self.problem.key and not family.is_vendor:
                firsts = [group[0] for group in member.groups.values()]
                built = runner.compiled(self.problem, family, firsts)
                places |= {(family.name, family.compile_digest(config)) for config in built}
        return places

    def kernel(self, config: Config) -> str:
        return self.members[self.problem.key, config.family].family.compile_digest(config)

    def are_alike(self, config: Config, other: Config | None) -> bool:
        """True for configs of one kernel."""
        if other is None or other.family != config.family:
            return False
        return self.kernel(config) == self.kernel(other)

    def fits(self, m: Measurement) -> bool:
        most = self.options.max_workspace
        return most is None or m.workspace_bytes <= most

    def why_nothing(self, notes: Sequence[str]) -> str:
        """Reason why no candidate passed."""
        tried = self.seen()
        if not tried:
            reasons = "; ".join(notes) or "the search had no candidate"
            return f"no candidate for {self.problem.label()}: {reasons}"
        return f"no candidate for {self.problem.label()} passed: {summary(tried)}"
