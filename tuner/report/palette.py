"""Colours of the report, of its pictures, and of the service's pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: By the name of their CSS variable. Series: Okabe and Ito's palette, distinct for colour-blind
#: readers too.
LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "ink": "#1a1a1a",
    "soft": "#5a5a5a",
    "line": "#d9d9d9",
    "panel": "#f6f6f4",
    "best": "#d55e00",
    "failed": "#b3261e",
    "link": "#0b63a5",
    "done-ink": "#00664b",
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
    "link": "#7cc0f0",
    "done-ink": "#4fd6ae",
    "series-1": "#4aa8e0",
    "series-2": "#f0b429",
    "series-3": "#2bc59b",
    "series-4": "#e39ac4",
    "series-5": "#8fd0f5",
    "series-6": "#f07a2a",
    "series-7": "#e8dc4a",
    "series-8": "#9a9a9a",
}


def colours(names: Collection[str] = tuple(LIGHT)) -> str:
    """CSS that sets the variables of some colours, by default all, for the reader's light or dark
    mode.
    """
    light, dark = (
        " ".join(f"--{name}: {value};" for name, value in palette.items() if name in names)
        for palette in (LIGHT, DARK)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
