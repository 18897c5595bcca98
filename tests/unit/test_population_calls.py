"""Drawn calls as `scripts/bench population` makes and checks them, on CPU tensors."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench_device import time_calls

from benchmarks import harness
from benchmarks.call_times import MAX_CALLS
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

CAPPED = "softcap", "capped drafts"
"""PyTorch answers these by FlexAttention."""


@pytest.fixture(scope="module")
def calls() -> Any:
    pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks import population_calls

    return population_calls


@pytest.mark.parametrize("name", [name for name in SMALL if name not in CAPPED])
def test_a_call_is_made_checked_and_timed(calls: Any, name: str, monkeypatch: Any) -> None:
    from benchmarks import population_ways

    # Compiling FlexAttention takes a C++ compiler and a minute.
    off = functools.partial(population_ways._refuse, "off")
    monkeypatch.setattr(population_ways, "_flex", lambda problem: off)
    monkeypatch.setattr(harness, "time_calls", time_calls)
    row = calls.measured(SMALL[name], "cpu")
    assert row["us"]["tuner"] == 8.0 and row["us"]["pytorch"] == row["us"]["control"] == 10.0
    assert not row["wrong"], row["errors"]
    assert 0 < row["errors"]["tuner"] < 0.02
    said = "the tensors are not on a CUDA device"
    assert (row["answered"], row["reason"]) == ("refused", said)
    json.dumps(row)
    if name in SMALL and SMALL[name].views:
        assert {"flash3", "flash4"} <= set(row["failed"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [*CAPPED, "window", "padded window"])
def test_flex_attention_computes_the_call(calls: Any, name: str, monkeypatch: Any) -> None:
    import torch

    from benchmarks import population_ways

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    call = SMALL[name]
    (at,) = calls.made(call, "cpu", 1)
    assert isinstance(call.problem, AttentionProblem)
    out = population_ways._flex(call.problem)(at)
    plain = torch.nn.functional.scaled_dot_product_attention(*at.tensors, enable_gqa=True)
    errors = calls._errors(call, at, {"flex": out, "unmasked": plain})
    assert errors["flex"] < 0.02 < errors["unmasked"]


def test_rows_that_see_no_key_are_not_compared(calls: Any) -> None:
    call = SMALL["padded window"]
    (at,) = calls.made(call, "cpu", 1)
    blind = ~at.seen
    assert blind.any() and not blind.all()
    out = calls._errors(call, at, {"tuner": at.tensors[0]})["tuner"]
    assert 0.5 < out < float("inf")
    right = torch_attention(at)
    assert calls._errors(call, at, {"tuner": right.masked_fill(blind, 9.0)})["tuner"] < 0.02
    assert calls._errors(call, at, {"tuner": right.masked_fill(~blind, 9.0)})["tuner"] > 0.5


def torch_attention(at: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*at.tensors, at.whole_mask)


def test_a_soft_cap_is_the_references_too(calls: Any) -> None:
    import tuner

    call = SMALL["softcap"]
    (at,) = calls.made(call, "cpu", 1)
    out = tuner.attention(*at.tensors, is_causal=True, softcap=30)
    assert calls._errors(call, at, {"tuner": out})["tuner"] < 0.02
    uncapped = tuner.attention(*at.tensors, is_causal=True)
    scores = calls._errors(call, at, {"tuner": uncapped, "capped": out})
    assert scores["tuner"] > scores["capped"]


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


def test_tensors_lie_as_the_views_say(calls: Any) -> None:
    call = SMALL["fused"]
    first, second = calls.made(call, "cpu", 2)
    for inputs in (first, second):
        query, key, value = inputs.tensors
        assert [t.stride() for t in inputs.tensors] == [v.strides for v in call.views]
        base = query.untyped_storage().data_ptr()
        assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == base
        assert inputs.source.equal(query) and inputs.source.is_contiguous()
    assert first.tensors[0].data_ptr() != second.tensors[0].data_ptr()


def test_caches_and_weights_are_rotated_and_prompts_are_not(calls: Any) -> None:
    for name in ("decoding", "linear"):  # a graph calls no copy twice, and each replay is evicted
        assert calls.copies_of(SMALL[name]) == MAX_CALLS
    assert calls.copies_of(SMALL["plain"]) == 1
    assert calls.copies_of(attention("B=64,H=32,SQ=1,SKV=8192,D=128", "decoding")) == 1


STATS = {"peers": {}, "hits": 0, "fallbacks": {}, "errors": {}}


@pytest.mark.parametrize(
    ("stats", "kind", "said"),
    [
        ({"hits": 1}, "exact", ("own decision", "")),
        ({"hits": 1}, "portfolio", ("selection", "")),
        ({"fallbacks": {"PyTorch's own kernel was the fastest": 1}}, "exact",
         ("PyTorch's by choice", "PyTorch's own kernel was the fastest")),
        ({"fallbacks": {"no measured winner": 1}}, None, ("refused", "no measured winner")),
        ({"errors": {"a launch was refused": 1}}, "exact", ("refused", "a launch was refused")),
        ({}, None, ("refused", "not counted")),
    ],
)  # fmt: skip
def test_kinds_of_answers(calls: Any, stats: Any, kind: str | None, said: tuple[str, str]) -> None:
    from tuner.config import Config

    own = SimpleNamespace(config=Config("fused_attention", {}))
    answer: Any = SimpleNamespace(kind=kind, candidates=(own,)) if kind else None
    assert calls.answered(SimpleNamespace(**{**STATS, **stats}), answer) == said


def test_what_the_runtime_reads_off_the_tensors(calls: Any) -> None:
    plain = SMALL["plain"]
    assert calls.posed(plain) == plain.problem
    assert calls.posed(SMALL["positions"]) == SMALL["positions"].problem
    assert calls.posed(SMALL["gelu"]) == SMALL["gelu"].problem
    assert calls.posed(SMALL["swiglu"]) == SMALL["swiglu"].problem
    padded, drafts = (SMALL[name].problem for name in ("padding", "drafts"))
    assert isinstance(padded, AttentionProblem) and isinstance(drafts, AttentionProblem)
    assert calls.posed(SMALL["padding"]) == replace(padded, mask="bk")
    assert calls.posed(SMALL["drafts"]) == replace(drafts, mask="1")


def test_calls_of_public_models_have_own_kernels(calls: Any) -> None:
    portfolios = {g: one for g in ("H200", "H100") for one in serving(shipped(), GPUS[g])
                  if one.op == AttentionProblem.op}  # fmt: skip
    for call in draw("kinds", 800, subset("all")):
        if call.views:
            for gpu, portfolio in portfolios.items():
                models = portfolio.models_of(domain_of(calls.posed(call)))
                assert models is not None, (gpu, call.label)
                assert not all(one.is_vendor for one in models.candidates), (gpu, call.label)
