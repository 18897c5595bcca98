"""Round order of kernels in a final pass: a shuffled Williams design."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

#: A subject that takes this many times the fastest's time is not a contender for first place.
CONTENDING = 1.5
#: Microseconds for which a burst at the power limit still runs at the clocks left by its
#: predecessor. It is faster after a kernel that draws little power.
SETTLE_US = 40_000.0


class RoundOrder:
    """Order of the subjects in each round of a final pass. A subject's clocks depend on its
    predecessor.

    Contenders follow one another equally often (Williams designs, each shuffled). The other
    subjects come after them in a fixed order, and the next round begins untimed, until its clocks
    have settled.

    Args:
        burst_us: microseconds of each burst.
        calls: calls in each burst.
        bursts: bursts of each subject in a round.
    """

    def __init__(self, burst_us: Sequence[float], calls: Sequence[int], bursts: int) -> None:
        per_call = [us / n for us, n in zip(burst_us, calls, strict=True)]
        bound = CONTENDING * min(per_call)
        self._contenders = [i for i, us in enumerate(per_call) if us < bound]
        self.others = [i for i, us in enumerate(per_call) if us >= bound]
        """Indices of subjects that are not contenders."""
        self._burst_us = burst_us
        self._others_us = bursts * sum(burst_us[i] for i in self.others)
        self.orders = self._designs()
        """Endless iterator of round orders, as indices."""

    def settling(self, first: int) -> int:
        """Untimed bursts of a round's first subject: as long as the burst before it, at most
        `SETTLE_US`.
        """
        return round(min(SETTLE_US, self._others_us) / max(self._burst_us[first], 1.0))

    def _designs(self) -> Iterator[list[int]]:
        """Zigzags 0, 1, -1, 2, ... and, for an odd number of subjects, their reverses. Each shift
        has different neighbours.
        """
        count = len(self._contenders)
        zigzag = [-(i // 2) if i % 2 == 0 else i // 2 + 1 for i in range(count)]
        chance = random.Random(0)
        while True:
            shuffled = chance.sample(self._contenders, count)
            for shift in chance.sample(range(count), count):
                order = [shuffled[(step + shift) % count] for step in zigzag]
                yield order + self.others
                if count % 2:
                    yield order[::-1] + self.others
