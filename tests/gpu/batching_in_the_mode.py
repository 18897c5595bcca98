"""Transformers' continuous batching in the batch-invariant mode: one request alone and among 127.

A program of one argument: a folder with a model's config.json. It prints JSON: by the request's
place, whether its tokens and log-probabilities are those that it has alone; and calls of own
kernels. The norms are PyTorch's `rms_norm`: Transformers' are means, whose bits depend on the rows.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from typing import Any

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tuner
import tuner.runtime.engines.transformers  # registers the attention

LENGTH, NEW, OTHERS, STEP, PAGES = 300, 16, 127, 512, 700
"""Tokens of the request's prompt and answer; other requests; new tokens of a step at most; pages of
the cache."""


def normalised(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm as one operation."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def made(folder: str) -> Any:
    """The model, its layers by `tuner.linear`; sums of a row are about one."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="tuner"
        )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    tuner.tune_linear_(model)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(normalised, module)
    return model.eval()


def answers(model: Any, prompts: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities of each prompt's answer."""
    size = {"num_blocks": PAGES, "max_batch_tokens": STEP, "return_logprobs": True}
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**size),
        progress_bar=False,
    )
    every = [outputs[f"req_{i}"] for i in range(len(prompts))]
    return [(list(one.generated_tokens), list(one.logprobs)) for one in every]


def main(folder: str) -> None:
    """Run the model."""
    model = made(folder)
    draw = random.Random(0)
    mine, *others = (
        [draw.randrange(2, model.config.vocab_size) for _ in range(length)]
        for length in (LENGTH, *(draw.randint(5, 700) for _ in range(OTHERS)))
    )
    with tuner.deterministic("batch"):
        (alone,) = answers(model, [mine])
        found = {"again": answers(model, [mine]) == [alone]}
        for name, place in (("first", 0), ("amidst", OTHERS // 2), ("last", OTHERS)):
            batch = [*others[:place], mine, *others[place:]]
            found[name] = answers(model, batch)[place] == alone
        twice = answers(model, [mine, *others, mine])  # the second finds its prompt in the cache
        found["cached"] = [twice[0], twice[-1]] == [alone, alone]
    stats = tuner.stats()
    told = {"hits": stats.hits, "fallbacks": stats.fallbacks, "tokens": len(set(alone[0]))}
    print(json.dumps({"same": found, **told, "logprobs": len(alone[1])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
