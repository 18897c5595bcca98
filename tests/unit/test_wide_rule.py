"""Attention with head dimensions above 256: the family, the rule and its kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from noted_kernels import find_kernels

from tuner.config import Config
from tuner.families import families
from tuner.families.base import Family
from tuner.families.by_operation import domain_of, rule_of
from tuner.families.fused_attention import FusedAttention, wide_rule
from tuner.families.fused_attention.legality import BY_COLUMNS, smem_bytes
from tuner.families.fused_attention.packing import tile_m
from tuner.families.trials import trials
from tuner.hardware import DEFAULT_GPU, SMEM_PER_BLOCK_BYTES
from tuner.problem import AttentionProblem

FAMILY = FusedAttention()
PROMPT = AttentionProblem.parse("B=2,H=16,HKV=2,S=4096,D=512,causal=1,dtype=bf16,layout=bshd")
DECODING = replace(PROMPT, seqlen_q=1, is_causal=False)
PAGED = replace(DECODING, page_size=64)


def fastest(problem: AttentionProblem) -> Config:
    selection = wide_rule.select(problem, DEFAULT_GPU)
    return next(selection.own())[1]


def test_other_own_families_take_no_wide_heads() -> None:
    own: list[Family] = [one for one in families().values() if not one.is_vendor]
    served = [one.name for one in own if one.op == "attention"]
    assert len(served) > 1
    for problem in (PROMPT, DECODING, replace(PROMPT, head_dim=264)):
        took = [one.name for one in own if not one.supports(problem, DEFAULT_GPU)]
        assert took == [FAMILY.name]
    assert domain_of(PROMPT) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "1", "is_causal": False},
        {"bias": "h", "is_causal": False},
        {"block_mask": "1", "is_causal": False},
        {"seqlen_q": 1, "is_causal": False, "page_size": 64, "has_sinks": True},
    ],
)
def test_masks_as_operands_and_sinks_have_no_kernel(changes: dict[str, object]) -> None:
    problem = replace(PROMPT, **changes)  # type: ignore[arg-type]
    assert "no masks as operands and no sinks with D=512" in FAMILY.supports(problem, DEFAULT_GPU)
    assert rule_of(problem) is wide_rule
    assert not wide_rule.serves(problem, DEFAULT_GPU)
    assert not FAMILY.space(problem, DEFAULT_GPU)


def test_heads_share_rows_where_queries_fill_no_tile() -> None:
    for problem in (PROMPT, replace(PROMPT, is_varlen=True), replace(PROMPT, softcap=50.0)):
        assert rule_of(problem) is wide_rule and wide_rule.serves(problem, DEFAULT_GPU)
        assert fastest(problem)["packed_heads"] == 1 and fastest(problem)["splits"] == 1
    few = fastest(DECODING)
    assert few["pads_heads"] and few["splits"] > 1 and few["combine"] == "kernel"
    paged = fastest(PAGED)
    assert paged["pads_heads"] and paged["splits"] == 1 and paged["box_rows"] == 16
    assert fastest(replace(PAGED, heads_q=40))["packed_heads"] == 1, "20 heads fill no pack of 16"


def test_wide_heads_need_groups_with_columns_of_their_own() -> None:
    config = fastest(PROMPT)
    assert tile_m(config.params) == 64
    assert smem_bytes(PROMPT, config) <= SMEM_PER_BLOCK_BYTES
    narrow = replace(PROMPT, head_dim=256)
    assert "column_groups is for D above 256, only" in FAMILY.conflicts(narrow, config, DEFAULT_GPU)
    for name in ("column_groups", "rescale"):
        params = {key: value for key, value in config.params.items() if key != name}
        assert FAMILY.violations(PROMPT, Config(FAMILY.name, params), DEFAULT_GPU), name
    for name, value in {"tile_n": 32, "ping_pong": True, "persistent": True}.items():
        assert BY_COLUMNS[name] != value
        other = Config(FAMILY.name, {**config.params, name: value})
        assert FAMILY.violations(PROMPT, other, DEFAULT_GPU), name


@pytest.mark.parametrize("problem", [PROMPT, DECODING, PAGED], ids=lambda one: one.label())
def test_a_sweep_has_kernels(problem: AttentionProblem) -> None:
    space = FAMILY.space(problem, DEFAULT_GPU)
    mine = fastest(problem)
    assert {config["column_groups"] for config in space} == {2}
    assert mine["splits"] in {config["splits"] for config in space}


def test_each_kernel_is_named_once_and_takes_its_small_problem() -> None:
    targets = wide_rule.targets()
    specs = [spec.key for target in targets for spec in target.kernels.values()]
    assert len(set(specs)) == len(specs)
    for target in targets:
        assert not FAMILY.violations(target.problem, target.config, DEFAULT_GPU)
        assert {spec.variables["head_dim"] for spec in target.kernels.values()} == {512}


def test_a_proof_draws_all_wide_heads() -> None:
    target = wide_rule.targets()[0]
    drawn = [trial.problem for trial in trials(target, DEFAULT_GPU, 64, 0)]
    widths = {one.head_dim for one in drawn if isinstance(one, AttentionProblem)}
    assert widths == set(range(264, 513, 8))


def test_calls_of_every_kind_are_posed_and_answered_without_a_kernel(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import tuner

    starts = torch.tensor([0, 40, 70]).int()
    query, key, value = (torch.randn(70, 4, 264).half() for _ in range(3))
    keys, values = (torch.randn(4, 16, 2, 264).half() for _ in range(2))
    table, lengths = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([20, 7]).int()
    dense = [tensor[None].transpose(1, 2) for tensor in (query, key, value)]

    def calls() -> list[Any]:
        q, k, v = dense
        return [
            tuner.attention(q, k, v, window=(8, 0), softcap=20.0),
            tuner.attention_varlen(query, key, value, starts, starts, 40, 40, is_causal=True),
            tuner.paged_attention(query[:2], keys, values, table, lengths),
        ]

    for out in (tuner.attention(dense[0], dense[1], dense[2], is_causal=True), *calls()):
        assert out.isfinite().all()
    served = find_kernels(on_cpu, monkeypatch, lambda problem: FAMILY)
    calls()
    posed = [problem for _, problem in served.posed]
    assert [rule_of(problem) for problem in posed] == [wide_rule] * 3
    assert [problem.is_paged for problem in posed] == [False, False, True]
    assert len(served.launched) == 3
