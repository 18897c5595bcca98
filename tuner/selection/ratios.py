"""Measured ratios of PyTorch's times to own kernels', which correct expected ones.

Time models miss some calls by more than an own kernel gains there. So calls of models were timed.
The ratio expected at a call is a mean of those measured near it and of the models' own. The weight
of a measured one falls to 1/e over `WIDTH_OCTAVES`. The models' own weighs as a measurement at the
call, and less where its error is above `SCATTER`. Means are those of logarithms.

An own kernel answers where the mean is `LEAD` deviations of its error above 0. There a normal
error's gains are worth as much as its losses, which count 4.6 times: the expected loss decides, not
the expected time.

At 869 calls (``corrections.jsonl.gz`` and ``ratios.jsonl.gz`` of ``tests/assets/fits``), each by
other models' ratios, 10 are below 0.97 of PyTorch in place of 57. Own kernels answer 566 in place
of 677. The mean over PyTorch is 1.252 in place of 1.251 (replayed).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

WIDTH_OCTAVES, ROWS_OCTAVE = 0.5, 0.7
"""Distance over which a weight falls to 1/e; and that of an octave of the first size, the rows,
with which both times grow."""
SCATTER = 0.05
"""Deviation of logarithms that are measured at calls of one place."""
LEAD = 0.6
MIN_ERROR = 0.01
"""Least deviation of an expected logarithm: that of the measurements."""
SIZES = 3
"""Sizes that ratios are told apart by, the first of `Domain.axes`: work follows from the others."""
REACH = 3
"""Widths beyond which a measured call does not count."""
NORMAL_P90 = 1.645
"""Ninth decile of a normal error's size over its deviation."""


class Ratios(NamedTuple):
    """Ratios at the sizes of calls, in the order of the second size, which differs most."""

    places: tuple[tuple[float, float, float], ...]
    """Second, first and third size of each call, in octaves; an absent third size is 0."""
    logs: tuple[float, ...]
    """Natural logarithms of PyTorch's time over the own kernel's."""
    is_elsewhere: bool = False
    """True if they were measured on another GPU: there they only take calls from own kernels."""
    width: float = WIDTH_OCTAVES
    axes: int = SIZES
    """Number of sizes."""

    @classmethod
    def of(
        cls, measured: Iterable[tuple[Sequence[int], float]], width: float = WIDTH_OCTAVES
    ) -> Ratios:
        """Ratios from sizes and PyTorch's time over the own kernel's."""
        calls = list(measured)
        found = sorted((_place(sizes), math.log(ratio)) for sizes, ratio in calls)
        axes = len(calls[0][0][:SIZES]) if calls else SIZES
        places, logs = tuple(place for place, _ in found), tuple(log for _, log in found)
        return cls(places, logs, width=width, axes=axes)

    @property
    def prior(self) -> tuple[float, float]:
        """Expected logarithm and its ninth decile of errors, of kernels without a time model."""
        return fmean(self.logs), NORMAL_P90 * pstdev(self.logs)

    @property
    def elsewhere(self) -> Ratios:
        """They on another GPU than the measured one."""
        return self._replace(is_elsewhere=True)

    def to_json(self) -> list[list[float]]:
        """Sizes and ratio of each call."""
        calls = []
        for (second, first, third), log in zip(self.places, self.logs, strict=True):
            octaves = first / ROWS_OCTAVE, second, third
            sizes: list[float] = [round(2**one) for one in octaves[: self.axes]]
            calls.append([*sizes, round(math.exp(log), 3)])
        return sorted(calls)

    def lead(self, sizes: Sequence[int], expected: float, p90_error: float) -> float:
        """Logarithm by which an own kernel may be slower than expected, and still answers; below 0
        where PyTorch's answers.

        Args:
            sizes: the call's.
            expected: logarithm of PyTorch's expected time over the own kernel's.
            p90_error: the own kernel's `Candidate.p90_error`.
        """
        mean, deviation = self.near(sizes, expected, p90_error)
        return mean - LEAD * max(deviation, MIN_ERROR)

    def near(self, sizes: Sequence[int], expected: float, p90_error: float) -> tuple[float, float]:
        """Mean and deviation of the logarithm at a call; arguments as of `lead`. A selection waits
        for it: it is kept short.
        """
        second, first, third = _place(sizes)
        reach, scale = REACH * self.width, -1 / self.width
        start = bisect_left(self.places, (second - reach,))
        end = bisect_left(self.places, (second + reach,))
        error = p90_error / NORMAL_P90
        weight = (SCATTER / max(error, SCATTER)) ** 2
        total, squares = weight * expected, weight * (error * error + expected * expected)
        furthest = reach * reach
        for (b, a, c), log in zip(self.places[start:end], self.logs[start:end], strict=True):
            away = (a - first) ** 2 + (b - second) ** 2 + (c - third) ** 2
            if away < furthest:
                near = math.exp(math.sqrt(away) * scale)
                weight += near
                total += near * log
                squares += near * log * log
        mean = total / weight
        return mean, math.sqrt(max(squares / weight - mean * mean, 0.0))


def _place(sizes: Sequence[int]) -> tuple[float, float, float]:
    first, second, *others = map(math.log2, sizes[:SIZES])
    return second, ROWS_OCTAVE * first, others[0] if others else 0.0
