"""Checks of every request before anything reads it: host, token, content type, size.

Plain ASGI, so that a refused request costs microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from urllib.parse import quote, urlencode

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuner.service.metrics import Metrics
from tuner.service.tokens import Sessions, Tokens

MAX_HEADER_BYTES = 1 << 16
"""Limit for all names and values together."""
MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0
"""For the whole body."""
DISCARDED_BYTES, DISCARD_S = 16 << 20, 0.5
"""Part of an oversized body that is read, so that a client which sends it whole sees the answer."""

HEALTH_PATH = "/healthz"
LOGIN_PATH, LOGOUT_PATH = "/login", "/logout"
OPEN_PATHS = (HEALTH_PATH, "/openapi.json", LOGIN_PATH, LOGOUT_PATH)
"""Paths without a token: they reveal nothing about the store."""
STATIC_PATH = "/static/"
"""Static files of the pages, equal for every user."""
API_PATH = "/v1/"
"""Prefix of the API, which never answers with a page."""
LOOKUP_PATH = "/v1/configs:lookup"
"""The only POST that does not change anything."""
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Refused(Exception):
    """Refused request."""

    def __init__(self, status: int, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


class Guard:
    """ASGI middleware that passes only valid requests, and counts all.

    Args:
        app: application behind the guard.
        tokens: tokens; without them only requests to this machine by its own names are accepted.
        sessions: sessions with which a browser can read without a bearer token.
        metrics: counters of requests.
    """

    def __init__(
        self, app: ASGIApp, *, tokens: Tokens, sessions: Sessions, metrics: Metrics
    ) -> None:
        self._app, self._tokens, self._sessions, self._metrics = app, tokens, sessions, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                body = await self._check(scope, receive)
            except Refused as exc:
                await refuse(exc, scope, receive, observed)
            else:
                await self._app(scope, _replay(body, receive), observed)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.count(scope["method"], route, status, time.perf_counter() - started)

    async def _check(self, scope: Scope, receive: Receive) -> bytes:
        """Check a request. Returns its whole body.

        Raises:
            Refused: when the request is refused.
        """
        headers = {name: value for name, value in scope["headers"]}
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise Refused(431, f"the headers are too large (allowed: {MAX_HEADER_BYTES} bytes)")
        if not _looks(scope):
            _check_origin(headers)
        if self._tokens:
            self._check_token(scope, headers)
        else:
            # A web page must not reach a service without tokens through a host name of its own.
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if host not in _LOCAL_NAMES and host.rpartition(":")[0] not in _LOCAL_NAMES:
                raise Refused(403, "without tokens only this machine is answered, by its own name")
        return await _read_body(scope["path"], headers, receive)

    def _check_token(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        path, looks = scope["path"], _looks(scope)
        if path in OPEN_PATHS or path.startswith(STATIC_PATH):
            return
        authorization = headers.get(b"authorization")
        if authorization is None and looks and self._sessions.is_open(headers.get(b"cookie", b"")):
            return
        writes = not looks and path != LOOKUP_PATH
        scheme, _, word = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not self._tokens.allows(word.strip(), writes=False):
            if looks and is_for_people(path, headers.get(b"accept", b"")):
                raise Refused(303, "log in first", (("location", _login_for(scope)),))
            challenge = (("www-authenticate", "Bearer"),)
            raise Refused(401, "a bearer token is needed", challenge)
        if not self._tokens.allows(word.strip(), writes=writes):
            raise Refused(403, "this token may only read")


def _looks(scope: Scope) -> bool:
    """True for methods that only read."""
    return scope["method"] in ("GET", "HEAD")


def _check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request of another origin's page, which a browser may send without a preflight.

    Programs send neither header. The scheme of an origin is not compared: a proxy may speak TLS.

    Raises:
        Refused: when a header names another origin than this service's.
    """
    site = headers.get(b"sec-fetch-site", b"none").lower()
    origin = headers.get(b"origin")
    is_own = (
        origin is None or origin.lower().partition(b"://")[2] == headers.get(b"host", b"").lower()
    )
    if site not in (b"same-origin", b"none") or not is_own:
        raise Refused(403, "a page of another origin may change nothing here")


def is_for_people(path: str, accept: bytes) -> bool:
    """True when a request is answered with a page: a browser's, for no address of the API."""
    return b"text/html" in accept and not path.startswith(API_PATH)


def _login_for(scope: Scope) -> str:
    """The login page, which leads back to the requested page."""
    query = scope.get("query_string", b"").decode("latin-1")
    place = quote(scope["path"]) + (f"?{query}" if query else "")
    return f"{LOGIN_PATH}?{urlencode({'next': place})}"


async def _read_body(path: str, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or len(declared) > 15:
        raise Refused(400, "content-length is not a number")
    if int(declared) > MAX_BODY_BYTES:
        if b"expect" not in headers:  # who waits for a leave to send gets none
            await _discard(receive)
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    await _discard(receive)
                    raise _too_large()
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A form of a foreign page needs no permission: but for the login, which changes nothing here,
    # what a form can send is not taken.
    allowed = "application/x-www-form-urlencoded" if path == LOGIN_PATH else "application/json"
    if body and kind != allowed.encode():
        raise Refused(415, f"the body must be {allowed}")
    if not _is_utf8(body):
        raise Refused(400, "the body is not UTF-8")
    return bytes(body)


def _is_utf8(body: bytearray) -> bool:
    """True when it is UTF-8, as JSON has to be: the parser would guess UTF-16 and 32."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return 0 not in body


async def _discard(receive: Receive) -> None:
    room = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while room > 0:
                message = await receive()
                room -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large() -> Refused:
    return Refused(413, f"the body is too large (allowed: {MAX_BODY_BYTES} bytes)")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Replays the body that was read, then passes on further messages, such as a disconnect."""
    is_given = False

    async def replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a refused request."""
    headers = dict(refused.headers)
    if refused.status in (408, 413, 431):
        headers["connection"] = "close"
    await JSONResponse({"error": refused.detail}, refused.status, headers)(scope, receive, send)
