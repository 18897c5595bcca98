"""Attention's log-sum-exp: size, reference and error limit. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.errors import BenchmarkError
from tuner.measure.tolerance import E4M3_DEVIATIONS, E4M3_MARGIN, E4M3_SUM, Verdict
from tuner.measurement import Status
from tuner.problem import E4M3, AttentionProblem, Problem

ABSOLUTE, RELATIVE = 1e-3, 1e-5
"""Limit of a value's error, ``ABSOLUTE + RELATIVE * |reference|``, for a log-sum-exp computed in
fp32."""


def score_rows(problem: Problem) -> int:
    """Number of rows of attention's scores, with each sequence as long as the longest."""
    if not isinstance(problem, AttentionProblem):
        raise BenchmarkError(f"'{problem.op}' has no log-sum-exp")
    return problem.batch * problem.heads_q * problem.seqlen_q


def lse_bytes(problem: Problem) -> int:
    """Bytes of attention's log-sum-exp: fp32 (B, H, SQ), or (H, total_q) of packed sequences.

    Raises:
        BenchmarkError: for another operation.
    """
    rows = score_rows(problem)
    if isinstance(problem, AttentionProblem) and problem.is_packed:
        rows = problem.heads_q * problem.total_q
    return 4 * rows


def tops_of(problem: AttentionProblem, statistics: Sequence[float]) -> list[float]:
    """Largest score of each row, in the order of the log-sum-exp's memory.

    Args:
        problem: attention over packed or equally long sequences.
        statistics: maximum and sum of exponentials of each row, by sequence, then head.
    """
    return _ordered(problem, list(statistics[::2]))


def lse_of(problem: AttentionProblem, statistics: Sequence[float]) -> list[float]:
    """Reference log-sum-exp of a problem, in the order of its memory; arguments as of `tops_of`."""
    tops, totals = statistics[::2], statistics[1::2]
    values = [
        top + math.log(total) if total else -math.inf
        for top, total in zip(tops, totals, strict=True)
    ]
    return _ordered(problem, values)


def _ordered(problem: AttentionProblem, values: list[float]) -> list[float]:
    """Values by sequence, then head, in the order of the log-sum-exp's memory."""
    if not problem.is_packed:
        return values
    heads: list[list[float]] = [[] for _ in range(problem.heads_q)]
    start = 0
    for rows in problem.lengths_q:
        for head in heads:
            head += values[start : start + rows]
            start += rows
    return [value for head in heads for value in head]


def lost_of(
    problem: AttentionProblem, deviation: float, tops: Sequence[float]
) -> Sequence[float] | None:
    """Limits of the errors of scores that tensor cores sum in e4m3, one a row; None for other
    types.

    `E4M3_SUM` is relative to the sum. A row's log-sum-exp is that of its largest scores, which are
    several deviations of all scores, and far more where a key dominates. Products of one sign are
    all cut off to one side. Source: `tests/unit/test_e4m3_arithmetic.py`.

    Args:
        problem: problem of the scores.
        deviation: standard deviation of its scaled scores.
        tops: largest scaled score of each row.
    """
    if problem.dtype != E4M3:
        return None
    part = E4M3_DEVIATIONS * E4M3_MARGIN * E4M3_SUM * math.sqrt(problem.head_dim)
    return [part * max(deviation, abs(top)) for top in tops]


def judge_lse(
    computed: Sequence[float], expected: Sequence[float], lost: Sequence[float] | None = None
) -> Verdict:
    """Compare a log-sum-exp with its reference, which is -inf for a query without visible keys.

    Args:
        computed: values of the kernel.
        expected: the reference.
        lost: as of `lost_of`.
    """
    rows = zip(computed, expected, lost or [0.0] * len(expected), strict=True)
    wrong = [
        row
        for row, (value, reference, part) in enumerate(rows)
        if value != reference
        and not abs(value - reference) <= ABSOLUTE + part + RELATIVE * abs(reference) < math.inf
    ]
    if not wrong:
        return Verdict(Status.OK)
    text = f"log-sum-exp: {len(wrong)} of {len(expected)} rows are wrong, first row {wrong[0]}: "
    text += f"{computed[wrong[0]]:.6g}, not {expected[wrong[0]]:.6g}"
    return Verdict(Status.WRONG_RESULT, None, text)
