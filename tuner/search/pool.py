"""What a portfolio is made from: kernels worth timing, and problems of public models.

For each domain of `tuner.selection.portfolio` that models call, `problems` draws calls of the
models that selections are made from. `sample` names the kernels: those of the shipped portfolio,
and where it has few for the domain, the best by the families' time estimates out of the spaces of
its problems and of the kernels that serve near domains. ``tuner survey --portfolio`` measures them,
and `tuner fit` makes a portfolio of the recordings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean

from tuner.config import Config, Value
from tuner.families import families, families_of
from tuner.families.base import Family
from tuner.families.fused_attention import INSTANCES
from tuner.families.vendor.sdpa import BACKENDS
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, Problem
from tuner.problem.population import draw, subset
from tuner.selection.portfolio import Domain, Mask, Phase, Portfolio

SEED, CALLS = "survey", 4000
"""Of the calls of models that problems are taken from."""
PROBLEMS: Mapping[int, int] = {64: 18, 96: 12, 128: 18, 192: 12, 256: 12}
"""Problems of a domain, by head dimension: most models have 64 or 128."""
MAX_FLOPS = 2e12
"""Of a problem, about 3 ms on an H200."""
KINDS: tuple[tuple[Mask, Phase], ...] = (
    ("causal", "prompt"),
    ("full", "prompt"),
    ("full", "one"),
    ("full", "few"),
)
"""Masks and phases whose kernels are timed; windows, soft caps and packed sequences share them."""
KERNELS = 8
"""Compiled kernels of a domain."""
SPLITS = 2
"""Counts of splits that are timed of a kernel, the best by the estimate."""


def domains() -> list[Domain]:
    """What is timed."""
    return [Domain(width, mask, phase) for width, (mask, phase) in product(INSTANCES, KINDS)]


def problems() -> dict[Domain, list[AttentionProblem]]:
    """Problems of each of `domains`, in bf16: in turn one of each count of heads that models have.
    Where fewer models have the head dimension, calls of others are taken with it.
    """
    called: dict[Domain, dict[AttentionProblem, None]] = defaultdict(dict)
    for call in draw(SEED, CALLS, subset("making")):
        problem = call.problem
        if isinstance(problem, AttentionProblem) and problem.flops <= MAX_FLOPS:
            domain = Domain.of(problem)
            if domain is not None and not domain.has_softcap:
                called[domain][replace(problem, dtype="bfloat16")] = None
    return {domain: _taken(domain, called) for domain in domains()}


def _taken(
    domain: Domain, called: Mapping[Domain, Mapping[AttentionProblem, None]]
) -> list[AttentionProblem]:
    wanted = PROBLEMS[domain.head_dim]
    own = list(called.get(domain, ()))
    found = dict.fromkeys(_in_turn(own)[:wanted])
    widths = sorted({problem.head_dim for problem in own} | {domain.head_dim})
    others = [
        problem
        for width in INSTANCES
        if width != domain.head_dim
        for problem in called.get(domain._replace(head_dim=width), ())
    ]
    for number, problem in enumerate(_in_turn(others)):
        if len(found) == wanted:
            break
        head_dim = widths[number % len(widths)]
        if problem.flops / problem.head_dim * head_dim <= MAX_FLOPS:
            found[replace(problem, head_dim=head_dim)] = None
    return list(found)


def _in_turn(found: Sequence[AttentionProblem]) -> list[AttentionProblem]:
    """One of each count of heads, then a second of each, ..."""
    groups: dict[tuple[int, int], list[AttentionProblem]] = defaultdict(list)
    for problem in found:
        groups[problem.heads_q, problem.heads_kv].append(problem)
    turns = max(map(len, groups.values()), default=0)
    return [group[turn] for turn in range(turns) for group in groups.values() if turn < len(group)]


def regime(problem: Problem) -> Regime:
    """How a problem is timed: in a stream; a cache that is decoded from is cold."""
    is_decoding = isinstance(problem, AttentionProblem) and problem.is_decoding
    return Regime("stream", "cold" if is_decoding else "warm")


def sample(
    domain: Domain, problems: Sequence[AttentionProblem], gpu: Gpu, portfolio: Portfolio | None
) -> dict[AttentionProblem, list[list[Config]]]:
    """Candidates at each problem of a domain, those that share a kernel together; PyTorch's last.

    Args:
        domain: of the problems.
        problems: what is timed.
        gpu: where.
        portfolio: whose kernels take part; None: those of the estimates alone.
    """
    kernels = _kernels(domain, problems, gpu, portfolio)
    found = {}
    for problem in problems:
        groups = [list(_variants(problem, kernel, gpu)) for kernel in kernels]
        vendor = families_of(problem.op)["vendor_sdpa"]
        own = [c for c in vendor.space(problem, gpu) if c.get("kernel") in BACKENDS]
        found[problem] = [group for group in (*groups, own) if group]
    return found


def _kernels(
    domain: Domain, problems: Sequence[AttentionProblem], gpu: Gpu, portfolio: Portfolio | None
) -> list[Config]:
    """Compiled kernels of a domain, as configs without run-time parameters."""
    known = dict.fromkeys(_of_portfolio(domain, portfolio))
    if len(known) >= KERNELS:
        return list(known)
    near = [one for other in _near(domain) for one in _of_portfolio(other, portfolio)]
    spaces = [
        _compiled(config)
        for family in families_of(AttentionProblem.op).values()
        if family.work_terms and not family.is_vendor
        for problem in problems
        for config in _best(family, problem, gpu)
    ]
    usable = [
        (one, [_estimate(problem, one, gpu) for problem in problems])
        for one in dict.fromkeys((*known, *near, *spaces))
    ]
    return _covering(usable, len(known), KERNELS)


def _covering(
    usable: Sequence[tuple[Config, Sequence[float]]], known: int, count: int
) -> list[Config]:
    """The first `known` ones, then those that lower the mean time most; where none does, what is
    best but for those that were chosen.
    """
    chosen = [config for config, _ in usable[:known]]
    left = [(config, times) for config, times in usable[known:] if min(times) < math.inf]
    reached = [min(each) for each in zip(*(times for _, times in usable[:known]), strict=True)]
    best = [min(each) for each in zip(*(times for _, times in usable), strict=True)]
    while left and len(chosen) < count:
        now = _loss(reached, best)
        losses = [(_loss(_least(reached, times), best), config.digest) for config, times in left]
        (loss, _), place = min((each, place) for place, each in enumerate(losses))
        if reached and now - loss < 1e-3:  # all that can be gained is: once more with the others
            reached = []
            continue
        config, times = left.pop(place)
        chosen.append(config)
        reached = _least(reached, times)
    return chosen


def _least(reached: Sequence[float], times: Sequence[float]) -> list[float]:
    return list(map(min, reached, times)) if reached else list(times)


def _loss(times: Sequence[float], best: Sequence[float]) -> float:
    """Mean loss over the best times; a problem that no kernel takes counts as 1."""
    pairs = zip(times or [math.inf] * len(best), best, strict=True)
    return fmean(min(1.0, us / least - 1) if us < math.inf else 1.0 for us, least in pairs)


def _of_portfolio(domain: Domain, portfolio: Portfolio | None) -> Iterator[Config]:
    models = portfolio.domains.get(domain) if portfolio else None
    for candidate in models.candidates if models else ():
        if not candidate.is_vendor and candidate.family is not None:
            yield _compiled(candidate.config)


def _near(domain: Domain) -> Iterator[Domain]:
    """Domains of which kernels may serve this one too: the other phase of decoding, and the head
    dimensions on both sides.
    """
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
    rest = {name: value for name, value in config.params.items() if name not in names}
    return Config(config.family, {**rest, **packed})


def _best(family: Family, problem: AttentionProblem, gpu: Gpu, count: int = 4) -> list[Config]:
    """The first of a problem's space by the estimate, each of another kernel."""
    if family.supports(problem, gpu):
        return []
    found: dict[Config, Config] = {}
    space = sorted(family.space(problem, gpu), key=lambda c: family.predict_us(problem, c, gpu))
    for config in space:
        found.setdefault(_compiled(config), config)
        if len(found) == count:
            break
    return list(found.values())


def _estimate(problem: AttentionProblem, kernel: Config, gpu: Gpu) -> float:
    """Microseconds of a kernel's best variant by the family's estimate; infinite without any."""
    family = families()[kernel.family]
    found = (family.predict_us(problem, one, gpu) for one in _variants(problem, kernel, gpu))
    return min(found, default=math.inf)


def _variants(problem: AttentionProblem, kernel: Config, gpu: Gpu) -> Iterator[Config]:
    """A compiled kernel's calls at a problem. Of prompts with and without programmatic dependent
    launch; of decoding each way to combine splits, with few counts of them.
    """
    family = families()[kernel.family]
    ways: list[dict[str, Value]] = [{"pdl": False}, {"pdl": True}]
    if problem.is_decoding:
        ways = [{"pdl": True}]
        ways += [{"pdl": True, "combine": way} for way in ("cluster", "kernel")]
    for way in ways:
        config = Config(kernel.family, {**kernel.params, **way})
        legal = [
            one
            for one in family.scheduled(problem, config, gpu)
            if family.accepts(problem, one, gpu)
        ]
        yield from sorted(legal, key=partial(family.predict_us, problem, gpu=gpu))[:SPLITS]
