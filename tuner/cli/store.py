"""``tuner store copy``: a whole store into another database."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tuner.errors import ConfigError

DESCRIPTION = """Copies everything a store holds (measurements, decisions, pins, sweeps, jobs) into
an empty one, as from an SQLite file to PostgreSQL when a team begins to share it, or back. Cut
short, it goes on where it stopped when it is run again; at the end every row is read back and
compared. Stop the workers first: what they write meanwhile is not copied."""

_PRINT_S = 1.0


def register(subparsers: Any) -> None:
    """Add the commands."""
    about = "copy a whole store into another database"
    parser = subparsers.add_parser("store", help=about, description=about)
    commands = parser.add_subparsers(dest="store_command", required=True, metavar="COMMAND")
    one = commands.add_parser("copy", help=about, description=DESCRIPTION)
    one.add_argument("source", metavar="FROM", help="SQLAlchemy URL or SQLite file")
    one.add_argument("target", metavar="TO", help="SQLAlchemy URL or SQLite file; empty")
    one.add_argument("--json", action="store_true", help="the rows of each table as JSON")
    one.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Copy and verify."""
    from tuner.store.sql import SqlStore
    from tuner.store.transfer import copy

    if args.source == args.target:
        raise ConfigError(f"{args.source} cannot be copied into itself")
    with (
        SqlStore(args.source, create=False) as source,
        SqlStore(args.target) as target,
    ):
        rows = copy(source, target, _Progress())
    if args.json:
        print(json.dumps(rows))
    else:
        counts = ", ".join(f"{count} {name}" for name, count in rows.items() if count)
        print(f"copied and compared: {counts or 'nothing, the store is empty'}")
    return 0


class _Progress:
    """At most a line a second, on standard error."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, table: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PRINT_S:
            self._last = now
            print(f"{table}: {done} of {total}", file=sys.stderr, flush=True)
