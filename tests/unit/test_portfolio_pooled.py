"""Time models of products that share measurements: with a bias, and with activations."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from operator import mul

from tuner.config import Config
from tuner.families import families
from tuner.families.by_operation import AttentionDomain, GatedDomain, ProductDomain
from tuner.families.work import floor_us, sizes_of
from tuner.hardware import GPUS
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import GemmProblem
from tuner.search import portfolio as fitting
from tuner.search.timed import Point
from tuner.selection.candidates import Spread
from tuner.selection.portfolio import Portfolio, shipped

H100, STREAM = GPUS["H100"], Regime("stream", "cold")
GEMV = Config(
    "gemv",
    {
        **{"warps": 8, "k_warps": 8, "row_tiles": 2, "pieces": 4, "stages": 4},
        **{"blocks_per_sm": 1, "persistent": True, "pdl": True, "lead": 1024},
    },
)
SLOW = Config("gemv", {**GEMV.params, "pdl": False, "lead": 0})
RATES = {
    GEMV: {"launch": 2.0, "memory": 0.35},
    SLOW: {"launch": 6.0, "memory": 0.45},
    "cublas": {"launch": 3.0, "memory": 0.38},
}
ADDED = {"launch": 2.5, "output": 3.0}
"""Microseconds that an activation adds to PyTorch's kernel."""
FEW = ProductDomain("few")


def time_of(problem: GemmProblem, config: Config) -> float:
    rates = dict(RATES[config if config in RATES else "cublas"])
    family = families()[config.family]
    if config not in RATES and problem.activation:
        rates = {term: rates.get(term, 0.0) + ADDED.get(term, 0.0) for term in {*rates, *ADDED}}
    amounts = family.work(problem, config, H100)
    return sum(map(mul, amounts, (rates.get(term, 0.0) for term in family.work_terms)), 0.0)


def measured(epilogue: str, count: int, seed: int = 0) -> list[Measurement]:
    rng, found = random.Random(f"{epilogue}{seed}"), []
    vendor = Config("vendor_blas", {"kernel": next(iter(FEW._replace(epilogue=epilogue).vendors))})
    for _ in range(count):
        n, k = (rng.choice((512, 1024, 2048, 4096, 8192, 12288)) for _ in range(2))
        problem = GemmProblem(rng.randint(1, 8), n, k, dtype="bfloat16", epilogue=epilogue)
        for config in (GEMV, SLOW, vendor):
            us = time_of(problem, config) * rng.uniform(0.99, 1.01)
            found.append(
                Measurement(
                    problem=problem,
                    config=config,
                    gpu=H100,
                    regime=STREAM,
                    status=Status.OK,
                    provenance=Provenance.MEASURED,
                    latency_us=us,
                )
            )
    return found


@cache
def made() -> Portfolio:
    rows = [*measured("", 60), *measured("bias", 8), *measured("bias_gelu", 8)]
    return fitting.make("gemm", {STREAM: rows}, H100)


def test_a_bias_and_activations_share_measurements() -> None:
    assert list(ProductDomain("wide", "bias").alike) == [
        ProductDomain("wide", "bias"),
        ProductDomain("wide"),
    ]
    gelus = [d.epilogue for d in ProductDomain("few", "gelu").alike]
    assert gelus == ["gelu", "bias_gelu", "bias_gelu_tanh", "gelu_tanh"]
    for other in (GatedDomain("few"), AttentionDomain(64, "full", "one")):
        assert list(other.alike) == [other]


def test_few_measurements_with_a_bias_are_joined_by_the_plain_ones() -> None:
    points = {
        domain.label(): {one.config.get("kernel", one.config): one.points for one in m.candidates}
        for domain, m in made().domains.items()
    }
    both = [*measured("", 60), *measured("bias", 8)]
    count = len({replace(m.problem, epilogue="") for m in both})
    assert points["M to 16"] == {GEMV: count, "cublas": count}
    assert points["M to 16, bias"] == {GEMV: count, "addmm": count}


def test_plain_times_take_what_pairs_say_that_a_bias_adds() -> None:
    bias, plain = FEW._replace(epilogue="bias"), FEW
    products = [GemmProblem(4, 512 * i, 4096, dtype="bfloat16") for i in range(1, 20)]
    cublas, addmm = (Config("vendor_blas", {"kernel": name}) for name in ("cublas", "addmm"))
    rows = [
        Point(one, config, us) for one in products for config, us in ((GEMV, 5.0), (cublas, 6.0))
    ]
    twins = [
        Point(replace(one, epilogue="bias"), config, us)
        for one in products[: fitting.MIN_TWINS]
        for config, us in ((GEMV, 6.5), (addmm, 6.25))
    ]
    found = fitting.pooled(bias, STREAM, {plain: {STREAM: rows}, bias: {STREAM: twins}})
    assert len(found) == len(rows), "a product that was measured with the bias counts once"
    assert {(one.config, one.us) for one in found} == {(GEMV, 6.5), (addmm, 6.25)}
    found = fitting.pooled(plain, STREAM, {plain: {STREAM: rows}, bias: {STREAM: twins}})
    assert {(one.config, one.us) for one in found} == {(GEMV, 5.0), (cublas, 6.0)}
    fewer = fitting.pooled(bias, STREAM, {plain: {STREAM: rows}, bias: {STREAM: twins[2:]}})
    assert {one.us for one in fewer} == {5.0, 6.0, 6.5, 6.25}, "too few to say"


def test_an_activation_adds_to_the_plain_product_s_model() -> None:
    """Eight problems tell what it adds; the plain ones tell the rest, far from these sizes too."""
    models = made().domains[FEW._replace(epilogue="bias_gelu")]
    (vendor,) = models.vendors
    assert vendor.p90_error < 0.02
    for m, n, k in ((1, 12288, 512), (8, 512, 12288), (3, 6144, 6144)):
        problem = GemmProblem(m, n, k, dtype="bfloat16", epilogue="bias_gelu")
        amounts = families()["vendor_blas"].work(problem, vendor.config, H100)
        expected = sum(map(mul, vendor.priced, amounts))
        assert abs(expected / time_of(problem, vendor.config) - 1) < 0.02


def test_a_kernel_that_is_never_fastest_is_not_built() -> None:
    for models in made().domains.values():
        assert [one.config for one in models.candidates if not one.is_vendor] == [GEMV]


def test_no_product_is_faster_than_its_weights_are_read() -> None:
    """Rates of small products would have a large one beat the memory."""
    problem = GemmProblem(1, 8192, 8192, dtype="bfloat16")
    portfolio = made()
    models = portfolio.domains[FEW]
    cheap = [replace(one, rates={"launch": 1.0}) for one in models.candidates]
    fast = replace(portfolio, domains={FEW: replace(models, candidates=cheap)})
    found = fast.select(problem)
    assert found is not None
    floor = floor_us(sizes_of(problem), H100, True)
    assert found.expected_us == found.vendor_us == floor
    assert 40 < floor < 45  # 134 MB at 3.1 TB/s


def test_a_kernel_of_large_products_is_not_trusted_at_small_ones() -> None:
    """Rows, columns and depth may each be small beside two large ones."""
    domain = ProductDomain("wide")
    large = [
        GemmProblem(512, 8192, 4096),
        GemmProblem(8192, 512, 8192),
        GemmProblem(4096, 4096, 512),
    ]
    spread = Spread.of(map(domain.sizes, large))
    assert spread.bounds[3] == (2**33, 2**35)
    for problem in large:
        assert spread.holds(domain.sizes(problem), domain)
    small, beyond = GemmProblem(512, 512, 512), GemmProblem(8192, 8192, 8192)
    for problem in (small, beyond):
        *sizes, work = domain.sizes(problem)
        assert not spread.holds((*sizes, work), domain)
        assert spread.holds((*sizes, 2**34), domain)  # each of the three is near measured ones


def test_large_gated_products_are_near_by_their_sides() -> None:
    sizes = [(512, 11008, 4096, 512 * 11008 * 4096), (8192, 1536, 4096, 8192 * 1536 * 4096)]
    spread = Spread.of(sizes)
    prompt = 8192, 14336, 4096, 8192 * 14336 * 4096
    assert spread.holds(prompt, GatedDomain("wide"))
    assert not spread.holds(prompt, ProductDomain("wide")), "cuBLAS is nearer there"
    assert not spread.holds((8192, 28672, 4096, prompt[3]), GatedDomain("wide"))


def test_a_portfolio_without_bounds_of_work_is_read() -> None:
    data = made().to_json()
    rows = [one for domain in data["domains"] for one in domain["candidates"]]
    assert all(one["spread"].pop("work") for one in rows)
    models = Portfolio.from_json(data).domains[FEW]
    for one in models.candidates:
        *sizes, work = one.spread.bounds
        assert work == tuple(math.prod(each) for each in zip(*sizes, strict=True))


def test_a_fit_may_keep_to_the_kernels_of_one_gpu() -> None:
    here, there = (
        next(one for one in shipped() if (one.op, one.gpu) == ("attention", gpu))
        for gpu in (H100, GPUS["H200"])
    )
    domain = AttentionDomain(64, "full", "one")
    problem = domain.problems("bfloat16")[0]

    def compiled(config: Config) -> str:
        return families()[config.family].compile_digest(fitting.kernel_of(config))

    theirs = {compiled(one.config) for one in there.domains[domain].candidates}
    own = next(
        fitting.kernel_of(one.config)
        for one in here.domains[domain].candidates
        if compiled(one.config) not in theirs and not one.is_vendor
    )
    vendor = here.domains[domain].vendors[0].config
    found = [
        Measurement(problem, config, H100, STREAM, Status.OK, Provenance.MEASURED, latency_us=9.0)
        for config in (own, vendor)
    ]
    problems = [replace(one, problem=replace(problem, seqlen_q=1)) for one in found]
    assert fitting.of_shipped(problems) == fitting.of_shipped(problems, H100) == problems
    assert fitting.of_shipped(problems, GPUS["H200"]) == problems[1:]
