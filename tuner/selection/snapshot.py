"""What the read path needs of a store, as bytes: the decisions, and what their kernels did around
them. Without trials that nothing reads, jobs and logs: kilobytes where the store has megabytes.

Standard library only. `unpack` makes a file that `tuner.lookup` reads as any other.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from pathlib import Path

from tuner.errors import StoreError
from tuner.lookup import copy_store, store_file
from tuner.shipped import shipped_index
from tuner.store.faults import store_error

#: A final pass is read where it is ranked; a quick one tells `tuner.nearest` whether a ranked
#: config may serve at other shapes.
_DROP = """
DELETE FROM measurements WHERE id NOT IN (SELECT measurement_id FROM rankings)
  AND (is_final OR provenance != 'measured'
       OR config_digest NOT IN (SELECT config_digest FROM ranked));
UPDATE measurements SET log = '' WHERE log != '';
DELETE FROM job_events;
DELETE FROM tasks;
DELETE FROM jobs;
DELETE FROM sweeps;
DELETE FROM mirrors;
"""


def take(path: Path | None = None) -> bytes:
    """The part of a store that is served; empty where there is no store.

    Args:
        path: the SQLite file; default: `lookup.store_file`.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    source = path or store_file()
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        if not copy_store(source, copy):
            return b""
        ships = (one for same in shipped_index().values() for one in same)
        digests = {(digest,) for one in ships for digest in one.digests}
        try:
            copy.execute(
                "CREATE TEMP TABLE ranked AS SELECT DISTINCT config_digest FROM measurements "
                "WHERE id IN (SELECT measurement_id FROM rankings)"
            )
            copy.executemany("INSERT INTO ranked VALUES (?)", digests)
            # They keep measurements as they are, in a store that somebody writes.
            triggers = copy.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            for (name,) in triggers.fetchall():
                copy.execute(f'DROP TRIGGER "{name}"')
            copy.executescript(_DROP)
            copy.execute("VACUUM")
            return zlib.compress(copy.serialize())
        except sqlite3.Error as exc:
            raise store_error(str(source), exc) from exc


def unpack(data: bytes, path: Path) -> None:
    """Make a file of what `take` gave; none where that is empty.

    Raises:
        StoreError: when it cannot be written, or the bytes are damaged.
    """
    try:
        if data:
            path.write_bytes(zlib.decompress(data))
    except OSError as exc:
        raise StoreError(f"snapshot {path} cannot be written: {exc.strerror}") from exc
    except zlib.error as exc:
        raise StoreError(f"a snapshot of a store is damaged: {exc}") from exc
