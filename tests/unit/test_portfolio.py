"""Portfolios: work terms, time models fitted to measurements, and what is selected by them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fused_configs import maker
from portfolio_cases import (
    CUDNN,
    FUSED,
    REGRET,
    VENDOR,
    WARM,
    WIDE,
    amounts,
    attention,
    candidate,
    known_fixture,
    made,
    ships_fixture,
)

from tuner.cli import main
from tuner.config import Config
from tuner.families.attention_work import AttentionTiling
from tuner.families.by_operation import AttentionDomain, domain_of
from tuner.families.fused_attention.packing import tile_m
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem
from tuner.search import timed
from tuner.selection import portfolio
from tuner.selection.candidates import DomainModels
from tuner.selection.kernels import targets
from tuner.selection.portfolio import Portfolio
from tuner.selection.reader import lookup

known = known_fixture
ships = ships_fixture


class TestWork:
    def test_full_attention(self) -> None:
        """16 heads of 1024 queries are 128 blocks of 128 rows; 1024 keys are 8 steps of 128."""
        found = amounts("S=1024,D=64,H=16", AttentionTiling(128, 128))
        assert (found["rounds"], found["round_steps"], found["longest_steps"]) == (1, 8, 8)
        assert found["blocks"] == pytest.approx(128 / 132)
        assert found["mean_steps"] == pytest.approx(8 * 128 / 132)
        assert found["memory"] == pytest.approx(4 * 16 * 1024 * 64 * 2 / 1e6)
        assert (found["partials"], found["splits"]) == (0, 0)

    def test_a_causal_mask_halves_the_mean_and_leaves_the_longest(self) -> None:
        full, causal = (
            amounts(f"S=4096,D=64{mask}", AttentionTiling(128, 128)) for mask in ("", ",causal=1")
        )
        assert causal["longest_steps"] == full["longest_steps"] == 32
        assert causal["mean_steps"] == pytest.approx(full["mean_steps"] * 33 / 64, rel=0.05)

    def test_the_longest_tile_binds_few_heads(self) -> None:
        tiling = AttentionTiling(64, 64, resident=2)
        few = amounts("S=2048,D=128,H=2,causal=1", tiling)
        assert few["critical_steps"] == 2 * few["longest_steps"] == 64 > few["mean_steps"]
        many = amounts("B=8,S=2048,D=128,H=32,causal=1", tiling)
        assert many["critical_steps"] == many["mean_steps"] > 2 * many["longest_steps"]
        assert amounts("S=2048,D=128,H=2", tiling)["critical_steps"] == 0

    def test_a_window_bounds_the_steps(self) -> None:
        found = amounts("S=8192,D=64,causal=1,window=256", AttentionTiling(128, 128))
        assert found["longest_steps"] <= 4

    def test_packed_heads_share_rows(self) -> None:
        shape = "SQ=1,SKV=4096,D=128,H=32,HKV=8"
        alone, packed = (amounts(shape, AttentionTiling(64, 128, packed=n)) for n in (1, 4))
        assert packed["blocks"] == pytest.approx(alone["blocks"] / 4)

    @pytest.mark.parametrize("group", [2, 3, 7, 8])
    def test_padded_heads_have_a_tile_for_each_kv_head(self, group: int) -> None:
        shape = f"SQ=9,SKV=4096,D=128,H={4 * group},HKV=4"
        padded = amounts(shape, AttentionTiling(64, 128, packed=8, pads_heads=True))
        assert padded["blocks"] == pytest.approx(2 * 4 / DEFAULT_GPU.sm_count)

    def test_splits_share_steps_and_are_combined(self) -> None:
        shape = "SQ=1,SKV=4096,D=128,H=32,HKV=8"
        one, eight = (amounts(shape, AttentionTiling(64, 128, packed=4, splits=n)) for n in (1, 8))
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
    @pytest.mark.parametrize(
        ("heads", "counts"),
        [("H=28,HKV=4", True), ("H=6,HKV=2", True), ("H=18,HKV=2", False), ("H=4", False)],
    )
    def test_a_kernel_that_pads_takes_groups_up_to_its_pack(self, heads: str, counts: bool) -> None:
        config = maker()(1, 64, packed_heads=8, pads_heads=True)
        problem = attention(f"{heads},SQ=1,SKV=4096,D=128")
        assert bool(FUSED.splits(problem, config, DEFAULT_GPU)) == counts
        found = FUSED.carried(replace(problem, seqlen_q=64), config)
        assert ("pads_heads" in found.params) == counts

    @pytest.mark.parametrize(
        ("heads", "blocks", "most"), [(7, 1, 16), (8, 1, 8), (14, 2, 16), (16, 2, 8), (4, 2, 16)]
    )
    def test_large_clusters_fit_the_chip_at_once(self, heads: int, blocks: int, most: int) -> None:
        """At most seven of more than eight blocks, for each block of a multiprocessor."""
        config = timed.kernel_of(maker()(1, 64, splits=2, combine="cluster"))
        config = Config(config.family, {**config.params, "blocks_per_sm": blocks})
        problem = attention(f"H={heads},SQ=1,SKV=65536,D=128")
        assert max(FUSED.splits(problem, config, DEFAULT_GPU)) == most
        other = Config(config.family, {**config.params, "combine": "kernel"})
        assert max(FUSED.splits(problem, other, DEFAULT_GPU)) > 8

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
        ("S=1024,D=64,dtype=e4m3", None),
        ("S=1024,D=64,bias=1", AttentionDomain(64, "full", "prompt", operand="additive")),
        (
            "B=2,SQ=1,SKV=1024,D=64,mask=b",
            AttentionDomain(64, "full", "one", operand="bool"),
        ),
        (
            "S=1024,D=64,causal=1,page_size=16",
            AttentionDomain(64, "causal", "prompt", is_paged=True),
        ),
        (
            "B=2,S=1024,D=72,softcap=3,block_mask=bh",
            AttentionDomain(96, "full", "prompt", True, is_sparse=True),
        ),
        ("SQ=127,SKV=1024,D=64,block_mask=1", None),
        ("H=16,S=1024,D=72,block_mask=1", None),
        ("H=17,S=1024,D=96,block_mask=1", AttentionDomain(96, "full", "prompt", is_sparse=True)),
        ("S=1024,D=64,dtype=e4m3", None),
    ],
)
def test_the_domain_is_what_is_compiled_in_and_the_phase(
    text: str, domain: AttentionDomain | None
) -> None:
    assert domain_of(attention(text)) == domain


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
        assert made(9.0, 10.0, 0.0).select(attention("S=1999,D=64,dtype=e4m3")) is None

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
        near, far = known.select(attention("S=1999,D=64")), known.select(attention("S=25,D=64,H=1"))
        assert near is not None and not near.doubts
        assert far is not None and far.doubts


class TestPaged:
    """Paged caches, by what ships."""

    SHIPPED = next(one for one in portfolio.shipped() if one.op == "attention")

    def config(self, text: str) -> Config:
        found = self.SHIPPED.select(AttentionProblem.parse(text))
        assert found is not None and found.vendor == "", "PyTorch has no such operator"
        assert found.doubts[0].startswith("the rates are those of D=")
        return found.config

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    @pytest.mark.parametrize("head_dim", [64, 80, 112, 128, 192, 256])
    @pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 256])
    def test_every_page_head_dimension_and_type_is_served(
        self, page_size: int, head_dim: int, dtype: str
    ) -> None:
        tail = f"D={head_dim},page_size={page_size},dtype={dtype}"
        for heads in ("H=32,HKV=8", "H=28,HKV=4", "H=71,HKV=1", "H=12"):
            for sizes in ("SQ=1", "SQ=5,causal=1", "SQ=700,causal=1"):
                for batch in (1, 9, 256):
                    self.config(f"B={batch},{sizes},SKV=3000,{heads},{tail}")

    @pytest.mark.parametrize("first", [112, 128])
    def test_whole_rows_serve_the_head_dimension_that_has_them(self, first: int) -> None:
        """Whatever was asked before: D = 112 and 128 share a domain."""
        shipped = next(one for one in portfolio.shipped.__wrapped__() if one.op == "attention")
        for head_dim in (first, 240 - first):
            for sizes in ("SQ=1", "SQ=5,causal=1", "SQ=700,causal=1"):
                text = f"{sizes},SKV=3000,H=32,HKV=8,D={head_dim},page_size=16"
                found = shipped.select(AttentionProblem.parse(text))
                assert found.config.get("whole_rows", False) == (head_dim == 128), text

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

    def test_chunks_with_sinks_have_several_groups(self) -> None:
        """The dense kernel of one group, whose rates it has, is faster than it is over pages."""
        for more, groups in (("", 3), (",left=127", 2)):
            text = "SQ=2048,SKV=8192,H=64,HKV=8,D=64,causal=1,sinks=1,page_size=16,dtype=bf16"
            assert self.config(text + more)["warp_groups"] == groups

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
        assert plain == {
            64: 69,
            96: 43,
            128: 75,
            192: 37,
            256: 47,
        }  # e4m3, wide copies, whole rows, fixed, equal and counted parts
        assert others == {64: 28, 96: 8, 128: 14, 192: 8, 256: 14}

    @pytest.mark.parametrize(
        ("sizes", "head_dims", "groups"),
        [
            ("SQ=1", (64, 80, 128, 192, 256), range(1, 33)),
            ("SQ=1,varlen=1", (64, 80, 128, 192, 256), range(1, 33)),
            ("SQ=5,causal=1", (64, 80, 128, 192, 256), (*range(1, 17), 24, 32)),
            ("SQ=8,causal=1", (64, 128), range(1, 33)),
            ("SQ=1,left=127", (64, 80, 128, 192, 256), range(1, 33)),
            ("SQ=1,sinks=1", (64, 80, 128, 192, 256), range(1, 33)),
            ("SQ=1,dtype=e4m3", (64, 80, 128, 192, 256), range(1, 9)),
            ("SQ=3,causal=1,dtype=e4m3", (64, 128), range(1, 9)),
        ],
    )
    def test_decoding_reads_each_key_once(
        self, sizes: str, head_dims: Sequence[int], groups: Sequence[int]
    ) -> None:
        """Each number of query heads to a KV head has a kernel that holds them in one tile."""
        for head_dim, group in itertools.product(head_dims, groups):
            heads = f"H={2 * group},HKV=2"
            text = f"B=64,{sizes},SKV=4000,{heads},D={head_dim},page_size=16"
            config, queries = self.config(text), AttentionProblem.parse(text).seqlen_q
            packed = config.get("packed_heads", 1)
            assert packed >= group, (head_dim, group, config)
            if group <= 16:
                rows = group if config.get("fills_rows") else packed
                assert queries * rows <= tile_m(config.params), "one tile"

    @pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
    def test_decoding_of_several_queries_splits_keys(self, head_dim: int) -> None:
        """Kernels of chunks do not, and took three times the time."""
        for queries, heads in itertools.product((2, 5, 8), ("H=2", "H=32,HKV=8", "H=22,HKV=2")):
            text = f"SQ={queries},causal=1,SKV=3600,{heads},D={head_dim},page_size=16"
            assert not self.config(text)["persistent"], text

    def test_lengths_that_differ_have_the_kernels_of_those_that_are_alike(self) -> None:
        text = "B=4,SQ=1,SKV=512,H=8,D=64,page_size=16"
        alike, unlike = (AttentionProblem.parse(each) for each in (text, f"{text},varlen=1"))
        assert domain_of(alike) == domain_of(unlike)
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
        """A part without a description has no known datasheet."""
        path, part = tmp_path / "none", Gpu("NVIDIA H100 of nobody", "9.0", 132, 0, 0.0, 0)
        assert lookup(UNTUNED, gpu=part, path=path) is None
        answer = lookup(UNTUNED, gpu=part, path=path, allow_other_gpu=True)
        assert answer is not None and answer.entry.gpu == part
        assert any("made on NVIDIA H200, not on" in note for note in answer.notes)

    def test_the_command_says_it(
        self, ships: Portfolio, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["lookup", "--shape", "S=1999,D=64,H=1", "--gpu", "H200"]) == 0
        out = capsys.readouterr().out
        assert "answer       portfolio" in out
        assert "expected     9.0 us, cudnn 10.0" in out
        assert "regret       mean 1.0 %" in out
        assert out.count("9.0 us") == 1
        assert main(["lookup", "--shape", "S=1999,D=64,H=1", "--gpu", "H200", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["kind"], answer["provenance"]) == ("portfolio", "predicted")
        assert answer["selection"]["vendor_expected_us"] == 10.0


class TestBlockMasks:
    """Kernels of block-sparse masks, with the rates of dense ones."""

    SHIPPED = next(one for one in portfolio.shipped() if one.op == "attention")

    @pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
    @pytest.mark.parametrize("axes", ["1", "b", "h", "bh"])
    @pytest.mark.parametrize("heads", ["H=12", "H=32,HKV=8", "H=71,HKV=1"])
    def test_one_kernel_takes_all_heads_and_axes(
        self, head_dim: int, axes: str, heads: str
    ) -> None:
        text = f"B=9,SQ=600,SKV=1000,{heads},D={head_dim},dtype=bf16,block_mask={axes}"
        problem = attention(text)
        found = self.SHIPPED.select(problem)
        assert found is not None and found.vendor == ""
        ((_, config),) = found.own()
        assert FUSED.accepts(problem, config, DEFAULT_GPU)
        assert config["persistent"] and config.get("packed_heads", 1) == 1

    def test_the_time_is_said_to_be_a_dense_mask_s(self) -> None:
        found = self.SHIPPED.select(attention("S=4096,D=64,block_mask=1"))
        dense = self.SHIPPED.select(attention("S=4096,D=64"))
        assert found is not None and dense is not None
        assert found.expected_us == pytest.approx(dense.expected_us, rel=0.2)
        assert found.domain.label() == "D=64, block mask, prompts"
        assert found.doubts[0] == "the rates are those of D=64, full, prompts"
        assert "a mask that hides nothing" in found.doubts[1]
        assert not any("hides nothing" in doubt for doubt in dense.doubts)

    def test_few_queries_and_some_soft_caps_have_no_kernel(self) -> None:
        for text in ("SQ=127,SKV=4096,D=64", "S=4096,D=96,softcap=30", "S=999,D=192"):
            assert self.SHIPPED.select(attention(f"{text},block_mask=1")) is None
        for head_dim in (64, 128, 256):
            text = f"S=4096,D={head_dim},softcap=30,block_mask=1"
            assert self.SHIPPED.select(attention(text)) is not None

    def test_a_kernel_serves_a_head_dimension_and_type(self) -> None:
        counts: dict[tuple[int, bool], int] = {}
        for target in targets(self.SHIPPED):
            if target.problem.block_mask:
                kind = target.problem.head_dim, target.problem.softcap > 0
                counts[kind] = counts.get(kind, 0) + 1
                assert "block mask" in target.label()
                assert domain_of(target.problem) in AttentionDomain.other_recipients()
        plain = {(head_dim, False): 2 for head_dim in (64, 96, 128, 256)}
        assert counts == {**plain, (64, True): 2, (128, True): 2, (256, True): 2}
