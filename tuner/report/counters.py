"""Charts of the counters of `tuner profile` (see `spec`)."""

from __future__ import annotations

from typing import Any

from tuner.measure.profile import SHARES, STALLS, KernelCounters
from tuner.report.spec import INK, SERIES, Spec, channel, picture, tips


def shares(kernel: KernelCounters) -> Spec:
    """Utilisation of each unit by the profiler, relative to its peak."""
    values = [
        {
            "unit": counter.label,
            "share": value.value / 100,
            "text": f"{value.value:.0f} %",
            "says": counter.says,
        }
        for counter, value in kernel.shown(SHARES)
    ]
    return _bars(
        values,
        "unit",
        channel(
            "share",
            "share of what it can do",
            axis={"format": "%", "tickCount": 5},
            scale={"domain": [0, 1.2], "nice": False},
        ),
        "Share of what each unit can do, counted by the profiler.",
    )


def stalls(kernel: KernelCounters) -> Spec:
    """Stall reasons of warps, the most frequent first."""
    shown = sorted(kernel.shown(STALLS), key=lambda item: -item[1].value)
    values = [
        {
            "unit": counter.label,
            "warps": value.value,
            "text": f"{value.value:.2f}",
            "says": counter.says,
        }
        for counter, value in shown
    ]
    top = 1.25 * max(value.value for _, value in shown)
    return _bars(
        values,
        "unit",
        channel("warps", "warps, mean", scale={"domain": [0, top or 1], "nice": False}),
        "Warps that wait for each reason when an instruction is issued.",
    )


def _bars(values: list[dict[str, Any]], name: str, x: Spec, description: str) -> Spec:
    """Horizontal bars with their numbers beside them."""
    return picture(
        values,
        description,
        height=26 * len(values),
        encoding={
            "y": channel(name, "", "nominal", sort=None, axis={"title": None, "labelLimit": 190}),
            "x": x,
            "tooltip": tips((name, name), ("text", "value"), ("says", "says")),
        },
        layer=[
            {"mark": {"type": "bar", "height": 14, "color": SERIES[0]}},
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "color": INK},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    )
