"""Who may read and who may write: bearer tokens, and the cookie that a login gives a browser."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

from tuner.errors import ConfigError

MIN_TOKEN_CHARACTERS = 16
COOKIE = "tuner_session"
LIFETIME_S = 12 * 3600


@dataclass(frozen=True)
class Tokens:
    """Who may read and who may write, too; empty ones ask nobody."""

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
            raise ConfigError("one token alone is not enough: give one to read and one to write")
        if self.read and self.read == self.write:
            raise ConfigError("the tokens to read and to write must differ")

    def __bool__(self) -> bool:
        return bool(self.read)

    def allows(self, given: bytes, *, writes: bool) -> bool:
        """Whether a token suffices; who may write may read."""
        # Both are compared, always: the time tells nothing.
        may_read = hmac.compare_digest(given, self.read.encode())
        may_write = hmac.compare_digest(given, self.write.encode())
        return may_write or (may_read and not writes)


class Sessions:
    """Lets browsers, which send no bearer token by themselves, read.

    A session holds no token: it is an expiry and its signature under the service's tokens, so that
    it ends by itself and with them. It is good for reading alone: no foreign page can make a
    browser change anything.

    Args:
        tokens: of the service; without them there are no sessions, and nobody needs one.
        clock: seconds since 1970.
    """

    def __init__(self, tokens: Tokens, clock: Callable[[], float] = time.time) -> None:
        self._tokens, self._clock = tokens, clock

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def begin(self, token: str) -> str | None:
        """A new session for who has one of the tokens; None for who has not."""
        given = token.encode(errors="replace")
        if not (self and self._tokens.allows(given, writes=False)):
            return None
        expires = str(int(self._clock()) + LIFETIME_S)
        return f"{expires}.{self._sign(expires)}"

    def is_open(self, cookies: bytes) -> bool:
        """Whether a ``Cookie`` header holds a session that has not ended."""
        # By hand: the standard library's reader drops every cookie when one of them is odd.
        pairs = (part.strip().partition("=") for part in cookies.decode("latin-1").split(";"))
        value = next((value for name, _, value in pairs if name == COOKIE), "")
        expires, _, signature = value.partition(".")
        if not self or not (expires.isascii() and expires.isdigit() and len(expires) < 12):
            return False
        is_genuine = hmac.compare_digest(signature.encode(), self._sign(expires).encode())
        return is_genuine and self._clock() < int(expires)

    def _sign(self, expires: str) -> str:
        key = f"{self._tokens.read}\0{self._tokens.write}".encode()
        return hmac.new(key, f"{COOKIE} {expires}".encode(), hashlib.sha256).hexdigest()
