"""The family of latent attention: texts, legality, launches, the rule, draws of a proof."""

from __future__ import annotations

from dataclasses import replace

import pytest
from goldens import Goldens

from tuner.base import resources
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.mla_decode import KERNEL, LATENT, MlaDecode, row_blocks, rule
from tuner.families.trials import trials
from tuner.hardware import DEFAULT_GPU
from tuner.measure.tolerance import floor_work
from tuner.problem import AttentionProblem

FAMILY = MlaDecode()
PROBLEM = AttentionProblem.parse(f"B=4,H=128,SQ=1,SKV=900,{LATENT},page_size=64,dtype=bf16")
CONFIG = Config(
    FAMILY.name, {"whole_rows": True, "cluster": 2, "tile_overhead": 4, "cut_overhead": 2}
)


def test_golden_texts(goldens: Goldens) -> None:
    texts = {target.label(): render(target.kernels[KERNEL], "golden") for target in rule.targets()}
    goldens.check("mla_decode", texts)


def test_every_part_is_included() -> None:
    folder = resources.templates()
    text = (folder / "mla_decode.cu.j2").read_text()
    parts = [f"mla_decode/{path.name}" for path in (folder / "mla_decode").iterdir()]
    assert parts and all(f'include "{part}"' in text for part in parts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 0}, "over pages"),
        ({"head_dim": 128, "value_dim": 0}, "over pages"),
        ({"softcap": 5.0}, "soft caps"),
        ({"window_left": 100}, "windows"),
        ({"has_sinks": True}, "sinks"),
        ({"seqlen_q": 2}, "under a causal mask"),
        ({"seqlen_q": 2, "is_causal": True, "is_varlen": True}, "as many queries"),
        ({"seqlen_q": 65, "is_causal": True}, "at most 64 queries"),
    ],
)
def test_what_it_does_not_serve(changes: dict[str, object], reason: str) -> None:
    problem = replace(PROBLEM, **changes)  # type: ignore[arg-type]
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert not FAMILY.space(problem, DEFAULT_GPU)


@pytest.mark.parametrize(
    ("heads", "queries", "blocks"),
    [(128, 1, 2), (64, 1, 1), (16, 4, 1), (20, 3, 2), (1, 64, 1), (200, 2, 8), (65, 1, 2)],
)
def test_blocks_of_rows(heads: int, queries: int, blocks: int) -> None:
    problem = replace(PROBLEM, heads_q=heads, seqlen_q=queries, is_causal=queries > 1)
    assert row_blocks(problem) == blocks
    assert bool(FAMILY.violations(problem, CONFIG, DEFAULT_GPU)) == bool(blocks % 2)


def test_a_launch_names_the_latent_rows_once() -> None:
    [launch] = FAMILY.launches(PROBLEM, CONFIG, 0.5)
    assert [ref.operand for ref in launch.tensors] == [
        *("query", "key", "page_table", "seqused_k", "out", "lse")
    ]
    assert "value" not in {operand.name for operand in PROBLEM.operands}
    assert launch.integers[:6] == (4, 1, 128, 64, sum(PROBLEM.pages), 128 * 576)
    far = {"query": (4, 576, 576, 1)}
    assert "16 bytes" in str(FAMILY.strided_launches(PROBLEM, CONFIG, 0.5, far))


@pytest.mark.parametrize(("form", "row"), [("e4m3", 576), ("e4m3_blocks", 656)])
def test_a_quantised_cache_has_rows_of_bytes(form: str, row: int) -> None:
    problem = replace(PROBLEM, cache=form)  # type: ignore[arg-type]
    config = Config(FAMILY.name, {**CONFIG.params, "whole_rows": False, "cluster": 1})
    [launch] = FAMILY.launches(problem, config, 0.5)
    assert [ref.operand for ref in launch.tensors][6:] == ["descale_k"] * (form == "e4m3")
    assert launch.integers[8:10] == (64 * row, row)
    assert "copied by threads" in str(FAMILY.violations(problem, CONFIG, DEFAULT_GPU))
    assert {one["cluster"] for one in FAMILY.space(problem, DEFAULT_GPU)} == {1}
    far = {"key": (64 * row, row, row + 8, 1)}
    assert "16 bytes" in str(FAMILY.strided_launches(problem, config, 0.5, far))
    assert AttentionProblem.parse(problem.label()) == problem
    assert problem.bytes < PROBLEM.bytes and floor_work(problem)[1] < floor_work(PROBLEM)[1]


@pytest.mark.parametrize(
    "text", ["D=64,dtype=bf16,page_size=64", f"{LATENT},page_size=64", f"{LATENT},dtype=bf16"]
)
def test_only_latent_pages_of_bf16_queries_are_quantised(text: str) -> None:
    with pytest.raises(ConfigError, match="cache=e4m3 is for pages"):
        AttentionProblem.parse(f"SQ=1,SKV=64,H=16,cache=e4m3,{text}")


def test_a_problem_has_one_latent_head_and_known_widths() -> None:
    for text in (f"SQ=1,SKV=64,{LATENT.replace('HKV=1', 'HKV=2')}", "SQ=1,SKV=64,D=576,DV=504"):
        with pytest.raises(ConfigError):
            AttentionProblem.parse(f"{text},H=16,page_size=64")
    assert AttentionProblem.parse(PROBLEM.label()) == PROBLEM
    assert AttentionProblem.parse("S=64,D=64,DV=64").key == AttentionProblem.parse("S=64,D=64").key


def test_the_rule_serves_few_heads_and_many() -> None:
    one = rule.select(replace(PROBLEM, heads_q=64), DEFAULT_GPU)
    two = rule.select(PROBLEM, DEFAULT_GPU)
    assert one is not None and two is not None
    assert {config["cluster"] for _, config in one.own()} == {1}
    assert all(not FAMILY.violations(PROBLEM, config, DEFAULT_GPU) for _, config in two.own())


def test_a_proof_draws_every_edge() -> None:
    for target in rule.targets():
        drawn = trials(target, DEFAULT_GPU, 300, 0)
        problems = [trial.problem for trial in drawn]
        assert len(drawn) >= 300 and len({trial.config for trial in drawn}) == 20
        assert all(isinstance(one, AttentionProblem) and one.is_latent for one in problems)
        facts = {(one.seqlen_kv, one.seqlen_q, one.page_size) for one in problems}  # type: ignore[attr-defined]
        assert {keys for keys, _, _ in facts} >= {1, 63, 64, 65, 16385}
        assert {queries for _, queries, _ in facts} >= {1, 2, 64}
        assert {size for _, _, size in facts} == {16, 32, 48, 64, 80, 128, 256}
