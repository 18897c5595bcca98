"""Page of a model: who answers its calls, and the expected gain of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuner.hardware import Gpu
from tuner.report.sections import Figure, Section, TableSection
from tuner.report.spec import BAR, INK, SERIES, SOFT, NamedBars, Spec, channel, label, nominal, tips
from tuner.selection import model_table
from tuner.selection.answering import ENGINE, AnswerRow, ModelAnswers
from tuner.selection.describe import microseconds

MAX_DRAWN = 20
"""Calls in the picture, the longest; the table has the others."""
OWN, PYTORCH, ENGINES = "own kernel", "PyTorch's", "the engine's"


def verdict(name: str, answers: ModelAnswers, gpu: Gpu) -> str:
    """The first sentence of the page."""
    over, fastest = (answers.mean_gain(way) for way in model_table.WAYS)
    return (
        f"{name} on {gpu.name}: expected speed of its calls {over:.2f}x that by PyTorch or the "
        f"engine, {fastest:.2f}x that by the fastest peer."
    )


def facts(path: Path, found: ModelAnswers, gpu: Gpu) -> list[tuple[str, str]]:
    """Names and texts at the top of the page."""
    answers = found.answers.values()
    own = sum(answer.config is not None for answer in answers)
    measured = sum(answer.source == "measured" for answer in answers)
    return [
        ("model", str(path)),
        ("GPU", gpu.name),
        ("calls", f"{len(answers)} kinds, {own} by own kernels, {measured} with measured times"),
        ("steps", str(len(found.steps))),
    ]


def sections(answers: ModelAnswers) -> list[Section]:
    """The parts of the page, in order."""
    rows, others = model_table.shown(answers.rows())
    drawn = rows[:MAX_DRAWN]
    share = 100 * sum(row.share for row in drawn)
    words = [f"The {len(drawn)} longest calls have {share:.0f} % of the time."]
    lines = [f"{text}."] if (text := model_table.others_text(others)) else []
    return [
        Section(
            "steps",
            "Steps",
            model_table.NOTES[1:],
            [Figure("steps", "Expected gain of each step", gains(answers))],
            TableSection(model_table.STEPS, model_table.steps(answers)),
            is_table_open=True,
        ),
        Section(
            "calls",
            "Calls by their share of the time",
            [*words, *lines, model_table.NOTES[0]],
            [Figure("calls", "Share of the time, and who answers", calls(drawn))],
            TableSection(model_table.CALLS, model_table.calls(rows)),
            is_table_open=True,
        ),
    ]


def gains(answers: ModelAnswers) -> Spec:
    """Bars from 1 to the gain of each step."""
    values = [
        {
            "step": step.label,
            "gain": over,
            "even": 1,
            "at": max(1.0, over),
            "text": f"{over:.2f}x, {answers.gain(step, 'peer'):.2f}x the fastest",
        }
        for step in answers.steps
        for over in (answers.gain(step, "PyTorch"),)
    ]
    low, high = (bound(float(str(v["gain"])) for v in values) for bound in (min, max))
    low, high = min(1.0, low), max(1.02, high)
    domain = [low, high + 0.9 * (high - low)]
    title = "expected speed over PyTorch's or the engine's"
    x = channel("gain", title, scale={"domain": domain, "nice": False}, axis={"tickCount": 5})
    even = {"type": "tick", "color": SOFT, "size": 20, "thickness": 1.5}
    return NamedBars("step", [str(value["step"]) for value in values]).picture(
        values,
        "Expected speed of each step's calls as a multiple of PyTorch's or the engine's.",
        ({**BAR, "color": SERIES[0]}, {"x": x, "x2": {"field": "even"}}),
        (label(), {"x": {**x, "field": "at"}, "text": {"field": "text"}}),
        (even, {"x": {**x, "field": "even"}}),
    )


def calls(rows: Sequence[AnswerRow]) -> Spec:
    """Bars of the calls' shares of the time, in the colour of the kernel's owner."""
    values = [
        {
            "call": row.answer.problem.label(),
            "share": row.share,
            "who": _owner(row),
            "text": f"{100 * row.share:.1f} %, {_gain(row)}",
            "us": f"{microseconds(row.answer.us)} us by {row.answer.by}",
        }
        for row in rows
    ]
    most = max((row.share for row in rows), default=1.0)
    scale = {"domain": [0, 1.6 * most], "nice": False}
    x = channel("share", "share of the time", scale=scale, axis={"format": "%", "tickCount": 4})
    owners = [owner for owner in (OWN, PYTORCH, ENGINES) if any(v["who"] == owner for v in values)]
    colors = {OWN: SERIES[0], PYTORCH: SERIES[7], ENGINES: SERIES[4]}
    who = nominal("who", owners, [colors[owner] for owner in owners])
    tooltip = tips(("call", "call"), ("us", "time"), ("text", "share, gain"))
    return NamedBars("call", [str(value["call"]) for value in values]).picture(
        values,
        "Share of the time of the longest calls, and whose kernel answers each.",
        (BAR, {"x": x, "color": who, "tooltip": tooltip}),
        (label(color=INK), {"x": x, "text": {"field": "text"}}),
    )


def _owner(row: AnswerRow) -> str:
    if row.answer.config is not None:
        return OWN
    return ENGINES if row.answer.by == ENGINE else PYTORCH


def _gain(row: AnswerRow) -> str:
    rival, us = row.answer.pytorch, row.answer.us
    return f"{rival.us / us:.2f}x" if rival and us else "time not known"
