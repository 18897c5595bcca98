"""Selections beside a plain evaluation of the time models: every candidate, one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.attention_work import TERMS
from tuner.families.by_operation import domain_of
from tuner.families.fused_attention.packing import tile_m
from tuner.families.peers.sdpa import BACKENDS
from tuner.families.schedules import PagedBatch
from tuner.families.work import FASTEST_SHARE, sizes_of
from tuner.hardware import GPUS, Gpu
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem, population
from tuner.selection.candidates import Candidate, DomainModels, Spread
from tuner.selection.choice import VENDOR_MARGIN
from tuner.selection.portfolio import Portfolio, shipped

HEADS = ((16, 16), (32, 8), (28, 4), (71, 1), (14, 2), (1, 1), (64, 8))
SIZES = (1, 8, 16, 17, 100, 256, 257, 1000, 4104, 50000, 1 << 20)
LEAST_CLOCKS = {64: 0.116, 96: 0.16, 128: 0.19, 192: 0.26, 256: 0.35}
WIDTHS = (8, 64, 800, 4096, 14336, 28672, 151936)


def expected_us(
    models: DomainModels, problem: Problem, one: Candidate, config: Config, gpu: Gpu
) -> float:
    assert one.family is not None
    amounts = one.family.work(problem, config, gpu)
    us = math.fsum(us * amount for us, amount in zip(one.priced, amounts, strict=True))
    if isinstance(problem, AttentionProblem):
        is_bounded = (problem.is_varlen or problem.softcap) and not problem.is_paged
        if is_bounded and not problem.block_mask and "warp_groups" in config.params:
            tile_n = config["tile_n"] * config.get("key_groups", 1)
            scores = amounts[TERMS.index("mean_steps")] * tile_m(config.params) * tile_n
            width = min(width for width in LEAST_CLOCKS if width >= problem.head_dim)
            alone = 1.2 if config["warp_groups"] == 1 else 1.0
            alone *= 1.25 if problem.softcap else 1.0
            us = max(us, scores * alone * LEAST_CLOCKS[width] / gpu.clock_max_mhz)
        if models.regime.l2 == "warm":
            return us
        share = 0.935 if gpu.name == "NVIDIA H100 80GB HBM3" else 0.98
        return max(us, 3.5 + sizes_of(problem).megabytes * 1e3 / (share * gpu.memory_gbs))
    assert isinstance(problem, GemmProblem | SwigluProblem)
    columns = problem.n * (1 if isinstance(problem, GemmProblem) else 2)
    return max(us, 2 * problem.k * columns / (FASTEST_SHARE * gpu.memory_gbs * 1e3))


def decoding_factor(problem: Problem, config: Config) -> float:
    """Factor of times over pages: readings of each key, half-empty and short tiles, persistent
    kernels' lack of splits, and whole queries in a chunk's tile.
    """
    if not (isinstance(problem, AttentionProblem) and problem.is_paged):
        return 1.0
    group, queries = problem.heads_q // problem.heads_kv, problem.seqlen_q
    fills, is_short = "fills_rows" in config.params, problem.seqlen_kv <= 1024
    filled = 0.7 if fills and group % 4 else 1.0
    if not problem.is_decoding:
        return filled
    held = int(config.get("packed_heads", 1))
    height = 64 * config["warp_groups"]
    tiles = group // math.gcd(held, group)
    if config.get("pads_heads"):
        of_tile = max(1, height // (group if fills else held))
        tiles = math.ceil(queries / of_tile) if queries <= 8 else 1
    if config["persistent"]:
        short = 1.3 if problem.head_dim > 128 else 1.7
        whole = 1.0 if queries > 8 else short if fills and is_short else 3.2
        return tiles * whole * filled
    if fills and is_short:
        return 1.0
    fewest = next(heads for heads in (8, 16, 32, group) if heads >= group)
    if config.get("pads_heads") and height == 128:
        low, tall = math.ceil(queries / max(1, 64 // fewest)), math.ceil(queries / (128 // held))
        return tiles * (
            1.5 if tall >= low else (1.1 if problem.head_dim > 128 else 1.25) if is_short else 1.0
        )
    return tiles


def divided_us(problem: Problem, config: Config, gpu: Gpu) -> float | None:
    """A prompt over pages by a kernel that splits keys: its schedule's, and 15 % more."""
    is_prompt = isinstance(problem, AttentionProblem) and problem.is_paged
    if not is_prompt or problem.is_decoding:  # type: ignore[attr-defined]
        return None
    us = family(config.family).paged_us(config, PagedBatch.of(problem, gpu.sm_count))
    return None if us is None else 1.15 * us


def own_by_hand(
    models: DomainModels, problem: Problem, gpu: Gpu
) -> tuple[list[tuple[float, float, Config]], bool, tuple[float, float, float] | None]:
    """Legal own kernels with margin, microseconds and config; whether one is near; and both times
    and the error of the best of all.
    """
    found = [
        (
            us * (1 + models.margin * one.p90_error),
            us,
            config,
            measured_at(models, one).holds(sizes, models.domain),
            legal,
            one.p90_error,
        )
        for one in models.candidates
        if one.family is not None and not one.is_vendor
        if "stream_k" not in one.config.params  # for lengths that only the device knows
        for sizes in [models.domain.sizes(problem)]
        for timed in one.family.scheduled(problem, one.config, gpu)
        for usual in [expected_us(models, problem, one, timed, gpu)]
        for is_slower in [
            timed.get("persistent") and getattr(models.domain, "decodes_pages", False)
        ]
        for divided in [divided_us(problem, timed, gpu)]
        for us in [divided or usual * decoding_factor(problem, timed) + 3.5 * bool(is_slower)]
        for config in [one.family.served(problem, timed)]
        for legal in [one.family.accepts(problem, config, gpu)]
    ]
    near = [one for one in found if one[3]]
    kept = [one[:3] for one in near or found if one[4]]
    return (
        sorted(kept, key=lambda one: one[0]),
        bool(near),
        min(((*one[:2], one[5]) for one in near or found), default=None),
    )


def measured_at(models: DomainModels, one: Candidate) -> Spread:
    """Sizes that a candidate's kernel was measured at: of attention in any schedule."""
    if not models.domain.extrapolates or one.family is None:
        return one.spread
    digest = one.family.compile_digest
    alike = (c for c in models.candidates if c.family is one.family)
    return Spread.over(c.spread for c in alike if digest(c.config) == digest(one.config))


def vendor_by_hand(models: DomainModels, problem: Problem, gpu: Gpu) -> tuple[float, str]:
    known = {
        str(one.config["kernel"]): (expected_us(models, problem, one, one.config, gpu), one)
        for one in models.vendors
        if one.family is not None and one.family.accepts(problem, one.config, gpu)
    }
    if not known:
        return math.inf, ""
    usual = next((name for name in BACKENDS if name in known), min(known))
    sizes = models.domain.sizes(problem)
    others = {
        name: us for name, (us, one) in known.items() if one.spread.holds(sizes, models.domain)
    }
    best = min(others, key=lambda name: others[name], default=usual)
    is_better = best in others and others[best] * (1 + VENDOR_MARGIN) < known[usual][0]
    name = best if is_better else usual
    return known[name][0], name


def drawn(portfolio: Portfolio, rng: random.Random) -> Iterator[Problem]:
    """Problems of each domain that is served, and sizes far beyond what was measured among them."""
    for domain, _ in portfolio.served():
        (usual, *_) = domain.problems(rng.choice(("float16", "bfloat16")))
        for _ in range(4):
            try:
                yield varied(usual, rng)
            except ConfigError:
                continue


def varied(usual: Problem, rng: random.Random) -> Problem:
    if not isinstance(usual, AttentionProblem):
        assert isinstance(usual, GemmProblem | SwigluProblem)
        n, k = (rng.choice(WIDTHS) for _ in range(2))
        return replace(usual, m=rng.choice(SIZES), n=n, k=k)
    heads_q, heads_kv = rng.choice(HEADS)
    queries = rng.choice((1, 4, 63, rng.randint(64, 20000)))
    return replace(
        usual,
        seqlen_q=queries,
        seqlen_kv=rng.choice((queries, rng.randint(64, 4096), rng.randint(64, 200000))),
        batch=rng.choice((1, 7, 64)),
        heads_q=heads_q,
        heads_kv=heads_kv,
        window_left=rng.choice((0, 64, 4096)) if usual.is_windowed else -1,
        window_right=rng.choice((-1, 5)) if usual.is_windowed else -1,
    )


def check(portfolio: Portfolio, problem: Problem) -> bool:
    """Compare a selection with what is found by hand; whether an own kernel was chosen."""
    gpu, models = portfolio.gpu, portfolio.models_of(domain_of(problem))
    found = portfolio.select(problem)
    if models is None:
        assert found is None
        return False
    domain = models.domain
    own, is_near, first = own_by_hand(models, problem, gpu)
    vendor_us, vendor = vendor_by_hand(models, problem, gpu)
    if found is None:
        assert not own and not vendor, problem.label()
        return False
    is_trusted = is_near or not vendor or models.domain.extrapolates
    bound = vendor_us if is_trusted else 0.0
    if models.ratios and vendor and is_trusted and first and domain.pytorchs_factor(problem) == 1:
        cautious_us, us, error = first
        expected = math.log(vendor_us / us)
        bound = cautious_us * math.exp(models.ratios.lead(domain.sizes(problem), expected, error))
    wanted = [(us, config) for cautious, us, config in own if cautious <= bound]
    alike = pytest.approx(1.0, rel=1e-9)
    assert found.vendor == vendor and (not vendor or found.vendor_us / vendor_us == alike)
    for mine, theirs in (
        (list(found.own()), wanted),
        (list(found.ranked()), [(us, config) for _, us, config in own]),
    ):
        assert len(mine) == len(theirs), problem.label()
        assert all(a / b == alike for (a, _), (b, _) in zip(mine, theirs, strict=True))
        assert sorted(c.digest for _, c in mine) == sorted(c.digest for _, c in theirs)
    if wanted:
        assert found.expected_us / wanted[0][0] == alike and found.config == wanted[0][1]
    else:
        assert found.config["kernel"] == vendor and found.expected_us == found.vendor_us
    assert ("no kernel was measured" in " ".join(found.doubts)) == (not is_near)
    return bool(wanted)


@pytest.mark.parametrize("portfolio", shipped(), ids=lambda one: one.op)
def test_every_domain_selects_what_the_time_models_say(portfolio: Portfolio) -> None:
    rng = random.Random(25)
    smaller = replace(portfolio, gpu=replace(portfolio.gpu, sm_count=100))
    chosen = [check(rng.choice((portfolio, smaller)), problem) for problem in drawn(portfolio, rng)]
    assert any(chosen) and not all(chosen)


def test_calls_of_models_select_what_the_time_models_say() -> None:
    by_op = {one.op: one for one in shipped() if one.gpu == GPUS["H200"]}
    calls = population.draw("selected", 300, population.subset("all"))
    chosen = [
        check(by_op[call.problem.op], call.problem) for call in calls if call.problem.op in by_op
    ]
    assert any(chosen) and not all(chosen)


@pytest.mark.parametrize("m", [5, 7, 8, 11, 16])
def test_few_rows_are_not_served_by_a_kernel_measured_at_fewer(m: int) -> None:
    """A kernel timed at up to 4 rows was expected 1.7 times too fast at 8."""
    for portfolio in shipped():
        for n, k in itertools.product((512, 1024, 4096, 50272), (2880, 4096, 5376)):
            problem = GemmProblem(m, n, k, dtype="bfloat16")
            if portfolio.op != problem.op or not (found := portfolio.select(problem)):
                continue
            candidates = found.times.models.candidates
            chosen = [place for us, _, place, _ in found.estimates if us <= found.bound_us]
            assert all(candidates[place].spread.bounds[0][1] >= m for place in chosen)
