"""`scripts/bench bound`: the share of drawn calls at which an own kernel was measured as fast."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import bound
from tuner.config import Config
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import GemmProblem
from tuner.problem.population import draw, subset
from tuner.runners.recording import Recording
from tuner.selection.domains import AttentionDomain, ProductDomain

H200 = GPUS["H200"]
FEW, WITH_BIAS = ProductDomain("few"), ProductDomain("few", "bias")


def recorded(own_us: float, cublas_us: float, peer_us: float = 1.0) -> Recording:
    problem = GemmProblem(4, 4096, 4096, dtype="bfloat16")

    def of(family: str, kernel: str, us: float) -> Measurement:
        config = Config(family, {"kernel": kernel} if kernel else {"warps": 4})
        return Measurement(
            problem,
            config,
            H200,
            Regime("stream", "cold"),
            Status.OK,
            Provenance.MEASURED,
            latency_us=us,
        )

    rows = (
        of("gemv", "", own_us),
        of("vendor_blas", "cublas", cublas_us),
        of("vendor_blas", "cublaslt", peer_us),
    )
    return Recording(problem, H200, Regime("stream", "cold"), Environment({}), rows)


def test_a_problem_counts_beside_pytorchs_own_kernel_only() -> None:
    assert bound.ratios([recorded(8.0, 10.0), recorded(8.0, 4.0)]) == {FEW: [1.25, 0.5]}


def test_domains_with_too_few_problems_take_those_of_like_ones() -> None:
    found = {FEW: [1.0] * bound.MIN_PROBLEMS, WITH_BIAS: [0.5]}
    assert bound.of_domain(WITH_BIAS, found) == found[FEW]
    assert not bound.of_domain(ProductDomain("wide"), found)
    assert bound.of_domain(AttentionDomain(128, "windowed", "prompt"), {}) == (math.inf,)


@pytest.mark.parametrize(
    "domain",
    [
        AttentionDomain(256, "full", "one"),
        AttentionDomain(128, "full", "few", operand="bool"),
    ],
)
def test_calls_that_pytorch_has_an_operator_for_are_no_win_unmeasured(
    domain: AttentionDomain,
) -> None:
    assert not domain.has_donor_vendors and bound.of_domain(domain, {}) == ()
    assert "not measured: 3 of 3 calls" in bound.report({domain: 3}, {}, 3)


def test_the_ratio_of_a_share() -> None:
    rows = [(1.2, 1.0), (0.9, 1.0), (1.1, 2.0)]
    assert [bound.reached(rows, share) for share in (0.25, 0.5, 0.75, 1.0)] == [1.2, 1.1, 1.1, 0.9]


def test_the_report_weights_domains_by_their_calls() -> None:
    wide = ProductDomain("wide")
    calls = {FEW: 30, wide: 10, AttentionDomain(128, "windowed", "prompt"): 40, None: 2}
    text = bound.report(calls, {FEW: [2.0, 1.0, 0.5], wide: [0.5] * 3}, 82)
    assert "attention: 40 calls, own kernels at least as fast at 100%" in text
    assert "products: 40 calls, own kernels at least as fast at 50%" in text
    assert "all measured: 80 calls, own kernels at least as fast at 75%" in text
    assert "not measured: 2 of 82 calls" in text
    assert "75% 1.000, 80% 0.500" in text


def test_every_drawn_call_has_its_domain() -> None:
    calls = draw("bound", 12, subset("held-out"))
    assert sum(bound.drawn(calls).values()) == 12
