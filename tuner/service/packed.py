"""Texts that are sent often: packed once, and not again to a client that has them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request
from starlette.responses import Response


@dataclass(frozen=True)
class PackedText:
    """A text, plain and under gzip."""

    plain: bytes
    packed: bytes
    etag: str
    """Weak, for the bytes differ by their encoding."""

    @classmethod
    def of(cls, plain: bytes, level: int = 9) -> Self:
        """Pack a text at a level of gzip's."""
        digest = hashlib.sha256(plain).hexdigest()[:32]
        return cls(plain, gzip.compress(plain, level, mtime=0), f'W/"{digest}"')

    def answer(self, request: Request, media_type: str, headers: Mapping[str, str]) -> Response:
        """The response; without a body where the request names the text's ETag."""
        headers = {**headers, "etag": self.etag, "vary": "accept-encoding"}
        tags = request.headers.get("if-none-match", "").split(",")
        if not {self.etag, "*"}.isdisjoint(tag.strip() for tag in tags):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", "").lower():
            return Response(self.plain, headers=headers, media_type=media_type)
        headers["content-encoding"] = "gzip"
        return Response(self.packed, headers=headers, media_type=media_type)
