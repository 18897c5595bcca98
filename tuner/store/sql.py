"""The store over SQLAlchemy Core: SQLite in WAL mode, PostgreSQL, any other URL."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tuner.config import Config
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime, Regimes, Status, regime_keys
from tuner.problem import Problem
from tuner.store import exchange, models
from tuner.store import statements as run
from tuner.store.engine import connect
from tuner.store.entry import (
    PINNED,
    Entry,
    as_text,
    canonical,
    check_ranking,
    entries_from_rows,
    environment_from_row,
    ranking_fault,
    sort_key,
)
from tuner.store.faults import FAULTS, decoding, store_error, store_lost
from tuner.store.job_statements import check
from tuner.store.jobs import Lease
from tuner.store.records import (
    SWEEP_STATES,
    Check,
    EnvironmentRecord,
    ImportReport,
    SweepRecord,
)
from tuner.store.rescue import Rescue
from tuner.store.sql_jobs import Jobs
from tuner.store.statements import now

_P, _G, _E, _M = models.problems, models.gpus, models.environments, models.measurements
_S, _W, _R, _B = models.sweeps, models.winners, models.rankings, models.builds
_MIRRORS = models.mirrors


class Store:
    """Measurements, sweeps and decisions in a database that SQLAlchemy speaks to.

    Measurements are immutable: adding an equal one again returns the id of the first. There is one
    decision, the newest, for each problem, GPU identity, regime and provenance. So a replayed or
    predicted one never replaces a measured one. Every method that writes is one transaction. All
    methods raise `StoreError` when the database fails.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._engine, self.where, file = connect(url, create=create)
        self._rescue = Rescue(file) if file is not None else None
        self._lease: Lease | None = None

    @property
    def jobs(self) -> Jobs:
        """Jobs of this store."""
        is_server = self._engine.dialect.name != "sqlite"
        return Jobs(self.transaction, self.where, is_server=is_server)

    def under(self, lease: Lease) -> Store:
        """This store for the holder of a lease. Once the lease is lost, each method that writes
        raises `LeaseLostError` instead.
        """
        fenced = copy.copy(self)
        fenced._lease = lease
        return fenced

    def decisions_version(self) -> int:
        """Number that rises with every change of decisions, pins and builds."""
        query = sa.select(models.versions.c.number).where(models.versions.c.name == "decisions")
        with self.transaction(write=False) as connection:
            return int(connection.scalar(query) or 0)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                    saved = self._rescue.keep(partial(self._content, connection), anew=write)
                    raise store_lost(self.where, saved)
        except TunerError:
            raise
        except DBAPIError as exc:
            raise store_error(self.where, exc.orig or exc) from exc
        except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error, *FAULTS) as exc:
            raise store_error(self.where, exc) from exc

    def _content(self, connection: sa.Connection) -> dict[str, Any]:
        """All measurements and decisions, read outside a transaction."""
        with connection.begin():
            return self._export(connection, run.MEASUREMENTS, run.DECISIONS)

    def add(self, measurements: Iterable[Measurement]) -> list[int]:
        """Store measurements. Returns their ids in order."""
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
        """Stored measurements that match, oldest first.

        Args:
            problem: only of this problem.
            gpu: only of GPUs with this identity.
            regime: only of this regime or of these.
            environment: only of the environment with this digest.
            provenance: only of this provenance.
            final: only final ones (True) or only the others (False).
        """
        query = run.matching(run.MEASUREMENTS, _G.c.identity, _M, problem, gpu, regime, provenance)
        if environment is not None:
            query = query.where(_E.c.digest == environment)
        if final is not None:
            query = query.where(_M.c.is_final == final)
        with self.transaction(write=False) as connection:
            rows = connection.execute(query.order_by(_M.c.id)).mappings().all()
        return [m for _, m in run.read(self.where, rows)]

    def environments(self) -> list[EnvironmentRecord]:
        """Environments of measured final passes, newest first."""
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

    def decide(
        self,
        problem: Problem,
        gpu: Gpu,
        regime: Regime,
        ranking: Sequence[Measurement],
        sweep: str,
    ) -> None:
        """Store final measurements and the decision that ranks them.

        A pin stays, and moves to the pinned config's new measurement if there is one. The pin of a
        mirrored decision belongs to the service, and is removed with the replaced decision.

        Args:
            problem: problem that was tuned.
            gpu: GPU that it was measured on.
            regime: regime of the times.
            ranking: final measurements that passed, own and vendors', best first, of one
                provenance.
            sweep: id of the deciding sweep.

        Raises:
            StoreError: when the ranking is empty or contains a measurement of something else.
        """
        fault = ranking_fault(ranking)
        if not fault and run.identity(ranking[0]) != (problem, gpu.identity, regime):
            fault = "it ranks another problem, GPU or regime"
        if fault:
            raise StoreError(f"a decision for {problem.label()} cannot be stored: {fault}")
        with self.transaction(write=True) as connection:
            ids = [id for id, _ in run.insert(connection, ranking, "")]
            winner, _ = run.ensure_winner(connection, ranking[0])
            mirrors = connection.scalars(sa.select(_MIRRORS.c.url)).all()
            run.drop_pin_from(connection, winner, [run.mirror_origin(url) for url in mirrors])
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
        """Decision of a problem: the measured entry, else the replayed, else the predicted one."""
        entries = self.entries(problem=problem, gpu=gpu, regime=regime)
        return entries[0] if entries else None

    def entries(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regime | None = None,
        provenance: Provenance | None = None,
    ) -> list[Entry]:
        """All decisions that match, in a fixed order.

        Args:
            op: only this operation; None: all of them.
            problem: only this problem; None: all of them.
            gpu: only this GPU, by its identity; None: all of them.
            regime: only this regime; None: all of them.
            provenance: only such times; None: measured, replayed and predicted ones.
        """
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
        """Record a sweep as running, or resume the one of this id. Returns the stored record."""
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
        """Record that a sweep ended as ``done`` or ``interrupted``.

        Raises:
            StoreError: when no sweep has this id.
        """
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
        """Newest sweep of a problem in an environment with equal settings; None if there is none.

        Args:
            problem: problem of the sweep.
            gpu: GPU of the sweep.
            regime: regime of its times.
            environment: digest of the environment.
            settings: text of the options that a resumed sweep must share.
        """
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
        """Serve `config` until `unpin`, whatever later sweeps decide. Returns the entry.

        Args:
            problem: problem of the decision.
            gpu: GPU of the decision.
            regime: regime of the decision.
            config: config with a passing measurement of the three.

        Raises:
            ConfigError: when the config has no passing measurement in this store.
            StoreError: when the problem has no measured decision.
        """
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
        """Serve the decided winner again. Returns False if no config was pinned."""
        with self.transaction(write=True) as connection:
            winner = run.find_winner(connection, problem, gpu, regime)
            if winner is None:
                return False
            gone = _R.delete().where(_R.c.winner_id == winner, _R.c.position == PINNED)
            return connection.execute(gone).rowcount > 0

    def record_build(self, problem: Problem, config: Config, artifacts: Mapping[str, str]) -> None:
        """Record the artifacts built on this machine for a config that was measured elsewhere or
        pruned.

        Entries then name these artifacts. An imported measurement does not name any before.
        """
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
        """Delete a problem's decisions, sweeps and measurements, damaged rows included.

        Returns:
            Numbers of deleted decisions and measurements.
        """
        with self.transaction(write=True) as connection:
            problem_id = connection.scalar(sa.select(_P.c.id).where(_P.c.key == problem.key))
            if problem_id is None:
                return 0, 0
            counts = []
            for table in (_W, _S, _M):
                query = table.delete().where(table.c.problem_id == problem_id)
                if gpu is not None and table is _W:
                    query = query.where(_W.c.gpu == gpu.identity)
                elif gpu is not None:
                    models_of = sa.select(_G.c.id).where(_G.c.identity == gpu.identity)
                    query = query.where(table.c.gpu_id.in_(models_of))
                if regime is not None:
                    query = query.where(table.c.regime.in_(regime_keys(regime)))
                counts.append(connection.execute(query).rowcount)
            return counts[0], counts[2]

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
        """Export decisions and their measurements as a document for `import_`.

        Args:
            op: only of this operation.
            problem: only of this problem.
            gpu: only of GPUs with this identity.
            regime: only of this regime or of these.
            provenance: only of this provenance.
            trials: True for every measurement, not only those that decisions rank.
        """
        query = run.matching(run.DECISIONS, _W.c.gpu, _W, problem, gpu, regime, provenance)
        rows = run.matching(run.MEASUREMENTS, _G.c.identity, _M, problem, gpu, regime, provenance)
        if op is not None:
            query, rows = query.where(_P.c.op == op), rows.where(_P.c.op == op)
        if not trials:
            rows = rows.where(_M.c.id.in_(sa.select(_R.c.measurement_id)))
        with self.transaction(write=False) as connection:
            return self._export(connection, rows, query)

    def _export(
        self, connection: sa.Connection, rows: sa.Select[Any], chosen: sa.Select[Any]
    ) -> dict[str, Any]:
        """The document of some measurements, and of those decisions that are chosen."""
        stored = connection.execute(rows).mappings().all()
        measured = dict(run.read(self.where, stored))
        left_out = {row["id"] for row in stored} - measured.keys()
        with decoding(self.where):
            every = run.decisions(connection, chosen)
            decisions = [d for d in every if left_out.isdisjoint(d.numbers)]
            for decision in decisions:
                check_ranking([measured[id] for id in decision.ranking])
                if decision.pinned is not None and decision.pinned not in measured:
                    raise LookupError(f"there is no measurement {decision.pinned}")
        return exchange.write(measured, decisions)

    def import_(
        self, document: Mapping[str, Any], *, origin: str = "imported", check: Check | None = None
    ) -> ImportReport:
        """Import an exported document, as a whole or not at all. It holds only data.

        A decision made by this store is kept over an imported one. The newer of two imported ones
        is kept.

        Args:
            document: result of `export`.
            origin: source of the document, stored with each new measurement.
            check: further checks of measurements that a decision serves.

        Raises:
            ConfigError: when a row does not fit; names every such row with its reason.
        """
        measured, decisions = exchange.read(document, check)
        with self.transaction(write=True) as connection:
            return run.adopt_all(connection, measured, decisions, origin)[0]

    def mirror(
        self, document: Mapping[str, Any], *, url: str, etag: str, check: Check
    ) -> ImportReport:
        """Replace the decisions mirrored from a service by those of its snapshot, as a whole or not
        at all.

        Mirrored decisions follow the service, pins included, and those that it no longer has are
        dropped. A decision of this store, or a newer one from elsewhere, is kept.

        Args:
            document: the snapshot, as `export` writes it.
            url: URL of the service.
            etag: ETag of the snapshot, which `mirrored` returns.
            check: checks of measurements to be served here.

        Raises:
            ConfigError: when a row does not fit; names every such row with its reason.
        """
        newer: list[str] = []
        measured, decisions = exchange.read(document, newer=newer)
        allowed, refused = exchange.servable(measured, decisions, check)
        origin = run.mirror_origin(url)
        with self.transaction(write=True) as connection:
            report, winners = run.adopt_all(connection, measured, allowed, origin, follows=True)
            dropped = run.drop_others(connection, origin, winners)
            connection.execute(_MIRRORS.delete().where(_MIRRORS.c.url == url))
            connection.execute(_MIRRORS.insert().values(url=url, etag=etag, synced_at=now()))
        return replace(report, entries_dropped=dropped, entries_refused=(*newer, *refused))

    def mirrored(self, url: str) -> str | None:
        """ETag of the snapshot that was last mirrored from a service."""
        with self.transaction(write=False) as connection:
            query = sa.select(_MIRRORS.c.etag).where(_MIRRORS.c.url == url)
            etag = connection.scalar(query)
        with decoding(self.where):
            return None if etag is None else as_text(etag)
