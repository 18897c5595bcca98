"""Attention whose values are narrower than its keys: the family, the rule, and the calls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from noted_kernels import find_kernels

from tuner.families.by_operation import rule_of
from tuner.families.fused_attention import FusedAttention, values_rule
from tuner.families.fused_attention.legality import smem_bytes
from tuner.families.trials import trials
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

FAMILY = FusedAttention()
PROBLEM = AttentionProblem.parse("B=2,H=16,S=4096,D=192,DV=128,causal=1,dtype=bf16,layout=bshd")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 64, "layout": "bhsd"}, "without pages"),
        ({"mask": "1", "is_causal": False}, "without pages and masks"),
        ({"value_dim": 256}, "narrower than keys"),
    ],
)
def test_what_the_family_does_not_serve(changes: dict[str, object], reason: str) -> None:
    problem = replace(PROBLEM, **changes)  # type: ignore[arg-type]
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert not FAMILY.space(problem, DEFAULT_GPU)


def test_values_take_the_shared_memory_and_the_columns_of_their_own_width() -> None:
    (_, config), *_ = values_rule.select(PROBLEM, DEFAULT_GPU).own()  # type: ignore[union-attr]
    square = replace(PROBLEM, value_dim=0)
    saved = smem_bytes(square, config) - smem_bytes(PROBLEM, config)
    assert saved == config["kv_stages"] * config["tile_n"] * 64 * 2
    variables = FAMILY.kernels(PROBLEM, config)["attention"].variables
    assert (variables["head_dim"], variables["value_dim"]) == (192, 128)
    assert "value_dim" not in FAMILY.kernels(square, config)["attention"].variables
    [launch] = FAMILY.launches(replace(PROBLEM, value_dim=104), config, 1.0)
    assert 104 in launch.integers
    assert PROBLEM.flops == square.flops * (192 + 128) // 384


def test_the_rule_serves_prompts_of_its_widths() -> None:
    assert rule_of(PROBLEM) is values_rule
    assert values_rule.serves(PROBLEM, DEFAULT_GPU)
    for changes in ({"seqlen_q": 8}, {"head_dim": 128, "value_dim": 64}, {"softcap": 5.0}):
        assert not values_rule.serves(replace(PROBLEM, **changes), DEFAULT_GPU)  # type: ignore[arg-type]
    long = values_rule.select(PROBLEM, DEFAULT_GPU)
    short = values_rule.select(replace(PROBLEM, seqlen_q=100, batch=1), DEFAULT_GPU)
    assert long is not None and short is not None
    assert next(long.own())[1]["tile_n"] == 128
    assert next(short.own())[1]["key_groups"] == 2


def test_a_proof_draws_both_widths() -> None:
    target = values_rule.targets()[0]
    drawn = [trial.problem for trial in trials(target, DEFAULT_GPU, 300, 0)]
    widths = {(one.head_dim, one.value_dim) for one in drawn}  # type: ignore[attr-defined]
    assert {d for d, _ in widths} == set(range(136, 193, 8))
    assert {v for _, v in widths} == set(range(104, 129, 8))


def test_a_call_has_an_output_as_wide_as_its_values() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tuner.runtime.attention.attention_call import AttentionCall

    query, key = (torch.zeros(1, 300, 4, 192).half().transpose(1, 2) for _ in range(2))
    value = torch.zeros(1, 300, 4, 256).half().transpose(1, 2)[..., 128:]
    posed = AttentionCall(query, key, value, None, 0.0, True, None, False).pose()
    text = "B=1,H=4,S=300,D=192,DV=128,causal=1,dtype=fp16,layout=bshd"
    assert posed.problem == AttentionProblem.parse(text)
    assert posed.problem.output.shape == (1, 4, 300, 128)
    assert posed.strides == {"value": (300 * 512, 256, 1024, 1)}
    apart = torch.zeros(1, 300, 4, 200).half().transpose(1, 2)[..., :192]
    posed = AttentionCall(apart, key, value, None, 0.0, True, None, False).pose()
    assert posed.strides["out"] == (300 * 512, 128, 512, 1)


def test_packed_sequences_have_outputs_as_wide_as_their_values(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tuner.runtime.attention.varlen import attention_varlen

    lengths = [100, 0, 70]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    query, key = (torch.randn(170, 2, 192).half() for _ in range(2))
    value = torch.randn(170, 2, 128).half()
    call = query, key, value, starts, starts, 100, 100
    found = attention_varlen(*call, is_causal=True)
    for part in (slice(0, 100), slice(100, 170)):
        rows = [tensor[part].transpose(0, 1)[None] for tensor in (query, key, value)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
        torch.testing.assert_close(found[part], wanted[0].transpose(0, 1))
    served = find_kernels(on_cpu, monkeypatch, lambda problem: FAMILY)
    out = attention_varlen(*call, is_causal=True)
    assert out.shape == value.shape
    [(_, problem)] = served.posed
    assert problem.value_dim == 128 and problem.is_varlen
    [(_, integers, _)] = served.launched
    assert integers[6] == 128, "columns of the call's values"
