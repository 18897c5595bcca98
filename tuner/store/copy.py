"""Copy of a whole store into an empty one of another database: SQLite to PostgreSQL and back.

Append-only rows (measurements and their references) are copied in committed chunks, so an
interrupted copy resumes after the last chunk. The other rows (decisions, sweeps, jobs) may change,
and are copied in one transaction at the end. Then every row is read back and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import sqlalchemy as sa

from tuner.errors import StoreError
from tuner.store import models
from tuner.store.sql import Store

CHUNK = 1000
"""Rows that one transaction writes."""

#: Tables whose rows never change and get rising ids.
_GROWING = (models.problems, models.gpus, models.environments, models.measurements)
#: `versions` counts the changes of one database, and is not copied.
_OTHERS = tuple(
    table
    for table in models.metadata.sorted_tables
    if table not in _GROWING and table is not models.versions
)

Progress = Callable[[str, int, int], None]
"""Callback for a table's name, its rows copied so far, and its rows in all."""


def copy(source: Store, target: Store, progress: Progress) -> dict[str, int]:
    """Copy the contents of `source` to `target`. Returns the number of rows by table.

    Args:
        source: store to read, in one transaction. Later rows are not copied.
        target: empty store, or one with an interrupted copy of `source`.
        progress: called after every chunk.

    Raises:
        StoreError: when the target has other contents, or differs afterwards.
    """
    with source.transaction(write=False) as reading:
        with target.transaction(write=False) as to:
            is_done = _check(reading, to, source, target)
        if not is_done:
            for table in _GROWING:
                _copy_growing(reading, target, table, progress)
            with target.transaction(write=True) as writing:
                for table in _OTHERS:
                    _copy_rows(reading, writing, table)
                    count = _count(writing, table)
                    progress(table.name, count, count)
                _set_sequences(writing)
        with target.transaction(write=False) as to:
            for table in (*_GROWING, *_OTHERS):
                if _fingerprint(reading, table) != _fingerprint(to, table):
                    raise StoreError(
                        f"table {table.name} of {target.where} differs from that of "
                        f"{source.where} after copying: something else writes to one of them"
                    )
        return {table.name: _count(reading, table) for table in (*_GROWING, *_OTHERS)}


def _check(reading: sa.Connection, writing: sa.Connection, source: Store, target: Store) -> bool:
    """True if the copy is already complete.

    Raises:
        StoreError: when the target has rows that the source does not.
    """
    own = StoreError(
        f"store {target.where} holds other rows than {source.where}; name an empty one, or bring "
        "decisions over with `tuner store export` and `tuner store import`"
    )
    for table in _GROWING:
        if _fingerprint(writing, table) != _fingerprint(reading, table, _last_id(writing, table)):
            raise own
    if not any(_count(writing, table) for table in _OTHERS):
        return False
    if any(_fingerprint(writing, t) != _fingerprint(reading, t) for t in (*_GROWING, *_OTHERS)):
        raise own
    return True


def _copy_growing(
    reading: sa.Connection, target: Store, table: sa.Table, progress: Progress
) -> None:
    total = _count(reading, table)
    with target.transaction(write=False) as to:
        last, done = _last_id(to, table), _count(to, table)
    progress(table.name, done, total)
    while True:
        query = sa.select(table).where(table.c.id > last).order_by(table.c.id).limit(CHUNK)
        rows = [dict(row) for row in reading.execute(query).mappings()]
        if not rows:
            return
        with target.transaction(write=True) as writing:
            writing.execute(table.insert(), rows)
        last, done = rows[-1]["id"], done + len(rows)
        progress(table.name, done, total)


def _copy_rows(reading: sa.Connection, writing: sa.Connection, table: sa.Table) -> None:
    rows = reading.execute(sa.select(table).order_by(*table.primary_key.columns)).mappings()
    for some in rows.partitions(CHUNK):
        writing.execute(table.insert(), [dict(row) for row in some])


def _set_sequences(writing: sa.Connection) -> None:
    """Set the sequences, so that new rows get ids above the copied ones. SQLite does so by
    itself.
    """
    if writing.dialect.name != "postgresql":
        return
    for table in (*_GROWING, *_OTHERS):
        if "id" in table.c and isinstance(table.c.id.type, sa.Integer):
            sequence = sa.func.pg_get_serial_sequence(table.name, "id")
            writing.execute(
                sa.select(sa.func.setval(sequence, sa.func.max(table.c.id))).having(
                    sa.func.max(table.c.id).is_not(None)
                )
            )


def _count(connection: sa.Connection, table: sa.Table) -> int:
    return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def _last_id(connection: sa.Connection, table: sa.Table) -> int:
    return connection.scalar(sa.select(sa.func.max(table.c.id))) or 0


def _fingerprint(
    connection: sa.Connection, table: sa.Table, last: int | None = None
) -> tuple[int, int]:
    """Count and content of a table, or of its rows with ids up to `last`.

    The content is the sum of the rows' SHA-256, which does not depend on the databases' sort order.
    """
    query = sa.select(table)
    if last is not None:
        query = query.where(table.c.id <= last)
    total, count = 0, 0
    rows = connection.execute(query, execution_options={"yield_per": CHUNK})
    for row in rows:
        digest = hashlib.sha256(repr(tuple(row)).encode()).digest()
        total, count = (total + int.from_bytes(digest)) % 2**256, count + 1
    return count, total
