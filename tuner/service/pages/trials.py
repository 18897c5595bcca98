"""One problem's trials, run by run, from the store and from what ships."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status, latency, versus
from tuner.problem import Problem
from tuner.report import charts
from tuner.report.course import SearchStep, steps_of
from tuner.runners import recording, recording_archive
from tuner.search.ranking import rank
from tuner.selection.describe import kernel_name
from tuner.selection.reader import Entry, shipped
from tuner.store import Store
from tuner.store.entry import is_of_quick_pass, is_vendor
from tuner.tuning.outcome import first_line

ROWS = 100
"""Rows of one page of trials."""
Show = Literal["all", "final", "quick", "failed"]
SHOWN: tuple[Show, ...] = get_args(Show)
"""Which trials a page lists."""


@dataclass(frozen=True)
class Failures:
    """Trials that failed with the same status and for the same reason."""

    status: Status
    reason: str
    count: int
    example: Measurement


@dataclass(frozen=True)
class Run:
    """Measurements of one sweep of a problem, on one GPU, in one environment and regime."""

    measurements: Sequence[Measurement]
    """In the order in which they were stored: a replayed one has the time of its recording."""
    source: str
    """Source of the measurements: ``store`` or shipped."""

    @property
    def key(self) -> str:
        """12 hex digits that name it among the runs of its problem."""
        return _key(self.measurements[0], self.source)

    @property
    def gpu(self) -> Gpu:
        return self.measurements[0].gpu

    @property
    def regime(self) -> Regime:
        return self.measurements[0].regime

    @property
    def environment(self) -> Environment:
        return self.measurements[0].environment

    @property
    def provenance(self) -> Provenance:
        return self.measurements[0].provenance

    @property
    def sweep(self) -> str:
        return self.measurements[0].sweep

    @property
    def newest(self) -> str:
        """Time of the last measurement, UTC."""
        return max(m.created_at for m in self.measurements)

    @property
    def quick(self) -> list[Measurement]:
        """Own candidates of the quick pass."""
        return [m for m in self.measurements if not m.is_final and not is_vendor(m.config)]

    @property
    def entry(self) -> Entry | None:
        """Ranking of the final pass; None before there is one."""
        ranked = rank([m for m in self.measurements if not is_of_quick_pass(m)])
        return Entry.of(ranked) if ranked else None

    @property
    def steps(self) -> list[SearchStep]:
        return steps_of(self.quick)

    @property
    def best(self) -> Measurement | None:
        """The fastest own candidate of the quick pass so far."""
        return min((m for m in self.quick if m.ok), key=latency, default=None)

    @property
    def best_speed(self) -> str:
        """The fastest own candidate of the quick pass against the fastest vendor's kernel there;
        empty without both.
        """
        theirs = [m for m in self.measurements if not m.is_final and is_vendor(m.config) and m.ok]
        vendor, best = min(theirs, key=latency, default=None), self.best
        return versus(best, vendor, kernel_name(vendor)) if best and vendor else ""

    @property
    def failures(self) -> list[Failures]:
        """Failures, most frequent reason first; vendors' kernels also."""
        groups: dict[tuple[Status, str], list[Measurement]] = defaultdict(list)
        for m in self.measurements:
            if not m.ok:
                groups[m.status, first_line(m.log)].append(m)
        rows = [Failures(*key, len(group), group[0]) for key, group in groups.items()]
        return sorted(rows, key=lambda row: (-row.count, row.status, row.reason))

    @property
    def picture(self) -> dict[str, Any] | None:
        """Time over trial and the best so far; None before something passed."""
        steps = self.steps
        passed = any(math.isfinite(step.best_us) for step in steps)
        return charts.progress(steps) if passed else None

    def table(self, show: Show = "all") -> list[Measurement]:
        """The selected measurements, final ones first, then by time."""
        picked = {
            "all": self.measurements,
            "final": [m for m in self.measurements if m.is_final],
            "quick": [m for m in self.measurements if not m.is_final],
            "failed": [m for m in self.measurements if not m.ok],
        }[show]
        return sorted(picked, key=lambda m: (not m.is_final, latency(m)))


def runs(store: Store, problem: Problem) -> list[Run]:
    """Every run of a problem that is known, newest first, the store's before what ships.

    Raises:
        StoreError: when the store cannot be read.
    """
    return [*_grouped(store.measurements(problem=problem), "store"), *_shipped(problem)]


def choose(
    trials: Sequence[Run],
    *,
    key: str | None = None,
    sweep: str | None = None,
    gpu: str | None = None,
    regimes: Sequence[Regime] | None = None,
) -> Run | None:
    """The run of a key or sweep, else the newest of a GPU and regime; measured ones first.

    Args:
        trials: runs, newest first.
        key: key of the run; the other arguments are then ignored.
        sweep: id of the sweep that made it, if one of the runs has it.
        gpu: name of the GPU.
        regimes: accepted regimes.
    """
    if key is not None:
        return next((run for run in trials if run.key == key), None)
    fitting = [
        run
        for run in trials
        if gpu in (None, run.gpu.name) and (regimes is None or run.regime in regimes)
    ]
    fitting = [run for run in fitting if run.sweep == sweep] or fitting
    measured = (run for run in fitting if run.provenance is Provenance.MEASURED)
    return next(measured, fitting[0] if fitting else None)


def _grouped(measurements: Iterable[Measurement], source: str) -> list[Run]:
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for m in measurements:
        groups[_key(m, source)].append(m)
    runs = [Run(group, source) for group in reversed(groups.values())]
    return sorted(runs, key=lambda run: run.newest, reverse=True)


def _key(m: Measurement, source: str) -> str:
    facts = [source, m.sweep, m.gpu.identity, m.regime.key, m.environment.digest, m.provenance]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _shipped(problem: Problem) -> list[Run]:
    recorded = [part for whole in _recordings() for part in whole.walk() if part.problem == problem]
    runs = [run for r in recorded for run in _grouped(_in_time(r), "shipped recording")]
    places = {(run.gpu, run.regime) for run in runs}
    decided = [e for e in shipped() if e.problem == problem and (e.gpu, e.regime) not in places]
    for entry in decided:  # without the artifacts, which are of the machine that measured
        ranking = [m.but(artifacts={}) for m in entry.ranking]
        runs += _grouped(ranking, "shipped decision")
    return runs


def _in_time(recorded: recording.Recording) -> list[Measurement]:
    return sorted(recorded.measurements, key=lambda m: m.created_at)


@cache
def _recordings() -> list[recording.Recording]:
    """All that ship: a few hundred kilobytes, which do not change while the program runs."""
    folder = recording_archive.folder()
    return [recording.read(source) for source in recording_archive.sources(folder)]
