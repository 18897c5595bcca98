"""What a portfolio is made from: problems of models that judge nothing, kernels of every domain."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, product, zip_longest
from typing import Any

import pytest

from tuner.families import families
from tuner.families.by_operation import (
    EPILOGUES,
    AnyDomain,
    AttentionDomain,
    GatedDomain,
    Phase,
    ProductDomain,
    Rows,
    domain_of,
)
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem, Problem
from tuner.problem.population import draw, subset
from tuner.search import pool, sampled_problems, timed
from tuner.selection.portfolio import shipped
from tuner.tuning.survey import pooled

SHIPPED = {one.op: one for one in shipped() if one.gpu.name == "NVIDIA H200"}
FOUND = sampled_problems.problems("attention")
PRODUCTS = {**sampled_problems.problems("gemm"), **sampled_problems.problems("swiglu")}
FEW = AttentionDomain(128, "full", "few")


@pytest.mark.parametrize("domain", FOUND, ids=lambda domain: domain.label())
def test_a_domain_s_problems_are_its_own(domain: AttentionDomain) -> None:
    found = FOUND[domain]
    wanted = sampled_problems.PROBLEMS[domain.head_dim] * (
        sampled_problems.DECODED if domain.phase == "one" else 1
    )
    assert len(set(found)) == len(found) >= wanted
    if not domain.has_softcap:
        alone = sum(p.heads_q == p.heads_kv for p in found)
        assert alone >= round(wanted * sampled_problems.UNGROUPED)
        assert len(found) == wanted or alone == round(wanted * sampled_problems.UNGROUPED)
    for problem in found:
        assert domain_of(problem) == domain
        assert problem.flops <= sampled_problems.MAX_FLOPS and problem.dtype == "bfloat16"
    assert len({(p.heads_q, p.heads_kv, p.head_dim) for p in found}) >= 3


def test_every_mask_and_phase_of_every_head_dimension_is_timed() -> None:
    plain = [d for d in FOUND if not d.has_softcap]
    kinds = {(d.mask, d.phase) for d in plain}
    assert kinds == set(sampled_problems.KINDS) and len(plain) == len(kinds) * 5


def test_decoding_with_a_soft_cap_is_timed_at_models_heads() -> None:
    """Gemma 2's own calls among them; a KV head has two query heads there."""
    capped = {d: found for d, found in FOUND.items() if d.has_softcap}
    assert {(d.head_dim, d.phase) for d in capped} == set(product((128, 256), ("one", "few")))
    for problem in chain.from_iterable(capped.values()):
        assert problem.softcap == sampled_problems.SOFTCAP
        assert 1 < problem.heads_q // problem.heads_kv <= sampled_problems.MAX_CAPPED
    assert (8, 4) in {(p.heads_q, p.heads_kv) for p in chain.from_iterable(capped.values())}


@pytest.mark.parametrize("phase", ["one", "few"])
@pytest.mark.parametrize("with_portfolio", [False, True])
def test_groups_that_are_no_power_of_two_are_packed(phase: Phase, with_portfolio: bool) -> None:
    domain = AttentionDomain(128, "full", phase)
    problems = {p.heads_q // p.heads_kv: p for p in FOUND[domain]}
    assert {3, 5, 7} <= set(problems)
    portfolio = SHIPPED[domain.op] if with_portfolio else None
    groups = pool.sample(domain, [*problems.values()], DEFAULT_GPU, portfolio)
    by_group = {group: groups[problem] for group, problem in problems.items()}
    for group in (3, 5, 7):
        packed = {one[0].get("packed_heads", 1) for one in by_group[group]}
        assert max(packed) >= group


@pytest.mark.parametrize("head_dim", [64, 128])
def test_problems_of_one_query_are_of_many_sizes_and_ratios(head_dim: int) -> None:
    wanted = (
        sampled_problems.PROBLEMS[head_dim] * sampled_problems.DECODED
    )  # without the further ones
    found = FOUND[AttentionDomain(head_dim, "full", "one")][:wanted]
    by_size = found[round(len(found) * (1 - sampled_problems.BY_SIZE)) :]
    kinds = {(p.bytes.bit_length() // 2, p.heads_q // p.heads_kv) for p in by_size}
    assert len(by_size) == len(kinds) == round(len(found) * sampled_problems.BY_SIZE)
    assert 1 << 28 < max(p.bytes for p in by_size) <= sampled_problems.MAX_DECODED_BYTES


@pytest.mark.parametrize("domain", FOUND, ids=lambda domain: domain.label())
def test_no_model_has_more_than_its_share(domain: AttentionDomain) -> None:
    heads = [(p.heads_q, p.heads_kv) for p in FOUND[domain]]
    assert len(set(heads)) >= sampled_problems.MIN_MODELS


def test_no_held_out_model_s_heads_take_part() -> None:
    """But where a model that takes part has the same: a hash of heads and width decides."""
    making = {
        (call.problem.heads_q, call.problem.heads_kv)
        for call in draw(sampled_problems.SEED, sampled_problems.CALLS, subset("making"))
        if isinstance(call.problem, AttentionProblem)
    }
    assert {(p.heads_q, p.heads_kv) for found in FOUND.values() for p in found} <= making


@functools.cache
def sample(domain: AnyDomain, with_portfolio: bool) -> Mapping[Problem, Sequence[object]]:
    """Kernels at a domain's problems, of products at every third or sixth: each takes 0.3 s of
    estimates.
    """
    portfolio = SHIPPED[domain.op] if with_portfolio else None
    step = 3 if domain in (ProductDomain("few"), ProductDomain("narrow")) else 6
    problems: Sequence[Any] = FOUND[domain] if domain in FOUND else PRODUCTS[domain][::step]
    return pool.sample(domain, problems, DEFAULT_GPU, portfolio)


@pytest.mark.parametrize("with_portfolio", [False, True])
@pytest.mark.parametrize(
    "domain",
    [
        FEW,
        ProductDomain("few"),
        ProductDomain("wide", "bias_gelu"),
        ProductDomain("wide", gradient="weight"),
        GatedDomain("wide"),
    ],
    ids=lambda domain: domain.label(),
)
def test_candidates_are_legal_and_beside_pytorch_s(domain: AnyDomain, with_portfolio: bool) -> None:
    for problem, groups in sample(domain, with_portfolio).items():
        vendors, *own = groups
        assert own and {config.get("kernel") for config in vendors} == domain.vendors  # type: ignore[attr-defined]
        for group in own:
            kernels = set()
            for config in group:  # type: ignore[attr-defined]
                family = families()[config.family]
                assert not family.violations(problem, config, DEFAULT_GPU)
                kernels |= {spec.key for spec in family.kernels(problem, config).values()}
            assert len(kernels) == 1


def test_a_domain_has_so_many_kernels() -> None:
    kernels = {
        spec.key
        for problem, groups in sample(FEW, False).items()
        for group in groups[1:]
        for spec in families()[group[0].family].kernels(problem, group[0]).values()  # type: ignore[index]
    }
    assert 4 <= len(kernels) <= 2 * pool.KERNELS  # packed heads are compiled in


def test_a_cache_is_cold_and_a_prompt_warm() -> None:
    regimes = {d.phase: {str(sampled_problems.regime(p)) for p in FOUND[d]} for d in FOUND}
    assert regimes["prompt"] == {"stream-warm"} and regimes["one"] == {"stream-cold"}


def test_a_survey_takes_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_problems, "PROBLEMS", dict.fromkeys(sampled_problems.PROBLEMS, 2))
    few = sampled_problems.problems("attention")
    assert few.keys() == FOUND.keys()
    samples = pooled("attention", DEFAULT_GPU, SHIPPED["attention"])
    turns = zip_longest(*few.values())
    assert [one.problem for one in samples] == [p for turn in turns for p in turn if p is not None]
    for one in samples:
        assert sum(kernels for kernels, _ in one.spaces.values()) == len(one.groups)
        assert sum(count for _, count in one.spaces.values()) == one.candidates


@pytest.mark.parametrize("domain", PRODUCTS, ids=lambda domain: domain.label())
def test_a_domain_s_products_are_of_many_layers(domain: ProductDomain | GatedDomain) -> None:
    found = PRODUCTS[domain]
    assert 8 <= len(found) == len(set(found)) <= max(sampled_problems.PRODUCTS.values())
    for problem in found:
        assert (
            domain_of(problem) == domain and str(sampled_problems.regime(problem)) == "stream-cold"
        )
        assert problem.flops <= sampled_problems.MAX_PRODUCT_FLOPS and problem.dtype == "bfloat16"
    assert len({(p.n, p.k) for p in found}) >= 4


@pytest.mark.parametrize("rows", ["few", "narrow", "wide"])
def test_the_first_products_cover_the_sizes(rows: Rows) -> None:
    """A kernel timed at the first quarter is trusted at all calls: within twice a size."""
    called = [
        ProductDomain.sizes(call.problem)
        for call in draw(sampled_problems.SEED, sampled_problems.CALLS, subset("making"))
        if domain_of(call.problem) == ProductDomain(rows)
        and call.problem.flops <= sampled_problems.MAX_PRODUCT_FLOPS
    ]
    count = sampled_problems.PRODUCTS[rows] // 4
    first = [ProductDomain.sizes(p) for p in PRODUCTS[ProductDomain(rows)][:count]]
    for every, some in zip(zip(*called, strict=True), zip(*first, strict=True), strict=True):
        octaves, reached = (math.log2(max(sizes) / min(sizes)) for sizes in (every, some))
        assert reached >= octaves - 2


def test_every_kernel_and_pytorch_s_are_timed_often_enough() -> None:
    domain = ProductDomain("few")
    counts: Counter[str] = Counter()
    for groups in sample(domain, True).values():
        counts.update({config.digest for group in groups for config in group})  # type: ignore[attr-defined]
        assert any(families()[group[0].family].is_vendor for group in groups)  # type: ignore[index]
    assert (
        sum(count >= timed.MIN_POINTS for count in counts.values())
        >= 2 * pool.PRODUCT_KERNELS["few"]
    )


def test_a_layer_s_gradients_are_products_of_its_sizes() -> None:
    """A training pass multiplies the same tokens and widths as the forward pass."""
    layers = {
        call.problem.to_json()[size]
        for call in draw(sampled_problems.SEED, sampled_problems.CALLS, subset("making"))
        if call.problem.op == "gemm"
        for size in ("m", "n", "k")
    }
    for name in ("input", "weight"):
        for problem in PRODUCTS[ProductDomain("wide", gradient=name)]:
            assert {problem.m, problem.n, problem.k} <= layers
            tokens = problem.m if name == "input" else problem.k
            assert tokens >= sampled_problems.MIN_TRAINING_ROWS


def test_every_domain_of_products_is_timed() -> None:
    timed = {domain.epilogue for domain in PRODUCTS if isinstance(domain, ProductDomain)}
    alike = {one.epilogue for name in timed for one in ProductDomain("wide", name).alike}
    assert timed == set(sampled_problems.TIMED_EPILOGUES) and alike == set(EPILOGUES)
    assert ProductDomain("tall") in PRODUCTS and ProductDomain("tall", "gelu") not in PRODUCTS
    assert {d.rows for d in PRODUCTS if isinstance(d, GatedDomain)} == {"few", "narrow", "wide"}


def test_narrow_products_are_timed_with_k_divided() -> None:
    kernels = {
        (config["tile_m"], config["tile_n"], config.get("decomposition_mode"))
        for groups in sample(ProductDomain("narrow"), True).values()
        for group in groups[1:]
        for config in group  # type: ignore[attr-defined]
    }
    divided = {tile[:2] for tile in kernels if tile[2] == "SplitK"}
    assert len(divided) == pool.STREAM_KERNELS


def test_a_product_with_an_activation_is_timed_with_kernels_of_the_plain_one() -> None:
    own, plain = (
        {
            families()[group[0].family].compile_digest(group[0])  # type: ignore[index]
            for groups in sample(ProductDomain("wide", one), True).values()
            for group in groups[1:]
        }
        for one in ("bias_gelu", "")
    )
    known = [
        families()[one.family].compile_digest(one)
        for epilogue in ("bias_gelu", "")
        for one in pool._of_portfolio(ProductDomain("wide", epilogue), SHIPPED["gemm"])
    ]
    assert own and own <= plain | {*known}


def test_a_product_with_a_bias_is_timed_by_pytorch_alone() -> None:
    for groups in sample(ProductDomain("wide", "bias"), True).values():
        assert [config["kernel"] for group in groups for config in group] == ["addmm"]  # type: ignore[attr-defined]


def test_the_shortest_estimates_are_timed_and_launches_hide() -> None:
    for groups in sample(ProductDomain("wide"), False).values():
        own = groups[1:]
        assert len(own) <= pool.TIMED_KERNELS
        for group in own:
            assert all(c.get("pdl") or c.get("tile_scheduler") == "StreamK" for c in group)  # type: ignore[attr-defined]
