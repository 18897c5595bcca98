"""Constants that a fit gives, beside those that ship, and what the fits share."""

from __future__ import annotations

import gzip
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tuner import families
from tuner.base import document, output, resources
from tuner.errors import ConfigError
from tuner.families.fitting import Constants, FitGroup
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem, problem_from_json
from tuner.problem.packed import PackedProblem
from tuner.selection.describe import table
from tuner.selection.portfolio import Portfolio, shipped

_GZIP = b"\x1f\x8b"


@dataclass
class Refit:
    """Result of a fit."""

    place: str
    """Module or folder of the constants."""
    constants: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    """Constants as they ship (None: they do not) and as fitted, by name."""
    errors: list[str] = field(default_factory=list)
    """Lines that say how far the constants are from what was measured."""
    documents: dict[Path, Any] = field(default_factory=dict)
    """Contents of the files that ship, or their text; none where a module holds the constants."""

    def note(self, title: str, ships: Constants, fitted: Constants) -> None:
        """Add constants."""
        self.constants |= {f"{title}: {k}": (ships.get(k), v) for k, v in fitted.items()}

    def fit(self, group: FitGroup, least_gain: float | None = None) -> Constants:
        """Fit constants to measured items, and note their losses beside those that ship.

        Args:
            group: constants and items.
            least_gain: least part by which the mean loss must fall, also at parts that are left
                out; else the constants stay as they ship. None: they change anyway.
        """
        title, items, ships, fitted, loss, part = group
        best = fitted(list(items))
        losses = {"as it ships": [loss(x, ships) for x in items]}
        losses["fitted"] = [loss(x, best) for x in items]
        parts = [part(x) for x in items] if part else []
        for left_out in dict.fromkeys(parts) if len(set(parts)) > 1 else ():
            pairs = list(zip(items, parts, strict=True))
            fit = fitted([x for x, of in pairs if of != left_out])
            mine = [loss(x, fit) for x, of in pairs if of == left_out]
            losses.setdefault("left out", []).extend(mine)
        shown = (f"{what} {fmean(v):.2%}, worst {max(v):.1%}" for what, v in losses.items())
        self.errors.append(f"{title}: {len(items)} measured; mean loss {'; '.join(shown)}")
        worse = max(sum(losses["fitted"]), sum(losses.get("left out", [math.inf])))
        gain = sum(losses["as it ships"]) - worse
        if least_gain is not None and gain < least_gain * len(items):
            return ships
        self.note(title, ships, best)
        return best

    def text(self) -> str:
        """A table of the constants that change, and the errors."""
        rows = [
            (name, f"{old:.4g}" if old is not None else "", f"{new:.4g}")
            for name, (old, new) in self.constants.items()
            if old is None or f"{old:.3g}" != f"{new:.3g}"
        ]
        same = f"{len(self.constants) - len(rows)} of {len(self.constants)} constants as they ship"
        head = ("constant", "ships", "fitted")
        changed = [table([head, *rows], frozenset({1, 2}))] if rows else []
        return "\n".join([*changed, same, *self.errors])

    def write(self) -> str:
        """Store the documents, or give all constants of a module, in lines of text."""
        for path, content in self.documents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            output.write(path, text, make_folder=True)
        new = (f"  {name} = {fitted:.4g}" for name, (_, fitted) in self.constants.items())
        lines = [f"wrote {path}" for path in self.documents]
        return "\n".join(lines or [f"constants of {self.place}:", *new])


def portfolio_file(gpu: Gpu, op: str) -> Path:
    """File of the portfolio that ships for a GPU."""
    return resources.cache() / "portfolio" / f"{gpu.name.lower().replace(' ', '-')}-{op}.json"


def text_of(path: Path) -> str:
    """Text of a file, which may be compressed by gzip."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()


def rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of benches' result files: JSON lines behind a heading, also compressed by gzip.

    A last line that is cut off is left out.

    Raises:
        ConfigError: when a file cannot be read, or no row is left.
    """
    parsed: list[dict[str, Any]] = []
    for path in paths:
        try:
            text = text_of(path)
            lines = text[: text.rfind("\n") + 1].splitlines()
            parsed += [dict(document.parse(line)) for line in lines[1:]]
            for row in parsed:  # a bench's own contenders are called tuner, and tuner NAME
                us = row.get("us", {}).items()
                row["us"] = {name.removeprefix("tuner "): time_us for name, time_us in us}
        except (OSError, EOFError, ValueError, TypeError) as exc:
            raise ConfigError(f"{path} is not a bench's file of JSON lines: {exc}") from exc
    if not parsed:
        raise ConfigError("no row to fit to (wanted: FILE of a bench, as its --json writes it)")
    return parsed


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a row, with the rows of its packed sequences where it has their lengths."""
    problem = problem_from_json(row["problem"])
    if isinstance(problem, AttentionProblem) and "lengths" in row:
        return PackedProblem.of(problem, row["lengths"])
    return problem


def attention_portfolio(gpu: Gpu) -> Portfolio:
    """The shipped portfolio of attention that was made on a GPU.

    Raises:
        ConfigError: when none ships for the GPU.
    """
    for portfolio in shipped():
        if portfolio.op == AttentionProblem.op and portfolio.gpu == gpu:
            return portfolio
    raise ConfigError(f"no portfolio of attention ships for {gpu.name}")


def of_family(module: str, files: Sequence[Path], gpu: Gpu) -> Refit:
    """Fit the constants that a family's module declares.

    Raises:
        ConfigError: when a file is wrong, or has no row for them.
    """
    result = Refit(f"{families.__name__}.{module.partition('.')[0]}")
    for group in importlib.import_module(f"{families.__name__}.{module}").groups(rows(files), gpu):
        result.fit(group)
    return result
