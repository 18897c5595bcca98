"""`scripts/bench tuner`: its list of problems, the kernels beside a choice, and the figures."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_device import fake_device, fake_gpu, on_the_cpu  # noqa: F401
from stored import H200, WARM, measured

from benchmarks import search_sweeps, tuner_figures, tuner_problems, tuner_rivals, tuner_truth
from benchmarks import tuner as bench
from benchmarks.tuner_problems import BLOCK_SCALED, DECODING, EXPERTS, PROMPTS, TURNS, Judged
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.families.gemm import cost
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.store import open_store

PROBLEM = AttentionProblem.parse("S=512,D=64,H=8,dtype=bf16")
OWN, OTHER = (Config("fused_attention", {"tile_n": tile}) for tile in (64, 128))


def row(us: dict[str, float], **facts: Any) -> dict[str, Any]:
    """A row whose choice is `OWN`, named ``tuner`` as served."""
    base = {"case": "one", "group": PROMPTS, "problem": PROBLEM.to_json(), "near": {}}
    return {**base, "us": us, "choice": OWN.to_json(), "artifacts": {}, "kernels": 2, **facts}


def named(**us: float) -> dict[str, float]:
    names = {"own": tuner_truth.own_name(OWN), "other": tuner_truth.own_name(OTHER)}
    return {names.get(name, name): time for name, time in us.items()}


def test_a_list_has_all_kinds_in_their_shares_and_a_shorter_one_is_its_beginning() -> None:
    problems = tuner_problems.drawn("a")
    assert len({case.label for case in problems}) == len(problems) == tuner_problems.COUNT
    counts = Counter(case.group for case in problems)
    assert {kind: 8 * count // 40 for kind, count in counts.items()} == Counter(TURNS)
    assert tuner_problems.drawn("a", 11) == problems[:11]
    assert tuner_problems.drawn("b", 11) != problems[:11]
    assert all(case.problem.flops <= tuner_problems.MAX_FLOPS for case in problems)


def test_neighbours_differ_in_keys_or_rows() -> None:
    for case in tuner_problems.drawn("a"):
        near = [one.problem.to_json() for one in tuner_problems.neighbours(case)]
        mine = case.problem.to_json()
        assert near
        for one in near:
            changed = {name for name in mine if one[name] != mine[name]}
            assert changed in ({"m"}, {"seqlen_kv"}, {"seqlen_q", "seqlen_kv"})
    one_row = Judged(BLOCK_SCALED, GemmProblem(1, 64, 64))
    assert [one.problem.m for one in tuner_problems.neighbours(one_row)] == [2]  # type: ignore[attr-defined]


def test_regret_counts_what_the_tuner_may_answer_with() -> None:
    us = named(pytorch=10.0, tuner=8.4, own=8.5, other=8.0, flash3=7.0, control=1.0)
    us["tuner enabled"] = 2.0
    assert tuner_figures.regret(row(us)) == pytest.approx(8.45 / 8.0 - 1), "the twins' mean"
    assert tuner_figures.over_everything(row(us)) == pytest.approx(8.45 / 7.0 - 1)
    assert tuner_figures.regret(row(named(tuner=8.0, own=8.4, pytorch=8.3))) == 0.0
    assert tuner_figures.regret(row(us, judged="pytorch")) == pytest.approx(0.25)
    assert tuner_figures.regret(row({"pytorch": 1.0})) is None
    assert tuner_figures.regret(row(named(tuner=8.0, own=8.2))) == 0.0, "without others"


def test_a_survey_says_how_far_the_first_kernel_is_from_the_fastest() -> None:
    us = named(pytorch=5.0, own=8.8, other=8.0)
    configs = {tuner_truth.own_name(one): one.to_json() for one in (OWN, OTHER)}
    facts = {"configs": configs, "first": tuner_truth.own_name(OWN), "kernels": 2}
    rows = [row(us, **facts), row(named(other=8.0), **facts)]
    assert tuner_figures.first_over_fastest(rows[0]) == pytest.approx(0.1)
    assert tuner_figures.survey_line(rows[1]) == "one: the first of 2 not built"
    assert tuner_figures.survey_table(rows)[-1] == f"| {PROMPTS} | 2 | 2 | 10.0% | 10.0% |"


def test_a_survey_is_of_other_models_without_experts() -> None:
    judged, surveyed = (tuner_problems.drawn("a", 40, names) for names in ("held-out", "making"))
    assert EXPERTS not in {case.group for case in surveyed}
    assert not {case.problem for case in judged} & {case.problem for case in surveyed}


def test_transfer_is_what_is_served_at_neighbours_and_a_move_the_chosen_kernel_there() -> None:
    near = {"a": named(pytorch=9.0, own=8.8, other=8.0), "b": named(pytorch=9.0, tuner=9.9)}
    assert tuner_figures.transfers(row({}, near=near)) == [pytest.approx(0.1)]
    assert tuner_figures.moves(row({}, near=near)) == [pytest.approx(0.1)]
    moved = tuner_figures.moves(row({}, near=near, choice=None))
    assert moved == [pytest.approx(1 / 8), pytest.approx(0.0)]


def test_a_flip_is_slower_in_the_later_pass_by_more_than_a_tie() -> None:
    first = row(named(own=8.0, other=8.0))
    tied = row(named(own=8.0, other=8.07), choice=OTHER.to_json())
    slower = row(named(own=8.0, other=8.1), choice=OTHER.to_json())
    assert tuner_figures.flips([first, tied]) == (0, 1)
    assert tuner_figures.flips([first, slower, tied]) == (1, 2)
    assert tuner_figures.flips([slower, first]) == (0, 1), "the second one is faster"
    elsewhere = row({}, problem=GemmProblem(8, 8, 8).to_json())
    assert tuner_figures.flips([first, elsewhere]) == (0, 0)


def test_a_replay_is_the_same_kernel_by_the_same_machine_code() -> None:
    first = row(named(own=8.0), artifacts={"attention": "a"})
    changed = row(named(own=8.0), artifacts={"attention": "b"})
    assert tuner_figures.replays([first, first]) == (1, 1)
    assert tuner_figures.replays([first, changed]) == (0, 1)
    assert tuner_figures.replays([{**first, "replayed": True}]) == (1, 1)


def test_the_table_has_a_line_a_kind_and_the_worst_problem() -> None:
    slow = row(named(pytorch=9.0, tuner=12.0), group=DECODING, case="slow", extra_mib=3.0)
    fast = row(named(pytorch=9.0, tuner=8.0), elapsed_s=40.0, cpu_s=500.0, evaluations=30)
    lines = tuner_figures.table([fast, slow, {"case": "gone", "group": EXPERTS, "lost": "hung"}])
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:5]] == [PROMPTS, DECODING, "all"]
    assert "- 33.3% slow: fastest pytorch" in lines and lines[-1] == "- lost: gone: hung"
    assert "40 | 500 | 30" in lines[4]


def test_kernels_of_the_cache_are_found_with_their_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    assert tuner_truth.built(PROBLEM, H200) == []
    selection = tuner_truth.selection_of(PROBLEM, H200)
    _, config = next(selection.own())
    (spec,) = family(config.family).kernels(PROBLEM, config).values()
    folder = tmp_path / "artifacts" / ("0" * 32)
    folder.mkdir(parents=True)
    facts = {"template": spec.template, "variables": dict(spec.variables)}
    (folder / "meta.json").write_text(json.dumps({"facts": facts}))
    configs = tuner_truth.built(PROBLEM, H200)
    digests = {family(one.family).compile_digest(one) for one in configs}
    assert digests == {family(config.family).compile_digest(config)}
    assert 0 < len(configs) <= tuner_truth.VARIANTS


def test_a_run_wants_the_kernels_that_the_selection_ranks_first() -> None:
    case = Judged(PROMPTS, PROBLEM)
    selection = tuner_truth.selection_of(PROBLEM, H200)
    _, first = next(selection.own())
    wanted = tuner_truth.wanted(case, H200)
    assert set(family(first.family).kernels(PROBLEM, first).values()) <= set(wanted)


def test_a_decision_replays_where_another_store_answers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family("fused_attention").space(PROBLEM, H200)[0]
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        store.decide(PROBLEM, H200, WARM, [measured(config, 8.0, problem=PROBLEM)], "s1")
    assert search_sweeps.replayed(tmp_path)
    monkeypatch.setattr(search_sweeps, "lookup", lambda *_, **__: None)
    (tmp_path / "other.sqlite").unlink()
    assert not search_sweeps.replayed(tmp_path)


def test_kernels_of_an_empty_cache_are_added_where_this_machine_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "own"))
    built = [tmp_path / "fresh" / name for name in ("new", "there", "unfinished")]
    for folder in built:
        folder.mkdir(parents=True)
        (folder / "kernel.so").write_text("fresh")
    for folder in built[:2]:
        (folder / "meta.json").write_text("{}")
    own = tmp_path / "own" / "artifacts"
    (own / "there").mkdir(parents=True)
    search_sweeps._add_to_cache(built)
    assert {folder.name for folder in own.iterdir()} == {"new", "there"}
    assert [path.parent.name for path in own.glob("*/kernel.so")] == ["new"]


def test_regrets_are_read_after_so_many_evaluations() -> None:
    times = {OWN: 10.0, OTHER: 8.0}
    assert tuner_rivals.regrets([OWN, OTHER], times)[:2] == [pytest.approx(0.25), 0.0]
    assert set(tuner_rivals.regrets([], times)) == {None}


def test_ways_have_top_1_rates_and_flips() -> None:
    at = tuner_rivals.EVALUATIONS.index(16)
    runs = [[None] * at + [value] for value in (0.0, 0.005, 0.03)]
    rows = [{"regrets": {"a": runs}}, {"regrets": {"a": runs[2:], "b": runs[:1]}}]
    lines = tuner_rivals.figures(rows)
    assert lines[2:] == [
        "| a | 1.6% | 3.0% | 50% | 1 of 2 |",
        "| b | 0.0% | 0.0% | 100% | 0 of 0 |",
    ]


def test_a_proposal_of_optuna_is_the_nearest_config_of_the_space() -> None:
    space = {
        Config("gemm", {"tile_m": m, "stages": stages}): 1.0 + m * stages
        for m, stages in ((64, 2), (128, 3), (256, 4))
    }
    for name in tuner_rivals.SAMPLERS:
        order = tuner_rivals._optuna(name, 0, space, 3)
        assert len(order) == len(set(order)) == 3 and set(order) == set(space)


def test_kernel_tuner_answers_by_another_python(tmp_path: Path) -> None:
    """A program in its place gets every config with its time, and its errors stay one run's."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "asked = json.load(sys.stdin)\n"
        "assert sys.argv[1].endswith('tuner_kernel_tuner.py') and asked['times'] == [10.0, 8.0]\n"
        "assert asked['configs'] == [[64], [128]] and asked['names'] == ['tile_n']\n"
        "json.dump({'greedy_mls': [[1, 0], 'ValueError: no']}, sys.stdout)\n"
    )
    program.chmod(0o700)
    args = Namespace(kernel_tuner=str(program), times=2)
    answer = tuner_rivals._kernel_tuner({OWN: 10.0, OTHER: 8.0}, args, 2)
    assert answer == {"greedy_mls": [[OTHER, OWN], "ValueError: no"]}
    program.write_text("#!/bin/sh\necho 'no module' >&2; exit 1\n")
    with pytest.raises(BenchmarkError, match="no module"):
        tuner_rivals._kernel_tuner({OWN: 10.0}, args, 2)
    assert tuner_rivals._kernel_tuner({OWN: 10.0}, Namespace(kernel_tuner=None), 2) == {}


def test_the_heuristics_list_is_by_recorded_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem(128, 256, 512)
    first, second, slower = (
        Config("gemm", {"swap_ab": False, "tile_m": m, "tile_n": 128, "tile_k": 64,
                        "cluster_m": 1, "cluster_n": 1, "stages": stages})
        for m, stages in ((64, 4), (128, 4), (128, 5))
    )  # fmt: skip
    times = {first: 9.0, second: 8.0, slower: 10.0}
    other = (False, 256, 128, 64), (1, 1)
    listed = [(cost.suggestion_of(second), 3.0), (other, 2.0), (cost.suggestion_of(first), 1.0)]
    monkeypatch.setattr(cost, "listed", lambda *_, **__: listed)
    orders = tuner_rivals._heuristics(problem, H200, times)
    assert orders["nvMatmulHeuristics"] == [[second, first]]
    assert orders["nvMatmulHeuristics sorted"] == [[first, second]], "by its own estimates"


class Planned:
    """Stands for a built kernel's plan, whose products have a batch before their rows."""

    workspace_bytes = 3 << 20

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def run_uncounted(self, *operands: Any) -> Any:
        import torch

        if isinstance(self.problem, GemmProblem):
            x, weight, bias = operands
            return (x @ weight + bias)[None]
        return torch.nn.functional.scaled_dot_product_attention(*operands)


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (tuner_problems.PRODUCTS, GemmProblem(9, 64, 32, dtype="bfloat16", epilogue="bias")),
        (PROMPTS, AttentionProblem.parse("S=64,D=64,H=2,dtype=bf16")),
    ],
)
def test_a_choice_is_timed_beside_built_kernels_here_and_near(
    kind: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gemm" if isinstance(problem, GemmProblem) else "fused_attention"
    configs = family(name).space(problem, H200)[:3]
    monkeypatch.setattr(tuner_truth, "built", lambda *_: configs)
    monkeypatch.setattr(tuner_truth, "_plan", lambda problem, *_, **__: Planned(problem))
    monkeypatch.setattr(tuner_truth, "launched", lambda *_: configs[0])
    with on_the_cpu():
        row = tuner_truth.untuned(Judged(kind, problem))
    own = {tuner_truth.own_name(config) for config in configs}
    assert own <= set(row["us"]) and row["wrong"] == [] and row["kernels"] == 3
    assert Config.from_json(row["choice"]) == configs[0] and row["extra_mib"] == 3.0
    near = [own & set(us) for us in row["near"].values()]
    assert len(near) == 2 and all(tuner_truth.own_name(configs[0]) in names for names in near)
    monkeypatch.setattr(tuner_truth, "MAX_FINALISTS", 2)
    with on_the_cpu():
        row = tuner_truth.untuned(Judged(kind, problem))
    assert set(row["first_us"]) == own and row["kernels"] == 3, "a first pass has all of them"
    with on_the_cpu():
        row = tuner_truth.surveyed(Judged(kind, problem))
    assert own | {row["first"]} <= set(row["configs"]) <= set(row["us"])


@pytest.mark.usefixtures("fake_device")
def test_a_product_is_timed_beside_helion(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(call=lambda of: lambda i: Planned(problem).run_uncounted(*of(i))[0])
    monkeypatch.setitem(sys.modules, "benchmarks.tuner_helion", other)
    monkeypatch.setattr(tuner_truth, "built", lambda *_: [])
    problem = GemmProblem(9, 64, 32, dtype="bfloat16", epilogue="bias")
    with on_the_cpu():
        row = tuner_truth.beside(Judged(tuner_problems.PRODUCTS, problem), tuner_truth.HELION)
    assert row["wrong"] == [] and {"helion", "tuner", "pytorch"} <= set(row["us"])
    row |= {"case": "one", "elapsed_s": 60.0}
    assert tuner_figures.rival_line("helion", row) == "one: tuner 0.0%, helion 25.0%, 60 s"
    assert "one | 8.0 | 0.0% | 10.0 | 25.0% | 60" in tuner_figures.rival_table("helion", [row])[2]


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(("own", "judged"), [(1.1, "own"), (0.9, "pytorch")])
def test_a_sweep_s_winner_is_judged_beside_those_of_other_seeds(
    own: float, judged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = AttentionProblem.parse("S=64,D=64,H=2,dtype=bf16")
    first, winner, other = family("fused_attention").space(problem, H200)[:3]
    path = tmp_path / "rows.jsonl"
    before = {"case": "before", "problem": problem.to_json(), "choice": first.to_json()}
    head = {"format": "cutlass-tuner bench 1"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, before)))
    facts = {
        **{"winner": winner.to_json(), "own_over_vendor": own, "us": {"tuner": 8.0}, "cores": 16},
        **{"elapsed_s": 25.0, "first_own_s": 9.0, "cpu_s": 200.0, "kernels": 8, "compiled": 8},
        "replayed": True,
    }
    asked = list[dict[str, bool]]()
    monkeypatch.setattr(
        search_sweeps, "swept", lambda *_, **options: asked.append(options) or facts
    )
    monkeypatch.setattr(tuner_truth, "built", lambda *_: [other])
    monkeypatch.setattr(tuner_truth, "_plan", lambda problem, *_, **__: Planned(problem))
    args = Namespace(fresh=True, sweep="", device="0", json=path)
    with on_the_cpu():
        row = bench.sweeping("quick")(Judged(PROMPTS, problem, 1), args)
    assert asked == [{"keeps_kernels": False, "replays": True, "shares_built": True}]
    assert {tuner_truth.own_name(one) for one in (first, winner, other)} <= set(row["us"])
    assert row["judged"] == (tuner_truth.own_name(winner) if judged == "own" else judged)
    assert (row["elapsed_s"], row["replayed"], row["compiled"]) == (25.0, True, 8)


def test_problems_of_a_file_are_of_their_kinds(tmp_path: Path) -> None:
    path = tmp_path / "problems.yaml"
    texts = (
        "S=512,D=64",
        "SQ=1,SKV=512,D=64",
        "op=gemm,M=8,N=8,K=8",
        "op=grouped_gemm,G=2,M=8,N=8,K=8",
    )
    path.write_text("".join(f"- {text}\n" for text in texts))
    kinds = [case.group for case in tuner_problems.of_file(path)]
    assert kinds == [PROMPTS, DECODING, tuner_problems.PRODUCTS, EXPERTS]
    path.write_text("- op=softmax,M=8,N=8\n")
    with pytest.raises(ConfigError, match="softmax is not judged"):
        tuner_problems.of_file(path)
