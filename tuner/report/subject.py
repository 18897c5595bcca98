"""Measurements of one problem to report on: from a store, a recording or shipped data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner import settings
from tuner.bench.results import Results
from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.hardware import Gpu
from tuner.measure import profile
from tuner.measure.profile import Profile
from tuner.measurement import Clocks, Environment, Measurement, Provenance, Regime, Regimes, listed
from tuner.problem import Problem
from tuner.runners import recording, recording_archive
from tuner.runners.recording import Recording
from tuner.search.ranking import rank
from tuner.selection.describe import first_few, nearest_labels
from tuner.selection.reader import (
    Entry,
    entries,
    shipped,
    with_shipped,
)
from tuner.store import Store, open_store
from tuner.store.entry import is_vendor
from tuner.store.reading import sqlite_file


@dataclass(frozen=True)
class ReportSubject:
    """Real measurements of one problem on one GPU, in one environment and regime."""

    recording: Recording
    source: str
    """Description of the measurements' source."""
    known: tuple[Entry, ...] = ()
    """Measured decisions of every problem, this one's included, for charts of scaling."""
    benches: tuple[Results, ...] = ()
    """Benchmark results of any problem, shipped ones last, also for charts of scaling."""

    def __post_init__(self) -> None:
        if not self.ranking:
            raise NoValidConfigError(
                f"no kernel passed for {self.label} ({self.source}): there is nothing to report"
            )

    @property
    def problem(self) -> Problem:
        return self.recording.problem

    @property
    def gpu(self) -> Gpu:
        return self.recording.gpu

    @property
    def regime(self) -> Regime:
        return self.recording.regime

    @property
    def environment(self) -> Environment:
        return self.recording.environment

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()} on {self.gpu.name}, {self.regime}"

    @property
    def has_finals(self) -> bool:
        """False for a sweep that was stopped before its final pass."""
        return any(m.is_final and m.ok for m in self.recording.measurements)

    @property
    def ranking(self) -> tuple[Measurement, ...]:
        """Final pass, best first; the quick pass if there was no final one."""
        measured = self.recording.measurements
        return tuple(rank([m for m in measured if m.is_final]) or rank(measured))

    @property
    def entry(self) -> Entry:
        return Entry.of(self.ranking)

    @property
    def quick(self) -> tuple[Measurement, ...]:
        """Own candidates of the quick pass, failed ones included, in the order of time."""
        return quick_pass(self.recording)

    @property
    def clock_mhz(self) -> int:
        """Clock of the multiprocessors during the final pass, or the highest where not read."""
        return (self.ranking[0].clocks or Clocks()).sm_mhz or self.gpu.clock_max_mhz

    def profile_of(self, config: Config) -> Profile | None:
        """Counters of a config on this GPU model; None when it was not profiled."""
        return profile.find(self.problem, self.gpu, config)

    @property
    def measured_on(self) -> str:
        """Day of the newest measurement, UTC."""
        return max(m.created_at for m in self.recording.measurements)[:10]


def quick_pass(part: Recording) -> tuple[Measurement, ...]:
    """Own candidates of a recording's quick pass in the order of time."""
    own = (m for m in part.measurements if not m.is_final and not is_vendor(m.config))
    return tuple(sorted(own, key=lambda m: m.created_at))


def from_file(path: Path, benches: Sequence[Path] = ()) -> ReportSubject:
    """A recorded sweep.

    Raises:
        ConfigError: when it, or a bench, cannot be read or is something else.
    """
    results = tuple(map(Results.read, benches))
    return ReportSubject(
        recording.read(path), f"recording {path.name}", _measured(shipped()), results
    )


def from_known(
    problem: Problem,
    gpu: Gpu,
    regimes: Regimes,
    url: str | None = None,
    benches: Sequence[Path] = (),
) -> ReportSubject:
    """As `from_store`, of a store that need not exist.

    Args:
        problem: problem of the sweep.
        gpu: GPU of the sweep.
        regimes: accepted regimes, the preferred one first.
        url: the store; default: `settings.store_url`.
        benches: files of `tuner bench --json`.
    """
    address = url or settings.store_url()
    file = sqlite_file(address)
    if file is not None and file.exists():
        entries(file)  # refuses a file of another version, which opening would upgrade
    elif file is not None and not url:
        return from_store(None, problem, gpu, regimes, "", benches)
    with open_store(address, create=False) as store:
        return from_store(store, problem, gpu, regimes, f"store {file or 'database'}", benches)


def from_store(
    store: Store | None,
    problem: Problem,
    gpu: Gpu,
    regimes: Regimes,
    name: str,
    benches: Sequence[Path] = (),
) -> ReportSubject:
    """The newest sweep of a problem in an open store, else a shipped recording, else what ships.

    Args:
        store: open store; None: only what ships.
        problem: problem of the sweep.
        gpu: GPU of the sweep.
        regimes: accepted regimes, the preferred one first.
        name: name of the store, for people.
        benches: files of `tuner bench --json`.

    Raises:
        NoValidConfigError: when nothing was measured; names what was.
        StoreError: when the store cannot be read.
        ConfigError: when a bench cannot be read.
    """
    entries = _measured(with_shipped(store.entries()) if store else shipped())
    results = tuple(map(Results.read, benches))
    for regime in listed(regimes):
        if store and (stored := _in_store(store, problem, gpu, regime)):
            return ReportSubject(stored, name, entries, results)
    if (recorded := recording_archive.find(problem, gpu, regimes)) is not None:
        return ReportSubject(recorded, "the shipped recording", entries, results)
    for regime, entry in itertools.product(listed(regimes), entries):
        if (entry.problem, entry.gpu.identity, entry.regime) == (problem, gpu.identity, regime):
            environment = entry.winner.environment
            decided = Recording(problem, entry.gpu, regime, environment, entry.ranking)
            return ReportSubject(decided, "shipped decisions", entries, results)
    raise NoValidConfigError(
        f"nothing was measured for {problem.op} {problem.label()} on {gpu.name} "
        f"({listed(regimes)[0]}): "
        f"`tuner sweep` measures it (measured for {problem.op}, nearest first: "
        f"{first_few(nearest_labels(problem, entries)) or 'none'})"
    )


def _in_store(store: Store, problem: Problem, gpu: Gpu, regime: Regime) -> Recording | None:
    try:
        return recording.from_store(store, problem, gpu, regime)
    except NoValidConfigError:
        return None


def _measured(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    return tuple(e for e in entries if e.provenance is Provenance.MEASURED)
