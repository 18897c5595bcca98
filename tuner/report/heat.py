"""The space of a family as heat maps, a picture for each panel (see `spec`)."""

from __future__ import annotations

from typing import Any

from tuner.measurement import latency
from tuner.report.analysis import Cell, HeatMap
from tuner.report.spec import CROSS, FAILED, Spec, channel, picture, tips
from tuner.selection.describe import microseconds

SLOWEST_SHOWN = 2.0
"""Times above this multiple of the best share the last colour of a heat map."""
DARK_CELL = 1.45
"""From this multiple on a cell is too dark for black text."""

IS_PASSED, IS_FAILED = "datum.us !== null", "datum.us === null"


def heat_panels(heat: HeatMap) -> list[tuple[str, Spec]]:
    """One picture a panel: its title and the best time of each place."""
    rows = _ordered({cell.row for cell in heat.cells})
    columns = _ordered({cell.column for cell in heat.cells})
    return [(_title(heat, panel), _panel(heat, panel, rows, columns)) for panel in heat.panels]


def _title(heat: HeatMap, panel: Any) -> str:
    return heat.family if heat.panel is None else f"{heat.panel} {panel}"


def _ordered(values: set[Any]) -> list[str]:
    """As text; numbers by size, a parameter that does not apply last."""
    return [str(v) for v in sorted(values, key=lambda v: (isinstance(v, str), v))]


def _panel(heat: HeatMap, panel: Any, rows: list[str], columns: list[str]) -> Spec:
    values = [_value(cell, heat.best_us) for cell in heat.cells if cell.panel == panel]
    layers = _passed(heat)
    if any(value["cross"] for value in values):
        layers += _failed(heat)
    return picture(
        values,
        f"Best time of {heat.family} over {heat.row} and {heat.column}, {_title(heat, panel)}; "
        "crosses count failures.",
        height=32 * len(rows),
        encoding={
            "y": channel("row", heat.row, "ordinal", scale={"domain": rows}),
            "x": channel(
                "column", heat.column, "ordinal", scale={"domain": columns}, axis={"labelAngle": 0}
            ),
        },
        layer=layers,
    )


def _value(cell: Cell, best_us: float) -> dict[str, Any]:
    best = cell.passed[0] if cell.passed else None
    lost = len(cell.failed)
    why = ", ".join(sorted({m.status.value for m in cell.failed}))
    return {
        "row": str(cell.row),
        "column": str(cell.column),
        "us": best and best.latency_us,
        "ratio": best and latency(best) / best_us,
        "text": microseconds(best.latency_us) if best else "-",
        "cross": f"{CROSS} {lost}" if lost else "",
        "passed": len(cell.passed),
        "failed": f"{lost} ({why})" if lost else "0",
        "config": str((best or cell.failed[0]).config),
    }


def _tips(heat: HeatMap) -> list[Spec]:
    return tips(
        ("row", heat.row),
        ("column", heat.column),
        ("text", "best, us"),
        ("passed", "passed"),
        ("failed", "failed"),
        ("config", "config"),
    )


#: Of the words in a cell: dark on bright, bright on dark, and the colour of failure on neither.
_INK = {
    "condition": [
        {"test": IS_FAILED, "value": FAILED},
        {"test": f"datum.ratio < {DARK_CELL}", "value": "#111"},
    ],
    "value": "#fff",
}


def _passed(heat: HeatMap) -> list[Spec]:
    scale = {"scheme": "cividis", "reverse": True, "domain": [1, SLOWEST_SHOWN], "clamp": True}
    color = {"field": "ratio", "type": "quantitative", "scale": scale, "legend": None}
    number = {"type": "text", "fontSize": 11, "dy": {"expr": "datum.cross ? -6 : 0"}}
    return [
        {
            "transform": [{"filter": IS_PASSED}],
            "mark": "rect",
            "encoding": {"color": color, "tooltip": _tips(heat)},
        },
        {
            "transform": [{"filter": IS_PASSED}],
            "mark": number,
            "encoding": {"text": {"field": "text"}, "color": _INK},
        },
    ]


def _failed(heat: HeatMap) -> list[Spec]:
    """A frame where nothing passed, and how many failed."""
    return [
        {
            "transform": [{"filter": IS_FAILED}],
            "mark": {"type": "rect", "fill": FAILED, "fillOpacity": 0.12, "stroke": FAILED},
            "encoding": {"tooltip": _tips(heat)},
        },
        {
            "mark": {"type": "text", "fontSize": 10, "dy": {"expr": "datum.us ? 8 : 0"}},
            "encoding": {"text": {"field": "cross"}, "color": _INK},
        },
    ]
