"""Kernels of one order of additions for all calls of a layer, whatever their number of rows.

A *layer* is what calls of unlike sizes have in common. It is N, K, types and epilogue of a product,
and head dimension, types and kind of cache of attention. Its class (`Family.reduction_class`) is
chosen once, by the expected times of a few sizes. Then each call has the fastest kernel of that
class.

The choice rests on what ships, never on what is built or measured here: equal versions on GPUs of
one model choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from tuner.config import Config
from tuner.families import families
from tuner.families.base import Family
from tuner.families.by_operation import AnyDomain, AttentionDomain, domain_of, rule_of
from tuner.families.invariance import ReductionClass
from tuner.families.rule import RuleSelection
from tuner.families.target import DTYPES
from tuner.families.work import floor_us, sizes_of
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, DType, GemmProblem, Problem
from tuner.selection.candidates import Candidate
from tuner.selection.choice import page_readings
from tuner.selection.portfolio import Portfolio

ROWS = (1, 8, 32, 128, 512, 2048, 8192)
"""Rows of a product that its class is chosen by, with equal weights."""
DECODED = ((1, 1, 8192), (16, 1, 2048), (64, 1, 1024), (16, 4, 2048))
"""Sequences, queries and keys of decoding that attention's class is chosen by."""
PROMPTS = ((1, 2048), (4, 512), (16, 1024))
"""Sequences and their length, with and without a causal mask."""
WELL_BELOW = 0.75
"""Share of another kernel's expected time, below which a model's errors do not matter."""
Expected = tuple[float, Config, ReductionClass]
"""Expected microseconds, config and class of a kernel."""

_classes: dict[Any, tuple[Portfolio | None, ReductionClass | None]] = {}
"""Classes by the sizes of a layer, GPU and portfolio, which is kept: its address is in the key."""
_DOUBT = "chosen among kernels of one order of additions"


def select(problem: Problem, gpu: Gpu, portfolio: Portfolio | None) -> RuleSelection | None:
    """Kernels of the class of a problem's layer, fastest first; None where there are none.

    Args:
        problem: problem of a call.
        gpu: GPU that it runs on.
        portfolio: portfolio of the operation for the GPU; None: a rule serves the problem, or
            nothing.
    """
    reduction_class = class_of(problem, gpu, portfolio)
    if reduction_class is None:
        return None
    every = kernels(problem, gpu, portfolio)
    serving = sorted(
        ((us, config) for us, config, reduction in every if reduction == reduction_class),
        key=lambda expected: expected[0],
    )
    return RuleSelection(tuple(serving), Regime(), (_DOUBT,)) if serving else None


def class_of(problem: Problem, gpu: Gpu, portfolio: Portfolio | None) -> ReductionClass | None:
    """The class of a problem's layer; None without kernels.

    It serves most of the layer's sizes, and of such classes it loses least to the fastest of each
    size. A size at which it loses much counts more: squared logarithms are averaged.
    """
    sizes = layer(problem)
    key = sizes, gpu.identity, id(portfolio)
    if key not in _classes:
        fastest = _fastest([_times(size, gpu, portfolio) for size in sizes])
        _classes[key] = portfolio, fastest
    return _classes[key][1]


def layer(problem: Any) -> tuple[Problem, ...]:
    """Problems of the sizes that a layer's class is chosen by, equal for all calls of a layer.

    Operations without classes, as gradients of attention, have none.
    """
    if not isinstance(problem, AttentionProblem):
        return tuple(replace(problem, m=m) for m in ROWS if hasattr(problem, "m"))
    if problem.window_left < 0 <= problem.window_right:
        # Lower-right masks: a prompt in one piece has a causal mask in place of such a window.
        problem = replace(problem, window_right=-1)
    layout = problem.layout if problem.is_packed else "bhsd"
    if problem.is_varlen and not problem.is_paged:
        return tuple(_sized(problem, batch, length, length) for batch, length in PROMPTS)
    if problem.is_paged:  # masks are bottom-right: one query is a chunk
        sizes = *DECODED, *((1, length // 2, length) for _, length in PROMPTS)
        return tuple(_sized(problem, *size, is_causal=True) for size in sizes)
    if problem.is_windowed:
        return tuple(_sized(problem, n, length, length, layout=layout) for n, length in PROMPTS)
    masks = (False,) if problem.modifiers else (False, True)
    full = replace(problem, is_causal=False, layout=layout)
    prompts = (
        _sized(full, batch, length, length, is_causal=is_causal)
        for batch, length in PROMPTS
        for is_causal in masks
    )
    return *(_sized(full, *sizes) for sizes in DECODED), *prompts


def _sized(
    problem: AttentionProblem, batch: int, queries: int, keys: int, **changes: Any
) -> AttentionProblem:
    """The problem of other sizes, whose window stays where it hides nothing."""
    sized = replace(problem, batch=batch, seqlen_q=queries, seqlen_kv=keys, **changes)
    if not problem.is_windowed:
        return sized
    return sized.windowed(problem.window_left, problem.window_right)


def _times(
    problem: Problem, gpu: Gpu, portfolio: Portfolio | None
) -> Mapping[ReductionClass, float]:
    """Expected time of each class's fastest kernel."""
    times: dict[ReductionClass, float] = {}
    for us, _, reduction in kernels(problem, gpu, portfolio):
        times[reduction] = min(us, times.get(reduction, math.inf))
    return times


def _fastest(times: Iterable[Mapping[ReductionClass, float]]) -> ReductionClass | None:
    every = list(times)

    def cost(reduction: ReductionClass) -> tuple[int, float, ReductionClass]:
        losses = [
            math.log(of_size[reduction] / min(of_size.values())) ** 2
            for of_size in every
            if reduction in of_size
        ]
        return len(every) - len(losses), math.fsum(losses) / len(losses), reduction

    return min({name for of_size in every for name in of_size}, key=cost, default=None)


def kernels(problem: Problem, gpu: Gpu, portfolio: Portfolio | None) -> Iterator[Expected]:
    """Every kernel that ships, has a class and serves a problem.

    Kernels that were measured for other masks, phases or numbers of rows also take part, if they
    are compiled for this problem's. The problem's domain left them out. So they are taken to be no
    faster than the fastest of their class there, or without one than the fastest there. A product
    may have been left to a vendor there: a kernel of other rows has its own time where it is
    `WELL_BELOW` that.
    """
    if rule := rule_of(problem):
        selection = rule.select(problem, gpu) if rule.serves(problem, gpu) else None
        for us, config in () if selection is None else selection.own():
            if reduction := families()[config.family].reduction_class(problem, config):
                yield us, config, reduction
        yield from _further(problem, gpu)
        return
    mine = domain_of(problem)
    if portfolio is None or mine is None:
        return
    pool = _pool_of(portfolio, mine, problem.dtype)  # type: ignore[attr-defined]
    sizes, yielded = sizes_of(problem), set[Config]()
    is_decoding = isinstance(problem, AttentionProblem) and problem.is_decoding
    least, fastest = floor_us(sizes, gpu, is_decoding) or 0.0, dict[ReductionClass, float]()
    for candidate, is_own in pool.candidates:
        family = candidate.family
        assert family is not None
        config = family.served(problem, family.called(problem, candidate.config, 1))
        reduction = family.reduction_class(problem, config)
        if reduction is None or config in yielded or not family.accepts(problem, config, gpu):
            continue
        specs = family.kernels(problem, config).values()
        if any(spec.key not in pool.shipped for spec in specs):
            continue
        yielded.add(config)
        us = candidate.us(sizes, family.tiling(config), gpu) * page_readings(problem, config)
        us = max(us, least)
        if is_own:
            fastest[reduction] = min(us, fastest.get(reduction, math.inf))
        elif fastest:
            usual = fastest.get(reduction, min(fastest.values()))
            is_left_out = problem.op == GemmProblem.op and us < usual * WELL_BELOW
            us = us if is_left_out else max(us, usual)
        yield us, config, reduction
    yield from _further(problem, gpu)


def _further(problem: Problem, gpu: Gpu) -> Iterator[Expected]:
    """Kernels that serve the mode alone. No portfolio has measured them: the times are those that
    the search's model expects.
    """
    for family in families().values():
        if family.op != problem.op:
            continue
        for us, kernel in family.invariant_kernels(problem, gpu):
            config = family.served(problem, kernel)
            specs = family.kernels(problem, config).values()
            is_shipped = _further_keys(family).issuperset(spec.key for spec in specs)
            if is_shipped and family.accepts(problem, config, gpu):
                reduction = family.reduction_class(problem, config)
                assert reduction is not None
                yield us, config, reduction


@cache
def _further_keys(family: Family) -> frozenset[str]:
    builds = (build for dtype in DTYPES for build in family.invariant_builds(dtype))
    every = (family.kernels(problem, config).values() for config, problem in builds)
    return frozenset(spec.key for specs in every for spec in specs)


class _Pool(NamedTuple):
    """Own candidates of a domain and of related ones."""

    portfolio: Portfolio
    candidates: tuple[tuple[Candidate, bool], ...]
    """With a flag, true of the domain's own, which come first."""
    shipped: frozenset[str]
    """Keys of the kernels that are built for these domains."""


_pools: dict[Any, _Pool] = {}


def _pool_of(portfolio: Portfolio, mine: AnyDomain, dtype: DType) -> _Pool:
    key = id(portfolio), mine, dtype
    if key not in _pools:
        related = sorted(_related(portfolio, mine), key=lambda near: near[0] != mine)
        every = [(domain, candidate) for domain, candidates in related for candidate in candidates]
        shipped = {
            spec.key
            for domain, c in every
            for small in domain.problems(dtype)
            for spec in c.family.kernels(small, c.config).values()  # type: ignore[union-attr]
        }
        candidates = tuple((candidate, domain == mine) for domain, candidate in every)
        _pools[key] = _Pool(portfolio, candidates, frozenset(shipped))
    return _pools[key]


def _related(
    portfolio: Portfolio, mine: AnyDomain
) -> Iterator[tuple[AnyDomain, tuple[Candidate, ...]]]:
    """Own candidates of the domains with the same features compiled in, of any mask and rows."""
    alike = {domain: models for domain, models in portfolio.served() if _alike(domain, mine)}
    models = alike.get(mine) or portfolio.models_of(mine)
    for domain, measured in {**alike, **({mine: models} if models else {})}.items():
        own = [c for c in measured.candidates if c.family is not None and not c.is_vendor]
        # With splits a kernel's sum depends on the number of keys. Without them it has its own
        # rates where it was measured so.
        own.sort(key=lambda c: "combine" not in c.config.params)
        whole = (replace(c, config=without_splits(c.config)) for c in own)
        yield domain, tuple({c.config: c for c in whole}.values())


def without_splits(config: Config) -> Config:
    """The config of the same kernel, whose blocks share no keys."""
    params = {name: value for name, value in config.params.items() if name != "combine"}
    return Config(config.family, params)


def _alike(one: AnyDomain, other: AnyDomain) -> bool:
    return bool(_features(one) == _features(other))


def _features(domain: Any) -> Any:
    if isinstance(domain, AttentionDomain):
        is_windowed = domain.mask == "windowed"
        return domain._replace(mask="windowed" if is_windowed else "full", phase="one")
    return domain._replace(rows="few")
