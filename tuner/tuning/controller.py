"""Controller of stored jobs: takes one problem at a time under a lease and sweeps it.

The controller owns the search of its problem and is its only writer: every write is fenced by the
lease. A thread extends the lease and detects its loss, after the job was cancelled, or after
another controller took over while this process was stopped. The sweep is then abandoned at once.

Ctrl-C, SIGTERM and SIGHUP put the problem back into the queue. All measurements are in the store,
from which the next controller continues.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from tuner.base.processes import EndingSignals, Interrupted
from tuner.errors import (
    BenchmarkError,
    ConfigError,
    LeaseLostError,
    NoValidConfigError,
    StoreError,
    StoreLostError,
    TunerError,
)
from tuner.families import families_of
from tuner.runners.choose import Machine, Runners
from tuner.store import Store
from tuner.store.jobs import LEASE_S, Claim, Lease, result_of, result_text
from tuner.store.sql_jobs import Jobs
from tuner.tuning.job import JobOptions
from tuner.tuning.progress import SweepState, Watcher, progress_of
from tuner.tuning.sweep import Catalogue, Sweep

if TYPE_CHECKING:
    from tuner.search.storage import StudyStorage

_LOG = logging.getLogger("tuner.controller")

BEAT_S = 2.0
"""Seconds between two checks of a lease, the delay until a cancelled sweep is abandoned."""
POLL_S, LONGEST_POLL_S = 1.0, 5.0
"""First and longest seconds between two polls of an empty queue."""
STORE_WAIT_S = 5.0
"""Seconds before a retry after the store failed."""


class Abandoned(BaseException):
    """Raised in the main thread at any point to leave the sweep at once. It is not an `Exception`,
    so that it is never handled as a candidate's failure.
    """


@dataclass
class Turn:
    """Claimed problem and, once prepared, its sweep."""

    claim: Claim
    options: JobOptions
    sweep: Sweep | None = None


class Controller:
    """Takes problems from a store's queue until it is stopped. Must run in the main thread.

    Args:
        store: store of the jobs, measurements and decisions.
        machine: machine to evaluate on. Each job has its own limit of workspace.
        watcher: receiver of every change.
        lease_s: seconds that this process may stay silent before another takes over.
        catalogue: finds the families of an operation.
        create_runners: function that makes the runners of a machine, given a receiver of notes.
        studies: storage for copies of the searches' studies.
    """

    def __init__(
        self,
        store: Store,
        machine: Machine,
        *,
        watcher: Watcher | None = None,
        lease_s: float = LEASE_S,
        catalogue: Catalogue = families_of,
        create_runners: Callable[[Machine, Callable[[str], None]], Runners] = Runners,
        studies: StudyStorage | None = None,
    ) -> None:
        self._store = store
        self._machine = machine
        self._create_runners = create_runners
        self._watcher = watcher or Watcher()
        self._catalogue = catalogue
        self._studies = studies
        self._holder = f"{socket.gethostname()[:100]}:{os.getpid()}"
        self._leases = _Leases(store, lease_s)
        self._runners: Runners | None = None
        self._ahead: Turn | None = None
        self._finished = 0
        self.failed = 0
        """Number of problems that it gave up."""

    def __enter__(self) -> Self:
        self._leases.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_runners()
        self._leases.stop()

    @property
    def stopped_by(self) -> int | None:
        """Signal that ended it."""
        return self._leases.stopped_by

    def run(self, *, drain: bool = False) -> int:
        """Run until one of `ENDING_SIGNALS`. Returns the number of problems decided.

        Args:
            drain: True to end once no problem is queued or running.

        Raises:
            BenchmarkError: when there is no GPU and replays were not requested.
            StoreLostError: when the store's file was removed, replaced or truncated.
        """
        if not self._machine.replay and self._runners_for(None).gpu is None:
            raise BenchmarkError(
                "no GPU found, and a job's answers must be measured: "
                "`tuner jobs worker --replay` replays recorded sweeps, or predicts"
            )
        pause_s = POLL_S
        while not self._leases.stopping:
            try:
                turn = self._next()
                if turn is not None:
                    pause_s = POLL_S
                    self._work(turn)
                elif drain and not self._store.jobs.is_work_left():
                    break
                else:
                    time.sleep(pause_s)
                    pause_s = longer_pause(pause_s)
            except LeaseLostError as exc:
                self._watcher.note(str(exc))
            except StoreLostError:
                raise  # this error is permanent
            except StoreError as exc:
                self._watcher.note(f"{exc}; trying again in {STORE_WAIT_S:.0f} s")
                time.sleep(STORE_WAIT_S)
        if self._ahead is not None:
            self._give_back(self._ahead)
        return self._finished

    # One problem

    def _next(self) -> Turn | None:
        """Problem that was already claimed, else the first of the queue."""
        turn, self._ahead = self._ahead, None
        return turn or self._claim()

    def _claim(self) -> Turn | None:
        jobs = self._store.jobs
        claim = jobs.claim(self._holder, self._leases.lease_s)
        if claim is None:
            return None
        self._leases.add(claim.lease)
        try:
            return Turn(claim, JobOptions.from_json(claim.options))
        except ConfigError as exc:
            self._leases.remove(claim.lease)
            jobs.fail(claim.lease, str(exc), is_final=True)
            self.failed += 1
            return None

    def _work(self, turn: Turn) -> None:
        """Sweep a problem, and record in the queue how it ended."""
        lease = turn.claim.lease
        try:
            with self._leases.armed(lease):
                try:
                    self._sweep(turn)
                except StoreError:
                    raise
                except Exception as exc:  # Even an internal error must not stop the other problems.
                    self._forget_all_but_ahead()
                    self._fail(turn, exc)
        except StoreError:
            self._forget_all_but_ahead()
            raise
        except Abandoned:
            self._forget_all_but_ahead()
            if self._leases.stopping:
                self._give_back(turn)
            else:
                label = turn.claim.problem.label()
                self._watcher.note(f"{label}: left, for its job was cancelled or taken over")

    def _forget_all_but_ahead(self) -> None:
        """Clean up after a sweep was abandoned at any point: the runners may be in the middle of a
        request, and a lease that was just claimed must not be extended while idle.
        """
        self._close_runners()
        self._leases.keep(self._ahead.claim.lease if self._ahead else None)

    def _sweep(self, turn: Turn) -> None:
        jobs, lease, problem = self._store.jobs, turn.claim.lease, turn.claim.problem
        sweep = self._prepare(turn)
        if sweep is None:
            return
        self._watcher.note(f"{problem.op} {problem.label()} of job {turn.claim.job}")
        outcome = sweep.run(self._claim_ahead)
        self._leases.remove(lease)
        if outcome.entry is None:
            jobs.finish(lease, "nothing was decided")
        else:
            result = result_of(outcome.entry)
            jobs.finish(lease, result_text(result), result)
        self._finished += 1
        self._watcher.finished(outcome)

    def _prepare(self, turn: Turn) -> Sweep | None:
        """Sweep of a turn; None if the problem is already tuned, which ends the turn."""
        if turn.sweep is not None:
            return turn.sweep
        claim, options = turn.claim, turn.options
        options.check([claim.problem], self._catalogue)
        runner = self._runners_for(options).of(claim.problem, options.regime(claim.problem))
        tuned = options.find_tuned(claim.problem, runner, self._store)
        jobs = self._store.jobs
        if tuned is not None:
            jobs.begin(claim.lease, tuned.id)
            self._leases.remove(claim.lease)
            standing = self._store.entries(
                problem=turn.claim.problem,
                gpu=runner.gpu,
                regime=runner.regime,
                provenance=runner.provenance,
            )
            result = result_of(standing[0]) if standing else None
            jobs.finish(claim.lease, "it was tuned already", result)
            return None
        turn.sweep = Sweep(
            claim.problem,
            runner.regime,
            runner,
            self._store.under(claim.lease),
            options.sweep,
            watcher=_Reporter(self._watcher, self._store, claim, self._leases),
            catalogue=self._catalogue,
            studies=self._studies,
        )
        jobs.begin(claim.lease, turn.sweep.id)
        return turn.sweep

    def _claim_ahead(self) -> None:
        """Claim the next problem and compile its kernels while this one's finalists are timed.

        No fault of the next one, as that its job was cancelled, ends this one's final pass.
        """
        try:
            self._prepare_ahead()
        except StoreLostError:
            raise
        except StoreError as exc:
            self._watcher.note(str(exc))
            if self._ahead is not None:
                self._give_back(self._ahead, str(exc))
            self._ahead = None

    def _prepare_ahead(self) -> None:
        turn = self._ahead = self._claim()
        if turn is None or turn.options.sweep.max_workspace != self._machine.max_workspace:
            return  # If it needs other runners, its kernels are not compiled in advance.
        try:
            sweep = self._prepare(turn)
            if sweep is None:
                self._ahead = None
            else:
                sweep.prefetch()
        except StoreError:
            raise
        except Exception as exc:
            self._ahead = None
            self._fail(turn, exc)

    def _fail(self, turn: Turn, exc: Exception) -> None:
        """End an attempt with its reason. It is retried unless a retry would fail in the same
        way.
        """
        self._leases.remove(turn.claim.lease)
        is_final = isinstance(exc, ConfigError | NoValidConfigError)
        reason = str(exc)
        if not isinstance(exc, TunerError):
            reason = f"defect: {type(exc).__name__}: {exc}"
            _LOG.error("%s", turn.claim.problem.label(), exc_info=exc)
        is_retried = self._store.jobs.fail(turn.claim.lease, reason, is_final=is_final)
        self.failed += not is_retried
        label = f"{turn.claim.problem.op} {turn.claim.problem.label()}"
        self._watcher.note(f"{label}: {reason}{'; it will be tried again' if is_retried else ''}")

    def _give_back(self, turn: Turn, reason: str = "") -> None:
        self._leases.remove(turn.claim.lease)
        try:
            self._store.jobs.release(turn.claim.lease, reason or f"{self._holder} was stopped")
        except LeaseLostError:
            pass  # It ended at the same moment, or was cancelled.
        except StoreError as exc:
            self._watcher.note(str(exc))  # The lease expires by itself.

    # What evaluates

    def _runners_for(self, options: JobOptions | None) -> Runners:
        most = options.sweep.max_workspace if options else self._machine.max_workspace
        if self._runners is None or self._machine.max_workspace != most:
            self._close_runners()
            self._machine = replace(self._machine, max_workspace=most)
            self._runners = self._create_runners(self._machine, self._watcher.note)
        return self._runners

    def _close_runners(self) -> None:
        if self._runners is not None:
            self._runners.__exit__(None, None, None)
        self._runners = None
        if self._ahead is not None:
            self._ahead.sweep = None  # Its compiling ended with them.


def longer_pause(pause_s: float) -> float:
    """Next pause of an idle controller in seconds, after a pause of `pause_s`."""
    return min(1.5 * pause_s, LONGEST_POLL_S)


class Pulse:
    """Extends one lease. It is written after a quarter of its time, or with progress. Otherwise it
    is only read, because writes of idle or slow workers would load the database.
    """

    def __init__(self, jobs: Jobs, lease: Lease, lease_s: float) -> None:
        self._jobs, self._lease, self._lease_s = jobs, lease, lease_s
        self._told: Mapping[str, Any] = {}
        self._written = time.monotonic()

    @property
    def may_hold(self) -> bool:
        """True if the lease has not expired, unless it was cancelled."""
        return time.monotonic() - self._written < self._lease_s

    def beat(self, progress: Mapping[str, Any]) -> bool:
        """Check the lease. Returns True if it is held.

        Raises:
            StoreError: when the store fails.
        """
        now = time.monotonic()
        if progress == self._told and now - self._written < self._lease_s / 4:
            return self._jobs.is_held(self._lease)
        is_held = self._jobs.extend(self._lease, progress, self._lease_s)
        self._told, self._written = progress, now
        return is_held


class _Leases:
    """Leases of this process: extends them, and interrupts the main thread.

    `Abandoned` is raised only inside `armed`, once, by the handler of the signal that the thread
    sends when the lease is lost, or of `ENDING_SIGNALS`.
    """

    def __init__(self, store: Store, lease_s: float) -> None:
        self.lease_s = lease_s
        self.stopped_by: int | None = None
        self._store = store
        self._progress: dict[Lease, Mapping[str, Any]] = {}
        self._pulses: dict[Lease, Pulse] = {}
        self._lost: set[Lease] = set()
        self._armed: Lease | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._extend_all, name="leases", daemon=True)
        self._signals = EndingSignals(self._on_stop)
        self._previous: Any = None

    @property
    def stopping(self) -> bool:
        return self.stopped_by is not None

    def start(self) -> None:
        """Install the signal handlers and start extending."""
        self._signals.__enter__()
        self._previous = signal.signal(signal.SIGUSR1, self._on_lost)
        self._thread.start()

    def stop(self) -> None:
        """Restore the signal handlers and stop extending."""
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._previous)
        self._signals.__exit__()

    def add(self, lease: Lease) -> None:
        self._pulses[lease] = Pulse(self._store.jobs, lease, self.lease_s)
        self._progress[lease] = {}

    def remove(self, lease: Lease) -> None:
        self._progress.pop(lease, None)
        self._pulses.pop(lease, None)
        self._lost.discard(lease)

    def keep(self, lease: Lease | None) -> None:
        """Extend only this lease from now on."""
        for registered in list(self._progress):
            if registered != lease:
                self.remove(registered)

    def report(self, lease: Lease, progress: Mapping[str, Any]) -> None:
        """Progress of a task for the next extension."""
        if lease in self._progress:
            self._progress[lease] = progress

    @contextmanager
    def armed(self, lease: Lease) -> Iterator[None]:
        """Context in which `Abandoned` is raised when this lease is lost or the process must
        end.
        """
        self._armed = lease
        if self.stopping or lease in self._lost:
            self._armed = None
            raise Abandoned
        try:
            yield
        finally:
            self._armed = None

    def _on_stop(self, number: int) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
        elif number == signal.SIGINT:
            raise Interrupted(self.stopped_by)
        self._abandon()

    def _on_lost(self, number: int, frame: FrameType | None) -> None:
        if self._armed in self._lost:
            self._abandon()

    def _abandon(self) -> None:
        if self._armed is not None:
            self._armed = None
            raise Abandoned

    def _extend_all(self) -> None:
        while not self._ended.wait(min(BEAT_S, self.lease_s / 3)):
            for lease, progress in list(self._progress.items()):
                if lease not in self._lost and not self._is_held(lease, progress):
                    self._lost.add(lease)
            main = threading.main_thread().ident
            # At each beat: Python delays a signal that comes just before a wait until the wait's
            # end.
            if self._armed in self._lost and main is not None:
                signal.pthread_kill(main, signal.SIGUSR1)

    def _is_held(self, lease: Lease, progress: Mapping[str, Any]) -> bool:
        pulse = self._pulses.get(lease)
        if pulse is None:
            return True  # it was released at this moment
        try:
            is_held = pulse.beat(progress)
        except StoreError:
            return pulse.may_hold  # the store may recover before the lease expires
        return is_held or lease not in self._progress


class _Reporter(Watcher):
    """Writes the progress that displays receive to the job's rows."""

    def __init__(self, watcher: Watcher, store: Store, claim: Claim, leases: _Leases) -> None:
        self._watcher, self._store, self._claim, self._leases = watcher, store, claim, leases

    def changed(self, state: SweepState) -> None:
        self._leases.report(self._claim.lease, progress_of(state))
        self._watcher.changed(state)

    def note(self, text: str) -> None:
        self._store.jobs.log(self._claim.job, text, self._claim.lease.task)
        self._watcher.note(text)
