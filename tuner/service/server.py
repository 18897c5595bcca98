"""The server: uvicorn with the service's connections and their limits."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from tuner.errors import ConfigError
from tuner.service.connections import ACCEPTORS, Admission, ConnectionLimits
from tuner.service.protocol import Protocol

BACKLOG = 1024
"""Connections that wait to be accepted."""
CLOSE_TIMEOUT_S = 2


class Server(uvicorn.Server):
    """The server of an application.

    Args:
        app: application that answers.
        limits: most connections.
        on_signal: called with the number of each signal to end, when it comes.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        on_signal: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._on_signal = on_signal
        protocol = partial(Protocol, admission=Admission(limits))
        super().__init__(
            uvicorn.Config(
                cast(Any, app),
                http=cast(Any, protocol),
                ws="none",  # it would take connections out of the limits
                log_level="error",  # requests are not logged
                use_colors=False,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; uvicorn raises the signal again afterwards."""
        self._on_signal(sig)
        super().handle_exit(sig, frame)

    def run_on(self, listening: socket.socket) -> None:
        """Serve until a signal comes or `should_exit` is set.

        Args:
            listening: socket that listens; closed at the end.
        """
        # uvloop accepts one connection of a socket in each turn of its loop: with 200 busy clients
        # in a turn, a queue of as many new ones took 12 s. Each copy of the socket adds one.
        self.run([listening, *(listening.dup() for _ in range(ACCEPTORS - 1))])


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens on an address.

    Raises:
        ConfigError: when the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigError(f"{host}:{port} cannot be listened on: {exc.strerror}") from exc
