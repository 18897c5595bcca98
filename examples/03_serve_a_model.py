"""A Transformers model served by the tuner's attention and linear layers.

The model has Llama's architecture, random weights and two layers, so that nothing is downloaded.
It needs `pip install '.[transformers]'`. A model of yours is
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="tuner", dtype="bfloat16")`.
"""

import torch
import transformers

import tuner
import tuner.runtime.engines.transformers  # registers attn_implementation="tuner"

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=1000,
)  # fmt: skip


def model(implementation: str) -> transformers.LlamaForCausalLM:
    """The same weights for every implementation."""
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    return made.to(device, torch.bfloat16).eval()


prompt = torch.randint(1000, (2, 64), device=device)
options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
expected = model("sdpa").generate(prompt, **options)

served = model("tuner")
tuner.tune_linear_(served, [(prompt,)])  # the linear layers, too; `restore_linear_` undoes it
tokens = served.generate(prompt, **options)
print(f"equal tokens: {(tokens == expected).float().mean().item():.0%}")
print(tuner.stats())

# In vLLM (0.26 to 0.33) one argument does the same, with its own kernels for the other calls:
#   LLM("meta-llama/Llama-3.1-8B", attention_backend="CUSTOM")
