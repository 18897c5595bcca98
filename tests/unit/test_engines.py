"""``tuner shapes --engine``: a model's paged problems, which are those that the runtime poses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.cli import main
from tuner.errors import ConfigError
from tuner.problem.engines import ENGINES, WINDOW_PAGE, Decoder, Engine, problems
from tuner.tuning.job import read_problems

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "dtype": "bfloat16",
}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 256, "sliding_window": 4096}
GEMMA2["attn_logit_softcapping"] = 50.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def decoder(tmp_path: Path, data: dict[str, Any]) -> Decoder:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    return Decoder.read(path)


def listed(tmp_path: Path, data: dict[str, Any], engine: Engine, *sizes: Any) -> list[str]:
    return [problem.label() for problem in problems(decoder(tmp_path, data), engine, *sizes)]


def test_decoding_and_prompts_of_a_llama(tmp_path: Path) -> None:
    found = listed(tmp_path, LLAMA, ENGINES["vllm"], [1, 48], [1000, 16384])
    one, tail = "B=1,H=32,HKV=8", "dtype=bf16,page_size=16,layout=bshd"
    assert found == [
        f"{one},SQ=1,SKV=1024,D=128,{tail}",
        f"B=64,H=32,HKV=8,SQ=1,SKV=1024,D=128,{tail}",
        f"{one},SQ=1,SKV=16384,D=128,{tail}",
        f"B=64,H=32,HKV=8,SQ=1,SKV=16384,D=128,{tail}",
        f"B=8,H=32,HKV=8,S=1024,D=128,causal=1,{tail}",
        f"{one},SQ=8192,SKV=16384,D=128,causal=1,{tail}",
    ]


def test_windows_and_sinks_by_layer(tmp_path: Path) -> None:
    """vLLM keeps a window's layers in its pages; of Transformers' ring the runtime copies them."""
    both = {name: listed(tmp_path, GPT_OSS, ENGINES[name], [4], [1024]) for name in ENGINES}
    tail = "dtype=bf16,page_size={},sinks=1,layout=bshd"
    head, small = "B=4,H=64,HKV=8", "B=8,H=64,HKV=8"
    full = [f"{head},SQ=1,SKV=1024,D=64,{tail}", f"{small},S=1024,D=64,causal=1,{tail}"]
    window = [
        f"{head},SQ=1,SKV=1024,D=64,left=127,{tail}",
        f"{small},S=1024,D=64,causal=1,window=127,{tail}",
    ]
    copied = [f"{head},SQ=1,SKV=128,D=64,{tail}", f"{small},S=1024,D=64,causal=1,window=127,{tail}"]
    assert both["vllm"] == [text.format(16) for text in full + window]
    assert both["transformers"] == [
        *(text.format(256) for text in full),
        *(text.format(WINDOW_PAGE) for text in copied),
    ]


def test_what_the_runtime_poses(tmp_path: Path) -> None:
    """A call of an engine's layer asks for a problem of the list."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tuner.runtime.composed import Extras
    from tuner.runtime.paged import paged_call

    model, engine = decoder(tmp_path, GPT_OSS), ENGINES["vllm"]
    found = problems(model, engine, [30], [3000])
    cache = torch.empty(16, engine.page_size, 8, 64, dtype=torch.bfloat16)
    table, lengths = torch.zeros(30, 200, dtype=torch.int32), torch.ones(30, dtype=torch.int32)
    posed = []
    for window in (-1, 127):
        for count, longest in ((30, 1), (2, 3000)):
            query = torch.empty(count * longest, 64, 64, dtype=torch.bfloat16)
            tensors = query, cache, cache, table[:count], lengths[:count], None, torch.zeros(64)
            extras = Extras(window, -1)
            call = paged_call(*tensors, longest, 3000, True, extras, 0.125, False)
            posed.append(call.pose().problem)
    assert found == posed


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (0,)),
        ({"sliding_window": 64}, (64,)),
        ({"sliding_window": 64, "use_sliding_window": False}, (0,)),
        ({"model_type": "qwen3", "sliding_window": 64}, (0,)),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True}, (64,)),
        ({"model_type": "gemma2", "sliding_window": 64}, (0, 64)),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, (0,)),
    ],
)
def test_windows(tmp_path: Path, change: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert decoder(tmp_path, LLAMA | change).windows == windows


def test_a_soft_cap(tmp_path: Path) -> None:
    found = problems(decoder(tmp_path, GEMMA2), ENGINES["vllm"], [1], [1024])
    assert {problem.softcap for problem in found} == {50.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type=bert is not known"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"sliding_window": "wide"}, "sliding_window='wide'"),
        ({"layer_types": ["chunked_attention"]}, "layer_types of the model has chunked_attention"),
        ({"layer_types": 3}, "layer_types=3"),
        ({"layer_types": ["sliding_attention"]}, "no sliding_window"),
        ({"attn_logit_softcapping": "high"}, "attn_logit_softcapping='high'"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(tmp_path, LLAMA | change)


def test_the_command_writes_a_list_for_a_sweep(config: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "problems.json"
    options = ["--engine", "transformers", "--page-size", "32", "--chunk", "512"]
    options += ["--concurrency", "2", "--seqlen", "1024", "--output", str(out)]
    assert main(["shapes", "--model", str(config), *options]) == 0
    written = read_problems(out)
    wanted = problems(Decoder.read(config), Engine(32, 512, True), [2], [1024])
    assert written == wanted and len(written) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page-size", "32"], "--page-size is for --engine"),
        (["--page-size", "0"], "--page-size is for --engine"),
        (["--engine", "vllm", "--page-size", "24"], "page_size=24"),
        (["--engine", "vllm", "--chunk", "0"], "chunk=0"),
        (["--engine", "vllm", "--decode"], "--decode is not for --engine"),
        (["--engine", "vllm", "--batch", "2"], "--batch is not for --engine"),
        (["--engine", "vllm", "--op", "gemm"], "--op gemm"),
        (["--engine", "vllm", "--concurrency", "many"], "concurrency=many"),
        (["--engine", "vllm", "--dtype", "fp8"], "dtype=fp8"),
    ],
)
def test_wrong_options(config: Path, capsys: Any, options: list[str], message: str) -> None:
    assert main(["shapes", "--model", str(config), *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
