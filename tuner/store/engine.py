"""Opens a database: the URL, the pool, how SQLite's transactions begin, and the schema."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from tuner import settings
from tuner.errors import ConfigError, StoreError
from tuner.store import migrate
from tuner.store.faults import store_error
from tuner.store.reading import REVISION, sqlite_file

BUSY_TIMEOUT_S = 5.0
"""How long a writer waits for another. With BEGIN IMMEDIATE the wait is enough for 8 writers;
deferred transactions fail at once when two of them turn into writers."""


def connect(url: str, *, create: bool) -> tuple[sa.Engine, str]:
    """An engine on a database that has this program's schema, and the name to call it by.

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
    if path is not None:
        where = str(path)
    try:
        _prepare(engine, where, is_file=path is not None)
    except DBAPIError as exc:
        engine.dispose()
        raise store_error(where, exc.orig or exc) from exc
    except sqlite3.Error as exc:
        engine.dispose()
        raise store_error(where, exc) from exc
    except StoreError:
        engine.dispose()
        raise
    return engine, where


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
        is_write = connection.get_execution_options().get("tuner_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    return engine, "in memory"


def _prepare(engine: sa.Engine, where: str, *, is_file: bool) -> None:
    with engine.connect() as connection:
        # Before anything is written: the file may be another program's.
        current = migrate.revision(connection, where)
    if current == REVISION:
        return
    if is_file and current is None:
        _use_wal(engine)
    with engine.connect().execution_options(tuner_write=True) as connection, connection.begin():
        migrate.upgrade(connection, where)


def _use_wal(engine: sa.Engine) -> None:
    """Switch the file to write-ahead logging, once; it is a property of the file."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
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
