"""Attention problems and hand-made portfolios."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fused_configs import maker

from tuner.config import Config
from tuner.families import families
from tuner.families.attention_work import TERMS, AttentionSizes, AttentionTiling, work
from tuner.families.by_operation import AttentionDomain
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem
from tuner.search import portfolio as fitting
from tuner.search import timed
from tuner.selection import portfolio
from tuner.selection.candidates import Candidate, DomainModels, Regret, Spread
from tuner.selection.portfolio import Portfolio
from tuner.selection.reader import close

WARM = Regime("stream", "warm")


FUSED, VENDOR = families()["fused_attention"], families()["vendor_sdpa"]


CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})


WIDE = maker()(2, 128)


NARROW = maker()(1, 64, blocks_per_sm=2)


REGRET = Regret(10, 0.01, 0.05, 1.1, 0.99, 0.9)


def attention(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


def amounts(text: str, tiling: AttentionTiling) -> dict[str, float]:
    return dict(
        zip(TERMS, work(AttentionSizes.of(attention(text)), tiling, DEFAULT_GPU), strict=True)
    )


def candidate(config: Config, terms: tuple[str, ...], **rates: float) -> Candidate:
    spread = Spread(((1000, 10**7), (64, 10**5)))
    named = {term.replace(" ", "_"): term for term in terms}
    return Candidate(config, {named[k]: v for k, v in rates.items()}, 20, 0.02, 0.05, spread)


def made(own_us: float, vendor_us: float, margin: float) -> Portfolio:
    own = candidate(timed.kernel_of(WIDE), FUSED.work_terms, launch=own_us)
    vendor = candidate(CUDNN, VENDOR.work_terms, launch=vendor_us)
    domain = AttentionDomain(64, "full", "prompt")
    models = DomainModels(domain, WARM, [own, vendor], margin, REGRET)
    return Portfolio("attention", DEFAULT_GPU, {domain: models}, {"days": ["2026-11-23"] * 2})


def planted(seed: int) -> list[Measurement]:
    """Times of two own kernels and cuDNN by planted rates, with noise of 2 %, at 60 problems."""
    rng = random.Random(seed)
    found = []
    rates = {
        WIDE.digest: {"launch": 3.0, "busiest_steps": 0.6},
        NARROW.digest: {"launch": 1.0, "busiest_steps": 0.3, "round_steps": 0.5},
        CUDNN.digest: {"launch": 6.0, "busiest_steps of 128x128": 0.9},
    }
    for _ in range(60):
        heads, length = rng.choice((8, 12, 16, 24, 32, 40)), rng.randrange(128, 8192)
        problem = attention(f"H={heads},S={length},D=64")
        for config in (WIDE, NARROW, CUDNN):
            family = families()[config.family]
            work = dict(
                zip(family.work_terms, family.work(problem, config, DEFAULT_GPU), strict=True)
            )
            us = sum(rate * work[term] for term, rate in rates[config.digest].items())
            us *= rng.uniform(0.98, 1.02)
            one = Measurement(problem, config, DEFAULT_GPU, WARM, Status.OK, latency_us=us)
            found.append(one)
    return found


@pytest.fixture(scope="module")
def known_fixture() -> Portfolio:
    """Made from the planted times."""
    return fitting.make("attention", {WARM: planted(0)}, DEFAULT_GPU)


@pytest.fixture
def ships_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Portfolio]:
    folder = tmp_path / "portfolio"
    folder.mkdir()
    known = made(9.0, 10.0, 0.0)
    known.write(folder / "a.json")
    monkeypatch.setattr(portfolio, "_folder", lambda: folder)
    portfolio.shipped.cache_clear()
    close()
    yield known
    portfolio.shipped.cache_clear()
