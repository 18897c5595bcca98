"""Rates of a portfolio's kernels at calls, from times of all that are built (`scripts/bench tuner`
and ``cliffs``, ``--preset kernels``). Domains that had a donor's rates get their own.

A survey times kernels one by one, some with an early launch. Calls of models are launched plainly,
and contenders are interleaved. So the rates of each kernel are multiplied by the median of its
times over the expected ones. A row has the problem, the microseconds of PyTorch's and of own
kernels by name, and the own ones' configs.

Kernels of other domains that are built for a domain join it, by greedy choice. Each has the other
domain's rates, and its factor here.
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
from tuner.families.target import DTYPES
from tuner.hardware import Gpu
from tuner.problem import Problem
from tuner.search.fits.refit import Refit, portfolio_file, problem_of, rows
from tuner.selection import portfolio_json
from tuner.selection.candidates import Candidate, DomainModels, Spread
from tuner.selection.choice import Selection
from tuner.selection.kernels import targets
from tuner.selection.portfolio import Portfolio, shipped

MIN_CALLS, MIN_GROUPS = 3, 2
"""Fewest calls, and models of them, that a kernel's factor is the median of."""
MIN_OF_DOMAIN = 5
"""Fewest calls of a domain whose rates are changed."""
NEAR = 1.6
"""Longest time that counts, over the fastest kernel's: a choice is made among the near ones."""
MAX_JOINED, MIN_GAIN = 4, 1e-3
"""Most kernels that join a domain, and the least part by which each lowers the mean loss."""
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
        problem = problem_of(row)
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
    timed = _timed(some, kernels)
    usual = median(timed.values()) if timed else 1.0
    return {name: timed.get(name, usual) for name in kernels}


def _timed(some: Sequence[KernelCall], kernels: Iterable[str]) -> dict[str, float]:
    """Factors of the kernels that are near the fastest at enough calls."""
    ratios: dict[str, list[tuple[float, tuple[int, ...]]]] = defaultdict(list)
    for call in some:
        longest = NEAR * min(us for _, us in call.times.values())
        for name, (expected, us) in call.times.items():
            ratios[name] += [(us / expected, call.group)] if us <= longest else []
    return {
        name: median(ratio for ratio, _ in ratios[name])
        for name in kernels
        if len(ratios[name]) >= MIN_CALLS and len({of for _, of in ratios[name]}) >= MIN_GROUPS
    }


def joined(
    some: Sequence[KernelCall], kernels: Sequence[str], others: Iterable[str], fixed: Constants
) -> dict[str, float]:
    """Factors of a domain's own kernels and of those that join it.

    Args:
        some: calls of the domain.
        kernels: digests of its own kernels whose factors are fitted.
        others: digests of kernels of other domains.
        fixed: factors of further kernels of the domain.
    """
    by, open_ = {**factors(some, kernels), **fixed}, _timed(some, others)
    for _ in range(MAX_JOINED):
        losses = {name: _total(some, {**by, name: open_[name]}) for name in open_}
        name = min(losses, key=losses.__getitem__, default=None)
        if name is None or _total(some, by) - losses[name] < MIN_GAIN * len(some):
            break
        by[name] = open_.pop(name)
    return by


def _total(some: Sequence[KernelCall], by: Constants) -> float:
    return sum(loss(call, by) for call in some)


def loss(call: KernelCall, by: Constants) -> float:
    """Time of the own kernel of least expected time over the fastest one, less 1; kernels without a
    factor are not chosen.
    """
    expected = {name: us * by[name] for name, (us, _) in call.times.items() if name in by}
    if not expected:
        return 0.0
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
    widened = {op: _widened(portfolio) for op, portfolio in portfolios.items()}
    by_domain: dict[AnyDomain, list[KernelCall]] = defaultdict(list)
    for call in calls(rows(files), widened):
        by_domain[call.domain].append(call)
    if not by_domain:
        raise ConfigError("no call of these files has the times of two kernels of a portfolio")
    result, new = Refit("cache/portfolio"), {op: dict(p.domains) for op, p in portfolios.items()}
    for domain, some in sorted(by_domain.items(), key=lambda pair: pair[0].label()):
        if len(some) >= MIN_OF_DOMAIN and all(text in domain.label() for text in only):
            models, narrow = widened[domain.op].domains[domain], new[domain.op].get(domain)
            own = _own(models if narrow is None else narrow)
            others = [digest for digest in _own(models) if digest not in own]
            by = _fit(result, domain.label(), some, own, others)
            new[domain.op][domain] = _multiplied(models, by)
    for op, portfolio in portfolios.items():
        text = portfolio_json.text(replace(portfolio, domains=new[op]).to_json())
        result.documents[portfolio_file(gpu, op)] = text
    return result


def _fit(
    result: Refit, title: str, some: Sequence[KernelCall], own: Sequence[str], others: Sequence[str]
) -> Constants:
    """Factors of a domain with kernels that join it, else of those that join it, else of its own:
    the first that lose less at models left out. Kernels that join each domain as it is read, as
    those with filled rows, keep their rates.
    """
    here = (name for call in some for name in call.times)
    added = dict.fromkeys((name for name in here if name not in {*own, *others}), 1.0)
    ships = {**dict.fromkeys(own, 1.0), **added}
    ways = (
        (f"{title}, joined", own, others, added, MIN_GAIN),
        (f"{title}, only joined", (), others, ships, MIN_GAIN),
        (title, own, (), added, 0.0),
    )
    for name, kernels, joining, fixed, gain in ways:
        fitted = partial(joined, kernels=kernels, others=joining, fixed=fixed)
        group = FitGroup(name, some, ships, fitted, loss, lambda call: call.group)
        if (by := result.fit(group, gain)) is not ships:
            return by
    return ships


def _own(models: DomainModels) -> list[str]:
    """Digests of a domain's own kernels."""
    return [one.config.digest for one in models.candidates if not one.is_vendor]


def _widened(portfolio: Portfolio) -> Portfolio:
    """The portfolio whose domains also have the kernels of others that are built for them."""
    built = {spec.key for target in targets(portfolio) for spec in target.kernels.values()}

    def is_built(domain: AnyDomain, one: Candidate) -> bool:
        if one.family is None or one.is_vendor:
            return False
        problems = (problem for dtype in DTYPES for problem in domain.problems(dtype))
        specs = (one.family.kernels(problem, one.config).values() for problem in problems)
        return all(spec.key in built for each in specs for spec in each)

    domains = dict(portfolio.served())
    for domain, models in portfolio.domains.items():
        own = [one for one in models.candidates if not one.is_vendor]
        here = {one.config.digest for one in models.candidates}
        others: dict[str, Candidate] = {}
        for other in sorted(portfolio.domains, key=partial(_unlike, domain)):
            for one in portfolio.domains[other].candidates:
                if one.config.digest not in here and is_built(domain, one):
                    spread = Spread.over(each.spread for each in own)
                    others.setdefault(one.config.digest, replace(one, spread=spread))
        domains[domain] = replace(models, candidates=[*models.candidates, *others.values()])
    return replace(portfolio, domains=domains)


def _unlike(domain: AnyDomain, other: AnyDomain) -> int:
    """Number of facts of a domain that another one does not have."""
    return sum(mine != its for mine, its in zip(domain, other, strict=False))


def _multiplied(models: DomainModels, by: Constants) -> DomainModels:
    candidates = []
    for one in models.candidates:
        if one.is_vendor or one.config.digest in by:
            factor = 1.0 if one.is_vendor else by[one.config.digest]
            rates = {term: us * factor for term, us in one.rates.items()}
            candidates.append(replace(one, rates=rates))
    return replace(models, candidates=candidates)
