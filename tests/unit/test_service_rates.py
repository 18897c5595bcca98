"""Rate limits of the service."""

from __future__ import annotations

import pytest

from tuner.service import rates
from tuner.service.rates import RateLimit


def test_a_bucket_refills_steadily() -> None:
    now = [100.0]
    limit = RateLimit(10, 60, clock=lambda: now[0])
    assert [limit.take() for _ in range(10)] == [0.0] * 10
    assert limit.take() == pytest.approx(6)
    assert limit.take(count=10) == pytest.approx(60)  # what is refused costs nothing
    now[0] += 6
    assert limit.take() == 0
    assert limit.take() == pytest.approx(6)
    now[0] += 3600
    assert limit.take(count=10) == 0
    assert limit.take() == pytest.approx(6)


def test_keys_have_buckets_of_their_own_and_the_longest_unused_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "MAX_KEYS", 2)
    limit = RateLimit(1, 60, clock=lambda: 0.0)
    assert [limit.take(key) > 0 for key in "abaab"] == [False, False, True, True, True]
    assert limit.take("c") == 0  # in place of a
    assert [limit.take(key) > 0 for key in "bca"] == [True, True, False]
