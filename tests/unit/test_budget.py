"""Expected time of a final pass, and when a search must end for it."""

from __future__ import annotations

import pytest

from tuner.measure.stopwatch import PASS_LIMIT_US
from tuner.tuning.budget import Budget
from tuner.tuning.finals import brief_rounds


def test_a_final_pass_of_quick_calls_is_mostly_checks() -> None:
    assert Budget(None, 0.0).final_s([12.0] * 4, 20) == pytest.approx(2 + 4 * (0.3 + 20 * 0.004))
    known = Budget(None, 0.0, pass_s=20.0)  # nearly all of it for references
    assert known.final_s([12.0] * 4, 20) == pytest.approx(20 + 2 + 4 * (0.3 + 20 * 0.004))


def test_a_final_pass_of_long_calls_is_no_longer_than_its_limit() -> None:
    budget = Budget(None, 0.0)
    seconds = [budget.final_s([10_000.0] * 12, rounds) for rounds in (20, 40)]
    assert seconds[0] == seconds[1] == pytest.approx(2 + 12 * 0.3 + 1e-6 * PASS_LIMIT_US)
    assert budget.final_s([100_000.0] * 12, 20) > 60, "it has some rounds, however long they are"


def test_a_search_ends_early_enough_for_the_final_pass() -> None:
    budget = Budget(60.0, 100.0)
    assert budget.search_deadline([12.0], 20) == pytest.approx(160 - budget.final_s([12.0], 20))
    assert budget.search_deadline([100_000.0] * 12, 20) == 130, "half of the limit is the search's"
    assert Budget(None, 0.0).search_deadline([12.0], 20) is None


def test_a_brief_pass_of_long_calls_has_few_rounds() -> None:
    assert brief_rounds([12.0, 15.0]) == brief_rounds([500.0]) == brief_rounds([]) == 20
    assert brief_rounds([8000.0]) == 7
    assert brief_rounds([8000.0, 9000.0]) == brief_rounds([1e6]) == 3
