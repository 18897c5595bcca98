"""Round order of kernels that are timed side by side: a Williams design, shuffled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

#: What takes this many times the fastest's time is no contender for the first place.
CONTENDING = 1.5
#: Microseconds for which a burst at the power limit keeps the clocks that its predecessor left. It
#: is faster after a kernel that draws little power.
SETTLE_US = 40_000.0


class RoundOrder:
    """Order of the subjects in each round of a final pass. A subject's clocks depend on its
    predecessor.

    Contenders follow one another equally often (Williams designs, each shuffled). The other
    subjects come after them in a fixed order, and the next round begins untimed, until its clocks
    have settled.

    Args:
        burst_us: time of each burst.
        calls: calls of each.
        bursts: how many of each a round has.
    """

    def __init__(self, burst_us: Sequence[float], calls: Sequence[int], bursts: int) -> None:
        per_call = [us / n for us, n in zip(burst_us, calls, strict=True)]
        bound = CONTENDING * min(per_call)
        self._contenders = [i for i, us in enumerate(per_call) if us < bound]
        self.others = [i for i, us in enumerate(per_call) if us >= bound]
        """Indices of those that are no contenders."""
        self._burst_us = burst_us
        self._others_us = bursts * sum(burst_us[i] for i in self.others)
        self.orders = self._designs()
        """Indices in their order, without end."""

    def settling(self, first: int) -> int:
        """Bursts of a round's first that are not timed: as long as what ran before it, at most
        `SETTLE_US`.
        """
        return round(min(SETTLE_US, self._others_us) / max(self._burst_us[first], 1.0))

    def _designs(self) -> Iterator[list[int]]:
        """Zigzags 0, 1, -1, 2, ... and, of an odd number, their reverses: each shift of them has
        other neighbours.
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
