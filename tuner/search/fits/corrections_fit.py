"""Fit of `tuner.search.corrections` to calls of models that make selections.

Residuals are measured times less those by the rates before the corrections that ship. The
corrections have the least absolute errors:

- own products of up to 256 rows or 128 columns get a constant
- libraries' products of few rows get a constant, and a share of their sums' depth

Activated products are left out: other kernels answered some of them. A row has the problem, its
model, its answer and the microseconds of ``tuner`` and ``pytorch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import ConfigError
from tuner.families.by_operation import AnyDomain, ProductDomain
from tuner.families.fitting import Constants, FitGroup
from tuner.hardware import Gpu
from tuner.problem import Problem, problem_from_json
from tuner.search import corrections
from tuner.search.corrections import LIBRARIES, OWN
from tuner.search.fits.refit import Refit, rows
from tuner.selection.portfolio import Portfolio, serving, shipped

STEPS = 40
"""Rounds of the reweighted least squares that give least absolute errors."""
NEAREST_US = 0.05
"""Residuals below this weigh alike."""


class TimedCall(NamedTuple):
    """One kernel's time of a call."""

    model: str
    us: float
    """By the rates before corrections."""
    measured_us: float
    depth: float = 0.0
    """Depth of a product's sums."""


class Correction(NamedTuple):
    """Rates of amounts, which are added to times."""

    amounts: Mapping[str, Callable[[TimedCall], float]]
    ships: Callable[[str], Constants]
    """The rates on a GPU."""

    def added_us(self, call: TimedCall, rates: Constants) -> float:
        """Microseconds that rates add to a time without them."""
        return sum(of(call) * rates[name] for name, of in self.amounts.items())

    def without(self, call: TimedCall, rates: Constants) -> TimedCall:
        """A call whose expected time has the rates, without them."""
        return call._replace(us=call.us - self.added_us(call, rates))

    def loss(self, call: TimedCall, rates: Constants) -> float:
        """Distance of the corrected time from the measured one, as a logarithm."""
        return abs(math.log((call.us + self.added_us(call, rates)) / call.measured_us))

    def fitted(self, calls: Sequence[TimedCall]) -> dict[str, float]:
        """Rates of the least absolute errors."""
        amounts = [[of(call) for of in self.amounts.values()] for call in calls]
        goal = [call.measured_us - call.us for call in calls]
        return dict(zip(self.amounts, _least(amounts, goal), strict=True))


CORRECTIONS: Mapping[str, Correction] = {
    "few own": Correction({"launch": lambda _: 1.0}, lambda gpu: {"launch": OWN[gpu]["few"]}),
    "few PyTorch": Correction(
        {"launch": lambda _: 1.0, "depth": lambda call: call.depth}, lambda gpu: LIBRARIES[gpu]
    ),
    "narrow own": Correction({"launch": lambda _: 1.0}, lambda gpu: {"launch": OWN[gpu]["narrow"]}),
}
"""By rows of a product (tall ones are narrow), and by whose kernel is timed."""


def _least(amounts: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    import numpy as np

    matrix, goal = np.array(amounts), np.array(targets)
    weights = np.ones(len(goal))
    for _ in range(STEPS):
        roots = np.sqrt(weights)
        rates, *_ = np.linalg.lstsq(matrix * roots[:, None], goal * roots, rcond=None)
        weights = 1 / np.maximum(np.abs(goal - matrix @ rates), NEAREST_US)
    return [float(rate) for rate in rates]


def calls(documents: Iterable[Mapping[str, Any]], gpu: Gpu) -> dict[str, list[TimedCall]]:
    """Times of calls that an own kernel answered, by the group of a correction.

    Raises:
        ConfigError: when there are none.
    """
    portfolios = {p.op: p for p in serving(shipped(), gpu)}
    groups: dict[str, list[TimedCall]] = {}
    for row in documents:
        problem = problem_from_json(row["problem"])
        portfolio = portfolios.get(problem.op)
        if row["answered"] == "selection" and portfolio and "tuner" in row["us"]:
            for name, call in _timed(row, problem, portfolio):
                if fix := CORRECTIONS.get(name):
                    groups.setdefault(name, []).append(fix.without(call, fix.ships(gpu.name)))
    if not groups:
        raise ConfigError("no call of these files was answered by an own kernel of a portfolio")
    return groups


def _timed(
    row: Mapping[str, Any], problem: Problem, portfolio: Portfolio
) -> Iterator[tuple[str, TimedCall]]:
    """Both times of a call by their groups; none where PyTorch's is above the sum of its rates."""
    selection = portfolio.select(problem)
    if selection is None or not selection.estimates or not selection.vendor:
        return
    domain, us = selection.domain, row["us"]
    if domain.pytorchs_factor(problem) == 1 and (group := _group_of(domain, portfolio)):
        depth = getattr(problem, "k", 0) ** 0.25
        _, own_us, place, splits = min(selection.estimates)
        config = selection.times.config(problem, place, splits, selection.facts)
        if config is not None and config.get("pdl") is not False:  # else never launched early
            yield f"{group} own", TimedCall(str(row["model"]), own_us, us["tuner"], depth)
        expected, measured = selection.vendor_us, us["pytorch"]
        yield f"{group} PyTorch", TimedCall(str(row["model"]), expected, measured, depth)


def _group_of(domain: AnyDomain, portfolio: Portfolio) -> str:
    """A group's name; empty for domains without corrections, and those timed on another GPU."""
    models = portfolio.domains.get(domain)
    if models is None or models.made_on is not None:
        return ""
    if not isinstance(domain, ProductDomain) or domain.gradient or domain.without_activation:
        return ""
    return "narrow" if domain.rows == "tall" else domain.rows


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Fit the corrections of a GPU.

    Raises:
        ConfigError: when a file is wrong, or the GPU has no corrections.
    """
    if gpu.name not in OWN:
        raise ConfigError(f"no corrections ship for {gpu.name} (allowed: {', '.join(OWN)})")
    result = Refit(corrections.__name__)
    for name, timed in calls(rows(files), gpu).items():
        fix = CORRECTIONS[name]
        ships = fix.ships(gpu.name)
        result.fit(FitGroup(name, timed, ships, fix.fitted, fix.loss, lambda call: call.model))
    return result
