"""The contract of the jobs in a store, and what passes through it. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.measurement import Measurement, speedup_text
from tuner.problem import Problem
from tuner.store.entry import Entry, is_vendor, vendor_name

LEASE_S = 30.0
"""How long a holder may stay silent."""
MAX_PRIORITY = 1000
"""Either side of 0."""
MAX_ATTEMPTS = 100
"""More than over HTTP: where workers are killed on purpose (`benchmarks.fleet`), 50 are used."""

TASK_STATES = ("queued", "running", "done", "failed", "cancelled")
OPEN_STATES = TASK_STATES[:2]
"""States that may still change by themselves."""


@dataclass(frozen=True)
class Lease:
    """The right to work on a task; every claim raises `token`."""

    task: int
    token: int


@dataclass(frozen=True)
class Claim:
    """A task that was claimed, with what is needed to work on it."""

    lease: Lease
    job: str
    problem: Problem
    options: Mapping[str, Any]
    attempt: int


def result_of(entry: Entry) -> dict[str, Any]:
    """A finished task's decision, as names and numbers.

    ``vendor_over_own`` is the fastest vendor's time over the best own kernel's, above 1 where ours
    is faster. It and the names are null when one of the two is missing. ``is_tie``: the two are
    equal within their noise. Times are microseconds.
    """
    winner, own, vendor = entry.winner, entry.best_own, entry.fastest_vendor
    config = winner.config
    return {
        "winner": vendor_name(config) if is_vendor(config) else config.family,
        "is_vendor": is_vendor(config),
        "config_digest": config.digest,
        "latency_us": winner.latency_us,
        "provenance": entry.provenance.value,
        "pass": entry.pass_name or None,
        "own_us": own.latency_us if own else None,
        "fastest_vendor": vendor[0] if vendor else None,
        "fastest_vendor_us": vendor[1].latency_us if vendor else None,
        "vendor_over_own": own.speedup(vendor[1]) if own and vendor else None,
        "is_tie": entry.is_tied,
    }


def result_text(result: Mapping[str, Any]) -> str:
    """A result on one line: ``gemm 9379bf..., 11.50 us, measured, own speed 1.29x cudnn``."""
    digest = "" if result["is_vendor"] else f" {result['config_digest']}"
    facts = [
        f"{result['winner']}{digest}",
        f"{result['latency_us']:.2f} us",
        result["provenance"],
        *(["quick pass"] if result["pass"] == "quick" else []),
    ]
    if result["vendor_over_own"] is not None:
        facts.append(f"own speed {result_speed(result)}")
    return ", ".join(facts)


def result_speed(result: Mapping[str, Any]) -> str:
    """A result's own speed in words; ``-`` without both times."""
    ratio = result["vendor_over_own"]
    if ratio is None:
        return "-"
    # Results of earlier versions do not tell ties.
    return speedup_text(ratio, result["fastest_vendor"], is_tie=result.get("is_tie", False))


_SHOWN: Mapping[str, tuple[type, ...]] = {
    "phase": (str,),
    "done": (int,),
    "goal": (int,),
    "best_own_us": (int, float, type(None)),
}


def check_told(progress: Mapping[str, Any], result: Any) -> None:
    """See that a stored progress and result can be shown.

    Raises:
        ValueError, TypeError, LookupError: when they were damaged.
    """
    for name, types in _SHOWN.items():
        if name in progress and not isinstance(progress[name], types):
            raise TypeError(f"progress: {name}={progress[name]!r}")
    if result is not None:
        result_text(result)


@dataclass(frozen=True)
class Task:
    """One problem of a job."""

    id: int
    problem: Problem
    state: str
    attempt: int
    reason: str
    """Why its last attempt ended without a decision; empty when none did."""
    holder: str
    """Holder of the lease, as ``host:pid``."""
    sweep: str
    progress: Mapping[str, Any]
    """Last report of its holder: phase, done, goal, candidates, failures, times so far."""
    trials: int
    """Quick measurements that its sweep has stored."""
    result: Mapping[str, Any] | None = None
    """The decision (`result_of`); None before it is done, or when nothing was recorded."""

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.problem.op,
            "shape": self.problem.label(),
            "problem": self.problem.to_json(),
            "state": self.state,
            "attempt": self.attempt,
            "reason": self.reason,
            "holder": self.holder,
            "sweep": self.sweep,
            "trials": self.trials,
            "progress": dict(self.progress),
            "result": None if self.result is None else dict(self.result),
        }


@dataclass(frozen=True)
class JobRecord:
    """One job: problems to be tuned with the same options."""

    id: str
    priority: int
    """Higher ones are taken first."""
    attempts: int
    """How often each problem is tried."""
    options: Mapping[str, Any]
    created_at: str
    """UTC, ISO 8601."""
    counts: Mapping[str, int]
    """Tasks by state."""

    @property
    def state(self) -> str:
        """The first of running, queued, failed, cancelled that a task is in, else done."""
        order = ("running", "queued", "failed", "cancelled")
        return next((state for state in order if self.counts.get(state)), "done")

    @property
    def is_open(self) -> bool:
        """True when something is left to do."""
        return self.state in OPEN_STATES

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state,
            "priority": self.priority,
            "attempts": self.attempts,
            "options": dict(self.options),
            "created_at": self.created_at,
            "counts": {state: self.counts.get(state, 0) for state in TASK_STATES},
        }


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    id: int
    """Rises in the order in which a job's events are seen."""
    at: str
    """UTC, ISO 8601."""
    text: str
    problem: Problem | None
    """None when it concerns the whole job."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "at": self.at,
            "text": self.text,
            "op": self.problem.op if self.problem else None,
            "shape": self.problem.label() if self.problem else None,
        }


class Jobs(ABC):
    """Jobs whose problems controllers take one by one under leases.

    A problem of a job is a task. No two tasks of one problem run at a time, whatever their jobs.
    A lease that is not extended in time is given to the next who asks, and its former holder can
    write nothing any more (`Store.under`). Every method that writes is one transaction. All
    methods raise `StoreError` when the database fails.
    """

    # Submitting and watching

    @abstractmethod
    def submit(
        self,
        problems: Sequence[Problem],
        options: Mapping[str, Any],
        *,
        priority: int = 0,
        attempts: int = 3,
    ) -> str:
        """Add a job; returns its id. Equal problems are one task.

        Raises:
            ConfigError: when there is no problem, or a number is out of range.
        """

    @abstractmethod
    def all(self) -> list[JobRecord]:
        """All jobs, newest first."""

    @abstractmethod
    def find(self, id: str) -> JobRecord | None:
        """The job whose id is this or begins with it.

        Raises:
            ConfigError: when several do, or it is empty.
        """

    @abstractmethod
    def tasks(self, job: str, *, state: str | None = None) -> list[Task]:
        """The tasks of a job, those of one state or all, in the order in which they were given."""

    @abstractmethod
    def trials(
        self, job: str, *, after: int = 0, limit: int = 1000
    ) -> list[tuple[int, Measurement]]:
        """Measurements that the job's sweeps stored, each with its id, those above `after`."""

    @abstractmethod
    def events(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Events of a job, oldest first, of ids above `after`."""

    @abstractmethod
    def cancel(self, job: str) -> int:
        """End every open task; returns how many. Measurements are kept; nothing is decided."""

    @abstractmethod
    def retry(self, job: str) -> int:
        """Put failed and cancelled tasks back into the queue; returns how many."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Tasks of all jobs by state."""

    # Working

    @abstractmethod
    def claim(self, holder: str, lease_s: float = LEASE_S) -> Claim | None:
        """Take the first task that is due: by priority, then in order of submission.

        Args:
            holder: who asks, as ``host:pid``.
            lease_s: until the lease runs out unless it is extended; at most `LEASE_S`.
        """

    @abstractmethod
    def extend(self, lease: Lease, progress: Mapping[str, Any], lease_s: float = LEASE_S) -> bool:
        """Say that the holder is alive, and how far it is; False when the lease is lost."""

    @abstractmethod
    def is_held(self, lease: Lease) -> bool:
        """True when a lease is still its holder's; writes nothing."""

    @abstractmethod
    def begin(self, lease: Lease, sweep: str) -> None:
        """Name the sweep that works on a task.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """

    @abstractmethod
    def finish(self, lease: Lease, text: str, result: Mapping[str, Any] | None = None) -> None:
        """End a task as done.

        Args:
            lease: what was worked on.
            text: what was decided, for the log.
            result: the same as `Task.result` tells it.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """

    @abstractmethod
    def fail(self, lease: Lease, reason: str, *, is_final: bool = False) -> bool:
        """End an attempt; returns whether another one follows.

        Args:
            lease: what was worked on.
            reason: kept with the task.
            is_final: another attempt would fail in the same way.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """

    @abstractmethod
    def release(self, lease: Lease, reason: str) -> None:
        """Put a task back into the queue; the attempt does not count.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """

    @abstractmethod
    def log(self, job: str, text: str, task: int | None = None) -> None:
        """Add an event."""
