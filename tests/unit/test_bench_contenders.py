"""Who takes part in a benchmark: suites, own kernels and peers, presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_machines import CAUSAL, COLD, OWN, PEERS, PROBLEM, WARM, entry, measured

from tuner.bench import presets
from tuner.bench.contenders import Role, line_up, peers_named
from tuner.bench.suites import ALL, SUITES, suites_named
from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.peers.cudnn_plans import VendorCudnnPlans
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Provenance
from tuner.problem import E4M3, AttentionProblem, GemmProblem, Problem
from tuner.selection.reader import Entry
from tuner.tuning.job import read_problems


def test_suites_hold_what_they_are_named_for() -> None:
    assert {name: len(suite.problems) for name, suite in SUITES.items()} == {
        "acceptance": 22,
        "decoding": 27,
        "long": 6,
        "plain": 16,
        "mlp": 12,
        "fp8": 8,
        "block_scaled": 84,
        "few": 8,
        "gated": 8,
        "moe": 12,
    }
    acceptance = SUITES["acceptance"].problems
    assert len(set(acceptance)) == 22
    assert AttentionProblem.parse("B=2,H=32,HKV=8,S=4096,D=128,causal=1") in acceptance
    assert sum(getattr(p, "is_causal", False) for p in acceptance) == 11
    assert all(p.is_causal for p in SUITES["long"].problems if isinstance(p, AttentionProblem))
    assert [s.name for s in suites_named(ALL, "attention")] == ["acceptance", "decoding", "long"]
    assert [s.name for s in suites_named(ALL, "gemm")] == [
        *("plain", "mlp", "fp8", "block_scaled", "few")
    ]
    assert [s.name for s in suites_named("", "gemm")] == ["plain"]
    assert GemmProblem(512, 14336, 4096, epilogue="bias_gelu") in SUITES["mlp"].problems


@pytest.mark.parametrize(
    ("name", "op"), [("nope", "attention"), ("acceptance", "gemm"), ("", "softmax")]
)
def test_a_wrong_suite_is_told(name: str, op: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        suites_named(name, op)


@pytest.mark.parametrize("suite", SUITES)
def test_a_listed_suite_can_be_swept(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op = SUITES[suite].op
    assert main(["bench", op, "--suite", suite, "--list-problems"]) == 0
    file = tmp_path / "problems.yaml"
    file.write_text(capsys.readouterr().out)
    assert read_problems(file) == list(SUITES[suite].problems)


def test_every_suite_names_peers_that_exist() -> None:
    for suite in SUITES.values():
        known = peers_named(suite.op, suite.against)
        wanted = {
            "attention": "flash3_splits",
            "gemm": "cublaslt",
            "grouped_gemm": "grouped_mm",
            "swiglu": "inductor",
        }
        is_quantised = suite.name in ("fp8", "block_scaled")
        assert ("scaled_mm" if is_quantised else wanted[suite.op]) in known
    assert {"addmm_activation", "inductor"} < set(peers_named("gemm", SUITES["mlp"].against))


def names(problem: Problem, entries: Sequence[Entry], **options: Any) -> list[tuple[Role, Config]]:
    values: dict[str, Any] = {"own": 3, "with_untuned": False, **options}
    found = line_up(problem, DEFAULT_GPU, WARM, entries, PEERS, **values)
    return [(c.role, c.config) for c in found.contenders if c.role is not Role.PEER]


def test_the_cache_s_best_take_part_in_their_order() -> None:
    vendor = Config("vendor_sdpa", {"kernel": "cudnn"})
    assert names(PROBLEM, [entry(vendor, *OWN[:5])]) == [(Role.OWN, c) for c in OWN[:3]]


def test_the_asked_regime_comes_first_and_others_follow() -> None:
    cold = Entry.of([measured(OWN[7], 9.0, regime=COLD)])
    found = names(PROBLEM, [cold, entry(OWN[1], OWN[7])], own=2)
    assert [config for _, config in found] == [OWN[1], OWN[7]]


def test_a_pinned_kernel_takes_part() -> None:
    pinned = replace(entry(*OWN[:4]), winner=measured(OWN[9], 12.0), pinned=True)
    assert [config for _, config in names(PROBLEM, [pinned], own=2)] == [OWN[9], OWN[0]]


@pytest.mark.parametrize(
    "other",
    [
        entry(*OWN[:2], problem=CAUSAL),
        entry(*OWN[:2], provenance=Provenance.REPLAYED),
        entry(*OWN[:2], gpu=GPUS["H100-PCIe"]),
    ],
)
def test_only_what_was_measured_for_the_problem_here_counts_as_tuned(other: Entry) -> None:
    assert {role for role, _ in names(PROBLEM, [other])} == {Role.UNTUNED}


def test_a_gpu_has_the_kernels_of_one_that_shares_its_decisions_behind_its_own() -> None:
    own = Entry.of([measured(OWN[7], 9.0).but(gpu=GPUS["H100"])])
    for gpu, wanted in ((DEFAULT_GPU, [OWN[1], OWN[7]]), (GPUS["H100"], [OWN[7], OWN[1]])):
        found = line_up(PROBLEM, gpu, WARM, [own, entry(OWN[1])], (), own=2, with_untuned=False)
        assert [c.config for c in found.contenders] == wanted
    found = line_up(PROBLEM, GPUS["H100-PCIe"], WARM, [own], (), own=1, with_untuned=False)
    assert [c.role for c in found.contenders] == [Role.UNTUNED]


def test_what_is_not_tuned_is_told_and_the_cost_model_picks() -> None:
    found = line_up(PROBLEM, DEFAULT_GPU, WARM, [], PEERS, own=2, with_untuned=False)
    own = [c.config for c in found.contenders if c.role is Role.UNTUNED]
    assert len(own) == 2 and "not tuned" in found.notes[0]
    prices = [family(c.family).predict_us(PROBLEM, c, DEFAULT_GPU) for c in own]
    assert prices == sorted(prices)


def test_one_untuned_kernel_stands_beside_the_tuned_when_asked() -> None:
    tuned = entry(*OWN[-3:])
    roles = [role for role, _ in names(PROBLEM, [tuned], with_untuned=True)]
    assert roles == [Role.OWN] * 3 + [Role.UNTUNED]


@pytest.mark.parametrize("params", [{}, {**OWN[0].params, "tile_n": 17}])
def test_a_stored_config_that_is_illegal_today_is_left_out(params: dict[str, Any]) -> None:
    stale = Config("fused_attention", params)
    found = line_up(
        PROBLEM, DEFAULT_GPU, WARM, [entry(stale, OWN[0])], (), own=3, with_untuned=False
    )
    assert [c.config for c in found.contenders] == [OWN[0]]
    assert stale.digest[:6] in found.notes[0]


def test_each_peer_gets_the_layout_it_likes() -> None:
    def layouts(problem: Problem) -> dict[str, Any]:
        against = peers_named("attention", ("cudnn", "flash2", "flash3", "naive"))
        found = line_up(problem, DEFAULT_GPU, WARM, [], against, own=1, with_untuned=False)
        peers = [c for c in found.contenders if c.role is Role.PEER]
        return {c.name: c.config.get("layout") for c in peers}

    flash = dict.fromkeys(("flash2", "flash3", "flash3_splits"), "bshd")
    assert layouts(PROBLEM) == {"cudnn": None, "naive": None, **flash}
    other = dict.fromkeys(("cudnn", "naive"), "bhsd")
    assert layouts(replace(PROBLEM, layout="bshd")) == {**other, **dict.fromkeys(flash)}


def test_quantised_attention_has_own_kernels_and_no_peer() -> None:
    problem = replace(PROBLEM, dtype=E4M3)
    against = peers_named("attention")
    found = line_up(problem, DEFAULT_GPU, WARM, [], against, own=3, with_untuned=False)
    assert [c.config.family for c in found.contenders] == ["fused_attention"] * 3


def test_peers_by_name() -> None:
    assert peers_named("gemm") == [
        *("cublas", "cublaslt", "torch_compile", "addmm", "addmm_activation", "scaled_mm"),
        "cublaslt_search",
    ]
    assert "naive" not in peers_named("attention")
    assert peers_named("attention", ["naive", "flash3"]) == ["flash3", "flash3_splits", "naive"]
    with pytest.raises(ConfigError, match=r"'flash9' is not a peer of attention \(allowed: cudnn"):
        peers_named("attention", ["flash9"])


def test_a_library_takes_part_with_the_best_that_a_sweep_found() -> None:
    problem = GemmProblem(512, 512, 512)

    def searched(entries: Sequence[Entry]) -> tuple[list[Config], tuple[str, ...]]:
        against = peers_named("gemm", ["cublaslt"])
        assert against == ["cublaslt", "cublaslt_search"]
        found = line_up(problem, DEFAULT_GPU, COLD, entries, against, own=1, with_untuned=False)
        peers = [c.config for c in found.contenders if c.name == "cublaslt_search"]
        return peers, found.notes

    numbers = dict.fromkeys(family("vendor_cublaslt_search").identity, 3)
    listed = Config("vendor_cublaslt_search", {"kernel": "cublaslt_search", **numbers})
    other = Config(listed.family, {**listed.params, "tile": 4})
    own = family("gemm").space(problem, DEFAULT_GPU)[0]
    decided = entry(own, other, listed, problem=problem)
    assert searched([decided]) == ([other], ())
    [first], notes = searched([])
    assert first.params == {"kernel": "cublaslt_search"}
    assert "cublaslt_search is its library's first choice: no sweep timed its list" in notes


def test_plans_take_part_where_their_frontend_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(lacking: str) -> tuple[list[str], str]:
        monkeypatch.setattr(VendorCudnnPlans, "lacks", lambda self: lacking)
        against = peers_named("attention", ["cudnn"])
        found = line_up(PROBLEM, DEFAULT_GPU, WARM, [], against, own=1, with_untuned=False)
        names = [c.name for c in found.contenders if c.role is Role.PEER]
        return names, "; ".join(found.notes)

    names, notes = peers("nothing is installed")
    assert names == ["cudnn"] and "cudnn_plans is left out: nothing is installed" in notes
    names, notes = peers("")
    assert names == ["cudnn_plans", "cudnn"] and "first choice" in notes


def test_the_tiles_of_the_design_documents_are_legal_and_as_named() -> None:
    found = presets.three_kernels(presets.TILED, DEFAULT_GPU)
    wanted = len(presets.TILES) + len(presets.THREADS) - 1 + len(presets.STREAMS)
    assert len(found) == wanted
    member = family("three_kernel_attention")
    for config in found.values():
        assert member.violations(presets.TILED, config, DEFAULT_GPU) == []
    config = found["three kernels 128x256x64, softmax 32"]
    assert [config.stages["qk"][f"tile_{x}"] for x in "mnk"] == [128, 256, 64]
    assert [config.stages["pv"][f"tile_{x}"] for x in "mnk"] == [128, 64, 64]
    assert config.stages["softmax"]["threads_per_row"] == 32
    assert presets.three_kernels(PROBLEM, DEFAULT_GPU) == {}


@pytest.mark.parametrize(("name", "op"), [("nope", "gemm"), ("design-documents", "softmax")])
def test_a_wrong_preset_is_told(name: str, op: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        presets.preset(name, op)


@pytest.mark.parametrize(
    ("epilogue", "further"),
    [
        ("", ["cublaslt_search"]),
        ("gelu", []),
        ("bias_gelu", ["addmm"]),
        ("bias_relu", ["addmm", "addmm_activation", "cublaslt_search"]),
    ],
)
def test_the_peers_of_a_gemm_are_those_of_its_epilogue(epilogue: str, further: list[str]) -> None:
    problem = GemmProblem(512, 512, 512, epilogue=epilogue)
    against = peers_named("gemm", ["cublas", "cublaslt", "addmm"])
    found = line_up(problem, DEFAULT_GPU, COLD, [], against, own=1, with_untuned=False)
    peers = [c.name for c in found.contenders if c.role is Role.PEER]
    assert peers == ["cublas", "cublaslt", *further]
    assert found.contenders[0].config.family == "gemm"


@pytest.mark.parametrize("fast_accum", [True, False])
def test_the_peer_of_an_e4m3_product_is_torch_s(fast_accum: bool) -> None:
    problem = GemmProblem(512, 512, 512, dtype=E4M3, fast_accum=fast_accum)
    half = replace(problem, dtype="bfloat16", fast_accum=True)
    searched = "cublaslt_search"
    for one, wanted in (
        (problem, ["scaled_mm", searched]),
        (half, ["cublas", "cublaslt", "torch_compile"]),
    ):
        against = peers_named("gemm")
        found = line_up(one, DEFAULT_GPU, COLD, [], against, own=1, with_untuned=False)
        assert [c.name for c in found.contenders if c.role is Role.PEER] == wanted
