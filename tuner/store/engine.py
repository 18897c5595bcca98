"""Opens a database: the URL, the pool, how SQLite's transactions begin, and the schema."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from tuner import settings
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.store import migrate
from tuner.store.faults import FAULTS, is_busy, store_error, store_lost
from tuner.store.reading import REVISION, sqlite_file

BUSY_TIMEOUT_S = 5.0
"""How long one statement waits inside SQLite, where no Ctrl-C is seen. It is enough for BEGIN
IMMEDIATE only: deferred transactions fail at once when two of them turn into writers."""
PATIENCE_S = 60.0
"""How long a transaction that writes waits for its turn. SQLite keeps no queue: whoever asks just
after the lock is free has it, so that one of many greedy writers may wait for long."""


class OpenFile:
    """An SQLite file by name and inode. SQLite writes to an open file that was removed or replaced
    as to any other, and all of it is lost.

    Args:
        path: of the file, which the first connection may make.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._inode: tuple[int, int] | None = None

    def note_inode(self) -> None:
        """Remember the file of the first connection."""
        if self._inode is None:
            with contextlib.suppress(OSError):
                self._inode = self._find_inode()

    @property
    def is_lost(self) -> bool:
        """True when another file, or none, has the name by now."""
        try:
            return self._inode is not None and self._find_inode() != self._inode
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a folder or a medium that cannot be asked at the moment
            return False

    def _find_inode(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_dev, status.st_ino


def connect(url: str, *, create: bool) -> tuple[sa.Engine, str, OpenFile | None]:
    """An engine on a database that has this program's schema, the name to call it by, and its file
    where it is one.

    Raises:
        ConfigError: when the URL cannot be read or its driver is not installed.
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


def _watch(engine: sa.Engine, file: OpenFile) -> None:
    """Have every connection of an engine open the file of the first one, or none."""

    @sa.event.listens_for(engine, "do_connect")
    def _refuse_another(*_: object) -> None:
        if file.is_lost:
            raise store_lost(str(file.path))

    @sa.event.listens_for(engine, "connect")
    def _note_first(connection: sqlite3.Connection, _: object) -> None:
        # Opens the write-ahead log, too: it cannot be opened any more once the file is lost.
        connection.execute("PRAGMA schema_version").fetchall()
        file.note_inode()


def _check_file(path: Path, *, create: bool) -> None:
    if path.is_dir():
        raise StoreError(f"store {path} is a folder; name a file in it")
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
            return engine, parsed.render_as_string(hide_password=True)
        arguments = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
        in_memory = sqlite_file(url) is None
        # One connection is one database in memory: threads take turns on it.
        pool = {"pool_size": 1, "max_overflow": 0} if in_memory else {}
        engine = sa.create_engine(parsed, poolclass=sa.QueuePool, connect_args=arguments, **pool)
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as exc:
        shown = re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", url)  # no password in a log
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
        # Before anything is written: the file may be another program's.
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
