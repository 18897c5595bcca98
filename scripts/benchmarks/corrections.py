"""``scripts/bench corrections FILE...``: expected times, corrected to the calls of models.

Reads results of `scripts/bench layers` and `scripts/bench own_calls` over models that make
selections; needs no GPU. Residuals are measured times less those by the rates before the
corrections that ship. The corrections have the least absolute errors (`tuner.search.corrections`):

- own products of up to 256 rows or 128 columns get a constant
- libraries' products of few rows get a constant, and a share of their sums' depth
- own attention of one query gets a factor, with the least relative errors; PyTorch's at D = 64 a
  constant

Activated products are left out: other kernels answered some of them.

Each model's calls are then decided by corrections that are fitted to the other models, and by the
margins that ship. The second table has PyTorch's time over the chosen kernel's: as measured, by own
kernels everywhere they were measured, and by the corrected selection. The ratio of a choice of
PyTorch's is 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.population import read
from tuner.cli import Parser
from tuner.errors import BenchmarkError
from tuner.families import families
from tuner.hardware import Gpu
from tuner.problem import Problem, problem_from_json
from tuner.search.corrections import corrected
from tuner.selection.candidates import Candidate
from tuner.selection.choice import Selection
from tuner.selection.describe import table
from tuner.selection.domains import AnyDomain, AttentionDomain, ProductDomain
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu

LOSS = 0.985
"""Ratio below which a call is counted as a loss."""
STEPS = 40
"""Rounds of the reweighted least squares that give least absolute errors."""
NEAREST_US = 0.05
"""Residuals below this weigh alike."""


class Timed(NamedTuple):
    """A call that an own kernel answered: microseconds by the rates as fitted, and measured."""

    model: str
    head_dim: int
    """0 for products."""
    depth: float
    own: float
    own_us: float
    vendor: float
    vendor_us: float
    doubt: float = 1.0
    """Factor of the own time by the margin."""

    @property
    def ratio(self) -> float:
        """PyTorch's time over the own kernel's."""
        return self.vendor_us / self.own_us


Amounts = Callable[[Timed], tuple[float, ...]]


class Group(NamedTuple):
    """Amounts that the corrections of own and of PyTorch's times are rates of; none: as fitted."""

    own: Amounts | None = None
    vendor: Amounts | None = None
    is_factor: bool = False
    """True if the rate of the own amount is a share of the time."""


def _launch(one: Timed) -> tuple[float, ...]:
    return (1.0,)


GROUPS: Mapping[str, Group] = {
    "few": Group(_launch, lambda one: (1.0, one.depth)),
    "narrow": Group(_launch),
    "wide": Group(),
    "one query": Group(lambda one: (one.own,), lambda one: (float(one.head_dim == 64),), True),
}
"""By rows of a product, tall ones among the narrow; and attention of one query."""


@dataclass(frozen=True)
class Correction:
    """Rates of a group's amounts."""

    group: Group
    own: tuple[float, ...] = ()
    vendor: tuple[float, ...] = ()

    def own_of(self, one: Timed) -> float:
        """Corrected microseconds of the own kernel."""
        return one.own + _sum(self.group.own, self.own, one)

    def vendor_of(self, one: Timed) -> float:
        """Corrected microseconds of PyTorch's."""
        return one.vendor + _sum(self.group.vendor, self.vendor, one)

    def is_own(self, one: Timed) -> bool:
        """True if the corrected selection chooses the own kernel."""
        return self.own_of(one) * one.doubt < self.vendor_of(one)


def _sum(amounts: Amounts | None, rates: Sequence[float], one: Timed) -> float:
    return sum(a * b for a, b in zip(amounts(one), rates, strict=True)) if amounts else 0.0


def main(argv: Sequence[str]) -> int:
    """Fit and judge; 0."""
    parser = Parser(
        prog="scripts/bench corrections",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="such results")
    parser.add_argument("--gpu", default="H200", help="GPU of the files, as H200 (the default)")
    args = parser.parse_args(argv)
    rows = [row for file in args.files for row in read(file).values()]
    print(report(calls(rows, find_gpu(args.gpu))))
    return 0


def calls(rows: Iterable[Mapping[str, Any]], gpu: Gpu) -> dict[str, list[Timed]]:
    """Calls that an own kernel answered, by group.

    Args:
        rows: lines of results.
        gpu: GPU that was measured.

    Raises:
        BenchmarkError: when there are none.
    """
    portfolios = {one.op: one for one in serving(shipped(), gpu)}
    found: dict[str, list[Timed]] = {name: [] for name in GROUPS}
    for row in rows:
        problem = problem_from_json(row["problem"])
        portfolio = portfolios.get(problem.op)
        selection = None if portfolio is None else portfolio.select(problem)
        if row["answered"] != "selection" or portfolio is None or selection is None:
            continue
        name = _group_of(selection.domain, portfolio)
        timed = _timed(row, problem, selection, gpu) if name else None
        if timed is not None:
            found[name].append(timed)
    if not any(found.values()):
        raise BenchmarkError("no call of these files was answered by an own kernel of a portfolio")
    return {name: some for name, some in found.items() if some}


def _group_of(domain: AnyDomain, portfolio: Portfolio) -> str:
    """A group's name; empty for domains without corrections, and those timed on another GPU.

    The factor of one query is that of D up to 128.
    """
    models = portfolio.domains.get(domain)
    if models is None or models.made_on is not None:
        return ""
    if isinstance(domain, ProductDomain):
        is_plain = not domain.gradient and domain.without_activation is None
        return ("narrow" if domain.rows == "tall" else domain.rows) if is_plain else ""
    if not isinstance(domain, AttentionDomain) or domain.head_dim > 128:
        return ""
    return "one query" if domain.phase == "one" else ""


def _timed(
    row: Mapping[str, Any], problem: Problem, selection: Selection, gpu: Gpu
) -> Timed | None:
    us, domain = row["us"], selection.domain
    if "tuner" not in us or not selection.estimates or not selection.vendor:
        return None
    if domain.pytorchs_factor(problem) != 1:  # its time is above the sum of its rates
        return None
    cautious, expected, place, splits = min(selection.estimates)
    own = selection.times.models.candidates[place]
    vendor = next(
        one for one in selection.times.vendors if one.config["kernel"] == selection.vendor
    )
    sums = (
        expected - _added(problem, own, splits, domain, gpu),
        selection.vendor_us - _added(problem, vendor, 1, domain, gpu),
    )
    depth = getattr(problem, "k", 0) ** 0.25
    head_dim = getattr(domain, "head_dim", 0)
    measured = us["tuner"], us["pytorch"]
    doubt = cautious / expected
    return Timed(
        str(row["model"]), head_dim, depth, sums[0], measured[0], sums[1], measured[1], doubt
    )


def _added(problem: Problem, one: Candidate, splits: int, domain: AnyDomain, gpu: Gpu) -> float:
    """Microseconds that the shipped corrections add to a candidate's time."""
    family = families()[one.config.family]
    nothing = corrected({}, domain, family, gpu)
    factor = corrected({"": 1.0}, domain, family, gpu)[""]
    config = family.called(problem, one.config, splits)
    amounts = dict(zip(family.work_terms, family.work(problem, config, gpu), strict=True))
    whole = sum(us * amounts[term] for term, us in one.rates.items())
    added = sum(us * amounts[term] for term, us in nothing.items())
    return added + (whole - added) * (1 - 1 / factor)


def fitted(name: str, timed: Sequence[Timed]) -> Correction:
    """A group's correction with the least absolute errors."""
    group = GROUPS[name]
    own = vendor = tuple[float, ...]()
    if group.is_factor:
        own = _least([(1.0,)] * len(timed), [one.own_us / one.own - 1 for one in timed])
    elif group.own:
        own = _least([group.own(one) for one in timed], [one.own_us - one.own for one in timed])
    if group.vendor:
        residuals = [one.vendor_us - one.vendor for one in timed]
        vendor = _least([group.vendor(one) for one in timed], residuals)
    return Correction(group, own, vendor)


def _least(amounts: Sequence[tuple[float, ...]], wanted: Sequence[float]) -> tuple[float, ...]:
    import numpy as np

    rows, goal = np.array(amounts), np.array(wanted)
    weights = np.ones(len(goal))
    for _ in range(STEPS):
        roots = np.sqrt(weights)
        found, *_ = np.linalg.lstsq(rows * roots[:, None], goal * roots, rcond=None)
        weights = 1 / np.maximum(np.abs(goal - rows @ found), NEAREST_US)
    return tuple(float(one) for one in found)


def left_out(name: str, timed: Sequence[Timed]) -> list[tuple[Timed, Correction]]:
    """Each call with the correction that is fitted to the other models.

    Raises:
        BenchmarkError: when all calls are of one model.
    """
    models, found = sorted({one.model for one in timed}), list[tuple[Timed, Correction]]()
    if len(models) < 2:
        raise BenchmarkError(f"all calls are of {models[0]}: a fit needs calls of other models")
    for model in models:
        correction = fitted(name, [one for one in timed if one.model != model])
        found += [(one, correction) for one in timed if one.model == model]
    return found


def report(known: Mapping[str, Sequence[Timed]]) -> str:
    """The fits with their errors at models left out, and the selections."""
    fits: list[tuple[str, ...]] = [
        ("calls", "count", "own", "error", "corrected", "PyTorch's", "error", "corrected")
    ]
    lines = [("selection", "calls", "mean", "worst", f"below {LOSS}", "own")]
    for name, timed in known.items():
        judged, best = left_out(name, timed), fitted(name, timed)
        errors = (
            fmean(_error(one.own, one.own_us) for one in timed),
            fmean(_error(c.own_of(one), one.own_us) for one, c in judged),
            fmean(_error(one.vendor, one.vendor_us) for one in timed),
            fmean(_error(c.vendor_of(one), one.vendor_us) for one, c in judged),
        )
        before, after, theirs, then = (f"{error:.1%}" for error in errors)
        count, own, vendor = str(len(timed)), _numbers(best.own), _numbers(best.vendor)
        fits.append((name, count, own, before, after, vendor, theirs, then))
        measured = [one.ratio for one in timed]
        chosen = [(c.is_own(one), one) for one, c in judged]
        ways = {
            "as measured": measured,
            "corrected, models left out": [one.ratio if is_own else 1.0 for is_own, one in chosen],
            "the faster of both": [max(1.0, ratio) for ratio in measured],
        }
        owns = (len(timed), sum(is_own for is_own, _ in chosen), sum(r > 1 for r in measured))
        for (way, ratios), served in zip(ways.items(), owns, strict=True):
            mean = math.exp(fmean(map(math.log, ratios)))
            losses = sum(ratio < LOSS for ratio in ratios)
            row = f"{mean:.3f}", f"{min(ratios):.3f}", str(losses), str(served)
            lines.append((f"{name}: {way}", str(len(ratios)), *row))
    right = frozenset({1, 3, 4, 6, 7})
    return f"{table(fits, right)}\n\n{table(lines, frozenset(range(1, 6)))}"


def _error(expected: float, us: float) -> float:
    return abs(math.log(us / expected))


def _numbers(rates: Sequence[float]) -> str:
    return ", ".join(f"{one:+.3f}" for one in rates) or "as fitted"
