"""Rows of text on a model's answers: its calls by their share of the time, and its steps."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.selection.answering import AnswerRow, ModelAnswers, Rival
from tuner.selection.describe import cut, microseconds

SHOWN = 0.95
"""Share of the calls' time whose calls are listed, the longest first."""
WAYS = ("PyTorch", "peer")
"""Rivals that a step is compared with (`ModelAnswers.gain`)."""
CALLS = ("share", "call", "answered by", "us", "PyTorch, engine", "fastest peer", "source")
STEPS = ("step", "tokens/s before", "tokens/s", "gain", "over the fastest")
MAX_LABEL = 90
"""Characters of a call's label."""
NOTES = (
    "PyTorch, engine: the kernel that computes the call without this package.",
    "Tokens a second and gains are of the listed calls' times only, not of the whole step. A call "
    "without a rival's time counts with its own.",
    "Predicted times are expected ones. Peers have times where they, or ratios near the call, were "
    "measured.",
)


def shown(rows: Sequence[AnswerRow]) -> tuple[Sequence[AnswerRow], Sequence[AnswerRow]]:
    """Rows up to `SHOWN` of the time, and the others."""
    total = 0.0
    for count, row in enumerate(rows, 1):
        total += row.share
        if total >= SHOWN:
            return rows[:count], rows[count:]
    return rows, []


def calls(rows: Sequence[AnswerRow]) -> list[tuple[str, ...]]:
    """Cells of each call, under `CALLS`."""

    def rival(peer: Rival | None) -> str:
        return "-" if peer is None else f"{microseconds(peer.us)} {peer.name}"

    return [
        (
            f"{100 * row.share:.1f} %",
            cut(f"{row.answer.problem.op} {row.answer.problem.label()}", MAX_LABEL),
            row.answer.by,
            microseconds(row.answer.us),
            rival(row.answer.pytorch),
            rival(row.answer.peer),
            row.answer.source,
        )
        for row in rows
    ]


def others_text(rows: Sequence[AnswerRow]) -> str:
    """One line on the calls that are not listed; empty without any."""
    share = 100 * sum(row.share for row in rows)
    return f"{len(rows)} further calls have {share:.1f} % of the time" if rows else ""


def steps(answers: ModelAnswers) -> list[tuple[str, ...]]:
    """Cells of each step, under `STEPS`, and of their mean."""

    def rate(tokens: int, us: float) -> str:
        return f"{1e6 * tokens / us:,.0f}" if tokens and us else "-"

    rows = []
    for step in answers.steps:
        before, now = (sum(answers.times(step, way).values()) for way in ("PyTorch", ""))
        gains = (f"{answers.gain(step, way):.2f}x" for way in WAYS)
        rows.append((step.label, rate(step.tokens, before), rate(step.tokens, now), *gains))
    return [*rows, ("mean", "", "", *(f"{answers.mean_gain(way):.2f}x" for way in WAYS))]
