"""Pulls a service's snapshot into the local store. Standard library only.

Nothing that a service sends is trusted. One deadline holds for all of it, and its packed size,
unpacked size and contents have limits.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.base import document
from tuner.base.printable import one_line, without_password
from tuner.errors import ConfigError, StoreError
from tuner.store.exchange import MAX_DEPTH, parse_untrusted
from tuner.store.records import Check, ImportReport

if TYPE_CHECKING:
    from tuner.store import Store

DEADLINE_S = 120.0
"""Deadline of a whole answer, from the connection's begin to the last byte."""
MAX_HEAD_BYTES = 1 << 18
"""Most bytes before an answer's body, those of every ``100 Continue`` included."""
MAX_BYTES = 1 << 28
"""Most bytes of a snapshot as it comes, and unpacked; a table of 10,000 entries of ten measurements
has half of them unpacked."""
MAX_ROWS = 200_000
"""Most measurements, twice those of that table; each takes milliseconds to check."""
_MAX_FAULT_BYTES = 1 << 14
"""Most bytes read of an answer that is not a snapshot."""
_BLOCK_BYTES = 1 << 16
_ETAG = re.compile(r'(?:W/)?"[!#-~]{0,76}"')
"""ETags of at most 80 characters, as many as the store's column holds."""


def checked(url: str) -> str:
    """The URL of a service, without a slash at its end.

    Raises:
        ConfigError: when it is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and not (parts.query or parts.fragment)
        (parts.hostname or "").encode("idna")  # a ValueError where a part of the name is none
        _ = parts.port
    except ValueError:
        is_good = False
    if not is_good or parts.username or not re.fullmatch(r"[!-~]+", url):
        raise ConfigError(
            f"{one_line(without_password(url))} is not the URL of a service "
            "(allowed: as http://host:8265)"
        )
    return url.rstrip("/")


def pull(store: Store, url: str, check: Check) -> ImportReport | None:
    """Mirror the service's snapshot; None when it did not change since the last time.

    Args:
        store: local store.
        url: the service's URL.
        check: reasons why a measurement must not be served here.

    Raises:
        ConfigError: when the snapshot does not fit, in one line.
        StoreError: when the service does not answer, refuses, or sends what cannot be read.
    """
    token = settings.read_token()
    etag = store.mirrored(url)
    try:
        answer = _fetch(f"{url}/v1/snapshot", etag, token)
        if answer is None:
            return None
        body, etag = answer
        return store.mirror(_document(body), url=url, etag=etag, check=check)
    except ConfigError as exc:
        raise ConfigError(f"{url}: {one_line(_without(token, exc))}") from None
    except StoreError as exc:
        raise type(exc)(_without(token, exc)) from None
    except MemoryError as exc:
        raise StoreError(f"{url}: the snapshot does not fit into the memory") from exc


def _without(token: str, text: object) -> str:
    """A text or an error's text without the token, which a service may repeat."""
    return str(text).replace(token, "***") if token else str(text)


def _document(body: bytes) -> Any:
    snapshot = parse_untrusted(body)
    rows = snapshot.get("measurements") if isinstance(snapshot, dict) else None
    if isinstance(rows, list) and len(rows) > MAX_ROWS:
        raise ConfigError(f"it holds {len(rows)} measurements (allowed: {MAX_ROWS})")
    return snapshot


class _Budget:
    """Time and bytes that one answer has left.

    Args:
        seconds: seconds from now to the deadline.
        size: most bytes before `allow` is called.
    """

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds, self._size = seconds, size
        self._deadline = time.monotonic() + seconds

    def allow(self, size: int) -> None:
        """Set the most bytes that may still come."""
        self._size = size

    def left_s(self) -> float:
        """Seconds to the deadline.

        Raises:
            StoreError: when it has passed.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise StoreError(f"it did not come within {self._seconds:g} s")
        return seconds

    def spend(self, size: int) -> None:
        """Note bytes that came.

        Raises:
            StoreError: when they are too many.
        """
        self._size -= size
        if self._size < 0:
            raise StoreError("it is too large")


class _Stream(io.RawIOBase):
    """Bytes of a socket, within a budget."""

    def __init__(self, connection: socket.socket, budget: _Budget) -> None:
        # The socket is closed when the last of its files is.
        self._file = connection.makefile("rb", buffering=0)
        self._connection, self._budget = connection, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._connection.settimeout(self._budget.left_s())
            size = self._file.readinto(buffer) or 0
        except TimeoutError:
            self._budget.left_s()
            raise
        self._budget.spend(size)
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer read within a budget, from its first byte on."""

    def __init__(self, sock: socket.socket, *args: Any, budget: _Budget, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Stream(sock, budget))


def _connected(budget: _Budget, address: tuple[str, int], *options: Any) -> socket.socket:
    """`socket.create_connection` within a budget, however many addresses a name has."""
    fault = OSError(f"{address[0]} has no address")
    for family, kind, number, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, number)
        try:
            connection.settimeout(budget.left_s())
            connection.connect(place)
            return connection
        except BaseException as exc:
            connection.close()
            if not isinstance(exc, OSError):
                raise
            fault = exc
    raise fault


def _within(budget: _Budget, kind: type[http.client.HTTPConnection]) -> Callable[..., Any]:
    """Make connections of a kind that keep to a budget."""

    def connect(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        connection.response_class = partial(_Response, budget=budget)  # type: ignore[assignment]
        connection._create_connection = partial(_connected, budget)  # type: ignore[attr-defined]
        return connection

    return connect


class _Http(urllib.request.HTTPHandler):
    """Connections within a budget."""

    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._connection = _within(budget, http.client.HTTPConnection)

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)


class _Https(urllib.request.HTTPSHandler):
    """Connections under TLS within a budget; a handshake has the time that is left."""

    def __init__(self, budget: _Budget) -> None:
        super().__init__()
        self._connection = _within(budget, http.client.HTTPSConnection)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)


class _AsItIs(urllib.request.HTTPErrorProcessor):
    """Keeps every answer as it is: a token must not travel to where a redirect points."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _fetch(url: str, etag: str | None, token: str) -> tuple[bytes, str] | None:
    """The snapshot and its ETag; None when it is the one that is known."""
    request = urllib.request.Request(url, headers={"accept-encoding": "gzip"})
    if etag:
        request.add_header("if-none-match", etag)
    if token:
        request.add_header("authorization", f"Bearer {token}")
    budget = _Budget(DEADLINE_S, MAX_HEAD_BYTES)
    opener = urllib.request.build_opener(_Http(budget), _Https(budget), _AsItIs)
    try:
        with opener.open(request, timeout=DEADLINE_S) as answer:
            budget.allow(MAX_BYTES)
            if answer.status == http.HTTPStatus.NOT_MODIFIED:
                return None
            if answer.status != http.HTTPStatus.OK:
                raise StoreError(f"it answered {answer.status}: {_reason(answer, token)}")
            is_packed = answer.headers.get("content-encoding") == "gzip"
            body = _unpacked(answer) if is_packed else _whole(answer)
            etag = answer.headers.get("etag", "")
            return body, etag if _ETAG.fullmatch(etag) else ""
    except StoreError as exc:
        raise StoreError(f"{url}: {exc}") from exc
    except urllib.error.URLError as exc:
        raise StoreError(f"{url} does not answer: {one_line(str(exc.reason))}") from exc
    except (OSError, http.client.HTTPException, zlib.error, EOFError, ValueError) as exc:
        raise StoreError(f"{url} broke off: {one_line(f'{type(exc).__name__} {exc}')}") from exc


def _whole(answer: http.client.HTTPResponse) -> bytes:
    body = bytearray()
    while block := answer.read(_BLOCK_BYTES):
        body += block
    if answer.length:
        raise EOFError(f"{answer.length} bytes are missing")
    return bytes(body)


def _unpacked(answer: http.client.HTTPResponse) -> bytes:
    """A body under gzip, unpacked to `MAX_BYTES` at most."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    body = bytearray()
    while not unpacker.eof and (block := answer.read(_BLOCK_BYTES)):
        body += unpacker.decompress(block, MAX_BYTES + 1 - len(body))
        if len(body) > MAX_BYTES:
            raise StoreError(f"it is larger than {MAX_BYTES} bytes")
    if not unpacker.eof:
        raise EOFError("it ends too early")
    return bytes(body)


def _reason(answer: http.client.HTTPResponse, token: str) -> str:
    """Reason that an answer gives for a refusal, or the name of its status, without the token."""
    text = answer.read(_MAX_FAULT_BYTES)
    try:
        document.check_extent(text, tokens=_MAX_FAULT_BYTES, depth=MAX_DEPTH)
        reason = document.parse(text)["error"]
    except (ValueError, KeyError, TypeError):  # ConfigError is a ValueError
        reason = answer.reason
    return one_line(_without(token, reason))
