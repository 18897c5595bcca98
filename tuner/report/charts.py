"""Charts of the ranking, the search, the roofline, memory and counters (see `spec`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.measure.profile import SHARES, STALLS, KernelCounters
from tuner.measurement import Measurement, Status, latency
from tuner.report.analysis import Importance
from tuner.report.bounds import l2_bytes_per_us, total, works
from tuner.report.course import SearchStep
from tuner.report.explain import limits
from tuner.report.spec import (
    BAR,
    BEST,
    CROSS,
    FAILED,
    INK,
    SERIES,
    SOFT,
    NamedBars,
    Spec,
    channel,
    label,
    log_scale,
    nominal,
    parts,
    picture,
    series_of,
    short_bars,
    tips,
)
from tuner.report.subject import ReportSubject
from tuner.selection.describe import microseconds, short_name
from tuner.store.entry import Standing, is_vendor

FASTER, TIED, SLOWER = "own is faster", "a tie", "vendor is faster"
"""How two kernels compare; a tie is within their noise."""
_HERE = "\u25b8 "
"""Marks the subject's own problem among others."""


def ranking(subject: ReportSubject) -> Spec:
    """Bars of the final pass against the peers; whiskers are one standard deviation."""
    values = [
        {
            "kernel": short_name(m),
            "who": "vendor" if is_vendor(m.config) else "own",
            "us": m.latency_us,
            "low": latency(m) - (m.std_us or 0.0),
            "high": latency(m) + (m.std_us or 0.0),
            "text": f"{microseconds(m.latency_us)} us",
            "config": str(m.config),
        }
        for m in subject.ranking
    ]
    who = nominal("who", ["own", "vendor"], [SERIES[0], SERIES[7]])
    top = 1.3 * max(latency(m) for m in subject.ranking)
    title = "microseconds a call"
    x = channel("us", title, scale={"domain": [0, top], "nice": False})
    tooltip = tips(("kernel", "kernel"), ("text", "time"), ("config", "config"))
    high = channel("high", title)
    return NamedBars("kernel", [short_name(m) for m in subject.ranking]).picture(
        values,
        "Time of every kernel of the final pass, in order of rank.",
        (BAR, {"x": x, "color": who, "tooltip": tooltip}),
        (
            {"type": "rule", "color": INK, "strokeWidth": 2},
            {"x": channel("low", title), "x2": {"field": "high"}},
        ),
        (label(), {"x": high, "text": {"field": "text"}}),
    )


def progress(steps: Sequence[SearchStep]) -> Spec:
    """Every candidate in the order of time, and the best so far. At least one must have passed."""
    slowest = max(latency(s.measurement) for s in steps if s.measurement.ok)
    values = [
        {
            "number": s.number,
            # A failure has no time: it is drawn above the slowest.
            "us": s.measurement.latency_us if s.measurement.ok else 1.25 * slowest,
            "series": s.measurement.config.family,
            "text": f"{microseconds(s.measurement.latency_us)} us",
            "status": s.measurement.status.value,
            "config": str(s.measurement.config),
        }
        for s in steps
    ]
    failed = [value for value in values if value["status"] != Status.OK.value]
    best = [{"number": s.number, "us": s.best_us} for s in steps if not math.isinf(s.best_us)]
    tooltip = tips(
        ("number", "candidate"), ("text", "time"), ("status", "status"), ("config", "config")
    )
    layers: list[Spec] = [
        {
            "transform": [{"filter": "datum.status == 'ok'"}],
            "mark": {"type": "point", "filled": True, "size": 28, "opacity": 0.75},
            "encoding": {
                **series_of(sorted({s.measurement.config.family for s in steps})),
                "tooltip": tooltip,
            },
        },
        {
            "data": {"values": best},
            "mark": {
                "type": "line",
                "interpolate": "step-after",
                "color": BEST,
                "strokeWidth": 2.5,
            },
        },
    ]
    if failed:
        cross = {"type": "text", "text": CROSS, "color": FAILED}
        layers.append({"data": {"values": failed}, "mark": cross, "encoding": {"tooltip": tooltip}})
    return picture(
        values,
        "Time of every candidate in the order in which it was measured, and the best so far.",
        height=300,
        encoding={
            "x": channel("number", "candidate", scale={"nice": False}, axis={"tickCount": 8}),
            "y": channel("us", "microseconds, quick pass", **log_scale(padding=8)),
        },
        layer=layers,
    )


def importance(shares: Importance) -> Spec:
    """Bars of each parameter's share."""
    values = [
        {"parameter": name, "share": share, "text": f"{100 * share:.0f} %"}
        for name, share in shares.shares.items()
    ]
    return short_bars(
        values,
        f"Share of the spread of {shares.family}'s times that each parameter explains.",
        parts("share", "share of the spread", 1.25),
        "parameter",
        row=24,
    )


def roofline(subject: ReportSubject) -> Spec | None:
    """Every own candidate under the rooflines of the L2 and of the tensor cores; None if no
    candidate's work is known.
    """
    values = _rates(subject)
    if not values:
        return None
    peak = subject.gpu.peak_tflops * subject.problem.tensor_rate
    l2 = l2_bytes_per_us(subject.gpu) / 1e6
    ridge = peak / l2
    low = min(v["intensity"] for v in values) / 2
    high = 2 * max(ridge, max(v["intensity"] for v in values))
    roof = [(low, low * l2), (ridge, peak), (high, peak)]
    words = [
        (math.sqrt(low * ridge), math.sqrt(low * ridge) * l2, "L2"),
        (math.sqrt(ridge * high), peak, "tensor cores"),
    ]
    best = [v for v in values if v["best"]]
    names = sorted({v["series"] for v in values})
    x = channel("intensity", "FLOP a byte from or to the L2", **log_scale(domain=[low, high]))
    ring = {"type": "point", "shape": "circle", "size": 220, "strokeWidth": 2.5, "color": BEST}
    points: Spec = {
        "mark": {"type": "point", "filled": True, "size": 30, "opacity": 0.75},
        "encoding": {
            **series_of(names),
            "tooltip": tips(("text", "rate"), ("pass", "pass"), ("config", "config")),
        },
    }
    return picture(
        values,
        "Rate of every own candidate over its operations a byte from the L2, below the roofs.",
        height=320,
        encoding={"x": x, "y": channel("tflops", "TFLOP/s", **log_scale(padding=8))},
        layer=[
            {
                "data": {"values": [{"intensity": at, "tflops": rate} for at, rate in roof]},
                "mark": {"type": "line", "color": INK, "strokeWidth": 2},
            },
            {
                "data": {
                    "values": [
                        {"intensity": at, "tflops": rate, "text": text} for at, rate, text in words
                    ]
                },
                "mark": {"type": "text", "dy": -9, "color": INK},
                "encoding": {"text": {"field": "text"}},
            },
            points,
            # A layer of nothing would be a warning in the console.
            *([{"data": {"values": best}, "mark": ring}] if best else []),
        ],
    )


def _rates(subject: ReportSubject) -> list[dict[str, Any]]:
    """Own candidates whose work is known: computed operations a byte, and measured rate."""
    final = {m.config: m for m in subject.ranking}
    own = subject.entry.best_own
    values = []
    for config, m in {**{m.config: m for m in subject.quick if m.ok}, **final}.items():
        work = works(m.problem, config, subject.gpu)
        if work:
            values.append(
                {
                    "intensity": m.problem.flops / total(work, "l2_bytes"),
                    "tflops": m.tflops,
                    "series": config.family,
                    "text": f"{microseconds(m.latency_us)} us, {m.tflops:.0f} TFLOP/s",
                    "pass": "final" if m.is_final else "quick",
                    "best": own is not None and config == own.config,
                    "config": str(config),
                }
            )
    return values


def busy(subject: ReportSubject, measurement: Measurement) -> Spec:
    """Lower bound of each unit's time beside the measured time."""
    values = [
        {"unit": f"{name}: {100 * share:.0f} % ({us:.2f} us)", "share": share, "all": 1}
        for name, us in limits(subject, measurement).items()
        for share in (us / latency(measurement),)
    ]
    x = parts("share", "share of the measured time", 1.1)
    # A line through all rows would strike the names out.
    whole = {"type": "tick", "color": BEST, "size": 20, "thickness": 2}
    return NamedBars("unit", [str(value["unit"]) for value in values]).picture(
        values,
        "Share of the measured time that each unit is busy at the least.",
        ({**BAR, "color": SERIES[0]}, {"x": x}),
        (whole, {"x": {**x, "field": "all"}}),
    )


def standing(standings: Sequence[Standing], subject: ReportSubject) -> Spec:
    """Own speed as a multiple of the fastest vendor's, from 1 to either side, in order."""
    labels, common = _without_common([s.own.problem.label() for s in standings])
    outcomes = {"ahead": FASTER, "tied": TIED, "behind": SLOWER}
    values = [
        {
            "problem": (_HERE if s.own.problem == subject.problem else "") + label,
            "ratio": s.ratio,
            "even": 1,
            "who": outcomes[s.outcome],
            "text": s.text,
            "at": max(1.0, s.ratio),
            "own": f"{microseconds(s.own.latency_us)} us {short_name(s.own)}",
            "vendor": f"{microseconds(s.vendor.latency_us)} us {short_name(s.vendor)}",
        }
        for s, label in zip(standings, labels, strict=True)
    ]
    low = min(0.95, *(s.ratio for s in standings)) - 0.02
    high = max(1.05, *(s.ratio for s in standings))
    x = channel(
        "ratio",
        f"own speed over the fastest vendor's{f', {common}' if common else ''}",
        scale={"domain": [low, high + 0.35 * (high - low)], "nice": False},
        # At the top: a reader of a long list sees it first.
        axis={"tickCount": 6, "orient": "top"},
    )
    who = nominal("who", [*outcomes.values()], [SERIES[0], SERIES[4], SERIES[7]])
    tooltip = tips(("problem", "problem"), ("own", "own"), ("vendor", "fastest vendor"))
    # A line through all rows would strike the names out.
    even = {"type": "tick", "color": SOFT, "size": 20, "thickness": 1.5}
    return NamedBars("problem", [str(value["problem"]) for value in values]).picture(
        values,
        "Speed of the best own kernel as a multiple of the fastest vendor's, of every tuned "
        "problem.",
        (BAR, {"x": x, "x2": {"field": "even"}, "color": who, "tooltip": tooltip}),
        (label(), {"x": {**x, "field": "at"}, "text": {"field": "text"}}),
        (even, {"x": {**x, "field": "even"}}),
    )


def _without_common(labels: Sequence[str]) -> tuple[list[str], str]:
    """Labels without the parts that all of them share, or all but those that name another type.

    Returns:
        the labels, and the parts that were left out.
    """
    split = [label.split(",") for label in labels]
    common = [part for part in split[0] if all(part in parts for parts in split)]
    types = Counter(part for parts in split for part in parts if part.startswith("dtype="))
    if types and types.total() == len(labels):
        common += [part for part, _ in types.most_common(1) if part not in common]
    short = [",".join(part for part in parts if part not in common) for parts in split]
    return short, ",".join(common)


def memory(subject: ReportSubject) -> Spec:
    """Memory of the operands, and further memory of a kernel."""
    values = [
        {"kernel": short_name(m), "part": part, "MB": count / 1e6, "order": order}
        for m in subject.ranking
        for order, (part, count) in enumerate(
            (("operands", m.problem.bytes), ("beside them", m.workspace_bytes))
        )
    ]
    encoding = {
        "x": channel("MB", "MB (10^6 bytes)", stack="zero"),
        "order": {"field": "order"},
        "color": nominal("part", ["operands", "beside them"], [SERIES[7], SERIES[1]]),
        "tooltip": tips(("kernel", "kernel"), ("part", "part"), ("MB", "MB")),
    }
    return NamedBars("kernel", [short_name(m) for m in subject.ranking]).picture(
        values,
        "Memory of each kernel of the final pass: the operands, and what it uses beside them.",
        (BAR, encoding),
    )


def counted_shares(kernel: KernelCounters) -> Spec:
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
    description = "Share of what each unit can do, counted by the profiler."
    return _counted(values, description, parts("share", "share of what it can do", 1.2))


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
    x = channel("warps", "warps, mean", scale={"domain": [0, top or 1], "nice": False})
    description = "Warps that wait for each reason when an instruction is issued."
    return _counted(values, description, x)


def _counted(values: Sequence[Mapping[str, Any]], description: str, x: Spec) -> Spec:
    tooltip = tips(("unit", "unit"), ("text", "value"), ("says", "says"))
    limit = {"labelLimit": 190}
    return short_bars(values, description, x, "unit", limit=limit, tooltip=tooltip)
