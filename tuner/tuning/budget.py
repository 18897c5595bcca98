"""Time limit of a sweep, in the seconds of one clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tuner.measure.stopwatch import MIN_ROUNDS, PASS_LIMIT_US

ROUND_CALLS = 4
"""Bursts of a finalist in a round, the untimed one included."""
MIN_BURST_S = 0.001
CHECK_S = 0.3
"""Inputs, reference and check of a finalist whose call takes little."""
OPENING_S = 2.0
"""From the end of a search to the first round: what a GPU still works on, and the store."""
GRACE_S = 2.0
"""Beyond the limit a final pass is given up: its end costs less than beginning anew."""
MIN_SEARCH = 0.5
"""Part of the limit that the search has at least."""


@dataclass
class Budget:
    """A sweep's clock and its limit.

    Args:
        limit_s: seconds for all of it; None: no limit.
        started: `now` at its start.
    """

    limit_s: float | None
    started: float
    pass_s: float = 0.0
    """Seconds that the last brief final pass took."""

    @staticmethod
    def now() -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    @property
    def spent_s(self) -> float:
        return self.now() - self.started

    @property
    def deadline(self) -> float | None:
        return None if self.limit_s is None else self.started + self.limit_s

    def left_s(self) -> float | None:
        """Seconds until the final pass must have ended; None without a limit."""
        return None if self.limit_s is None else self.limit_s + GRACE_S - self.spent_s

    def final_s(self, times_us: Iterable[float], rounds: int) -> float:
        """Seconds that a final pass is expected to take.

        Args:
            times_us: of the finalists' calls, microseconds.
            rounds: of the pass.
        """
        each = [max(MIN_BURST_S, 2e-6 * us) for us in times_us]
        round_s = ROUND_CALLS * sum(each)
        longest = max(1e-6 * PASS_LIMIT_US, MIN_ROUNDS * round_s)
        checks_s = len(each) * max(CHECK_S, self.pass_s / 2)
        return OPENING_S + checks_s + min(rounds * round_s, longest)

    def search_deadline(self, times_us: Iterable[float], rounds: int) -> float | None:
        """When the search must end, so that a final pass of these calls fits."""
        if self.limit_s is None:
            return None
        reserved = min(self.final_s(times_us, rounds), (1 - MIN_SEARCH) * self.limit_s)
        return self.started + self.limit_s - reserved
