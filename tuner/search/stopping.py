"""When a search is over: the gain that is still expected against the wait for it.

While kernels compile, the surrogate says how much better than the best measured time they may turn
out, and recorded durations say how long each still takes. A search goes on while some wait is worth
it: the expected saving by then, a second of waiting, is at least the effort's price. Whatever
compiles beyond that cannot be expected to change the answer by what its wait costs.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.measurement import Measurement

if TYPE_CHECKING:
    from tuner.search.study import Place, Search

FALLBACK_S = 25.0
"""Seconds of a compile in families of which none is known: the median of the recorded ones."""
LEAST_WAIT_S = 1.0
"""Shortest wait that is judged; timing a compiled group takes as long."""


class CompileTimes:
    """Durations of compiles by family: recorded ones, and those of the sweep that asks.

    Args:
        known: measurements with `compile_cpu_s`, seconds of one core.
    """

    def __init__(self, known: Iterable[Measurement] = ()) -> None:
        self._known: dict[str, list[float]] = {}
        self.observe(known)

    def observe(self, measurements: Iterable[Measurement]) -> None:
        """Add the durations of some measurements; those that compiled nothing are left out."""
        for m in measurements:
            if m.compile_cpu_s:
                self._known.setdefault(m.config.family, []).append(m.compile_cpu_s)

    def left_s(self, family: str, elapsed_s: float = 0.0) -> float:
        """Seconds that a compile is expected to take still: the mean rest of the known ones that
        took longer than `elapsed_s`; of one that is longer than all of them, half of that again.
        """
        known = self._known.get(family)
        if not known:
            return max(FALLBACK_S - elapsed_s, elapsed_s / 2)
        longer = [seconds for seconds in known if seconds > elapsed_s]
        return statistics.fmean(longer) - elapsed_s if longer else elapsed_s / 2


@dataclass(frozen=True)
class Stopping:
    """The rule that ends a search.

    Args:
        search: with the sampler `model`; another one never ends early.
        price: share of the best time that a second of waiting must be expected to save; 0 waits
            for everything.
    """

    search: Search
    price: float

    def is_over(self, left_s: Mapping[Place, float]) -> bool:
        """True if no wait is worth its time.

        Args:
            left_s: seconds until each group under way has a result.
        """
        return self.price > 0 and self.search.is_modelled and not self._pays(left_s)

    def _pays(self, left_s: Mapping[Place, float]) -> bool:
        order = sorted(left_s, key=lambda place: left_s[place])
        gains = self.search.joint_gains(order)
        return any(
            gain >= self.price * max(LEAST_WAIT_S, left_s[place])
            for place, gain in zip(order, gains, strict=True)
        )


def queued(left_s: Sequence[float], waiting: Sequence[float]) -> list[float]:
    """Seconds until compiles that wait for a core are done, in their order.

    Args:
        left_s: seconds left of each compile that runs, on a core each.
        waiting: seconds that each waiting one will take.
    """
    free = sorted(left_s) or [0.0]
    found = []
    for seconds in waiting:
        found.append(free.pop(0) + seconds)
        bisect.insort(free, found[-1])
    return found
