"""The statements of the SQL store: each works on an open connection."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import cache
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError

from tuner.errors import StoreError
from tuner.hardware import Gpu
from tuner.measurement import (
    Environment,
    Measurement,
    Provenance,
    Regime,
    Regimes,
    Status,
    regime_keys,
)
from tuner.problem import Problem
from tuner.store import models
from tuner.store.entry import (
    MEASUREMENT_COLUMNS,
    PINNED,
    as_text,
    canonical,
    checked_measurement,
    row_digest,
    to_row,
)
from tuner.store.exchange import Decision, is_ahead
from tuner.store.faults import decoding
from tuner.store.newer import readable
from tuner.store.records import ImportReport

_P, _G, _E, _M = models.problems, models.gpus, models.environments, models.measurements
_S, _W, _R, _B = models.sweeps, models.winners, models.rankings, models.builds

_JOINED: dict[str, sa.ColumnElement[Any]] = {
    "problem": _P.c.key,
    "gpu": _G.c.facts,
    "environment": _E.c.facts,
}
#: Every measurement as `entry.checked_measurement` reads it, with its id.
MEASUREMENTS: sa.Select[Any] = sa.select(
    _M.c.id,
    _M.c.digest,
    *(
        (_JOINED[name] if name in _JOINED else _M.c[name]).label(name)
        for name in MEASUREMENT_COLUMNS
    ),
).select_from(_M.join(_P).join(_G).join(_E))

#: Decisions and what they rank. Of the tables, not of the view: a document holds what was measured,
#: not what was built since.
DECISIONS: sa.Select[Any] = sa.select(
    _W.c.id, _W.c.sweep, _W.c.decided_at, _R.c.position, _R.c.measurement_id
).select_from(_W.join(_R).join(_P))

_PARAMETERS = 500
"""Parameters of one statement; SQLite takes 999 at least."""


def now() -> str:
    """The time as the store writes it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read(where: str, rows: Iterable[sa.RowMapping]) -> list[tuple[int, Measurement]]:
    """Rows of `MEASUREMENTS` with their ids, without those of newer programs.

    Args:
        where: the store's name in messages.
        rows: rows of the query.

    Raises:
        StoreError: when a row was damaged.
    """

    def measured(row: sa.RowMapping) -> tuple[int, Measurement]:
        return row["id"], checked_measurement(dict(row))

    with decoding(where):
        return readable(where, rows, measured)


def identity(measurement: Measurement) -> tuple[Problem, str, Regime]:
    """Key of a decision."""
    return measurement.problem, measurement.gpu.identity, measurement.regime


def matching(
    query: sa.Select[Any],
    identity: sa.ColumnElement[Any],
    table: sa.Table,
    problem: Problem | None,
    gpu: Gpu | None,
    regime: Regimes | None,
    provenance: Provenance | None,
) -> sa.Select[Any]:
    """Narrow a query to a problem, GPU, regime and provenance.

    Args:
        query: query that joins `problems`.
        identity: column of GPU identities.
        table: table with regime and provenance.
        problem: only of this problem.
        gpu: only of this GPU identity.
        regime: only of this regime or of these.
        provenance: only of this provenance.
    """
    if problem is not None:
        query = query.where(_P.c.key == problem.key)
    if gpu is not None:
        query = query.where(identity == gpu.identity)
    if regime is not None:
        query = query.where(table.c.regime.in_(regime_keys(regime)))
    if provenance is not None:
        query = query.where(table.c.provenance == provenance.value)
    return query


@cache
def _id_of(table: sa.Table, names: tuple[str, ...]) -> sa.Select[Any]:
    """The query for the id of a row by its unique key, built once: building one costs more than
    running it.
    """
    return sa.select(table.c.id).where(*(table.c[name] == sa.bindparam(name) for name in names))


def ensure(
    connection: sa.Connection, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[int, bool]:
    """The id of the row with this unique key, and whether it was inserted just now."""
    row_id = connection.scalar(_id_of(table, tuple(key)), key)
    return (row_id, False) if row_id is not None else _add(connection, table, key, values)


def _add(
    connection: sa.Connection, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[int, bool]:
    """As `ensure`, of a row that was not there just now."""
    try:
        with _attempt(connection):
            # Values apart from the statement, which is built and compiled once then.
            result = connection.execute(table.insert(), {**key, **values})
            return int(cast("sa.Row[Any]", result.inserted_primary_key)[0]), True
    except IntegrityError:
        # On a server another writer may have inserted it meanwhile.
        is_alone = connection.dialect.name == "sqlite"
        row_id = None if is_alone else connection.scalar(_id_of(table, tuple(key)), key)
        if row_id is None:
            raise
        return row_id, False


def _attempt(connection: sa.Connection) -> AbstractContextManager[Any]:
    """Around what may meet another writer's row. SQLite has one writer at a time, and rolls back
    by itself when the disk is full.
    """
    return nullcontext() if connection.dialect.name == "sqlite" else connection.begin_nested()


def problem_id(connection: sa.Connection, problem: Problem) -> int:
    """The id of a problem, stored if it is new."""
    return ensure(connection, _P, {"key": problem.key}, {"op": problem.op})[0]


def gpu_id(connection: sa.Connection, gpu: Gpu) -> int:
    """The id of a GPU's description, stored if it is new."""
    return ensure(connection, _G, {"facts": canonical(vars(gpu))}, {"identity": gpu.identity})[0]


_KNOWN = sa.select(_M.c.digest, _M.c.id).where(
    _M.c.digest.in_(sa.bindparam("digests", expanding=True))
)
#: Of many rows at once. SQLite has one writer at a time: nothing can be there already.
_INSERTS: Mapping[str, Any] = {
    "sqlite": _M.insert().returning(_M.c.digest, _M.c.id),
    "postgresql": postgresql.insert(_M)
    .on_conflict_do_nothing(index_elements=["digest"])
    .returning(_M.c.digest, _M.c.id),
}


def insert(
    connection: sa.Connection, measured: Sequence[Measurement], origin: str
) -> list[tuple[int, bool]]:
    """The id of each measurement, and whether it is new.

    Raises:
        StoreError: when a status and its latency contradict each other.
    """
    rows = [to_row(m) for m in measured]
    digests = [row_digest(row) for row in rows]
    ids: dict[str, int] = {}
    for start in range(0, len(digests), _PARAMETERS):
        some = digests[start : start + _PARAMETERS]
        ids.update((digest, id) for digest, id in connection.execute(_KNOWN, {"digests": some}))
    references: dict[tuple[str, str, str], dict[str, int]] = {}
    new: dict[str, dict[str, Any]] = {}
    for m, row, digest in zip(measured, rows, digests, strict=True):
        if digest in ids or digest in new:
            continue
        latency = m.latency_us
        if (m.status is Status.OK) != (latency is not None):
            raise StoreError(f"status {m.status} does not go with the latency {latency} us")
        if latency is not None and not (math.isfinite(latency) and latency > 0):
            raise StoreError(f"a measurement cannot have the latency {latency} us")
        # By their texts: equal GPUs may be written differently, and the SHA-256 is of what is.
        place = row["problem"], row["gpu"], m.environment.digest
        if place not in references:
            references[place] = _references(connection, m.problem, m.gpu, m.environment)
        new[digest] = {
            "digest": digest,
            **references[place],
            "family": m.config.family,
            "config_digest": m.config.digest,
            "origin": origin,
            **{name: value for name, value in row.items() if name not in _JOINED},
        }
    added = _insert_all(connection, new)
    done = []
    for digest in digests:
        id, is_new = added[digest] if digest in added else (ids[digest], False)
        added.pop(digest, None)
        ids[digest] = id  # of equal ones only the first is new
        done.append((id, is_new))
    return done


def _insert_all(
    connection: sa.Connection, new: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[int, bool]]:
    """Insert measurements by digest, in their order; as `ensure` of each."""
    if not new:
        return {}
    statement = _INSERTS.get(connection.dialect.name)
    done: dict[str, tuple[int, bool]] = {}
    if statement is not None:
        rows = connection.execute(statement, list(new.values())).all()
        done = {digest: (id, True) for digest, id in rows}
    # What another writer stored meanwhile; everything where the database cannot tell.
    rest_rows = {digest: row for digest, row in new.items() if digest not in done}
    return done | {
        digest: ensure(connection, _M, {"digest": digest}, row) for digest, row in rest_rows.items()
    }


#: Three ids in one query, each null where there is none.
_REFERENCES = sa.select(
    *(
        sa.select(table.c.id).where(table.c[name] == sa.bindparam(label)).scalar_subquery()
        for table, name, label in (
            (_P, "key", "problem"),
            (_G, "facts", "gpu"),
            (_E, "digest", "environment"),
        )
    )
)


def _references(
    connection: sa.Connection, problem: Problem, gpu: Gpu, environment: Environment
) -> dict[str, int]:
    """The columns by which a measurement refers to them; those that are new are stored."""
    facts, digest = canonical(vars(gpu)), environment.digest
    facts_of = {"problem": problem.key, "gpu": facts, "environment": digest}
    ids: Sequence[int] = connection.execute(_REFERENCES, facts_of).one()
    if None in ids:
        facts = canonical(dict(environment.facts))
        ids = (
            problem_id(connection, problem),
            gpu_id(connection, gpu),
            ensure(connection, _E, {"digest": digest}, {"facts": facts})[0],
        )
    return dict(zip(("problem_id", "gpu_id", "environment_id"), ids, strict=True))


def mirror_origin(url: str) -> str:
    """The origin of what is mirrored from a service: its URL, as far as the column holds it."""
    if len(url) <= models.ORIGIN_CHARACTERS:
        return url
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return f"{url[: models.ORIGIN_CHARACTERS - 13]}#{digest}"


def decisions(connection: sa.Connection, query: sa.Select[Any]) -> list[Decision]:
    """Decisions by ids of measurements.

    Args:
        connection: an open transaction.
        query: `DECISIONS`, narrowed.

    Raises:
        TypeError: when a row was damaged.
    """
    by_id: dict[int, Decision] = {}
    for place in connection.execute(query.order_by(_W.c.id, _R.c.position)).all():
        origin = as_text(place.sweep), as_text(place.decided_at)
        decision = by_id.setdefault(place.id, Decision([], None, *origin))
        if place.position == PINNED:
            decision.pinned = place.measurement_id
        else:
            decision.ranking.append(place.measurement_id)
    return list(by_id.values())


def find_winner(
    connection: sa.Connection, problem: Problem, gpu: Gpu, regime: Regime
) -> int | None:
    """The id of the measured decision, the one that can be pinned."""
    query: sa.Select[Any] = sa.select(_W.c.id).select_from(_W.join(_P))
    query = matching(query, _W.c.gpu, _W, problem, gpu, regime, Provenance.MEASURED)
    winner: int | None = connection.scalar(query)
    return winner


def ensure_winner(connection: sa.Connection, first: Measurement) -> tuple[int, bool]:
    """The id of the decision that a ranking led by `first` makes, and whether it is new."""
    key = {
        "problem_id": problem_id(connection, first.problem),
        "gpu": first.gpu.identity,
        "regime": first.regime.key,
        "provenance": first.provenance.value,
    }
    return ensure(connection, _W, key, {"sweep": "", "decided_at": ""})


def rank(
    connection: sa.Connection, winner: int, ids: Sequence[int], sweep: str, decided_at: str
) -> None:
    """Give a decision its ranking; a pin stays."""
    # The update comes first: on a server it locks the row against another decision.
    change = _W.update().where(_W.c.id == winner)
    connection.execute(change.values(sweep=sweep, decided_at=decided_at))
    connection.execute(_R.delete().where(_R.c.winner_id == winner, _R.c.position != PINNED))
    connection.execute(
        _R.insert(),
        [{"winner_id": winner, "position": i, "measurement_id": id} for i, id in enumerate(ids)],
    )


def set_pin(connection: sa.Connection, winner: int, measurement: int) -> None:
    """Pin a measurement in place of the pinned one, if any."""
    connection.execute(_R.delete().where(_R.c.winner_id == winner, _R.c.position == PINNED))
    connection.execute(
        _R.insert().values(winner_id=winner, position=PINNED, measurement_id=measurement)
    )


def drop_pin_from(connection: sa.Connection, winner: int, origins: Sequence[str]) -> None:
    """Drop the pin of a decision that came from one of some origins."""
    first = (
        sa.select(_M.c.origin)
        .join(_R, _R.c.measurement_id == _M.c.id)
        .where(_R.c.winner_id == winner, _R.c.position == 0)
    )
    if connection.scalar(first) in origins:
        connection.execute(_R.delete().where(_R.c.winner_id == winner, _R.c.position == PINNED))


def renew_pin(connection: sa.Connection, winner: int, ids: Sequence[int]) -> None:
    """Move a pin to the newest measurement of its config."""
    pinned = (
        sa.select(_M.c.config_digest)
        .join(_R, _R.c.measurement_id == _M.c.id)
        .where(_R.c.winner_id == winner, _R.c.position == PINNED)
    )
    query = sa.select(_M.c.id).where(_M.c.id.in_(ids), _M.c.config_digest.in_(pinned))
    newer = connection.scalar(query)
    if newer is not None:
        set_pin(connection, winner, newer)


def adopt_all(
    connection: sa.Connection,
    measured: Sequence[Measurement],
    decisions: Iterable[Decision],
    origin: str,
    *,
    follows: bool = False,
) -> tuple[ImportReport, list[int]]:
    """Store measurements and take over decisions about them.

    Args:
        connection: an open write transaction.
        measured: measurements to store.
        decisions: decisions, by position in `measured`.
        origin: origin of the document.
        follows: see `adopt`.

    Returns:
        Counts of the import, and the ids of the decisions that now equal the given ones.
    """
    stored = insert(connection, measured, origin)
    ids = [id for id, _ in stored]
    added = sum(is_new for _, is_new in stored)
    done = {"added": 0, "known": 0, "replaced": 0}
    labels, winners = [], []
    for decision in decisions:
        first = measured[decision.ranking[0]]
        outcome, winner = adopt(
            connection, decision.renumbered(ids), first, origin if follows else None
        )
        if outcome == "kept":
            labels.append(f"{first.problem.label()} on {first.gpu.name} ({first.regime})")
        else:
            done[outcome] += 1
            winners.append(winner)
    report = ImportReport(
        measurements_added=added,
        measurements_known=len(measured) - added,
        entries_added=done["added"],
        entries_known=done["known"],
        entries_replaced=done["replaced"],
        entries_kept=tuple(labels),
    )
    return report, winners


def adopt(
    connection: sa.Connection, decision: Decision, first: Measurement, follows: str | None
) -> tuple[str, int]:
    """Take over an imported decision.

    Args:
        connection: an open write transaction.
        decision: decision, by ids of measurements.
        first: the first measurement of its ranking.
        follows: a decision from this origin is replaced whatever its age and pin.

    Returns:
        ``added``, ``known`` (equal to the stored one), ``replaced`` (newer than the stored one)
        or ``kept`` (the stored one stands); and the decision's id.
    """
    winner, is_new = ensure_winner(connection, first)
    if not is_new:
        places = connection.execute(
            sa.select(_R.c.position, _R.c.measurement_id, _M.c.origin, _W.c.decided_at)
            .select_from(_R.join(_M).join(_W))
            .where(_R.c.winner_id == winner)
            .order_by(_R.c.position)
        ).all()
        pinned = [p.measurement_id for p in places if p.position == PINNED]
        old = [p for p in places if p.position != PINNED]
        same_pin = pinned == ([] if decision.pinned is None else [decision.pinned])
        if [p.measurement_id for p in old] == decision.ranking and same_pin:
            return "known", winner
        decided_at = old[0].decided_at
        is_newer = decided_at >= decision.decided_at and not is_ahead(decided_at)
        stands = pinned or not old[0].origin or is_newer
        if stands and old[0].origin != follows:
            return "kept", winner
        connection.execute(_R.delete().where(_R.c.winner_id == winner))
    rank(connection, winner, decision.ranking, decision.sweep, decision.decided_at)
    if decision.pinned is not None:
        set_pin(connection, winner, decision.pinned)
    return "added" if is_new else "replaced", winner


def drop_others(connection: sa.Connection, origin: str, ids: Iterable[int]) -> int:
    """Delete the decisions from an origin but for some; returns how many."""
    first = sa.select(_R.c.winner_id).join(_M).where(_R.c.position == 0, _M.c.origin == origin)
    gone = sorted(set(connection.scalars(first)) - set(ids))
    for id in gone:
        connection.execute(_W.delete().where(_W.c.id == id))
    return len(gone)
