"""Opening of a database: URL, connection pool, SQLite's transactions, and schema."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from tuner import settings
from tuner.base.filesystem import not_a_file
from tuner.base.install import extra_command
from tuner.base.printable import without_password
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.store import migrate
from tuner.store.faults import FAULTS, is_busy, store_error, store_lost
from tuner.store.reading import REVISION, sqlite_file

BUSY_TIMEOUT_S = 5.0
"""Seconds that one statement waits inside SQLite, during which Ctrl-C has no effect. Only BEGIN
IMMEDIATE waits: deferred transactions fail at once if two of them become writers."""
PATIENCE_S = 60.0
"""Seconds that a writing transaction waits for the lock. SQLite does not queue writers, so one of
many may wait for long."""


class OpenFile:
    """SQLite file by name, inode and size. SQLite keeps writing to an open file that was removed,
    replaced or truncated, and such writes are lost. Nothing in the tuner makes a store shorter.

    Args:
        path: path of the file, which the first connection may create.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._inode: tuple[int, int] | None = None
        self._bytes = 0
        """Largest size so far."""

    def note_inode(self) -> None:
        """Store the inode of the first connection's file."""
        if self._inode is None:
            with contextlib.suppress(OSError):
                self._inode, self._bytes = self._find()

    @property
    def is_lost(self) -> bool:
        """True if the name now refers to another file, to a shorter one, or to none."""
        if self._inode is None:
            return False
        try:
            inode, size = self._find()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the folder or medium is temporarily not readable
            return False
        is_shorter = size < self._bytes
        self._bytes = max(self._bytes, size)
        return inode != self._inode or is_shorter

    def _find(self) -> tuple[tuple[int, int], int]:
        status = self.path.stat()
        return (status.st_dev, status.st_ino), status.st_size


def connect(url: str, *, create: bool) -> tuple[sa.Engine, str, OpenFile | None]:
    """Engine of a database with this program's schema, the database's display name, and its file if
    it is SQLite's.

    Raises:
        ConfigError: when the URL cannot be parsed or its driver is not installed.
        StoreError: when the database cannot be opened, is another program's or is newer.
    """
    path = sqlite_file(url)
    if path is not None:
        _check_file(path, create=create)
    if "://" not in url:
        url = f"sqlite:///{path}"
    engine, where = _engine(url)
    file = None
    if path is not None:
        where, file = str(path), OpenFile(path)
        _watch(engine, file)
    try:
        _prepare(engine, where, is_file=path is not None)
    except TunerError:
        engine.dispose()
        raise
    except DBAPIError as exc:
        engine.dispose()
        raise store_error(where, exc.orig or exc) from exc
    except (SQLAlchemyError, *FAULTS) as exc:
        engine.dispose()
        raise store_error(where, exc) from exc
    return engine, where, file


def check_url(url: str) -> None:
    """Check that a URL can be parsed and that its driver is installed, without a connection.

    Raises:
        ConfigError: when it is not so.
    """
    _engine(url)[0].dispose()


def _watch(engine: sa.Engine, file: OpenFile) -> None:
    """Make connections of an engine fail if they would open another file than the first one."""

    @sa.event.listens_for(engine, "do_connect")
    def _refuse_another(*_: object) -> None:
        if file.is_lost:
            raise store_lost(str(file.path))

    @sa.event.listens_for(engine, "connect")
    def _note_first(connection: sqlite3.Connection, _: object) -> None:
        # This also opens the write-ahead log, which cannot be opened once the file is lost.
        connection.execute("PRAGMA schema_version").fetchall()
        file.note_inode()


def _check_file(path: Path, *, create: bool) -> None:
    if reason := not_a_file(path):
        raise StoreError(f"store {path} {reason}")
    if path.exists():
        return
    if not create:
        raise StoreError(f"store {path} does not exist (a sweep or an import makes it)")
    try:
        if path == settings.store_path():
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"store {path} cannot be made: {exc.strerror} ({exc.filename})") from exc
    if not path.parent.is_dir():
        raise StoreError(f"store {path} cannot be made: there is no folder {path.parent}")


def _engine(url: str) -> tuple[sa.Engine, str]:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            engine = sa.create_engine(parsed, pool_pre_ping=True)
            return engine, without_password(url)
        arguments = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
        in_memory = sqlite_file(url) is None
        # A database in memory is one connection: threads take turns on it.
        pool = {"pool_size": 1, "max_overflow": 0} if in_memory else {}
        engine = sa.create_engine(parsed, poolclass=sa.QueuePool, connect_args=arguments, **pool)
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as exc:
        shown = without_password(url)
        if isinstance(exc, ImportError):
            raise ConfigError(
                f"store URL '{shown}' needs a driver that is not installed ({exc}): for PostgreSQL "
                f"`{extra_command('postgres')}`, and a URL with postgresql+psycopg://"
            ) from exc
        raise ConfigError(
            f"store URL '{shown}' cannot be used: {exc} "
            "(allowed: a path, sqlite:///PATH, postgresql+psycopg://USER@HOST/NAME or another "
            "SQLAlchemy URL whose driver is installed)"
        ) from exc

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _: object) -> None:
        # The driver must not begin transactions by itself: `_begin` does.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        if connection.get_execution_options().get("tuner_write", False):
            _begin_writing(connection)
        else:
            connection.exec_driver_sql("BEGIN")

    return engine, "in memory"


def _begin_writing(connection: sa.Connection) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            return
        except DBAPIError as exc:
            if not is_busy(exc.orig) or time.monotonic() >= deadline:
                raise


def _prepare(engine: sa.Engine, where: str, *, is_file: bool) -> None:
    with engine.connect() as connection:
        # Checked before any write: the file may be another program's.
        current = migrate.revision(connection, where)
    if current == REVISION:
        return
    if is_file and current is None:
        _use_wal(engine)
    migrate.load()
    with engine.connect().execution_options(tuner_write=True) as connection, connection.begin():
        migrate.upgrade(connection, where)


def _use_wal(engine: sa.Engine) -> None:
    """Switch the file to write-ahead logging, once; it is a property of the file."""
    deadline = time.monotonic() + PATIENCE_S
    raw = engine.raw_connection()
    try:
        while True:
            try:
                raw.driver_connection.execute("PRAGMA journal_mode=WAL").fetchall()  # type: ignore[union-attr]
                return
            except sqlite3.OperationalError:
                # SQLite does not wait here when several processes switch at once.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    finally:
        raw.close()
