"""HTTP protocol of a connection: uvicorn's, with the limits that it lacks.

uvicorn's protocol on httptools takes a request's head of any length; the option that limits it is
of the slower one. Nothing ends its wait for a head that drips, or for a client that does not read:
``timeout_keep_alive`` ends with the first byte. ``limit_concurrency`` counts silent connections,
which would lock others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tuner.service.connections import Admission
from tuner.service.guard import HEALTH_PATH, MAX_HEADER_BYTES, Refused, refuse

MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
"""Limit for a request's line and headers that have not ended yet. The guard, which sees complete
ones, has the finer limit."""
HEAD_TIMEOUT_S = 10.0
"""Deadline of a request's whole head, from the connection's begin or the last answer's end."""
READ_TIMEOUT_S = 10.0
MIN_READ_BYTES = 1 << 14
"""Least that a client reads of its buffer in each `READ_TIMEOUT_S`, if there is so much."""

_HEAD, _BODY, _READING = "head", "body", "reading"
"""States of a connection that waits for its client to send a head, send a body, or read. The guard
has the deadline of bodies."""


class Protocol(HttpToolsProtocol):
    """Ends a connection whose client sends no request, too long a head, or does not read.

    Args:
        args: arguments of uvicorn's protocol.
        admission: connections of the service, to which this one is added.
        options: options of uvicorn's protocol.
    """

    _chunk_bytes = 0
    _head_bytes = 0
    _is_in_head = False
    _is_write_paused = False
    _unread_bytes = 0
    _awaited = ""
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, admission: Admission, **options: Any) -> None:
        super().__init__(*args, **options)
        self._admission = admission

    def evict(self) -> None:
        """End at once, with a reset: the kernel keeps nothing for the client."""
        reset = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):  # the client has ended it already
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, reset
            )
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._admission.enter(self, self.client[0] if self.client else ""):
            self.app = _only_health(self.app)
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head is too large (allowed: {MAX_HEAD_BYTES} bytes)")
        self._note()

    def on_message_begin(self) -> None:
        # The chunk that it begins in may hold other requests: what follows is counted.
        self._head_bytes, self._is_in_head = -self._chunk_bytes, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_write_paused = True
        self._note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_write_paused = False
        self._note()

    def _note(self) -> None:
        """Tell `Admission` whether the client is waited for, and set the deadline. Bytes that do
        not end a wait move no deadline.
        """
        awaited = self._find_awaited()
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if awaited:
            self._admission.wait(self)
        else:
            self._admission.work(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if awaited == _HEAD:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._end_silence)
        elif awaited == _READING:
            self._watch_reading()

    def _find_awaited(self) -> str:
        if self._is_write_paused or self.transport.is_closing():
            return _READING
        # With requests in the pipeline, `cycle` is that of the last one.
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not self.pipeline):
            return _HEAD
        return _BODY if cycle.more_body and not self.pipeline else ""

    def _end_silence(self) -> None:
        if self._is_in_head:
            self.send_400_response(f"the head did not come within {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()
        self._note()

    def _watch_reading(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(READ_TIMEOUT_S, self._end_unread)

    def _end_unread(self) -> None:
        if self.transport.get_write_buffer_size() > self._unread_bytes - MIN_READ_BYTES:
            self.evict()
        else:
            self._watch_reading()


def _only_health(app: ASGIApp) -> ASGIApp:
    """An application that answers health checks only, and closes the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["type"] != "http" or scope["path"] != HEALTH_PATH:
            full = Refused(503, "too many connections", (("retry-after", "5"),))
            await refuse(full, scope, receive, last)
        else:
            await app(scope, receive, last)

    return answer
