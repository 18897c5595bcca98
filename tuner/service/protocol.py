"""The HTTP of the service's connections: uvicorn's, which takes a request's head of any length."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tuner.service.guard import MAX_HEADER_BYTES

MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
"""Of a request's line and headers that have not ended yet; the guard, which sees complete ones,
has the finer limit."""


class Protocol(HttpToolsProtocol):
    """Ends a connection whose request's head does not end, before it fills the memory."""

    _chunk_bytes = 0
    _head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        self._chunk_bytes = len(data)
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the head is too large (allowed: {MAX_HEAD_BYTES} bytes)")

    def on_message_begin(self) -> None:
        # The chunk that it begins in may hold other requests: what follows is counted.
        self._head_bytes, self._is_in_head = -self._chunk_bytes, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
