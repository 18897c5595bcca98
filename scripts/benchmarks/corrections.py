"""``scripts/bench corrections FILE``: rates of small products, corrected to the calls of models.

Reads a result of `scripts/bench layers` over models that make selections; needs no GPU. Residuals
are measured times less those by the rates before the corrections that ship. Own products get a
constant, libraries' a constant and a share of their sums' depth, with the least absolute errors
(`tuner.search.corrections`).

Each model's calls are then decided by corrections that are fitted to the other models. The table
has PyTorch's time over the chosen kernel's: as measured, by own kernels everywhere they were
measured, and by the corrected selection. The ratio of a choice of PyTorch's is 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.population import read
from tuner.cli import Parser
from tuner.errors import BenchmarkError
from tuner.hardware import Gpu
from tuner.problem import GemmProblem, problem_from_json
from tuner.search.corrections import LIBRARIES, OWN
from tuner.selection.describe import table
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu

MAX_ROWS = 16
LOSS = 0.985
"""Ratio below which a call is counted as a loss."""
STEPS = 30
"""Rounds of the reweighted least squares that give least absolute errors."""
NEAREST_US = 0.05
"""Residuals below this weigh alike."""


@dataclass(frozen=True)
class Timed:
    """A product that an own kernel answered: microseconds by the rates, and measured."""

    model: str
    k: int
    own: float
    own_us: float
    vendor: float
    vendor_us: float

    @property
    def ratio(self) -> float:
        """PyTorch's time over the own kernel's."""
        return self.vendor_us / self.own_us


@dataclass(frozen=True)
class Correction:
    """Microseconds to add to both estimates."""

    own: float
    launch: float
    depth: float

    def is_own(self, one: Timed) -> bool:
        """True if the corrected selection chooses the own kernel."""
        added = self.launch + self.depth * math.sqrt(math.sqrt(one.k))
        return one.own + self.own < one.vendor + added


def main(argv: Sequence[str]) -> int:
    """Fit and judge; 0."""
    parser = Parser(
        prog="scripts/bench corrections",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="result of scripts/bench layers")
    parser.add_argument("--gpu", default="H200", help="GPU of the file, as H200 (the default)")
    args = parser.parse_args(argv)
    timed = calls(read(args.file).values(), find_gpu(args.gpu))
    found = fitted(timed)
    print(
        f"own: launch {found.own:+.3f}; libraries: launch {found.launch:+.3f}, "
        f"depth {found.depth:+.4f}"
    )
    print(report(timed))
    return 0


def calls(rows: Iterable[Mapping[str, Any]], gpu: Gpu) -> list[Timed]:
    """Products of few rows that an own kernel answered.

    Args:
        rows: lines of a result.
        gpu: GPU that was measured.

    Raises:
        BenchmarkError: when there are none.
    """
    portfolio = next(one for one in serving(shipped(), gpu) if one.op == GemmProblem.op)
    found = [one for row in rows if (one := _timed(row, portfolio)) is not None]
    if not found:
        raise BenchmarkError(f"no product of {MAX_ROWS} rows or fewer was answered by own kernels")
    return found


def _timed(row: Mapping[str, Any], portfolio: Portfolio) -> Timed | None:
    problem = problem_from_json(row["problem"])
    if row["answered"] != "selection" or not isinstance(problem, GemmProblem):
        return None
    selection = portfolio.select(problem)
    if problem.m > MAX_ROWS or selection is None or "tuner" not in row["us"]:
        return None
    ranked = next(selection.ranked(), None)
    if ranked is None:
        return None
    own_us = ranked[0]
    own, libraries, depth = 0.0, 0.0, problem.k**0.25
    if selection.domain in portfolio.domains and selection.times.models.made_on is None:
        added = LIBRARIES.get(portfolio.gpu.name, {})
        own = OWN.get(portfolio.gpu.name, {}).get("few", 0.0)
        libraries = added.get("launch", 0.0) + depth * added.get("depth", 0.0)
    us = row["us"]
    expected = own_us - own, us["tuner"], selection.vendor_us - libraries, us["pytorch"]
    return Timed(str(row["model"]), problem.k, *expected)


def fitted(timed: Sequence[Timed]) -> Correction:
    """The correction with the least absolute errors."""
    (own,) = _least([(1.0,)] * len(timed), [one.own_us - one.own for one in timed])
    roots = [(1.0, one.k**0.25) for one in timed]
    launch, depth = _least(roots, [one.vendor_us - one.vendor for one in timed])
    return Correction(own, launch, depth)


def _least(amounts: Sequence[tuple[float, ...]], wanted: Sequence[float]) -> list[float]:
    import numpy as np

    rows, goal = np.array(amounts), np.array(wanted)
    weights = np.ones(len(goal))
    for _ in range(STEPS):
        roots = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(rows * roots[:, None], goal * roots, rcond=None)
        weights = 1 / np.maximum(np.abs(goal - rows @ found), NEAREST_US)
    return [float(one) for one in found]


def left_out(timed: Sequence[Timed]) -> list[float]:
    """Ratio of each call by corrections that are fitted to the other models.

    Raises:
        BenchmarkError: when all calls are of one model.
    """
    models, found = sorted({one.model for one in timed}), list[float]()
    if len(models) < 2:
        raise BenchmarkError(f"all calls are of {models[0]}: a fit needs calls of other models")
    for model in models:
        correction = fitted([one for one in timed if one.model != model])
        mine = [one for one in timed if one.model == model]
        found += [one.ratio if correction.is_own(one) else 1.0 for one in mine]
    return found


def report(timed: Sequence[Timed]) -> str:
    """The table of both selections, and of a perfect choice."""
    measured = [one.ratio for one in timed]
    rows = {
        "as measured": measured,
        "corrected, models left out": left_out(timed),
        "the faster of both": [max(1.0, ratio) for ratio in measured],
    }
    lines = [("selection", "calls", "mean", "worst", f"below {LOSS}")]
    for name, ratios in rows.items():
        mean = math.exp(fmean(map(math.log, ratios)))
        losses = sum(ratio < LOSS for ratio in ratios)
        lines.append((name, str(len(ratios)), f"{mean:.3f}", f"{min(ratios):.3f}", str(losses)))
    return table(lines, frozenset({1, 2, 3, 4}))
