"""Charts over the sequence length: rates, memory, and changes of the fastest kernel."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.report.lengths import Length, crossings
from tuner.report.spec import INK, Spec, channel, log_scale, nominal, picture, series_of, tips
from tuner.selection.describe import microseconds


def scaling(lengths: Sequence[Length]) -> Spec:
    """Rate of each kernel over the sequence length; crossings marked.

    Args:
        lengths: lengths of the kernels to draw (`lengths.drawn`).
    """
    marks = [
        {"seqlen": place, "text": f"{after} from here"} for place, _, after in crossings(lengths)
    ]
    spec = _over_length(
        lengths,
        "TFLOP/s",
        "Rate of the fastest of each kernel over the sequence length.",
        [length.measurement.tflops or 0.0 for length in lengths],
    )
    x = _length_axis(lengths)
    spec["layer"] += [
        {
            "data": {"values": marks},
            "mark": {"type": "rule", "color": INK, "strokeDash": [4, 4]},
            "encoding": {"x": x},
        },
        {
            "data": {"values": marks},
            "mark": {
                "type": "text",
                "align": "right",
                "baseline": "bottom",
                "angle": 90,
                "dy": -4,
                "color": INK,
            },
            "encoding": {"x": x, "y": {"value": HEIGHT - 6}, "text": {"field": "text"}},
        },
    ]
    return spec


def memory_scaling(lengths: Sequence[Length]) -> Spec:
    """Memory of each kernel's call over the sequence length, operands counted."""
    sizes = [
        (length.measurement.problem.bytes + length.measurement.workspace_bytes) / 1e6
        for length in lengths
    ]
    description = "Memory of a call over the sequence length, operands counted."
    return _over_length(lengths, "MB (10^6 bytes)", description, sizes, is_log=True)


HEIGHT = 320
"""Pixels."""
MIN_STEP = 1.5
"""Between two labels of the axis of lengths; every length has its points."""
MAX_LEVEL = 9
"""Labels that stand side by side on a narrow page; more are tilted."""


def _length_axis(lengths: Sequence[Length]) -> Spec:
    shown: list[int] = []
    for seqlen in sorted({length.seqlen for length in lengths}):
        if not shown or seqlen >= MIN_STEP * shown[-1]:
            shown.append(seqlen)
    axis = {
        "values": shown,
        "labelExpr": "datum.value % 1024 ? datum.value : datum.value / 1024 + 'k'",
        "labelOverlap": False,
        **({"labelAngle": -45} if len(shown) > MAX_LEVEL else {}),
    }
    title = "sequence length (1k = 1024)"
    return channel("seqlen", title, axis=axis, **log_scale(base=2, padding=16))


def _over_length(
    lengths: Sequence[Length],
    title: str,
    description: str,
    numbers: Sequence[float],
    *,
    is_log: bool = False,
) -> Spec:
    values = [
        {
            "seqlen": length.seqlen,
            "y": number,
            "series": length.kernel,
            "who": "vendor" if length.is_vendor else "own",
            "text": f"{microseconds(length.measurement.latency_us)} us",
            "config": str(length.measurement.config),
        }
        for length, number in zip(lengths, numbers, strict=True)
    ]
    # Own kernels first: they have the strongest colours.
    series = series_of(
        [name for _, name in sorted({(length.is_vendor, length.kernel) for length in lengths})]
    )
    x = _length_axis(lengths)
    y = channel("y", title, **(log_scale() if is_log else {}))
    tooltip = tips(
        ("seqlen", "length"),
        ("series", "kernel"),
        ("text", "time"),
        ("y", title),
        ("config", "config"),
    )
    dashes = nominal("who", ["own", "vendor"], [[1, 0], [5, 4]], "bottom")
    return picture(
        values,
        description,
        height=HEIGHT,
        layer=[
            {
                "mark": "line",
                "encoding": {"x": x, "y": y, "color": series["color"], "strokeDash": dashes},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {"x": x, "y": y, **series, "tooltip": tooltip},
            },
        ],
    )
