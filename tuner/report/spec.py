"""The parts of which the pictures' Vega-Lite specifications are made.

Colours are the page's CSS variables, so that one picture serves light and dark; what a colour
says is said by a shape, a position or a word too. Widths follow the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Spec = dict[str, Any]

#: The page's colours. Series: Okabe and Ito's palette, distinct for colour-blind readers too.
LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "ink": "#1a1a1a",
    "soft": "#5a5a5a",
    "line": "#d9d9d9",
    "panel": "#f6f6f4",
    "best": "#d55e00",
    "failed": "#b3261e",
    "series-1": "#0072b2",
    "series-2": "#e69f00",
    "series-3": "#009e73",
    "series-4": "#cc79a7",
    "series-5": "#56b4e9",
    "series-6": "#d55e00",
    "series-7": "#b59f00",
    "series-8": "#8a8a8a",
}
DARK: Mapping[str, str] = {
    "paper": "#16181b",
    "ink": "#ececec",
    "soft": "#a8a8a8",
    "line": "#3a3d42",
    "panel": "#1e2125",
    "best": "#ff8c3b",
    "failed": "#ff8a80",
    "series-1": "#4aa8e0",
    "series-2": "#f0b429",
    "series-3": "#2bc59b",
    "series-4": "#e39ac4",
    "series-5": "#8fd0f5",
    "series-6": "#f07a2a",
    "series-7": "#e8dc4a",
    "series-8": "#9a9a9a",
}
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


def colours() -> str:
    """The colours as CSS variables, after the reader's choice of light or dark."""
    light, dark = (
        " ".join(f"--{name}: {value};" for name, value in palette.items())
        for palette in (LIGHT, DARK)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


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
    key = {"orient": "top", "title": None, "columns": 2, "labelLimit": 220}
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
                "range": [SHAPES[i % len(SHAPES)] for i in range(len(domain))],
            },
            "legend": key,
        },
    }


def tips(*fields: tuple[str, str]) -> list[Spec]:
    """What is shown of a mark under the pointer: (field, title)."""
    return [{"field": field, "title": title} for field, title in fields]
