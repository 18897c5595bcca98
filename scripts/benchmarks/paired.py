"""Ratios of two ways that were timed in the same rounds, with their uncertainty.

Host-bound passes vary by tens of percent from one to the next. Each round gives one ratio of two
passes that ran next to each other. Their median is stated with its 95 % interval by order
statistics, which assumes nothing about the distribution. A ratio whose interval contains 1 or
overlaps the control's, PyTorch against itself, is a tie.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

CONFIDENCE = 0.95
TIE, FASTER, SLOWER = "tie", "faster", "slower"


class Ratio(NamedTuple):
    """Median of paired ratios, and the interval that holds the true median."""

    median: float
    low: float
    high: float

    def verdict(self, control: Ratio) -> str:
        """`FASTER` or `SLOWER` than the reference, or `TIE`.

        Args:
            control: the reference's second pass over its first, in the same rounds.
        """
        if self.low > max(1.0, control.high):
            return FASTER
        return SLOWER if self.high < min(1.0, control.low) else TIE


def ratio(reference: Sequence[float], times: Sequence[float]) -> Ratio:
    """The reference's times over others of the same rounds.

    With fewer than six rounds the interval is from the smallest ratio to the largest. It holds
    the true median less often than `CONFIDENCE` says.

    Args:
        reference: seconds of each round, at least one.
        times: as many seconds, in the same order.
    """
    found = sorted(one / other for one, other in zip(reference, times, strict=True))
    skipped = _skipped(len(found))
    return Ratio(statistics.median(found), found[skipped], found[-1 - skipped])


def _skipped(count: int) -> int:
    """Values to skip at either end of a sorted sample, so that the rest holds the median with
    `CONFIDENCE`; 0 for fewer than six values, which cannot.
    """
    outside = list(accumulate(2 * math.comb(count, one) * 0.5**count for one in range(count)))
    return max(0, bisect_right(outside, 1 - CONFIDENCE) - 1)
