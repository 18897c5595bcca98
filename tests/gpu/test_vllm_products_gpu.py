"""vLLM's engine with ``quantization="tuner"`` beside the same engine with the tuner switched off: a
small mixture of experts, its weights drawn, in bf16 and in fp8 with factors of blocks.
"""

from __future__ import annotations

import gc
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCABULARY, PROMPT, PROMPTS = 2048, 96, 3
CONFIG = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16"},
    **{"vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1},
}
LIMITS = {"bf16": 0.05, "fp8": 0.12}
"""Mean difference of log-probabilities over their deviation. In e4m3 a value that is rounded the
other way is 6 to 12 % off, and the router may choose otherwise. Emulated in fp32, sums that are
1e-6 and 1e-5 apart give 0.03 and 0.05; e4m3's tensor cores are 1e-4 apart.
"""
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def fill(model: Any) -> int:
    """Draw the weights; sums of a row are about one."""
    import torch

    torch.manual_seed(0)
    for name, one in model.named_parameters():
        wide = one.data.shape[-1] ** -0.5
        if one.dtype == torch.float8_e4m3fn:
            one.data.copy_((torch.randn(one.shape, device=one.device) * 64).clamp_(-448, 448))
        elif "scale" in name:
            one.data.copy_((torch.rand(one.shape, device=one.device) + 0.5) / 64 / 32)
        elif one.dim() > 1:
            one.data.copy_(torch.randn(one.shape, device=one.device) * wide)
        else:  # of norms
            one.data.fill_(1.0)
    return 0


@pytest.fixture(params=LIMITS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine in this process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            vllm = importlib.import_module("vllm")
    except ImportError as exc:
        pytest.skip(f"vllm is not installed ({exc})")
    from tuner.runtime.engines.vllm import register

    register()  # as the entry point does where the package is installed
    config = {**CONFIG, "quantization_config": FP8} if kind == "fp8" else CONFIG
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = vllm.LLM(
        str(tmp_path),
        quantization="tuner",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=2 << 30,  # nothing is measured: other processes may free memory
        enforce_eager=True,
        enable_prefix_caching=False,
        generation_config="vllm",
        seed=0,
    )
    llm.apply_model(fill)
    yield llm
    del llm
    gc.collect()
    importlib.import_module("torch").cuda.empty_cache()


def log_probabilities(llm: Any) -> Any:
    """Those of each prompt's tokens, and the tokens that follow."""
    import torch
    from vllm import SamplingParams

    torch.manual_seed(1)
    drawn = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT)).tolist()
    wanted = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    prompts = [{"prompt_token_ids": ids} for ids in drawn]
    found = llm.generate(prompts, wanted, use_tqdm=False)
    return torch.tensor(
        [
            [
                places[token].logprob
                for token, places in zip(ids[1:], one.prompt_logprobs[1:], strict=True)
            ]
            for ids, one in zip(drawn, found, strict=True)
        ]
    )


def test_an_engine_agrees_with_itself(
    engine: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tuner

    table = importlib.import_module("tuner.runtime.call.table").table
    table.forget()  # the variable is seen at the next look, at once here
    tuner.stats(reset=True)
    found = log_probabilities(engine)
    served = tuner.stats(reset=True)
    monkeypatch.setenv("TUNER_DISABLE", "1")
    table.forget()
    tuner.stats(reset=True)
    wanted = log_probabilities(engine)
    assert not tuner.stats().hits
    assert served.hits > 0, served.fallbacks
    assert not any("plain tensor" in reason for reason in served.fallbacks), served.fallbacks
    assert (found - wanted).abs().mean() < LIMITS[kind] * wanted.std()
    assert wanted.std() > 0.1  # the weights do something
