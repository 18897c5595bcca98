"""Rates of a portfolio's kernels at calls, from times of all that are built (`scripts/bench tuner`
and ``cliffs``, ``--preset kernels``). Domains that had a donor's rates get their own.

A survey times kernels one by one, some with an early launch. Calls of models are launched plainly,
and contenders are interleaved. So the rates of each kernel are multiplied by the median of its
times over the expected ones. A row has the problem, the microseconds of PyTorch's and of own
kernels by name, and the own ones' configs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tuner.errors import ConfigError
from tuner.families.by_operation import AnyDomain
from tuner.families.fitting import Constants, FitGroup
from tuner.hardware import Gpu
from tuner.problem import Problem, problem_from_json
from tuner.search.fits.refit import Refit, portfolio_file, rows
from tuner.selection import portfolio_json
from tuner.selection.candidates import DomainModels
from tuner.selection.choice import Selection
from tuner.selection.portfolio import Portfolio, shipped

MIN_CALLS, MIN_GROUPS = 3, 2
"""Fewest calls, and models of them, that a kernel's factor is the median of."""
MIN_OF_DOMAIN = 5
"""Fewest calls of a domain whose rates are changed."""
NEAR = 1.6
"""Longest time that counts, over the fastest kernel's: a choice is made among the near ones."""
DIGITS = 6
"""Digits of a config's digest in a row."""


class KernelCall(NamedTuple):
    """A call with the times of a domain's kernels."""

    problem: Problem
    domain: AnyDomain
    times: Mapping[str, tuple[float, float]]
    """Expected and measured microseconds of own candidates, by the digest of their config."""

    @property
    def group(self) -> tuple[int, ...]:
        """Key of its model."""
        return self.domain.group(self.problem)


def measured_us(selection: Selection, row: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    """Expected and measured microseconds of a selection's own kernels, by their place in the
    domain; the least expected of a kernel's schedules counts.
    """
    named = {text.removeprefix("tuner "): us for text, us in row["us"].items()}
    times: dict[int, tuple[float, float]] = {}
    for _, us, place, splits in sorted(selection.estimates):
        config = selection.times.config(selection.problem, place, splits, selection.facts)
        if config is not None and place not in times and config.digest[:DIGITS] in named:
            times[place] = us, named[config.digest[:DIGITS]]
    return times


def calls(
    documents: Iterable[Mapping[str, Any]], portfolios: Mapping[str, Portfolio]
) -> list[KernelCall]:
    """Calls with two own candidates or more.

    Args:
        documents: rows of a bench.
        portfolios: portfolios that ship for a GPU, by operation.
    """
    timed: list[KernelCall] = []
    for row in documents:
        problem = problem_from_json(row["problem"])
        portfolio = portfolios.get(problem.op)
        selection = portfolio.select(problem) if portfolio and "configs" in row else None
        if selection is None:
            continue
        candidates = selection.times.models.candidates
        times = {candidates[at].config.digest: us for at, us in measured_us(selection, row).items()}
        if len(times) > 1:
            timed.append(KernelCall(problem, selection.domain, times))
    return timed


def factors(some: Sequence[KernelCall], kernels: Iterable[str] = ()) -> dict[str, float]:
    """The factor of each kernel, by calls where it is near the fastest. A kernel with too few, or
    without any time, has the median of the others' factors; 1 without any.

    Args:
        some: calls of a domain.
        kernels: digests of the domain's own kernels.
    """
    ratios: dict[str, list[tuple[float, tuple[int, ...]]]] = defaultdict(list)
    ratios |= {name: [] for name in kernels}
    for call in some:
        longest = NEAR * min(us for _, us in call.times.values())
        for name, (expected, us) in call.times.items():
            ratios[name] += [(us / expected, call.group)] if us <= longest else []
    timed = {
        name: median(ratio for ratio, _ in near)
        for name, near in ratios.items()
        if len(near) >= MIN_CALLS and len({group for _, group in near}) >= MIN_GROUPS
    }
    usual = median(timed.values()) if timed else 1.0
    return {name: timed.get(name, usual) for name in ratios}


def loss(call: KernelCall, by: Constants) -> float:
    """Time of the own kernel of least expected time over the fastest own one, less 1."""
    expected = {name: us * by.get(name, 1.0) for name, (us, _) in call.times.items()}
    fastest = min(us for _, us in call.times.values())
    return call.times[min(expected, key=expected.__getitem__)][1] / fastest - 1


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Multiply the rates of a GPU's portfolios, and those of donors.

    Args:
        files: files of the bench.
        gpu: GPU of the portfolios.
        only: texts that a domain's name must hold, all of them.

    Raises:
        ConfigError: when a file is wrong, or times no kernels of a domain.
    """
    portfolios = {p.op: p for p in shipped() if p.gpu == gpu}
    by_domain: dict[AnyDomain, list[KernelCall]] = defaultdict(list)
    for call in calls(rows(files), portfolios):
        by_domain[call.domain].append(call)
    if not by_domain:
        raise ConfigError("no call of these files has the times of two kernels of a portfolio")
    result, factors_of = Refit("cache/portfolio"), dict[AnyDomain, Constants]()
    for domain, some in sorted(by_domain.items(), key=lambda pair: pair[0].label()):
        if len(some) >= MIN_OF_DOMAIN and all(text in domain.label() for text in only):
            models = portfolios[some[0].problem.op].models_of(domain)
            assert models is not None
            own = [one.config.digest for one in models.candidates if not one.is_vendor]
            fitted, ships = partial(factors, kernels=own), dict.fromkeys(own, 1.0)
            group = FitGroup(domain.label(), some, ships, fitted, loss, lambda call: call.group)
            factors_of[domain] = result.fit(group, is_guarded=True)
    for op, portfolio in portfolios.items():
        domains = dict(portfolio.domains)
        for domain, by in factors_of.items():
            models = portfolio.models_of(domain) if domain.op == op else None
            domains |= {domain: _multiplied(models, by)} if models is not None else {}
        new = replace(portfolio, domains=domains)
        result.documents[portfolio_file(gpu, op)] = portfolio_json.text(new.to_json())
    return result


def _multiplied(models: DomainModels, by: Constants) -> DomainModels:
    candidates = []
    for one in models.candidates:
        factor = by.get(one.config.digest, 1.0)
        rates = {term: us * factor for term, us in one.rates.items()}
        candidates.append(replace(one, rates=rates))
    return replace(models, candidates=candidates)
