"""Paired ratios: intervals by order statistics, and ties."""

from __future__ import annotations

import pytest

from benchmarks.paired import FASTER, SLOWER, TIE, Ratio, ratio

CONTROL = Ratio(1.0, 0.97, 1.04)


def test_ratios_are_of_the_same_round() -> None:
    reference = [float(one) for one in range(1, 12)]
    found = ratio(reference, [one / 1.5 for one in reference])
    assert found == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize(("count", "skipped"), [(1, 0), (5, 0), (6, 0), (9, 1), (25, 7), (60, 21)])
def test_the_interval_is_that_of_a_sign_test(count: int, skipped: int) -> None:
    """Known ranks of 95 % intervals for medians."""
    found = ratio([float(one) for one in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (1 + skipped, count - skipped)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Ratio(0.95, 0.9, 1.01), TIE),
        (Ratio(0.95, 0.93, 0.98), TIE),
        (Ratio(0.95, 0.93, 0.96), SLOWER),
        (Ratio(1.06, 1.03, 1.1), TIE),
        (Ratio(1.06, 1.05, 1.1), FASTER),
    ],
)
def test_what_the_control_reaches_is_a_tie(found: Ratio, verdict: str) -> None:
    assert found.verdict(CONTROL) == verdict


@pytest.mark.parametrize(("low", "verdict"), [(0.999, TIE), (1.001, FASTER)])
def test_an_interval_around_one_is_a_tie(low: float, verdict: str) -> None:
    assert Ratio(1.01, low, 1.02).verdict(Ratio(0.98, 0.97, 0.99)) == verdict
