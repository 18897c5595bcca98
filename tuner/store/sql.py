"""The store over SQLAlchemy Core: SQLite in WAL mode, PostgreSQL, any other URL."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tuner.config import Config
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime, Regimes, Status, regime_keys
from tuner.problem import Problem
from tuner.store import exchange, models
from tuner.store import statements as run
from tuner.store.base import (
    SWEEP_STATES,
    Check,
    EnvironmentRecord,
    ImportReport,
    Store,
    SweepRecord,
)
from tuner.store.engine import connect
from tuner.store.entry import (
    PINNED,
    Entry,
    as_text,
    canonical,
    check_ranking,
    checked_measurement,
    entries_from_rows,
    environment_from_row,
    ranking_fault,
    sort_key,
)
from tuner.store.faults import FAULTS, decoding, store_error, store_lost
from tuner.store.jobs import Jobs, Lease
from tuner.store.newer import readable, without_unknown
from tuner.store.rescue import Rescue
from tuner.store.sql_jobs import SqlJobs, check
from tuner.store.statements import now

_P, _G, _E, _M = models.problems, models.gpus, models.environments, models.measurements
_S, _W, _R, _B = models.sweeps, models.winners, models.rankings, models.builds
_MIRRORS = models.mirrors
#: Decisions and what they rank. Of the tables, not of the view: a document holds what was measured,
#: not what was built since.
_CHOSEN: sa.Select[Any] = sa.select(
    _W.c.id, _W.c.sweep, _W.c.decided_at, _R.c.position, _R.c.measurement_id
).select_from(_W.join(_R).join(_P))


class SqlStore(Store):
    """A store in a database that SQLAlchemy speaks to."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._engine, self.where, file = connect(url, create=create)
        self._rescue = Rescue(file) if file is not None else None
        self._lease: Lease | None = None

    @property
    def jobs(self) -> Jobs:
        is_server = self._engine.dialect.name != "sqlite"
        return SqlJobs(self.transaction, self.where, is_server=is_server)

    def under(self, lease: Lease) -> Store:
        fenced = copy.copy(self)
        fenced._lease = lease
        return fenced

    def decisions_version(self) -> int:
        query = sa.select(models.versions.c.number).where(models.versions.c.name == "decisions")
        with self.transaction(write=False) as connection:
            return int(connection.scalar(query) or 0)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[sa.Connection]:
        """An open transaction; one that only reads sees one moment of the database.

        Raises:
            StoreError: when the database fails.
            StoreLostError: when another file, or none, has the name of the open one by now. Its
                content, what was just written too, is kept in a file beside it.
            LeaseLostError: when it writes, and this store is under a lease that is lost.
        """
        options: dict[str, Any] = {"tuner_write": write}
        if not write and self._engine.dialect.name == "postgresql":
            options["isolation_level"] = "REPEATABLE READ"
        try:
            with self._engine.connect().execution_options(**options) as connection:
                with connection.begin():
                    if write and self._lease is not None:
                        check(connection, self._lease)
                    yield connection
                # Afterwards: the lost file has taken the rows, and gives all of them back.
                if self._rescue is not None and self._rescue.file.is_lost:
                    kept = self._rescue.keep(partial(self._content, connection), anew=write)
                    raise store_lost(self.where, kept)
        except TunerError:
            raise
        except DBAPIError as exc:
            raise store_error(self.where, exc.orig or exc) from exc
        except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error, *FAULTS) as exc:
            raise store_error(self.where, exc) from exc

    def _content(self, connection: sa.Connection) -> dict[str, Any]:
        """All measurements and decisions, read outside a transaction."""
        with connection.begin():
            return self._export(connection, run.MEASUREMENTS, _CHOSEN)

    def add(self, measurements: Iterable[Measurement]) -> list[int]:
        with self.transaction(write=True) as connection:
            return [id for id, _ in run.insert(connection, list(measurements), "")]

    def measurements(
        self,
        *,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regimes | None = None,
        environment: str | None = None,
        provenance: Provenance | None = None,
        final: bool | None = None,
    ) -> list[Measurement]:
        query = run.matching(run.MEASUREMENTS, _G.c.identity, _M, problem, gpu, regime, provenance)
        if environment is not None:
            query = query.where(_E.c.digest == environment)
        if final is not None:
            query = query.where(_M.c.is_final == final)
        with self.transaction(write=False) as connection:
            rows = connection.execute(query.order_by(_M.c.id)).mappings().all()
        return [m for _, m in self._read(rows)]

    def environments(self) -> list[EnvironmentRecord]:
        newest = sa.func.max(_M.c.created_at)
        query = (
            sa.select(_E.c.facts, newest)
            .select_from(_M.join(_E))
            .where(_M.c.is_final, _M.c.provenance == Provenance.MEASURED.value)
            .group_by(_E.c.id, _E.c.facts)
            .order_by(newest.desc(), _E.c.id)
        )
        with self.transaction(write=False) as connection:
            rows = connection.execute(query).all()
        with decoding(self.where):
            return [EnvironmentRecord(environment_from_row(text), as_text(at)) for text, at in rows]

    def _read(self, rows: Sequence[sa.RowMapping]) -> list[tuple[int, Measurement]]:
        """Measurements with their ids, without those of newer programs."""

        def read(row: sa.RowMapping) -> tuple[int, Measurement]:
            return row["id"], checked_measurement(dict(row))

        with decoding(self.where):
            return readable(self.where, rows, read)

    def decide(
        self,
        problem: Problem,
        gpu: Gpu,
        regime: Regime,
        ranking: Sequence[Measurement],
        sweep: str,
    ) -> None:
        fault = ranking_fault(ranking)
        if not fault and run.identity(ranking[0]) != (problem, gpu.identity, regime):
            fault = "it ranks another problem, GPU or regime"
        if fault:
            raise StoreError(f"a decision for {problem.label()} cannot be stored: {fault}")
        with self.transaction(write=True) as connection:
            ids = [id for id, _ in run.insert(connection, ranking, "")]
            winner, _ = run.ensure_winner(connection, ranking[0])
            mirrors = connection.scalars(sa.select(_MIRRORS.c.url)).all()
            run.drop_pin_from(connection, winner, [mirror_origin(url) for url in mirrors])
            run.rank(connection, winner, ids, sweep, now())
            # These artifacts ran a moment ago: older builds give way.
            connection.execute(
                _B.delete().where(
                    _B.c.problem_id == run.problem_id(connection, problem),
                    _B.c.config_digest.in_([m.config.digest for m in ranking]),
                )
            )
            run.renew_pin(connection, winner, ids)

    def best(self, problem: Problem, gpu: Gpu, regime: Regime) -> Entry | None:
        found = self.entries(problem=problem, gpu=gpu, regime=regime)
        return found[0] if found else None

    def entries(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regime | None = None,
        provenance: Provenance | None = None,
    ) -> list[Entry]:
        view, query = models.best, models.checked_best
        for column, value in (
            (view.c.op, op),
            (view.c.problem, problem.key if problem else None),
            (view.c.gpu_identity, gpu.identity if gpu else None),
            (view.c.regime, regime.key if regime else None),
            (view.c.provenance, provenance.value if provenance else None),
        ):
            if value is not None:
                query = query.where(column == value)
        query = query.order_by(view.c.winner_id, view.c.position)
        with self.transaction(write=False) as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        with decoding(self.where):
            return sorted(entries_from_rows(self.where, rows), key=sort_key)

    def begin_sweep(self, sweep: SweepRecord) -> SweepRecord:
        with self.transaction(write=True) as connection:
            stored = connection.scalar(sa.select(_S.c.created_at).where(_S.c.id == sweep.id))
            sweep = sweep.but(
                state="running", created_at=stored or sweep.created_at or now(), finished_at=""
            )
            if stored is not None:
                change = _S.update().where(_S.c.id == sweep.id)
                connection.execute(change.values(state="running", finished_at=""))
                return sweep
            connection.execute(
                _S.insert().values(
                    id=sweep.id,
                    problem_id=run.problem_id(connection, sweep.problem),
                    gpu_id=run.gpu_id(connection, sweep.gpu),
                    regime=sweep.regime.key,
                    environment=sweep.environment,
                    settings=sweep.settings,
                    state=sweep.state,
                    created_at=sweep.created_at,
                    finished_at="",
                )
            )
            return sweep

    def end_sweep(self, id: str, state: str) -> None:
        if state not in SWEEP_STATES[1:]:
            raise StoreError(
                f"sweep state {state} is not known (allowed: {', '.join(SWEEP_STATES[1:])})"
            )
        with self.transaction(write=True) as connection:
            change = _S.update().where(_S.c.id == id).values(state=state, finished_at=now())
            if connection.execute(change).rowcount == 0:
                raise StoreError(f"store {self.where} has no sweep {id}")

    def find_sweep(
        self, problem: Problem, gpu: Gpu, regime: Regime, environment: str, settings: str
    ) -> SweepRecord | None:
        query: sa.Select[Any] = sa.select(_S).join(_P).join(_G)
        query = run.matching(query, _G.c.identity, _S, problem, gpu, regime, None)
        query = query.where(_S.c.environment == environment, _S.c.settings == settings)
        with self.transaction(write=False) as connection:
            row = (
                connection.execute(query.order_by(_S.c.created_at.desc(), _S.c.id))
                .mappings()
                .first()
            )
        if row is None:
            return None
        names = ("id", "environment", "settings", "state", "created_at", "finished_at")
        with decoding(self.where):
            values = {name: as_text(row[name]) for name in names}
        return SweepRecord(problem=problem, gpu=gpu, regime=regime, **values)

    def pin(self, problem: Problem, gpu: Gpu, regime: Regime, config: Config) -> Entry:
        query = run.matching(
            sa.select(_M.c.id).select_from(_M.join(_P).join(_G)),
            _G.c.identity, _M, problem, gpu, regime, Provenance.MEASURED,
        )  # fmt: skip
        query = query.where(_M.c.config_digest == config.digest, _M.c.status == Status.OK.value)
        query = query.order_by(_M.c.is_final.desc(), _M.c.id.desc())
        with self.transaction(write=True) as connection:
            winner = run.find_winner(connection, problem, gpu, regime)
            if winner is None:
                raise StoreError(
                    f"nothing measured is decided for {problem.label()} on {gpu.name} ({regime}): "
                    "run `tuner sweep` first"
                )
            measured = connection.scalar(query)
            if measured is None:
                raise ConfigError(
                    f"config {config.digest} ({config.family}) cannot be pinned: "
                    f"no measurement that passed for {problem.label()} on {gpu.name} ({regime})"
                )
            run.set_pin(connection, winner, measured)
        entry = self.best(problem, gpu, regime)
        if entry is None:
            raise StoreError(f"the decision for {problem.label()} was forgotten meanwhile")
        return entry

    def unpin(self, problem: Problem, gpu: Gpu, regime: Regime) -> bool:
        with self.transaction(write=True) as connection:
            winner = run.find_winner(connection, problem, gpu, regime)
            if winner is None:
                return False
            gone = _R.delete().where(_R.c.winner_id == winner, _R.c.position == PINNED)
            return connection.execute(gone).rowcount > 0

    def record_build(self, problem: Problem, config: Config, artifacts: Mapping[str, str]) -> None:
        with self.transaction(write=True) as connection:
            key = {
                "problem_id": run.problem_id(connection, problem),
                "config_digest": config.digest,
            }
            connection.execute(_B.delete().filter_by(**key))
            connection.execute(_B.insert().values(**key, artifacts=canonical(dict(artifacts))))

    def forget(
        self, problem: Problem, gpu: Gpu | None = None, regime: Regimes | None = None
    ) -> tuple[int, int]:
        with self.transaction(write=True) as connection:
            found = connection.scalar(sa.select(_P.c.id).where(_P.c.key == problem.key))
            if found is None:
                return 0, 0
            winners = _W.delete().where(_W.c.problem_id == found)
            sweeps = _S.delete().where(_S.c.problem_id == found)
            measurements = _M.delete().where(_M.c.problem_id == found)
            if gpu is not None:
                models_of = sa.select(_G.c.id).where(_G.c.identity == gpu.identity)
                winners = winners.where(_W.c.gpu == gpu.identity)
                sweeps = sweeps.where(_S.c.gpu_id.in_(models_of))
                measurements = measurements.where(_M.c.gpu_id.in_(models_of))
            if regime is not None:
                keys = regime_keys(regime)
                winners = winners.where(_W.c.regime.in_(keys))
                sweeps = sweeps.where(_S.c.regime.in_(keys))
                measurements = measurements.where(_M.c.regime.in_(keys))
            decisions = connection.execute(winners).rowcount
            connection.execute(sweeps)
            return decisions, connection.execute(measurements).rowcount

    def export(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regimes | None = None,
        provenance: Provenance | None = None,
        trials: bool = False,
    ) -> dict[str, Any]:
        chosen = run.matching(_CHOSEN, _W.c.gpu, _W, problem, gpu, regime, provenance)
        rows = run.matching(run.MEASUREMENTS, _G.c.identity, _M, problem, gpu, regime, provenance)
        if op is not None:
            chosen, rows = chosen.where(_P.c.op == op), rows.where(_P.c.op == op)
        if not trials:
            rows = rows.where(_M.c.id.in_(sa.select(_R.c.measurement_id)))
        with self.transaction(write=False) as connection:
            return self._export(connection, rows, chosen)

    def _export(
        self, connection: sa.Connection, rows: sa.Select[Any], chosen: sa.Select[Any]
    ) -> dict[str, Any]:
        """The document of some measurements, and of those decisions that are chosen."""
        stored = connection.execute(rows).mappings().all()
        measured = dict(self._read(stored))
        left_out = {row["id"] for row in stored} - measured.keys()
        places = connection.execute(chosen.order_by(_W.c.id, _R.c.position)).mappings().all()
        by_id: dict[int, exchange.Decision] = {}
        with decoding(self.where):
            for place in places:
                origin = as_text(place["sweep"]), as_text(place["decided_at"])
                decision = by_id.setdefault(place["id"], exchange.Decision([], None, *origin))
                if place["position"] == PINNED:
                    decision.pinned = place["measurement_id"]
                else:
                    decision.ranking.append(place["measurement_id"])
            decisions = [d for d in by_id.values() if left_out.isdisjoint(d.numbers)]
            for decision in decisions:
                check_ranking([measured[id] for id in decision.ranking])
                if decision.pinned is not None and decision.pinned not in measured:
                    raise LookupError(f"there is no measurement {decision.pinned}")
        return exchange.write(measured, decisions)

    def import_(
        self, document: Mapping[str, Any], *, origin: str = "imported", check: Check | None = None
    ) -> ImportReport:
        measured, decisions = exchange.read(document, check)
        with self.transaction(write=True) as connection:
            return run.adopt_all(connection, measured, decisions, origin)[0]

    def mirror(
        self, document: Mapping[str, Any], *, url: str, etag: str, check: Check
    ) -> ImportReport:
        document, newer = without_unknown(document)
        measured, decisions = exchange.read(document)
        allowed, refused = exchange.servable(measured, decisions, check)
        origin = mirror_origin(url)
        with self.transaction(write=True) as connection:
            report, winners = run.adopt_all(connection, measured, allowed, origin, follows=True)
            dropped = run.drop_others(connection, origin, winners)
            connection.execute(_MIRRORS.delete().where(_MIRRORS.c.url == url))
            connection.execute(_MIRRORS.insert().values(url=url, etag=etag, synced_at=now()))
        return replace(report, entries_dropped=dropped, entries_refused=(*newer, *refused))

    def mirrored(self, url: str) -> str | None:
        with self.transaction(write=False) as connection:
            query = sa.select(_MIRRORS.c.etag).where(_MIRRORS.c.url == url)
            etag = connection.scalar(query)
        with decoding(self.where):
            return None if etag is None else as_text(etag)


def mirror_origin(url: str) -> str:
    """The origin of what is mirrored from a service: its URL, as far as the column holds it."""
    if len(url) <= models.ORIGIN_CHARACTERS:
        return url
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return f"{url[: models.ORIGIN_CHARACTERS - 13]}#{digest}"
