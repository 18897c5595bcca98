"""Rate limits by key.

The packages `limits` and `pyrate-limiter` bound no number of keys, which clients choose here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException

MAX_KEYS = 4096


class RateLimit:
    """Token buckets, one a key, full at first and refilled at a constant rate. Thread-safe.

    Args:
        most: size of a bucket.
        period_s: seconds in which an empty bucket is full again.
        clock: seconds since any moment.
    """

    def __init__(
        self, most: int, period_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self.period_s, self._clock = most, period_s, clock
        self._taken: dict[str, tuple[float, float]] = {}
        """Amount that each bucket lacked, and when; the longest unused first."""
        self._lock = threading.Lock()

    def check(self, what: str, key: str = "", count: int = 1) -> None:
        """As `take`; the response 429 when there is not enough.

        Args:
            what: units of the bucket, in words.
            key: name of the bucket.
            count: number of units to take.
        """
        if wait_s := self.take(key, count):
            period = "an hour" if self.period_s == 3600 else "a minute"
            detail = f"too many {what} (allowed: {self.most} {period})"
            raise HTTPException(429, detail, {"retry-after": str(math.ceil(wait_s))})

    def take(self, key: str = "", count: int = 1) -> float:
        """Take from a bucket.

        Args:
            key: name of the bucket.
            count: number of units to take.

        Returns:
            0, or the seconds after which there is enough; then nothing was taken.
        """
        with self._lock:
            now = self._clock()
            missing, at = self._taken.pop(key, (0.0, now))
            missing = max(0.0, missing - (now - at) * self.most / self.period_s)
            wait_s = (missing + count - self.most) * self.period_s / self.most
            self._taken[key] = (missing if wait_s > 0 else missing + count, now)
            if len(self._taken) > MAX_KEYS:
                del self._taken[next(iter(self._taken))]
            return max(0.0, wait_s)
