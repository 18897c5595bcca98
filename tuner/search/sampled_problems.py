"""Problems that a portfolio is made from: for each domain, samples of calls of public models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, TypeVar, get_args

from tuner.families.attention_instances import INSTANCES
from tuner.families.by_operation import (
    CAPPED,
    LAYOUTS,
    MAX_CAPPED,
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
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.problem.population import ModelCall, draw, subset

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
UNGROUPED = 1 / 3
"""Least share of an attention domain's problems with a KV head for each query head. Few models that
make selections have them at D = 128. Those that are lacking come beside the others."""
SOFTCAP = 50.0
"""Soft cap of Gemma 2, and most query heads to a KV head of calls that are timed with it. Gemma 2
has two."""
TIMED_EPILOGUES = "", "bias", "bias_gelu"
"""Epilogues that are timed: one activation stands for all, whose kernels take the same time."""
GRADIENT_PRODUCTS = 20
"""Problems of a domain of gradients of linear layers."""
MIN_TRAINING_ROWS, MIN_TRAINING_WIDTH = 1024, 128
"""Fewest tokens of a training pass, and narrowest side of a layer, whose products are timed."""


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
                for width, phase in product(CAPPED, phases)
            ),
        ]
    if op == ProductDomain.op:
        gradients = [name for name in get_args(Gradient) if name]
        return [
            *(
                ProductDomain(rows, name)
                for name in TIMED_EPILOGUES
                for rows in PRODUCTS
                if rows != "tall" or name in ("", "bias")  # no layer with an activation is so short
            ),
            *(ProductDomain("wide", gradient=name) for name in gradients),
        ]
    return [GatedDomain(rows) for rows in PRODUCTS if rows != "tall"]


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
    posed: Problem = replace(problem, **types)
    return posed


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
            gradient for layer in layers if (gradient := _gradient(layer, domain)) is not None
        )
    calls = dict(called.get(domain, ()))
    if isinstance(domain, ProductDomain) and domain.epilogue != "bias":
        for other in domain.alike:
            calls.update(dict.fromkeys(map(domain.moved, called.get(other, ()))))
    return calls


def _gradient(layer: Any, domain: ProductDomain) -> Problem | None:
    """The product of a layer's gradient; None if it is not of the domain, or of few tokens."""
    m, n, k = layer.m, layer.n, layer.k
    if m < MIN_TRAINING_ROWS or min(n, k) < MIN_TRAINING_WIDTH:
        return None
    sizes = (m, k, n) if domain.gradient == "input" else (n, k, m)
    layout_a, layout_b = LAYOUTS[domain.gradient]
    product = GemmProblem(*sizes, dtype=layer.dtype, layout_a=layout_a, layout_b=layout_b)
    return product if domain_of(product) == domain else None


def _taken(
    domain: AttentionDomain, called: Mapping[AttentionDomain, Mapping[AttentionProblem, None]]
) -> list[AttentionProblem]:
    count = PROBLEMS[domain.head_dim] * (DECODED if domain.phase == "one" else 1)
    own = list(called.get(domain, ()))
    taken_here = dict.fromkeys(_in_turn(domain, own, count // MIN_MODELS)[:count])
    if domain.phase == "one" and len({domain.group(p)[:2] for p in own}) >= MIN_MODELS:
        by_heads = list(taken_here)[: round(count * (1 - BY_SIZE))]
        taken_here = dict.fromkeys([*by_heads, *_by_size(by_heads, own)][:count])
    widths = sorted({problem.head_dim for problem in own} | {domain.head_dim})
    related = [domain._replace(head_dim=width) for width in INSTANCES if width != domain.head_dim]
    more = [problem for d in related for problem in called.get(d, ())]
    if domain.has_softcap:  # few models have one
        more += [
            replace(problem, softcap=SOFTCAP)
            for d in (domain, *related)
            for problem in called.get(d._replace(has_softcap=False), ())
            if problem.heads_kv < problem.heads_q <= MAX_CAPPED * problem.heads_kv
        ]
    for number, problem in enumerate(_in_turn(domain, more)):
        if len(taken_here) == count:
            break
        head_dim = widths[number % len(widths)]
        if problem.flops / problem.head_dim * head_dim <= MAX_FLOPS:
            taken_here[replace(problem, head_dim=head_dim)] = None
    alone = sum(problem.heads_q == problem.heads_kv for problem in taken_here)
    further = [] if domain.has_softcap else _ungrouped(domain, [*own, *more], taken_here)
    return [*taken_here, *further[: max(0, round(count * UNGROUPED) - alone)]]


def _ungrouped(
    domain: AttentionDomain, calls: Sequence[AttentionProblem], known: Collection[Problem]
) -> list[AttentionProblem]:
    """Problems with a KV head for each query head that are not among the known ones."""
    single = (
        replace(problem, head_dim=domain.head_dim)
        for problem in calls
        if problem.heads_q == problem.heads_kv
    )
    fitting = [p for p in single if p.flops <= MAX_FLOPS and p not in known]
    return _in_turn(domain, list(dict.fromkeys(fitting)))


def _by_size(
    taken: Sequence[AttentionProblem], problems: Sequence[AttentionProblem]
) -> list[AttentionProblem]:
    """Problems of other sizes, to a factor of four in bytes, and ratios of heads than the taken
    ones; the largest first: memory binds them, and their times do not follow from smaller ones.
    """

    def kind(problem: AttentionProblem) -> tuple[int, int]:
        return problem.bytes.bit_length() // 2, problem.heads_q // problem.heads_kv

    kinds = {kind(problem) for problem in taken}
    sizes: dict[tuple[int, int], AttentionProblem] = {}
    for problem in problems:
        if kind(problem) not in kinds and problem.bytes <= MAX_DECODED_BYTES:
            sizes.setdefault(kind(problem), problem)
    return [sizes[key] for key in sorted(sizes, key=lambda key: (-key[0], key[1]))]


def _in_turn(domain: AnyDomain, problems: Sequence[_P], most: int | None = None) -> list[_P]:
    """Problems in turn over numbers of heads or widths of layers: the first of each, the second of
    each, and so on.

    Args:
        domain: domain of the problems.
        problems: problems.
        most: most problems of one number of heads; None: all.
    """
    groups: dict[tuple[int, ...], list[_P]] = defaultdict(list)
    for problem in problems:
        groups[domain.group(problem)[:2]].append(problem)
    turns = max(map(len, groups.values()), default=0)
    turns = turns if most is None else min(turns, most)
    return [group[turn] for turn in range(turns) for group in groups.values() if turn < len(group)]


def _spread_out(domain: AnyDomain, problems: Sequence[_P]) -> list[_P]:
    """Problems in an order of which each beginning covers the sizes: by turns the next one in turn
    over widths of layers, and the one farthest from all before in the logarithms of its sizes.
    """
    ordered: list[_P] = []
    open = {problem: [math.log(size) for size in domain.sizes(problem)[:3]] for problem in
            _in_turn(domain, problems)}  # fmt: skip
    far = dict.fromkeys(open, math.inf)
    while open:
        is_next = len(ordered) % 2 == 0
        pick = next(iter(open)) if is_next else max(open, key=far.__getitem__)
        place = open.pop(pick)
        ordered.append(pick)
        for problem, other in open.items():
            far[problem] = min(far[problem], math.dist(place, other))
    return ordered


def regime(problem: Problem) -> Regime:
    """Regime of a problem: in a stream, with weights and decoded caches cold."""
    is_cold = not isinstance(problem, AttentionProblem) or problem.is_decoding
    return Regime("stream", "cold" if is_cold else "warm")
