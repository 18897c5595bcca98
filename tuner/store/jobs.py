"""The contract of the jobs in a store, and what passes through it. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.measurement import Measurement
from tuner.problem import Problem

LEASE_S = 30.0
"""How long a holder may stay silent."""
MOST_PRIORITY = 1000
"""Either side of 0."""
MOST_ATTEMPTS = 100
"""More than over HTTP: where workers are killed on purpose (`tuner.bench.fleet`), 50 are used."""

TASK_STATES = ("queued", "running", "done", "failed", "cancelled")
OPEN_STATES = TASK_STATES[:2]
"""What may still change by itself."""


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
    """Who works on it, as ``host:pid``."""
    sweep: str
    progress: Mapping[str, Any]
    """What its holder said last: phase, done, goal, candidates, failures, times so far."""
    trials: int
    """Quick measurements that its sweep has stored."""

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
        """Whether something is left to do."""
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
        """What happened to a job, oldest first, of ids above `after`."""

    @abstractmethod
    def cancel(self, job: str) -> int:
        """End every open task; returns how many. What was measured is kept, nothing decided."""

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
        """Whether a lease is still its holder's; writes nothing."""

    @abstractmethod
    def begin(self, lease: Lease, sweep: str) -> None:
        """Name the sweep that works on a task.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """

    @abstractmethod
    def finish(self, lease: Lease, text: str) -> None:
        """End a task as done; `text` says what was decided.

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
