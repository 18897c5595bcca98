"""Calls of a model: their numbers, their shares of the time, and who answers them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA

from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.by_operation import domain_of
from tuner.hardware import GPUS
from tuner.problem import (
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    shapes,
    written,
)
from tuner.problem.architecture import Attention, Experts, Linear, Model
from tuner.problem.engines import ENGINES
from tuner.problem.steps import MAX_TOKENS, ModelStep, steps
from tuner.selection import peer_ratios
from tuner.selection.answering import Answering, ModelAnswers, Rival, answering, needed
from tuner.selection.peer_ratios import PeerRatios
from tuner.selection.portfolio import shipped
from tuner.selection.ratios import Ratios

H200 = GPUS["H200"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def of(kind: type[Problem], step: ModelStep) -> dict[str, int]:
    return {p.label(): count for p, count in step.calls.items() if isinstance(p, kind)}


def test_each_layer_is_a_call() -> None:
    (step, *_) = steps(written.architecture(LLAMA), None, [2], [512])
    assert step.label == "decode 2, 512 keys"
    assert list(of(AttentionProblem, step).values()) == [32]
    assert of(GemmProblem, step) == {
        "M=2,N=4096,K=4096,dtype=bf16": 64,
        "M=2,N=1024,K=4096,dtype=bf16": 64,
        "M=2,N=14336,K=4096,dtype=bf16": 64,
        "M=2,N=4096,K=14336,dtype=bf16": 32,
        "M=2,N=128256,K=4096,dtype=bf16": 1,
    }


def test_an_engine_computes_projections_as_one() -> None:
    (step, *_) = steps(written.architecture(LLAMA), ENGINES["vllm"], [2], [512], ranks=2)
    assert of(GemmProblem, step) == {
        "M=2,N=3072,K=4096,dtype=bf16": 32,
        "M=2,N=4096,K=2048,dtype=bf16": 32,
        "M=2,N=14336,K=4096,dtype=bf16": 32,
        "M=2,N=4096,K=7168,dtype=bf16": 32,
        "M=2,N=64128,K=4096,dtype=bf16": 1,
    }


def test_layers_of_a_window_call_the_mask_that_transformers_makes() -> None:
    windows = (Attention(8, 8, 64, left=127, count=3), Attention(8, 8, 64, count=2))
    model = Model("mixed", windows, (), dtype="bfloat16")
    (step,) = (one for one in steps(model, None, [1], [256]) if one.label == "prompt 1 x 256")
    assert sorted(of(AttentionProblem, step).values()) == [2, 3]
    assert any(
        "mask=1" in label for label, count in of(AttentionProblem, step).items() if count == 3
    )


def test_a_router_and_its_experts_are_calls() -> None:
    router = Linear("gate", 8, 512, count=4)
    model = Model("moe", (), ((router,),), experts=(Experts(8, 2, 512, 256, 128, count=4),))
    step = steps(model, ENGINES["vllm"], [4], [128])[0]
    assert list(of(GroupedGemmProblem, step).values()) == [4, 4]
    assert of(GemmProblem, step) == {"M=4,N=8,K=512,dtype=bf16": 4}


def test_steps_that_no_engine_runs_are_left_out() -> None:
    made = steps(written.architecture({**LLAMA, "max_position_embeddings": 4096}))
    assert not any("8192" in step.label for step in made)
    assert not any(step.label == "prompt 16 x 2048" for step in made) and MAX_TOKENS < 16 * 2048
    encoder = Model("bert", (Attention(8, 8, 64, right=-1),), ())
    assert all(step.label.startswith("prompt") for step in steps(encoder))


FAST, SLOW = GemmProblem(1, 64, 64), GemmProblem(2, 64, 64)
UNTIMED = GemmProblem(3, 64, 64)


def answers(**changes: Any) -> ModelAnswers:
    """Two steps: the second one's calls take a hundred times as long."""
    found = {
        FAST: Answering(FAST, "predicted", 1.0, pytorch=Rival("cublas", 2.0)),
        SLOW: Answering(
            SLOW, "measured", 100.0, pytorch=Rival("cublas", 110.0), peer=Rival("deep", 90.0)
        ),
        UNTIMED: Answering(UNTIMED, "unknown"),
    }
    made = [ModelStep("a", {FAST: 3, UNTIMED: 5}, ()), ModelStep("b", {FAST: 100, SLOW: 1}, ())]
    return ModelAnswers(made, {p: replace(one, **changes) for p, one in found.items()})


def test_every_step_counts_as_much() -> None:
    shares = {row.answer.problem: row.share for row in answers().rows()}
    by_step_b = 200 / 310
    assert shares[FAST] == pytest.approx((1 + by_step_b) / 2)
    assert shares[SLOW] == pytest.approx((1 - by_step_b) / 2)
    assert shares[UNTIMED] == 0
    assert answers().rows()[0].answer.problem == FAST


def test_gains_are_ratios_of_a_step_s_times() -> None:
    found = answers()
    a, b = found.steps
    assert (found.gain(a, "PyTorch"), found.gain(a, "peer")) == (2.0, 2.0)
    assert found.gain(b, "PyTorch") == pytest.approx(310 / 200)
    assert found.gain(b, "peer") == pytest.approx(290 / 200)
    assert found.mean_gain("PyTorch") == pytest.approx((2 * 1.55) ** 0.5)


def test_calls_without_a_rival_count_with_their_own_time() -> None:
    found = answers(pytorch=None, peer=None)
    assert all(found.gain(step, way) == 1 for step in found.steps for way in ("PyTorch", "peer"))


@pytest.mark.parametrize(
    ("problem", "source", "by", "peer"),
    [
        (GemmProblem.parse("M=1,N=4096,K=4096,dtype=bf16"), "measured", "gemv", "deep_gemm"),
        (
            GemmProblem.parse("M=64,N=4096,K=4096,dtype=bf16"),
            "measured",
            "cublas",
            "cublaslt_search",
        ),
        (GemmProblem.parse("M=1,N=1000,K=4096,dtype=bf16"), "predicted", "gemv", None),
        (AttentionProblem.parse("S=999,D=128,dtype=bf16"), "predicted", "fused_attention", None),
        (SoftmaxProblem.parse("M=77,N=777"), "unknown", "PyTorch", None),
    ],
)
def test_who_answers(problem: Problem, source: str, by: str, peer: str | None) -> None:
    found = answering(problem, H200)
    assert (found.source, found.by, found.peer and found.peer.name) == (source, by, peer)
    assert bool(found.kernels) == (found.config is not None) == (by not in ("cublas", "PyTorch"))
    assert (found.measured is not None) == (source == "measured" and found.config is not None)


def test_a_rule_s_kernels_answer() -> None:
    found = answering(GroupedGemmProblem.parse("G=8,M=256,N=512,K=512,dtype=bf16"), H200)
    assert (found.source, found.by, found.pytorch) == ("predicted", "grouped_gemm", None)
    assert found.kernels and found.us


PAGED = "HKV=8,H=32,SQ={},SKV=2048,D=128,causal={},dtype=bf16,page_size=16,layout=bshd"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_s_own_attention_answers_where_it_is_faster(name: str) -> None:
    engine = ENGINES[name]
    decoding = AttentionProblem.parse(f"B=16,{PAGED.format(1, 0)}")
    found = answering(decoding, H200, engine=engine)
    assert found.by == "fused_attention" and found.us and found.pytorch
    assert found.pytorch.name == "the engine's" and found.pytorch.us > found.us
    chunk = AttentionProblem.parse(f"B=4,{PAGED.format(2048, 1)}".replace("bf16", "e4m3"))
    assert answering(chunk, H200, engine=engine).by == "the engine's"
    assert answering(chunk, H200, engine=ENGINES["transformers"]).by == "fused_attention"
    assert answering(chunk, H200).by == "fused_attention"


def test_in_the_batch_invariant_mode_a_class_answers_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also calls that PyTorch or an engine answers without the mode."""
    chunk = AttentionProblem.parse(f"B=4,{PAGED.format(2048, 1)}")
    decoding = AttentionProblem.parse(f"B=16,{PAGED.format(1, 0)}")
    many, few = (GemmProblem.parse(f"M={m},N=4096,K=4096,dtype=bf16") for m in (8192, 1))
    monkeypatch.setenv("TUNER_BATCH_INVARIANT", "1")
    found = {p: answering(p, H200, engine=ENGINES["vllm"]) for p in (chunk, decoding, many, few)}
    for pair in ((chunk, decoding), (many, few)):
        classes = set()
        for problem in pair:
            config = found[problem].config
            assert config is not None and found[problem].kernels
            classes.add(families()[config.family].reduction_class(problem, config))
        assert len(classes) == 1
    assert found[decoding].problem == replace(decoding, is_causal=True)  # as the runtime asks
    unknown = answering(SoftmaxProblem.parse("M=77,N=777"), H200)
    assert (unknown.source, unknown.config) == ("unknown", None)


def test_a_peer_has_the_time_of_measured_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is faster by ratios near the call has no time model."""
    problem = AttentionProblem.parse("H=8,S=1999,D=256,dtype=bf16")
    domain, flash3 = domain_of(problem), Config("vendor_sdpa", {"kernel": "flash3"})
    assert domain is not None
    ratios = Ratios.of([(peer_ratios.sizes_of(problem), 2.0)] * 6, peer_ratios.WIDTH_OCTAVES)
    peers = {domain: (PeerRatios(flash3, "build", ratios),)}
    every = [replace(one, peers=peers if one.op == problem.op else {}) for one in shipped()]
    monkeypatch.setattr("tuner.selection.answering.shipped", lambda: every)
    found = answering(problem, H200)
    assert found.source == "predicted" and found.peer is not None and found.us
    assert found.peer.name == "flash3" and found.peer.us == pytest.approx(found.us / 2)


def test_kernels_are_named_once_with_the_sum_of_their_shares() -> None:
    found = ModelAnswers.of(steps(written.architecture(LLAMA)), H200)
    rows = found.rows()
    kernels = dict(needed(rows))
    assert 10 < len(kernels) < 40
    assert list(kernels.values()) == sorted(kernels.values(), reverse=True)
    own = sum(row.share for row in rows if row.answer.config is not None)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert own <= sum(kernels.values()) + 1e-9 < 1


def test_a_model_is_looked_up(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", "--model", str(config), "--engine", "vllm", "--gpu", "H200"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("calls on NVIDIA H200")
    assert "gemm M=1,N=28672,K=4096,dtype=bf16" in said and "further calls have" in said
    assert "prompt 1 x 8192" in said and "\nmean " in said


def test_a_model_is_looked_up_as_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "1", "--seqlen", "512", "--tensor-parallel", "2"]
    assert main(["lookup", "--model", str(config), *sizes, "--gpu", "H100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["gpu"] == GPUS["H100"].name
    assert sum(call["share"] for call in data["calls"]) == pytest.approx(1)
    assert {call["source"] for call in data["calls"]} <= {"measured", "predicted", "unknown"}
    assert [step["step"] for step in data["steps"]] == ["decode 1, 512 keys", "prompt 1 x 512"]
    assert data["gain"]["pytorch"] >= data["gain"]["fastest"] > 0.9


def test_transformers_is_loaded_where_the_file_does_not_say_all(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def architecture(data: dict[str, Any]) -> Model:
        asked.append(data["model_type"])
        return written.architecture(LLAMA)

    monkeypatch.setattr(shapes, "architecture", architecture)
    options = ["--gpu", "H200", "--batch", "1", "--seqlen", "512"]
    assert main(["lookup", "--model", str(config), *options]) == 0 and asked == []
    for changes in ({"model_type": "new"}, {"quantization_config": {"quant_method": "fp8"}}):
        config.write_text(json.dumps({**LLAMA, **changes}))
        assert main(["lookup", "--model", str(config), *options]) == 0
    assert asked == ["new", "llama"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "S=64,D=64", "--engine", "vllm"], "--engine is for --model"),
        (["--shape", "S=64,D=64", "--tensor-parallel", "2"], "--tensor-parallel is for --model"),
        (["--model", "nowhere.json"], "nowhere.json cannot be read"),
        (["--model", "{config}", "--tensor-parallel", "3"], "ranks=3"),
        (["--model", "{config}", "--batch", "0"], "batch=0"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lookup", *(text.format(config=config) for text in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_no_step_without_a_problem() -> None:
    with pytest.raises(ConfigError, match="no problem"):
        steps(Model("empty", (), ()))
