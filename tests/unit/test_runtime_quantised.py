"""Attention of e4m3 tensors: what a kernel is given, what PyTorch answers, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.families.fused_attention import FusedAttention
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
SDPA = torch.nn.functional.scaled_dot_product_attention


def quantised(heads_kv: int = 4) -> tuple[list[Any], dict[str, Any]]:
    """(2, 4, 8, 16) queries and their keys and values, with factors about 1."""
    heads = (4, heads_kv, heads_kv)
    tensors = [torch.randn(2, h, 8, 16).to(torch.float8_e4m3fn) for h in heads]
    factors = {
        f"descale_{name}": 0.5 + torch.rand(2, h) for name, h in zip("qkv", heads, strict=True)
    }
    return tensors, factors


def exact(tensors: list[Any], factors: dict[str, Any], **options: Any) -> Any:
    wide = [t.float() * f[..., None, None] for t, f in zip(tensors, factors.values(), strict=True)]
    return SDPA(*(t.bfloat16() for t in wide), **options)


def test_pytorch_answers_from_bf16_copies(runtime: SimpleNamespace) -> None:
    attention, stats = runtime.attention.attention, runtime.counters.stats
    tensors, factors = quantised()
    for options in ({}, {"is_causal": True}, {"scale": 0.7}):
        out = attention(*tensors, **options, **factors)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, exact(tensors, factors, **options))
    assert stats().fallbacks == {"the tensors are not on a CUDA device": 3}
    tensors, factors = quantised(2)
    out = attention(*tensors, enable_gqa=True, **factors)
    assert torch.equal(out, exact(tensors, factors, enable_gqa=True))


def test_without_factors_nothing_changes(runtime: SimpleNamespace) -> None:
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    assert torch.equal(runtime.attention.attention(*tensors), SDPA(*tensors))


def test_an_error_without_factors_says_what_is_wanted(runtime: SimpleNamespace) -> None:
    tensors, _ = quantised()
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            runtime.attention.attention(*tensors)
        assert any("descale_q" in note for note in raised.value.__notes__)
    plain = torch.randn(2, 4, 8, 16)
    with pytest.raises(RuntimeError) as raised:
        runtime.attention.attention(plain, plain[..., :8], plain)
    assert not hasattr(raised.value, "__notes__")


def test_a_kernel_is_given_tensors_and_factors(
    on_cpu: SimpleNamespace, zeros: SimpleNamespace
) -> None:
    tensors, factors = quantised(2)
    zeros.compute = lambda *_: torch.zeros(2, 4, 8, 16, dtype=torch.bfloat16)
    out = on_cpu.attention.attention(*tensors, is_causal=True, enable_gqa=True, **factors)
    assert (out.shape, out.dtype) == ((2, 4, 8, 16), torch.bfloat16)
    wanted = AttentionProblem.parse("B=2,H=4,HKV=2,S=8,D=16,causal=1,dtype=e4m3")
    assert [posed.problem for posed in zeros.posed] == [wanted]
    assert zeros.dispatched == [None], "the dispatcher in C++ knows no factors"
    assert len(zeros.inputs[0]) == len(wanted.operands) - 1
    for given, operand in zip(zeros.inputs[0], wanted.operands, strict=False):
        assert (tuple(given.shape), given.stride()) == (operand.shape, operand.strides)
        assert str(given.dtype) == f"torch.{operand.dtype}"


def test_a_plan_s_addresses_follow_the_operands(runtime: SimpleNamespace) -> None:
    """Inputs, factors among them, then output, workspace, log-sum-exp."""
    problem, family = AttentionProblem.parse("S=256,D=64,dtype=e4m3"), FusedAttention()
    config = family.space(problem, DEFAULT_GPU)[0]
    (launch,) = family.launches(problem, config, 0.125)
    kernel = SimpleNamespace(bind=lambda integers, scalars: None)
    step = runtime.plan._step(problem, kernel, launch, 0)
    assert [which for which, _ in step.tensors] == [0, 1, 2, 6, 8, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"descale_v": None}, r"descale_v is missing \(allowed: fp32 \(2, 4\)\)"),
        ({"descale_q": torch.ones(2, 3)}, r"descale_q is torch.float32 \(2, 3\) \(allowed"),
        ({"descale_k": torch.ones(2, 4).half()}, r"descale_k is torch.float16 \(2, 4\)"),
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "no attn_mask"),
        ({"dropout_p": 0.1}, "no dropout_p"),
        ({"window": (8, 8)}, "no window"),
        ({"softcap": 30.0}, "no softcap"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    runtime: SimpleNamespace, changes: dict[str, Any], words: str
) -> None:
    tensors, factors = quantised()
    with pytest.raises(ConfigError, match=words):
        runtime.attention.attention(*tensors, **{**factors, **changes})


def test_factors_are_for_quantised_tensors(runtime: SimpleNamespace) -> None:
    tensors, factors = quantised()
    tensors[1] = tensors[1].half()
    with pytest.raises(ConfigError, match=r"float8_e4m3fn tensors, k is torch\.float16"):
        runtime.attention.attention(*tensors, **factors)
