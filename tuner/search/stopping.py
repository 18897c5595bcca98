"""Stopping rule of a search: the expected gain of the compiling kernels against their wait.

The surrogate gives the expected improvement of the compiling kernels over the best measured time.
Recorded durations give the time until each is compiled. A search continues while, for some wait,
the expected saving per second of waiting is at least the effort's price. After the effort's target
a second costs more.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.measurement import Measurement

if TYPE_CHECKING:
    from tuner.search.study import Place, Search

FALLBACK_S = 25.0
"""Seconds of a compile in families without known durations: the median of the recorded ones."""
LATE = 10.0
"""Factor of the price of a second after the effort's target."""
FURTHER = 0.2
"""Compile time of a further kernel of a unit over that of its first. On one machine 1, 2, 4 and 8
fused kernels took 27.5, 35.6, 46.5 and 62.4 CPU-seconds together (two busy cores)."""
MIN_WAIT_S = 1.0
"""Shortest wait that is considered, in seconds; timing a compiled group takes as long."""


class CompileTimes:
    """Durations of compiles by family: recorded ones, and those of the running sweep.

    Args:
        known: measurements with `compile_cpu_s`, seconds of one core.
    """

    def __init__(self, past: Iterable[Measurement] = ()) -> None:
        self._known: dict[str, list[float]] = {}
        self.observe(past)

    def observe(self, measurements: Iterable[Measurement]) -> None:
        """Add the durations of measurements that compiled a kernel."""
        for m in measurements:
            if m.compile_cpu_s:
                self._known.setdefault(m.config.family, []).append(m.compile_cpu_s)

    def left_s(self, family: str, elapsed_s: float = 0.0) -> float:
        """Expected remaining seconds of a compile after `elapsed_s`.

        The mean remainder of the known durations above `elapsed_s`. If there is none, half of
        `elapsed_s`.
        """
        times = self._known.get(family)
        if not times:
            return max(FALLBACK_S - elapsed_s, elapsed_s / 2)
        longer = [seconds for seconds in times if seconds > elapsed_s]
        return statistics.fmean(longer) - elapsed_s if longer else elapsed_s / 2


@dataclass(frozen=True)
class Stopping:
    """Rule that ends a search.

    Args:
        search: the search; with another sampler than `model` it never ends early.
        price: share of the best time that a second of waiting must be expected to save; 0 waits
            for everything.
        target_s: seconds of a sweep after which a second costs `LATE` times the price, if none of
            the first groups is waited for (`Search.leads`).
    """

    search: Search
    price: float
    target_s: float = math.inf

    def is_over(self, left_s: Mapping[Place, float], elapsed_s: float = 0.0) -> bool:
        """True if no wait is worth its time.

        Args:
            left_s: seconds until each compiling group has a result.
            elapsed_s: seconds since the sweep began.
        """
        return self.price > 0 and self.search.is_modelled and not self._pays(left_s, elapsed_s)

    def _pays(self, left_s: Mapping[Place, float], elapsed_s: float) -> bool:
        order = sorted(left_s, key=lambda place: left_s[place])
        gains, leads = self.search.joint_gains(order), self.search.leads
        credit = 1.0 if leads else self.search.credit.share
        in_time_s = math.inf if leads else max(0.0, self.target_s - elapsed_s)
        for place, gain in zip(order, gains, strict=True):
            wait_s = max(MIN_WAIT_S, left_s[place])
            late_s = max(0.0, wait_s - in_time_s)
            if credit * gain >= self.price * (wait_s + (LATE - 1) * late_s):
                return True
        return False


def queued(left_s: Sequence[float], waiting: Sequence[float]) -> list[float]:
    """Seconds until each compile that waits for a core is done, in their order.

    Args:
        left_s: remaining seconds of the running compiles, one on each core.
        waiting: durations of the waiting compiles, seconds.
    """
    free = sorted(left_s) or [0.0]
    keys = []
    for seconds in waiting:
        keys.append(free.pop(0) + seconds)
        bisect.insort(free, keys[-1])
    return keys
