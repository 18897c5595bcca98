"""Outcome of a sweep of one problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.store import Entry
from tuner.store.entry import ratios_json


@dataclass(frozen=True)
class Outcome:
    """Decision of a sweep, and its cost."""

    problem: Problem
    gpu: Gpu
    regime: Regime
    environment: Environment
    provenance: Provenance
    sweep: str
    ranking: tuple[Measurement, ...]
    """Measurements of one pass that passed, best first; empty only after an interruption. The pass
    is the final one or the quick one. It is quick for a replay whose recording has no final time of
    an own finalist. It is also quick for a sweep whose time limit left no final pass."""
    candidates: int
    """Number of own candidates with a measurement, stages included."""
    kernels: int
    """Number of their groups: sets of compiled kernels."""
    resumed: int
    """Number of groups, own and vendors', that were already in the store."""
    failures: Mapping[str, int]
    """Number of own candidates that failed, by status."""
    unavailable: Mapping[str, str]
    """Vendors' kernels that could not be measured, with the reason."""
    interrupted: bool
    elapsed_s: float
    notes: tuple[str, ...] = ()
    unranked: tuple[Measurement, ...] = ()
    """Quick measurements of finalists without a final time, as in a replay whose recording lacks
    it."""
    quick_vendor: Measurement | None = None
    """Fastest vendor's kernel of the quick pass, for comparison with `unranked`."""

    given_up: int = 0
    """Number of sets of kernels that were submitted but not waited for."""
    expected_loss: float | None = None
    """Expected relative gain of the sets without a result, as in `expectation.Saving`; None if
    unknown."""
    expected_loss_p90: float | None = None
    """The same, which one search in ten exceeds."""
    first_answer_s: float | None = None
    """Seconds from the start to the first checked time that was shown, an own kernel's or a
    vendor's; None without one."""
    first_own_s: float | None = None
    """Seconds from the start to the first provisional decision that timed an own kernel."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase, of the passes of provisional decisions, and of the final pass."""

    @property
    def entry(self) -> Entry | None:
        """Entry of the decision, as the store returns it."""
        return Entry.of(self.ranking, sweep=self.sweep) if self.ranking else None

    def to_json(self) -> dict[str, Any]:
        entry = self.entry
        own = entry.best_own if entry else None
        return {
            "problem": self.problem.to_json(),
            "label": self.problem.label(),
            "gpu": asdict(self.gpu),
            "regime": str(self.regime),
            "environment": dict(self.environment.facts),
            "provenance": self.provenance.value,
            "sweep": self.sweep,
            "winner": entry.winner.to_json() if entry else None,
            "best_own": own.to_json() if own else None,
            "ranking": [m.to_json() for m in self.ranking],
            "pass": (entry.pass_name or None) if entry else None,
            "unranked": [m.to_json() for m in self.unranked],
            "quick_vendor": self.quick_vendor.to_json() if self.quick_vendor else None,
            **ratios_json(entry),
            "candidates": self.candidates,
            "kernels": self.kernels,
            "resumed": self.resumed,
            "failures": dict(self.failures),
            "unavailable": dict(self.unavailable),
            "interrupted": self.interrupted,
            "elapsed_s": round(self.elapsed_s, 3),
            "first_answer_s": None if (first := self.first_answer_s) is None else round(first, 2),
            "first_own_s": None if (own_s := self.first_own_s) is None else round(own_s, 2),
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
            "notes": list(self.notes),
            "given_up": self.given_up,
            "expected_loss": None if self.expected_loss is None else round(self.expected_loss, 5),
            "expected_loss_p90": self.expected_loss_p90 and round(self.expected_loss_p90, 5),
        }


def summary(measurements: Sequence[Measurement]) -> str:
    """Failures by status, each with the first line of one log."""
    failed = [m for m in measurements if not m.ok]
    counts = Counter(m.status.value for m in failed)
    lines = {m.status.value: first_line(m.log) for m in failed if m.log.strip()}
    return ", ".join(
        f"{count} {status}" + (f" (as: {lines[status]})" if status in lines else "")
        for status, count in counts.most_common()
    )


def first_line(log: str) -> str:
    """First non-empty line of a log, at most 200 characters."""
    stripped = log.strip()
    return stripped.splitlines()[0][:200] if stripped else ""
