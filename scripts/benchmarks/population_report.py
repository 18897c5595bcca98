"""Tables of a population's rows: by kind of answer, the worst, what was refused, and the noise."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tuner.selection.describe import table

Row = Mapping[str, Any]
OPERATIONS = ("attention", "products")
NOT_PEERS = ("tuner", "enabled", "pytorch", "pytorch again")
"""Every other contender is a peer."""
OWN, SELECTED = "own decision", "selection"
CHOSEN, REFUSED, FAILED = "PyTorch's by choice", "refused", "failed"
KINDS = (OWN, SELECTED, CHOSEN, REFUSED, FAILED)
"""Kinds of answers in the order of the table; others follow them."""
WORST = 10
HEADING = (
    "answered by", "calls", "share", "timed", "over PyTorch", "worst", "over fastest peer", "worst"
)  # fmt: skip


def report(rows: Sequence[Row]) -> str:
    """All tables, each with its heading."""
    parts = []
    for operation in OPERATIONS:
        mine = [row for row in rows if row["operation"] == operation]
        if mine:
            parts += [f"{operation}, {len(mine)} calls", by_kind(mine), ""]
    parts += ["worst to PyTorch's own choice", worst(rows, over_pytorch), ""]
    parts += ["worst to the fastest peer", worst(rows, over_peer), ""]
    parts += ["refused by the tuner", refusals(rows), ""]
    parts += ["under tuner.enable", summary(rows, under_enable)]
    parts += ["pytorch again", summary(rows, noise)]
    if wrong := [f"{row['call']}: {', '.join(row['wrong'])}" for row in rows if row["wrong"]]:
        parts += ["", "wrong outputs", *wrong]
    if lost := [f"{r['call']}: {r['reason']}" for r in rows if r["answered"] == FAILED]:
        parts += ["", "without a time", *lost]
    return "\n".join(parts)


def over_pytorch(row: Row) -> float | None:
    """PyTorch's time over the tuner's; None where either has none."""
    return _ratio(row["us"], "pytorch", "tuner")


def over_peer(row: Row) -> float | None:
    """The fastest peer's time over the tuner's."""
    us = row["us"]
    peers = [time for name, time in us.items() if name not in NOT_PEERS]
    return min(peers) / us["tuner"] if peers and us.get("tuner", 0) > 0 else None


def under_enable(row: Row) -> float | None:
    """PyTorch's time over that of the same call under `tuner.enable`."""
    return _ratio(row["us"], "pytorch", "enabled")


def noise(row: Row) -> float | None:
    """PyTorch's time over its own."""
    return _ratio(row["us"], "pytorch", "pytorch again")


def _ratio(us: Mapping[str, float], of: str, to: str) -> float | None:
    return us[of] / us[to] if us.get(of, 0) > 0 and us.get(to, 0) > 0 else None


def by_kind(rows: Sequence[Row]) -> str:
    """A line for each kind of answer, then one of all."""
    kinds = dict.fromkeys((*KINDS, *(row["answered"] for row in rows)))
    lines: list[tuple[str, ...]] = [HEADING]
    for kind in kinds:
        if mine := [row for row in rows if row["answered"] == kind]:
            lines.append(_line(kind, mine, len(rows)))
    lines.append(_line("all", rows, len(rows)))
    return table(lines, frozenset(range(1, len(HEADING))))


def _line(name: str, rows: Sequence[Row], whole: int) -> tuple[str, ...]:
    to_pytorch, to_peer = _values(rows, over_pytorch), _values(rows, over_peer)
    share = f"{len(rows) / whole:.1%}"
    return (
        name, str(len(rows)), share, str(len(to_pytorch)), *_figures(to_pytorch), *_figures(to_peer)
    )  # fmt: skip


def _values(rows: Iterable[Row], of: Callable[[Row], float | None]) -> list[float]:
    return [ratio for row in rows if (ratio := of(row)) is not None]


def _figures(ratios: Sequence[float]) -> tuple[str, str]:
    """Geometric mean and the worst."""
    if not ratios:
        return "", ""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.3f}", f"{min(ratios):.3f}"


def worst(rows: Iterable[Row], of: Callable[[Row], float | None]) -> str:
    """The calls with the smallest ratios, by name."""
    found = [(ratio, row) for row in rows if (ratio := of(row)) is not None]
    lines = [("ratio", "tuner us", "answered by", "call")]
    for ratio, row in sorted(found, key=lambda pair: pair[0])[:WORST]:
        us = f"{row['us']['tuner']:.1f}"
        lines.append((f"{ratio:.3f}", us, row["answered"], row["call"]))
    return table(lines, frozenset({0, 1}))


def refusals(rows: Iterable[Row]) -> str:
    """Reasons, most frequent first, with the geometric mean and the worst to the fastest peer."""
    refused = [row for row in rows if row["answered"] == "refused"]
    counts = Counter((row["operation"], row["reason"]) for row in refused)
    lines = [("calls", "operation", "reason", "over fastest peer", "worst")]
    for (operation, reason), count in counts.most_common():
        mine = [r for r in refused if (r["operation"], r["reason"]) == (operation, reason)]
        lines.append((str(count), operation, reason, *_figures(_values(mine, over_peer))))
    return table(lines, frozenset({0, 3, 4}))


def summary(rows: Iterable[Row], of: Callable[[Row], float | None]) -> str:
    """Count, geometric mean and extremes of a ratio, in one line."""
    ratios = _values(rows, of)
    if not ratios:
        return "  no call has this ratio"
    mean, least = _figures(ratios)
    return f"  {len(ratios)} calls, mean {mean}, from {least} to {max(ratios):.3f}"
