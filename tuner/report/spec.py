"""The parts of which the pictures' Vega-Lite specifications are made.

Colours are CSS variables (`palette`), so that one picture serves light and dark. A shape, a
position or a word repeats the meaning of each colour. Widths follow the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
_WORDS = {
    "labelColor": "var(--ink)",
    "titleColor": "var(--soft)",
    "labelFont": FONT,
    "titleFont": FONT,
    "labelFontSize": 12,
    "labelLimit": 0,  # whole, however long
}
LEGEND_COLUMNS = 2
"""Columns of a legend on a wide page; ``figures.js`` takes one on a narrow page."""
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
    "legend": {**_WORDS, "columns": LEGEND_COLUMNS, "columnPadding": 32},
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
INK, SOFT, BEST, FAILED = "var(--ink)", "var(--soft)", "var(--best)", "var(--failed)"


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
    """Colour and shape of each name; no two share a colour.

    Raises:
        ValueError: when there are more names than colours.
    """
    if len(names) > len(SERIES):
        raise ValueError(f"{len(names)} series (allowed: {len(SERIES)})")
    return {
        "color": nominal("series", names, SERIES[: len(names)]),
        "shape": nominal("series", names, SHAPES[: len(names)]),
    }


def nominal(field: str, names: Sequence[str], marks: Sequence[Any], orient: str = "top") -> Spec:
    """A field whose values have a colour, shape or dash each, with a legend."""
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(names), "range": list(marks)},
        "legend": {"orient": orient, "title": None},
    }


def label(dx: int = 6, **rest: Any) -> Spec:
    """The mark of a text beside a bar's end."""
    return {"type": "text", "align": "left", "dx": dx, "color": INK, **rest}


def parts(field: str, title: str, most: float) -> Spec:
    """A horizontal channel of parts of a whole."""
    axis = {"format": "%", "tickCount": 5}
    return channel(field, title, axis=axis, scale={"domain": [0, most], "nice": False})


def short_bars(
    values: Sequence[Mapping[str, Any]],
    description: str,
    x: Spec,
    field: str,
    *,
    row: int = 26,
    limit: Mapping[str, int] | None = None,
    **encoding: Any,
) -> Spec:
    """Horizontal bars of short names, with the value's ``text`` beside each.

    Args:
        values: rows, with the field and ``text``.
        description: as of `picture`.
        x: horizontal channel.
        field: field of the names.
        row: height of a bar's row, pixels.
        limit: ``labelLimit`` of the names.
        encoding: further channels.
    """
    axis = {"title": None, **(limit or {})}
    return picture(
        values,
        description,
        height=row * len(values),
        encoding={"y": channel(field, "", "nominal", sort=None, axis=axis), "x": x, **encoding},
        layer=[
            {"mark": {"type": "bar", "height": 14, "color": SERIES[0]}},
            {"mark": label(5), "encoding": {"text": {"field": "text"}}},
        ],
    )


LINE, MAX_LINE = 14, 40
"""Name above its bar: pixels a line, and characters that fit a page of 390 pixels."""


BAR: Spec = {"type": "bar", "height": 12}
"""The mark of a bar below its name."""


@dataclass(frozen=True)
class NamedBars:
    """Horizontal bars whose names stand above them, whole on a page of any width."""

    field: str
    names: Sequence[str]

    @property
    def y(self) -> Spec:
        """The vertical channel."""
        return channel(self.field, "", "nominal", sort=None, axis=None)

    def picture(
        self, values: Sequence[Mapping[str, Any]], description: str, *layers: tuple[Spec, Spec]
    ) -> Spec:
        """A picture of marks at the bars' height, and the names.

        Args:
            values: rows, with the field of the names.
            description: as of `picture`.
            layers: mark and encoding of each, without the vertical channel.
        """
        at_bar = {"yOffset": self._row // 2 - 10}
        marks = [
            {"mark": {**mark, **at_bar}, "encoding": {"y": self.y, **encoding}}
            for mark, encoding in layers
        ]
        height = self._row * len(dict.fromkeys(self.names))
        return picture(values, description, height=height, layer=[*marks, self._layer])

    @property
    def _layer(self) -> Spec:
        """The layer that writes the names."""
        lines = {name: lines_of(name) for name in self.names}
        most = max(map(len, lines.values()), default=1)
        # Each name stands right above its bar.
        values = [
            {self.field: name, "lines": [""] * (most - len(own)) + own}
            for name, own in lines.items()
        ]
        mark: Spec = {"type": "text", "align": "left", "baseline": "middle", "color": INK}
        mark |= {"dy": 10 - self._row // 2, "lineHeight": LINE, "limit": 0}
        encoding = {"y": self.y, "x": {"value": 0}, "text": {"field": "lines"}}
        return {"data": {"values": values}, "mark": mark, "encoding": encoding}

    @property
    def _row(self) -> int:
        """Pixels of a row."""
        return 24 + LINE * max((len(lines_of(name)) for name in self.names), default=1)


def lines_of(name: str) -> list[str]:
    """A name in lines of at most `MAX_LINE` characters, broken behind commas and spaces."""
    lines = [""]
    for part in re.findall(r"[^, ]*[, ]*", name):
        if len((lines[-1] + part).rstrip()) > MAX_LINE and lines[-1]:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def tips(*fields: tuple[str, str]) -> list[Spec]:
    """Tooltip of a mark: (field, title)."""
    return [{"field": field, "title": title} for field, title in fields]
