"""Lookup of decisions, first in the user's store, then among those that ship.

For an untuned problem a shipped portfolio (`tuner.selection.portfolio`) names a configuration, its
expected time and its regret. A GPU without decisions or portfolios of its own uses those of a GPU
that shares them (`Gpu.shares_decisions`, `portfolio.serving`).

Needs the standard library only. A dict caches the answers of SQLite. It is valid while ``PRAGMA
data_version`` and the file itself stay the same; under write-ahead logging a commit does not change
the file's time. Safe to call from several threads and after a fork.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU, Gpu, gpu_by_name
from tuner.measurement import Environment, Measurement, Provenance, Regime, Regimes, Status, listed
from tuner.problem import AttentionProblem, Problem, as_problem
from tuner.selection.result import SELECTED, LookupResult, choose, differences, noted
from tuner.selection.shipped import (
    SHIPPED,
    shipped,
    shipped_index,
    with_builds,
    with_shipped,
)
from tuner.store.entry import (
    BEST_COLUMNS,
    CHECKED_COLUMNS,
    PROVENANCES,
    Entry,
    artifacts_from_row,
    as_text,
    entries_from_rows,
    gpu_from_row,
    problem_from_row,
)
from tuner.store.faults import decoding
from tuner.store.newer import readable
from tuner.store.reading import StoreFile, sqlite_file

__all__ = [
    "Entry",
    "LookupResult",
    "close",
    "copy_store",
    "decided",
    "decided_lengths",
    "decided_stamp",
    "differences",
    "entries",
    "find_gpu",
    "gpus",
    "is_decided",
    "lookup",
    "of_any_length",
    "shipped",
    "store_file",
    "with_shipped",
]

_MAX_ANSWERS = 65536
"""Most cached answers, misses included, so that a server of ever new shapes stays small."""

_ENTRY_COLUMNS = (*BEST_COLUMNS, *CHECKED_COLUMNS)
_SELECT = (
    f"SELECT {', '.join(f'b.{name}' for name in BEST_COLUMNS)}, m.digest, m.artifacts FROM best b "
    "JOIN rankings r ON r.winner_id = b.winner_id AND r.position = b.position "
    "JOIN measurements m ON m.id = r.measurement_id"
)
_ORDER = " ORDER BY b.winner_id, b.position"
_BUILDS = (
    "SELECT b.config_digest, b.artifacts FROM builds b JOIN problems p ON p.id = b.problem_id "
    "WHERE p.key = ?"
)
_ALL_BUILDS = (
    "SELECT p.key, b.config_digest, b.artifacts FROM builds b JOIN problems p "
    "ON p.id = b.problem_id"
)
_GPUS = "SELECT facts FROM gpus WHERE identity IN (SELECT gpu FROM winners) ORDER BY id"
_DECIDED = (
    "SELECT p.key, 'w', w.id, w.decided_at, count(*), sum((r.position + 2) * r.measurement_id) "
    "FROM winners w JOIN problems p ON p.id = w.problem_id JOIN rankings r ON r.winner_id = w.id "
    "GROUP BY w.id "
    "UNION ALL SELECT p.key, 'b', b.config_digest, b.artifacts, 0, 0 "
    "FROM builds b JOIN problems p ON p.id = b.problem_id"
)
_STAMP = (
    "SELECT (SELECT max(decided_at) FROM winners), (SELECT count(*) FROM winners), "
    "count(*), sum(winner_id * (position + 2) * measurement_id % 2147483647), "
    "(SELECT group_concat(artifacts) FROM builds) FROM rankings"
)
_OF_PROBLEM = (
    "SELECT 1 FROM winners w JOIN problems p ON p.id = w.problem_id WHERE p.key = ? LIMIT 1"
)
_ALIKE = (
    "SELECT DISTINCT p.key FROM winners w JOIN problems p ON p.id = w.problem_id WHERE p.key GLOB ?"
)


def lookup(
    problem: Problem | str,
    *,
    gpu: Gpu | str | None = None,
    regime: Regimes | None = None,
    path: Path | str | None = None,
    allow_other_gpu: bool = False,
    environment: Environment | None = None,
    among: Sequence[Entry] | None = None,
    with_portfolio: bool = True,
) -> LookupResult | None:
    """Find the best known kernel for a problem; None if there is none.

    Order of preference:

    1. a measured decision for the problem;
    2. a measured decision of a GPU that shares them, as an H200's for an H100
       (`Gpu.shares_decisions`);
    3. a replayed decision;
    4. a selection by a shipped portfolio, with expected time and regret (`LookupResult.kind`);
    5. a predicted decision;
    6. with `allow_other_gpu`, another GPU's decision.

    Among equals the user's store comes before shipped decisions. Without a `regime` the order is
    that of `Regime.choices`. A decision timed in a stream comes before a chained one with the same
    inputs. The operation's usual state of the inputs, warm or cold, comes before the other one.
    Decoding is tuned with cold caches, for instance, and its decisions serve warm ones also.

    A shared decision ranks the same machine code for this problem, where a portfolio predicts. For
    kernels bound by memory the lead over the vendor's is smaller on the other GPU, but does not
    turn. The answer notes it.

    Args:
        problem: the problem, or the text of an attention shape, as ``S=1024,D=64``.
        gpu: the GPU or its name; default: `hardware.DEFAULT_GPU`, which the answer notes.
        regime: the only regime to consider, or several, of which the first with the best answer
            counts; default: as above.
        path: the SQLite file; default: `store_file`.
        allow_other_gpu: answer a miss from a GPU of the same compute capability with another number
            of multiprocessors, the nearest; the answer notes it.
        environment: the caller's environment; an answer from another one notes the differences.
        among: entries to choose from in place of a file's, for a store that is not SQLite.
        with_portfolio: False: use no portfolio, for a caller that launches the answer.

    Raises:
        StoreError: when the file exists and cannot be read.
        ConfigError: on an unknown name of a GPU, or a `problem` or `regime` of another type.
    """
    problem = as_problem(problem)
    regimes = listed(regime or Regime.choices(problem.op))
    if not all(isinstance(item, Regime) for item in regimes):
        allowed = "tuner.Regime('stream', 'warm'), or several"
        raise ConfigError(f"regime={regime!r} is not a regime (allowed: {allowed})")
    path = None if path is None else Path(path)
    if isinstance(gpu, str):
        gpu = find_gpu(gpu, gpus(path) if among is None else [entry.gpu for entry in among])
    served_gpu = gpu or DEFAULT_GPU
    settings.answers()  # a wrong word is said for every problem
    if among is None:
        path = path or store_file()
    answer = _best(problem, served_gpu, regimes, path, allow_other_gpu, among)
    if with_portfolio and _is_open(answer, served_gpu):
        any_gpu = allow_other_gpu and answer is None
        answer = _selected(problem, served_gpu, regimes, any_gpu) or answer
    if answer is None:
        return None
    if gpu is None:
        answer = noted(answer, f"no GPU named: this is the answer for {served_gpu.name}")
    if (
        environment is not None
        and not answer.is_predicted
        and (differing := differences(answer.entry, environment))
    ):
        note = f"{answer.entry.provenance} in another environment ({'; '.join(differing)})"
        answer = replace(noted(answer, note), exact=False)
    return answer


def _best(
    problem: Problem,
    gpu: Gpu,
    regimes: Sequence[Regime],
    path: Path | None,
    allow_other_gpu: bool,
    among: Sequence[Entry] | None,
) -> LookupResult | None:
    """The best answer over some regimes; among equals the first regime's."""
    answer: LookupResult | None = None
    for regime in regimes:
        if not (rank := _rank(answer)):
            break
        answered = _known(problem, gpu, regime, path, allow_other_gpu, among)
        if answered is not None and _rank(answered) < rank:
            note = f"timed {regime}: nothing better is known {regimes[0]}"
            answer = answered if regime == regimes[0] else noted(answered, note)
    return answer


def _is_open(answer: LookupResult | None, gpu: Gpu) -> bool:
    """True if a portfolio's choice is better than this decision for the problem itself."""
    if answer is None or not gpu.shares_decisions(answer.entry.gpu):
        return True
    return answer.entry.provenance is Provenance.PREDICTED


def _known(
    problem: Problem,
    gpu: Gpu,
    regime: Regime,
    path: Path | None,
    allow_other_gpu: bool,
    among: Sequence[Entry] | None,
) -> LookupResult | None:
    """The answer under one regime."""
    if among is None:
        reader = _reader(path or store_file())
        return reader.answer(problem, gpu, regime, allow_other_gpu)
    matching = [e for e in among if (e.problem, e.regime) == (problem, regime)]
    return choose(matching, gpu, allow_other_gpu)


def _rank(answer: LookupResult | None) -> int:
    """Sort key of answers: measured before others, the requested GPU before another one."""
    if answer is None:
        return 3
    if answer.entry.provenance is not PROVENANCES[0]:
        return 2
    return 0 if answer.exact else 1


def entries(path: Path | None = None) -> list[Entry]:
    """Every decision in the user's store, and the shipped decisions that it does not have.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path or store_file()).all()


def gpus(path: Path | None = None) -> list[Gpu]:
    """The GPUs that have a decision, the GPUs of the user's store last.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path or store_file()).gpus()


def decided(path: Path | None = None) -> Mapping[str, Hashable]:
    """Stamps of the user's decisions by problem key: equal stamps mean equal decisions.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path or store_file()).decided()


def is_decided(problem: Problem, path: Path | None = None) -> bool:
    """True if the problem itself has a decision, on any GPU and under any regime.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path or store_file()).is_decided(problem)


def decided_lengths(problem: AttentionProblem, path: Path | None = None) -> set[int]:
    """Key lengths that have a decision, on any GPU and under any regime; all other fields are the
    problem's.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path or store_file()).decided_lengths(problem)


def decided_stamp(path: Path | None = None) -> Hashable:
    """A stamp that changes with every new decision.

    Takes microseconds if nothing was committed. After a commit to a store of 10,000 entries it
    takes 3 ms, `decided` 50 ms: a sweep beside a server commits every trial.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path or store_file()).decided_stamp()


def copy_store(path: Path, target: sqlite3.Connection) -> bool:
    """Copy a consistent state of the user's store into another database; False without a store.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    return _reader(path).copy_into(target)


def store_file() -> Path:
    """The SQLite file to read: that of `settings.store_url`, or the default one."""
    return sqlite_file(settings.store_url()) or settings.store_path()


def find_gpu(name: str, gpus: Iterable[Gpu] = ()) -> Gpu:
    """A GPU by short or full name, among the shipped descriptions and `gpus`; among equal names
    the last.

    Raises:
        ConfigError: on an unknown name; lists the known ones.
    """
    stored = {gpu.name: gpu for gpu in gpus}
    for gpu in stored.values():
        if name.casefold() == gpu.name.casefold():
            return gpu
    try:
        return gpu_by_name(name)
    except ConfigError as exc:
        raise ConfigError(f"{exc}; in the store: {', '.join(stored) or 'none'}") from exc


def of_any_length(problem: Problem) -> str:
    """GLOB pattern for the keys of problems that differ only in their key length; for operations
    other than attention the problem's key.
    """
    if not isinstance(problem, AttentionProblem):
        return problem.key
    return problem.key.replace(f'"seqlen_kv":{problem.seqlen_kv}', '"seqlen_kv":*')


@cache
def _shipped_lengths() -> Mapping[str, set[int]]:
    """Key lengths of the shipped decisions, by `of_any_length`."""
    lengths: dict[str, set[int]] = {}
    for problem, _ in shipped_index():
        if isinstance(problem, AttentionProblem):
            lengths.setdefault(of_any_length(problem), set()).add(problem.seqlen_kv)
    return lengths


def _selected(
    problem: Problem, gpu: Gpu, regimes: Sequence[Regime], allow_other_gpu: bool
) -> LookupResult | None:
    """The selection by a shipped portfolio for the GPU, or for another one if that is allowed."""
    from tuner.selection import portfolio

    portfolios = [p for p in portfolio.shipped() if p.op == problem.op]
    lenders = [p for p in portfolios if p.gpu.shares_kernels(gpu)] if allow_other_gpu else []
    for one in portfolio.serving(portfolios, gpu) or lenders:
        selection = one.select(problem)
        if selection is None or selection.regime not in regimes:
            continue
        notes = [f"{SELECTED}: {selection.source}", *selection.doubts, SHIPPED]
        if one.gpu.identity != gpu.identity:
            notes.insert(1, f"made on {one.gpu.name}, not on {gpu.name}: another GPU was allowed")
        measurement = Measurement(
            problem, selection.first[1], gpu, selection.regime, Status.OK, Provenance.PREDICTED
        )
        entry = Entry.of([measurement], origin=SHIPPED)
        return LookupResult(entry, False, tuple(notes), selected=selection)
    return None


class _Reader:
    """Answers from one SQLite file, cached until it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = StoreFile(path, self._forget)
        self._lock = threading.Lock()
        self._stamp: Hashable = None
        self._latest: tuple[Problem, list[Entry], Mapping[str, Mapping[str, str]]] | None = None
        self._answers: dict[tuple[Problem, str, Regime, bool], LookupResult | None] = {}

    def answer(
        self, problem: Problem, gpu: Gpu, regime: Regime, allow_other_gpu: bool
    ) -> LookupResult | None:
        key = (problem, gpu.identity, regime, allow_other_gpu)
        with self._lock:
            self._file.refresh()
            if key not in self._answers:
                if len(self._answers) >= _MAX_ANSWERS:
                    self._forget()
                candidates = self._candidates(problem, regime)
                self._answers[key] = choose(candidates, gpu, allow_other_gpu)
            return self._answers[key]

    def all(self) -> list[Entry]:
        with self._lock:
            self._file.refresh()
            builds: dict[str, dict[str, dict[str, str]]] = {}
            rows = self._file.select(_ALL_BUILDS) if self._file.has_tables else ()
            with self._decoding():
                for problem, config, artifacts in rows:
                    builds.setdefault(problem, {})[config] = artifacts_from_row(artifacts)
            return with_shipped(self._entries("", ()), builds)

    def gpus(self) -> list[Gpu]:
        with self._lock:
            self._file.refresh()
            rows = self._file.select(_GPUS) if self._file.has_tables else ()
            with self._decoding():
                stored = [gpu_from_row(facts) for (facts,) in rows]
            ships = (decision.gpu for same in shipped_index().values() for decision in same)
            return [*dict.fromkeys(ships), *stored]

    def is_decided(self, problem: Problem) -> bool:
        if any((problem, regime) in shipped_index() for regime in Regime.choices(problem.op)):
            return True
        with self._lock:
            self._file.refresh()
            return self._file.has_tables and bool(self._file.select(_OF_PROBLEM, (problem.key,)))

    def decided_lengths(self, problem: AttentionProblem) -> set[int]:
        alike = of_any_length(problem)
        with self._lock:
            self._file.refresh()
            rows = self._file.select(_ALIKE, (alike,)) if self._file.has_tables else []
            with self._decoding():
                keys = [key for (key,) in rows]
                problems = readable(str(self._path), keys, problem_from_row)
        lengths = {p.seqlen_kv for p in problems if isinstance(p, AttentionProblem)}
        return lengths | _shipped_lengths().get(alike, set())

    def decided(self) -> Mapping[str, Hashable]:
        with self._lock:
            self._file.refresh()
            by_place: dict[str, list[Any]] = {}
            rows = self._file.select(_DECIDED) if self._file.has_tables else ()
            with self._decoding():
                for key, *what in rows:
                    by_place.setdefault(as_text(key), []).append(tuple(what))
                return {key: tuple(sorted(values)) for key, values in by_place.items()}

    def decided_stamp(self) -> Hashable:
        with self._lock:
            self._file.refresh()
            if self._stamp is None:
                self._stamp = self._file.select(_STAMP)[0] if self._file.has_tables else ()
            return self._stamp

    def copy_into(self, target: sqlite3.Connection) -> bool:
        with self._lock:
            self._file.refresh()
            return self._file.copy_into(target)

    def close(self) -> sqlite3.Connection | None:
        """Forget everything; returns the connection, still open."""
        return self._file.close()

    def _forget(self) -> None:
        """Drop everything that was read from the file."""
        self._latest = None
        self._stamp = None
        self._answers.clear()

    def _candidates(self, problem: Problem, regime: Regime) -> list[Entry]:
        shipped_ones = [decision.entry for decision in shipped_index().get((problem, regime), [])]
        if not self._file.has_tables:
            return shipped_ones
        stored, builds = self._stored(problem)
        return [e for e in stored if e.regime == regime] + with_builds(shipped_ones, builds)

    def _stored(self, problem: Problem) -> tuple[list[Entry], Mapping[str, Mapping[str, str]]]:
        """The file's entries of a problem and its builds, cached for the next regime."""
        if self._latest is None or self._latest[0] != problem:
            entries = self._entries(" WHERE b.problem = ?", (problem.key,))
            builds = self._file.select(_BUILDS, (problem.key,))
            with self._decoding():
                keys = {config: artifacts_from_row(artifacts) for config, artifacts in builds}
            self._latest = problem, entries, keys
        return self._latest[1:]

    def _entries(self, where: str, values: tuple[str, ...]) -> list[Entry]:
        if not self._file.has_tables:
            return []
        rows = self._file.select(_SELECT + where + _ORDER, values)
        with self._decoding():
            named = [dict(zip(_ENTRY_COLUMNS, row, strict=True)) for row in rows]
            return entries_from_rows(str(self._path), named)

    def _decoding(self) -> AbstractContextManager[None]:
        return decoding(str(self._path))


_readers: dict[str, _Reader] = {}
_readers_lock = threading.Lock()
#: Connections of a parent process; SQLite must neither use nor close them in the child.
_inherited: list[sqlite3.Connection] = []


def _reader(path: Path) -> _Reader:
    with _readers_lock:
        # As text: a path is hashed and compared slowly.
        reader = _readers.get(str(path))
        if reader is None:
            reader = _readers[str(path)] = _Reader(path)
        return reader


def close() -> None:
    """Close every connection; the next lookup opens its own."""
    with _readers_lock:
        for reader in _readers.values():
            if connection := reader.close():
                connection.close()
        _readers.clear()


def _after_fork() -> None:
    global _readers_lock
    _readers_lock = threading.Lock()
    _inherited.extend(c for reader in _readers.values() if (c := reader.close()))
    _readers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
