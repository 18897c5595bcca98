"""Domains without measurements take kernels and rates from donors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fused_configs import maker
from portfolio_cases import (
    FUSED,
    REGRET,
    WARM,
    attention,
    candidate,
    made,
)

from tuner.families.by_operation import AttentionDomain, Mask, Phase, domain_of
from tuner.families.fused_attention.prompts import SEARCH_US, SEARCHING, WINDOWED
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Regime
from tuner.search import timed
from tuner.selection import portfolio
from tuner.selection.candidates import DomainModels
from tuner.selection.kernels import targets
from tuner.selection.portfolio import Portfolio
from tuner.selection.transfer import MASK_US


class TestDonors:
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

    @pytest.mark.parametrize("mask", ["full", "windowed"])
    def test_a_soft_cap_takes_a_kernel_of_another_phase(self, mask: Mask) -> None:
        ships = next(one for one in portfolio.shipped() if one.op == "attention")
        domain = AttentionDomain(256, mask, "one", has_softcap=True)
        others = {
            one: models
            for one, models in ships.domains.items()
            if not one.has_softcap and (one.head_dim != 256 or one.phase == "prompt")
        }
        known = replace(ships, domains=others)
        assert domain._replace(mask="full", has_softcap=False) not in known.domains
        models = known.models_of(domain)
        assert models is not None and models.donor is not None
        assert (models.donor.head_dim, models.donor.phase) == (256, "prompt")
        assert not models.vendors, "PyTorch has no operator for it"
        assert known.models_of(AttentionDomain(256, "full", "one")) is None

    @pytest.mark.parametrize(("head_dim", "is_taken"), [(64, True), (96, False), (128, True)])
    def test_kernels_that_pad_heads_serve_masks_where_they_were_proven(
        self, head_dim: int, is_taken: bool
    ) -> None:
        configs = maker()(1, 64), maker()(1, 64, packed_heads=8, pads_heads=True)
        own = [candidate(config, FUSED.work_terms, launch=9.0) for config in configs]
        domain = AttentionDomain(head_dim, "full", "few")
        models = DomainModels(domain, WARM, own, 0.0, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, {domain: models})
        found = known.models_of(domain._replace(operand="bool"))
        assert any("pads_heads" in one.config.params for one in found.candidates) is is_taken

    def test_legality_is_found_out_anew(self) -> None:
        """A config of the plain domain may spill under a window."""
        known = made(9.0, 5.0, 0.0)
        assert known.select(attention("S=1999,D=64")) is not None
        found = known.models_of(AttentionDomain(64, "full", "prompt", has_softcap=True))
        assert found is not None and not found._times
        plain = known.models_of(AttentionDomain(64, "full", "prompt"))
        assert plain is not None and plain._times
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
        operands = [one.operand for one, _ in known.served() if one.operand and not one.is_composed]
        assert sorted(operands) == ["additive"] * 3 + ["bool"] * 3
        for domain, _ in known.served():
            for problem in domain.problems("float16"):
                assert domain_of(problem) is not None
                assert domain_of(problem)._replace(phase=domain.phase) == domain  # type: ignore[union-attr]

    def test_packed_heads_and_splits_are_each_transferred(self) -> None:
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
        found = known.models_of(domain._replace(operand="bool"))
        assert found is not None and found.margin == 0
        kinds = [
            (c.config.get("packed_heads", 1), "combine" in c.config.params)
            for c in found.candidates
        ]
        assert kinds == [(4, False), (4, True), (1, False), (1, True)]
        capped = known.models_of(domain._replace(has_softcap=True))
        assert capped is not None and len(capped.candidates) == 1

    def test_a_soft_cap_in_decoding_takes_a_kernel_with_its_splits(self) -> None:
        whole = maker()(2, 80)
        ways = [maker()(1, 64, splits=2, combine=way) for way in ("cluster", "kernel")]
        made = [
            candidate(timed.kernel_of(config), FUSED.work_terms, launch=us)
            for us, config in zip((9.0, 8.0, 7.0), (whole, *ways), strict=True)
        ]
        domain = AttentionDomain(128, "full", "one")
        models = DomainModels(domain, WARM, made, 0.5, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, {domain: models})
        for text in ("softcap=30", "softcap=30,mask=bk"):
            problem = attention(f"B=2,H=4,SQ=1,SKV=8192,D=128,{text}")
            found = known.select(problem)
            assert found is not None and not found.vendor
            assert found.config["combine"] == "kernel" and found.config["splits"] > 1
            many = known.select(replace(problem, batch=400))
            assert many is not None and many.config["splits"] == 1
            domain = domain_of(replace(problem, seqlen_q=256))
            kernels = {
                one.config["tile_n"] for one in targets(known) if domain_of(one.problem) == domain
            }
            assert kernels == {64}, "one kernel with all of its ways"

    @pytest.mark.parametrize("phase", ["few", "one"])
    def test_kernels_of_both_phases_serve_under_a_mask_of_booleans(self, phase: Phase) -> None:
        """With the time of the mask in each key step; rows of 16 bytes are read at once."""
        domains = {}
        for at, width in (("few", 64), ("one", 96)):
            own = candidate(timed.kernel_of(maker()(1, width)), FUSED.work_terms, launch=9.0)
            domain = AttentionDomain(128, "full", at)  # type: ignore[arg-type]
            domains[domain] = DomainModels(domain, Regime("stream", "cold"), [own], 0.5, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, domains)
        masked = known.models_of(AttentionDomain(128, "full", phase, operand="bool"))
        assert {one.config["tile_n"] for one in masked.candidates} == {64, 96}
        added = known.models_of(AttentionDomain(128, "full", phase, operand="additive"))
        assert added is not None and len(added.candidates) == 1
        queries = 1 if phase == "one" else 4
        times = {}
        for keys in (6400, 6401):
            found = known.select(attention(f"SQ={queries},SKV={keys},D=128,mask=1"))
            assert found is not None and found.config["tile_n"] == 96
            times[keys] = found.expected_us
        steps = 67  # of 96 keys
        assert times[6400] == pytest.approx(9 + steps * MASK_US["aligned_mask_steps"])
        assert times[6401] == pytest.approx(9 + steps * MASK_US["mask_steps"])

    def test_soft_capped_decoding_packs_heads_at_d_256(self) -> None:
        ships = next(one for one in portfolio.shipped() if one.op == "attention")
        for text, packed in (
            ("B=48,H=8,HKV=4,SQ=1,SKV=448", True),
            ("B=24,H=16,HKV=4,SQ=9,SKV=1280", True),
            ("B=2,H=24,HKV=8,SQ=1,SKV=5440", True),
            ("B=48,H=8,SQ=1,SKV=448", False),
            ("B=48,H=8,SQ=4,SKV=448", False),
        ):
            found = ships.select(attention(f"{text},D=256,softcap=50"))
            assert found is not None and found.config.family == "fused_attention"
            assert (found.config.get("packed_heads", 1) > 1) is packed, text

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
    @pytest.mark.parametrize("softcap", [0, 30])
    def test_short_prompts_have_kernels_that_pack_a_kv_heads_query_heads(
        self, head_dim: int, softcap: int
    ) -> None:
        serving = portfolio.serving(portfolio.shipped(), DEFAULT_GPU)
        ships = next(one for one in serving if one.op == "attention")
        found = ships.select(attention(f"B=60,H=90,HKV=6,S=3,D={head_dim},softcap={softcap}"))
        assert found is not None and (found.domain.phase, found.domain.mask) == ("few", "full")
        if head_dim != 128 or not softcap:
            assert found.config["packed_heads"] in (16, 32) and found.config["pads_heads"]
        for heads, longest in (("H=90,HKV=6", 64), ("H=6", 24)):
            texts = (f"B=60,{heads},S={longest + n},D={head_dim},softcap={softcap}" for n in (0, 1))
            last, longer = (ships.select(attention(text)) for text in texts)
            assert last is not None and last.domain.phase == "few"
            assert longer is not None and longer.domain.phase == "prompt"

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
    @pytest.mark.parametrize(
        "kind", ["causal=1", "varlen=1,layout=bshd", "causal=1,varlen=1,layout=bshd"]
    )
    def test_so_have_causal_and_packed_ones(self, head_dim: int, kind: str) -> None:
        """Beside PyTorch's kernels for the first; PyTorch composes the others."""
        serving = portfolio.serving(portfolio.shipped(), DEFAULT_GPU)
        ships = next(one for one in serving if one.op == "attention")
        text = f"B=60,H=90,HKV=6,D={head_dim},{kind},dtype=bf16"
        found = ships.select(attention(f"S=3,{text}"))
        assert found is not None and found.domain.phase == "few"
        assert found.config["packed_heads"] in (16, 32) and found.config["pads_heads"]
        assert bool(found.vendor) is ("varlen" not in kind)
        last, longer = (ships.select(attention(f"S={n},{text}")) for n in (64, 65))
        assert last is not None and last.domain.phase == "few"
        assert longer is not None and longer.domain.phase == "prompt"

    @pytest.mark.parametrize(
        ("head_dim", "kind"),
        [
            (64, "S=300,varlen=1,layout=bshd"),
            (96, "SQ=8,SKV=900"),
            (96, "S=300,window=9"),
            (192, "S=300,causal=1,softcap=30"),
            (128, "S=30,causal=1,varlen=1,layout=bshd"),
            (192, "S=300,causal=1"),
            (192, "S=20,causal=1"),
            (256, "S=300,softcap=30"),
            (256, "S=300,varlen=1,layout=bshd"),
        ],
    )
    def test_prompts_have_further_kernels_beside_those_of_donors(
        self, head_dim: int, kind: str
    ) -> None:
        """On an H100 too."""
        problem = attention(f"B=8,H=36,HKV=4,D={head_dim},{kind}")
        for gpu in (DEFAULT_GPU, GPUS["H100"]):
            serving = portfolio.serving(portfolio.shipped(), gpu)
            ships = next(one for one in serving if one.op == "attention")
            found = ships.select(problem)
            assert found is not None
            own = [one.config for one in found.times.models.candidates if not one.is_vendor]
            carried = (
                FUSED.carried(found.domain.problem_for(one), one)
                for one in found.domain.further_kernels
            )
            digests = {*map(FUSED.compile_digest, carried)}
            assert digests and digests < {*map(FUSED.compile_digest, own)}

    def test_tall_tiles_of_few_queries_split_the_keys(self) -> None:
        ships = next(one for one in portfolio.shipped() if one.op == "attention")
        found = ships.select(attention("B=3,H=60,HKV=5,SQ=12,SKV=23115,D=88"))
        assert found is not None and found.config["splits"] > 1
        assert found.config["warp_groups"] == 2 and found.config["combine"] == "kernel"

    @pytest.mark.parametrize("mask", ["softcap=30", "mask=1"])
    def test_rare_widths_have_kernels_of_few_queries(self, mask: str) -> None:
        ships = next(one for one in portfolio.shipped() if one.op == "attention")
        served = {domain for domain, _ in ships.served()}
        for queries in (1, 9):
            found = ships.select(attention(f"H=60,HKV=4,SQ={queries},SKV=999,D=160,{mask}"))
            assert found is not None and found.domain in served
            models = found.times.models
            assert models.donor in (None, AttentionDomain(192, "full", found.domain.phase))
            assert any(one.config.get("packed_heads") == 16 for one in models.candidates)

    def test_steps_of_further_kernels_take_as_long_as_their_tiles_are_large(self) -> None:
        own = candidate(maker()(2, 80), FUSED.work_terms, launch=9.0, mean_steps=0.5)
        domain = AttentionDomain(192, "full", "prompt")
        models = DomainModels(domain, WARM, [own], 0.0, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, {domain: models})
        found = known.models_of(domain._replace(is_varlen=True))
        assert found is not None and {one.config["tile_n"] for one in found.candidates} >= {80}
        (tall,) = (one for one in found.candidates if one.config["tile_n"] == 112)
        assert tall.rates["launch"] == 9.0 + SEARCH_US
        assert tall.rates["mean_steps"] == pytest.approx(0.5 * 112 / 80 * SEARCHING)

    def test_a_domain_of_vendors_alone_has_further_kernels(self) -> None:
        """They have the sizes of the kernel whose rates they have."""
        ships = next(one for one in portfolio.shipped() if one.op == "attention")
        few = AttentionDomain(96, "full", "few")
        vendors = [one for one in ships.domains[few].candidates if one.is_vendor]
        alone = replace(ships.domains[few], candidates=vendors)
        found = replace(ships, domains={**ships.domains, few: alone}).models_of(few)
        assert found is None or found.times(DEFAULT_GPU) is not None
        assert vendors

    def test_windows_hide_repeated_reading_from_further_kernels(self) -> None:
        rates = {"launch": 9.0, "mean_steps": 0.5, "repeated": 2.0}
        own = candidate(maker()(1, 48), FUSED.work_terms, **rates)
        domain = AttentionDomain(192, "full", "prompt")
        domains = {
            one: DomainModels(one, WARM, [own], 0.0, REGRET)
            for one in (domain, domain._replace(phase="few"))
        }
        known = Portfolio("attention", DEFAULT_GPU, domains)
        found = known.models_of(domain._replace(mask="windowed"))
        assert found is not None
        (packing,) = (one for one in found.candidates if one.config.get("fills_rows"))
        assert packing.rates["launch"] == 9.0 and "repeated" not in packing.rates
        shares = FUSED.tiling(own.config).resident < FUSED.tiling(packing.config).resident
        assert packing.config["tile_n"] == 48 and shares
        assert packing.rates["mean_steps"] == pytest.approx(0.5 * WINDOWED)

    @pytest.mark.parametrize("phase", ["few", "one"])
    def test_a_mask_beside_the_soft_cap_leaves_its_kernels_at_d_256(self, phase: Phase) -> None:
        """With the rates of the whole kernel where it was measured."""
        ships = next(one for one in portfolio.shipped() if one.op == "attention")
        capped = AttentionDomain(256, "full", "few", has_softcap=True)
        masked = ships.models_of(capped._replace(operand="bool", phase=phase))
        plain = ships.domains[capped]
        assert masked is not None and masked.donor == capped and masked.made_on is None
        packed = {one.config.get("packed_heads", 1) for one in masked.candidates}
        assert packed == {1, 2, 4, 16}
        times = {one.config: one.rates for one in plain.candidates}
        for one in masked.candidates:
            if one.config in times:
                assert one.rates == {**times[one.config], **MASK_US}
        queries = 1 if phase == "one" else 6
        text = f"B=121,H=8,HKV=4,SQ={queries},SKV=128,D=256,softcap=50,mask=1"
        found = ships.select(attention(text))
        holding = {4, 16} if phase == "one" else {4}  # as many tiles
        assert found is not None and found.config["packed_heads"] in holding

    def test_both_phases_of_decoding_under_a_mask_share_kernels_at_d_256(self) -> None:
        ways = {"few": (1, 8), "one": (1, 2)}
        domains = {}
        for phase, packings in ways.items():
            found = [
                candidate(
                    maker()(1, width, packed_heads=packed, splits=2, combine="kernel"),
                    FUSED.work_terms,
                    launch=9.0,
                )
                for packed in packings
                for width in (64, 48)
            ]
            domain = AttentionDomain(256, "full", phase)  # type: ignore[arg-type]
            domains[domain] = DomainModels(domain, WARM, found, 0.5, REGRET)
        known = Portfolio("attention", DEFAULT_GPU, domains)
        for changes in ({"operand": "bool"}, {"has_softcap": True}):
            kernels = []
            for domain in domains:
                models = known.models_of(domain._replace(**changes))
                assert models is not None and models.donor == AttentionDomain(256, "full", "few")
                params = [one.config.params for one in models.candidates]
                kernels.append(
                    [(p.get("packed_heads", 1), p["tile_n"], p.get("combine", "")) for p in params]
                )
            assert kernels[0] == kernels[1]
            packed = (1, 8) if "operand" in changes else (1,)
            assert kernels[0] == [(one, 64, way) for one in packed for way in ("", "kernel")]

    def test_short_prompts_with_a_soft_cap_have_smaller_tiles(self) -> None:
        known = next(one for one in portfolio.shipped() if one.op == "attention")
        rows = []
        for length in (128, 4096):
            found = known.select(attention(f"H=16,HKV=8,S={length},D=256,causal=1,softcap=50"))
            assert found is not None and not found.vendor
            rows.append(found.config["warp_groups"])
        assert rows == [1, 2]

    def test_a_causal_window_under_a_mask_has_no_domain(self) -> None:
        for text, is_served in (("window=64", True), ("left=64,right=0", False)):
            problem = attention(f"S=1024,D=64,mask=bk,B=2,{text}")
            domain = domain_of(problem)
            assert (domain is not None) is is_served
            assert is_served or problem.is_causal

    def test_each_is_served_once(self) -> None:
        known = made(9.0, 5.0, 0.0)
        domains = [domain for domain, _ in known.served()]
        assert len(domains) == len(set(domains)) > 1
        assert {domain.head_dim for domain in domains} == {64}
