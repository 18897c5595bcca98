"""Backup and restoration of an SQLite store through SQLite's backup API. Standard library only.

A copy made by other means lacks the rows of the write-ahead log. If one is put over a store,
SQLite replays the log of the old store over it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from datetime import UTC, datetime
from pathlib import Path

from tuner.base import output
from tuner.errors import ConfigError, StoreError
from tuner.store.faults import FAULTS, newer_schema, store_error
from tuner.store.reading import REVISION, open_file

COMPANIONS = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a store."""

_COUNTED = ("measurements", "winners")


def back_up(store: Path, target: Path) -> dict[str, int]:
    """Write a consistent copy of a store into one file. Returns the number of rows by table.

    Args:
        store: SQLite file, which may be in use.
        target: file to write; an existing one is replaced once the copy is complete and verified.

    Raises:
        ConfigError: when the target cannot be a backup of this store.
        StoreError: when the store cannot be read or is damaged, or the target cannot be written.
    """
    _check_apart(store, target)
    output.check_place(target)
    if beside := [name for end in COMPANIONS if (name := Path(f"{target}{end}")).exists()]:
        raise ConfigError(f"{target} is a store in use: {beside[0]} lies beside it; name another")
    with output.replacing(target) as file:
        return _copy(store, Path(file.name), "no backup was written", is_still=False)


def restore(backup: Path, store: Path) -> tuple[dict[str, int], Path | None]:
    """Replace a store by a backup.

    Returns the number of rows, and the path of the former store, or None if there was none.

    Args:
        backup: file that `back_up` wrote.
        store: SQLite file, possibly damaged or missing. It is kept under another name, with the
            files beside it.

    Raises:
        ConfigError: when both are one file, or the store's folder does not exist.
        StoreError: when the backup is not a store, is damaged or from a newer program. The store is
            then unchanged.
    """
    _check_apart(backup, store)
    output.check_place(store)
    store = Path(os.path.realpath(store))
    with output.replacing(store) as file:
        rows = _copy(backup, Path(file.name), "nothing was restored", is_still=True)
        with contextlib.suppress(FileNotFoundError):
            Path(file.name).chmod(stat.S_IMODE(store.stat().st_mode))
        return rows, _set_aside(store)


def _check_apart(source: Path, target: Path) -> None:
    if not source.is_file():
        raise StoreError(f"store {source} does not exist")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the store itself: name another file")


def _copy(source: Path, target: Path, consequence: str, *, is_still: bool) -> dict[str, int]:
    """Copy a store into an empty file and check the copy. Returns the number of rows."""
    try:
        with (
            contextlib.closing(open_file(source, is_still=is_still)[0]) as reading,
            contextlib.closing(sqlite3.connect(target, isolation_level=None)) as writing,
        ):
            # The file is private, and flushed to disk before it gets its name.
            writing.execute("PRAGMA journal_mode = OFF")
            writing.execute("PRAGMA synchronous = OFF")
            reading.backup(writing)
        with contextlib.closing(open_file(target, is_still=True)[0]) as copy:
            return _check(copy, source, consequence)
    except FAULTS as exc:
        raise store_error(str(source), exc) from exc


def _check(copy: sqlite3.Connection, source: Path, consequence: str) -> dict[str, int]:
    """Count the rows of a copy.

    Raises:
        StoreError: when it is damaged, or not a store of this version.
    """
    fault = copy.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if fault != "ok":
        reason = str(fault).strip().splitlines()[-1]
        raise StoreError(f"store {source} is damaged, {consequence} ({reason})")
    tables = {name for (name,) in copy.execute("SELECT name FROM sqlite_master")}
    if "tuner_version" not in tables:
        raise StoreError(f"{source} is not a store of cutlass-tuner, {consequence}")
    (revision,) = copy.execute("SELECT version_num FROM tuner_version").fetchone()
    if revision > REVISION:
        raise newer_schema(str(source), revision, REVISION)
    return {name: copy.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _COUNTED}


def _set_aside(store: Path) -> Path | None:
    """Rename a store and the files beside it. Returns the new name; None if there is no store."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = store.with_name(f"{store.name}.replaced-{now}")
    is_there = False
    # The log is renamed first: a store without its log is only older, a log without its store is
    # lost.
    for end in (*COMPANIONS, ""):
        with contextlib.suppress(FileNotFoundError):
            Path(f"{store}{end}").rename(f"{aside}{end}")
            is_there = True
    return aside if is_there else None
