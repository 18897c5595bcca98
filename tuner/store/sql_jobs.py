"""The jobs of an SQL store.

Times are the database's own on a server, so that the clocks of its clients do not matter. A clock
that is set back or forward costs at most a change of controllers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tuner.errors import ConfigError
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.store import job_statements as queue
from tuner.store import models
from tuner.store import statements as run
from tuner.store.entry import as_object, canonical, problem_from_row
from tuner.store.faults import decoding
from tuner.store.job_statements import LONGEST_BACKOFF_S, check, lost
from tuner.store.jobs import (
    LEASE_S,
    MAX_ATTEMPTS,
    MAX_PRIORITY,
    OPEN_STATES,
    Claim,
    Event,
    JobRecord,
    Lease,
    Task,
    check_shown,
)
from tuner.store.newer import readable
from tuner.store.statements import now

_P, _M, _J, _T, _E = (
    models.problems,
    models.measurements,
    models.jobs,
    models.tasks,
    models.job_events,
)

BACKOFF_S = 5.0
"""Before the second attempt; doubled for each further one."""

_RESULT = "result"
"""Name of a finished task's result within what its row tells of progress."""

Transaction = Callable[..., AbstractContextManager[sa.Connection]]


class Jobs:
    """Jobs whose problems controllers take one by one under leases.

    A problem of a job is a task. Two tasks of one problem never run at the same time, even of
    different jobs. A lease that is not extended in time goes to the next claim, and its former
    holder cannot write any more (`Store.under`). Every method that writes is one transaction. All
    methods raise `StoreError` when the database fails.

    Args:
        transaction: function that opens a transaction of the store, given ``write``.
        where: the store's name in messages.
        is_server: True if several processes may write at a time.
    """

    def __init__(self, transaction: Transaction, where: str, *, is_server: bool) -> None:
        self._transaction = transaction
        self._where = where
        self._is_server = is_server

    # Submitting and watching

    def submit(
        self,
        problems: Sequence[Problem],
        options: Mapping[str, Any],
        *,
        priority: int = 0,
        attempts: int = 3,
    ) -> str:
        """Add a job and return its id. Equal problems are one task.

        Args:
            problems: problems to tune, at least one.
            options: JSON of the sweeps' options.
            priority: jobs of higher priority are taken first.
            attempts: times that a problem is begun before it has failed.

        Raises:
            ConfigError: when the list is empty, or a number is out of range.
        """
        if not problems:
            raise ConfigError("problems=0 is out of range (allowed: 1 or more)")
        for name, value, least, most in (
            ("attempts", attempts, 1, MAX_ATTEMPTS),
            ("priority", priority, -MAX_PRIORITY, MAX_PRIORITY),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name}={value} is out of range (allowed: {least} to {most})")
        id = uuid.uuid4().hex[:12]
        distinct = list(dict.fromkeys(problems))
        with self._transaction(write=True) as connection:
            connection.execute(
                _J.insert().values(
                    id=id,
                    priority=priority,
                    attempts=attempts,
                    options=canonical(dict(options)),
                    created_at=now(),
                )
            )
            blank: dict[str, Any] = {"reason": "", "holder": "", "sweep": "", "progress": "{}"}
            blank |= {"attempt": 0, "token": 0, "expires_at": 0.0, "not_before": 0.0}
            connection.execute(
                _T.insert(),
                [
                    {
                        "job_id": id,
                        "problem_id": run.problem_id(connection, problem),
                        "state": "queued",
                        **blank,
                    }
                    for problem in distinct
                ],
            )
            self._log(connection, id, None, f"submitted, problems: {len(distinct)}")
        return id

    def all(self) -> list[JobRecord]:
        """All jobs, newest first."""
        with self._transaction(write=False) as connection:
            return self._records(connection, sa.true())

    def _records(
        self, connection: sa.Connection, wanted: sa.ColumnElement[bool]
    ) -> list[JobRecord]:
        query = sa.select(_J).where(wanted).order_by(_J.c.created_at.desc(), _J.c.id)
        rows = self._typed(connection, query, _J)
        counts = sa.select(_T.c.job_id, _T.c.state, sa.func.count()).select_from(_T.join(_J))
        counts = counts.where(wanted).group_by(_T.c.job_id, _T.c.state)
        by_job: dict[str, dict[str, int]] = {}
        for job, state, count in connection.execute(counts):
            by_job.setdefault(job, {})[state] = count
        names = ("id", "priority", "attempts", "created_at")
        with decoding(self._where):
            return [
                JobRecord(
                    options=as_object(row["options"]),
                    counts=by_job.get(row["id"], {}),
                    **{name: row[name] for name in names},
                )
                for row in rows
            ]

    def find(self, id: str) -> JobRecord | None:
        """Job whose id is this or starts with it.

        Raises:
            ConfigError: when several jobs match, or it is empty.
        """
        if not id:  # every id begins with nothing
            raise ConfigError("the job's id is empty: give at least its first digit")
        with self._transaction(write=False) as connection:
            jobs = self._records(connection, _J.c.id.startswith(id, autoescape=True))
        if len(jobs) > 1:
            raise ConfigError(f"job {id} names {len(jobs)} jobs: give more of its digits")
        return jobs[0] if jobs else None

    def tasks(self, job: str, *, state: str | None = None) -> list[Task]:
        """Tasks of a job, of one state or all, in the order of submission."""
        trials = (
            sa.select(sa.func.count())
            .where(_M.c.sweep == _T.c.sweep, _T.c.sweep != "", _M.c.is_final.is_(False))
            .scalar_subquery()
        )
        query = (
            sa.select(_T, _P.c.key.label("key"), trials.label("trials"))
            .select_from(_T.join(_P))
            .where(_T.c.job_id == job)
            .order_by(_T.c.id)
        )
        if state is not None:
            query = query.where(_T.c.state == state)
        names = ("id", "state", "attempt", "reason", "holder", "sweep", "trials")
        with self._transaction(write=False) as connection:
            rows = self._typed(connection, query, _T)

        def read(row: sa.RowMapping) -> Task:
            progress = as_object(row["progress"])
            result = progress.pop(_RESULT, None)
            check_shown(progress, result)
            facts = {name: row[name] for name in names}
            problem = problem_from_row(row["key"])
            return Task(problem=problem, progress=progress, result=result, **facts)

        with decoding(self._where):
            return readable(self._where, rows, read)

    def trials(
        self, job: str, *, after: int = 0, limit: int = 1000
    ) -> list[tuple[int, Measurement]]:
        """Measurements of the job's sweeps with ids above `after`, each with its id."""
        sweeps = sa.select(_T.c.sweep).where(_T.c.job_id == job, _T.c.sweep != "")
        query = (
            run.MEASUREMENTS.where(_M.c.sweep.in_(sweeps), _M.c.id > after, queue.KNOWN)
            .order_by(_M.c.id)
            .limit(limit)
        )
        with self._transaction(write=False) as connection:
            rows = connection.execute(query).mappings().all()
        return run.read(self._where, rows)

    def events(self, job: str, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Events of a job with ids above `after`, oldest first."""
        query = (
            sa.select(_E, _P.c.key)
            .select_from(_E.outerjoin(_T, _E.c.task_id == _T.c.id).outerjoin(_P))
            .where(_E.c.job_id == job, _E.c.id > after)
            .order_by(_E.c.id)
            .limit(limit)
        )
        with self._transaction(write=False) as connection:
            rows = self._typed(connection, query, _E)

        events = []
        with decoding(self._where):
            for row in rows:
                keys = [row["key"]] if row["key"] else []
                problem = next(iter(readable(self._where, keys, problem_from_row)), None)
                events.append(Event(row["id"], row["at"], row["text"], problem))
        return events

    def cancel(self, job: str) -> int:
        """Cancel every open task and return their number. Measurements are kept, without a
        decision.
        """
        return self._change(job, OPEN_STATES, "cancelled", state="cancelled", holder="")

    def retry(self, job: str) -> int:
        """Queue failed and cancelled tasks again and return their number."""
        values = {"state": "queued", "attempt": 0, "not_before": 0.0}
        return self._change(job, ("failed", "cancelled"), "queued again", **values)

    def _change(self, job: str, states: Sequence[str], text: str, **values: Any) -> int:
        """Change a job's tasks that are in some states; returns how many."""
        with self._transaction(write=True) as connection:
            query = _T.update().where(_T.c.job_id == job, _T.c.state.in_(states))
            count = connection.execute(query.values(**values)).rowcount
            if count:
                self._log(connection, job, None, f"{text}, problems: {count}")
            return count

    def counts(self) -> dict[str, int]:
        """Tasks of all jobs by state."""
        with self._transaction(write=False) as connection:
            query = sa.select(_T.c.state, sa.func.count()).group_by(_T.c.state)
            return {state: count for state, count in connection.execute(query)}

    # Working

    def claim(self, holder: str, lease_s: float = LEASE_S) -> Claim | None:
        """Claim the first task that is due, by priority, then in order of submission. Problems that
        this program does not know are left to newer workers.

        Args:
            holder: claiming process, as ``host:pid``.
            lease_s: seconds until the lease expires unless it is extended; at most `LEASE_S`.
        """
        with self._transaction(write=False) as connection:
            # Many ask again and again while nothing is due: they take no turn from a writer.
            if not connection.scalar(queue.IS_DUE, queue.times(self._clock(connection))):
                return None
        with self._transaction(write=True) as connection:
            clock = self._clock(connection)
            self._requeue_lost(connection, clock)
            row = self._next(connection, clock)
            if row is None:
                return None
            lease = Lease(row["id"], row["token"] + 1)
            change = _T.update().where(_T.c.id == lease.task).values(
                state="running",
                token=lease.token,
                attempt=row["attempt"] + 1,
                holder=holder,
                expires_at=clock + lease_s,
                progress="{}",
            )  # fmt: skip
            try:
                with connection.begin_nested() if self._is_server else nullcontext():
                    connection.execute(change)
            except IntegrityError:
                return None  # Another job's task of this problem was claimed at this moment.
            attempt = row["attempt"] + 1
            self._log(connection, row["job_id"], row["id"], f"attempt {attempt} by {holder}")
        with decoding(self._where):
            return Claim(
                lease=lease,
                job=row["job_id"],
                problem=problem_from_row(row["key"]),
                options=as_object(row["options"]),
                attempt=attempt,
            )

    def _next(self, connection: sa.Connection, clock: float) -> sa.RowMapping | None:
        """The first task that is due; problems of newer programs are left to their workers."""
        newer: list[int] = []
        while rows := self._typed(
            connection, queue.NEXT, _T, {**queue.times(clock), "newer": newer}
        ):
            with decoding(self._where):
                if readable(self._where, [rows[0]["key"]], problem_from_row):
                    return rows[0]
            newer.append(rows[0]["id"])
        return None

    def is_work_left(self) -> bool:
        """True if a problem that this program knows is queued or running."""
        query = sa.select(_P.c.key).distinct().select_from(_T.join(_P))
        query = query.where(_T.c.state.in_(OPEN_STATES), queue.KNOWN)
        with self._transaction(write=False) as connection:
            keys = connection.scalars(query).all()
        with decoding(self._where):
            return bool(readable(self._where, keys, problem_from_row))

    def extend(self, lease: Lease, progress: Mapping[str, Any], lease_s: float = LEASE_S) -> bool:
        """Extend a lease and report progress. Returns False if the lease is lost."""
        values = {**queue.named(lease), "told": canonical(dict(progress))}
        with self._transaction(write=True) as connection:
            if connection.dialect.name == "postgresql":
                changed = connection.execute(queue.EXTEND_THERE, {**values, "lease_s": lease_s})
            else:
                until = self._clock(connection) + lease_s
                changed = connection.execute(queue.EXTEND, {**values, "until": until})
            return changed.rowcount > 0

    def is_held(self, lease: Lease) -> bool:
        """True if a lease is still held. Does not write."""
        with self._transaction(write=False) as connection:
            return connection.execute(queue.HELD, queue.named(lease)).first() is not None

    def begin(self, lease: Lease, sweep: str) -> None:
        """Record the sweep that works on a task.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """
        with self._transaction(write=True) as connection:
            if connection.execute(self._held(lease).values(sweep=sweep)).rowcount == 0:
                raise lost(lease)

    def finish(self, lease: Lease, text: str, result: Mapping[str, Any] | None = None) -> None:
        """End a task as done.

        Args:
            lease: lease of the task.
            text: the decision in words, for the log.
            result: value for `Task.result`.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """
        told = {} if result is None else {_RESULT: dict(result)}
        with self._transaction(write=True) as connection:
            row = check(connection, lease)
            done = self._held(lease).values(state="done", holder="", reason="")
            connection.execute(done.values(progress=canonical(told)))
            self._log(connection, row.job_id, lease.task, f"done: {text}")

    def fail(self, lease: Lease, reason: str, *, is_final: bool = False) -> bool:
        """End an attempt as failed. Returns True if another one follows.

        Args:
            lease: lease of the attempt.
            reason: reason that is stored with the task.
            is_final: True if another attempt would fail in the same way.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """
        with self._transaction(write=True) as connection:
            row = check(connection, lease)
            return self._fail(connection, row, reason, is_final)

    def release(self, lease: Lease, reason: str) -> None:
        """Put a task back into the queue. The attempt does not count.

        Raises:
            LeaseLostError: when the lease is no longer held.
        """
        with self._transaction(write=True) as connection:
            row = check(connection, lease)
            back = self._held(lease).values(
                state="queued", holder="", attempt=_T.c.attempt - 1, reason=reason
            )
            connection.execute(back)
            self._log(connection, row.job_id, lease.task, f"back in the queue: {reason}")

    def log(self, job: str, text: str, task: int | None = None) -> None:
        """Add an event."""
        with self._transaction(write=True) as connection:
            self._log(connection, job, task, text)

    # Inside a transaction

    def _typed(
        self,
        connection: sa.Connection,
        query: sa.Select[Any],
        table: sa.Table,
        values: Mapping[str, Any] | None = None,
    ) -> Sequence[sa.RowMapping]:
        """The rows of a query, of which all columns of a table are of their types.

        Raises:
            StoreError: when one is not: SQLite gives a damaged value as another type.
        """
        rows = connection.execute(query, values).mappings().all()
        with decoding(self._where):
            for row in rows:
                for column in table.c:
                    value, kind = row[column.name], column.type.python_type
                    if not isinstance(value, kind) and (value is not None or not column.nullable):
                        raise TypeError(f"{table.name}.{column.name}={value!r}")
        return rows

    def _clock(self, connection: sa.Connection) -> float:
        """Seconds since 1970: one clock for all who use this database."""
        if connection.dialect.name == "postgresql":
            return float(
                connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0
            )
        return time.time()

    def _held(self, lease: Lease) -> sa.Update:
        return _T.update().where(
            _T.c.id == lease.task, _T.c.token == lease.token, _T.c.state == "running"
        )

    def _requeue_lost(self, connection: sa.Connection, clock: float) -> None:
        """Put tasks with expired leases back into the queue."""
        query = queue.LOST.order_by(_T.c.id).with_for_update(skip_locked=True)
        for row in connection.execute(query, queue.times(clock)).all():
            self._fail(connection, row, f"{row.holder} stopped answering", is_final=False)

    def _fail(
        self, connection: sa.Connection, row: sa.Row[Any], reason: str, is_final: bool
    ) -> bool:
        """Retry later or give up, with the reason kept; returns whether it is retried."""
        most = connection.scalar(sa.select(_J.c.attempts).where(_J.c.id == row.job_id)) or 0
        is_retried = not is_final and row.attempt < most
        wait = min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** (row.attempt - 1))
        connection.execute(
            _T.update()
            .where(_T.c.id == row.id)
            .values(
                state="queued" if is_retried else "failed",
                holder="",
                reason=reason,
                not_before=self._clock(connection) + wait,
            )
        )
        text = f"attempt {row.attempt} failed: {reason}"
        text += f"; next in {wait:.0f} s" if is_retried else "; given up"
        self._log(connection, row.job_id, row.id, text)
        return is_retried

    def _log(self, connection: sa.Connection, job: str, task: int | None, text: str) -> None:
        # Under the job's lock, numbers are committed in their order: a reader that goes on after
        # the last one it saw misses none.
        connection.execute(sa.select(_J.c.id).where(_J.c.id == job).with_for_update())
        connection.execute(_E.insert().values(job_id=job, task_id=task, at=now(), text=text))
