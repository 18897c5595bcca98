"""Kernels that a portfolio is made from.

`sample` names the kernels of a domain: those of the shipped portfolio, then, if there are few, the
best by the families' time estimates. Attention also tries the kernels of nearby domains. ``tuner
develop survey --portfolio`` measures the kernels at `sampled_problems.problems`, and `tuner develop
fit` makes a portfolio of the recordings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from tuner.config import Config, Value
from tuner.families import families, families_of
from tuner.families.attention_instances import INSTANCES
from tuner.families.base import Family
from tuner.families.by_operation import (
    MAX_NARROW,
    AnyDomain,
    AttentionDomain,
    GatedDomain,
    Phase,
    ProductDomain,
    Rows,
    domain_of,
)
from tuner.families.collective import PLAIN
from tuner.families.product_work import MEGABYTE, ProductSizes
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem
from tuner.selection.portfolio import Portfolio

_P = TypeVar("_P", bound=Problem)

MAX_ESTIMATE = 2.0
"""Longest estimate of a product's kernel that is timed, over the shortest one at the problem."""
TIMED_KERNELS = 8
"""Most compiled kernels of a product that are timed, those of the shortest estimates. With all of
them there were fewer problems, and PyTorch's kernel is timed at each."""
MAX_RESIDENT_BYTES = 20 << 20
"""Largest operands of a product whose tiles are timed in one order: the L2 holds them."""
KERNELS = 8
"""Compiled kernels of an attention domain."""
PRODUCT_KERNELS: Mapping[Rows, int] = {"few": 8, "narrow": 18, "wide": 28, "tall": 10}
"""Compiled kernels of a domain of plain products."""
ACTIVATED_KERNELS = 3
"""Compiled kernels of a domain of products with an activation: those of the plain products. With a
bias only PyTorch's are timed."""
GATED_KERNELS = 6
"""Compiled kernels of a domain of gated products."""
GRADIENT_KERNELS = 8
"""Compiled kernels of a domain of gradients of linear layers."""
STREAM_KERNELS = 2
"""Fewest kernels of a narrow product's domain that split K between multiprocessors."""
SPLITS = 2
"""Numbers of splits timed for a kernel, the best by the estimate."""


def sample(
    domain: AnyDomain, problems: Sequence[_P], gpu: Gpu, portfolio: Portfolio | None
) -> dict[_P, list[list[Config]]]:
    """Candidates at each problem of a domain, grouped by their kernel; PyTorch's are first, so
    that a survey that ends early has them.

    Args:
        domain: domain of the problems.
        problems: problems to time.
        gpu: GPU that they are timed on.
        portfolio: portfolio whose kernels take part; None: use the estimates only.
    """
    kernels = _kernels(domain, problems, gpu, portfolio)
    drawn = {}
    for problem in problems:
        groups = [list(_variants(problem, kernel, gpu)) for kernel in kernels]
        if not isinstance(domain, AttentionDomain):
            groups = _promising(problem, groups, gpu)[:TIMED_KERNELS]
        own = _pytorchs(problem, domain, gpu)
        drawn[problem] = [group for group in (own, *groups) if group]
    return drawn


def of_portfolio(
    problem: Problem,
    gpu: Gpu,
    portfolio: Portfolio,
    *,
    is_whole: bool = False,
    further: Sequence[Config] = (),
) -> list[list[Config]]:
    """A portfolio's kernels at a problem, grouped by kernel, each with its run-time variants.
    PyTorch's kernels are first.

    Args:
        problem: problem of the portfolio's operation.
        gpu: GPU that it is timed on.
        portfolio: portfolio that serves there.
        is_whole: True for the kernels of all domains that take the problem; False: its own.
        further: compiled kernels that may join them, as configs without run-time parameters.
    """
    domain = domain_of(problem)
    if domain is None:
        return []
    domains = [domain, *(d for d, _ in portfolio.served() if is_whole)]
    kernels = dict.fromkeys(k for each in domains for k in _of_portfolio(each, portfolio))
    kernels |= dict.fromkeys(further)
    groups = (list(_variants(problem, kernel, gpu)) for kernel in kernels)
    return [group for group in (_pytorchs(problem, domain, gpu), *groups) if group]


def _pytorchs(problem: Problem, domain: AnyDomain, gpu: Gpu) -> list[Config]:
    """PyTorch's own kernels at a problem."""
    vendors = [f for f in families_of(problem.op).values() if f.is_vendor and f.work_terms]
    return [c for f in vendors for c in f.space(problem, gpu) if c["kernel"] in domain.vendors]


def _promising(problem: Any, groups: Sequence[Sequence[Config]], gpu: Gpu) -> list[list[Config]]:
    """Groups of a product's kernels without those that are estimated to take much longer than the
    best, in the order of their best estimates.
    """
    if not groups:
        return []
    estimates = []
    for place, group in enumerate(groups):
        times = [families()[c.family].predict_us(problem, c, gpu) for c in group]
        estimates.append((min(times, default=math.inf), place))
    least = min(us for us, _ in estimates)
    near = sorted(e for e in estimates if e[0] <= MAX_ESTIMATE * least)
    return [list(groups[place]) for _, place in near if groups[place]]


def _kernels(
    domain: AnyDomain, problems: Sequence[Any], gpu: Gpu, portfolio: Portfolio | None
) -> list[Config]:
    """Compiled kernels of a domain, as configs without run-time parameters."""
    if isinstance(domain, ProductDomain) and domain.epilogue == "bias":
        return []
    own = dict.fromkeys(_of_portfolio(domain, portfolio))
    count, is_narrow = KERNELS, False
    if isinstance(domain, GatedDomain):
        count, is_narrow = GATED_KERNELS, domain.rows == "narrow"
    elif isinstance(domain, ProductDomain) and (domain.epilogue or domain.gradient):
        count = GRADIENT_KERNELS if domain.gradient else ACTIVATED_KERNELS
    elif isinstance(domain, ProductDomain):
        count, is_narrow = PRODUCT_KERNELS[domain.rows], domain.rows == "narrow"
    elif domain.phase != "prompt":
        own |= dict.fromkeys(domain.padded_kernels(problems))
    if isinstance(domain, AttentionDomain):
        own |= dict.fromkeys(domain.lazy_kernels(list(own)))
    if len(own) >= count or (isinstance(domain, AttentionDomain) and domain.has_softcap):
        return list(own)
    near = [k for other in _near(domain) for k in _of_portfolio(other, portfolio)]
    spaces = [
        _compiled(config)
        for family in families_of(domain.op).values()
        if family.work_terms and not family.is_vendor
        for problem in problems
        if not near or isinstance(domain, AttentionDomain)
        for config in _best(family, problem, gpu, is_narrow)
    ]
    usable = [
        (k, [_estimate(problem, k, gpu) for problem in problems])
        for k in dict.fromkeys((*own, *near, *spaces))
    ]
    divided = [u for u in usable if u[0].get("tile_scheduler") == "StreamK"]
    streamed = _covering(divided, 0, STREAM_KERNELS) if is_narrow else []
    usable = [u for u in usable if u[0] not in streamed]
    return [*_covering(usable, len(own), count - len(streamed)), *streamed]


def _covering(
    usable: Sequence[tuple[Config, Sequence[float]]], configs: int, count: int
) -> list[Config]:
    """The first `configs` kernels, then those that lower the mean time most.

    When no kernel lowers it any more, the best of the remaining ones are added.
    """
    picked = [config for config, _ in usable[:configs]]
    open = [(config, times) for config, times in usable[configs:] if min(times) < math.inf]
    reached = [min(t) for t in zip(*(times for _, times in usable[:configs]), strict=True)]
    best = [min(t) for t in zip(*(times for _, times in usable), strict=True)]
    while open and len(picked) < count:
        now = _loss(reached, best)
        losses = [
            (_loss(_least(reached, times), best), config.get("swap_ab", False), config.digest)
            for config, times in open
        ]
        (loss, *_), place = min((t, place) for place, t in enumerate(losses))
        if reached and now - loss < 1e-3:  # no gain is left: cover again with the remaining ones
            reached = []
            continue
        config, times = open.pop(place)
        picked.append(config)
        reached = _least(reached, times)
    return picked


def _least(reached: Sequence[float], times: Sequence[float]) -> list[float]:
    return list(map(min, reached, times)) if reached else list(times)


def _loss(times: Sequence[float], best: Sequence[float]) -> float:
    """Mean loss over the best times; a problem that no kernel takes counts as 1."""
    pairs = zip(times or [math.inf] * len(best), best, strict=True)
    return fmean(min(1.0, us / least - 1) if us < math.inf else 1.0 for us, least in pairs)


def _of_portfolio(domain: AnyDomain, portfolio: Portfolio | None) -> Iterator[Config]:
    """The portfolio's kernels that serve a domain."""
    models = None if portfolio is None else portfolio.models_of(domain)
    for candidate in models.candidates if models else ():
        if not candidate.is_vendor and candidate.family is not None:
            yield _compiled(candidate.config)


def _near(domain: AnyDomain) -> Iterator[AnyDomain]:
    """Domains whose kernels may also serve this one: the other phase of decoding, and the next
    smaller and larger head dimensions; of a product with an epilogue the plain one.
    """
    if isinstance(domain, ProductDomain):
        yield from domain.donors
    if not isinstance(domain, AttentionDomain):
        return
    other: dict[Phase, Phase] = {"one": "few", "few": "one"}
    if domain.phase in other:
        yield domain._replace(phase=other[domain.phase])
    at = INSTANCES.index(domain.head_dim)
    for width in INSTANCES[max(0, at - 1) : at + 2]:
        if width != domain.head_dim:
            yield domain._replace(head_dim=width)


def _compiled(config: Config) -> Config:
    """The compiled kernel of a config, without the parameters of a launch."""
    names = families()[config.family].runtime_parameters | {"packed_heads"}
    packed = {name: config[name] for name in ("packed_heads",) if config.get(name, 1) != 1}
    params = {name: value for name, value in config.params.items() if name not in names}
    return Config(config.family, {**params, **packed})


def _best(
    family: Family, problem: Problem, gpu: Gpu, is_narrow: bool, count: int = 4
) -> list[Config]:
    """The best configs of a problem's space by the estimate, one for each kernel; for narrow
    products also the best that splits K.
    """
    if family.supports(problem, gpu):
        return []
    best: dict[Config, Config] = {}
    space = sorted(family.space(problem, gpu), key=lambda c: family.predict_us(problem, c, gpu))
    for config in space:
        best.setdefault(_compiled(config), config)
        if len(best) == count:
            break
    divided = (c for c in space if is_narrow and c.get("tile_scheduler") == "StreamK")
    return [*best.values(), *([first] if (first := next(divided, None)) is not None else [])]


def _estimate(problem: Problem, kernel: Config, gpu: Gpu) -> float:
    """Estimated microseconds of a kernel's best variant; infinite without a legal one."""
    family = families()[kernel.family]
    times = (family.predict_us(problem, c, gpu) for c in _variants(problem, kernel, gpu))
    return min(times, default=math.inf)


def _variants(problem: Problem, kernel: Config, gpu: Gpu) -> Iterator[Config]:
    """Configs of a compiled kernel at a problem, with few numbers of splits."""
    family = families()[kernel.family]
    if isinstance(problem, AttentionProblem):
        ways = _attention_ways(problem)
    else:
        ways = _product_ways(problem, kernel)
    for way in ways:
        config = Config(kernel.family, {**kernel.params, **way})
        legal = [
            c for c in family.scheduled(problem, config, gpu) if family.accepts(problem, c, gpu)
        ]
        yield from sorted(legal, key=partial(family.predict_us, problem, gpu=gpu))[:SPLITS]


def _attention_ways(problem: AttentionProblem) -> list[dict[str, Value]]:
    """Run-time parameters to try: programmatic dependent launch for prompts, and each way to
    combine splits for decoding.
    """
    if not problem.is_decoding:
        return [{"pdl": False}, {"pdl": True}]
    ways: tuple[dict[str, Value], ...] = ({}, {"combine": "cluster"}, {"combine": "kernel"})
    return [{"pdl": True, **way} for way in ways]


def _product_ways(problem: Any, kernel: Config) -> list[dict[str, Value]]:
    """Run-time parameters to try: tile orders, persistent blocks, ways to split K. The launch hides
    behind the kernel in front (programmatic dependent launch) wherever that is legal: it was faster
    nearly everywhere. A short product has one order: its tiles lie in a row.
    """
    if tried := families()[kernel.family].tried_calls:
        return [dict(way) for way in tried]
    if kernel["kernel_schedule"] == PLAIN:
        return [{"pdl": True}]
    orders: list[dict[str, Value]] = [
        {"raster_order": order, "max_swizzle_size": 1} for order in ("AlongM", "AlongN")
    ]
    if kernel.get("tile_scheduler") == "StreamK":
        modes = "StreamK", "SplitK"
        return [{**orders[0], "decomposition_mode": mode} for mode in modes]
    is_short = min(problem.m, problem.n) <= MAX_NARROW
    is_resident = ProductSizes.of(problem).inputs * MEGABYTE <= MAX_RESIDENT_BYTES
    used = orders[:1] if is_short or is_resident else orders
    return [{**order, "pdl": True} for order in used]
