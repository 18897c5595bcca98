"""Why PyTorch answers a call in a tuned kernel's place."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason, one line (`counters`), and how long calls of the same kind have it too."""

    reason: str
    until: float = math.inf
    """Equal calls are refused up to this time (`time.monotonic`), or until the store changes; 0:
    the reason may be another at the next call."""
    lengths: tuple[int, int] | None = None
    """Of a cache of keys, the first and the last for which it was found out; None where it is not
    a matter of lengths."""


def once(reason: str) -> Refusal:
    """A refusal of one call, for a reason that can pass."""
    return Refusal(reason, 0.0)
