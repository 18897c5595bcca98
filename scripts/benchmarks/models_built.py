"""Models of real architectures with random weights: widths of public ones, a few layers deep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

import tuner


@dataclass(frozen=True)
class Sizes:
    """How large a model is built: `heads` and the rest at 0 are those of the public one."""

    layers: int = 4
    heads: int = 0
    batch: int = 0
    tokens: int = 0
    vocab: int = 32000


@dataclass(frozen=True)
class Built:
    """A model and one batch for it."""

    module: Any
    inputs: Mapping[str, Any]
    tokens: int
    """Tokens, patches or frames of a pass."""

    def output(self, module: Any) -> Any:
        """The last hidden states of a pass through the module or a copy of it."""
        out = module(**self.inputs)
        return out if isinstance(out, torch.Tensor) else out.last_hidden_state


@dataclass(frozen=True)
class Architecture:
    """A model of Transformers, whose widths follow from the number of its heads."""

    config: str
    """Class of its config."""
    heads: int
    batch: int
    tokens: int
    widths: Callable[[int], dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: str = "num_hidden_layers"
    """Option that says how deep it is."""
    attention: str = "sdpa"
    """PyTorch's implementation of it."""

    def model(self, sizes: Sizes, dtype: Any, device: str) -> Any:
        """It with random weights.

        Args:
            sizes: layers, heads and vocabulary.
            dtype: torch's type.
            device: device that draws them: of a billion parameters a CPU takes minutes.
        """
        import transformers

        options = {**self.options, **self.widths(sizes.heads or self.heads)}
        options |= {"vocab_size": sizes.vocab, self.layers: sizes.layers}
        config = getattr(transformers, self.config)(**options)
        with torch.device(device):
            made = transformers.AutoModel.from_config(
                config, attn_implementation=self.attention, dtype=dtype
            )
        return made.to(device=device, dtype=dtype)


def _plain(heads: int) -> dict[str, Any]:
    widths = {"hidden_size": 64 * heads, "intermediate_size": 256 * heads}
    return {**widths, "num_attention_heads": heads}


_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_KEEPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ARCHITECTURES: Mapping[str, Architecture] = {
    # Llama-3-8B.
    "llama": Architecture("LlamaConfig", 32, 2, 2048, lambda heads: {
        "hidden_size": 128 * heads, "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 or 1, "intermediate_size": 448 * heads,
    }),
    # Phi-3-mini: D = 96, and one projection for queries, keys and values.
    "phi3": Architecture("Phi3Config", 32, 2, 2048, lambda heads: {
        "hidden_size": 96 * heads, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": 256 * heads,
    }, _IDS),
    # GPT-2 XL without dropout.
    "gpt2": Architecture("GPT2Config", 25, 4, 1024, lambda heads: {
        "n_embd": 64 * heads, "n_head": heads,
    }, {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **_IDS}, "n_layer"),
    # Gemma-2-9B: D = 256, a soft cap, and a window in every other layer.
    "gemma2": Architecture("Gemma2Config", 16, 1, 6144, lambda heads: {
        "hidden_size": 224 * heads, "num_attention_heads": heads, "head_dim": 256,
        "num_key_value_heads": heads // 2, "intermediate_size": 896 * heads,
    }, attention="eager"),
    "bert": Architecture("BertConfig", 16, 16, 512, _plain, _KEEPS),  # BERT-large
    "vit": Architecture("ViTConfig", 16, 32, 197, _plain, _KEEPS),  # ViT-L/16 at 224 pixels
    # Whisper-large, whose encoder alone is run.
    "whisper": Architecture("WhisperConfig", 20, 8, 1500, lambda heads: {
        "d_model": 64 * heads, "encoder_attention_heads": heads, "encoder_ffn_dim": 256 * heads,
        "decoder_attention_heads": heads, "decoder_ffn_dim": 256 * heads,
    }, {"decoder_layers": 1, "dropout": 0.0, "decoder_start_token_id": 1, **_IDS},
        "encoder_layers"),
}  # fmt: skip


class FluxBlock(torch.nn.Module):  # type: ignore[misc]  # torch is skipped
    """Attention and feed-forward side by side, as in FLUX.1's single blocks; plain PyTorch."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        hidden = heads * head_dim
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.out = torch.nn.Linear(5 * hidden, hidden)
        self.attend: Callable[..., Any] = functional.scaled_dot_product_attention

    def forward(self, x: Any) -> Any:
        """(B, S, hidden) to the same."""
        normed = functional.layer_norm(x, x.shape[-1:])
        query, key, value = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = (functional.rms_norm(t, t.shape[-1:]) for t in (query, key))
        attended = self.attend(*(t.transpose(1, 2) for t in (query, key, value)))
        inner = functional.gelu(self.up(normed), approximate="tanh")
        return x + self.out(torch.cat([attended.transpose(1, 2).flatten(2), inner], -1))


class Flux(torch.nn.Sequential):  # type: ignore[misc]
    """Several of these blocks, from (B, S, hidden) to the same."""

    def set_attn_implementation(self, name: str) -> None:
        """``tuner`` or PyTorch's, as the models of Transformers have it."""
        sdpa = functional.scaled_dot_product_attention
        for block in self:
            block.attend = tuner.attention if name == "tuner" else sdpa


def build(model: str, sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """A model and a batch for it.

    Args:
        model: ``flux``, ``bert-padded`` or one of `ARCHITECTURES`.
        sizes: in place of the public model's.
        dtype: type of its weights.
        device: device of the weights.
    """
    if model == "flux":  # 24 heads of 128, 4096 patches and 512 tokens of text
        return _flux(sizes.layers, sizes.heads or 24, sizes.batch or 1, sizes.tokens or 4608,
                     dtype, device)  # fmt: skip
    name, _, padded = model.partition("-")
    kind = ARCHITECTURES[name]
    batch, tokens = sizes.batch or kind.batch, sizes.tokens or kind.tokens
    on = {"dtype": dtype, "device": device}
    module = kind.model(sizes, dtype, device)
    if name == "vit":
        return Built(module, {"pixel_values": torch.randn(batch, 3, 224, 224, **on)}, batch * 197)
    if name == "whisper":
        heard = torch.randn(batch, 80, 2 * kind.tokens, **on)
        return Built(module.encoder, {"input_features": heard}, batch * kind.tokens)
    inputs = {"input_ids": torch.randint(1, sizes.vocab, (batch, tokens), device=device)}
    if padded:  # sequences of unlike lengths, and so a mask
        ends = torch.linspace(tokens // 2, tokens, batch, device=device).round()
        places = torch.arange(tokens, device=device)
        inputs["attention_mask"] = (places < ends[:, None]).long()
    return Built(module, inputs, batch * tokens)


def _flux(
    layers: int, heads: int, batch: int, tokens: int, dtype: torch.dtype, device: str
) -> Built:
    with torch.device(device):
        model = Flux(*(FluxBlock(heads, 128) for _ in range(layers))).to(dtype=dtype)
    x = torch.randn(batch, tokens, 128 * heads, dtype=dtype, device=device)
    return Built(model, {"input": x}, batch * tokens)
