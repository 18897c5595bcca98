"""Authorisation to read and to write: bearer tokens, and a browser's session cookie."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import cookie_parser

from tuner.errors import ConfigError

MIN_TOKEN_CHARACTERS = 16
COOKIE = "tuner_session"
LIFETIME_S = 12 * 3600
MAX_SESSIONS = 1000
"""Maximum open sessions; one more ends the oldest."""


@dataclass(frozen=True)
class Tokens:
    """Read and write tokens; if both are empty, none is required."""

    read: str = ""
    write: str = ""

    def __post_init__(self) -> None:
        for name, token in (("read", self.read), ("write", self.write)):
            if token and (len(token) < MIN_TOKEN_CHARACTERS or not token.isascii()):
                raise ConfigError(
                    f"the {name} token is not good enough "
                    f"(allowed: {MIN_TOKEN_CHARACTERS} or more ASCII characters)"
                )
        if bool(self.read) != bool(self.write):
            raise ConfigError("one token is not enough: give one to read and one to write")
        if self.read and self.read == self.write:
            raise ConfigError("the tokens to read and to write must differ")

    def __bool__(self) -> bool:
        return bool(self.read)

    def allows(self, token: bytes, *, writes: bool) -> bool:
        """True if a token suffices. The write token also permits reading."""
        # Both are always compared, so that the time reveals nothing.
        may_read = hmac.compare_digest(token, self.read.encode())
        may_write = hmac.compare_digest(token, self.write.encode())
        return may_write or (may_read and not writes)


class Sessions:
    """Browser sessions, which may only read: browsers send no bearer token by themselves.

    A session is a random value; its hash is kept until logout or expiry. So a copy of the cookie
    ends with it, and every session ends with the process.

    Args:
        tokens: tokens of the service. A service without tokens needs no sessions and has none.
        clock: seconds since any moment.
    """

    def __init__(self, tokens: Tokens, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens, self._clock = tokens, clock
        self._expiries: dict[bytes, float] = {}
        """By the session's hash, the oldest first."""

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def begin(self, token: str) -> str | None:
        """Begin a session if the token is one of the two; None otherwise."""
        data = token.encode(errors="replace")
        if not (self and self._tokens.allows(data, writes=False)):
            return None
        now = self._clock()
        for id_hash, expires in list(self._expiries.items()):
            if expires > now and len(self._expiries) < MAX_SESSIONS:
                break
            del self._expiries[id_hash]
        session = secrets.token_urlsafe(24)
        self._expiries[_hash(session)] = now + LIFETIME_S
        return session

    def is_open(self, cookies: bytes) -> bool:
        """True when a ``Cookie`` header holds a session that has not ended."""
        return self._clock() < self._expiries.get(_hash(_session_of(cookies)), -math.inf)

    def end(self, cookies: bytes) -> None:
        """End the session that a ``Cookie`` header holds; none is passed over."""
        self._expiries.pop(_hash(_session_of(cookies)), None)


def _session_of(cookies: bytes) -> str:
    return cookie_parser(cookies.decode("latin-1")).get(COOKIE, "")


def _hash(session: str) -> bytes:
    """Hash that is looked up: the time of a lookup tells nothing about a session."""
    return hashlib.sha256(session.encode()).digest()
