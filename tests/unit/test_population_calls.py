"""Drawn calls as `scripts/bench population` makes and checks them, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.families.by_operation import domain_of
from tuner.hardware import GPUS
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.problem.population import (
    LOWER_RIGHT,
    PADDING,
    POSITIONS,
    ModelCall,
    View,
    draw,
    subset,
)
from tuner.selection.portfolio import serving, shipped

H200 = GPUS["H200"]


def views(problem: AttentionProblem) -> tuple[View, ...]:
    named = zip(("query", "key", "value"), problem.matrices, strict=False)
    return tuple(View(name, name, m.shape, m.strides) for name, m in named)


def attention(text: str, kind: str = "prompt", mask: str = "") -> ModelCall:
    problem = AttentionProblem.parse(text)
    return ModelCall("toy", "layers", kind, 1, problem, views(problem), mask)


def fused(batch: int, heads: int, tokens: int, width: int) -> ModelCall:
    problem = AttentionProblem.parse(
        f"B={batch},H={heads},S={tokens},D={width},causal=1,dtype=bf16,layout=bshd"
    )
    row = 3 * heads * width
    shape, strides = (batch, heads, tokens, width), (tokens * row, width, row, 1)
    made = [
        View(name, "projection", shape, strides, place * heads * width)
        for place, name in enumerate(("query", "key", "value"))
    ]
    return ModelCall("toy", "layers", "prompt", 1, problem, tuple(made))


SMALL = {
    "plain": attention("B=2,H=4,HKV=2,S=48,D=16,causal=1,dtype=bf16,layout=bshd"),
    "fused": fused(2, 3, 33, 16),
    "window": attention("H=2,S=96,D=16,causal=1,window=15,dtype=bf16"),
    "window both ways": attention("H=2,S=96,D=16,window=15,dtype=fp16", "encoding"),
    "softcap": attention("H=2,S=64,D=16,causal=1,softcap=30,dtype=bf16"),
    "capped drafts": attention(
        "B=2,H=4,HKV=2,SQ=5,SKV=70,D=16,softcap=30,dtype=bf16", "decoding", LOWER_RIGHT
    ),
    "padded window": attention("B=3,H=2,S=96,D=16,window=7,dtype=fp16", "encoding", PADDING),
    "padding": attention("B=3,H=2,S=40,D=16,dtype=fp16", "encoding", PADDING),
    "drafts": attention("B=2,H=4,HKV=2,SQ=5,SKV=70,D=16,dtype=bf16", "decoding", LOWER_RIGHT),
    "positions": attention("B=2,H=4,S=50,D=16,bias=h,dtype=bf16", "prompt", POSITIONS),
    "decoding": attention("B=2,H=4,HKV=1,SQ=1,SKV=70,D=16,dtype=bf16", "decoding"),
    "linear": ModelCall("toy", "layers", "up", 1, GemmProblem(9, 64, 32, dtype="bfloat16")),
    "gelu": ModelCall(
        "toy", "layers", "up", 1,
        GemmProblem(9, 64, 32, dtype="float16", epilogue="bias_gelu_tanh"),
    ),
    "swiglu": ModelCall("toy", "layers", "swiglu", 1, SwigluProblem(9, 64, 32, dtype="bfloat16")),
}  # fmt: skip


@pytest.fixture(scope="module")
def calls() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks import population_calls

    return population_calls


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_output_is_found(calls: Any, name: str) -> None:
    call = SMALL[name]
    (at,) = calls.made(call, "cpu", 1)
    cut, reference = calls._references(call, at)
    right = reference(False)
    shape = call.problem.output.shape
    wrong = right.new_zeros(shape if call.views else shape[-2:])
    assert cut(wrong).shape == right.shape
    assert calls._errors(call, at, {"cudnn": wrong})["cudnn"] > 0.5


def test_calls_of_public_models_have_own_kernels(calls: Any) -> None:
    portfolios = {g: one for g in ("H200", "H100") for one in serving(shipped(), GPUS[g])
                  if one.op == AttentionProblem.op}  # fmt: skip
    for call in draw("kinds", 800, subset("all")):
        if call.views:
            for gpu, portfolio in portfolios.items():
                models = portfolio.models_of(domain_of(calls.posed(call)))
                assert models is not None, (gpu, call.label)
                assert not all(one.is_vendor for one in models.candidates), (gpu, call.label)
