"""Text from elsewhere (imports, servers, other programs) as a terminal may show it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, Any

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1: cursor, colours, titles, answers typed into a shell
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators; order of writing
    "\ud800-\udfff]"  # half characters, which cannot be written
)


_SECRETS = (
    re.compile(r"^(https?://)[^/]*(?=@)", re.IGNORECASE),  # of a service a name may be a token
    re.compile(r"(://[^:/@]*:).*(?=@)"),
    re.compile(r"([?&][^=&#]*(?:pass|pwd|token|secret|key)[^=&#]*=)[^&#]*", re.IGNORECASE),
)


def without_password(url: str) -> str:
    """A URL for messages: what may be a password or a token in it is ``***``."""
    for secret in _SECRETS:
        url = secret.sub(r"\1***", url)
    return url


def printable(text: str, keep: str = "") -> str:
    r"""A text with its control characters escaped, as in ``\x1b`` and ``\u202e``.

    Args:
        text: text to show.
        keep: characters that stay: none for a single line, ``"\n\t"`` for several.
    """
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def one_line(text: str, characters: int = 200) -> str:
    """A text as one line: white space collapsed, control characters escaped, cut with dots.

    Args:
        text: text to show.
        characters: maximum length of the line.
    """
    begin = text[: 8 * characters]  # no more is looked at: a text may have any length
    line = printable(" ".join(begin.split()))
    is_whole = len(text) == len(begin) and len(line) <= characters
    return line if is_whole else f"{line[: characters - 3]}..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class PrintableStream:
    """A text stream that escapes control characters other than line breaks and tabs.

    Args:
        raw: stream that is written to, and that serves every other method.
    """

    def __init__(self, raw: IO[str]) -> None:
        self.raw = raw
        self.is_used = False
        """True once something was written."""

    def write(self, text: str) -> int:
        self.is_used = True
        self.raw.write(printable(text, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: Any) -> Any:
    """The stream below a `PrintableStream`, for what draws with control characters."""
    return stream.raw if isinstance(stream, PrintableStream) else stream
