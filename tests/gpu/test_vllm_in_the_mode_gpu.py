"""A request to vLLM's engine in the batch-invariant mode has the same tokens and log-probabilities,
bit for bit: alone and among others, with its prompt in chunks or from the cache.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from programs import ran

from tuner.base.processes import python_command, python_environment

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"},
    **{"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1},
}
ENGINE = Path(__file__).with_name("vllm_in_the_mode.py")
MODE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def printed(*command: str, **environment: str) -> str:
    done = ran(*command, env={**python_environment(), **environment}, timeout=280)
    return done.stdout


@pytest.mark.parametrize("quantization", ["", "tuner"])
def test_a_request_has_the_same_bits_whatever_else_is_served(
    quantization: str, tmp_path: Path
) -> None:
    for package in ("vllm", *(["compressed_tensors"] if quantization else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    build = "build", "--model", str(tmp_path / "config.json"), "--engine", "vllm"
    printed(*python_command("-m", "tuner", *build), TUNER_BATCH_INVARIANT="1")
    out = printed(*python_command(str(ENGINE), str(tmp_path), quantization), **MODE)
    found = json.loads(out.splitlines()[-1])
    assert all(found["same"].values()), found
    assert found["hits"] > 0 and found["tokens"] > 1
