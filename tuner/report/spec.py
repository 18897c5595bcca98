"""The parts of which the pictures' Vega-Lite specifications are made.

Colours are CSS variables (`palette`), so that one picture serves light and dark; what a colour
says is said by a shape, a position or a word too. Widths follow the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Spec = dict[str, Any]

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
_WORDS = {
    "labelColor": "var(--ink)",
    "titleColor": "var(--soft)",
    "labelFont": FONT,
    "titleFont": FONT,
    "labelFontSize": 12,
}
#: Vega-Lite's configuration of every picture.
CONFIG: Mapping[str, Any] = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        **_WORDS,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridColor": "var(--line)",
        "domainColor": "var(--soft)",
        "tickColor": "var(--soft)",
    },
    "legend": _WORDS,
    "text": {"fontSize": 12},
}

SERIES = tuple(f"var(--series-{number})" for number in range(1, 9))
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
CROSS = "\u2715"
INK, BEST, FAILED = "var(--ink)", "var(--best)", "var(--failed)"


def picture(values: Sequence[Mapping[str, Any]], description: str, **rest: Any) -> Spec:
    """A picture as wide as its place."""
    return {
        "description": description,
        "width": "container",
        "data": {"values": list(values)},
        **rest,
    }


def channel(field: str, title: str, kind: str = "quantitative", **rest: Any) -> Spec:
    """A field on an axis."""
    return {"field": field, "type": kind, "title": title, **rest}


def log_scale(**rest: Any) -> Spec:
    """For `channel`: a logarithmic axis that ends where the data does."""
    return {"scale": {"type": "log", "nice": False, **rest}}


def series_of(names: Sequence[str]) -> Spec:
    """Colour and shape of each name."""
    domain = list(names)
    key = {"orient": "top", "title": None, "columns": 2, "labelLimit": 220, "columnPadding": 32}
    return {
        "color": {
            "field": "series",
            "type": "nominal",
            "scale": {
                "domain": domain,
                "range": [SERIES[i % len(SERIES)] for i in range(len(domain))],
            },
            "legend": key,
        },
        "shape": {
            "field": "series",
            "type": "nominal",
            "scale": {
                "domain": domain,
                # One further each time the colours begin again: no two names look the same.
                "range": [SHAPES[(i + i // len(SERIES)) % len(SHAPES)] for i in range(len(domain))],
            },
            "legend": key,
        },
    }


def tips(*fields: tuple[str, str]) -> list[Spec]:
    """What is shown of a mark under the pointer: (field, title)."""
    return [{"field": field, "title": title} for field, title in fields]
