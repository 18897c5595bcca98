"""Reading of a store's SQLite file through one persistent connection. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from tuner import settings
from tuner.base.filesystem import not_a_file
from tuner.errors import StoreError
from tuner.store.entry import as_text
from tuner.store.faults import FAULTS, decoding, newer_schema, store_error

REVISION = "0002"
"""Newest schema revision under ``cache/migrations/versions``: the one this program reads."""

BUSY_TIMEOUT_S = 0.2
"""Under write-ahead logging readers wait only for a recovery after a crash. A model's call must not
wait longer than this."""


def sqlite_file(url: str) -> Path | None:
    """File of an SQLite URL or of a plain path; None for other databases and for memory."""
    scheme, separator, path = url.partition("://")
    if not separator:
        return settings.expanded(url, "store")
    if scheme.partition("+")[0] != "sqlite":
        return None
    name = path.removeprefix("/").partition("?")[0]
    return Path(name) if name and name != ":memory:" else None


class StoreFile:
    """SQLite file that may appear, change and vanish. Not thread-safe.

    Args:
        path: path of the file, which need not exist.
        forget: callback for when earlier results are out of date.
    """

    def __init__(self, path: Path, forget: Callable[[], None]) -> None:
        self._path = path
        self._forget = forget
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, ...] = ()
        self._is_immutable = False
        self._version = -1
        self.has_tables = False

    def refresh(self) -> None:
        """Open, reopen or close the file as needed, and call `forget` after a commit."""
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            # Results read while there was no file are still valid.
            if self._connection is not None and (connection := self.close()):
                connection.close()
            return
        except OSError as exc:
            raise StoreError(f"store {self._path} cannot be read: {exc.strerror}") from exc
        # While the old file is open, its inode number cannot be reused.
        if self._connection is None or self._file != self._identify(status):
            if connection := self.close():
                connection.close()
            if reason := not_a_file(self._path):
                raise StoreError(f"store {self._path} {reason}")
            self._connection, self._is_immutable = open_file(self._path)
            self._file = self._identify(status)
        version = self.select("PRAGMA data_version")[0][0]
        if version != self._version:
            self._forget()
            self.has_tables = self._check_schema()
            self._version = version

    def select(
        self, query: str, values: tuple[str, ...] | Mapping[str, str] = ()
    ) -> list[tuple[Any, ...]]:
        """Every row of a query; empty without a file."""
        if self._connection is None:
            return []
        try:
            return self._connection.execute(query, values).fetchall()
        except FAULTS as exc:
            self._fail(exc)

    def copy_into(self, target: sqlite3.Connection) -> bool:
        """Make a consistent copy. Returns False if there is no store."""
        if self._connection is None or not self.has_tables:
            return False
        try:
            self._connection.backup(target)
        except FAULTS as exc:
            self._fail(exc)
        return True

    def close(self) -> sqlite3.Connection | None:
        """Reset the state. Returns the connection, still open."""
        connection, self._connection = self._connection, None
        self._file = ()
        self._is_immutable = False
        self._version = -1
        self.has_tables = False
        self._forget()
        return connection

    def _fail(self, exc: BaseException) -> NoReturn:
        # The next call opens the file again, which may have been repaired or replaced.
        if connection := self.close():
            connection.close()
        raise store_error(str(self._path), exc) from exc

    def _identify(self, status: os.stat_result) -> tuple[int, ...]:
        """Identity of the file for which the open connection is valid."""
        if not self._is_immutable:
            return status.st_dev, status.st_ino
        # SQLite does not detect changes of such a file, so its times are compared.
        has_wal = log_of(self._path).exists()
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, has_wal

    def _check_schema(self) -> bool:
        """True if there are tables; False in a file that is just being created.

        Raises:
            StoreError: when they are another program's or of another revision.
        """
        tables = {name for (name,) in self.select("SELECT name FROM sqlite_master")}
        if not tables:
            return False
        where = str(self._path)
        if "tuner_version" not in tables:
            raise StoreError(f"store {where} is the database of another program; name another file")
        rows = self.select("SELECT version_num FROM tuner_version")
        with decoding(where):
            revision = as_text(rows[0][0]) if rows else ""
        if revision > REVISION:
            raise newer_schema(where, revision, REVISION)
        if revision < REVISION:
            raise StoreError(
                f"store {where} has schema {revision}, this program reads {REVISION}: "
                "any `tuner store export`, `tuner store import` or `tuner sweep` upgrades it"
            )
        return True


def log_of(path: Path) -> Path:
    """Path of SQLite's write-ahead log beside a file."""
    return Path(f"{path}-wal")


def open_file(path: Path, *, is_still: bool = False) -> tuple[sqlite3.Connection, bool]:
    """Open an SQLite file for reading. Also returns True if SQLite treats it as immutable, and so
    does not detect changes.

    Args:
        path: path of the file.
        is_still: True if the file is never written: without a log beside it, SQLite then creates no
            files there.

    Raises:
        StoreError: when it cannot be opened.
    """
    address = f"file:{quote(str(path.resolve()))}?mode=ro"
    if is_still and not log_of(path).exists():
        address += "&immutable=1"
    try:
        return _connect(address), is_still
    except FAULTS as exc:
        # On a read-only medium SQLite cannot create the files beside a database in WAL mode. If
        # none exist, the file alone is complete.
        if os.access(path, os.R_OK) and not log_of(path).exists():
            with contextlib.suppress(*FAULTS):
                return _connect(f"{address}&immutable=1"), True
        raise store_error(str(path), exc) from exc


def _connect(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        # SQLite opens the file at the first statement that reads it.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except FAULTS:
        connection.close()
        raise
    return connection
