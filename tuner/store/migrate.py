"""Migration of a database to this program's schema, with Alembic, in one transaction."""

from __future__ import annotations

import importlib
import threading

import sqlalchemy as sa

from tuner.base import resources
from tuner.errors import StoreError
from tuner.store.faults import newer_schema
from tuner.store.models import metadata
from tuner.store.reading import REVISION

VERSION_TABLE = "tuner_version"

#: PostgreSQL advisory lock under which one process migrates at a time; an arbitrary fixed number.
_LOCK = 88_200_001

#: Alembic keeps the running migration in module globals.
_one_at_a_time = threading.Lock()


def revision(connection: sa.Connection, where: str) -> str | None:
    """Schema revision of a database; None if it is empty.

    Raises:
        StoreError: when the database is another program's.
    """
    tables = sa.inspect(connection).get_table_names()
    if VERSION_TABLE in tables:
        version: str | None = connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))
        return version
    # A server's schema may be shared with other programs, a file may not.
    names = tables if connection.dialect.name == "sqlite" else set(tables) & set(metadata.tables)
    if names:
        raise StoreError(
            f"store {where} is the database of another program (its tables: "
            f"{', '.join(sorted(names)[:4])}); name another file"
        )
    return None


def load() -> None:
    """Import Alembic before the transaction: the import takes longer than a migration, which
    blocks all writers.
    """
    importlib.import_module("alembic.command")


def upgrade(connection: sa.Connection, where: str) -> None:
    """Apply the missing revisions inside the open write transaction of `connection`.

    Raises:
        StoreError: when the schema is newer than this program.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    # Another process may have migrated before this lock was taken.
    current = revision(connection, where)
    if current == REVISION:
        return
    config = Config()
    folder = resources.cache() / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        if current is not None:
            scripts = ScriptDirectory.from_config(config)
            if current not in {script.revision for script in scripts.walk_revisions()}:
                raise newer_schema(where, current, REVISION)
        with _one_at_a_time:
            command.upgrade(config, REVISION)
    except CommandError as exc:
        raise StoreError(f"store {where} cannot be migrated with {folder}: {exc}") from exc
