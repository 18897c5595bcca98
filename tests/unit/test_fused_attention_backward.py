"""Our own gradients of attention: their problem, legality, variables and launches."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from backward_configs import BASE
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.attention_instances import INSTANCES, instance
from tuner.families.fused_attention_backward import KERNEL, REGISTERS, FusedAttentionBackward
from tuner.hardware import DEFAULT_GPU, SMEM_PER_BLOCK_BYTES
from tuner.measure.gate import inputs
from tuner.problem import AttentionBackwardProblem, AttentionProblem, problem_from_json

FAMILY = FusedAttentionBackward()
VENDOR = family("sdpa_backward")
PROBLEM = AttentionBackwardProblem.parse("S=1024,D=128")


def make(**changes: Value) -> Config:
    return Config(FAMILY.name, {**BASE, **changes})


def wrong(problem: AttentionBackwardProblem, **changes: Value) -> str:
    return "; ".join(FAMILY.violations(problem, make(**changes), DEFAULT_GPU))


# The problem.


def test_a_problem_is_read_from_text_and_json() -> None:
    text = "B=2,H=8,HKV=2,SQ=500,SKV=300,D=72,causal=1,window=100,dtype=bf16,layout=bshd"
    problem = AttentionBackwardProblem.parse(f"{text},deterministic=1")
    assert problem.label() == f"{text},deterministic=1"
    assert problem_from_json(json.loads(problem.key)) == problem
    assert problem.forward == AttentionProblem.parse(text)
    assert AttentionBackwardProblem.of(problem.forward, True) == problem
    assert AttentionBackwardProblem.of(problem.forward) == replace(problem, is_deterministic=False)


def test_soft_caps_and_packed_sequences_are_absent_from_the_key_of_others() -> None:
    plain = AttentionBackwardProblem.parse("S=100,D=64")
    assert not {"softcap", "is_varlen"} & json.loads(plain.key).keys()
    for text in ("S=100,D=64,causal=1,softcap=2.5", "B=3,S=100,D=64,varlen=1,deterministic=1"):
        problem = AttentionBackwardProblem.parse(text)
        assert problem_from_json(json.loads(problem.key)) == problem != plain
        assert AttentionBackwardProblem.parse(problem.label()) == problem
        assert AttentionBackwardProblem.of(problem.forward, problem.is_deterministic) == problem


def test_packed_sequences_have_their_starts_and_rows_of_heads() -> None:
    problem = AttentionBackwardProblem.parse("B=4,H=8,HKV=2,SQ=100,SKV=60,D=64,varlen=1")
    forward, shapes = problem.forward, {o.name: o.shape for o in problem.operands}
    assert [o.name for o in problem.inputs[4:]] == [
        *("logsumexp", "grad_out", "cu_seqlens_q", "cu_seqlens_kv")
    ]
    assert shapes["cu_seqlens_q"] == shapes["cu_seqlens_kv"] == (5,)
    assert shapes["logsumexp"] == (1, 8, forward.total_q)
    assert shapes["grad_key"] == (1, 2, forward.total_kv, 64)
    assert problem.flops == sum(one.flops for one in forward.sequences) * 5 // 2


def test_operands_are_those_of_attention_and_their_gradients() -> None:
    problem = AttentionBackwardProblem.parse("B=2,H=8,HKV=2,SQ=500,SKV=300,D=72,layout=bshd_bhsd")
    shapes = {o.name: o.shape for o in problem.operands}
    strides = {o.name: o.strides for o in problem.operands}
    assert [o.name for o in problem.inputs] == [
        *("query", "key", "value", "out", "logsumexp", "grad_out")
    ]
    assert [o.name for o in problem.outputs] == ["grad_query", "grad_key", "grad_value"]
    for name in ("query", "key", "value"):
        assert shapes[f"grad_{name}"] == shapes[name]
        assert strides[f"grad_{name}"] == strides[name]
    assert strides["grad_out"] == strides["out"] == strides["query"]
    assert shapes["logsumexp"] == (2, 8, 500)
    assert problem.flops == 10 * 2 * 8 * 500 * 300 * 72


def test_masks_of_equal_meaning_are_one_problem() -> None:
    wide = AttentionBackwardProblem.parse("S=100,D=64,window=99")
    assert wide == AttentionBackwardProblem.parse("S=100,D=64")
    assert AttentionBackwardProblem.parse("S=100,D=64,right=0").is_causal


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("S=100,D=64,dtype=e4m3", "dtype=e4m3 has no gradients"),
        ("S=100,D=60", "D=60 has no tuned kernel"),
        ("S=100,D=64,bias=h", "unknown key 'bias' for attention_backward"),
        ("S=100,D=64,varlen=1,softcap=5", "varlen=1 has no sliding window and no soft cap"),
        ("H=3,HKV=2,S=100,D=64", "HKV must divide H"),
    ],
)
def test_what_has_no_gradients_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        AttentionBackwardProblem.parse(text)


@pytest.mark.parametrize("extra", ["bias=h", "mask=1", "page_size=64"])
def test_attention_with_more_has_none(extra: str) -> None:
    forward = AttentionProblem.parse(f"S=100,D=64,{extra}")
    with pytest.raises(ConfigError, match="has no gradients"):
        AttentionBackwardProblem.of(forward)


# Legality.


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        ("S=1024,D=128", {"tile_m": 96}, "tile_m=96 is not a multiple of 64"),
        ("S=1024,D=128", {"tile_m": 128}, "288 registers a thread exceed 240"),
        (
            "S=1024,D=64,causal=1,deterministic=1",
            {"dq": "ordered", "rotate": True},
            "rotate=true orders the sums of full masks only",
        ),
        ("S=1024,D=64", {"warp_groups": 1, "tile_m": 128}, "2 slabs of dQ do not divide"),
        ("S=1024,D=96", {"swap_dq": True}, "head dimension=96 is not a multiple of 64"),
        ("S=1024,D=64", {"stages": 3, "tile_m": 128}, "bytes of shared memory exceed"),
        ("S=1024,D=64,deterministic=1", {}, "dq=bulk adds in any order"),
        ("S=1024,D=256", {"warp_groups": 1}, "do not share keys in 2s"),
        ("S=1024,D=192", {"late_dq": True}, "are not for groups that share keys"),
        ("S=1024,D=192", {"early_exp": 50}, "are not for groups that share keys"),
        ("S=1024,D=192", {"v_registers": 50}, "are not for groups that share keys"),
        ("S=1024,D=128", {"v_registers": 100}, "256 registers"),
        ("S=1024,D=72", {"v_registers": 50}, "of 96 columns is not a whole number"),
        ("S=1024,D=256", {}, "bytes of shared memory exceed"),
        ("S=1024,D=128", {"stages": 1, "late_dq": True}, "stages=1 has no late_dq"),
        ("S=1024,D=64,softcap=5", {"early_exp": 50}, "early_exp is 0 under a soft cap"),
        ("S=1024,D=64,varlen=1", {"rotate": True}, "rotate=true has no variable lengths"),
        ("S=1024,D=64", {"rotate": True, "persistent": True}, "persistent=true has no rotate"),
        ("S=1024,D=64", {"dq": "none"}, "dq='none' is not known"),
        ("S=1024,D=64", {"section_heads": 3}, "section_heads=3 is not known"),
    ],
)
def test_an_illegal_config_says_why(text: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in wrong(AttentionBackwardProblem.parse(text), **changes)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("S=1024,D=128", {}),
        ("S=1024,D=128", {"stages": 3, "ds_stages": 1, "dq": "direct"}),
        ("S=1024,D=64", {"tile_m": 128}),
        ("S=1024,D=64", {"tile_m": 96, "swap_dq": True}),
        ("S=1024,D=96", {"stages": 3}),
        ("S=1024,D=64", {"warp_groups": 1}),
        ("S=1024,D=128,deterministic=1", {"dq": "ordered"}),
        ("S=1024,D=128,deterministic=1", {"dq": "ordered", "rotate": True}),
        ("S=1024,D=128,causal=1", {"rotate": True}),
        ("S=1024,D=128", {"late_dq": True, "early_exp": 50}),
        ("S=1024,D=192", {"ds_stages": 1}),
        ("S=1024,D=256", {"dq": "direct", "transpose_ds": True}),
        ("S=1024,D=256,deterministic=1", {"stages": 1, "dq": "ordered"}),
    ],
)
def test_configs_that_compile_are_legal(text: str, changes: dict[str, Any]) -> None:
    assert wrong(AttentionBackwardProblem.parse(text), **changes) == ""


@pytest.mark.parametrize("groups", REGISTERS)
def test_setmaxnreg_asks_for_no_more_than_a_block_has(groups: int) -> None:
    """A group that asks for more than its block was launched with waits for ever."""
    producer, consumer = REGISTERS[groups]
    launched = min(255, 65536 // (128 * (groups + 1))) // 8 * 8
    assert producer % 8 == consumer % 8 == 0
    assert 24 <= producer <= consumer <= 256
    assert producer + groups * consumer <= (groups + 1) * launched


def test_shared_memory_holds_every_part() -> None:
    """K and V, the rings with their statistics, dS, and dQ on its way; barriers."""
    problem = AttentionBackwardProblem.parse("S=1024,D=104")
    operands, rings = 2 * 2 * 128 * 128, 2 * 2 * 64 * (2 * 128 + 4)
    wanted = operands + rings + 2 * 2 * 64 * 128 + 4 * 64 * 128
    found = FAMILY.smem_bytes(problem, make())
    assert wanted < found <= wanted + 2048
    assert FAMILY.smem_bytes(problem, make(dq="direct")) == found - 4 * 64 * 128
    for config in FAMILY.space(problem, DEFAULT_GPU):
        assert FAMILY.smem_bytes(problem, config) <= SMEM_PER_BLOCK_BYTES
    # Two groups that share 64 keys, and P in fp32 beside dS.
    wide = AttentionBackwardProblem.parse("S=1024,D=192")
    wanted = 2 * 2 * 64 * 192 + 2 * 2 * 64 * (2 * 192 + 4) + (2 + 4) * 64 * 64 + 4 * 64 * 192
    config = make(ds_stages=1)
    assert wanted < FAMILY.smem_bytes(wide, config) <= wanted + 2048


def test_deterministic_problems_have_ordered_configs_only() -> None:
    space = FAMILY.space(replace(PROBLEM, is_deterministic=True), DEFAULT_GPU)
    assert {config["dq"] for config in space} == {"ordered"}
    assert {config["dq"] for config in FAMILY.space(PROBLEM, DEFAULT_GPU)} == {"bulk", "direct"}


@pytest.mark.parametrize("head_dim", INSTANCES)
@pytest.mark.parametrize("deterministic", [0, 1])
def test_every_instance_has_configs(head_dim: int, deterministic: int) -> None:
    text = f"S=1024,D={head_dim},deterministic={deterministic}"
    space = FAMILY.space(AttentionBackwardProblem.parse(text), DEFAULT_GPU)
    levers = ("late_dq", "early_exp", "v_registers")
    orders = {tuple(config[lever] for lever in levers) for config in space}
    # At 128 columns all of V leaves too few registers; half of 96 is not a whole number of atoms.
    assert len(orders) == {64: 18, 96: 12, 128: 12}.get(head_dim, 1)


# What a launch is told.


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_a_head_is_padded_to_the_next_instance(head_dim: int) -> None:
    columns = instance(head_dim)
    assert columns in INSTANCES
    assert not any(head_dim <= smaller < columns for smaller in INSTANCES)
    problem = AttentionBackwardProblem(100, 100, head_dim)
    assert FAMILY.kernels(problem, make())[KERNEL].variables["head_dim"] == columns
    (launch,) = FAMILY.launches(problem, make(), 0.5)
    assert launch.integers[5] == head_dim


def test_integers_are_sizes_strides_and_schedule() -> None:
    problem = AttentionBackwardProblem.parse("B=2,H=8,HKV=2,SQ=500,SKV=300,D=64,layout=bshd")
    (launch,) = FAMILY.launches(problem, make(section_heads=4), 0.5)
    assert [ref.operand for ref in launch.tensors] == [o.name for o in problem.operands]
    query, key = (500 * 8 * 64, 64, 8 * 64), (300 * 2 * 64, 64, 2 * 64)
    strides = (query, key, key, query, query, query, key, key)
    assert launch.integers == (2, 8, 2, 500, 300, 64, *(s for each in strides for s in each), 1, 4)
    assert launch.scalars == (0.5,)
    (windowed,) = FAMILY.launches(replace(problem, window_left=7, window_right=9), make(), 0.5)
    assert windowed.integers[32:] == (7, 9)
    packed = replace(problem, is_varlen=True)
    (launch,) = FAMILY.launches(packed, make(), 0.5)
    assert launch.integers[32:] == (packed.forward.total_q, packed.forward.total_kv)
    assert [ref.operand for ref in launch.tensors][6:8] == ["cu_seqlens_q", "cu_seqlens_kv"]
    (capped,) = FAMILY.launches(replace(problem, softcap=30.0), make(), 0.5)
    assert capped.scalars == (0.5, 30.0)


def test_strides_of_a_call_reach_the_launch_or_are_refused() -> None:
    problem = AttentionBackwardProblem.parse("B=2,H=8,S=500,D=64")
    own = {"grad_out": (1 << 20, 1 << 14, 128, 1), "grad_key": (1 << 21, 1 << 15, 64, 1)}
    launches = FAMILY.strided_launches(problem, make(), 0.5, own)
    assert not isinstance(launches, str)
    assert launches[0].integers[18:21] == own["grad_out"][:3]
    assert launches[0].integers[24:27] == own["grad_key"][:3]
    odd = {"grad_out": (1 << 20, 1 << 14, 65, 1)}
    assert "not a multiple of 16 bytes" in str(FAMILY.strided_launches(problem, make(), 0.5, odd))
    apart = {"logsumexp": (8 * 500, 1, 8)}
    assert FAMILY.strided_launches(problem, make(), 0.5, apart) == "logsumexp is not contiguous"


def test_more_work_is_expected_to_take_longer() -> None:
    times = [
        FAMILY.predict_us(AttentionBackwardProblem(length, length, 128), make(), DEFAULT_GPU)
        for length in (512, 1024, 2048, 4096)
    ]
    assert times == sorted(times)
    ordered = FAMILY.predict_us(PROBLEM, make(dq="ordered"), DEFAULT_GPU)
    assert ordered > FAMILY.predict_us(PROBLEM, make(), DEFAULT_GPU)


# Vendors.


@pytest.mark.parametrize(
    ("text", "kernel", "reason"),
    [
        ("S=100,D=64,window=9", "cudnn", "no sliding window"),
        ("S=100,D=64,deterministic=1", "cudnn", "not deterministic"),
        ("S=100,D=256,deterministic=1", "flash3", "not deterministic with head dimensions above"),
        ("SQ=100,SKV=90,D=64,causal=1", "flash2", "aligns a causal mask bottom-right"),
        ("SQ=100,SKV=90,D=64,left=9", "flash3", "aligns a sliding window bottom-right"),
        ("S=100,D=64,softcap=5", "flash2", "flash2 has no soft cap"),
        ("S=100,D=64,varlen=1", "cudnn", "cudnn has no variable lengths"),
    ],
)
def test_vendors_refuse_what_they_would_compute_otherwise(
    text: str, kernel: str, reason: str
) -> None:
    problem = AttentionBackwardProblem.parse(text)
    config = Config(VENDOR.name, {"kernel": kernel})
    assert reason in "; ".join(VENDOR.violations(problem, config, DEFAULT_GPU))


def test_vendors_operators_have_the_arguments_that_they_are_given() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    aten = torch.ops.aten
    arguments = aten._flash_attention_backward.default._schema.arguments
    assert [a.name for a in arguments[:14]] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k"),
        *("max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused"),
    ]
    assert {"scale", "window_size_left", "window_size_right"} <= {a.name for a in arguments}
    arguments = aten._scaled_dot_product_cudnn_attention_backward.default._schema.arguments
    assert [a.name for a in arguments] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed"),
        *("philox_offset", "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "scale"),
    ]


# The text, and what it computes.


def test_golden_texts(goldens: Goldens) -> None:
    windowed = AttentionBackwardProblem.parse("S=1024,D=64,causal=1,window=9,dtype=bf16")
    made = {
        "plain": (PROBLEM, make()),
        "windowed": (windowed, make(tile_m=128, dq="direct")),
        "ordered": (PROBLEM, make(dq="ordered", swap_dq=True)),
        "softcap": (replace(PROBLEM, softcap=50.0, is_causal=True), make()),
        "varlen": (replace(PROBLEM, is_varlen=True, is_causal=True), make(dq="ordered")),
    }
    texts = {
        name: render(FAMILY.kernels(problem, config)[KERNEL], "KERNEL_ID")
        for name, (problem, config) in made.items()
    }
    goldens.check("fused_attention_backward", texts)


def test_rounding_of_huge_scores_makes_probabilities_infinite_unless_they_end_at_one() -> None:
    """Each row of one key: scores as the gate plants them, in the kernel's arithmetic. Below what
    `prepare` calls large a probability needs no limit.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    generator = torch.Generator().manual_seed(0)

    def drawn(low: int, high: int) -> Any:
        return torch.randint(low, high, (20000,), generator=generator).double()

    exponents, of_keys = inputs.HUGE_EXPONENTS["bfloat16"]
    log2_e = torch.tensor(1.44269504, dtype=torch.float32).double()
    rendered = render(FAMILY.kernels(PROBLEM, make())[KERNEL], "KERNEL_ID")
    large = float(re.findall(r"constexpr float kLargeLog2 = ([0-9.]+)f;", rendered)[0])
    infinite = 0
    for head_dim, columns in ((64, 64), (96, 96), (128, 128)):
        scale = torch.tensor(1 / math.sqrt(head_dim)).double()
        planted = (2 * drawn(0, 2) - 1) * (1 + 0.25 * drawn(0, 4))
        planted *= 2.0 ** (drawn(exponents.start, exponents.stop) + of_keys) * columns
        usual = torch.randn(20000, generator=generator).double() * large / 4 / scale
        for scores in (planted, usual.float().double()):
            lse_log2 = ((scores / math.sqrt(head_dim)).float().double() * log2_e).float().double()
            factor = (scale * log2_e).float().double()
            exponent = (scores * factor - lse_log2).float()
            weights = exponent.exp2()
            small = lse_log2.abs() <= large
            assert float(weights[small].max() if small.any() else 1) <= 1.005
            infinite += int(weights[~small].isinf().sum())
            assert (weights.clamp(max=1) * 0 == 0).all()
    assert infinite > 1000
