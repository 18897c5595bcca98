"""`generate_batch` by `tuner` on the GPU, beside `generate` by Transformers' own attention."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from programs import ran

from tuner.base.processes import python_command, python_environment

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import tuner  # noqa: E402

pytestmark = pytest.mark.gpu

LAYERS, NEW = 2, 12
CONFIG = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def model(implementation: str) -> Any:
    importlib.import_module("tuner.runtime.engines.transformers")
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**CONFIG), attn_implementation=implementation
    )
    return made.eval().bfloat16().cuda()


@torch.no_grad()
def test_a_batch_has_the_tokens_of_single_prompts() -> None:
    """Nearly all: bf16 decides otherwise where two tokens are as likely."""
    torch.manual_seed(1)
    prompts = [torch.randint(1, 97, (count,)).tolist() for count in (3, 190, 47, 80, 33)]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    single = model("sdpa")
    wanted = [
        single.generate(torch.tensor([prompt], device="cuda"), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    tuner.stats(reset=True)
    batch = model("tuner").generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**options, eos_token_id=-1),
        progress_bar=False,
    )
    tokens = [batch[f"req_{index}"].generated_tokens for index in range(len(prompts))]
    assert [len(row) for row in tokens] == [NEW] * len(prompts)
    pairs = [pair for rows in zip(tokens, wanted, strict=True) for pair in zip(*rows, strict=True)]
    assert sum(one == other for one, other in pairs) >= 0.6 * len(pairs)
    assert [row[0] for row in tokens] == [row[0] for row in wanted]
    assert tuner.stats(reset=True).calls >= LAYERS


@pytest.mark.compile
@pytest.mark.timeout(600)
def test_a_request_has_the_same_bits_alone_and_among_127_others(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"},
        **{"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128},
        **{"num_attention_heads": 8, "max_position_embeddings": 1024, "initializer_range": 0.02},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = "--model", str(tmp_path / "config.json"), "--engine", "transformers"
    environment = {**python_environment(), "TUNER_BATCH_INVARIANT": "1"}
    ran(*python_command("-m", "tuner", "build", *model), env=environment, timeout=280)
    program = str(Path(__file__).with_name("batching_in_the_mode.py"))
    done = ran(*python_command(program, str(tmp_path)), env=python_environment(), timeout=280)
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found["same"].values()) and found["fallbacks"] == {}, found
    assert found["hits"] > 0 and found["tokens"] > 1 and found["logprobs"] == 16
