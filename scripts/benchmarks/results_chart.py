"""Chart of the page of results: mean and worst speed over peers, by kind of call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import results

PATH = Path(__file__).parents[2] / "docs" / "pages" / "speed.svg"
LEAST, MOST = 0.5, 2.0
"""Ratios at the ends of the logarithmic axis."""
WIDTH, ROW, TOP, SCALE = 440, 36, 30, 1.25
"""Units of the drawing, and pixels of a unit on a wide page: it is read at 390 pixels, too."""
#: Readable on white and on black.
TEXT, FASTER, SLOWER = "#808890", "#2f9e6e", "#d9534f"


class Bar(NamedTuple):
    """One line of the chart, and where its figures stand."""

    label: str
    file: str
    what: str
    """The row's text, or its beginning; empty for the longest problems of the acceptance suite."""
    peer: int = 0
    """Number of the peer among the row's."""

    def figures(self) -> tuple[float, float]:
        """Mean and worst ratio."""
        rows = [row for run in results.read(self.file)["runs"] for row in run["rows"]]
        named = [row for row in rows if row["what"] == self.what]
        row = (named or [row for row in rows if row["what"].startswith(self.what)])[0]
        mean, worst = (row[name].split("; ")[self.peer] for name in ("ratio", "worst"))
        return float(mean), float(worst)


#: Kinds of calls that no shape was tuned of, and the longest that were, losses among them.
BARS = (
    Bar("attention of public models, over PyTorch", "population", "attention"),
    Bar("the same, over the fastest peer", "population", "attention", 1),
    Bar("products of public models, over PyTorch", "population", "products"),
    Bar("the same, over the fastest peer", "population", "products", 1),
    Bar("paged decoding, over FlashAttention-3", "paged", "drawn: 1 to 16"),
    Bar("training calls, over PyTorch", "training", "training calls with"),
    Bar("layers of experts, over compositions", "moe", "layers of e4m3"),
    Bar("block-scaled e4m3, over DeepGEMM, cuBLASLt", "products", "e4m3 with factors of blocks"),
    Bar("attention of e4m3, over FlashAttention-3", "attention", "e4m3, (2,16,S,128)"),
    Bar("attention above 4096 tokens, over the fastest", "tuned", ""),
)


def _longest() -> tuple[float, float]:
    """Mean and worst of the acceptance suite's longest, read from the shipped decisions."""
    cells = results.decisions("H200", "stream", suite="acceptance", size="above 4096")
    return float(cells["ratio"]), float(cells["worst"])


def chart(bars: Sequence[Bar] = BARS) -> str:
    """The chart as SVG: a bar from 1 to the mean, a tick at the worst, both in numbers."""

    def x(ratio: float) -> float:
        return WIDTH * math.log(max(LEAST, min(MOST, ratio)) / LEAST) / math.log(MOST / LEAST)

    height = TOP + ROW * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH * SCALE:.0f}" font-family="sans-serif" font-size="13" fill="{TEXT}">',
        '<text x="0" y="14">half as fast</text>',
        f'<text x="{x(1):.0f}" y="14" text-anchor="middle">equal</text>',
        f'<text x="{WIDTH}" y="14" text-anchor="end">twice as fast</text>',
    ]
    for number, bar in enumerate(bars):
        mean, worst = bar.figures() if bar.what else _longest()
        y, color = TOP + ROW * number, FASTER if mean >= 1 else SLOWER
        begin, end = sorted((x(1), x(mean)))
        lines += [
            f'<text x="0" y="{y + 10}">{bar.label}</text>',
            f'<text x="{WIDTH}" y="{y + 10}" text-anchor="end">'
            f"{mean:.2f}, worst {worst:.2f}</text>",
            f'<rect x="{begin:.1f}" y="{y + 16}" width="{end - begin:.1f}" height="12" '
            f'fill="{color}"/>',
            f'<path d="M{x(1):.0f} {y + 14}v16" stroke="{TEXT}"/>',
            f'<path d="M{x(worst):.1f} {y + 14}v16" stroke="{SLOWER if worst < 1 else TEXT}" '
            'stroke-width="3"/>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
