"""Time budget of a sweep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tuner.measure.stopwatch import MIN_ROUNDS, PASS_LIMIT_US

ROUND_CALLS = 4
"""Bursts of a finalist in a round, the untimed one included."""
MIN_BURST_S = 0.001
CHECK_S = 0.3
"""Seconds for inputs, reference and check of a finalist with a short call."""
OPENING_S = 2.0
"""Seconds from the end of a search to the first round, for running GPU work and the store."""
GRACE_S = 2.0
"""Seconds over the limit after which a final pass is abandoned: ending it costs less than a
restart."""
MIN_SEARCH = 0.5
"""Minimum share of the limit for the search."""


def round_seconds(times_us: Iterable[float]) -> float:
    """Seconds that a round of a final pass takes, by the microseconds of its calls."""
    return ROUND_CALLS * sum(max(MIN_BURST_S, 2e-6 * us) for us in times_us)


@dataclass
class Budget:
    """Clock and time limit of a sweep.

    Args:
        limit_s: seconds for the whole sweep; None: no limit.
        started: `now` at its start.
    """

    limit_s: float | None
    started: float
    pass_s: float = 0.0
    """Duration of the last brief final pass, seconds."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the sweep so far, by its name. No second counts twice."""

    @staticmethod
    def now() -> float:
        """Seconds of a monotonic clock."""
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

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context whose seconds count for a part of the sweep, without those of parts inside."""
        began, before = self.now(), sum(self.parts.values())
        try:
            yield
        finally:
            inside = sum(self.parts.values()) - before
            self.parts[name] = self.parts.get(name, 0.0) + self.now() - began - inside

    def final_s(self, times_us: Iterable[float], rounds: int) -> float:
        """Seconds that a final pass is expected to take.

        Args:
            times_us: microseconds of the finalists' calls.
            rounds: rounds of the pass.
        """
        times = list(times_us)
        round_s = round_seconds(times)
        longest = max(1e-6 * PASS_LIMIT_US, MIN_ROUNDS * round_s)
        checks_s = self.pass_s + len(times) * CHECK_S  # a pass computes its references once
        return OPENING_S + checks_s + min(rounds * round_s, longest)

    def search_deadline(self, times_us: Iterable[float], rounds: int) -> float | None:
        """Time at which the search must end for a final pass of these calls to fit."""
        if self.limit_s is None:
            return None
        reserved = min(self.final_s(times_us, rounds), (1 - MIN_SEARCH) * self.limit_s)
        return self.started + self.limit_s - reserved
