"""``tuner store sync``: mirror a service's decisions in the local store."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import add_result, within
from tuner.cli.imports import unservable
from tuner.errors import ConfigError, StoreError
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.store import ImportReport

DESCRIPTION = """Pulls the decisions of a service (`tuner serve`) into the local store, where lookup
and the runtime find them offline. Later pulls replace changed decisions and drop withdrawn ones.
This machine's own decisions stay, and end a pin that came from the service. An unchanged snapshot
is not sent again. Kernels are not pulled: `tuner build` compiles them. TUNER_READ_TOKEN is sent if
it is set."""

MAX_PAUSE_S = 7 * 24 * 3600
_PIECE_S = 0.5


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "sync", help="mirror a service's decisions in the local store", description=DESCRIPTION
    )
    parser.add_argument("url", metavar="URL", help="address of the service, as http://host:8265")
    pause = within(1, MAX_PAUSE_S, float)
    parser.add_argument(
        "--every", type=pause, metavar="SECONDS", help="repeat with this pause; default: once"
    )
    add_result(parser, run, "one JSON object for each pull")


def run(args: argparse.Namespace) -> int:
    """Pull once, or repeatedly until a signal. After any failure the service is asked again at the
    next turn.

    Raises:
        ConfigError: when the URL or the pause is wrong, or the snapshot is not valid.
        StoreError: when the service does not answer a single pull.
    """
    from tuner.store.sync import checked, pull

    url = checked(args.url)
    with open_store(args.store) as store:
        while True:
            try:
                _say(pull(store, url, unservable), url, as_json=args.json)
            except (ConfigError, StoreError) as exc:
                if args.every is None:
                    raise
                print(f"tuner: {exc}", file=sys.stderr, flush=True)
                if args.json:
                    print(json.dumps({"error": str(exc)}), flush=True)
            if args.every is None:
                return 0
            _pause(args.every)


def _pause(seconds: float) -> None:
    """Sleep in short steps, because a signal just before a sleep would not end it."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        time.sleep(min(left_s, _PIECE_S))


def _say(report: ImportReport | None, url: str, *, as_json: bool) -> None:
    if as_json:
        facts = asdict(report) if report else {}
        print(json.dumps({"changed": report is not None, **facts}), flush=True)
    elif report is None:
        print(f"{url}: nothing new", flush=True)
    else:
        from tuner.selection.describe import counted

        print(
            f"{url}: {counted(report.entries_added, 'entry')} added, "
            f"{report.entries_replaced} replaced, {report.entries_dropped} dropped, "
            f"{report.entries_known} as before, "
            f"{len(report.entries_kept)} kept of this machine's own",
            flush=True,
        )
        for text in report.entries_refused:
            print(f"not taken: {text}", flush=True)
