"""Rates of each term of kernels' time models, from times at calls (`scripts/bench cliffs`, and its
``--preset kernels``). Domains that had a donor's rates get their own.

`tuner.search.fits.kernels_fit` multiplies all rates of a kernel alike, so that the order of kernels
is right. The times decide if PyTorch or a peer is faster. So each term has a factor of its own
here, for own kernels and for PyTorch's. A row without times of all kernels tells that of the one
that answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tuner.families.by_operation import AnyDomain
from tuner.families.fitting import Constants, FitGroup, nonnegative
from tuner.families.work import sizes_of
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem
from tuner.search.fits.kernels_fit import DIGITS
from tuner.search.fits.ratios_fit import OWN
from tuner.search.fits.refit import Refit, attention_portfolio, portfolio_file, problem_of, rows
from tuner.selection import portfolio_json
from tuner.selection.candidates import Candidate, DomainModels
from tuner.selection.choice import Selection
from tuner.selection.portfolio import Portfolio, serving, shipped

TRUST = 0.06
"""Weight of a term's factor being as it was, beside a relative error squared."""
SHARE = 0.2
"""Part of the mean time that a term without a rate has at a factor of 1."""
MIN_TIMES, MIN_OF_DOMAIN = 4, 6
"""Fewest times of a kernel, and calls of a domain."""
ACCURACY = 0.5
"""Loss of an error of a time, over that of as much time lost by a choice."""
PARTS, LEAST_US = 4, 1e-3
NEAR = 1.8
"""Longest time that counts, over the fastest kernel's."""


class Timed(NamedTuple):
    """A kernel's time of a call."""

    amounts: tuple[float, ...]
    us: float


class ShapedCall(NamedTuple):
    """A call with the times of a domain's kernels, PyTorch's among them, by config's digest."""

    domain: AnyDomain
    group: tuple[int, ...]
    times: Mapping[str, Timed]


def calls(documents: Iterable[Mapping[str, Any]], portfolio: Portfolio) -> list[ShapedCall]:
    """Calls of attention, those of packed sequences with their lengths."""
    timed: list[ShapedCall] = []
    for row in documents:
        problem = problem_of(row)
        if not isinstance(problem, AttentionProblem) or "mask=" in row.get("case", ""):
            continue
        selection = portfolio.select(problem)
        if selection is None or problem.is_paged or not isinstance(row.get("us"), Mapping):
            continue
        times = dict(_times(selection, row))
        if times:
            group = selection.domain.group(problem)
            timed.append(ShapedCall(selection.domain, group, times))
    return timed


def _times(selection: Selection, row: Mapping[str, Any]) -> Iterator[tuple[str, Timed]]:
    named = dict(row["us"])
    first = next(selection.own(), None)
    if "configs" not in row and row["answered"] in OWN and first is not None:
        named[first[1].digest[:DIGITS]] = named["tuner"]
    models, seen = selection.times.models, set[int]()
    for _, _, place, splits in sorted(selection.estimates):
        config = selection.times.config(selection.problem, place, splits, selection.facts)
        if config is not None and place not in seen and config.digest[:DIGITS] in named:
            seen.add(place)
            one, us = models.candidates[place], named[config.digest[:DIGITS]]
            yield one.config.digest, Timed(_amounts(selection, one, splits), us)
    if "pytorch" in named and models.domain.pytorchs_factor(selection.problem) == 1:
        for one in selection.times.vendors:
            if one.config["kernel"] == selection.vendor:
                yield one.config.digest, Timed(_amounts(selection, one, 1), named["pytorch"])


def _amounts(selection: Selection, one: Candidate, splits: int) -> tuple[float, ...]:
    member = one.family
    assert member is not None
    tiling = member.tiling(one.config)
    if splits > 1:
        tiling = tiling._replace(splits=splits)
    return tuple(member.amounts(sizes_of(selection.problem), tiling, selection.times.gpu))


def _named(digest: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{digest} {place}": value for place, value in enumerate(values)}


def _us(digest: str, one: Timed, rates: Constants) -> float:
    return sum(rates[f"{digest} {i}"] * amount for i, amount in enumerate(one.amounts))


def fitted(
    some: Sequence[ShapedCall], ships: Constants, digests: Container[str]
) -> dict[str, float]:
    """Rates by kernel and term, of the kernels with such digests. Those that ship stay where a
    kernel has few times, and where a part of these is expected no better by the others' rates.
    """
    rates, by_kernel = dict(ships), defaultdict[str, list[tuple[Timed, float]]](list)
    for call in some:
        fastest = min(one.us for one in call.times.values())
        for digest, one in call.times.items():
            if one.us <= NEAR * fastest and digest in digests:
                by_kernel[digest].append((one, (fastest / one.us) ** 2))
    for digest, every in by_kernel.items():
        if len(every) < MIN_TIMES:
            continue
        places = range(len(every[0][0].amounts))
        start = [max(0.0, ships[f"{digest} {place}"]) for place in places]
        before = sum(_error(one, start) for one, _ in every)
        after = 0.0
        for part in range(PARTS):
            others = [x for i, x in enumerate(every) if i % PARTS != part]
            by_others = _by_times(others, start)
            after += sum(_error(one, by_others) for one, _ in every[part::PARTS])
        if after < before:
            rates |= _named(digest, _by_times(every, start))
    return rates


def _by_times(every: Sequence[tuple[Timed, float]], start: Sequence[float]) -> list[float]:
    amounts, times = [one.amounts for one, _ in every], [one.us for one, _ in every]
    return shaped(amounts, times, start, [weight for _, weight in every])


def _error(one: Timed, rates: Sequence[float]) -> float:
    us = sum(rate * amount for rate, amount in zip(rates, one.amounts, strict=True))
    return abs(math.log(max(us, LEAST_US) / one.us))


def loss(call: ShapedCall, rates: Constants) -> float:
    """Time lost by the choice of the least expected time, and the error of that time."""
    expected = {digest: _us(digest, one, rates) for digest, one in call.times.items()}
    first = min(expected, key=expected.__getitem__)
    us, fastest = call.times[first].us, min(one.us for one in call.times.values())
    error = abs(math.log(max(expected[first], LEAST_US) / us))
    return us / fastest - 1 + ACCURACY * error


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Shape the rates of a GPU's portfolio of attention.

    Args:
        files: files of the bench.
        gpu: GPU of the portfolio.
        only: texts that a domain's name must hold, all of them.

    Raises:
        ConfigError: when a file is wrong, or has no call of such a domain.
    """
    ships = attention_portfolio(gpu)
    (serves,) = serving([one for one in shipped() if one.op == ships.op], gpu)
    by_domain: dict[AnyDomain, list[ShapedCall]] = defaultdict(list)
    for call in calls(rows(files), serves):
        by_domain[call.domain].append(call)
    result, new = Refit("cache/portfolio"), dict(ships.domains)
    for domain, some in sorted(by_domain.items(), key=lambda pair: pair[0].label()):
        models = serves.models_of(domain)
        if len(some) < MIN_OF_DOMAIN or models is None:
            continue
        if all(text in domain.label() for text in only):
            by_times = _shaped(result, models, some)
            new |= {} if by_times is models else {domain: by_times}
    text = portfolio_json.text(replace(ships, domains=new).to_json())
    result.documents[portfolio_file(gpu, "attention")] = text
    return result


def _shaped(result: Refit, models: DomainModels, some: Sequence[ShapedCall]) -> DomainModels:
    """The models with shaped rates, of PyTorch's kernels and of own ones each where choices and
    times gain by them; themselves where neither gains. PyTorch's of short prompts stay a donor's:
    those of few calls were 8 times too short at two queries of 80 heads.
    """
    rates: dict[str, float] = {}
    for one in models.candidates:
        rates |= _named(one.config.digest, one.priced)
    ships = rates
    for is_vendor, title in ((True, "PyTorch's"), (False, "own")):
        if is_vendor and getattr(models.domain, "is_short_prompt", False):
            continue
        digests = {c.config.digest for c in models.candidates if c.is_vendor is is_vendor}
        fit = partial(fitted, ships=rates, digests=digests)
        text = f"{models.domain.label()}, {title}"
        group = FitGroup(text, some, rates, fit, loss, lambda call: call.group)
        rates = dict(result.fit(group, 0.0))
    if rates == ships:
        return models
    candidates = []
    for one in models.candidates:
        terms = one.family.work_terms if one.family else ()
        values = [rates[f"{one.config.digest} {place}"] for place in range(len(terms))]
        named = {term: us for term, us in zip(terms, values, strict=True) if us}
        candidates.append(replace(one, rates=named))
    return replace(models, candidates=candidates, made_on=None, donor=None)


def shaped(
    amounts: Sequence[Sequence[float]],
    measured: Sequence[float],
    rates: Sequence[float] = (),
    weights: Sequence[float] = (),
) -> list[float]:
    """Rates, not negative, by which amounts of work add up to measured times.

    With rates to begin from, all are multiplied by the factor that most times need. Then each term
    has a factor of its own, near 1 while few times speak against it (`TRUST`). Terms without a rate
    are near 0 so.

    Raises:
        ConfigError: when scipy is not installed.
    """
    import numpy as np

    parts = np.array(amounts, float) / np.array(measured, float)[:, None]
    mine = np.array(rates or [0.0] * parts.shape[1], float)
    if (errors := (parts * mine).sum(axis=1)).any():
        mine *= np.exp(np.median(-np.log(errors)) * len(errors) / (len(errors) + 1))
    scale = np.where(mine > 0, mine, SHARE / np.maximum(parts.mean(axis=0), np.finfo(float).tiny))
    roots, trust = np.sqrt(np.array(weights or [1.0] * len(parts))), math.sqrt(TRUST)
    rows = np.vstack([parts * scale * roots[:, None], trust * np.eye(len(scale))])
    factors = nonnegative(rows, np.concatenate([roots, trust * (mine > 0)]))
    return [float(f"{us:.5g}") for us in factors * scale * parts.any(axis=0)]
