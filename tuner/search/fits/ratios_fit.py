"""Ratios of `tuner.selection.ratios`, from calls of models (`scripts/bench population`, and
`scripts/bench tuner --preset kernels`).

A row has the problem, its model, its answer and the microseconds of ``tuner`` and ``pytorch``. It
counts where an own kernel answered. A row with all built kernels counts whoever answers, by the own
kernel of least expected time. The ratios of each domain go into the shipped portfolios. Each
model's calls are also answered by the ratios of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tuner.errors import ConfigError
from tuner.families.by_operation import AnyDomain
from tuner.hardware import Gpu
from tuner.search.fits.kernels_fit import measured_us
from tuner.search.fits.refit import Refit, portfolio_file, problem_of, rows
from tuner.selection import portfolio_json
from tuner.selection.choice import Selection, choose
from tuner.selection.portfolio import Portfolio, shipped
from tuner.selection.ratios import Ratios

OWN = "selection", "own"
"""Answers of rows by own kernels that a portfolio selected."""
FLOOR = 0.97


class RatioCall(NamedTuple):
    """A call with the times of an own kernel and of PyTorch's."""

    model: str
    selection: Selection
    ratio: float
    """PyTorch's time over the own kernel's."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.selection.domain.sizes(self.selection.problem)


def calls(
    documents: Iterable[Mapping[str, Any]], portfolios: Mapping[str, Portfolio]
) -> list[RatioCall]:
    """Calls of measured domains that PyTorch's rates hold for, with an own kernel's time.

    Args:
        documents: rows of a bench.
        portfolios: portfolios that ship for a GPU, by operation.
    """
    timed: list[RatioCall] = []
    for row in documents:
        problem, us = problem_of(row), row.get("us", {})
        portfolio = portfolios.get(problem.op)
        if portfolio is None or not {"tuner", "pytorch"} <= us.keys():
            continue
        selection = portfolio.select(problem)
        if selection is None or not selection.vendor or not selection.estimates:
            continue
        own, domain = _own_us(row, selection), selection.domain
        if own and domain in portfolio.domains and domain.pytorchs_factor(problem) == 1:
            unnamed = domain.group(problem) if "configs" in row else problem.label()
            model = str(row.get("model") or unnamed)
            timed.append(RatioCall(model, selection, us["pytorch"] / own))
    return timed


def _own_us(row: Mapping[str, Any], selection: Selection) -> float:
    """Microseconds of the call's own kernel; 0 without a time."""
    if "configs" not in row:
        return float(row["us"]["tuner"]) if row["answered"] in OWN else 0.0
    _, _, place, _ = min(selection.estimates)
    return measured_us(selection, row).get(place, (0.0, 0.0))[1]


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Collect the ratios of a GPU's portfolios.

    Raises:
        ConfigError: when a file is wrong, or no own kernel answered a call.
    """
    portfolios = {p.op: p for p in shipped() if p.gpu == gpu}
    by_domain: dict[AnyDomain, list[RatioCall]] = defaultdict(list)
    for call in calls(rows(files), portfolios):
        by_domain[call.selection.domain].append(call)
    if not by_domain:
        raise ConfigError("no call of these files was answered by an own kernel of a portfolio")
    result = Refit("cache/portfolio")
    every = [call for some in by_domain.values() for call in some]
    result.errors.append(f"without ratios: {_kept(every, lambda call: None)}")
    result.errors.append(f"by other models' ratios: {_kept(every, _by_others(by_domain))}")
    for op, portfolio in portfolios.items():
        domains = {
            domain: replace(models, ratios=_ratios(by_domain.get(domain, ())))
            for domain, models in portfolio.domains.items()
        }
        path = portfolio_file(gpu, op)
        new = replace(portfolio, domains=domains)
        result.documents[path] = portfolio_json.text(new.to_json())
    return result


def _ratios(some: Sequence[RatioCall]) -> Ratios | None:
    return Ratios.of((call.sizes, call.ratio) for call in some) if some else None


def _by_others(
    by_domain: Mapping[AnyDomain, Sequence[RatioCall]],
) -> Callable[[RatioCall], Ratios | None]:
    """The ratios of a call's domain without those of its model."""

    def others(call: RatioCall) -> Ratios | None:
        some = by_domain[call.selection.domain]
        return _ratios([c for c in some if c.model != call.model])

    return others


def _kept(every: Sequence[RatioCall], ratios_of: Callable[[RatioCall], Ratios | None]) -> str:
    """Replay of the calls: own kernels where a selection with these ratios has them."""
    logs, own = [], 0
    for call in every:
        old = call.selection
        models = replace(old.times.models, ratios=ratios_of(call))
        now = choose(old.problem, models, old.times.gpu)
        is_own = now is not None and next(now.own(), None) is not None
        logs.append(math.log(call.ratio) if is_own else 0.0)
        own += is_own
    slow = sum(math.exp(log) < FLOOR for log in logs)
    return (
        f"{len(logs)} calls, {math.exp(fmean(logs)):.3f} of PyTorch, worst "
        f"{math.exp(min(logs)):.3f}, {slow} below {FLOOR}, {own} by own kernels"
    )
