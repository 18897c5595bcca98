"""A model's problems: what its configuration says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA

from tuner.cli import main
from tuner.errors import ConfigError
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem, shapes
from tuner.problem.architecture import Linear, Model
from tuner.problem.shapes import expand, numbers, problems
from tuner.tuning.job import read_problems

MISTRAL = {**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
QWEN3 = {**LLAMA, "model_type": "qwen3", "hidden_size": 2560, "head_dim": 128, "dtype": "bfloat16"}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 28, "sliding_window": 4096}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Transformers; `test_architecture` has the models as it computes them."""
    monkeypatch.setattr(shapes.importlib.util, "find_spec", lambda name: None)


def model_of(config: dict[str, Any]) -> Model:
    return shapes.architecture(config)


def listed(config: dict[str, Any], **options: Any) -> list[str]:
    found = problems(model_of(config), [2], [1024], **options).problems
    return [f"{p.op} {p.label()}" for p in found]


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
        ({**LLAMA, "model_type": "gemma", "head_dim": 128}, 0),
        ({**LLAMA, "intermediate_size": 14344}, 0),
        (GPT2, 0),
        ({**BERT, "hidden_act": "silu"}, 0),
    ],
)
def test_swiglu_is_listed_of_a_gate_with_silu_that_has_a_kernel(
    config: dict[str, Any], count: int
) -> None:
    found = problems(model_of(config), [2], [1024], dtype="fp16").problems
    assert sum(isinstance(p, SwigluProblem) for p in found) == count


def test_one_token_of_it() -> None:
    first, second, *_ = problems(model_of(LLAMA), [4], [1024], decode=True).problems
    assert first == AttentionProblem.parse("B=4,H=32,HKV=8,SQ=1,SKV=1024,D=128,dtype=bf16")
    assert isinstance(second, GemmProblem) and second.m == 4


def test_a_head_dimension_that_is_not_a_quotient() -> None:
    found = problems(model_of(QWEN3), [1], [512]).problems
    assert isinstance(found[0], AttentionProblem) and found[0].head_dim == 128
    assert GemmProblem(512, 4096, 2560, dtype="bfloat16") in found
    assert GemmProblem(512, 2560, 4096, dtype="bfloat16") in found


def test_one_projection_with_weights_in_rows() -> None:
    found = problems(model_of(GPT2), [1], [1024], dtype="fp16").problems
    assert found[0] == AttentionProblem.parse("H=12,S=1024,D=64,causal=1,layout=bshd_bhsd")
    assert GemmProblem(1024, 2304, 768, layout_b="row", epilogue="bias") in found
    assert GemmProblem(1024, 3072, 768, layout_b="row", epilogue="bias") in found
    assert found[-1] == GemmProblem(1, 50257, 768)


def test_an_encoder_sees_everything_and_predicts_no_token() -> None:
    found = problems(model_of(BERT), [8], [512]).problems
    assert found[0] == AttentionProblem.parse("B=8,H=12,S=512,D=64,dtype=bf16,layout=bshd")
    assert all(not (isinstance(p, GemmProblem) and p.n == 30522) for p in found)


def test_a_window_is_listed_as_such_and_as_the_mask_that_transformers_makes() -> None:
    found = listed(MISTRAL, ops=("attention",))
    assert found == ["attention B=2,H=32,HKV=8,S=1024,D=128,causal=1,dtype=bf16,layout=bshd_bhsd"]
    model = model_of(MISTRAL)
    labels = [p.label() for p in problems(model, [1], [4096, 8192], ops=("attention",)).problems]
    head, tail = "B=1,H=32,HKV=8,S=8192,D=128", "dtype=bf16,layout=bshd_bhsd"
    assert labels[2:] == [f"{head},causal=1,window=4095,{tail}", f"{head},mask=1,{tail}"]
    decoding = problems(model, [1], [8192], decode=True, ops=("attention",)).problems
    assert {p.seqlen_kv for p in decoding if isinstance(p, AttentionProblem)} == {4096}
    unused = model_of({**MISTRAL, "sliding_window": None})
    assert len(problems(unused, [1], [4096, 8192], ops=("attention",)).problems) == 2


def test_windows_on_some_layers() -> None:
    config = {**QWEN2, "use_sliding_window": True, "max_window_layers": 21}
    found = problems(model_of(config), [1], [8192], ops=("attention",)).problems
    windows = [p.window_left for p in found if isinstance(p, AttentionProblem) and not p.mask]
    assert windows == [-1, 4095]


def test_biases_of_projections() -> None:
    def biased(config: dict[str, Any]) -> list[tuple[int, int]]:
        found = problems(model_of(config), [1], [64], ops=("gemm",)).problems
        return [(p.n, p.k) for p in found if isinstance(p, GemmProblem) and p.epilogue == "bias"]

    assert biased(LLAMA) == []
    assert biased(QWEN2) == [(4096, 4096), (1024, 4096)]
    assert biased(BERT) == [(768, 768), (3072, 768), (768, 3072), (768, 768)]


@pytest.mark.parametrize(
    ("ranks", "heads", "products"),
    [
        (4, (8, 2), {(1024, 4096), (256, 4096), (4096, 1024), (3584, 4096), (4096, 3584)}),
        (16, (2, 1), {(256, 4096), (128, 4096), (4096, 256), (896, 4096), (4096, 896)}),
    ],
)
def test_tensor_parallel_ranks(
    ranks: int, heads: tuple[int, int], products: set[tuple[int, int]]
) -> None:
    """Beyond the number of key heads each rank has a copy of one."""
    first, *rest = problems(model_of(LLAMA), [1], [64], ranks=ranks).problems
    assert isinstance(first, AttentionProblem) and (first.heads_q, first.heads_kv) == heads
    sizes = {(p.n, p.k) for p in rest if isinstance(p, GemmProblem)}
    assert sizes == products | {(128256 // ranks, 4096)}
    (swiglu,) = (p for p in rest if isinstance(p, SwigluProblem))
    assert swiglu.n == 14336 // ranks


def test_ranks_pad_the_vocabulary() -> None:
    layers = {layer.name: layer for layer in model_of(GPT2).linears(ranks=2)}
    assert layers["lm_head"] == Linear("lm_head", 50304 // 2, 768, is_per_token=False)


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (LLAMA, 3, "ranks=3 and 8 key heads: neither divides"),
        (GPT2, 5, "ranks=5 and 12 key heads"),
        ({**LLAMA, "intermediate_size": 14340}, 8, "does not divide the 14340 outputs"),
    ],
)
def test_ranks_that_cannot_share(config: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems(model_of(config), [1], [64], ranks=ranks)


def test_ranks_of_a_layer_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="ranks=2: how ranks share the layer Wqkv is not known"):
        Linear("Wqkv", 64, 64).on_rank(2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "mamba"}, "model_type=mamba needs Transformers: "),
        ({"model_type": "llama"}, "lacks hidden_size"),
        ({**LLAMA, "num_attention_heads": "32"}, "num_attention_heads='32' of the model"),
        ({**LLAMA, "hidden_size": 0}, "hidden_size=0 of the model is not a whole number from 1"),
        ({**LLAMA, "torch_dtype": "float32"}, "dtype=float32 has no kernels"),
        ({"model_type": "qwen3", **{k: LLAMA[k] for k in list(LLAMA)[1:]}}, "lacks head_dim"),
        ({**MISTRAL, "model_type": "gemma"}, "lacks head_dim"),
        ({**BERT, "is_decoder": True}, "is_decoder and add_cross_attention are not known"),
    ],
)
def test_what_cannot_be_listed(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems(model_of(config), [1], [512])


def test_the_text_part_of_a_model_of_several(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "mistral3", "dtype": "float16", "text_config": LLAMA})
    )
    assert shapes.read(file).kind == "llama"


def test_what_has_no_problem_is_named() -> None:
    model = model_of({**LLAMA, "head_dim": 520})
    found = problems(model, [1], [64])
    (reason,) = found.left_out
    assert reason.startswith("D=520 has no tuned kernel (allowed: multiples of 8 to 512, ")
    assert not any(isinstance(p, AttentionProblem) for p in found.problems)
    with pytest.raises(ConfigError, match="no problem to list: D=520 has no tuned"):
        problems(model, [1], [64], ops=("attention",))
    with pytest.raises(ConfigError, match="model_type=bert does not decode"):
        problems(model_of(BERT), [1], [64], decode=True)


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
    assert (
        read_problems(out)
        == problems(model_of(MISTRAL), [1, 2], [512, 1024, 2048, 4096, 8192, 16384]).problems
    )


def test_a_type_that_is_not_said_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(GPT2))
    assert main(["shapes", "--model", str(model), "--seqlen", "512"]) == 0
    out, err = capsys.readouterr()
    assert "dtype=bf16" in out and "does not say its dtype: bfloat16 is taken" in err


def test_ranks_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    words = ["shapes", "--model", str(model), "--seqlen", "512", "--op", "attention", "--ranks"]
    assert main([*words, "8"]) == 0
    assert "H=4,HKV=1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*words, "0"])
    assert "--ranks: 0 is out of range" in capsys.readouterr().err


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
