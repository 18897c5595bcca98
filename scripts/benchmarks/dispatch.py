"""Cost of a call of `tuner.attention` beside its kernel, and of what stands around it.

Goals stand beside their figures; nothing fails for being slow. Own kernels serve where they are
built: ``scripts/tuner build`` makes those of the shipped decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import dispatch_calls, dispatch_first, dispatch_select, rows
from benchmarks.harness import Bench, Preset, Row
from tuner.cli import Parser
from tuner.selection.portfolio import shipped


def figures(row: Row) -> list[tuple[str, str, str]]:
    """Names, values and goals of a row."""
    goals = row.get("goals", {})
    return [
        (name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}", goals.get(name, ""))
        for name, value in row.get("figures", {}).items()
    ]


def line(row: Row) -> str:
    """A case's figures, its times, and what answered its calls."""
    parts = [f"{name} {value}" + f" ({goal})" * bool(goal) for name, value, goal in figures(row)]
    parts += [f"{name} {us:.2f} us" for name, us in row.get("us", {}).items()]
    if "dispatched" in row:
        parts.append(f"{row['dispatched']:.1%} of the calls by the dispatcher")
    for name, answers in row.get("answered", {}).items():
        reasons = [f"{count} {reason}" for reason, count in answers["fallbacks"].items()]
        parts.append("; ".join([f"{name}: {answers['hits']} hits", *reasons]))
    parts += [f"{name}: logits {error:.1e} away" for name, error in row.get("errors", {}).items()]
    return f"{row['case']}: {', '.join(parts)}"


def table(every: Sequence[Row]) -> list[str]:
    """A Markdown row for each figure, with its goal and the times beside it."""
    lines = [("case", "figure", "here", "goal", "us a call")]
    for row in every:
        us = ", ".join(f"{name} {us:.2f}" for name, us in row.get("us", {}).items())
        for name, value, goal in figures(row) or [("", "", "")]:
            lines.append((row["case"], name, value, goal, us))
    return rows.markdown(lines)


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--package", type=Path, metavar="FOLDER", help="first-call: an unpacked wheel of kernels")
    add("--gpu", help="select: for this GPU, as H100 (default: each portfolio's own)")


BENCH = Bench(
    "dispatch",
    __doc__,
    {
        "calls": Preset(
            "a call's time on the host and in an eager loop",
            lambda _: dispatch_calls.CASES,
            dispatch_calls.measure,
            line,
            table,
            smoke=dispatch_calls.CASES[1],
        ),
        "first-call": Preset(
            "the first call after import, in fresh processes",
            lambda _: dispatch_first.CASES,
            dispatch_first.measure,
            line,
            table,
            limit_s=600,
        ),
        "select": Preset(
            "CPU time of choosing a portfolio's kernel for a new shape",
            dispatch_select.cases,
            dispatch_select.measure,
            line,
            table,
            smoke=dispatch_select.Case(shipped()[0], min(shipped()[0].domains), 10),
            needs_gpu=False,
        ),
    },
    _options,
)
