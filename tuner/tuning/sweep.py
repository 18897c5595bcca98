"""Sweep of one problem: first answer, baselines, stages, search, final pass, decision.

Only the driver writes to the store, each group as soon as it is collected. A killed sweep continues
from there: a new search starts with the store's measurements.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from tuner.config import Config
from tuner.errors import BenchmarkError, StoreBusyError, StoreError
from tuner.families import families_of
from tuner.families.base import Family
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import Problem, as_problem
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.search import ranking
from tuner.search.expectation import Saving
from tuner.search.stopping import CompileTimes
from tuner.search.study import Place, Search
from tuner.store import Store, SweepRecord, open_store
from tuner.store.entry import is_vendor, vendor_name
from tuner.tuning.budget import Budget
from tuner.tuning.competition import Competition
from tuner.tuning.finals import FinalPass
from tuner.tuning.options import Catalogue, SweepOptions
from tuner.tuning.outcome import Outcome, first_line
from tuner.tuning.progress import Interruption, SweepState, Watcher
from tuner.tuning.studies import Studies
from tuner.tuning.waiting import Waits

if TYPE_CHECKING:
    from tuner.search.storage import StudyStorage

__all__ = ["Catalogue", "Sweep", "SweepOptions", "sweep"]

_LOG = logging.getLogger("tuner.sweep")

STAGES_TIME = 0.5
"""Maximum share of the time limit for the stages of composite families."""
POLL_S = 2.0
"""Seconds between two checks of the search's stopping rule while no result arrives."""
#: Reasons of a trial without a result at the end of its sweep.
INTERRUPTED = "interrupted"
GIVEN_UP = "given up: not expected to change the answer by what its wait costs"


class Sweep:
    """One sweep. `prefetch` may be called long before `run`."""

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
        self._watcher = watcher or Watcher()
        self._interruption = interruption or Interruption()
        self._notes: list[str] = []
        self._given_up = 0
        self._saving: Saving | None = None
        self._times = CompileTimes()
        self._known_times: set[Problem] = set()
        self.competition = Competition(
            problem,
            regime,
            runner,
            store,
            options,
            catalogue=catalogue,
            interruption=self._interruption,
            note=self._note,
        )
        self._studies = Studies(self.competition, studies)
        self._budget = Budget(options.time_limit_s, Budget.now())
        self._finals = FinalPass(
            self.competition,
            store,
            self._budget,
            self._interruption,
            sign=self._signed,
            write=self._write,
            show=self._show_finals,
            note=self._watcher.note,
            sweep=lambda: self.id,
        )
        self.competition.standing = self._finals.standing
        self._state = SweepState(
            problem,
            runner.gpu,
            regime,
            runner.provenance,
            started=self._budget.started,
            building=lambda: runner.building,
        )

    @property
    def id(self) -> str:
        """Id of this sweep in the store."""
        return self._record.id

    def prefetch(self) -> None:
        """Start compiling the kernels that the search will certainly request.

        An empty store needs no facts of the machine for that. They take seconds, since a worker
        process has to start.
        """
        competition = self.competition
        leader = competition.leader
        first = [] if leader is None else [[leader]]
        if first:  # before the search's model, which takes seconds
            self.runner.prefetch(self.problem, first)
        for family in competition.own:
            for sub in family.stages(self.problem).values():
                self.runner.prefetch(sub, competition.stage_search(sub).first_groups())
        search = competition.plain_search()
        groups = search.first_groups()
        unlike = [group for group in groups if not competition.are_alike(group[0], leader)]
        self.runner.prefetch(self.problem, [*first, *unlike][: max(1, len(groups))])

    def run(
        self, on_drained: Callable[[], None] | None = None, began: float | None = None
    ) -> Outcome:
        """Sweep, decide, store.

        Args:
            on_drained: called once, when no kernel of this problem is left to compile.
            began: `Budget.now` at which the time limit starts; default: now.

        Raises:
            NoValidConfigError: when no candidate passed; names the failures with their counts.
            StoreError: when the store cannot be written.
        """
        state, budget = self._state, self._budget
        state.started = budget.started = Budget.now() if began is None else began
        state.deadline = budget.deadline
        if text := self.competition.expectation():
            self._watcher.note(text)
        self.prefetch()
        self._write(lambda: self.store.begin_sweep(self._record))
        try:
            outcome = self._run(on_drained)
        except StoreError:
            raise  # it stays ``running``, as after a kill
        except BaseException:
            with contextlib.suppress(StoreError):  # the first fault is the one to report
                self.store.end_sweep(self._record.id, "interrupted")
            raise
        finally:
            is_over = self._given_up and not self._interruption.requested
            self._studies.end(GIVEN_UP if is_over else INTERRUPTED)
        # One without a decision is gone on with, and is not taken for tuned.
        is_open = outcome.interrupted or bool(self._finals.undecided)
        ended = "interrupted" if is_open else "done"
        self._write(lambda: self.store.end_sweep(self._record.id, ended))
        return outcome

    def _run(self, on_drained: Callable[[], None] | None) -> Outcome:
        competition = self.competition
        if self.options.compiled_only:
            competition.check_compiled()
        compiled = competition.compiled()
        self._answer_first()
        if not self._is_late():  # a library's list alone takes seconds
            self._drive("baselines", self.problem, competition.vendor_search())
        if self._finals.provided or self._is_hasty:
            self._finals.provide()
        resolved = [self._resolve(family, self.problem) for family in competition.own]
        families = [family for family in resolved if family is not None]
        search = competition.main_search(families)
        leader = competition.leader
        first = [] if leader is None else [search.take(leader)]
        first += map(search.take, competition.hinted(search))
        self._drive("search", self.problem, search, first, compiled=compiled)
        self._saving = search.expected_saving()
        self.runner.abandon(self.problem)
        if on_drained is not None and not self._interruption.requested:
            on_drained()
        return self._outcome(self._finals.rank(self._notes))

    def _answer_first(self) -> None:
        """Time compiled kernels that are expected to be fast, and make a provisional decision: an
        answer exists before the first wait for a compile.
        """
        if self.runner.provenance is not Provenance.MEASURED or self.options.compiled_only:
            return
        search = self.competition.plain_search()
        standing = self._finals.standing()
        ready = self.competition.ready([] if standing is None else [standing])
        groups = [search.take(config) for config in ready]
        if any(groups):
            self._drive("first answer", self.problem, search, first=groups, is_whole=True)
            # New measurements for the search.
            self._state.resumed -= search.spent - search.told
            self._finals.provide()

    def _resolve(self, family: Family, problem: Problem) -> Family | None:
        """Family ready to be searched; a composite one is built from the best configs of its
        stages.
        """
        competition = self.competition
        winners: dict[str, list[Config]] = {}
        for name, sub in family.stages(problem).items():
            families = [self._resolve(f, sub) for f in competition.stage_families(sub)]
            search = competition.stage_search(sub, [f for f in families if f is not None])
            self._drive(f"{family.name}: stage {name}", sub, search, share=STAGES_TIME)
            self.runner.abandon(sub)
            winners[name] = competition.best_configs(search)
            if not winners[name]:
                self._note(f"{family.name} is left out: nothing passed for its stage {name}")
                return None
        return family.with_stages(winners) if winners else family

    # Evaluating

    def _drive(
        self,
        phase: str,
        problem: Problem,
        search: Search,
        first: Sequence[list[Config]] = (),
        *,
        compiled: Collection[Place] = (),
        is_whole: bool = False,
        share: float = 1.0,
    ) -> None:
        """Evaluate the candidates of `search` until it ends, no wait is worth its time, the time
        limit, or Ctrl-C.

        Args:
            phase: name of the phase, for the display.
            problem: problem of the search.
            search: search that proposes candidates.
            first: groups that were already taken from it.
            compiled: groups whose kernels are compiled, which are timed beside the budget.
            is_whole: True to evaluate only `first`.
            share: share of the time limit that may be used up at its end.
        """
        state, waits = self._state, self._waits(problem)
        state.phase, state.goal, state.phase_started = phase, search.goal, Budget.now()
        state.resumed += search.told
        state.done_before = search.told
        limit = min(self.runner.capacity, search.at_once)
        for member in search.members:
            self._studies.copy(member)
        burst, is_told = [group for group in first if group], not is_whole
        with self._budget.part(phase):
            while True:
                while is_told and not self._is_late(share):
                    is_full = search.pending - search.pending_extra >= limit
                    group = None if is_full else search.ask()
                    group = search.ask_compiled(compiled) if group is None else group
                    if group is None:
                        break
                    burst.append(group)
                self._submit(problem, burst)
                burst = []
                state.done = search.done
                self._show()
                if not search.pending:
                    return
                if waits.is_over(problem, search, self._budget.spent_s) or self._is_late(share):
                    self._give_up(problem, search)
                    return
                is_told = self._collect(share) and not is_whole

    def _submit(self, problem: Problem, burst: list[list[Config]]) -> None:
        if len(burst) > 1:
            self.runner.prefetch(problem, burst)
        requests = self._requests(burst)
        for request in requests:
            self.runner.submit(problem, request)
        self._state.in_flight += len(requests)

    def _requests(self, burst: list[list[Config]]) -> list[list[Config]]:
        """Make a request for each group, so that none waits for another's compile. Compiled groups
        of a family share a request: each request allocates its inputs again, which takes longer
        than timing some kernels.
        """
        if not self.options.compiled_only:
            return burst
        together: dict[str, list[Config]] = {}
        for group in burst:
            together.setdefault(group[0].family, []).extend(group)
        return list(together.values())

    def _is_late(self, share: float = 1.0) -> bool:
        """True if a search must end: after Ctrl-C, or for the final pass to fit into the limit."""
        if self._interruption.requested:
            return True
        deadline = self._search_deadline(share)
        return deadline is not None and Budget.now() >= deadline

    def _search_deadline(self, share: float) -> float | None:
        """Time at which a search must end, if any."""
        if self._budget.limit_s is None:
            return None
        effort, problem = self.competition.effort, self.problem
        entrants = ranking.finalists(
            self.competition.seen(problem), effort.finalists, self.competition.kernel
        )
        times = [m.latency_us for m in entrants if m.latency_us is not None]
        deadline = self._budget.search_deadline(times, effort.rounds)
        started = self._budget.started
        return None if deadline is None else started + share * (deadline - started)

    def _waits(self, problem: Problem) -> Waits:
        """Judge of waits, with the compile times known now. Recorded ones are read once."""
        if problem not in self._known_times:
            self._known_times.add(problem)
            self._times.observe(self.competition.history(problem))
        effort = self.competition.effort
        return Waits(self.runner, self._times, effort.price, effort.target_s)

    def _give_up(self, problem: Problem, search: Search) -> None:
        """Give up the requests of a search."""
        self._given_up += search.pending
        self.runner.abandon(problem)
        self._state.in_flight = 0

    def _collect(self, share: float) -> bool:
        """Wait for one request, up to `POLL_S`, and store its result before anything else. Returns
        False if none arrived.

        Raises:
            BenchmarkError: when the request was abandoned, except by Ctrl-C.
        """
        deadline = self._search_deadline(share)
        wait_s = POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - Budget.now()))
        collected: list[Measurement] = []
        try:
            with self._interruption.waiting():
                collected = self.runner.collect(wait_s)
        except TimeoutError:
            return False
        if not collected:
            if not self._interruption.requested:
                raise BenchmarkError(
                    f"the search of {self.problem.label()} was given up: its runner was cancelled "
                    "or closed"
                )
            return False
        measured = [self._signed(m) for m in collected]
        self._write(lambda: self.store.add(measured))
        first = measured[0]
        self._times.observe(measured)
        member = self.competition.members.get((first.problem.key, first.config.family))
        if member is None:
            return True  # A late result of the problem before: it is only stored.
        member.tell(measured)
        self._studies.copy(member)
        self._state.in_flight = max(0, self._state.in_flight - 1)
        for m in measured:
            if m.status is not Status.UNAVAILABLE:
                self._state.candidates += 1
                self._state.failures.update([] if m.ok else [m.status.value])
        building = self.runner.building
        is_idle = building > 0 and building >= self._state.in_flight
        is_first = self._finals.first_own_s is None
        if is_vendor(first.config):
            if self._is_hasty:
                self._finals.show_first()
        elif is_idle or (is_first and self._is_hasty):
            self._finals.provide()
        return True

    @property
    def _is_hasty(self) -> bool:
        """True if an answer may be long in coming: with compiles, or under a time limit."""
        return self._budget.limit_s is not None or not self.options.compiled_only

    def _write(self, write: Callable[[], object]) -> None:
        """Write to the store, with retries while another program has it locked, until Ctrl-C.

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

    def _show(self) -> None:
        passed = sorted(
            (m for m in self.competition.seen(self.problem) if m.ok), key=ranking.by_latency
        )
        self._state.best_own = next((m for m in passed if not is_vendor(m.config)), None)
        self._state.best_vendor = next((m for m in passed if is_vendor(m.config)), None)
        self._watcher.changed(self._state)

    def _show_finals(self, count: int) -> None:
        self._state.phase = f"final pass of {count}"
        self._state.goal = self._state.done = self._state.done_before = 0
        self._show()

    def _outcome(self, ranked: Sequence[Measurement]) -> Outcome:
        finals = self._finals
        if ranked and ranked is not finals.provided and ranked is not finals.undecided:
            finals.decide(ranked)
        tried = self.competition.seen()
        own = [m for m in tried if not is_vendor(m.config)]
        members = self.competition.members.values()
        measured = {vendor_name(m.config) for m in tried if is_vendor(m.config) and m.ok}
        return Outcome(
            problem=self.problem,
            gpu=self.runner.gpu,
            regime=self.regime,
            environment=self.runner.environment,
            provenance=self.runner.provenance,
            sweep=self._record.id,
            ranking=tuple(ranked),
            unranked=tuple(self._finals.unranked) if ranked else (),
            quick_vendor=min(
                (m for m in tried if m.problem == self.problem and is_vendor(m.config) and m.ok),
                key=ranking.by_latency,
                default=None,
            ),
            candidates=len(own),
            kernels=sum(member.finished for member in members if not member.family.is_vendor),
            resumed=self._state.resumed,
            failures=Counter(m.status.value for m in own if not m.ok),
            unavailable={
                vendor_name(m.config): first_line(m.log) or m.status.value
                for m in tried
                if is_vendor(m.config) and not m.ok and vendor_name(m.config) not in measured
            },
            interrupted=self._interruption.requested,
            elapsed_s=self._budget.spent_s,
            notes=tuple(self._notes),
            given_up=self._given_up,
            expected_loss=None if self._saving is None else self._saving.mean,
            expected_loss_p90=None if self._saving is None else self._saving.p90,
            first_answer_s=self._finals.first_s,
            first_own_s=self._finals.first_own_s,
            seconds=dict(self._budget.parts),
        )

    @cached_property
    def _record(self) -> SweepRecord:
        """New record, or the record of an unfinished sweep with the same settings."""
        digest = self.options.digest(self.runner.provenance)
        environment = self.runner.environment.digest
        earlier = self.store.find_sweep(
            self.problem, self.runner.gpu, self.regime, environment, digest
        )
        if earlier is not None and earlier.state != "done":
            return earlier
        return SweepRecord(
            uuid.uuid4().hex[:16], self.problem, self.runner.gpu, self.regime, environment, digest
        )

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            self._watcher.note(text)


def sweep(
    problem: Problem | str,
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
        problem: problem to tune, or the text of an attention shape, as ``S=1024,D=64``.
        regime: regime of the times; default: the operation's, which the runtime serves.
        options: budgets and families.
        machine: devices and compile jobs.
        store: SQLAlchemy URL or path; default: `settings.store_url()`.
        optuna_storage: storage for copies of the studies, in the form of `StudyStorage`; default:
            `settings.optuna_storage()`.
        note: callback for messages to the user.

    Raises:
        ConfigError: when `problem` is not a problem, or an option is out of range.
        NoValidConfigError: when no candidate passed.
        CompileError: when there is a GPU but no compiler.
        StoreError: when the store cannot be opened or written.
    """
    from tuner.search.storage import open_storage

    problem = as_problem(problem)
    how = regime or Regime.default(problem.op)
    settings = options or SweepOptions()
    place = replace(machine or Machine(), max_workspace=settings.max_workspace)
    with (
        open_store(store) as opened,
        open_storage(optuna_storage, note) as studies,
        Runners(place, note) as runners,
    ):
        runner = runners.of(problem, how)
        return Sweep(problem, runner.regime, runner, opened, settings, studies=studies).run()
