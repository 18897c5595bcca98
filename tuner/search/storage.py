"""Copies of studies in an Optuna storage, for optuna-dashboard and Optuna's own tools.

A search reads its study in memory, and a thread writes the copy. So a slow, lost or edited storage
changes no proposal and holds no sweep up, and a killed sweep leaves no running trial. The value of
a copied trial is the best latency in microseconds; a failed trial has the state FAIL and a reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from zlib import crc32

import optuna
import sqlalchemy as sa
from optuna.distributions import distribution_to_json
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url

from tuner import settings
from tuner.base.printable import one_line, without_password
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.hardware import Gpu
from tuner.measurement import Environment, Provenance, Regime
from tuner.problem import Problem
from tuner.search.journal import open_journal
from tuner.search.samplers import KERNEL, Groups, GroupStudy
from tuner.store import faults
from tuner.store.reading import sqlite_file

WAIT_S = 10.0
"""Longest wait for a storage to open, in seconds."""
STATEMENT_WAIT_S = 5
"""Longest wait, in seconds, for a lock of SQLite and for a connection to PostgreSQL."""
CLOSE_WAIT_S = 5.0
"""Longest wait at the end for trials that are not copied yet, in seconds."""
SCHEMA_ATTEMPTS = 6
FAULTS = (
    optuna.exceptions.OptunaError,
    sa.exc.SQLAlchemyError,
    AssertionError,  # a schema that another process is making, or a damaged journal
    ImportError,
    OSError,
    RuntimeError,  # a schema of another version
    *faults.FAULTS,  # a damaged journal or database, a deleted study
)
"""Errors of Optuna's storages."""
_TURN = 0x74756E6572
"""Key of the lock that tuners share on a PostgreSQL server: ``tuner``."""


@contextmanager
def open_storage(url: str | None, note: Callable[[str], None]) -> Iterator[StudyStorage | None]:
    """The storage of this URL, or of the settings without one; None without either.

    Args:
        url: as for `StudyStorage`.
        note: as for `StudyStorage`.

    Raises:
        ConfigError: when the URL cannot be read.
        StoreError: when the storage cannot be opened or belongs to another program.
    """
    place = url or settings.optuna_storage()
    storage = StudyStorage(place, note) if place else None
    try:
        yield storage
    finally:
        if storage is not None:
            storage.close()


@dataclass(frozen=True)
class StudySubject:
    """Subject of a study: equal subjects with equal choices share a study."""

    problem: Problem
    gpu: Gpu
    regime: Regime
    environment: Environment
    provenance: Provenance
    family: str
    sampler: str
    """Sampler of the last sweep; a study may hold trials of several sweeps."""
    seed: int

    def name(self, trials: GroupStudy) -> str:
        """Name of the study, ending in a digest of the environment and the choices.

        Times of two environments cannot be compared, and Optuna allows one set of choices in a
        study.
        """
        choices = {n: distribution_to_json(d) for n, d in trials.groups.distributions.items()}
        facts = json.dumps([self.environment.digest, choices], sort_keys=True)
        parts = (
            f"{self.problem.op} {self.problem.label()}",
            self.gpu.name,
            str(self.regime),
            self.family,
            f"{self.provenance.value} {crc32(facts.encode()):08x}",
        )
        return " | ".join(parts)

    def attributes(self) -> dict[str, Any]:
        """User attributes of the study."""
        return {
            "problem": self.problem.to_json(),
            "gpu": self.gpu.name,
            "regime": str(self.regime),
            "environment": dict(self.environment.facts),
            "provenance": self.provenance.value,
            "family": self.family,
            "sampler": self.sampler,
            "seed": self.seed,
            "value": "best latency of the group's run-time variants, microseconds",
        }


class StudyStorage:
    """Open Optuna storage for copies. The first error of a write is noted, and copying ends.

    A thread writes: no method waits for the storage, but for the opening and `close`, whose waits
    have limits.
    """

    def __init__(self, url: str, note: Callable[[str], None]) -> None:
        """Open it.

        Args:
            url: SQLAlchemy URL, or path of a journal file, as for optuna-dashboard.
            note: called with the first error of a write.

        Raises:
            ConfigError: when the URL cannot be read.
            StoreError: when the storage cannot be opened or belongs to another program.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = without_password(url)
        self._note: Callable[[str], None] | None = note
        self._copies: dict[GroupStudy, _Copy] = {}
        if "://" in url:
            try:
                make_url(url)
            except (sa.exc.ArgumentError, ValueError) as exc:
                raise ConfigError(f"Optuna storage: {one_line(str(exc))}") from exc
        self._storage = _Storage(url, self.name)
        self._writer = _Writer()
        try:
            self._open()
        except BaseException:
            self._stop_writer()
            raise

    def _open(self) -> None:
        opened = threading.Event()
        self._writer.put(self._storage.open)
        self._writer.put(opened.set, always=True)
        if not opened.wait(WAIT_S):
            raise StoreError(f"Optuna storage {self.name} did not answer within {WAIT_S:g} s")
        fault = self._writer.fault
        if isinstance(fault, TunerError):
            raise fault
        if fault is not None:
            raise StoreError(
                f"Optuna storage {self.name} cannot be opened: {_first(fault)} (allowed: "
                "sqlite:///FILE, postgresql+psycopg://..., or a journal file)"
            ) from fault

    def copy(self, trials: GroupStudy, subject: StudySubject) -> None:
        """Add the finished trials that the storage does not have yet.

        Args:
            trials: the search's own study.
            subject: its subject.
        """
        if self._writer.fault is not None:
            self._say_lost(_first(self._writer.fault))
            return
        copy = self._copies.setdefault(trials, _Copy(self._storage, trials, subject))
        if finished := copy.take_finished():
            self._writer.put(partial(copy.write, finished))

    def forget(self, trials: GroupStudy) -> None:
        """Release a study that has ended."""
        self._copies.pop(trials, None)

    def close(self) -> None:
        """Wait for the last trials, and close the connections."""
        self._stop_writer()
        is_done = self._writer.is_ended_within(CLOSE_WAIT_S)
        if self._writer.fault is not None:
            self._say_lost(_first(self._writer.fault))
        elif not is_done:
            self._say_lost(f"it did not answer within {CLOSE_WAIT_S:g} s")

    def _stop_writer(self) -> None:
        self._writer.put(self._storage.close, always=True)
        self._writer.stop()

    def _say_lost(self, reason: str) -> None:
        note, self._note = self._note, None
        if note is not None:
            note(f"Optuna storage {self.name}: {reason}; no further trial is copied")


class _Writer:
    """Thread that does one work after the other. After an error it only does what it must.

    It is a daemon thread: where a storage never answers, it ends with the process.
    """

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        """The first error, one of `FAULTS` or the tuner's own."""
        self._queue: SimpleQueue[tuple[Callable[[], None], bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="optuna-storage", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], *, always: bool = False) -> None:
        """Add work.

        Args:
            work: function to call.
            always: True to call it after an error also.
        """
        self._queue.put((work, always))

    def stop(self) -> None:
        """End after the work that was added."""
        self._queue.put(None)

    def is_ended_within(self, seconds: float) -> bool:
        """Wait for the end. Returns False when it took longer."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, always = item
            if self.fault is None or always:
                try:
                    work()
                except (TunerError, *FAULTS) as exc:
                    self.fault = self.fault or exc


class _Storage:
    """Optuna's storage of a URL or path, and the turns of the tuners that write it.

    Args:
        url: as for `StudyStorage`.
        name: the URL without its password.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        self._engine: sa.Engine | None = None
        self._opened: BaseStorage | None = None

    @property
    def optuna(self) -> BaseStorage:
        """The open storage."""
        assert self._opened is not None
        return self._opened

    def open(self) -> None:
        """Open it, and make what it needs.

        Raises:
            StoreError: when it belongs to another program.
        """
        if "://" not in self._url:
            self._opened = open_journal(Path(self._url).expanduser())
            return
        waits = {
            "sqlite": {"timeout": STATEMENT_WAIT_S},
            "postgresql": {"connect_timeout": STATEMENT_WAIT_S},
        }
        arguments = waits.get(make_url(self._url).get_backend_name(), {})
        self._engine = sa.create_engine(self._url, connect_args=arguments)
        with self.turn():
            self._opened = self._make_schema({"connect_args": arguments})

    def _make_schema(self, options: dict[str, Any]) -> RDBStorage:
        assert self._engine is not None
        for attempt in range(SCHEMA_ATTEMPTS):
            tables = set(sa.inspect(self._engine).get_table_names())
            if tables and not tables & {"studies", "version_info"}:
                raise StoreError(
                    f"Optuna storage {self._name} holds another program's tables; name another one"
                )
            try:
                return RDBStorage(self._url, engine_kwargs=options)
            except (AssertionError, sa.exc.DBAPIError, optuna.exceptions.StorageInternalError):
                # A program that takes no turns makes the same tables.
                if attempt == SCHEMA_ATTEMPTS - 1:
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AssertionError

    def turn(self) -> AbstractContextManager[None]:
        """Context in which no other tuner writes the storage."""
        if self._engine is not None and self._engine.dialect.name == "postgresql":
            return _turn_on_server(self._engine)
        path = sqlite_file(self._url)
        return contextlib.nullcontext() if path is None else _turn_in(path.resolve().parent)

    def close(self) -> None:
        """Close the connections."""
        if isinstance(self._opened, RDBStorage):
            self._opened.remove_session()
            self._opened.engine.dispose()
        if self._engine is not None:
            self._engine.dispose()


@contextmanager
def _turn_on_server(engine: sa.Engine) -> Iterator[None]:
    with engine.begin() as connection:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_TURN)))
        yield


@contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Turn by a lock on the folder, which needs no file of its own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Copy:
    """One study's copy."""

    def __init__(self, storage: _Storage, trials: GroupStudy, subject: StudySubject) -> None:
        self._storage, self._trials, self._subject = storage, trials, subject
        self._study: optuna.Study | None = None
        self._read: set[int] = set()

    def take_finished(self) -> list[FrozenTrial]:
        """Finished trials that were not taken before, except draws without a result."""
        finished = [
            trial
            for trial in self._trials.study.get_trials(deepcopy=False)
            if trial.number not in self._read and trial.state.is_finished()
        ]
        self._read.update(trial.number for trial in finished)
        return [t for t in finished if t.user_attrs.keys() & {KERNEL, "reason"}]

    def write(self, finished: Sequence[FrozenTrial]) -> None:
        """Add trials, except those of kernels that the storage has: another sweep may work on the
        same study.
        """
        with self._storage.turn():
            self._study = self._study or self._open()
            kernels = {
                trial.user_attrs.get(KERNEL)
                for trial in self._study.get_trials(deepcopy=False)
                if trial.state == TrialState.COMPLETE or "variants" in trial.user_attrs
            }
            for trial in finished:
                if trial.user_attrs.get(KERNEL, "") not in kernels:
                    provenance = self._subject.provenance.value
                    self._study.add_trial(_copied(trial, self._trials.groups, provenance))

    def _open(self) -> optuna.Study:
        study = optuna.create_study(
            storage=self._storage.optuna,
            study_name=self._subject.name(self._trials),
            direction="minimize",
            load_if_exists=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(["latency_us"])
        stored = study.user_attrs
        for name, value in self._subject.attributes().items():
            if stored.get(name) != value:
                study.set_user_attr(name, value)
        return study


def _copied(trial: FrozenTrial, groups: Groups, provenance: str) -> FrozenTrial:
    """A trial with its group's parameters, independent of the sampler's form of them."""
    latency_us, key = trial.user_attrs.get("latency_us"), trial.user_attrs.get(KERNEL)
    params = trial.params if key is None else groups.params(key)
    copied = optuna.trial.create_trial(
        state=TrialState.FAIL if latency_us is None else TrialState.COMPLETE,
        value=latency_us,
        params=params,
        distributions={name: groups.distributions[name] for name in params},
        user_attrs={"provenance": provenance, **trial.user_attrs},
        constraints=dict(trial.constraints),
    )
    copied.datetime_start, copied.datetime_complete = trial.datetime_start, trial.datetime_complete
    return copied


def _first(exc: BaseException) -> str:
    """The cause in one line, without the SQL."""
    cause: BaseException = exc
    while cause.__cause__ is not None:
        cause = cause.__cause__
    original = getattr(cause, "orig", None) or cause
    return one_line(str(original) or type(original).__name__)
