"""Copies of studies in an Optuna storage, for optuna-dashboard and Optuna's own tools.

A search reads its study in memory, and only writes the copy. So a slow, lost or edited storage
changes no proposal, and a killed sweep leaves no running trial. The value of a copied trial is the
best latency in microseconds; a failed trial has the state FAIL and a reason.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import optuna
import sqlalchemy as sa
from optuna.distributions import distribution_to_json
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url

from tuner import settings
from tuner.base.printable import one_line
from tuner.errors import ConfigError, StoreError
from tuner.hardware import Gpu
from tuner.measurement import Environment, Provenance, Regime
from tuner.problem import Problem
from tuner.search.samplers import KERNEL, Groups, GroupStudy

WAIT_S = 10
"""Longest wait, in seconds, for a lock of SQLite and for a connection to PostgreSQL."""
FAULTS = (
    optuna.exceptions.OptunaError,
    sa.exc.SQLAlchemyError,
    ImportError,
    KeyError,  # a deleted study
    OSError,
    RuntimeError,  # a schema of another version
    ValueError,  # a journal that is damaged
)
"""Errors of Optuna's storages."""


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
    chosen = url or settings.optuna_storage()
    storage = StudyStorage(chosen, note) if chosen else None
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
    """Open Optuna storage for copies. The first error of a write is noted, and copying ends."""

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
        self.name = url
        self._note = note
        self._is_lost = False
        self._copies: dict[GroupStudy, _Copy] = {}
        self._storage = self._open(url)

    def _open(self, url: str) -> BaseStorage:
        if "://" in url:
            try:
                parsed = make_url(url)
            except sa.exc.ArgumentError as exc:
                raise ConfigError(f"Optuna storage: {one_line(str(exc))}") from exc
            self.name = parsed.render_as_string(hide_password=True)
        try:
            return _open_database(url, self.name) if "://" in url else _open_journal(Path(url))
        except FAULTS as exc:
            raise StoreError(
                f"Optuna storage {self.name} cannot be opened: {_first(exc)} (allowed: "
                "sqlite:///FILE, postgresql+psycopg://..., or a journal file)"
            ) from exc

    def copy(self, trials: GroupStudy, subject: StudySubject) -> None:
        """Add the finished trials that the storage does not have yet.

        Args:
            trials: the search's own study.
            subject: its subject.
        """
        if self._is_lost:
            return
        try:
            if trials not in self._copies:
                self._copies[trials] = _Copy(self._storage, trials, subject)
            self._copies[trials].update()
        except FAULTS as exc:
            self._is_lost = True
            self._note(f"Optuna storage {self.name}: {_first(exc)}; no further trial is copied")

    def forget(self, trials: GroupStudy) -> None:
        """Release a study that has ended."""
        self._copies.pop(trials, None)

    def close(self) -> None:
        """Close the connections."""
        if isinstance(self._storage, RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()


class _Copy:
    """One study's copy."""

    def __init__(self, storage: BaseStorage, trials: GroupStudy, subject: StudySubject) -> None:
        self._trials = trials
        self._provenance = subject.provenance.value
        self._study = optuna.create_study(
            storage=storage,
            study_name=subject.name(trials),
            direction="minimize",
            load_if_exists=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(["latency_us"])
        known = self._study.user_attrs
        for name, value in subject.attributes().items():
            if known.get(name) != value:
                self._study.set_user_attr(name, value)
        self._kernels = {
            trial.user_attrs.get(KERNEL)
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state == TrialState.COMPLETE or "variants" in trial.user_attrs
        }
        self._read: set[int] = set()

    def update(self) -> None:
        for trial in self._trials.study.get_trials(deepcopy=False):
            if trial.number in self._read or not trial.state.is_finished():
                continue
            self._read.add(trial.number)
            kernel, reason = trial.user_attrs.get(KERNEL), trial.user_attrs.get("reason")
            if kernel in self._kernels if kernel else not reason:
                continue  # copied by an earlier sweep, or a draw of a known group
            self._study.add_trial(_copied(trial, self._trials.groups, self._provenance))


def _copied(trial: FrozenTrial, groups: Groups, provenance: str) -> FrozenTrial:
    """A trial with its group's parameters, independent of the sampler's form of them."""
    latency_us, key = trial.user_attrs.get("latency_us"), trial.user_attrs.get(KERNEL)
    params = trial.params if key is None else groups.params(key)
    made = optuna.trial.create_trial(
        state=TrialState.FAIL if latency_us is None else TrialState.COMPLETE,
        value=latency_us,
        params=params,
        distributions={name: groups.distributions[name] for name in params},
        user_attrs={"provenance": provenance, **trial.user_attrs},
        constraints=dict(trial.constraints),
    )
    made.datetime_start, made.datetime_complete = trial.datetime_start, trial.datetime_complete
    return made


def _open_database(url: str, name: str) -> RDBStorage:
    waits = {"sqlite": {"timeout": WAIT_S}, "postgresql": {"connect_timeout": WAIT_S}}
    arguments = waits.get(make_url(url).get_backend_name(), {})
    engine = sa.create_engine(url, connect_args=arguments)
    try:
        tables = set(sa.inspect(engine).get_table_names())
    finally:
        engine.dispose()
    if tables and "studies" not in tables:
        raise StoreError(f"Optuna storage {name} holds another program's tables; name another one")
    return RDBStorage(url, engine_kwargs={"connect_args": arguments})


def _open_journal(path: Path) -> JournalStorage:
    if path.is_dir():
        raise StoreError(f"Optuna storage {path} is a folder; name a file in it")
    if path.exists():
        with path.open("rb") as file:
            if file.read(1) not in (b"", b"{"):
                raise StoreError(
                    f"Optuna storage {path} is not a journal (for SQLite: sqlite:///{path})"
                )
    return JournalStorage(JournalFileBackend(str(path)))


def _first(exc: BaseException) -> str:
    """The cause in one line, without the SQL."""
    cause: BaseException = exc
    while cause.__cause__ is not None:
        cause = cause.__cause__
    original = getattr(cause, "orig", None) or cause
    return one_line(str(original) or type(original).__name__)
