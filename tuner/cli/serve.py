"""``tuner serve``: run the HTTP service."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from typing import Any

from tuner import settings
from tuner.base.install import extra_command
from tuner.base.processes import EndingSignals, ForcedEnd, exit_code
from tuner.cli.arguments import add_store, within
from tuner.errors import ConfigError
from tuner.store import open_store

DESCRIPTION = """Serves the store over HTTP: configurations, a snapshot for `tuner store sync`, jobs
and their progress, and pages for a browser. GET /openapi.json describes the interface. It listens
on this machine only, unless --host says otherwise. Other addresses need bearer tokens:
TUNER_READ_TOKEN to look, TUNER_WRITE_TOKEN to submit and cancel jobs. It speaks plain HTTP: put a
proxy with TLS before it on networks that you do not trust."""

END_WAIT_S = 8.0
"""Seconds after a signal in which the service ends by itself. A request that waits for a database
cannot be interrupted."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve", help="serve the store over HTTP", description=DESCRIPTION
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1)")
    about = "default 8265; 0 takes a free one"
    parser.add_argument("--port", type=within(0, 65535), default=8265, help=about)
    add_store(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until one of `ENDING_SIGNALS`; returns its `exit_code`.

    Raises:
        ConfigError: when an argument is wrong, or a package or a token is missing.
        StoreError: when the named store does not exist, or the store cannot be opened.
    """
    try:
        from tuner.service.app import create_app
        from tuner.service.connections import ConnectionLimits
        from tuner.service.server import Server, listen
        from tuner.service.tokens import Tokens
    except ImportError as exc:
        raise ConfigError(
            f"{exc.name} is missing: install it with {extra_command('service')}"
        ) from exc

    tokens = Tokens(settings.read_token(), settings.write_token())
    if not tokens and not _is_loopback(args.host):
        raise ConfigError(
            f"host={args.host} can be reached from elsewhere: set TUNER_READ_TOKEN and "
            "TUNER_WRITE_TOKEN, or leave --host out"
        )
    limits = ConnectionLimits.of_process()
    # A named store must exist, since a typing error would serve an empty one. The default store is
    # created.
    with open_store(args.store, create=not args.store) as store:
        forced = ForcedEnd(END_WAIT_S)
        server = Server(create_app(store, tokens), limits, on_signal=forced.begin)
        received: list[int] = []

        def stop(number: int) -> None:
            forced.begin(number)
            received.append(number)
            server.should_exit = True

        listening = listen(args.host, args.port)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        # The server handles SIGINT and SIGTERM while it runs, and raises them again when it ends.
        with EndingSignals(stop):
            print(f"serving on http://{shown}:{port}", file=sys.stderr, flush=True)
            server.run_on(listening)
    forced.cancel()
    return exit_code(received[0]) if received else 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
