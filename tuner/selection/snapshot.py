"""Decisions of a store as bytes, for the read path: without trials, jobs and logs.

A snapshot has kilobytes, the store megabytes. `unpack` makes a file for `tuner.selection.reader`.
Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from pathlib import Path

from tuner.errors import StoreError
from tuner.selection.reader import copy_store, store_file
from tuner.store.entry import (
    MEASUREMENT_COLUMNS,
    STORED,
    STORED_COLUMNS,
    check_digest,
    row_digest,
)
from tuner.store.faults import FAULTS, decoding, store_error

_DROP = """
DELETE FROM measurements WHERE id NOT IN (SELECT measurement_id FROM rankings);
DELETE FROM job_events;
DELETE FROM tasks;
DELETE FROM jobs;
DELETE FROM sweeps;
DELETE FROM mirrors;
"""


def take(path: Path | None = None) -> bytes:
    """Bytes of a store's decisions; empty without a store.

    Args:
        path: the SQLite file; default: `reader.store_file`.

    Raises:
        StoreError: when the file exists and cannot be read.
    """
    source = path or store_file()
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        if not copy_store(source, copy):
            return b""
        try:
            # The triggers protect measurements in a store that is written to.
            triggers = copy.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            for (name,) in triggers.fetchall():
                copy.execute(f'DROP TRIGGER "{name}"')
            copy.executescript(_DROP)
            with decoding(str(source)):
                _drop_logs(copy)
            copy.execute("VACUUM")
            return zlib.compress(copy.serialize())
        except FAULTS as exc:
            raise store_error(str(source), exc) from exc


def _drop_logs(copy: sqlite3.Connection) -> None:
    """Empty the measurements' logs, and renew the SHA-256 that covers them."""
    for values in copy.execute(f"{STORED} WHERE measurements.log != ''").fetchall():
        row = dict(zip(STORED_COLUMNS, values, strict=True))
        check_digest(row)
        stored = {name: row[name] for name in MEASUREMENT_COLUMNS}
        digest = row_digest({**stored, "is_final": bool(row["is_final"]), "log": ""})
        change = "UPDATE measurements SET log = '', digest = ? WHERE digest = ?"
        copy.execute(change, (digest, row["digest"]))


def unpack(data: bytes, path: Path) -> None:
    """Make a file from the bytes of `take`; empty bytes make no file.

    Args:
        data: result of `take`.
        path: file to write.

    Raises:
        StoreError: when the file cannot be written, or the bytes are damaged.
    """
    try:
        if data:
            path.write_bytes(zlib.decompress(data))
    except OSError as exc:
        raise StoreError(f"snapshot {path} cannot be written: {exc.strerror}") from exc
    except zlib.error as exc:
        raise StoreError(f"a snapshot of a store is damaged: {exc}") from exc
