"""In which order finalists are timed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tuner.measure.rounds import RoundOrder


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10])
def test_contenders_follow_one_another_equally_often(count: int) -> None:
    round_order = RoundOrder([100.0 + i for i in range(count)], [4] * count, 4)
    rounds = count * (2 if count % 2 else 1)
    for _ in range(3):
        orders = [next(round_order.orders) for _ in range(rounds)]
        assert all(sorted(order) == list(range(count)) for order in orders)
        follow = Counter(pair for order in orders for pair in itertools.pairwise(order))
        assert set(follow.values()) <= {rounds // count} and len(follow) == count * (count - 1)
    assert round_order.settling(0) == 0


def test_the_slow_come_last_and_leave_the_next_round_no_clocks() -> None:
    # Of two calls each: 500, 520, 1000 and 3000 us a call.
    round_order = RoundOrder([1000.0, 6000.0, 1040.0, 2000.0], [2, 2, 2, 2], 4)
    orders = [next(round_order.orders) for _ in range(8)]
    assert {tuple(order[2:]) for order in orders} == {(1, 3)}
    assert Counter(order[0] for order in orders) == {0: 4, 2: 4}
    assert round_order.settling(0) == 32  # 4 bursts of each of the slow take 32 ms
    assert RoundOrder([1000.0, 60_000.0], [2, 2], 4).settling(0) == 40
