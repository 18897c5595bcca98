"""Rounds of times that were taken by turns: their order, medians, noise and intervals.

The worker's stopwatch (raw launches, in a shuffled Williams design), the first call of
``TUNER_BENCHMARK`` and the developers' benches (calls of PyTorch) share these.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tuner.measurement import TIE, Clocks

MAX_DEVIATION = 0.02
"""Relative deviation over the rounds from which a subject is timed again, then flagged."""
MISS = 0.05
"""Probability that an interval misses the median, at each look."""


#: A subject that takes this many times the fastest's time is not a contender for first place.
CONTENDING = 1.5
#: Microseconds for which a burst at the power limit still runs at the clocks left by its
#: predecessor. It is faster after a kernel that draws little power.
SETTLE_US = 40_000.0


@dataclass(frozen=True)
class Timing:
    """Times of a call over `rounds` rounds, in microseconds."""

    median_us: float
    std_us: float
    rounds: int
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        spread = statistics.stdev(samples) if len(samples) > 1 else 0.0
        return cls(statistics.median(samples), spread, len(samples))

    @property
    def is_noisy(self) -> bool:
        return self.std_us >= MAX_DEVIATION * self.median_us


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


def shuffled(samplers: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Samples of each, one a round, in an order that is shuffled anew in each round.

    Args:
        samplers: each takes one time.
        rounds: number of rounds.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    order, chance = list(zip(samplers, samples, strict=True)), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for sample, times in order:
            times.append(sample())
    return samples


def is_decided(samples: Sequence[Sequence[float]]) -> bool:
    """True if further rounds could change the fastest subject only within a tie.

    It is true if each other subject's ratio to the fastest has an interval (`median_interval`)
    narrower than `TIE`, or above 1 + `TIE`.

    Args:
        samples: times of each subject, one a round, over the same rounds.
    """
    medians = [statistics.median(series) for series in samples]
    fastest = samples[medians.index(min(medians))]
    for series in samples:
        if series is not fastest:
            pairs = zip(series, fastest, strict=False)
            low, high = median_interval([us / best for us, best in pairs])
            if high - low > TIE and low < 1 + TIE:
                return False
    return True


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median by the sign test, for any distribution.

    From six values on, it misses the median with a probability of at most `MISS`. For fewer values
    it is their range.
    """
    ordered, count = sorted(values), len(values)
    rank, below = 0, 0.0  # probability that at most `rank` values are below the median
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if 2 * below > MISS:
            break
        rank += 1
    left = max(rank - 1, 0)
    return ordered[left], ordered[count - 1 - left]


def summarize(readings: Sequence[Clocks]) -> Clocks:
    """Median clocks over the rounds, the highest temperature, and every throttle reason."""
    if not readings:
        return Clocks()
    return Clocks(
        sm_mhz=round(statistics.median(c.sm_mhz for c in readings)),
        memory_mhz=round(statistics.median(c.memory_mhz for c in readings)),
        temperature_c=max(c.temperature_c for c in readings),
        power_w=round(statistics.median(c.power_w for c in readings), 1),
        throttle=tuple(sorted({reason for c in readings for reason in c.throttle})),
    )
