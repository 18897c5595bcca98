"""A model's problems: what its configuration says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.cli import main
from tuner.errors import ConfigError
from tuner.problem import AttentionProblem, GemmProblem
from tuner.problem.shapes import (
    Model,
    expand,
    numbers,
    problems,
)
from tuner.tuning.job import read_problems

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MISTRAL = {**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
QWEN3 = {**LLAMA, "model_type": "qwen3", "hidden_size": 2560, "head_dim": 128, "dtype": "bfloat16"}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


def listed(config: dict[str, Any], **options: Any) -> list[str]:
    return [f"{p.op} {p.label()}" for p in problems(Model.of(config), [2], [1024], **options)]


def test_a_grouped_decoder() -> None:
    assert listed(LLAMA) == [
        "attention B=2,H=32,HKV=8,S=1024,D=128,causal=1,dtype=bf16,layout=bshd_bhsd",
        "gemm M=2048,N=4096,K=4096,dtype=bf16",
        "gemm M=2048,N=1024,K=4096,dtype=bf16",
        "gemm M=2048,N=14336,K=4096,dtype=bf16",
        "gemm M=2048,N=4096,K=14336,dtype=bf16",
        "gemm M=2,N=128256,K=4096,dtype=bf16",
        "swiglu M=2048,N=14336,K=4096,dtype=bf16",
    ]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (QWEN3, 1),
        ({**LLAMA, "hidden_act": "silu"}, 1),
        ({**LLAMA, "hidden_act": "gelu"}, 0),
        ({**LLAMA, "model_type": "gemma"}, 0),
        ({**LLAMA, "intermediate_size": 14344}, 0),
        (GPT2, 0),
        ({**BERT, "hidden_act": "silu"}, 0),
    ],
)
def test_swiglu_is_listed_of_a_gate_with_silu_that_has_a_kernel(
    config: dict[str, Any], count: int
) -> None:
    assert len(listed(config, ops=("swiglu",), dtype="fp16")) == count


def test_one_token_of_it() -> None:
    first, second, *_ = problems(Model.of(LLAMA), [4], [1024], decode=True)
    assert first == AttentionProblem.parse("B=4,H=32,HKV=8,SQ=1,SKV=1024,D=128,dtype=bf16")
    assert isinstance(second, GemmProblem) and second.m == 4


def test_a_head_dimension_that_is_not_a_quotient() -> None:
    found = problems(Model.of(QWEN3), [1], [512])
    assert isinstance(found[0], AttentionProblem) and found[0].head_dim == 128
    assert GemmProblem(512, 4096, 2560, dtype="bfloat16") in found
    assert GemmProblem(512, 2560, 4096, dtype="bfloat16") in found


def test_one_projection_with_weights_in_rows() -> None:
    found = problems(Model.of(GPT2), [1], [1024], dtype="fp16")
    assert found[0] == AttentionProblem.parse("H=12,S=1024,D=64,causal=1,layout=bshd_bhsd")
    assert GemmProblem(1024, 2304, 768, layout_b="row") in found
    assert GemmProblem(1024, 3072, 768, layout_b="row") in found
    assert found[-1] == GemmProblem(1, 50257, 768)


def test_an_encoder_sees_everything_and_predicts_no_token() -> None:
    found = problems(Model.of(BERT), [8], [512])
    assert found[0] == AttentionProblem.parse("B=8,H=12,S=512,D=64,layout=bshd")
    assert all(not (isinstance(p, GemmProblem) and p.n == 30522) for p in found)


def test_a_window_leaves_longer_attention_out() -> None:
    model = Model.of(MISTRAL)
    found = problems(model, [1], [4096, 8192], ops=("attention",))
    assert [p.seqlen_q for p in found if isinstance(p, AttentionProblem)] == [4096]
    unused = Model.of({**MISTRAL, "use_sliding_window": False})
    assert len(problems(unused, [1], [4096, 8192], ops=("attention",))) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "mamba"}, r"model_type=mamba is not known \(allowed: bert, "),
        ({"model_type": "llama"}, "lacks hidden_size or n_embd"),
        ({**LLAMA, "num_attention_heads": "32"}, "num_attention_heads='32' of the model"),
        ({**LLAMA, "hidden_size": 0}, "hidden_size=0 of the model is not a whole number from 1"),
        ({**LLAMA, "torch_dtype": "float32"}, "dtype=float32 has no kernels"),
        ({**LLAMA, "head_dim": 512}, "D=512 has no tuned kernel"),
    ],
)
def test_what_cannot_be_listed(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems(Model.of(config), [1], [512])


def test_the_text_part_of_a_model_of_several(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "mistral3", "dtype": "float16", "text_config": LLAMA})
    )
    assert Model.read(file).kind == "llama"


def test_numbers() -> None:
    assert numbers("batch", "1,8,32") == [1, 8, 32]
    assert numbers("seqlen", "128:1000,96") == [128, 256, 512, 96]
    for text in ("", "a", "0", "8:4", "1:2:3"):
        with pytest.raises(ConfigError, match="batch="):
            numbers("batch", text)


def test_ranges_and_lists_of_values_are_every_problem_of_them() -> None:
    text = "B=1,H=8,S=512:2048,D=64,128,causal=0,1"
    wanted = [
        AttentionProblem.parse(f"B=1,H=8,S={length},D={width},causal={mask}")
        for length in (512, 1024, 2048)
        for width in (64, 128)
        for mask in (0, 1)
    ]
    assert expand(AttentionProblem, text) == wanted
    assert expand(AttentionProblem, "S=1024,D=64") == [AttentionProblem.parse("S=1024,D=64")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("512,S=1024,D=64", "'512' is not KEY=VALUE"),
        ("S=512,S=1024,D=64", "key 'S' is given twice"),
        ("S=1024:512,D=64", "S=1024:512 is not a list of sizes"),
        ("S=512:1024", "attention needs D"),
        ("S=512,D=64,T=3", "unknown key 'T'"),
        ("S=512,D=64,65", "D=65"),
    ],
)
def test_a_range_that_is_none_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(AttentionProblem, text)


def test_the_list_is_what_a_sweep_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "config.json", tmp_path / "problems.json"
    model.write_text(json.dumps(MISTRAL))
    arguments = ["shapes", "--model", str(model), "--batch", "1,2", "--seqlen", "512:16384"]
    assert main([*arguments, "--output", str(out)]) == 0
    told = capsys.readouterr().err
    assert "longer than the model's 8192 positions" in told
    assert "window of 4096 keys" in told
    assert read_problems(out) == problems(
        Model.of(MISTRAL), [1, 2], [512, 1024, 2048, 4096, 8192, 16384]
    )


def test_a_list_without_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "config.json", tmp_path / "none/problems.json"
    model.write_text(json.dumps(MISTRAL))
    assert main(["shapes", "--model", str(model), "--output", str(out)]) == 2
    assert f"{out}: there is no folder {out.parent}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "is not a configuration"), ("{", "cannot be read")]
)
def test_a_file_that_is_none(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert main(["shapes", "--model", str(file)]) == 2
    assert message in capsys.readouterr().err
