"""Portfolios: work terms, time models fitted to measurements, and what is selected by them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from operator import mul
from pathlib import Path

import pytest
from fused_configs import maker
from gemm_configs import tile

from tuner.base import resources
from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.attention_work import TERMS, Sizes, Tiling, work
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem
from tuner.search import portfolio as fitting
from tuner.selection import portfolio
from tuner.selection.domains import AttentionDomain, Domain, ProductDomain
from tuner.selection.kernels import targets
from tuner.selection.portfolio import (
    Candidate,
    DomainModels,
    Portfolio,
    Regret,
    Spread,
)
from tuner.selection.reader import close, lookup

WARM = Regime("stream", "warm")
FUSED, VENDOR = families()["fused_attention"], families()["vendor_sdpa"]
CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})
WIDE = maker()(2, 128)
NARROW = maker()(1, 64, blocks_per_sm=2)
REGRET = Regret(10, 0.01, 0.05, 1.1, 0.99, 0.9)


def attention(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


def amounts(text: str, tiling: Tiling) -> dict[str, float]:
    return dict(zip(TERMS, work(Sizes.of(attention(text)), tiling, DEFAULT_GPU), strict=True))


class TestWork:
    def test_full_attention(self) -> None:
        """16 heads of 1024 queries are 128 blocks of 128 rows; 1024 keys are 8 steps of 128."""
        found = amounts("S=1024,D=64,H=16", Tiling(128, 128))
        assert (found["rounds"], found["round_steps"], found["longest_steps"]) == (1, 8, 8)
        assert found["blocks"] == pytest.approx(128 / 132)
        assert found["mean_steps"] == pytest.approx(8 * 128 / 132)
        assert found["memory"] == pytest.approx(4 * 16 * 1024 * 64 * 2 / 1e6)
        assert (found["partials"], found["splits"]) == (0, 0)

    def test_a_causal_mask_halves_the_mean_and_leaves_the_longest(self) -> None:
        full, causal = (
            amounts(f"S=4096,D=64{mask}", Tiling(128, 128)) for mask in ("", ",causal=1")
        )
        assert causal["longest_steps"] == full["longest_steps"] == 32
        assert causal["mean_steps"] == pytest.approx(full["mean_steps"] * 33 / 64, rel=0.05)

    def test_a_window_bounds_the_steps(self) -> None:
        found = amounts("S=8192,D=64,causal=1,window=256", Tiling(128, 128))
        assert found["longest_steps"] <= 4

    def test_packed_heads_share_rows(self) -> None:
        shape = "SQ=1,SKV=4096,D=128,H=32,HKV=8"
        alone, packed = (amounts(shape, Tiling(64, 128, packed=n)) for n in (1, 4))
        assert packed["blocks"] == pytest.approx(alone["blocks"] / 4)

    def test_splits_share_steps_and_are_combined(self) -> None:
        shape = "SQ=1,SKV=4096,D=128,H=32,HKV=8"
        one, eight = (amounts(shape, Tiling(64, 128, packed=4, splits=n)) for n in (1, 8))
        assert eight["longest_steps"] == one["longest_steps"] / 8 == 4
        assert eight["splits"] == 8
        assert eight["partials"] == pytest.approx(4 * 8 * 32 * 128 / 1e6)

    @pytest.mark.parametrize("family", [FUSED, VENDOR], ids=lambda family: family.name)
    def test_amounts_have_names(self, family: object) -> None:
        assert isinstance(family, type(FUSED) | type(VENDOR))
        problem = attention("S=1024,D=64")
        config = WIDE if family is FUSED else CUDNN
        assert len(family.work(problem, config, DEFAULT_GPU)) == len(family.work_terms)


class TestScheduled:
    def test_a_kernel_whose_packed_heads_do_not_divide_the_group_is_left_out(self) -> None:
        packed = maker()(1, 64, packed_heads=4)
        assert FUSED.scheduled(attention("S=512,D=64,H=14,HKV=2"), packed, DEFAULT_GPU) == []

    def test_grouped_heads_name_what_is_one(self) -> None:
        (config,) = FUSED.scheduled(attention("S=512,D=64,H=16,HKV=4"), WIDE, DEFAULT_GPU)
        assert config["packed_heads"] == 1

    def test_splits_fill_the_chip_and_leave_keys(self) -> None:
        split = maker()(1, 128, packed_heads=4, splits=2, combine="kernel")
        problem = attention("SQ=1,SKV=2048,D=128,H=32,HKV=8")
        counts = [c["splits"] for c in FUSED.scheduled(problem, split, DEFAULT_GPU)]
        assert counts == [2, 4, 8, 16], "8 tiles have room for 16 blocks each, and 2048 keys for 16"
        assert all(
            FUSED.accepts(problem, c, DEFAULT_GPU)
            for c in FUSED.scheduled(problem, split, DEFAULT_GPU)
        )


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("S=1024,D=64", AttentionDomain(64, "full", "prompt")),
        ("S=1024,D=72,causal=1,dtype=bf16", AttentionDomain(96, "causal", "prompt")),
        ("SQ=1,SKV=1024,D=128", AttentionDomain(128, "full", "one")),
        ("SQ=4,SKV=1024,D=128", AttentionDomain(128, "full", "few")),
        (
            "S=1024,D=64,causal=1,window=128,softcap=30",
            AttentionDomain(64, "windowed", "prompt", True),
        ),
        ("B=4,S=1024,D=64,varlen=1", AttentionDomain(64, "full", "prompt", False, True)),
        ("S=1024,D=64,alibi=1", None),
        ("S=1024,D=64,bias=1", AttentionDomain(64, "full", "prompt", operand="additive")),
        (
            "B=2,SQ=1,SKV=1024,D=64,mask=b",
            AttentionDomain(64, "full", "one", operand="bool"),
        ),
        (
            "S=1024,D=64,causal=1,page_size=16",
            AttentionDomain(64, "causal", "prompt", is_paged=True),
        ),
        ("S=1024,D=64,dtype=e4m3", None),
    ],
)
def test_the_domain_is_what_is_compiled_in_and_the_phase(
    text: str, domain: AttentionDomain | None
) -> None:
    assert Domain.of(attention(text)) == domain


def candidate(config: Config, terms: tuple[str, ...], **rates: float) -> Candidate:
    spread = Spread(((1000, 10**7), (64, 10**5)))
    named = {term.replace(" ", "_"): term for term in terms}
    return Candidate(config, {named[k]: v for k, v in rates.items()}, 20, 0.02, 0.05, spread)


def made(own_us: float, vendor_us: float, margin: float) -> Portfolio:
    own = candidate(fitting.kernel_of(WIDE), FUSED.work_terms, launch=own_us)
    vendor = candidate(CUDNN, VENDOR.work_terms, launch=vendor_us)
    domain = AttentionDomain(64, "full", "prompt")
    models = DomainModels(domain, WARM, [own, vendor], margin, REGRET)
    return Portfolio("attention", DEFAULT_GPU, {domain: models}, {"days": ["2026-11-23"] * 2})


class TestSelect:
    @pytest.mark.parametrize(
        ("own_us", "margin", "family"),
        [
            (9.0, 1.0, "fused_attention"),
            (9.6, 1.0, "vendor_sdpa"),
            (9.6, 0.5, "fused_attention"),
            (9.6, 0.0, "fused_attention"),
            (10.5, 0.0, "vendor_sdpa"),
        ],
    )
    def test_an_own_kernel_is_chosen_where_it_is_faster_even_if_its_model_errs(
        self, own_us: float, margin: float, family: str
    ) -> None:
        """Nine of ten of its times are within 5 % of what was expected."""
        found = made(own_us, 10.0, margin).select(attention("S=1999,D=64"))
        assert found is not None and found.config.family == family
        assert (found.vendor, found.vendor_us) == ("cudnn", 10.0)
        assert found.expected_us == pytest.approx(min(own_us, 10.0), abs=0.7)
        assert "cudnn 10.0" in found.source

    def test_another_domain_is_not_answered(self) -> None:
        assert made(9.0, 10.0, 0.0).select(attention("S=1999,D=64,causal=1")) is None
        assert made(9.0, 10.0, 0.0).select(attention("S=1999,D=64,alibi=1")) is None

    def test_an_illegal_kernel_is_passed_over(self) -> None:
        packed = maker()(1, 64, packed_heads=4)
        own = candidate(packed, FUSED.work_terms, launch=1.0)
        domain = AttentionDomain(64, "full", "prompt")
        vendor = candidate(CUDNN, VENDOR.work_terms, launch=10.0)
        models = DomainModels(domain, WARM, [own, vendor], 0.0, REGRET)
        one = Portfolio("attention", DEFAULT_GPU, {domain: models})
        found = one.select(attention("S=1999,D=64,H=16"))
        assert found is not None and found.config == CUDNN

    def test_sizes_far_from_what_was_measured_are_said(self) -> None:
        known = made(9.0, 10.0, 0.0)
        near, far = known.select(attention("S=1999,D=64")), known.select(attention("S=8,D=64,H=1"))
        assert near is not None and not near.doubts
        assert far is not None and far.doubts


class TestKin:
    """Domains that PyTorch's operator lacks, and that were not measured."""

    @pytest.mark.parametrize(
        "extra", ["softcap=30", "causal=1,window=128", "left=64,right=3", "B=4,varlen=1"]
    )
    def test_the_rates_of_the_plain_domain_serve(self, extra: str) -> None:
        known = made(9.0, 5.0, 0.0)
        found = known.select(attention(f"S=1999,D=64,{extra}"))
        assert found is not None and found.config.family == "fused_attention"
        assert (found.vendor, found.vendor_us) == ("", math.inf), "PyTorch has no such operator"
        assert found.doubts[0] == "the rates are those of D=64, full, prompts"

    def test_what_pytorch_has_is_not_answered_so(self) -> None:
        assert made(9.0, 5.0, 0.0).models_of(AttentionDomain(64, "causal", "prompt")) is None
        assert made(9.0, 5.0, 0.0).models_of(AttentionDomain(128, "full", "prompt")) is None

    def test_packed_sequences_have_no_staged_output(self) -> None:
        own = candidate(maker()(2, 128, stages_output=True), FUSED.work_terms, launch=9.0)
        domain = AttentionDomain(64, "full", "prompt")
        models = DomainModels(domain, WARM, [own], 0.0, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, {domain: models})
        found = known.select(attention("B=4,S=1999,D=64,varlen=1"))
        assert found is not None and "stages_output" not in found.config.params

    def test_legality_is_found_out_anew(self) -> None:
        """A config of the plain domain may spill under a window."""
        known = made(9.0, 5.0, 0.0)
        assert known.select(attention("S=1999,D=64")) is not None
        kin = known.models_of(AttentionDomain(64, "full", "prompt", has_softcap=True))
        assert kin is not None and not kin._legal
        assert known.domains[AttentionDomain(64, "full", "prompt")]._legal
        assert replace(known, domains={})._found == {}

    @pytest.mark.parametrize(("text", "width"), [("bias=h", 128), ("mask=1", 144)])
    def test_a_mask_as_an_operand_is_served_at_every_phase(self, text: str, width: int) -> None:
        own = candidate(maker()(2, 160), FUSED.work_terms, launch=9.0)
        domain = AttentionDomain(128, "full", "prompt")
        models = DomainModels(domain, WARM, [own], 0.5, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, {domain: models})
        for shape in ("S=1999", "SQ=5,SKV=1999", "SQ=1,SKV=1999", "SQ=1,SKV=1999,H=16,HKV=4"):
            found = known.select(attention(f"{shape},D=128,{text}"))
            assert found is not None and found.config["tile_n"] == width, "160 leaves no registers"
            assert found.vendor == ""
        assert known.select(attention("SQ=5,SKV=1999,D=128")) is None
        operands = [domain.operand for domain, _ in known.served() if domain.operand]
        assert sorted(operands) == ["additive"] * 3 + ["bool"] * 3
        for domain, _ in known.served():
            for problem in domain.problems("float16"):
                assert Domain.of(problem) is not None
                assert Domain.of(problem)._replace(phase=domain.phase) == domain  # type: ignore[union-attr]

    def test_packed_heads_and_splits_are_each_lent(self) -> None:
        made = [
            candidate(config, FUSED.work_terms, launch=9.0)
            for config in (
                maker()(1, 64, packed_heads=4),
                maker()(1, 64, packed_heads=4, splits=2, combine="kernel"),
                maker()(1, 80, packed_heads=4),
            )
        ]
        domain = AttentionDomain(64, "full", "one")
        models = DomainModels(domain, WARM, made, 0.5, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, {domain: models})
        kin = known.models_of(domain._replace(operand="bool"))
        assert kin is not None and kin.margin == 0
        kinds = [
            (c.config.get("packed_heads", 1), "combine" in c.config.params) for c in kin.candidates
        ]
        assert kinds == [(4, False), (4, True), (1, False), (1, True)]
        capped = known.models_of(domain._replace(has_softcap=True))
        assert capped is not None and len(capped.candidates) == 1

    def test_each_is_served_once(self) -> None:
        known = made(9.0, 5.0, 0.0)
        domains = [domain for domain, _ in known.served()]
        assert len(domains) == len(set(domains)) > 1
        assert {domain.head_dim for domain in domains} == {64}


class TestPaged:
    """Paged caches, by what ships."""

    SHIPPED = next(one for one in portfolio.shipped() if one.op == "attention")

    def config(self, text: str) -> Config:
        found = self.SHIPPED.select(AttentionProblem.parse(text))
        assert found is not None and found.vendor == "", "PyTorch has no such operator"
        assert found.doubts[0].startswith("the rates are those of D=")
        return found.config

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    @pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
    @pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 256])
    def test_every_page_head_dimension_and_type_is_served(
        self, page_size: int, head_dim: int, dtype: str
    ) -> None:
        tail = f"D={head_dim},page_size={page_size},dtype={dtype}"
        for heads in ("H=32,HKV=8", "H=28,HKV=4", "H=71,HKV=1", "H=12"):
            for sizes in ("SQ=1", "SQ=5,causal=1", "SQ=700,causal=1"):
                for batch in (1, 9, 256):
                    self.config(f"B={batch},{sizes},SKV=3000,{heads},{tail}")

    def test_splits_fill_the_chip_and_no_more(self) -> None:
        for batch, keys in ((1, 1024), (1, 16384), (4, 4096)):
            config = self.config(f"B={batch},SQ=1,SKV={keys},H=32,HKV=8,D=128,page_size=16")
            assert config["packed_heads"] == 4 and config["splits"] > 1
            assert config["splits"] * 8 * batch <= 2 * DEFAULT_GPU.sm_count
        for batch in (64, 128):
            config = self.config(f"B={batch},SQ=1,SKV=4096,H=32,HKV=8,D=128,page_size=16")
            assert config["splits"] == 1

    def test_wide_boxes_where_pages_have_them(self) -> None:
        for page_size, rows in ((16, 16), (48, 16), (64, 64), (128, 64)):
            text = f"B=8,SQ=1,SKV=4096,H=32,HKV=8,D=128,page_size={page_size}"
            assert self.config(text)["box_rows"] == rows

    def test_batches_with_a_chunk_share_the_keys_of_a_head(self) -> None:
        config = self.config("B=64,SQ=2048,SKV=8192,H=32,HKV=8,D=128,causal=1,page_size=16")
        assert (config["packed_heads"], config["warp_groups"]) == (4, 2)

    def test_windows_and_sinks_of_public_models(self) -> None:
        tail = "page_size=16,dtype=bf16"
        for text in (
            f"B=9,SQ=1,SKV=4096,left=127,H=64,HKV=8,D=64,sinks=1,{tail}",
            f"B=9,SQ=1,SKV=4096,H=64,HKV=8,D=64,sinks=1,{tail}",
            f"B=9,SQ=400,SKV=4096,causal=1,window=127,H=64,HKV=8,D=64,sinks=1,{tail}",
            f"B=9,SQ=400,SKV=4096,causal=1,window=1023,H=32,HKV=16,D=128,{tail}",
            f"B=9,SQ=1,SKV=4096,left=1023,H=8,HKV=4,D=256,{tail}",
        ):
            self.config(text)

    @pytest.mark.parametrize(
        "text", ["D=128", "D=128,causal=1,softcap=30", "D=64,causal=1,window=9"]
    )
    def test_for_others_no_kernel_is_made(self, text: str) -> None:
        """Full masks of several queries, soft caps, and windows at D=64 without sinks."""
        problem = AttentionProblem.parse(f"SQ=200,SKV=4096,H=8,page_size=16,{text}")
        assert self.SHIPPED.select(problem) is None

    def test_few_kernels_serve_a_head_dimension(self) -> None:
        plain: dict[int, int] = {}
        others: dict[int, int] = {}
        for target in targets(self.SHIPPED):
            problem = target.problem
            if problem.is_paged:
                is_plain = not (problem.is_windowed or problem.has_sinks)
                counts = plain if is_plain else others
                counts[problem.head_dim] = counts.get(problem.head_dim, 0) + 1
        assert plain == dict.fromkeys((64, 96, 128, 192, 256), 14)
        assert others == {64: 8, 128: 4, 256: 4}

    def test_lengths_that_differ_have_the_kernels_of_those_that_are_alike(self) -> None:
        text = "B=4,SQ=1,SKV=512,H=8,D=64,page_size=16"
        alike, unlike = (AttentionProblem.parse(each) for each in (text, f"{text},varlen=1"))
        assert Domain.of(alike) == Domain.of(unlike)
        config = self.config(text)
        assert FUSED.kernels(alike, config) == FUSED.kernels(unlike, config)

    def test_keys_before_a_chunk_are_work(self) -> None:
        """Masks are bottom-right: a chunk behind 7680 keys sees nearly all of 8192."""
        chunk, whole = (
            sum(FUSED.work(AttentionProblem.parse(text), maker()(2, 128), DEFAULT_GPU)[4:5])
            for text in (
                "SQ=512,SKV=8192,D=128,causal=1,page_size=16", "SQ=512,SKV=8192,D=128",
            )
        )  # fmt: skip
        assert 0.95 * whole < chunk < whole


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
        assert again.select(problem) == known.select(problem)

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
        data["domains"][0]["candidates"][0]["rates"]["launch"] = rate
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
def known() -> Portfolio:
    """Made from the planted times."""
    return fitting.make("attention", {WARM: planted(0)}, DEFAULT_GPU)


GEMV = Config(
    "gemv",
    {
        **{"warps": 8, "k_warps": 8, "row_tiles": 2, "pieces": 4, "stages": 4},
        **{"blocks_per_sm": 1, "persistent": True, "pdl": True, "lead": 1024},
    },
)
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
        assert one is not None and one.config == GEMV and one.vendor == "cublas"
        assert four is not None and four.config == CUBLAS

    def test_a_bias_has_the_plain_product_s_kernels(self, few_rows: Portfolio) -> None:
        found = few_rows.select(GemmProblem(1, 4224, 2176, epilogue="bias"))
        assert found is not None and found.config == GEMV
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
        assert near is not None and near.config == GEMV and not near.doubts
        assert far is not None and far.config == CUBLAS and far.doubts
        assert next(far.ranked())[1] == GEMV, "it may be timed in place"

    def test_a_width_without_alignment_is_pytorch_s(self, few_rows: Portfolio) -> None:
        found = few_rows.select(GemmProblem(1, 4224, 2177))
        assert found is not None and found.config == CUBLAS


class TestMake:
    def test_times_are_expected_as_planted(self, known: Portfolio) -> None:
        (models,) = known.domains.values()
        assert models.domain == AttentionDomain(64, "full", "prompt")
        for one in models.candidates:
            assert one.median_error < 0.03
        for m in planted(1):
            of = next(c for c in models.candidates if c.config == fitting.kernel_of(m.config))
            assert of.family is not None
            amounts = of.family.work(m.problem, m.config, DEFAULT_GPU)
            expected = sum(map(mul, of.priced, amounts))
            assert expected == pytest.approx(m.latency_us, rel=0.1)

    def test_the_kernel_of_least_time_is_selected(self, known: Portfolio) -> None:
        """The narrow tile has the smaller launch, the wide one the smaller rate."""
        small, large = (known.select(attention(f"H=16,S={s},D=64")) for s in (128, 8192))
        assert small is not None and fitting.kernel_of(small.config) == fitting.kernel_of(NARROW)
        assert large is not None and fitting.kernel_of(large.config) == fitting.kernel_of(WIDE)

    def test_the_regret_is_of_models_left_out(self, known: Portfolio) -> None:
        (models,) = known.domains.values()
        assert models.regret.problems == 60
        assert 0 <= models.regret.mean < 0.02
        assert models.regret.over_vendor > 1.2

    def test_one_model_s_problems_are_too_few(self) -> None:
        alone = [m for m in planted(0) if m.problem.heads_q == 16]  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="no domain has a kernel with 6 measurements"):
            fitting.make("attention", {WARM: alone}, DEFAULT_GPU)

    def test_failed_and_modified_ones_are_left_out(self) -> None:
        failed = [m.but(status=Status.WRONG_RESULT, latency_us=None) for m in planted(0)]
        assert fitting.points(failed, DEFAULT_GPU) == []
        sloped = Measurement(
            attention("S=1024,D=64,alibi=1"), CUDNN, DEFAULT_GPU, WARM, Status.OK, latency_us=9.0
        )
        assert fitting.points([sloped], DEFAULT_GPU) == []

    def test_a_quick_time_comes_before_a_final_one(self) -> None:
        one = planted(0)[0]
        both = [one, one.but(latency_us=99.0, is_final=True)]
        assert [p.us for p in fitting.points(both, DEFAULT_GPU)] == [one.latency_us]

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
            kept[combine] = len(fitting.points([m], DEFAULT_GPU))
        assert kept == {"cluster": 0, "kernel": 1}

    def test_few_measurements_are_drawn_to_the_domain_s_rates(self) -> None:
        found = fitting.points(planted(0), DEFAULT_GPU)
        wide = [point for point in found if point.config == WIDE]
        prior = fitting.fitted(wide, DEFAULT_GPU)
        alone = fitting.fitted(wide[:1], DEFAULT_GPU)
        drawn = fitting.fitted(wide[:1], DEFAULT_GPU, prior)

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
    assert portfolio.preferred(expected) == kernel


def test_another_of_pytorch_s_kernels_has_to_be_measured_near() -> None:
    expected = {"cudnn": 833.0, "flash2": 281.0}
    assert portfolio.preferred(expected, {"flash2"}) == "flash2"
    assert portfolio.preferred(expected, set()) == "cudnn"


@pytest.fixture
def ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Portfolio]:
    folder = tmp_path / "portfolio"
    folder.mkdir()
    known = made(9.0, 10.0, 0.0)
    known.write(folder / "a.json")
    monkeypatch.setattr(portfolio, "_folder", lambda: folder)
    portfolio.shipped.cache_clear()
    close()
    yield known
    portfolio.shipped.cache_clear()


UNTUNED = attention("S=1999,D=64,H=1")


class TestLookup:
    def test_an_untuned_shape_is_predicted(self, ships: Portfolio, tmp_path: Path) -> None:
        answer = lookup(UNTUNED, gpu="H200", path=tmp_path / "none")
        assert answer is not None and answer.selected is not None
        assert (answer.kind, answer.exact) == ("portfolio", False)
        assert answer.entry.provenance is Provenance.PREDICTED
        assert answer.entry.winner.latency_us is None
        assert answer.entry.winner.config.family == "fused_attention"
        assert answer.selected.regret == REGRET

    def test_who_launches_is_not_told(self, ships: Portfolio, tmp_path: Path) -> None:
        assert lookup(UNTUNED, gpu="H200", path=tmp_path / "none", with_portfolio=False) is None

    def test_another_gpu_only_where_it_is_allowed(self, ships: Portfolio, tmp_path: Path) -> None:
        path = tmp_path / "none"
        assert lookup(UNTUNED, gpu="H100", path=path) is None
        answer = lookup(UNTUNED, gpu="H100", path=path, allow_other_gpu=True)
        assert answer is not None and answer.entry.gpu == GPUS["H100"]
        assert any("made on NVIDIA H200, not on" in note for note in answer.notes)

    def test_the_command_says_it(
        self, ships: Portfolio, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["lookup", "--shape", "S=1999,D=64,H=1", "--gpu", "H200"]) == 0
        out = capsys.readouterr().out
        assert "answer       portfolio" in out
        assert "expected     D=64, full, prompts: expected 9.0 us, cudnn 10.0" in out
        assert "regret       left out: mean 1.0 %" in out
        assert main(["lookup", "--shape", "S=1999,D=64,H=1", "--gpu", "H200", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["kind"], answer["provenance"]) == ("portfolio", "predicted")
        assert answer["selection"]["vendor_expected_us"] == 10.0


def test_what_ships_is_legal_and_judged_on_enough() -> None:
    """Every candidate is this version's, and every domain was judged at problems left out."""
    assert [ships.op for ships in portfolio.shipped()] == ["attention", "gemm", "swiglu"]
    assert all(ships.gpu == DEFAULT_GPU for ships in portfolio.shipped())
    for models in (models for ships in portfolio.shipped() for models in ships.domains.values()):
        own = [one for one in models.candidates if not one.is_vendor]
        assert own and len(own) < len(models.candidates)
        assert models.regret.problems >= fitting.MIN_POINTS
        for one in own:
            assert one.points >= fitting.MIN_POINTS
            assert one.median_error <= fitting.MAX_MEDIAN_ERROR
            assert one.family is not None
            problem = models.domain.problem_for(one.config)
            called = one.family.called(problem, one.config, 1)
            assert not one.family.malformed(called)


def test_the_readme_s_table_is_what_ships() -> None:
    text = (resources.cache() / "README.md").read_text()
    for models in (models for ships in portfolio.shipped() for models in ships.domains.values()):
        own, regret = sum(not one.is_vendor for one in models.candidates), models.regret
        row = (
            f"| {models.domain.label()} | {models.regime} | {own} | {regret.problems} | "
            f"{100 * regret.mean:.1f} % | {100 * regret.worst:.1f} % | {regret.over_vendor:.2f} | "
            f"{regret.least_over_vendor:.2f} |"
        )
        assert row in text
