"""``tuner store copy, backup, restore``: copy a whole store to another database or file, and
back.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.cli.arguments import store_named, tell, url_of
from tuner.errors import ConfigError
from tuner.selection.describe import counted
from tuner.store.reading import sqlite_file

COPY = """Copies everything a store holds (measurements, decisions, pins, sweeps, jobs) into
an empty one, as from an SQLite file to PostgreSQL when a team begins to share it, or back. Cut
short, it goes on where it stopped when it is run again; at the end every row is read back and
compared. Stop the workers first: what they write meanwhile is not copied."""

BACKUP = """Writes an SQLite store into one file, as of one moment, through SQLite's backup API; the
store may be in use. The copy is checked, and takes the place of FILE when it is sound. Copying the
file by other means loses what lies in the -wal file beside it. A PostgreSQL store is backed up by
pg_dump, or copied into a file by `tuner store copy`."""

RESTORE = """Puts what `tuner store backup` wrote in the place of an SQLite store, which may be
damaged or missing. The former store is kept beside it under another name, with its -wal and -shm
files: SQLite would replay that log over a file that is only copied there. Stop sweeps, workers and
the service first: what still has the former store open ends with an error when it reads or writes.
"""

_PRINT_S = 1.0


def register(subparsers: Any) -> None:
    """Add the commands."""
    about = "whole stores: copy, backup, restore, export, import, sync, compare, cache"
    parser = subparsers.add_parser("store", help=about, description=about)
    commands = parser.add_subparsers(dest="store_command", required=True, metavar="COMMAND")
    about = "copy a whole store into another database"
    one = commands.add_parser("copy", help=about, description=COPY)
    one.add_argument("source", metavar="FROM", help="SQLAlchemy URL or SQLite file")
    one.add_argument(
        "target", type=store_named, metavar="TO", help="SQLAlchemy URL or SQLite file; empty"
    )
    one.add_argument("--json", action="store_true", help="the rows of each table as JSON")
    one.set_defaults(run=run_copy)
    for name, about, text, run in (
        ("backup", "write an SQLite store into one file", BACKUP, run_backup),
        ("restore", "put a backup in the place of an SQLite store", RESTORE, run_restore),
    ):
        one = commands.add_parser(name, help=about, description=text)
        one.add_argument("file", metavar="FILE", type=Path, help="the backup")
        one.add_argument("--store", type=store_named, metavar="URL", help="SQLite file or its URL")
        one.add_argument("--json", action="store_true", help="print the result as JSON")
        one.set_defaults(run=run)


def run_copy(args: argparse.Namespace) -> int:
    """Copy and verify."""
    from tuner.store.copy import copy
    from tuner.store.sql import Store

    if args.source == args.target:
        raise ConfigError(f"{args.source} cannot be copied into itself")
    with (
        Store(args.source, create=False) as source,
        Store(args.target) as target,
    ):
        rows = copy(source, target, _Progress())
    counts = ", ".join(f"{count} {name}" for name, count in rows.items() if count)
    tell(args, rows, f"copied and compared: {counts or 'nothing, the store is empty'}")
    return 0


def run_backup(args: argparse.Namespace) -> int:
    """Write a backup."""
    from tuner.store.backup import back_up

    store = _sqlite(args)
    rows = back_up(store, args.file)
    data = {"store": str(store), "backup": str(args.file), **rows}
    tell(args, data, f"{store} backed up in {args.file}: {_counted(rows)}")
    return 0


def run_restore(args: argparse.Namespace) -> int:
    """Replace a store by a backup."""
    from tuner.store.backup import restore

    store = _sqlite(args)
    if store == settings.store_path():
        store.parent.mkdir(parents=True, exist_ok=True)
    rows, former = restore(args.file, store)
    if args.json:
        backup = None if former is None else str(former)
        print(json.dumps({"store": str(store), "backup": str(args.file), "former": backup, **rows}))
        return 0
    print(f"{store} restored from {args.file}: {_counted(rows)}")
    if former is not None:
        print(f"the former store is kept as {former}")
    return 0


def _sqlite(args: argparse.Namespace) -> Path:
    """SQLite file of the store.

    Raises:
        ConfigError: when the store is not an SQLite database.
    """
    path = sqlite_file(url_of(args))
    if path is None:
        raise ConfigError(
            f"tuner store {args.store_command} is for SQLite files: a PostgreSQL store is backed "
            "up by pg_dump, or copied by `tuner store copy`"
        )
    return path


def _counted(rows: dict[str, int]) -> str:

    entries, measurements = rows["winners"], rows["measurements"]
    return f"{counted(entries, 'entry')}, {counted(measurements, 'measurement')}"


class _Progress:
    """Prints progress on standard error, at most one line a second."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, table: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PRINT_S:
            self._last = now
            print(f"{table}: {done} of {total}", file=sys.stderr, flush=True)
