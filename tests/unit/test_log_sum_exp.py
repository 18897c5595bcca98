"""Judgement of a log-sum-exp."""

from __future__ import annotations

from array import array

import pytest

from tuner.measure.log_sum_exp import judge_lse, lse_of
from tuner.measurement import Status
from tuner.problem import AttentionProblem


class TestLogSumExp:
    PROBLEM = AttentionProblem.parse("S=2,D=8,H=1")

    def test_what_is_right(self) -> None:
        wanted = lse_of(self.PROBLEM, [0.0, 1.0, -float("inf"), 0.0])
        assert wanted == [0.0, -float("inf")]
        assert judge_lse(array("f", [0.0005, -float("inf")]), wanted).status is Status.OK

    @pytest.mark.parametrize("wrong", [0.1, float("nan"), float("inf")])
    def test_what_is_wrong(self, wrong: float) -> None:
        verdict = judge_lse(array("f", [0.0, wrong]), [0.0, 0.0])
        assert verdict.status is Status.WRONG_RESULT and "first row 1" in verdict.log

    def test_a_row_without_keys_is_not_finite(self) -> None:
        assert judge_lse([0.0], [-float("inf")]).status is Status.WRONG_RESULT

    def test_packed_sequences_lie_head_after_head(self) -> None:
        problem = AttentionProblem.parse("B=2,S=4,D=8,H=2,varlen=1")
        first, second = problem.lengths_q
        statistics = [
            value
            for sequence, length in enumerate((first, second))
            for head in range(2)
            for row in range(length)
            for value in (100.0 * head + 10.0 * sequence + row, 1.0)
        ]
        wanted = [
            100.0 * head + 10.0 * sequence + row
            for head in range(2)
            for sequence, length in enumerate((first, second))
            for row in range(length)
        ]
        assert lse_of(problem, statistics) == wanted
