"""``tuner shapes --engine``: a model's paged problems, which are those that the runtime poses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA

from tuner.cli import main
from tuner.errors import ConfigError
from tuner.problem import GemmProblem, GroupedGemmProblem, shapes, written
from tuner.problem.architecture import Attention, Experts, Linear, Model
from tuner.problem.engines import ENGINES, WINDOW_PAGE, Engine, problems
from tuner.tuning.job import read_problems

GPT_OSS = Model(
    "gpt_oss",
    (Attention(64, 8, 64, has_sinks=True), Attention(64, 8, 64, left=127, has_sinks=True)),
    ((Linear("o_proj", 2880, 4096, True),),),
    experts=(Experts(32, 4, 2880, 5760, 2880),),
    dtype="bfloat16",
)
GEMMA2 = Model("gemma2", (Attention(8, 4, 256, softcap=50.0),), (), dtype="bfloat16")


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Transformers; `test_architecture` has the models as it computes them."""
    monkeypatch.setattr(shapes.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def listed(model: Model, engine: Engine, *sizes: Any, **options: Any) -> list[str]:
    return [problem.label() for problem in problems(model, engine, *sizes, **options).problems]


def test_decoding_and_prompts_of_a_llama() -> None:
    model = written.architecture(LLAMA)
    found = listed(model, ENGINES["vllm"], [1, 48], [1000, 16384])
    one, tail = "B=1,H=32,HKV=8", "dtype=bf16,page_size=16,layout=bshd"
    assert found == [
        f"{one},SQ=1,SKV=1024,D=128,{tail}",
        f"B=64,H=32,HKV=8,SQ=1,SKV=1024,D=128,{tail}",
        f"{one},SQ=1,SKV=16384,D=128,{tail}",
        f"B=64,H=32,HKV=8,SQ=1,SKV=16384,D=128,{tail}",
        f"B=8,H=32,HKV=8,S=1024,D=128,causal=1,{tail}",
        f"{one},SQ=8192,SKV=16384,D=128,causal=1,{tail}",
    ]


def test_windows_and_sinks_by_layer() -> None:
    """vLLM keeps a window's layers in its pages; of Transformers' ring the runtime copies them."""
    both = {name: listed(GPT_OSS, ENGINES[name], [4], [1024]) for name in ENGINES}
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


def test_what_the_runtime_poses() -> None:
    """A call of an engine's layer asks for a problem of the list."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tuner.runtime.attention.composed import Extras
    from tuner.runtime.attention.paged import paged_call

    engine = ENGINES["vllm"]
    found = problems(GPT_OSS, engine, [30], [3000]).problems
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


def test_a_soft_cap() -> None:
    found = problems(GEMMA2, ENGINES["vllm"], [1], [1024]).problems
    assert {getattr(problem, "softcap", None) for problem in found} == {50.0}


def test_products_of_a_step_as_engines_compute_them() -> None:
    """vLLM computes one product of queries, keys and values, and one of the gate and the rest."""
    model = written.architecture(LLAMA)
    sizes = {}
    for name, engine in ENGINES.items():
        found = problems(model, engine, [16], [16384], ops=("gemm",), ranks=2).problems
        products = [one for one in found if isinstance(one, GemmProblem)]
        sizes[name] = [(one.n, one.k) for one in products if one.m == 8192]
        assert {one.m for one in products if one.n == 128256 // 2} == {1, 16}
    assert sizes["vllm"] == [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)]
    assert sizes["transformers"][:2] == [(2048, 4096), (512, 4096)]


def test_weights_and_logits_of_an_engine() -> None:
    """vLLM turns GPT-2's weights and pads the vocabulary to multiples of 64."""
    config = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    model = written.architecture(config)
    found = problems(model, ENGINES["vllm"], [1], [1024], ops=("gemm",)).problems
    assert {one.layout_b for one in found if isinstance(one, GemmProblem)} == {"col"}
    assert GemmProblem(1, 50304, 768, dtype="bfloat16") in found
    found = problems(model, ENGINES["transformers"], [1], [1024], ops=("gemm",)).problems
    assert GemmProblem(1, 50257, 768, dtype="bfloat16") in found


def test_experts_of_a_step() -> None:
    found = problems(GPT_OSS, ENGINES["vllm"], [16], [16384], ops=("grouped_gemm",), ranks=4)
    assert found.problems == [
        GroupedGemmProblem(32, rows, *size, sizes="zipf", dtype="bfloat16")
        for rows in (64, 32768)
        for size in ((1440, 2880), (2880, 720))
    ]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(GEMMA2, attentions=(Attention(8, 4, 64, right=-1),)), "gemma2 does not decode"),
        (replace(GEMMA2, is_latent=True), "attention of latent keys, over which engines have"),
        (replace(GEMMA2, attentions=(), left_out=("attention with indices",)), "with indices"),
        (replace(GEMMA2, attentions=(Attention(8, 4, 520),)), "D=520 has no tuned kernel"),
    ],
)
def test_attention_that_engines_do_not_compute_so(model: Model, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems(model, ENGINES["vllm"], [1], [1024])


def test_the_command_writes_a_list_for_a_sweep(config: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "problems.json"
    options = ["--engine", "transformers", "--page-size", "32", "--chunk", "512"]
    options += ["--concurrency", "2", "--seqlen", "1024", "--output", str(out)]
    assert main(["shapes", "--model", str(config), *options]) == 0
    written = read_problems(out)
    model = shapes.read(config)
    wanted = problems(model, Engine(32, 512, True), [2], [1024]).problems
    assert written == wanted and len(written) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page-size", "32"], "--page-size is for --engine"),
        (["--engine", "vllm", "--page-size", "24"], "page_size=24"),
        (["--engine", "vllm", "--decode"], "--decode is not for --engine"),
        (["--engine", "vllm", "--batch", "2"], "--batch is not for --engine"),
        (["--engine", "vllm", "--concurrency", "many"], "concurrency=many"),
        (["--engine", "vllm", "--dtype", "fp8"], "dtype=fp8"),
    ],
)
def test_wrong_options(config: Path, capsys: Any, options: list[str], message: str) -> None:
    assert main(["shapes", "--model", str(config), *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
