"""Rows of benches: the file that they are kept in, their lines and their tables.

A file is JSON lines: a heading with the machine, then a row for each case. A row has a ``case`` and
a ``group``, and mostly ``us`` (microseconds by contender), ``failed`` (reasons by contender) and
``errors``. A case whose process hung or died has the reason under ``lost`` in their place.
"""

from __future__ import annotations

import datetime
import gzip
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.call_times import CONTROL
from tuner.base import document
from tuner.errors import ConfigError, StoreError
from tuner.families.peers import installed, installed_versions
from tuner.measure import device

Row = dict[str, Any]
FORMAT = "cutlass-tuner bench 1"
TUNER, PYTORCH = "tuner", "pytorch"
FLOOR = 0.97
"""A ratio below it is a loss."""
UNCOMPARED = "command", "date"
"""Facts of a heading that may differ between two runs of one file."""


def heading(bench: str, preset: str, options: Mapping[str, Any], command: Sequence[str]) -> Row:
    """First line of a file: the bench, and the machine that the rows depend on."""
    gpu = device.detect()
    return {
        **{"format": FORMAT, "bench": bench, "preset": preset},
        "options": {name: str(value) for name, value in options.items()},
        "gpu": gpu.name if gpu else "",
        **(device.environment().facts if gpu else {}),
        **installed_versions(),
        **installed.versions(installed.PEERS),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(command),
    }


def read(path: Path, wanted: Row | None = None) -> tuple[Row, list[Row]]:
    """Heading and rows of a file, which may be compressed; a last line that is cut off is left out.

    Args:
        path: the file.
        wanted: heading of a run that appends rows; then what is cut off is removed.

    Raises:
        ConfigError: when it is not such a file, or of another run than `wanted`.
        StoreError: when it cannot be read.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            text = str(file.read())
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise StoreError(f"{path} cannot be read: {exc}") from exc
    whole, _, cut = text.rpartition("\n")
    try:
        head, *rows = [dict(document.parse(line)) for line in whole.splitlines()] or [{}]
        is_ours = not head or head["format"] == FORMAT
        labels = [row["case"] for row in rows]
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigError(f"{path} is not a file of scripts/bench: {exc}") from exc
    if not is_ours or len(labels) != len(set(labels)):
        raise ConfigError(f"{path} is not a file of scripts/bench (wanted: {FORMAT}, cases once)")
    if wanted is None:
        return head, rows
    if differing := [name for name in {**head, **wanted} if head and _differs(name, head, wanted)]:
        what = ", ".join(f"{name} {head.get(name)}, not {wanted.get(name)}" for name in differing)
        raise ConfigError(f"{path} holds rows of another run: {what}")
    if cut:
        path.write_text(whole + "\n" if whole else "")
    return head, rows


def _differs(name: str, head: Row, wanted: Row) -> bool:
    return name not in UNCOMPARED and head.get(name) != wanted.get(name)


class RowFile:
    """A file that rows are appended to, and that a later run goes on with.

    Args:
        path: the file; None keeps rows in memory only.
        head: its first line.

    Raises:
        ConfigError: when the file is of another run, or compressed.
        StoreError: when it cannot be read.
    """

    def __init__(self, path: Path | None, head: Row) -> None:
        if path and path.suffix == ".gz":
            raise ConfigError(f"{path}: rows are appended to plain files (allowed: {path.stem})")
        self._path = path
        stored_head, stored = read(path, head) if path and path.exists() else ({}, [])
        self.by_case: dict[str, Row] = {row["case"]: row for row in stored}
        if path and not stored_head:
            path.write_text(json.dumps(head) + "\n")

    def append(self, row: Row) -> None:
        """Keep a row; it is on the disk when this returns."""
        self.by_case[row["case"]] = row
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())


def is_wrong(row: Row) -> bool:
    """True if the bench has failed at this case: a wrong output, or no time of the tuner."""
    return bool("lost" in row or row.get("wrong") or TUNER in row.get("failed", {}))


def over(row: Row, name: str) -> float | None:
    """A contender's time over the tuner's; None where either has none."""
    return _ratio(row.get("us", {}), name, TUNER)


def over_fastest(row: Row) -> float | None:
    """The fastest peer's time over the tuner's; PyTorch is a peer, other ways of the tuner
    (``tuner NAME``) and the control are not.
    """
    us = row.get("us", {})
    rivals = [name for name in us if name.split()[0] not in (TUNER, CONTROL) and us[name] > 0]
    return _ratio(us, min(rivals, key=us.__getitem__), TUNER) if rivals else None


def control(row: Row) -> float | None:
    """The first contender's time over its own second: the noise."""
    us = row.get("us", {})
    return _ratio(us, next(iter(us), CONTROL), CONTROL)


def _ratio(us: Mapping[str, float], of: str, to: str) -> float | None:
    return us[of] / us[to] if us.get(of, 0) > 0 and us.get(to, 0) > 0 else None


def ratio_line(row: Row) -> str:
    """One case: times, ratio of the fastest peer to the tuner, and what is wrong."""
    ratio = over_fastest(row)
    parts = [f"{name} {us:.1f}" for name, us in row.get("us", {}).items()]
    parts += [] if ratio is None else [f"ratio {ratio:.3f}"]
    parts += [f"{name}: {reason}" for name, reason in row.get("failed", {}).items()]
    parts += [f"wrong: {', '.join(row['wrong'])}"] if row.get("wrong") else []
    return f"{row['case']}: {', '.join(parts)}"


def rates_line(row: Row) -> str:
    """`ratio_line` and the tuner's rates, of a row with ``bytes`` and ``flops``."""
    own = row["us"].get(TUNER, math.nan)
    rates = f"{row['bytes'] / own / 1e6:.2f} TB/s, {row['flops'] / own / 1e6:.0f} TFLOP/s"
    return f"{ratio_line(row)}, {rates}"


def ratio_table(rows: Sequence[Row]) -> list[str]:
    """A Markdown row for each group and for all: ratios to the tuner, and the noise."""
    groups = dict.fromkeys(row["group"] for row in rows)
    parts = [(name, [row for row in rows if row["group"] == name]) for name in groups]
    heads = ["over PyTorch", "worst", "over the fastest", "worst", f"below {FLOOR}", "control"]
    lines = [("group", "cases", "timed", *heads)]
    for name, mine in [*parts, ("all", rows)] if len(parts) > 1 else parts:
        fastest = values(mine, over_fastest)
        lines.append((
            *(name, str(len(mine)), str(sum(TUNER in row.get("us", {}) for row in mine))),
            *figures(values(mine, lambda row: over(row, PYTORCH))),
            *figures(fastest),
            str(sum(ratio < FLOOR for ratio in fastest)),
            figures(values(mine, control))[0],
        ))  # fmt: skip
    return markdown(lines)


def values(rows: Iterable[Row], of: Callable[[Row], float | None]) -> list[float]:
    """The ratios of those rows that have one."""
    return [ratio for row in rows if (ratio := of(row)) is not None]


def figures(ratios: Sequence[float]) -> tuple[str, str]:
    """Geometric mean and the smallest; empty texts without a ratio."""
    if not ratios:
        return "", ""
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}", f"{min(ratios):.3f}"


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose first line is the heading."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return [head, "|" + "---|" * len(lines[0]), *body]
