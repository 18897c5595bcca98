"""Sweep one problem: baselines, stages, search, final pass, decision.

The driver alone writes the store, and writes each group as soon as it is collected: a sweep that
is killed at any moment goes on from there, because the search is told what the store holds before
it asks for anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tuner.config import Config
from tuner.errors import (
    BenchmarkError,
    ConfigError,
    NoValidConfigError,
    StoreBusyError,
    StoreError,
)
from tuner.families import families_of
from tuner.families.base import Family, without_fallbacks
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.search import ranking
from tuner.search.family_search import FamilySearch
from tuner.search.study import DEFAULT_TRIALS, Search, effort, least_estimate_us, sampler_name
from tuner.selection.shipped import shipped_index
from tuner.store import Store, SweepRecord, open_store
from tuner.store.entry import Entry, is_vendor, vendor_name
from tuner.tuning.outcome import Outcome, first_line, summary
from tuner.tuning.progress import Interruption, SweepState, Watcher

if TYPE_CHECKING:
    from tuner.search.storage import StudyStorage

_LOG = logging.getLogger("tuner.sweep")

Catalogue = Callable[[str], Mapping[str, Family]]
"""The families of an operation by name."""

STAGES_TIME = 0.5
"""Part of the time limit that the stages of composite families may use."""
INTERRUPTED = "interrupted"
"""Reason of a trial that had no result when its sweep ended."""
INTERRUPTED_FINALISTS = 2
LEAST_ROUNDS = 20


@dataclass(frozen=True)
class SweepOptions:
    """What decides what a sweep measures."""

    families: tuple[str, ...] = ()
    """Own families to try; empty means all. Vendors' kernels are always measured beside them."""
    effort: str = "quick"
    trials: int | None = None
    """Groups of candidates, in place of the effort's; those in the store count."""
    time_limit_s: float | None = None
    """After this no group is started; the final pass follows."""
    max_workspace: int | None = None
    """Bytes that a candidate may use beside its operands."""
    seed: int = 0
    sampler: str | None = None
    compiled_only: bool = False
    """Only candidates whose kernels are compiled already: a GPU waits for no compiler."""

    def __post_init__(self) -> None:
        effort(self.effort)
        sampler_name(self.sampler)
        for name, value, least in (
            ("trials", self.trials, 1),
            ("max-workspace", self.max_workspace, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} is out of range (allowed: {least} or more)")
        limit = self.time_limit_s
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise ConfigError(f"time-limit={limit} is out of range (allowed: above 0 seconds)")

    def digest(self, provenance: Provenance) -> str:
        """Equal for sweeps that would measure the same."""
        facts = {
            **asdict(self),
            "families": sorted(self.families),
            "sampler": sampler_name(self.sampler),
            "provenance": provenance.value,
        }
        if not self.compiled_only:  # as before there was such a choice
            del facts["compiled_only"]
        if provenance is Provenance.REPLAYED:  # older replays ranked times of two passes together
            facts["passes"] = 1
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Sweep:
    """One sweep. `prefetch` may come long before `run`."""

    def __init__(
        self,
        problem: Problem,
        regime: Regime,
        runner: Runner,
        store: Store,
        options: SweepOptions,
        *,
        watcher: Watcher | None = None,
        interruption: Interruption | None = None,
        catalogue: Catalogue = families_of,
        studies: StudyStorage | None = None,
    ) -> None:
        self.problem = problem
        self.regime = regime
        self.runner = runner
        self.store = store
        self.options = options
        self._effort = effort(options.effort)
        is_predicted = runner.provenance is Provenance.PREDICTED
        # Estimates can only be ranked: nothing is learned from what the cost model says itself.
        self._sampler = "cost" if is_predicted else sampler_name(options.sampler)
        self._watcher = watcher or Watcher()
        self._interruption = interruption or Interruption()
        self._catalogue = catalogue
        self._studies = studies
        self._notes: list[str] = []
        self._unranked: list[Measurement] = []
        self._own, self._vendors = self._competitors()
        self._members: dict[tuple[str, str], FamilySearch] = {}
        self._histories: dict[Problem, Sequence[Measurement]] = {}
        self._record = self._sweep_record()
        self._state = SweepState(
            problem,
            runner.gpu,
            regime,
            runner.provenance,
            started=time.monotonic(),
            building=lambda: runner.building,
        )

    @property
    def id(self) -> str:
        """Identity of this sweep in the store."""
        return self._record.id

    def prefetch(self) -> None:
        """Start compiling what the search is certain to ask for."""
        for family in self._own:
            for sub in family.stages(self.problem).values():
                self.runner.prefetch(sub, self._stage_search(sub).ahead())
        search = self.plain_search()
        if search.members:
            self.runner.prefetch(self.problem, search.ahead())

    def plain_search(self) -> Search:
        """The search of those own families that are no composite of others, which wait for their
        stages; it has been told what the store holds.
        """
        return self._main_search([f for f in self._own if not f.stages(self.problem)])

    def run(self, on_drained: Callable[[], None] | None = None) -> Outcome:
        """Sweep, decide, store.

        Args:
            on_drained: called once, when nothing is left to compile for this problem.

        Raises:
            NoValidConfigError: when no candidate passed; says what failed how often.
            StoreError: when the store cannot be written.
        """
        state = self._state
        state.started = time.monotonic()
        limit = self.options.time_limit_s
        state.deadline = None if limit is None else state.started + limit
        self._write(lambda: self.store.begin_sweep(self._record))
        try:
            self.prefetch()
            outcome = self._run(on_drained)
        except StoreError:
            raise  # it stays ``running``, as after a kill
        except BaseException:
            with contextlib.suppress(StoreError):  # the first fault is the one to be told
                self.store.end_sweep(self._record.id, "interrupted")
            raise
        finally:
            self._end_studies()
        ended = "interrupted" if outcome.interrupted else "done"
        self._write(lambda: self.store.end_sweep(self._record.id, ended))
        return outcome

    def _run(self, on_drained: Callable[[], None] | None) -> Outcome:
        state = self._state
        if self.options.compiled_only:
            self._check_compiled()
        self._drive("baselines", self.problem, self._vendor_search(), state.deadline)
        half = (
            None
            if state.deadline is None
            else state.started + STAGES_TIME * (state.deadline - state.started)
        )
        resolved = [self._resolve(family, self.problem, half) for family in self._own]
        families = [family for family in resolved if family is not None]
        self._drive("search", self.problem, self._main_search(families), state.deadline)
        if on_drained is not None and not self._interruption.requested:
            on_drained()
        return self._outcome(self._finals())

    # What competes

    def _competitors(self) -> tuple[list[Family], list[Family]]:
        """Own families as asked for, and vendors'; only vendors' when only those are named."""
        known = self._catalogue(self.problem.op)
        check_families(self.options.families, self.problem.op, known)
        named = set(self.options.families)
        own = [f for f in known.values() if not f.is_vendor and (not named or f.name in named)]
        vendors = [f for f in known.values() if f.is_vendor]
        if named and not own:
            vendors = [f for f in vendors if f.name in named]
        serving = self._serving(own, self.problem)
        kept = serving if named else self._without_hopeless(without_fallbacks(serving))
        return kept, self._serving(vendors, self.problem)

    def _without_hopeless(self, families: list[Family]) -> list[Family]:
        """Those that may win by their estimates: a composite family costs its stages' kernels."""
        gpu, problem = self.runner.gpu, self.problem
        if len(families) < 2 or math.isinf(self._effort.hopeless):
            return families
        estimates = [least_estimate_us(f, problem, gpu, self._catalogue) for f in families]
        limit = self._effort.hopeless * min(estimates)
        for family, estimate in zip(families, estimates, strict=True):
            if estimate > limit:
                ratio = estimate / min(estimates)
                self._note(f"{family.name} is left out: {ratio:.1f} times the best estimate")
        return [f for f, estimate in zip(families, estimates, strict=True) if estimate <= limit]

    def _serving(self, families: Sequence[Family], problem: Problem) -> list[Family]:
        found = []
        for family in families:
            reason = family.supports(problem, self.runner.gpu)
            if not reason and self.runner.provenance is Provenance.MEASURED:
                reason = family.lacks()
            if reason:
                stage = "" if problem == self.problem else f" for the stage {problem.op}"
                self._note(f"{family.name} does not compete{stage}: {reason}")
            else:
                found.append(family)
        return found

    def _resolve(self, family: Family, problem: Problem, deadline: float | None) -> Family | None:
        """A family ready to be searched: a composite one from the best configs of its stages."""
        winners: dict[str, list[Config]] = {}
        for name, sub in family.stages(problem).items():
            families = [self._resolve(f, sub, deadline) for f in self._stage_families(sub)]
            search = self._stage_search(sub, [f for f in families if f is not None])
            self._drive(f"{family.name}: stage {name}", sub, search, deadline)
            winners[name] = self._best_configs(search)
            if not winners[name]:
                self._note(f"{family.name} is left out: nothing passed for its stage {name}")
                return None
        return family.with_stages(winners) if winners else family

    def _stage_families(self, sub: Problem) -> list[Family]:
        own = [f for f in self._catalogue(sub.op).values() if not f.is_vendor]
        return self._serving(own, sub)

    def _best_configs(self, search: Search) -> list[Config]:
        """The best config of each of the best kernels."""
        best: dict[str, Measurement] = {}
        passed = [
            (m, member.family) for member in search.members for m in member.seen.values() if m.ok
        ]
        for m, family in sorted(passed, key=lambda pair: ranking.by_latency(pair[0])):
            best.setdefault(family.compile_digest(m.config), m)
        return [m.config for m in best.values()][: self._effort.stage_keep]

    # Searches

    def _vendor_search(self) -> Search:
        members = self._competing(self.problem, self._vendors)
        return self._start(self.problem, members, sum(len(m.groups) for m in members))

    def _main_search(self, families: Sequence[Family]) -> Search:
        members = self._competing(self.problem, families)
        each = self._effort.trials.get(self.problem.op, DEFAULT_TRIALS)
        total = self.options.trials or each * len(members)
        return self._start(self.problem, members, total, self._effort.least_gain)

    def _stage_search(self, sub: Problem, families: Sequence[Family] | None = None) -> Search:
        if families is None:
            families = [f for f in self._stage_families(sub) if not f.stages(sub)]
        members = self._competing(sub, families)
        return self._start(sub, members, self._effort.stage_trials, self._effort.least_gain)

    def _start(
        self, problem: Problem, members: list[FamilySearch], total: int, least_gain: float = 0.0
    ) -> Search:
        """A search that has been told what the store holds."""
        if self.runner.provenance is Provenance.PREDICTED:
            total = min(total, self._effort.predicted * len(members))
        search = Search(members, total, self._effort.seeds, least_gain)
        search.tell_known(
            self.store.measurements(
                problem=problem,
                gpu=self.runner.gpu,
                regime=self.regime,
                environment=self.runner.environment.digest,
                provenance=self.runner.provenance,
                final=False,
            )
        )
        return search

    def _competing(self, problem: Problem, families: Sequence[Family]) -> list[FamilySearch]:
        members = [self._member(problem, family) for family in families]
        return [member for member in members if member.groups]

    def _member(self, problem: Problem, family: Family) -> FamilySearch:
        """The search of a family, kept from `prefetch` to `run`; a composite family's is new."""
        key = (problem.key, family.name)
        if key not in self._members or family.stages(problem):
            self._members[key] = FamilySearch(
                family,
                problem,
                self.runner.gpu,
                self._space(problem, family),
                seeds=self._effort.seeds,
                sampler=self._sampler,
                seed=self.options.seed,
                heat=0 if family.is_vendor else self._effort.heat,
                history=() if family.is_vendor else self._history(problem),
            )
        return self._members[key]

    def _history(self, problem: Problem) -> Sequence[Measurement]:
        """What was measured of other problems, read once; for the sampler that learns from it."""
        if self._sampler != "model":
            return ()
        if problem not in self._histories:
            from tuner.search.history import history

            environment = self.runner.environment.digest
            self._histories[problem] = history(
                problem, self.runner.gpu, self.regime, environment, self.store
            )
        return self._histories[problem]

    def _space(self, problem: Problem, family: Family) -> Sequence[Config]:
        space = family.space(problem, self.runner.gpu)
        most = self.options.max_workspace
        if most is not None:
            space = [c for c in space if family.scratch_bytes(problem, c) <= most]
        is_slow = family.is_listed  # a library's list takes seconds
        with self._interruption.waiting() if is_slow else contextlib.nullcontext():
            space = self.runner.candidates(problem, family, space)
        if family.is_listed and space:
            self._note(f"{family.name}: {len(space)} listed by its library")
        return self.runner.compiled(problem, family, space) if self.options.compiled_only else space

    def _check_compiled(self) -> None:
        """See that an own kernel will compete; vendors' alone are not worth the GPU's time.

        Raises:
            NoValidConfigError: when none is compiled.
        """
        is_plain = any(not family.stages(self.problem) for family in self._own)
        if is_plain and not self.plain_search().members:
            raise NoValidConfigError(
                f"no kernel for {self.problem.label()} is compiled, and only compiled ones may "
                "compete: compile some first (`tuner sweep --compile`)"
            )

    # Evaluating

    def _drive(self, phase: str, problem: Problem, search: Search, deadline: float | None) -> None:
        """Evaluate what `search` asks for until it ends, the time is over or Ctrl-C."""
        state = self._state
        state.phase, state.goal, state.phase_started = phase, search.goal, time.monotonic()
        state.resumed += search.told
        state.done_before = search.told
        limit = min(self.runner.capacity, search.at_once)
        for member in search.members:
            self._copy(member)
        while True:
            burst: list[list[Config]] = []
            while search.pending < limit and not self._stopped(deadline):
                group = search.ask()
                if group is None:
                    break
                burst.append(group)
            if len(burst) > 1:
                self.runner.prefetch(problem, burst)
            requests = self._requests(burst)
            for request in requests:
                self.runner.submit(problem, request)
            state.in_flight += len(requests)
            state.done = search.spent - search.pending
            self._show()
            if not search.pending or self._stopped(deadline):
                return
            self._collect()

    def _requests(self, burst: list[list[Config]]) -> list[list[Config]]:
        """A group each, that none waits for another's compiling. Where nothing is to be compiled a
        family's go together: each request computes the references of its problem anew, which takes
        longer than timing some kernels.
        """
        if not self.options.compiled_only:
            return burst
        together: dict[str, list[Config]] = {}
        for group in burst:
            together.setdefault(group[0].family, []).extend(group)
        return list(together.values())

    def _stopped(self, deadline: float | None) -> bool:
        late = deadline is not None and time.monotonic() >= deadline
        return late or self._interruption.requested

    def _collect(self) -> None:
        """Wait for one request; store it before anything else happens.

        Raises:
            BenchmarkError: when it was given up, and not by Ctrl-C.
        """
        collected: list[Measurement] = []
        with self._interruption.waiting():
            collected = self.runner.collect()
        if not collected:
            if not self._interruption.requested:
                raise BenchmarkError(
                    f"the search of {self.problem.label()} was given up: its runner was cancelled "
                    "or closed"
                )
            return
        measured = [self._signed(m) for m in collected]
        self._write(lambda: self.store.add(measured))
        member = self._members.get((measured[0].problem.key, measured[0].config.family))
        if member is None:
            return  # Left over from the problem before, whose time was over: kept, nothing more.
        member.tell(measured)
        self._copy(member)
        self._state.in_flight -= 1
        for m in measured:
            self._count(m)

    def _copy(self, member: FamilySearch) -> None:
        """Copy the finished trials of an own family to the Optuna storage."""
        if self._studies is None or member.family.is_vendor:
            return
        from tuner.search.storage import Subject

        runner = self.runner
        subject = Subject(
            member.problem,
            runner.gpu,
            self.regime,
            runner.environment,
            runner.provenance,
            member.family.name,
            self._sampler,
            self.options.seed,
        )
        self._studies.copy(member.trials, subject)

    def _end_studies(self) -> None:
        """Fail the trials that have no result, and let go of the copies."""
        for member in self._members.values():
            member.trials.abandon(INTERRUPTED)
            if member.started:
                self._copy(member)
            if self._studies is not None:
                self._studies.forget(member.trials)

    def _write(self, write: Callable[[], object]) -> None:
        """Write to the store, again while another program has it locked, up to Ctrl-C.

        Raises:
            StoreError: when it cannot be written.
        """
        while True:
            try:
                write()
                return
            except StoreBusyError as exc:
                if self._interruption.requested:
                    raise
                self._watcher.note(f"{exc}; trying again")

    def _signed(self, m: Measurement) -> Measurement:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return m.but(sweep=self._record.id, created_at=m.created_at or now)

    def _count(self, m: Measurement) -> None:
        if m.status is not Status.UNAVAILABLE:
            self._state.candidates += 1
            self._state.failures.update([] if m.ok else [m.status.value])

    def _show(self) -> None:
        passed = sorted((m for m in self._seen(self.problem) if m.ok), key=ranking.by_latency)
        self._state.best_own = next((m for m in passed if not is_vendor(m.config)), None)
        self._state.best_vendor = next((m for m in passed if is_vendor(m.config)), None)
        self._watcher.changed(self._state)

    # Deciding

    def _finals(self, again: bool = False) -> list[Measurement]:
        """Time the finalists side by side; best first.

        Raises:
            NoValidConfigError: when none passed.
            BenchmarkError: when it was given up, and not to be brief.
        """
        interrupted = self._interruption.requested
        count = INTERRUPTED_FINALISTS if interrupted else self._effort.finalists
        rounds = LEAST_ROUNDS if interrupted else self._effort.rounds
        chosen = ranking.finalists(self._seen(self.problem), count, self._kernel)
        chosen = [m for m in chosen if self._fits(m)]
        if not chosen:
            if interrupted:
                return []
            raise NoValidConfigError(self._why_nothing())
        self._state.phase = f"final pass of {len(chosen)}"
        self._state.goal = self._state.done = self._state.done_before = 0
        self._show()
        finals = self._retime([*(m.config for m in chosen), *self._standing()], rounds)
        timed = {m.config for m in finals}
        self._unranked = [m for m in chosen if m.config not in timed]
        if not finals:
            if again or not self._interruption.requested:
                raise BenchmarkError(
                    f"the final pass of {self.problem.label()} was given up: its runner was "
                    "cancelled or closed"
                )
            # The first Ctrl-C came during it, or a job that saw it later gave a brief one up.
            return self._finals(again=interrupted)
        seen = {m.config: m for m in chosen}
        # Quick times, as a replay may answer with, are in the store already.
        finals = [m if m.is_final else seen.get(m.config, m) for m in finals]
        ranked = ranking.rank([m for m in finals if self._fits(m)])
        self._write(lambda: self.store.add([m for m in finals if not m.ok]))
        if not ranked:
            raise NoValidConfigError(
                f"none of the {len(chosen)} finalists for {self.problem.label()} passed again: "
                + summary(finals)
            )
        return ranked

    def _standing(self) -> list[Config]:
        """The best own config of what is decided, where this sweep did not try it: a search among
        fewer candidates is not to take its place untimed. Where nothing is decided in a stream,
        that of the chained decision.
        """
        problem = self.problem
        entry = next(filter(None, map(self._decided, Regime.preferred(self.regime))), None)
        best = entry.best_own if entry else None
        if best is None or best.config in {m.config for m in self._seen(problem)}:
            return []
        family = self._catalogue(problem.op).get(best.config.family)
        if family is None or not family.accepts(problem, best.config, self.runner.gpu):
            return []
        if self.options.compiled_only and not self.runner.compiled(problem, family, [best.config]):
            return []
        return [best.config]

    def _decided(self, regime: Regime) -> Entry | None:
        """What the store decides under a regime, else what ships."""
        problem, gpu, provenance = self.problem, self.runner.gpu, self.runner.provenance
        entries = self.store.entries(problem=problem, gpu=gpu, regime=regime, provenance=provenance)
        if not entries and provenance is Provenance.MEASURED:
            found = (one.entry for one in shipped_index().get((problem, regime), ()))
            entries = [entry for entry in found if entry.gpu == gpu]
        return entries[0] if entries else None

    def _retime(self, configs: Sequence[Config], rounds: int) -> list[Measurement]:
        """One final pass; empty when the first Ctrl-C came during it."""
        if self._interruption.requested:
            return [self._signed(m) for m in self.runner.retime(self.problem, configs, rounds)]
        finals: list[Measurement] = []
        with self._interruption.waiting():
            finals = self.runner.retime(self.problem, configs, rounds)
        return [self._signed(m) for m in finals]

    def _seen(self, problem: Problem | None = None) -> list[Measurement]:
        """Every quick measurement told to the searches, of one problem or of all."""
        wanted = problem.key if problem is not None else None
        return [
            m
            for (key, _), member in self._members.items()
            if wanted in (None, key)
            for m in member.seen.values()
        ]

    def _kernel(self, config: Config) -> str:
        return self._members[self.problem.key, config.family].family.compile_digest(config)

    def _fits(self, m: Measurement) -> bool:
        most = self.options.max_workspace
        return most is None or m.workspace_bytes <= most

    def _why_nothing(self) -> str:
        seen = self._seen()
        if not seen:
            reasons = "; ".join(self._notes) or "the search had no candidate"
            return f"no candidate for {self.problem.label()}: {reasons}"
        return f"no candidate for {self.problem.label()} passed: {summary(seen)}"

    def _outcome(self, ranked: Sequence[Measurement]) -> Outcome:
        if ranked:
            place = self.problem, self.runner.gpu, self.regime
            self._write(lambda: self.store.decide(*place, ranked, self._record.id))
        seen = self._seen()
        own = [m for m in seen if not is_vendor(m.config)]
        measured = {vendor_name(m.config) for m in seen if is_vendor(m.config) and m.ok}
        return Outcome(
            problem=self.problem,
            gpu=self.runner.gpu,
            regime=self.regime,
            environment=self.runner.environment,
            provenance=self.runner.provenance,
            sweep=self._record.id,
            ranking=tuple(ranked),
            unranked=tuple(self._unranked) if ranked else (),
            quick_vendor=min(
                (m for m in seen if m.problem == self.problem and is_vendor(m.config) and m.ok),
                key=ranking.by_latency,
                default=None,
            ),
            candidates=len(own),
            kernels=sum(
                member.finished for member in self._members.values() if not member.family.is_vendor
            ),
            resumed=self._state.resumed,
            failures=Counter(m.status.value for m in own if not m.ok),
            unavailable={
                vendor_name(m.config): first_line(m.log) or m.status.value
                for m in seen
                if is_vendor(m.config) and not m.ok and vendor_name(m.config) not in measured
            },
            interrupted=self._interruption.requested,
            elapsed_s=time.monotonic() - self._state.started,
            notes=tuple(self._notes),
        )

    def _sweep_record(self) -> SweepRecord:
        """A new record, or that of the sweep with the same settings that did not end."""
        digest = self.options.digest(self.runner.provenance)
        environment = self.runner.environment.digest
        found = self.store.find_sweep(
            self.problem, self.runner.gpu, self.regime, environment, digest
        )
        if found is not None and found.state != "done":
            return found
        return SweepRecord(
            uuid.uuid4().hex[:16], self.problem, self.runner.gpu, self.regime, environment, digest
        )

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            self._watcher.note(text)


def sweep(
    problem: Problem,
    *,
    regime: Regime | None = None,
    options: SweepOptions | None = None,
    machine: Machine | None = None,
    store: str | None = None,
    optuna_storage: str | None = None,
    note: Callable[[str], None] = _LOG.warning,
) -> Outcome:
    """Tune one problem, as ``tuner sweep`` does: on the GPU, else replayed, else predicted.

    Args:
        problem: what to tune.
        regime: how to time; the operation's default, which is what the runtime serves.
        options: budgets and families.
        machine: GPU, compile jobs.
        store: SQLAlchemy URL or path; default: `settings.store_url()`.
        optuna_storage: takes copies of the studies, as `StudyStorage` names it; default:
            `settings.optuna_storage()`.
        note: told once what a person should know.

    Raises:
        NoValidConfigError: when no candidate passed.
        CompileError: when there is a GPU and no compiler.
        StoreError: when the store cannot be opened or written.
    """
    from tuner.search.storage import open_storage

    chosen = regime or Regime.default(problem.op)
    settings = options or SweepOptions()
    place = replace(machine or Machine(), max_workspace=settings.max_workspace)
    with (
        open_store(store) as opened,
        open_storage(optuna_storage, note) as studies,
        Runners(place, note) as runners,
    ):
        runner = runners.of(problem, chosen)
        return Sweep(problem, runner.regime, runner, opened, settings, studies=studies).run()


def check_families(names: Sequence[str], op: str, known: Mapping[str, Family]) -> None:
    """See that every named family serves an operation.

    Raises:
        ConfigError: when one does not; says which do.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"family '{name}' does not serve {op} (allowed: {', '.join(known)})")
