"""Pulls a service's snapshot into the local store. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
import zlib
from typing import Any

from tuner import settings
from tuner.errors import ConfigError, StoreError
from tuner.store import ImportReport, Store
from tuner.store.base import Check
from tuner.store.exchange import parse

TIMEOUT_S = 30.0
"""For each answer of the service."""
MAX_BYTES = 1 << 30
"""Of a snapshot, unpacked: a table of 10,000 entries of ten measurements has a tenth of it."""


def checked(url: str) -> str:
    """The URL of a service, without a slash at its end.

    Raises:
        ConfigError: when it is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
        _ = parts.port
    except ValueError:
        is_good = False
    if not is_good or parts.username:
        raise ConfigError(f"{url} is not the URL of a service (allowed: as http://host:8265)")
    return url.rstrip("/")


def pull(store: Store, url: str, check: Check) -> ImportReport | None:
    """Mirror the service's snapshot; None when it did not change since the last time.

    Args:
        store: the local one.
        url: of the service.
        check: reasons why a measurement must not be served here.

    Raises:
        ConfigError: when the snapshot does not fit.
        StoreError: when the service does not answer, or refuses.
    """
    found = _fetch(f"{url}/v1/snapshot", store.mirrored(url))
    if found is None:
        return None
    body, etag = found
    try:
        document = parse(body.decode("utf-8"))
        return store.mirror(document, url=url, etag=etag, check=check)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{url}: the snapshot is not UTF-8 text") from exc
    except ConfigError as exc:
        raise ConfigError(f"{url}: {exc}") from exc


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token must not travel to where an answer points."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _fetch(url: str, etag: str | None) -> tuple[bytes, str] | None:
    request = urllib.request.Request(url, headers={"accept-encoding": "gzip"})
    if etag:
        request.add_header("if-none-match", etag)
    if token := settings.read_token():
        request.add_header("authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            body = answer.read(MAX_BYTES + 1)
            if answer.length and len(body) <= MAX_BYTES:
                raise EOFError(f"{answer.length} bytes are missing")
            if answer.headers.get("content-encoding") == "gzip" and len(body) <= MAX_BYTES:
                body = _unpacked(body)
            if len(body) > MAX_BYTES:
                raise StoreError(f"{url}: the snapshot is larger than {MAX_BYTES} bytes")
            return body, answer.headers.get("etag", "")[:80]
    except urllib.error.HTTPError as exc:
        with exc:
            if exc.code == http.HTTPStatus.NOT_MODIFIED:
                return None
            raise StoreError(f"{url} answered {exc.code}: {_reason(exc)}") from exc
    except urllib.error.URLError as exc:
        raise StoreError(f"{url} does not answer: {exc.reason}") from exc
    except (OSError, http.client.HTTPException, zlib.error, EOFError) as exc:
        raise StoreError(f"{url} broke off: {type(exc).__name__} {exc}".rstrip()) from exc


def _unpacked(body: bytes) -> bytes:
    """At most one byte more than is allowed, whatever it would grow to."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    unpacked = unpacker.decompress(body, MAX_BYTES + 1)
    if not unpacker.eof and len(unpacked) <= MAX_BYTES:
        raise EOFError("the snapshot ends too early")
    return unpacked


def _reason(exc: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(exc.read(4096))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(exc.reason)
