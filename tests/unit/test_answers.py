"""Peers' kernels as answers: by measured rates of the build that is here, or timed here."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from portfolio_machine import (
    FIRST,
    FLASH,
    PROBLEM,
    SECOND,
    SHAPE,
    Serving,
    Stopwatch,
    candidate,
    portfolio_of,
    portfolio_serving,
    portfolio_stopwatch,
)
from runtime_machine import WRITTEN, fake_machine, inputs

from tuner import settings
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.by_operation import AttentionDomain
from tuner.families.peers import ANSWERS, installed
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem
from tuner.selection import peer_ratios
from tuner.selection.peer_ratios import PeerRatios
from tuner.selection.peer_times import PeerTimes
from tuner.selection.portfolio import Portfolio
from tuner.selection.ratios import Ratios
from tuner.selection.reader import lookup

machine, serving, stopwatch = fake_machine, portfolio_serving, portfolio_stopwatch
FLASH3 = Config("vendor_sdpa", {"kernel": "flash3"})


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """FlashAttention-3's build on this machine."""
    (tmp_path / "fa3.py").write_text("fwd = None\n")
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    return installed.version("flash3")


def with_peer(build: str, ratio: float = 2.0) -> Portfolio:
    """A portfolio whose answer takes `ratio` times as long as FlashAttention-3, where measured."""
    made = portfolio_of(candidate(FIRST, 10.0), candidate(SECOND, 11.0), candidate(FLASH, 20.0))
    ratios = Ratios.of([(peer_ratios.sizes_of(PROBLEM), ratio)] * 6, peer_ratios.WIDTH_OCTAVES)
    (domain,) = made.domains
    return replace(made, peers={domain: (PeerRatios(FLASH3, build, ratios),)})


def served(serving: Serving, portfolio: Portfolio) -> str:
    """The kernel that answered a call."""
    serving.portfolio = portfolio
    serving.peers = {"flash3"}
    serving.runtime.table.table.forget()
    before = len(serving.vendors)
    if serving.call():
        return "own"
    return serving.vendors[-1] if len(serving.vendors) > before else "pytorch"


def test_a_peer_answers_by_the_rates_of_its_build(serving: Serving, build: str) -> None:
    assert served(serving, with_peer(build)) == "flash3"
    stats = serving.machine.stats()
    assert (stats.hits, stats.peers, stats.answers) == (
        1,
        {"flash3": 1},
        {"flash3": 1, "own": 0, "pytorch": 0},
    )
    assert served(serving, with_peer("fa3 of yesterday")) == "own", "not measured"
    assert served(serving, with_peer(build, 1.01)) == "own", "not clearly faster"


def test_the_next_answers_where_a_peer_cannot(serving: Serving, build: str) -> None:
    serving.portfolio = with_peer(build)
    assert serving.call() and serving.machine.stats().answers["own"] == 1


@pytest.mark.parametrize(("words", "by"), [("own,pytorch", "own"), ("flash3", "flash3")])
def test_the_setting_says_who_may_answer(
    serving: Serving, build: str, words: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_ANSWERS", words)
    assert settings.answers() >= {"own", "pytorch"}
    assert served(serving, with_peer(build)) == by


def test_an_unknown_word_is_one_clear_line(
    serving: Serving, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_ANSWERS", "own,flash9")
    with pytest.raises(ConfigError, match=r"has 'flash9' \(allowed: own, pytorch, flash3, .*\)$"):
        settings.answers()
    assert served(serving, portfolio_of(candidate(FIRST, 10.0))) == "pytorch"
    assert serving.fallbacks == ["a setting is wrong"]
    for problem in (PROBLEM, "S=1024,D=64"):  # by a portfolio, and by a decision
        with pytest.raises(ConfigError, match="TUNER_ANSWERS=own,flash9"):
            lookup(problem, gpu=DEFAULT_GPU)


def test_every_word_names_kernels() -> None:
    assert {*ANSWERS.values(), "own", "pytorch"} == set(settings.ANSWERS)


def test_a_peer_answers_only_on_the_gpu_and_in_the_domain_of_its_measurements(build: str) -> None:
    portfolio = with_peer(build)
    here = portfolio.select(PROBLEM)
    assert here is not None and here.first[0] == pytest.approx(5.0)
    assert here.first[1] == FLASH3
    assert here.config == FIRST and "5.0 us by flash3, else 10.0" in here.source
    assert all(config != FLASH3 for _, config in (*here.own(), *here.ranked()))
    few = replace(portfolio, domains={AttentionDomain(64, "full", "few"): here.times.models})
    other = few.select(replace(PROBLEM, seqlen_q=4))
    assert other is not None and not other.peers
    elsewhere = portfolio.rescaled(GPUS["H100"]).select(PROBLEM)
    assert elsewhere is not None and not elsewhere.peers


def test_a_ratio_smaller_than_its_error_is_none(build: str) -> None:
    sizes = peer_ratios.sizes_of(PROBLEM)
    unlike = PeerRatios(FLASH3, build, Ratios.of([(sizes, 0.8), (sizes, 1.6)]))
    assert list(peer_ratios.faster(PROBLEM, [unlike])) == []


def test_a_portfolio_keeps_its_peers(build: str) -> None:
    portfolio = with_peer(build)
    again = Portfolio.from_json(portfolio.to_json())
    ((one,),) = again.peers.values()
    assert (one.config, one.build) == (FLASH3, build)
    assert one.ratios.to_json() == [[64, 32, 1, 2.0]] * 6
    newer = again.updated(portfolio_of(candidate(FIRST, 10.0)))
    assert newer.peers == again.peers


def with_times(build: str, us: float) -> Portfolio:
    """A portfolio beside which FlashAttention-3 takes `us` microseconds."""
    made = portfolio_of(candidate(FIRST, 10.0), candidate(SECOND, 11.0), candidate(FLASH, 20.0))
    (domain,) = made.domains
    return replace(made, peer_times={domain: (PeerTimes(FLASH3, build, {"launch": us}),)})


def test_a_peer_of_clearly_less_expected_time_answers(serving: Serving, build: str) -> None:
    assert served(serving, with_times(build, 9.5)) == "flash3"
    assert served(serving, with_times(build, 9.9)) == "own", "not clearly faster"
    assert served(serving, with_times("fa3 of yesterday", 9.5)) == "own"
    found = with_times(build, 9.5).select(PROBLEM)
    assert found is not None and found.first == (9.5, FLASH3)


def test_no_peer_answers_over_a_cache_that_grows(serving: Serving, build: str) -> None:
    """Its plan holds for one length, and each token has another."""
    serving.portfolio, serving.peers = with_times(build, 5.0), {"flash3"}
    (query, *_), (_, *cache) = inputs((1, 2, 256, 64)), inputs((1, 2, 320, 64))
    out = serving.runtime.attention.attention(query, *cache)
    assert bool((out == WRITTEN).all()) and not serving.vendors


def test_ranks_that_agreed_have_no_peer(
    serving: Serving, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may not have it."""
    serving.portfolio, serving.peers = with_times(build, 5.0), {"flash3"}
    monkeypatch.setattr(serving.runtime.proven_kernels.lists, "_agreed", frozenset())
    assert serving.call() and not serving.vendors


def test_an_own_kernel_writes_the_log_sum_exp_in_place_of_a_peer(
    serving: Serving, build: str
) -> None:
    assert served(serving, with_times(build, 5.0)) == "flash3"
    find_plan = importlib.import_module("tuner.runtime.attention.attention_call").find_plan
    plan = find_plan(*inputs(SHAPE), False, None)
    assert plan.config == FIRST and plan.has_lse
    serving.call()
    assert serving.vendors == ["flash3"] * 2


@pytest.mark.parametrize(("l2", "us"), [("cold", 7.07), ("warm", 5.0)])
def test_no_peer_is_expected_to_be_faster_than_memory(build: str, l2: str, us: float) -> None:
    """As of own kernels: where inputs are cold, not before they are read."""
    portfolio = with_times(build, 5.0)
    ((domain, models),) = portfolio.domains.items()
    models = replace(models, regime=Regime("stream", l2))
    problem = AttentionProblem.parse("S=4096,D=64,H=8")
    found = replace(portfolio, domains={domain: models}).select(problem)
    assert found is not None and found.first == (pytest.approx(us, abs=0.01), FLASH3)


def test_a_portfolio_keeps_its_peers_times(build: str) -> None:
    portfolio = with_times(build, 9.9)
    again = Portfolio.from_json(portfolio.to_json())
    assert again.peer_times == portfolio.peer_times
    assert again.updated(portfolio_of(candidate(FIRST, 10.0))).peer_times == again.peer_times
    other = portfolio_of(candidate(FIRST, 10.0))
    domain = AttentionDomain(64, "causal", "prompt")
    moved = replace(other, gpu=GPUS["H100"], domains={domain: next(iter(other.domains.values()))})
    assert portfolio.beside(moved).peer_times == portfolio.peer_times


def test_a_lookup_says_who_answers(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.selection.portfolio.shipped", lambda: (with_peer(build),))
    found = lookup(PROBLEM, gpu=DEFAULT_GPU)
    assert found is not None and found.answered_by == "flash3"
    monkeypatch.setenv("TUNER_ANSWERS", "own")
    again = lookup(PROBLEM, gpu=DEFAULT_GPU)
    assert again is not None and again.answered_by == "own"


def test_a_measured_peer_of_another_build_waits_for_its_revalidation(
    serving: Serving, build: str
) -> None:
    serving.peers = {"flash3"}
    plan_of, posed = serving.runtime.plan.plan_of, serving.runtime.plan.Posed(PROBLEM)
    for measured_build, kind in ((build, "VendorPlan"), ("fa3 of yesterday", "Refusal")):
        environment = Environment({"flash3": measured_build})
        measured = Measurement(
            PROBLEM, FLASH3, DEFAULT_GPU, Regime(), Status.OK, environment=environment
        )
        plan = plan_of(posed, measured, 0)
        assert type(plan).__name__ == kind
    assert "tuner entries revalidate" in plan.reason


class TestBenchmark:
    """``TUNER_BENCHMARK=1`` times peers of any build."""

    def test_the_fastest_peer_serves(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopwatch.us["flash3"] = 4.0
        assert served(serving, serving.portfolio) == "flash3"
        monkeypatch.setenv("TUNER_ANSWERS", "own,pytorch")
        assert served(serving, serving.portfolio) == "own"

    def test_own_ones_before_peers_of_equal_speed(
        self, serving: Serving, stopwatch: Stopwatch
    ) -> None:
        stopwatch.us["flash3"] = 4.95
        assert served(serving, serving.portfolio) == "own"

    def test_a_peer_whose_results_are_not_pytorch_s_is_not_served(
        self, serving: Serving, stopwatch: Stopwatch
    ) -> None:
        stopwatch.us["flash3"] = 4.0
        serving.factor = 2
        assert served(serving, serving.portfolio) == "own"

    def test_the_first_algorithms_of_a_list_are_among_them(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        contending = importlib.import_module("tuner.runtime.call.peer_contenders").contending
        search = families()["vendor_cublaslt_search"]
        problem = GemmProblem(8, 128, 64, dtype="bfloat16")
        every = [Config(search.name, {"kernel": "cublaslt_search", "tile": n}) for n in range(12)]
        monkeypatch.setattr(type(search), "listing", lambda *_: every)
        assert contending(problem, DEFAULT_GPU) == every[:8]
        monkeypatch.setenv("TUNER_ANSWERS", "own,flash3")
        assert contending(problem, DEFAULT_GPU) == []

    def test_a_product_that_no_portfolio_has_is_timed(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime, search = serving.runtime, families()["vendor_cublaslt_search"]
        listed = [Config(search.name, {"kernel": "cublaslt_search", "tile": n}) for n in range(2)]
        out = importlib.import_module("torch").zeros(1, 8, 128)

        def called(name: str) -> Any:
            serving.vendors.append(name)
            return out

        facts = {"name": search.name, "is_vendor": True, "is_listed": True}
        calls = {"vendor_call": lambda _, config, __: lambda: called(f"tile {config['tile']}")}
        monkeypatch.setattr(type(search), "listing", lambda *_: listed)
        monkeypatch.setattr(runtime.plan, "family", lambda _: SimpleNamespace(**facts, **calls))

        def answer(rows: int, us: float) -> Any:
            stopwatch.us = {"sdpa": 8.0, "tile 0": 7.9, "tile 1": us}
            problem = GemmProblem.parse(f"M={rows},N=128,K=64,dtype=e4m3,scales=tensor")
            posed = runtime.plan.Posed(
                problem, run=lambda plan: plan.run_uncounted() if plan else called("sdpa")
            )
            excluded = runtime.plan.Excluded((), frozenset())
            return runtime.proven_kernels.choose(posed, DEFAULT_GPU, 0, excluded)

        assert answer(8, 5.0).plan.config == listed[1]
        assert answer(9, 9.0).plan.kind.name == "TIMED"
        monkeypatch.setenv("TUNER_ANSWERS", "own,pytorch")
        assert answer(10, 5.0) is None

    def test_a_library_that_lists_nothing_is_a_counted_error(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: Any) -> Any:
            raise OSError("no libcublasLt.so")

        contending = importlib.import_module("tuner.runtime.call.peer_contenders").contending
        search = families()["vendor_cublaslt_search"]
        monkeypatch.setattr(type(search), "listing", refused)
        assert contending(GemmProblem(8, 128, 64, dtype="bfloat16"), DEFAULT_GPU) == []
        assert serving.machine.stats().errors == {"vendor_cublaslt_search lists nothing": 1}
