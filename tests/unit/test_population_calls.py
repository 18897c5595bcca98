"""Drawn calls as `scripts/bench population` makes and checks them, on CPU tensors."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench_device import time_calls

from benchmarks import harness, population, population_kernels, population_masks
from benchmarks.call_times import MAX_CALLS
from tuner.hardware import GPUS
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.problem.population import (
    LOWER_RIGHT,
    PADDING,
    POSITIONS,
    ModelCall,
    View,
    draw,
    is_held_out,
    linears,
    subset,
)
from tuner.selection.domains import AttentionDomain, domain_of
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


def test_a_vendors_kernel_is_pytorchs_by_choice(calls: Any) -> None:
    from tuner.config import Config

    vendors = SimpleNamespace(config=Config("vendor_sdpa", {"kernel": "cudnn"}))
    answer: Any = SimpleNamespace(kind="exact", candidates=(vendors,))
    stats = SimpleNamespace(**{**STATS, "hits": 1, "peers": {"pytorch": 1}})
    assert calls.answered(stats, answer) == ("PyTorch's by choice", "cudnn")


def test_a_peer_is_named(calls: Any) -> None:
    stats = SimpleNamespace(**{**STATS, "hits": 1, "peers": {"flash3": 1}})
    assert calls.answered(stats, None) == ("flash3", "")


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


def test_ten_held_out_models_layers_are_called_once_in_an_order_by_hash() -> None:
    models = subset(",".join(population.LAYER_MODELS))
    assert len(models) == 10 and all(map(is_held_out, models))
    (gpt2,) = subset("gpt2")
    wanted = {
        (m, *nk) for *nk, _ in linears(gpt2.stacks[0]).values() for m in population.LAYER_ROWS
    }
    sizes = [(p.m, p.n, p.k) for p in (call.problem for call in population.layers_of(["gpt2"]))]
    assert len(sizes) == len(wanted) and set(sizes) == wanted
    both = population.layers_of(["llama-2-7b", "llama-2-13b"])
    keys = [call.key for call in both]
    assert len(keys) == len(set(keys))
    assert keys == [call.key for call in population.layers_of(["llama-2-13b", "llama-2-7b"])]


@pytest.mark.parametrize("op", ["gemm", "attention"])
def test_own_kernels_answer_calls_of_models_that_make_selections(calls: Any, op: str) -> None:
    by_label = population.own_calls(op, H200)
    portfolios = {one.op: one for one in serving(shipped(), H200)}
    label_of = {call.key: label for label, some in by_label.items() for call in some}
    for label, some in by_label.items():
        for call in some[:3]:
            problem = calls.posed(call)
            domain, selection = domain_of(problem), portfolios[problem.op].select(problem)
            assert domain is not None and domain.label() == label
            assert not is_held_out(subset(call.model)[0])
            assert selection is not None and next(selection.own(), None) is not None
            if isinstance(domain, AttentionDomain):
                assert not domain.has_softcap and domain.mask != "windowed"
    turns = population.by_turns(op, by_label)
    counts = Counter(label_of[call.key] for call in turns)
    often, ends = population.OFTEN[op]
    assert len(turns) == len({call.key for call in turns})
    for label, some in by_label.items():
        width = often if label.endswith(ends) else 1
        assert counts[label] == min(len(some), width * population.MOST[op])


def test_the_listing_counts_calls_that_are_not_posed(calls: Any, monkeypatch: Any) -> None:
    from tuner.runtime.call.refusal import Kind, Refusal

    refusal = Refusal(Kind.MASK, "not of the query's type")
    monkeypatch.setattr("benchmarks.population_tensors.as_operand", lambda *_: refusal)
    cases = [population.DrawnCall(SMALL[name]) for name in ("padding", "linear", "plain")]
    args = SimpleNamespace(problems=False, gpu="H100")
    text = "\n".join(population.listing(cases, args))  # type: ignore[arg-type]
    assert all(case.label in text for case in cases)
    assert "    1  50.0%  attention, not posed: attn_mask is given" in text


def test_problems_are_listed_for_a_sweep(tmp_path: Any, capsys: Any) -> None:
    from tuner.tuning.job import read_problems

    options = ["--models", "gpt2,bert-base", "--count", "20", "--list", "--problems"]
    assert harness.main(population.BENCH, options) == 0
    path = tmp_path / "problems.yaml"
    path.write_text(capsys.readouterr().out)
    drawn = draw("0", 20, subset("gpt2,bert-base"))
    assert read_problems(path) == list(dict.fromkeys(call.problem for call in drawn))


def test_a_table_tells_answers_apart_and_names_the_worst() -> None:
    us = {"pytorch": 10.0, "tuner": 8.0, "tuner enabled": 5.0, "control": 10.0}
    row = {"case": "a", "group": "attention", "us": us, "answered": "selection", "failed": {}}
    refused = {**row, "case": "b", "us": {**us, "tuner": 20.0}, "answered": "refused"}
    refused["reason"] = "no measured winner"
    lost = {"case": "c", "group": "products", "lost": "no answer"}
    lines = population.answers_table([row, refused, lost])
    assert any(line.startswith("| attention, refused | 1 | 1 | 0.500 ") for line in lines)
    assert any(line.startswith("| attention, selection | 1 | 1 | 1.250 ") for line in lines)
    assert any(line.startswith("| tuner.enable | 2 | 2 | 2.000 ") for line in lines)
    worst = lines.index("worst to the fastest:")
    assert lines[worst + 2] == "- 0.500, 20.0 us, b"
    assert lines[-2:] == ["refused 1 times: no measured winner", "lost: c: no answer"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("first", [0, 570])
def test_the_exact_output_is_sdpas_in_float64(is_causal: bool, first: int) -> None:
    """Over more than one chunk of queries, with grouped heads."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(1)
    shape = (2, 4, population_kernels.CHUNK + 70, 16)
    query, key, value = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    key, value = key[:, :2], value[:, :2]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    out = population_kernels.exact(query, key, value, 0.3, is_causal=is_causal, first=first)
    assert out.shape[2] == shape[2] - first
    assert population_kernels.relative_error(wanted, out) < 1e-12
    zeroed = wanted.clone()
    zeroed[1, 3, -1] = 0
    assert population_kernels.relative_error(zeroed, out) > 1e-3


def test_a_wrong_kernel_is_not_timed(monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ways = [harness.Contender(str(error), lambda _, e=error: e) for error in (0.001, 0.1)]
    failed: dict[str, str] = {}
    fit, errors = population_kernels.right(ways, lambda out: float(out), 0.01, failed)
    assert [way.name for way in fit] == ["0.001"] and errors == {"0.001": 0.001, "0.1": 0.1}
    assert failed == {"0.1": "relative error 1.0e-01"}


def test_the_predecessors_time_is_taken_off_under_each_load(monkeypatch: Any) -> None:
    graph_us: dict[str, float] = {"own": 2000.0, "flash3": 2200.0}

    def captured(before: Any, one: Any, count: int) -> Any:
        us = graph_us[one.name] * count + 50 if one else 50.0
        return SimpleNamespace(us=us, replay=lambda: None)

    monkeypatch.setattr(population_kernels, "captured", captured)
    monkeypatch.setattr(population_kernels, "cooler", lambda: None)
    monkeypatch.setattr(population_kernels, "_behind", lambda cool, graph: graph.us)
    monkeypatch.setattr(population_kernels, "_held", lambda graph: (2 * graph.us, {"sm_mhz": 1}))
    ways = [harness.Contender(name, lambda i: i) for name in graph_us]
    loads = population_kernels.loaded(ways, lambda i: i, {"own": 1000.0})
    assert loads["us"] == graph_us
    assert loads["sustained_us"] == {"own": 4000.0, "flash3": 4400.0}


@pytest.mark.parametrize("causal", ["", ",causal=1"])
def test_each_width_of_tiles_is_compiled(causal: str) -> None:
    problem = AttentionProblem.parse(f"B=2,H=16,S=2048,D=128,dtype=e4m3,layout=bshd{causal}")
    configs = population_kernels.by_tile(problem)
    kinds = [(c["tile_n"], c["ping_pong"], c.get("skips_masked")) for c in configs]
    assert len(set(kinds)) == len(kinds) and {c["warp_groups"] for c in configs} == {2}
    assert {(n, p, None) for n in (128, 160, 192, 224) for p in (True, False)} <= set(kinds)
    assert ((128, True, "halves") in kinds) == bool(causal)


def test_nvidias_frontend_takes_the_graph_of_e4m3() -> None:
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    from benchmarks.population_cudnn import Fp8Graph

    graph = Fp8Graph(cudnn, population_kernels.FP8_SMOKE.problem, 0.1, "AUTO", None).graph
    assert len(graph.nodes) == 1 and {t.uid for t in graph.get_outputs()} == {10, 11, 12}


def test_masks_show_each_query_its_own_key_and_not_all() -> None:
    for name, sees in population_masks.MASKS.items():
        assert all(sees(at, at) for at in (0, 511, 512, 1024, 4095)), name
        assert not sees(0, 4095), name
    window, prefix = population_masks.MASKS["window"], population_masks.MASKS["prefix"]
    assert not window(1024, 0) and window(1023, 0)
    assert prefix(0, 511) and not prefix(0, 512)
