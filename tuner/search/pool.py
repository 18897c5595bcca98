"""Kernels and problems that a portfolio is made from.

For each domain of `tuner.selection.domains` that public models call, `problems` samples calls of
these models. `sample` names the kernels: those of the shipped portfolio, then, if there are few,
the best by the families' time estimates. Attention also tries the kernels of nearby domains.
``tuner survey --portfolio`` measures the kernels, and `tuner fit` makes a portfolio of the
recordings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from statistics import fmean
from typing import Any, TypeVar, get_args

from tuner.config import Config, Value
from tuner.families import families, families_of
from tuner.families.base import Family
from tuner.families.fused_attention.registers import INSTANCES
from tuner.families.gemm.shape import PLAIN
from tuner.families.gemv import LEAD as GEMV_LEAD
from tuner.families.product_work import MEGABYTE, ProductSizes
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.problem.population import ModelCall, draw, subset
from tuner.selection.domains import CAPPED as CAPPED_DIMS
from tuner.selection.domains import (
    LAYOUTS,
    MAX_NARROW,
    AnyDomain,
    AttentionDomain,
    GatedDomain,
    Gradient,
    Mask,
    Phase,
    ProductDomain,
    Rows,
    domain_of,
)
from tuner.selection.portfolio import Portfolio

_P = TypeVar("_P", bound=Problem)

SEED, CALLS = "survey", 4000
"""Seed and number of the models' calls that problems are sampled from."""
PROBLEMS: Mapping[int, int] = {64: 18, 96: 12, 128: 18, 192: 12, 256: 12}
"""Number of problems of an attention domain, by head dimension: most models have 64 or 128."""
MIN_MODELS = 6
"""Fewest models (numbers of heads) of an attention domain: a time model needs several."""
BY_SIZE = 1 / 3
"""Share of a domain's problems of one query that are of other sizes and ratios of heads."""
DECODED = 2
"""Factor for domains in which one query decodes: lengths and batches vary most there, and PyTorch's
kernels are nearest."""
PRODUCTS: Mapping[Rows, int] = {"few": 56, "narrow": 48, "wide": 64, "tall": 14}
"""Number of problems of a domain of plain products."""
BIASED_PRODUCTS, ACTIVATED_PRODUCTS, GATED_PRODUCTS = 28, 16, 24
"""Number of problems of a domain of products with a bias, with an activation, and of gated ones."""
MAX_ESTIMATE = 2.0
"""Longest estimate of a product's kernel that is timed, over the shortest one at the problem."""
TIMED_KERNELS = 8
"""Most compiled kernels of a product that are timed, those of the shortest estimates. With all of
them there were fewer problems, and PyTorch's kernel is timed at each."""
MAX_RESIDENT_BYTES = 20 << 20
"""Largest operands of a product whose tiles are timed in one order: the L2 holds them."""
MAX_FLOPS = 2e12
"""Largest attention problem, FLOP: about 3 ms on an H200."""
MAX_DECODED_BYTES = 1 << 30
"""Largest problem that is taken for its size: a third of a millisecond on an H100."""
MAX_PRODUCT_FLOPS = 4e11
"""Largest product, FLOP: times of larger ones follow from smaller ones."""
KINDS: tuple[tuple[Mask, Phase], ...] = (
    ("causal", "prompt"),
    ("full", "prompt"),
    ("full", "one"),
    ("full", "few"),
)
"""Masks and phases whose kernels are timed; windows, soft caps and packed sequences share them."""
KERNELS = 8
"""Compiled kernels of an attention domain."""
UNGROUPED = 1 / 3
"""Least share of an attention domain's problems with a KV head for each query head. Few models that
make selections have them at D = 128. Those that are lacking come beside the others."""
PADDED = 8
"""Heads of a kernel that packs any number of query heads to a KV head: most that are not a power of
two are 3 to 7."""
SOFTCAP, CAPPED = 50.0, 4
"""Soft cap of Gemma 2, and most query heads to a KV head of calls that are timed with it. Gemma 2
has two."""
_PADDING: Mapping[int, Mapping[str, Value]] = {
    64: {"blocks_per_sm": 2, "early_exp": 0, "q_in_registers": False, "stages_output": True},
    128: {"blocks_per_sm": 2, "early_exp": 0, "q_in_registers": True, "stages_output": True},
    256: {"blocks_per_sm": 1, "early_exp": 50, "q_in_registers": False},
}
"""Levers of the kernels that pad heads, by head dimension: those of kernels that pack four."""
PRODUCT_KERNELS: Mapping[Rows, int] = {"few": 8, "narrow": 18, "wide": 28, "tall": 10}
"""Compiled kernels of a domain of plain products."""
TIMED_EPILOGUES = "", "bias", "bias_gelu"
"""Epilogues that are timed: one activation stands for all, whose kernels take the same time."""
ACTIVATED_KERNELS = 3
"""Compiled kernels of a domain of products with an activation: those of the plain products. With a
bias only PyTorch's are timed."""
GATED_KERNELS = 6
"""Compiled kernels of a domain of gated products."""
GRADIENT_KERNELS, GRADIENT_PRODUCTS = 8, 20
"""Compiled kernels, and problems, of a domain of gradients of linear layers."""
MIN_TRAINING_ROWS, MIN_TRAINING_WIDTH = 1024, 128
"""Fewest tokens of a training pass, and narrowest side of a layer, whose products are timed."""
STREAM_KERNELS = 2
"""Fewest kernels of a narrow product's domain that split K between multiprocessors."""
SPLITS = 2
"""Numbers of splits timed for a kernel, the best by the estimate."""


def domains(op: str) -> list[AnyDomain]:
    """Domains of an operation that are timed."""
    if op == AttentionDomain.op:
        phases: tuple[Phase, ...] = ("one", "few")
        return [
            *(
                AttentionDomain(width, mask, phase)
                for width, (mask, phase) in product(INSTANCES, KINDS)
            ),
            *(
                AttentionDomain(width, "full", phase, has_softcap=True)
                for width, phase in product(CAPPED_DIMS, phases)
            ),
        ]
    if op == ProductDomain.op:
        gradients = [name for name in get_args(Gradient) if name]
        return [
            *(
                ProductDomain(rows, name)
                for name in TIMED_EPILOGUES
                for rows in PRODUCT_KERNELS
                if rows != "tall" or name in ("", "bias")  # no layer with an activation is so short
            ),
            *(ProductDomain("wide", gradient=name) for name in gradients),
        ]
    return [GatedDomain(rows) for rows in PRODUCT_KERNELS if rows != "tall"]


def problems(op: str) -> dict[AnyDomain, list[Any]]:
    """Problems of each of `domains`, in bf16.

    They cover the models' numbers of heads, or widths of layers, in turn. For a head dimension that
    few models have, calls of other models are used with that head dimension.
    """
    called: dict[AnyDomain, dict[Problem, None]] = defaultdict(dict)
    for call in _calls():
        if call.problem.op == op and (problem := _as_timed(call.problem)) is not None:
            domain = domain_of(problem)
            if domain is not None:
                called[domain][problem] = None
    if op == AttentionDomain.op:
        return {domain: _taken(domain, called) for domain in domains(op)}  # type: ignore[arg-type]
    return {
        domain: _spread_out(domain, list(_called(domain, called)))[: _wanted(domain)]
        for domain in domains(op)
    }


@cache
def _calls() -> tuple[ModelCall, ...]:
    return tuple(draw(SEED, CALLS, subset("making")))


def _as_timed(problem: Any) -> Problem | None:
    """A call's problem in bf16; None if it is too large, or a prompt with a soft cap."""
    is_attention = isinstance(problem, AttentionProblem)
    if problem.flops > (MAX_FLOPS if is_attention else MAX_PRODUCT_FLOPS):
        return None
    if is_attention and problem.softcap and not problem.is_decoding:
        return None
    types = {"dtype": "bfloat16"}
    if isinstance(problem, GemmProblem):
        types["dtype_d"] = "bfloat16"
    found: Problem = replace(problem, **types)
    return found


def _wanted(domain: AnyDomain) -> int:
    """Number of problems of a product's domain."""
    if not isinstance(domain, ProductDomain):
        return GATED_PRODUCTS
    if domain.gradient:
        return GRADIENT_PRODUCTS
    if domain.epilogue in ("", "bias"):
        return BIASED_PRODUCTS if domain.epilogue else PRODUCTS[domain.rows]
    return ACTIVATED_PRODUCTS


def _called(
    domain: AnyDomain, called: Mapping[AnyDomain, Mapping[Problem, None]]
) -> dict[Problem, None]:
    """Problems of a domain that models call, and those of domains whose kernels take the same time
    (`Domain.alike`): few models have each activation, and a bias adds nothing. Only with a bias,
    where PyTorch's kernels alone are timed, they are the calls that have it.
    """
    if isinstance(domain, ProductDomain) and domain.gradient:
        layers = [
            problem for rows in ("wide", "tall") for problem in called.get(ProductDomain(rows), ())
        ]
        return dict.fromkeys(
            made for layer in layers if (made := _gradient(layer, domain)) is not None
        )
    found = dict(called.get(domain, ()))
    if isinstance(domain, ProductDomain) and domain.epilogue != "bias":
        for other in domain.alike:
            found.update(dict.fromkeys(map(domain.moved, called.get(other, ()))))
    return found


def _gradient(layer: Any, domain: ProductDomain) -> Problem | None:
    """The product of a layer's gradient; None if it is not of the domain, or of few tokens."""
    m, n, k = layer.m, layer.n, layer.k
    if m < MIN_TRAINING_ROWS or min(n, k) < MIN_TRAINING_WIDTH:
        return None
    sizes = (m, k, n) if domain.gradient == "input" else (n, k, m)
    layout_a, layout_b = LAYOUTS[domain.gradient]
    made = GemmProblem(*sizes, dtype=layer.dtype, layout_a=layout_a, layout_b=layout_b)
    return made if domain_of(made) == domain else None


def _taken(
    domain: AttentionDomain, called: Mapping[AttentionDomain, Mapping[AttentionProblem, None]]
) -> list[AttentionProblem]:
    wanted = PROBLEMS[domain.head_dim] * (DECODED if domain.phase == "one" else 1)
    own = list(called.get(domain, ()))
    found = dict.fromkeys(_in_turn(domain, own, wanted // MIN_MODELS)[:wanted])
    if domain.phase == "one" and len({domain.group(p)[:2] for p in own}) >= MIN_MODELS:
        by_heads = list(found)[: round(wanted * (1 - BY_SIZE))]
        found = dict.fromkeys([*by_heads, *_by_size(by_heads, own)][:wanted])
    widths = sorted({problem.head_dim for problem in own} | {domain.head_dim})
    related = [domain._replace(head_dim=width) for width in INSTANCES if width != domain.head_dim]
    others = [problem for one in related for problem in called.get(one, ())]
    if domain.has_softcap:  # few models have one
        others += [
            replace(problem, softcap=SOFTCAP)
            for one in (domain, *related)
            for problem in called.get(one._replace(has_softcap=False), ())
            if problem.heads_kv < problem.heads_q <= CAPPED * problem.heads_kv
        ]
    for number, problem in enumerate(_in_turn(domain, others)):
        if len(found) == wanted:
            break
        head_dim = widths[number % len(widths)]
        if problem.flops / problem.head_dim * head_dim <= MAX_FLOPS:
            found[replace(problem, head_dim=head_dim)] = None
    alone = sum(problem.heads_q == problem.heads_kv for problem in found)
    further = [] if domain.has_softcap else _ungrouped(domain, [*own, *others], found)
    return [*found, *further[: max(0, round(wanted * UNGROUPED) - alone)]]


def _ungrouped(
    domain: AttentionDomain, calls: Sequence[AttentionProblem], known: Collection[Problem]
) -> list[AttentionProblem]:
    """Problems with a KV head for each query head that are not among the known ones."""
    single = (
        replace(problem, head_dim=domain.head_dim)
        for problem in calls
        if problem.heads_q == problem.heads_kv
    )
    fitting = [one for one in single if one.flops <= MAX_FLOPS and one not in known]
    return _in_turn(domain, list(dict.fromkeys(fitting)))


def _by_size(
    taken: Sequence[AttentionProblem], found: Sequence[AttentionProblem]
) -> list[AttentionProblem]:
    """Problems of other sizes, to a factor of four in bytes, and ratios of heads than the taken
    ones; the largest first: memory binds them, and their times do not follow from smaller ones.
    """

    def kind(problem: AttentionProblem) -> tuple[int, int]:
        return problem.bytes.bit_length() // 2, problem.heads_q // problem.heads_kv

    seen = {kind(problem) for problem in taken}
    others: dict[tuple[int, int], AttentionProblem] = {}
    for problem in found:
        if kind(problem) not in seen and problem.bytes <= MAX_DECODED_BYTES:
            others.setdefault(kind(problem), problem)
    return [others[key] for key in sorted(others, key=lambda key: (-key[0], key[1]))]


def _in_turn(domain: AnyDomain, found: Sequence[_P], most: int | None = None) -> list[_P]:
    """Problems in turn over numbers of heads or widths of layers: the first of each, the second of
    each, and so on.

    Args:
        domain: domain of the problems.
        found: problems.
        most: most problems of one number of heads; None: all.
    """
    groups: dict[tuple[int, ...], list[_P]] = defaultdict(list)
    for problem in found:
        groups[domain.group(problem)[:2]].append(problem)
    turns = max(map(len, groups.values()), default=0)
    turns = turns if most is None else min(turns, most)
    return [group[turn] for turn in range(turns) for group in groups.values() if turn < len(group)]


def _spread_out(domain: AnyDomain, found: Sequence[_P]) -> list[_P]:
    """Problems in an order of which each beginning covers the sizes: by turns the next one in turn
    over widths of layers, and the one farthest from all before in the logarithms of its sizes.
    """
    ordered: list[_P] = []
    left = {problem: [math.log(size) for size in domain.sizes(problem)[:3]] for problem in
            _in_turn(domain, found)}  # fmt: skip
    far = dict.fromkeys(left, math.inf)
    while left:
        is_next = len(ordered) % 2 == 0
        chosen = next(iter(left)) if is_next else max(left, key=far.__getitem__)
        place = left.pop(chosen)
        ordered.append(chosen)
        for problem, other in left.items():
            far[problem] = min(far[problem], math.dist(place, other))
    return ordered


def regime(problem: Problem) -> Regime:
    """Regime of a problem: in a stream, with weights and decoded caches cold."""
    is_cold = not isinstance(problem, AttentionProblem) or problem.is_decoding
    return Regime("stream", "cold" if is_cold else "warm")


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
    found = {}
    for problem in problems:
        groups = [list(_variants(problem, kernel, gpu)) for kernel in kernels]
        if not isinstance(domain, AttentionDomain):
            groups = _promising(problem, groups, gpu)[:TIMED_KERNELS]
        own = _pytorchs(problem, domain, gpu)
        found[problem] = [group for group in (own, *groups) if group]
    return found


def of_portfolio(
    problem: Problem, gpu: Gpu, portfolio: Portfolio, *, is_whole: bool = False
) -> list[list[Config]]:
    """A portfolio's kernels at a problem, grouped by kernel, each with its run-time variants.
    PyTorch's kernels are first.

    Args:
        problem: problem of the portfolio's operation.
        gpu: GPU that it is timed on.
        portfolio: portfolio that serves there.
        is_whole: True for the kernels of all domains that take the problem; False: its own.
    """
    domain = domain_of(problem)
    if domain is None:
        return []
    domains = [domain, *(one for one, _ in portfolio.served() if is_whole)]
    kernels = dict.fromkeys(one for each in domains for one in _of_portfolio(each, portfolio))
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
        times = [families()[one.family].predict_us(problem, one, gpu) for one in group]
        estimates.append((min(times, default=math.inf), place))
    least = min(us for us, _ in estimates)
    kept = sorted(one for one in estimates if one[0] <= MAX_ESTIMATE * least)
    return [list(groups[place]) for _, place in kept if groups[place]]


def _kernels(
    domain: AnyDomain, problems: Sequence[Any], gpu: Gpu, portfolio: Portfolio | None
) -> list[Config]:
    """Compiled kernels of a domain, as configs without run-time parameters."""
    if isinstance(domain, ProductDomain) and domain.epilogue == "bias":
        return []
    known = dict.fromkeys(_of_portfolio(domain, portfolio))
    count, is_narrow = KERNELS, False
    if isinstance(domain, GatedDomain):
        count, is_narrow = GATED_KERNELS, domain.rows == "narrow"
    elif isinstance(domain, ProductDomain) and (domain.epilogue or domain.gradient):
        count = GRADIENT_KERNELS if domain.gradient else ACTIVATED_KERNELS
    elif isinstance(domain, ProductDomain):
        count, is_narrow = PRODUCT_KERNELS[domain.rows], domain.rows == "narrow"
    elif domain.phase != "prompt":
        known |= dict.fromkeys(_padded(domain, problems))
    if len(known) >= count or (isinstance(domain, AttentionDomain) and domain.has_softcap):
        return list(known)
    near = [one for other in _near(domain) for one in _of_portfolio(other, portfolio)]
    spaces = [
        _compiled(config)
        for family in families_of(domain.op).values()
        if family.work_terms and not family.is_vendor
        for problem in problems
        if not near or isinstance(domain, AttentionDomain)
        for config in _best(family, problem, gpu, is_narrow)
    ]
    usable = [
        (one, [_estimate(problem, one, gpu) for problem in problems])
        for one in dict.fromkeys((*known, *near, *spaces))
    ]
    divided = [one for one in usable if one[0].get("tile_scheduler") == "StreamK"]
    streamed = _covering(divided, 0, STREAM_KERNELS) if is_narrow else []
    usable = [one for one in usable if one[0] not in streamed]
    return [*_covering(usable, len(known), count - len(streamed)), *streamed]


def _covering(
    usable: Sequence[tuple[Config, Sequence[float]]], known: int, count: int
) -> list[Config]:
    """The first `known` kernels, then those that lower the mean time most.

    When no kernel lowers it any more, the best of the remaining ones are added.
    """
    chosen = [config for config, _ in usable[:known]]
    left = [(config, times) for config, times in usable[known:] if min(times) < math.inf]
    reached = [min(each) for each in zip(*(times for _, times in usable[:known]), strict=True)]
    best = [min(each) for each in zip(*(times for _, times in usable), strict=True)]
    while left and len(chosen) < count:
        now = _loss(reached, best)
        losses = [
            (_loss(_least(reached, times), best), config.get("swap_ab", False), config.digest)
            for config, times in left
        ]
        (loss, *_), place = min((each, place) for place, each in enumerate(losses))
        if reached and now - loss < 1e-3:  # no gain is left: cover again with the remaining ones
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


def _of_portfolio(domain: AnyDomain, portfolio: Portfolio | None) -> Iterator[Config]:
    """The portfolio's kernels that serve a domain."""
    models = None if portfolio is None else portfolio.models_of(domain)
    for candidate in models.candidates if models else ():
        if not candidate.is_vendor and candidate.family is not None:
            yield _compiled(candidate.config)


def _padded(domain: AttentionDomain, problems: Sequence[AttentionProblem]) -> Iterator[Config]:
    """The kernel that packs any number of heads, if that of a problem is not a power of two, as in
    public models of D = 64 and 128; with a soft cap always, since few kernels have one.
    """
    groups = {problem.heads_q // problem.heads_kv for problem in problems}
    is_odd = domain.head_dim in (64, 128) and any(group & (group - 1) for group in groups)
    if domain.has_softcap or is_odd:
        params: dict[str, Value] = {
            "warp_groups": 1,
            "tile_n": 64,
            "kv_stages": 2,
            "score_buffers": 1,
            "persistent": False,
            "packed_heads": CAPPED if domain.has_softcap else PADDED,
            "pads_heads": True,
        }
        yield Config("fused_attention", {**params, **_PADDING[domain.head_dim]})


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
    rest = {name: value for name, value in config.params.items() if name not in names}
    return Config(config.family, {**rest, **packed})


def _best(
    family: Family, problem: Problem, gpu: Gpu, is_narrow: bool, count: int = 4
) -> list[Config]:
    """The best configs of a problem's space by the estimate, one for each kernel; for narrow
    products also the best that splits K.
    """
    if family.supports(problem, gpu):
        return []
    found: dict[Config, Config] = {}
    space = sorted(family.space(problem, gpu), key=lambda c: family.predict_us(problem, c, gpu))
    for config in space:
        found.setdefault(_compiled(config), config)
        if len(found) == count:
            break
    divided = (c for c in space if is_narrow and c.get("tile_scheduler") == "StreamK")
    return [*found.values(), *([first] if (first := next(divided, None)) is not None else [])]


def _estimate(problem: Problem, kernel: Config, gpu: Gpu) -> float:
    """Estimated microseconds of a kernel's best variant; infinite without a legal one."""
    family = families()[kernel.family]
    found = (family.predict_us(problem, one, gpu) for one in _variants(problem, kernel, gpu))
    return min(found, default=math.inf)


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
            one
            for one in family.scheduled(problem, config, gpu)
            if family.accepts(problem, one, gpu)
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
    if kernel.family == "gemv":
        early, late = {"pdl": True, "lead": GEMV_LEAD}, {"pdl": False, "lead": 0}
        ways = (True, early), (True, late), (False, late)
        return [{"persistent": is_persistent, **way} for is_persistent, way in ways]
    if kernel.family == "cluster_gemm":
        return [{"raster_order": "AlongM", "max_swizzle_size": 1, "pdl": True}]
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
    kept = orders[:1] if is_short or is_resident else orders
    return [{**order, "pdl": True} for order in kept]
