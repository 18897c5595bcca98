"""Course and cost of a search, and the loss of stopping it earlier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from tuner.families import families
from tuner.measurement import Measurement, latency
from tuner.report.subject import ReportSubject
from tuner.store.entry import is_vendor

BREAK_S = 120.0
"""Longest time without a measurement in one run of a sweep. A unit of four kernels takes a minute
and a half to compile on a full machine."""


@dataclass(frozen=True)
class SearchStep:
    """One candidate of the quick pass in the order of time."""

    number: int
    """From 1."""
    measurement: Measurement
    best_us: float
    """Fastest so far; infinite before the first that passed."""


def progress(subject: ReportSubject) -> list[SearchStep]:
    """Quick pass in the search's order."""
    return steps_of(subject.quick)


def steps_of(measurements: Iterable[Measurement]) -> list[SearchStep]:
    """Candidates, in the order of time, each with the fastest so far."""
    steps: list[SearchStep] = []
    best = math.inf
    for number, measurement in enumerate(measurements, 1):
        best = min(best, latency(measurement))
        steps.append(SearchStep(number, measurement, best))
    return steps


@dataclass(frozen=True)
class Stop:
    """Loss and cost of stopping after some of the candidates."""

    candidates: int
    best_us: float
    """Fastest so far."""
    loss: float
    """Relative to the fastest of all."""
    compile_cpu_s: float
    """CPU-seconds spent on compiling these candidates."""
    worked_s: float
    """Seconds from the first of them to the last, without breaks."""


def stopping(steps: Sequence[SearchStep]) -> list[Stop]:
    """Loss of stopping after 1, 2, 5, 10, ... candidates and after all."""
    if not steps or math.isinf(steps[-1].best_us):
        return []
    total = len(steps)
    series = (step * 10**power for power in range(6) for step in (1, 2, 5))
    counts = [count for count in series if count < total] + [total]
    return [
        Stop(
            count,
            steps[count - 1].best_us,
            steps[count - 1].best_us / steps[-1].best_us - 1,
            sum(step.measurement.compile_cpu_s or 0.0 for step in steps[:count]),
            _worked_s(step.measurement for step in steps[:count]),
        )
        for count in counts
        if not math.isinf(steps[count - 1].best_us)
    ]


def _worked_s(measurements: Iterable[Measurement]) -> float:
    """Seconds between measurements, without breaks."""
    times = sorted(datetime.fromisoformat(m.created_at) for m in measurements if m.created_at)
    between = ((after - before).total_seconds() for before, after in pairwise(times))
    return sum(seconds for seconds in between if seconds <= BREAK_S)


def found_at(steps: Sequence[SearchStep]) -> int:
    """Number of the first candidate with the fastest quick time."""
    return next(step.number for step in steps if step.best_us == steps[-1].best_us)


@dataclass(frozen=True)
class Cost:
    """Cost of a sweep, stages included."""

    candidates: int
    kernel_sets: int
    """Groups of candidates that share their compiled kernels."""
    failures: dict[str, int]
    compiled: int
    """Number of candidates with kernels compiled for them."""
    compile_cpu_s: float
    worked_s: float
    """Wall-clock seconds from the first measurement to the last, without breaks."""


def cost(subject: ReportSubject) -> Cost:
    """Cost of the search, by the measurements."""
    every = [m for part in subject.recording.walk() for m in part.measurements]
    own = [m for m in every if not m.is_final and not is_vendor(m.config)]
    spent = [m.compile_cpu_s for m in own if m.compile_cpu_s]
    members = families()
    digests = {
        (m.problem, members[m.config.family].compile_digest(m.config))
        for m in own
        if m.config.family in members
    }
    return Cost(
        candidates=len(own),
        kernel_sets=len(digests),
        failures=dict(Counter(m.status.value for m in own if not m.ok).most_common()),
        compiled=len(spent),
        compile_cpu_s=sum(spent),
        worked_s=_worked_s(every),
    )
