"""The page and the pictures of a model, and tokens a second of its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.cli import main
from tuner.config import Config
from tuner.hardware import GPUS
from tuner.problem import AttentionProblem, GemmProblem
from tuner.problem.steps import ModelStep
from tuner.report import model
from tuner.selection import model_table
from tuner.selection.answering import ENGINE, Answering, ModelAnswers, Rival

H200 = GPUS["H200"]
PRODUCT = GemmProblem(4, 4096, 4096)
ATTENTION = AttentionProblem.parse("S=1024,D=64")
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
    **{"vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"},
}


@pytest.fixture
def answers() -> ModelAnswers:
    own = Answering(
        PRODUCT, "measured", 10.0, Config("gemm"), "gemm", Rival("cublas", 15.0), Rival("lt", 12.0)
    )
    engines = Answering(ATTENTION, "predicted", 20.0, None, ENGINE, Rival(ENGINE, 20.0))
    step = ModelStep("decode 4, 512 keys", {PRODUCT: 2, ATTENTION: 1}, (), 4)
    return ModelAnswers([step], {PRODUCT: own, ATTENTION: engines})


def test_tokens_a_second_before_and_after(answers: ModelAnswers) -> None:
    step, mean = model_table.steps(answers)
    assert step == ("decode 4, 512 keys", "80,000", "100,000", "1.25x", "1.10x")
    assert mean == ("mean", "", "", "1.25x", "1.10x")


def test_the_page_says_who_answers(answers: ModelAnswers) -> None:
    assert "1.25x that by PyTorch or the engine, 1.10x" in model.verdict("m", answers, H200)
    steps, calls = model.sections(answers)
    (gain,) = steps.figures[0].spec["data"]["values"]
    assert gain["gain"] == 1.25 and gain["text"] == "1.25x, 1.10x the fastest"
    bars = {bar["call"]: bar for bar in calls.figures[0].spec["data"]["values"]}
    assert bars[PRODUCT.label()]["who"] == model.OWN
    assert bars[PRODUCT.label()]["text"] == "60.0 %, 1.50x"
    assert bars[ATTENTION.label()]["who"] == model.ENGINES
    assert calls.table is not None and len(calls.table.rows) == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vl_convert", reason="a page needs vl-convert-python")
    pytest.importorskip("sklearn", reason="a page needs scikit-learn")
    (tmp_path / "tiny").mkdir()
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(LLAMA))
    asked = ["report", "--model", str(config), "--batch", "1", "--seqlen", "128", "--gpu", "H200"]
    page, folder = tmp_path / "page.html", tmp_path / "pictures"
    assert main([*asked, "-o", str(page)]) == 0
    assert capsys.readouterr().out.startswith("tiny on NVIDIA H200: expected speed of its calls ")
    text = page.read_text()
    assert 'id="chart-steps"' in text and 'id="chart-calls"' in text and "prompt 1 x 128" in text
    assert main([*asked, "--pictures", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"steps.svg", "calls.svg"}


def test_options_of_a_model_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--shape", "S=1024,D=64", "--engine", "vllm"]) == 2
    assert "--engine is for --model" in capsys.readouterr().err
