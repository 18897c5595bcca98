"""Measured ratios beside expected ones: the expected loss decides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from portfolio_machine import FIRST, FLASH, PROBLEM, candidate, portfolio_of

from tuner.families.by_operation import AttentionDomain
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.problem import AttentionProblem
from tuner.selection import engine_ratios
from tuner.selection.choice import choose
from tuner.selection.engine_ratios import is_engines
from tuner.selection.portfolio import Portfolio
from tuner.selection.ratios import LEAD, MIN_ERROR, ROWS_OCTAVE, SCATTER, Ratios

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
    error = 2 * SCATTER
    mean = (2 + 0.4 / 4) / (2 + 1 / 4)
    squares = (2 + (error**2 + 0.16) / 4) / (2 + 1 / 4)
    wanted = mean - LEAD * math.sqrt(squares - mean * mean)
    assert here.lead(SIZES, 0.4, 1.645 * error) == pytest.approx(wanted)


def test_nearer_calls_weigh_more() -> None:
    """A call's weight falls to 1/e over the width; rows count less than other sizes."""
    rows, keys = SIZES
    prior = (SCATTER / 0.1) ** 2
    for place, octaves in (((rows, 2 * keys), 1.0), ((2 * rows, keys), ROWS_OCTAVE)):
        both = Ratios.of([(SIZES, 1.0), (place, math.e)], width=1.0)
        mean, _ = both.near(SIZES, 0.0, 0.1645)
        weight = math.exp(-octaves)
        assert mean == pytest.approx(weight / (1 + weight + prior))
    far, _ = both.near((2**8 * rows, keys), 0.3, 0.1645)
    assert far == pytest.approx(0.3)


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


class TestEngines:
    """An engine's own kernel answers where it is measured to be faster."""

    PROBLEM = AttentionProblem.parse("B=4,H=8,HKV=2,SQ=1,SKV=1000,D=128,page_size=16,dtype=bf16")
    DOMAIN = AttentionDomain(128, "full", "one", is_paged=True)

    def engines(self, *ratios: float) -> engine_ratios.EngineRatios:
        sizes = engine_ratios.sizes_of(self.PROBLEM)
        return {self.DOMAIN: Ratios.of([(sizes, ratio) for ratio in ratios], 0.7)}

    def test_the_faster_one_answers(self) -> None:
        assert engine_ratios.sizes_of(self.PROBLEM) == (4 * 2 * 1000, 4)
        assert is_engines(self.PROBLEM, self.engines(0.9, 0.95)) is True
        assert is_engines(self.PROBLEM, self.engines(1.2, 1.1)) is False
        assert is_engines(self.PROBLEM, self.engines(0.8, 1.25)) is True, "not known"

    def test_shorter_lengths_count_for_a_captured_step(self) -> None:
        ratios = zip((1, 4, 16), (0.95, 1.15, 1.2), strict=True)
        measured = [(engine_ratios.sizes_of(self.PROBLEM, part), ratio) for part, ratio in ratios]
        engines = {self.DOMAIN: Ratios.of(measured, 0.1)}
        assert is_engines(self.PROBLEM, engines) is True
        assert is_engines(self.PROBLEM, engines, is_captured=True) is False

    def test_what_was_not_measured_is_not_said(self) -> None:
        assert is_engines(self.PROBLEM, {}) is None
        assert is_engines(replace(self.PROBLEM, head_dim=64), self.engines(1.2)) is None

    def test_windows_go_by_plain_calls(self) -> None:
        assert is_engines(replace(self.PROBLEM, window_left=100), self.engines(0.9, 0.9)) is True

    def test_a_portfolio_keeps_them_on_its_gpu_and_on_others(self) -> None:
        engines = self.engines(0.9, 1.25)
        portfolio = portfolio_of(candidate(FIRST, 9.0), candidate(FLASH, 10.0))
        again = Portfolio.from_json(replace(portfolio, engines=engines).to_json())
        assert again.engines[self.DOMAIN].to_json() == [[8000, 4, 0.9], [8000, 4, 1.25]]
        assert again.rescaled(GPUS["H100"]).engines == again.engines
