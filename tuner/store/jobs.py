"""Records of the jobs in a store. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.measurement import speedup_text
from tuner.problem import Problem
from tuner.store.entry import Entry, is_vendor, vendor_name

LEASE_S = 30.0
"""Seconds for which a holder may stay silent."""
MAX_PRIORITY = 1000
"""Largest priority, of either sign."""
MAX_ATTEMPTS = 100
"""Limit of attempts, larger than over HTTP."""

TASK_STATES = ("queued", "running", "done", "failed", "cancelled")
OPEN_STATES = TASK_STATES[:2]
"""States that can still change without a user's action."""


@dataclass(frozen=True)
class Lease:
    """Right to work on a task. Every claim raises `token`."""

    task: int
    token: int


@dataclass(frozen=True)
class Claim:
    """Claimed task, with the data needed to work on it."""

    lease: Lease
    job: str
    problem: Problem
    options: Mapping[str, Any]
    attempt: int


def result_of(entry: Entry) -> dict[str, Any]:
    """Summary of a finished task's decision, as JSON.

    ``vendor_over_own`` is the fastest vendor's time over the best own kernel's, above 1 if the own
    is faster. It and the names are null if one of the two is missing. ``is_tie``: the two are equal
    within their noise. Times are in microseconds.
    """
    winner, own, vendor = entry.winner, entry.best_own, entry.fastest_vendor
    standing = entry.standing
    config = winner.config
    return {
        "winner": vendor_name(config) if is_vendor(config) else config.family,
        "is_vendor": is_vendor(config),
        "config_digest": config.digest,
        "latency_us": winner.latency_us,
        "provenance": entry.provenance.value,
        "launch": entry.regime.launch,
        "pass": entry.pass_name or None,
        "own_us": own.latency_us if own else None,
        "fastest_vendor": vendor[0] if vendor else None,
        "fastest_vendor_us": vendor[1].latency_us if vendor else None,
        "vendor_over_own": standing.ratio if standing else None,
        "is_tie": entry.is_tied,
    }


def result_text(result: Mapping[str, Any]) -> str:
    """A result on one line: ``gemm 9379bf..., 11.50 us, measured, own speed 1.29x cudnn``."""
    digest = "" if result["is_vendor"] else f" {result['config_digest']}"
    facts = [
        f"{result['winner']}{digest}",
        f"{result['latency_us']:.2f} us",
        result["provenance"],
        # A lookup prefers a decision in a stream, which another launch flatters.
        *([launch] if (launch := result.get("launch", "stream")) != "stream" else []),
        *(["quick pass"] if result["pass"] == "quick" else []),
    ]
    if result["vendor_over_own"] is not None:
        facts.append(f"own speed {result_speed(result)}")
    return ", ".join(facts)


def result_speed(result: Mapping[str, Any]) -> str:
    """A result's own speed as text; ``-`` unless both times are known."""
    ratio = result["vendor_over_own"]
    if ratio is None:
        return "-"
    # Results of earlier versions do not record ties.
    return speedup_text(ratio, result["fastest_vendor"], is_tie=result.get("is_tie", False))


_SHOWN: Mapping[str, tuple[type, ...]] = {
    "phase": (str,),
    "done": (int,),
    "goal": (int,),
    "best_own_us": (int, float, type(None)),
}


def check_shown(progress: Mapping[str, Any], result: Any) -> None:
    """Check that a stored progress and result can be shown.

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
    """Reason why its last attempt ended without a decision; empty if none did."""
    holder: str
    """Holder of the lease, as ``host:pid``."""
    sweep: str
    progress: Mapping[str, Any]
    """Last report of its holder: phase, done, goal, candidates, failures, and times so far."""
    trials: int
    """Quick measurements that its sweep has stored."""
    result: Mapping[str, Any] | None = None
    """Summary of the decision (`result_of`); None before the end, or if none was recorded."""

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
    """Job: problems to tune with the same options."""

    id: str
    priority: int
    """Jobs of higher priority are taken first."""
    attempts: int
    """Maximum attempts for each problem."""
    options: Mapping[str, Any]
    created_at: str
    """UTC, ISO 8601."""
    counts: Mapping[str, int]
    """Tasks by state."""

    @property
    def state(self) -> str:
        """First of running, queued, failed, cancelled that any task has, else done."""
        order = ("running", "queued", "failed", "cancelled")
        return next((state for state in order if self.counts.get(state)), "done")

    @property
    def is_open(self) -> bool:
        """True if a task is left to do."""
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
    """Event in the log of a job."""

    id: int
    """Id that rises in the order in which a job's events become visible."""
    at: str
    """UTC, ISO 8601."""
    text: str
    problem: Problem | None
    """Problem of the event; None if it concerns the whole job, or a newer program's problem."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "at": self.at,
            "text": self.text,
            "op": self.problem.op if self.problem else None,
            "shape": self.problem.label() if self.problem else None,
        }
