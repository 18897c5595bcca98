"""Portfolios that are fitted to planted times, and what ships."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from operator import mul
from pathlib import Path

import pytest
from gemm_configs import tile
from portfolio_cases import (
    CUDNN,
    NARROW,
    WARM,
    WIDE,
    attention,
    known_fixture,
    made,
    planted,
    ships_fixture,
)

from tuner import cli
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.attention_work import PACKING
from tuner.families.by_operation import DOMAINS, AttentionDomain, ProductDomain
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import GemmProblem
from tuner.search import judge, rates, timed
from tuner.search import portfolio as fitting
from tuner.selection import choice, portfolio
from tuner.selection.kernels import targets
from tuner.selection.portfolio import (
    Portfolio,
)

known = known_fixture
ships = ships_fixture


class TestDocument:
    def test_what_ships_is_as_it_was_without_pages(self) -> None:
        domains = [row["domain"] for one in portfolio.shipped() for row in one.to_json()["domains"]]
        assert domains and not any("is_paged" in domain for domain in domains)

    def test_it_is_what_was_written(self, tmp_path: Path) -> None:
        known = made(9.0, 10.0, 0.02)
        known.write(tmp_path / "p.json")
        again = Portfolio.read(tmp_path / "p.json")
        assert again.to_json() == known.to_json()
        problem = attention("S=1999,D=64")
        mine, theirs = again.select(problem), known.select(problem)
        assert mine is not None and theirs is not None
        assert mine.config == theirs.config and mine.source == theirs.source
        assert list(mine.own()) == list(theirs.own())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "x"}, "not a portfolio"),
            ({"version": 9}, "version 9 is not known"),
            ({"op": "softmax"}, "op 'softmax' has no portfolio"),
            ({"domains": None}, "cannot be read"),
            ({"domains": [{}]}, "cannot be read"),
            ({"gpu": {"name": 3}}, "name=3 is not text"),
        ],
    )
    def test_another_document_is_refused(
        self, tmp_path: Path, change: dict[str, object], message: str
    ) -> None:
        path = tmp_path / "p.json"
        path.write_text(json.dumps({**made(9.0, 10.0, 0.0).to_json(), **change}))
        with pytest.raises(ConfigError, match=message):
            Portfolio.read(path)

    @pytest.mark.parametrize("rate", [-1.0, True, "1", None])
    def test_a_rate_is_a_number_that_is_not_negative(self, rate: object) -> None:
        data = json.loads(json.dumps(made(9.0, 10.0, 0.0).to_json()))
        data["domains"][0]["candidates"][0]["rates"]["rounds"] = rate
        with pytest.raises(ConfigError, match="is not a number"):
            Portfolio.from_json(data)

    def test_a_launch_may_be_corrected_below_nothing(self) -> None:
        data = json.loads(json.dumps(made(9.0, 10.0, 0.0).to_json()))
        rates = data["domains"][0]["candidates"][0]["rates"]
        rates["launch"] = -1.5
        models = next(iter(Portfolio.from_json(data).domains.values()))
        assert models.candidates[0].rates["launch"] == -1.5
        for wrong in (-math.inf, math.nan, "-1"):
            rates["launch"] = wrong
            with pytest.raises(ConfigError, match="is not a number"):
                Portfolio.from_json(data)

    def test_an_unknown_term_is_named(self) -> None:
        data = json.loads(json.dumps(made(9.0, 10.0, 0.0).to_json()))
        data["domains"][0]["candidates"][0]["rates"]["wonders"] = 1.0
        with pytest.raises(ConfigError, match="fused_attention counts no 'wonders'"):
            Portfolio.from_json(data)

    def test_a_damaged_file_that_ships_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "bad.json").write_text("{")
        monkeypatch.setattr(portfolio, "_folder", lambda: tmp_path)
        portfolio.shipped.cache_clear()
        with pytest.raises(StoreError, match=r"a shipped file cannot be read: portfolio .*bad\.j"):
            portfolio.shipped()


GEMV = Config(
    "gemv",
    {
        **{"warps": 8, "k_warps": 8, "row_tiles": 2, "pieces": 4, "stages": 4},
        **{"blocks_per_sm": 1, "persistent": True, "pdl": True, "lead": 1024},
    },
)


LAUNCHED = Config("gemv", {**GEMV.params, "pdl": False, "lead": 0})
"""As a call launches it."""
CUBLAS = Config("vendor_blas", {"kernel": "cublas"})


def planted_products(seed: int) -> list[Measurement]:
    """Times of a kernel of few rows, of a tile and of cuBLAS by planted rates, with noise of 2 %:
    the first is faster than cuBLAS at one row, and slower at four.
    """
    rng, found = random.Random(seed), []
    rates: dict[str, dict[str, float]] = {
        GEMV.digest: {"launch": 1.0, "memory": 0.2, "row_steps": 0.15},
        tile(64, 64).digest: {"launch": 3.0, "memory": 0.3},
        CUBLAS.digest: {"launch": 2.0, "memory": 0.28},
    }
    for _ in range(60):
        n, k, m = 1024 * rng.randint(1, 8), 1024 * rng.randint(1, 4), rng.choice((1, 2, 3, 4))
        problem = GemmProblem(m, n, k, dtype="bfloat16")
        for config in (GEMV, tile(64, 64), CUBLAS):
            family = families()[config.family]
            if family.violations(problem, config, DEFAULT_GPU):
                continue
            work = dict(
                zip(family.work_terms, family.work(problem, config, DEFAULT_GPU), strict=True)
            )
            us = sum(rate * work[term] for term, rate in rates[config.digest].items())
            us *= rng.uniform(0.98, 1.02)
            cold = Regime("stream", "cold")
            found.append(Measurement(problem, config, DEFAULT_GPU, cold, Status.OK, latency_us=us))
    return found


@pytest.fixture(scope="module")
def few_rows() -> Portfolio:
    """Made from the planted times."""
    return fitting.make("gemm", {Regime("stream", "cold"): planted_products(0)}, DEFAULT_GPU)


class TestMakeProducts:
    def test_a_portfolio_of_products(self, few_rows: Portfolio) -> None:
        (models,) = few_rows.domains.values()
        assert (few_rows.op, models.domain) == ("gemm", ProductDomain("few"))
        assert [one.config.get("kernel") for one in models.vendors] == ["cublas"]
        assert Portfolio.from_json(json.loads(json.dumps(few_rows.to_json()))).op == "gemm"

    def test_an_own_kernel_where_it_is_faster_and_pytorch_s_elsewhere(
        self, few_rows: Portfolio
    ) -> None:
        """Between the sizes that were measured."""
        one, four = (few_rows.select(GemmProblem(m, 4224, 2176)) for m in (1, 4))
        assert one is not None and one.config == LAUNCHED and one.vendor == "cublas"
        assert four is not None and four.config == CUBLAS

    def test_a_bias_has_the_plain_product_s_kernels(self, few_rows: Portfolio) -> None:
        found = few_rows.select(GemmProblem(1, 4224, 2176, epilogue="bias"))
        assert found is not None and found.config == LAUNCHED
        assert found.doubts == ("the rates are those of M to 16",)
        assert {d.label() for d, _ in few_rows.served()} == {"M to 16", "M to 16, bias"}

    def test_an_activation_without_kernels_is_pytorch_s(self, few_rows: Portfolio) -> None:
        found = few_rows.select(GemmProblem(1, 4224, 2176, epilogue="bias_gelu"))
        assert found is not None and found.config == CUBLAS and list(found.ranked()) == []

    def test_its_kernels_are_listed_for_both_types_and_both_widths(
        self, few_rows: Portfolio
    ) -> None:
        """A kernel of few rows is compiled for up to half of them, and for all."""
        gemvs = [t for t in targets(few_rows) if t.config == GEMV and not t.problem.epilogue]  # type: ignore[attr-defined]
        assert sorted((t.problem.dtype, t.problem.m) for t in gemvs) == [  # type: ignore[attr-defined]
            *(("bfloat16", 1), ("bfloat16", 9), ("float16", 1), ("float16", 9))
        ]

    def test_far_from_what_was_measured_it_is_pytorch_s(self, few_rows: Portfolio) -> None:
        near, far = (few_rows.select(GemmProblem(1, n, 2176)) for n in (16384, 65536))
        assert near is not None and near.config == LAUNCHED and not near.doubts
        assert far is not None and far.config == CUBLAS and far.doubts
        assert next(far.ranked())[1] == LAUNCHED, "it may be timed in place"

    def test_a_width_without_alignment_is_pytorch_s(self, few_rows: Portfolio) -> None:
        found = few_rows.select(GemmProblem(1, 4224, 2177))
        assert found is not None and found.config == CUBLAS


def decoded(queries: int, heads: tuple[int, ...]) -> list[Measurement]:
    """Times of a kernel by planted rates, and of a slower cuDNN, at six lengths."""
    found = []
    kernel = Config(NARROW.family, {**NARROW.params, "persistent": False})
    for count in heads:
        for keys in (256, 512, 1024, 2048, 4096, 8192):
            problem = attention(f"H={count},SQ={queries},SKV={keys},D=64,B=8")
            family = families()[kernel.family]
            work = dict(
                zip(family.work_terms, family.work(problem, kernel, DEFAULT_GPU), strict=True)
            )
            us = 3.0 + 0.5 * work["round_steps"] + 0.1 * work["memory"]
            for config, factor in ((kernel, 1.0), (CUDNN, 2.0)):
                if config is CUDNN or not family.violations(problem, kernel, DEFAULT_GPU):
                    found.append(
                        Measurement(
                            problem, config, DEFAULT_GPU, WARM, Status.OK, latency_us=us * factor
                        )
                    )
    return found


class TestMake:
    def test_times_are_expected_as_planted(self, known: Portfolio) -> None:
        (models,) = known.domains.values()
        assert models.domain == AttentionDomain(64, "full", "prompt")
        for one in models.candidates:
            assert one.median_error < 0.03
        for m in planted(1):
            of = next(c for c in models.candidates if c.config == timed.kernel_of(m.config))
            assert of.family is not None
            amounts = of.family.work(m.problem, m.config, DEFAULT_GPU)
            expected = sum(map(mul, of.priced, amounts))
            assert expected == pytest.approx(m.latency_us, rel=0.1)

    def test_the_kernel_of_least_time_is_selected(self, known: Portfolio) -> None:
        """The narrow tile has the smaller launch, the wide one the smaller rate."""
        small, large = (known.select(attention(f"H=16,S={s},D=64")) for s in (128, 8192))
        assert small is not None and timed.kernel_of(small.config) == timed.kernel_of(NARROW)
        assert large is not None and timed.kernel_of(large.config) == timed.kernel_of(WIDE)

    def test_the_regret_is_of_models_left_out(self, known: Portfolio) -> None:
        (models,) = known.domains.values()
        assert models.regret.problems == 60
        assert 0 <= models.regret.mean < 0.02
        assert models.regret.over_vendor > 1.2

    def test_one_model_s_problems_are_too_few(self) -> None:
        alone = [m for m in planted(0) if m.problem.heads_q == 16]  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="no domain has a kernel with 6 measurements"):
            fitting.make("attention", {WARM: alone}, DEFAULT_GPU)

    def test_only_some_domains_are_made_and_the_file_keeps_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path, store = tmp_path / "p.json", ["--store", str(tmp_path / "empty.db")]
        before, other = made(9.0, 10.0, 0.0), AttentionDomain(128, "full", "one")
        (models,) = before.domains.values()
        former = {models.domain: models, other: replace(models, domain=other)}
        origin = {"days": ["2026-01-01", "2026-01-02"], "cuda": ["12.9"]}
        before = replace(before, domains=former, origin=origin)
        before.write(path)
        rows = [m.but(created_at="2026-11-25T09:00:00Z") for m in planted(0)]
        monkeypatch.setattr(
            fitting, "measurements", lambda op, gpu, regime, store: rows if regime == WARM else []
        )
        only = ["fit", *store, "--output", str(path), "--only"]
        assert cli.main([*only, "D=128"]) == cli.WRONG_INPUT
        assert "no domain with D=128 in its name has a kernel" in capsys.readouterr().err
        assert Portfolio.read(path).to_json() == before.to_json()
        assert cli.main([*only, "D=64,prompts"]) == 0
        after = Portfolio.read(path)
        assert after.domains[other] == Portfolio.from_json(before.to_json()).domains[other]
        assert after.domains[models.domain].regret.problems == 60
        assert after.origin == {"days": ["2026-01-01", "2026-11-25"], "cuda": ["12.9"]}
        replace(before, gpu=GPUS["H100"]).write(path)
        assert cli.main([*only, "D=64"]) == cli.WRONG_INPUT
        assert "the portfolio is of attention on NVIDIA H100" in capsys.readouterr().err
        assert cli.main(["fit", *store, "--only", "D=64"]) == cli.WRONG_INPUT
        assert "--only is for --output" in capsys.readouterr().err

    def test_the_number_of_kernels_and_their_choice_can_be_limited(
        self, known: Portfolio, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = [c for models in known.domains.values() for c in models.candidates if not c.is_vendor]
        assert len(own) == 2
        few = fitting.make("attention", {WARM: planted(0)}, DEFAULT_GPU, kernels=1)
        (models,) = few.domains.values()
        assert sum(not one.is_vendor for one in models.candidates) == 1
        monkeypatch.setattr(fitting, "shipped", lambda: (few,))
        kept = {timed.kernel_of(m.config) for m in fitting.of_shipped(planted(0))}
        assert kept == {one.config for one in models.candidates}

    @pytest.mark.parametrize("others", ["one", ""])
    def test_phases_of_decoding_share_measurements(self, others: str) -> None:
        """Two models alone have times of few queries; the same kernel's of one query are taken."""
        rows = [*decoded(5, (8, 16)), *(decoded(1, (8, 12, 16, 24)) if others else ())]
        cold = Regime("stream", "cold")
        measured = {cold: [m.but(regime=cold) for m in rows]}
        few = AttentionDomain(64, "full", "few")
        if not others:
            with pytest.raises(ConfigError, match="no domain has a kernel"):
                fitting.make("attention", measured, DEFAULT_GPU)
            return
        models = fitting.make("attention", measured, DEFAULT_GPU).domains[few]
        assert models.regret.problems == 12, "judged by its own problems alone"
        (own,) = (one for one in models.candidates if not one.is_vendor)
        assert own.points == 36, "12 of few queries, 24 of one"

    def test_failed_and_modified_ones_are_left_out(self) -> None:
        failed = [m.but(status=Status.WRONG_RESULT, latency_us=None) for m in planted(0)]
        assert timed.points(failed, DEFAULT_GPU) == []
        narrow = Measurement(
            attention("S=1024,D=64,dtype=e4m3"), CUDNN, DEFAULT_GPU, WARM, Status.OK, latency_us=9.0
        )
        assert timed.points([narrow], DEFAULT_GPU) == []

    def test_a_quick_time_comes_before_a_final_one(self) -> None:
        one = planted(0)[0]
        both = [one, one.but(latency_us=99.0, is_final=True)]
        assert [p.us for p in timed.points(both, DEFAULT_GPU)] == [one.latency_us]

    def test_a_product_s_launch_is_hidden(self) -> None:
        """As it was measured; a time without counts where there is none with."""
        problem, shown = GemmProblem(1024, 4096, 4096), tile(128, 128)
        hidden = Config(shown.family, {**shown.params, "pdl": True})
        times = {shown: 9.0, hidden: 8.0}
        rows = [
            Measurement(problem, config, DEFAULT_GPU, WARM, Status.OK, latency_us=us)
            for config, us in times.items()
        ]
        for found, us in ((rows, 8.0), (rows[:1], 9.0), (rows[::-1], 8.0)):
            (point,) = timed.points(found, DEFAULT_GPU)
            assert (point.config, point.us) == (hidden, us)

    def test_orders_of_tiles_share_their_measurements(self) -> None:
        orders = [
            Config("gemm", {**tile(128, 128).params, "pdl": True, "raster_order": order})
            for order in ("AlongM", "AlongN")
        ]
        problems = [GemmProblem(1024, 4096, 512 * k) for k in (1, 2, 3)]
        found = [timed.Point(problem, order, 9.0) for problem in problems for order in orders]
        kernels = timed.timed_kernels(ProductDomain("wide"), found)
        assert {kernel.config for kernel in kernels} == set(orders)
        for kernel in kernels:
            assert len(kernel.points) == 6, "three each are too few"
            assert sum(map(kernel.is_own, kernel.points)) == 3

    def test_stream_times_come_before_more_chained_ones(self) -> None:
        stream = Regime("stream", "warm")
        few = [replace(m, regime=stream) for m in planted(2)[:90]]
        (models,) = fitting.make(
            "attention", {WARM: planted(0), stream: few}, DEFAULT_GPU
        ).domains.values()
        assert models.regime == stream and models.regret.problems == 30

    def test_more_splits_than_a_selection_considers_are_left_out(self) -> None:
        problem = attention("SQ=1,SKV=4096,D=64,H=16,B=1")
        params = {**NARROW.params, "persistent": False, "warp_groups": 1, "blocks_per_sm": 1}
        kept = {}
        for combine in ("cluster", "kernel"):  # 16 tiles: 8 splits of each are 128 blocks
            config = Config(NARROW.family, {**params, "combine": combine, "splits": 8})
            m = Measurement(problem, config, DEFAULT_GPU, WARM, Status.OK, latency_us=9.0)
            kept[combine] = len(timed.points([m], DEFAULT_GPU))
        assert kept == {"cluster": 0, "kernel": 1}

    def test_few_measurements_are_drawn_to_the_domain_s_rates(self) -> None:
        found = timed.points(planted(0), DEFAULT_GPU)
        wide = [point for point in found if point.config == WIDE]
        prior = rates.fitted(wide, DEFAULT_GPU)
        alone = rates.fitted(wide[:1], DEFAULT_GPU)
        drawn = rates.fitted(wide[:1], DEFAULT_GPU, prior)

        def error(rates: list[float]) -> float:
            family = families()[WIDE.family]
            expected = (
                sum(map(mul, rates, family.work(p.problem, p.config, DEFAULT_GPU))) for p in wide
            )
            return max(float(abs(us / p.us - 1)) for us, p in zip(expected, wide, strict=True))

        assert error(drawn) < 0.2 < error(alone)


@pytest.mark.parametrize(
    ("expected", "kernel"),
    [
        ({"cudnn": 10.0, "flash2": 8.1}, "cudnn"),
        ({"cudnn": 10.0, "flash2": 7.9}, "flash2"),
        ({"flash2": 10.0, "efficient": 9.0}, "flash2"),
        ({"efficient": 9.0}, "efficient"),
    ],
)
def test_another_of_pytorch_s_kernels_has_to_be_much_faster(
    expected: dict[str, float], kernel: str
) -> None:
    assert choice.preferred(expected) == kernel


def test_another_of_pytorch_s_kernels_has_to_be_measured_near() -> None:
    expected = {"cudnn": 833.0, "flash2": 281.0}
    assert choice.preferred(expected, {"flash2"}) == "flash2"
    assert choice.preferred(expected, set()) == "cudnn"


def test_what_ships_is_legal_and_judged_on_enough() -> None:
    """Every candidate is this version's, and every domain was judged at problems left out."""
    ships = [(one.op, one.gpu) for one in portfolio.shipped()]
    assert ships == [(op, gpu) for gpu in (DEFAULT_GPU, GPUS["H100"]) for op in DOMAINS]
    for models in (models for ships in portfolio.shipped() for models in ships.domains.values()):
        own = [one for one in models.candidates if not one.is_vendor]
        is_composed = models.domain.is_composed  # PyTorch has no kernel
        assert own and (len(own) < len(models.candidates)) is not is_composed
        assert models.regret.problems >= timed.MIN_POINTS
        for one in own:
            assert one.points >= timed.MIN_POINTS
            assert one.median_error <= judge.MAX_MEDIAN_ERROR
            assert one.family is not None
            problem = models.domain.problem_for(one.config)
            called = one.family.called(problem, one.config, 1)
            assert not one.family.malformed(called)


def test_calls_of_any_heads_may_split_the_keys() -> None:
    """Where kernels of an H200 split them, one of these takes every number of heads."""
    here = next(one for one in portfolio.shipped() if one.gpu == DEFAULT_GPU)
    found = 0
    for models in here.domains.values():
        if models.domain.takes_packs:  # a kernel without splits takes the others
            continue
        own = [one.config.params for one in models.candidates if "combine" in one.config.params]
        assert not own or any(not PACKING & params.keys() for params in own), models.domain.label()
        found += bool(own)
    assert found >= 6
