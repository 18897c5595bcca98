"""``tuner jobs worker``: run the jobs of a store."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tuner.base.processes import exit_code
from tuner.cli import DONE, FAILED
from tuner.cli.arguments import add_store, url_of
from tuner.cli.sweep import add_machine, add_studies, machine_of
from tuner.selection.describe import counted
from tuner.store import open_store

DESCRIPTION = """Takes problems from the jobs of the store, highest priority first, and tunes them
on this machine's GPU. Several workers may share a store. Each holds a lease on its problem. The
lease of a dead worker ends within half a minute, and another worker goes on after the last finished
trial. Ctrl-C, SIGTERM and SIGHUP release it at once."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "worker", help="tune the problems of the store's jobs", description=DESCRIPTION
    )
    parser.add_argument(
        "--drain", action="store_true", help="end when no problem is queued or running"
    )
    add_machine(parser, "0")
    add_store(parser)
    add_studies(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run jobs. Returns the `exit_code` of the signal that stopped it; else 1 when a problem was
    given up, and 0 when none was.

    Raises:
        ConfigError: when an argument is wrong.
        StoreError: when the store that was named does not exist, or none can be opened.
    """
    from tuner.cli.display import create_display
    from tuner.runners.opening import open_creator
    from tuner.search.storage import open_storage
    from tuner.tuning.controller import Controller

    machine = machine_of(args, None)
    url = url_of(args)
    with (
        # A named store must exist, since a typing error would find no jobs. The default store is
        # created.
        open_store(url, create=not args.store) as store,
        create_display(url, show_results=True) as display,
        open_storage(args.optuna_storage, display.note) as studies,
        open_creator(machine, display.note) as create_runners,
        Controller(
            store, machine, watcher=display, create_runners=create_runners, studies=studies
        ) as controller,
    ):
        decided = controller.run(drain=args.drain)
    failed = f", {controller.failed} failed" if controller.failed else ""
    print(f"tuner: {counted(decided, 'problem')} decided{failed}", file=sys.stderr)
    if controller.stopped_by is not None:
        return exit_code(controller.stopped_by)
    return FAILED if controller.failed else DONE
