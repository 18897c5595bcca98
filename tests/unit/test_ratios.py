"""Measured ratios beside expected ones: the expected loss decides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from portfolio_machine import FIRST, FLASH, PROBLEM, candidate, portfolio_of

from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.selection.choice import choose
from tuner.selection.portfolio import Portfolio
from tuner.selection.ratios import LEAD, MIN_ERROR, PRIOR, Ratios

ROWS = PROBLEM.batch * PROBLEM.heads_q * PROBLEM.seqlen_q
SIZES = ROWS, PROBLEM.seqlen_kv


def answers(own_us: float, vendor_us: float, *measured: tuple[tuple[int, ...], float]) -> bool:
    """True if the own kernel answers."""
    portfolio = portfolio_of(candidate(FIRST, own_us), candidate(FLASH, vendor_us), margin=0.0)
    (models,) = portfolio.domains.values()
    found = choose(PROBLEM, replace(models, ratios=Ratios.of(measured)), DEFAULT_GPU)
    assert found is not None and (found.config.family == FIRST.family) == any(found.own())
    return found.config.family == FIRST.family


def test_calls_that_were_slower_are_pytorch_s() -> None:
    assert answers(9.0, 10.0)
    assert not answers(9.0, 10.0, (SIZES, 0.9), (SIZES, 0.92))
    far = tuple(64 * size for size in SIZES)
    assert answers(9.0, 10.0, (far, 0.5))


def test_calls_that_were_faster_are_own() -> None:
    assert not answers(10.2, 10.0)
    assert answers(10.2, 10.0, *[(SIZES, 1.3)] * 4)


def test_a_lead_smaller_than_its_error_is_none() -> None:
    unlike = (SIZES, 0.8), (SIZES, 1.4)
    assert not answers(9.8, 10.0, *unlike)
    assert answers(7.0, 10.0, (SIZES, 1.3), (SIZES, 1.5))


def test_the_prior_is_the_models_ratio_with_its_error() -> None:
    alone = Ratios.of([((4096, 4096), 1.0)])
    assert alone.lead((1, 1), 0.3, 0.1645) == pytest.approx(0.3 - LEAD * 0.1)
    assert alone.lead((1, 1), 0.3, 0.0) == pytest.approx(0.3 - LEAD * MIN_ERROR)
    here = Ratios.of([(SIZES, math.e)] * 2)
    mean = (2 + PRIOR * 0.4) / (2 + PRIOR)
    squares = (2 + PRIOR * 0.16) / (2 + PRIOR)
    wanted = mean - LEAD * math.sqrt(squares - mean * mean)
    assert here.lead(SIZES, 0.4, 0.0) == pytest.approx(wanted)


def test_ratios_of_another_gpu_only_take_calls_from_own_kernels() -> None:
    slow, fast = (Ratios.of([(SIZES, ratio)] * 4) for ratio in (0.8, 2.0))
    for ratios, own_us, is_own in ((slow, 5.0, False), (fast, 30.0, False), (fast, 5.0, True)):
        portfolio = portfolio_of(candidate(FIRST, own_us), candidate(FLASH, 10.0), margin=0.0)
        domains = {key: replace(one, ratios=ratios) for key, one in portfolio.domains.items()}
        found = replace(portfolio, domains=domains).rescaled(GPUS["H100"]).select(PROBLEM)
        assert found is not None and any(found.own()) == is_own


def test_a_portfolio_keeps_them() -> None:
    portfolio = portfolio_of(candidate(FIRST, 9.0), candidate(FLASH, 10.0))
    ratios = Ratios.of([((64, 128), 1.25), ((3, 5), 0.5)])
    domains = {key: replace(one, ratios=ratios) for key, one in portfolio.domains.items()}
    again = Portfolio.from_json(replace(portfolio, domains=domains).to_json())
    (models,) = again.domains.values()
    assert models.ratios is not None
    assert models.ratios.to_json() == [[3, 5, 0.5], [64, 128, 1.25]]
