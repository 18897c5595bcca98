"""vLLM's engine in the batch-invariant mode: one request alone and among others.

A program of two arguments: a folder with a model's config.json, and a quantisation or an empty
text. It prints JSON: by way of the request, whether its tokens and log-probabilities are those that
it has alone; and calls of own kernels.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tuner.runtime.engines.vllm import register

LENGTH, NEW, OTHERS, STEP = 300, 16, 31, 512
"""Tokens of the request's prompt and answer; other requests; new tokens of a step at most."""


def fill(model: Any) -> int:
    """Draw the weights; sums of a row are about one."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    for _, one in model.named_parameters():
        drawn = torch.randn(one.shape, generator=generator, device="cuda", dtype=torch.float32)
        one.data.copy_(drawn * one.shape[-1] ** -0.5 if one.dim() > 1 else drawn.abs())
    return 0


def answers(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities of each prompt's answer."""
    import vllm

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=5
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outs = [out.outputs[0] for out in llm.generate(asked, params, use_tqdm=False)]
    return [
        (list(out.token_ids), [{at: one.logprob for at, one in of.items()} for of in out.logprobs])
        for out in outs
    ]


def main(folder: str, quantization: str) -> None:
    """Run the engine."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import vllm

    import tuner

    register()  # as the entry point does where the package is installed
    vocabulary = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    llm = vllm.LLM(
        folder,
        attention_backend="CUSTOM",
        **({"quantization": quantization} if quantization else {}),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=STEP,
        max_num_seqs=OTHERS + 1,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        generation_config="vllm",
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        seed=0,
    )
    llm.apply_model(fill)
    draw = random.Random(0)
    mine, *others = (
        [draw.randrange(2, vocabulary) for _ in range(length)]
        for length in (LENGTH, *(draw.randint(5, 700) for _ in range(OTHERS)))
    )
    (alone,) = answers(llm, [mine])
    found = {"cached": answers(llm, [mine])[0] == alone}
    for name, place in (("first", 0), ("last", OTHERS)):
        llm.reset_prefix_cache()
        found[name] = answers(llm, [*others[:place], mine, *others[place:]])[place] == alone
    found["cached, among others"] = answers(llm, [*others, mine])[-1] == alone
    print(json.dumps({"same": found, "hits": tuner.stats().hits, "tokens": len(set(alone[0]))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
