"""Models of real architectures with random weights: widths of public ones, a few layers deep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    reference: str = "sdpa"
    """PyTorch's implementation of its attention."""

    def output(self, module: Any) -> Any:
        """The last hidden states of a pass through the module or a copy of it."""
        found = module(**self.inputs)
        return found if isinstance(found, torch.Tensor) else found.last_hidden_state


Build = Callable[[Sizes, torch.dtype, str], Built]


def _tokens(sizes: Sizes, batch: int, tokens: int, device: str) -> dict[str, Any]:
    shape = sizes.batch or batch, sizes.tokens or tokens
    return {"input_ids": torch.randint(1, sizes.vocab, shape, device=device)}


def _model(
    config: Any, inputs: dict[str, Any], dtype: torch.dtype, device: str, reference: str = "sdpa"
) -> Built:
    from transformers import AutoModel

    with torch.device(device):  # random weights of a billion parameters take minutes on a CPU
        model = AutoModel.from_config(config, attn_implementation=reference, dtype=dtype)
    first = next(iter(inputs.values()))
    tokens = first.numel() if not first.is_floating_point() else 0
    return Built(model.to(device=device, dtype=dtype), inputs, tokens, reference)


def llama(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Layers of Llama-3-8B."""
    from transformers import LlamaConfig

    heads = sizes.heads or 32
    config = LlamaConfig(
        hidden_size=128 * heads, num_attention_heads=heads, num_key_value_heads=heads // 4 or 1,
        intermediate_size=448 * heads, num_hidden_layers=sizes.layers, vocab_size=sizes.vocab,
        use_cache=False,
    )  # fmt: skip
    return _model(config, _tokens(sizes, 2, 2048, device), dtype, device)


def phi3(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Layers of Phi-3-mini: D = 96, and one projection for queries, keys and values."""
    from transformers import Phi3Config

    heads = sizes.heads or 32
    config = Phi3Config(
        hidden_size=96 * heads, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=256 * heads, num_hidden_layers=sizes.layers, vocab_size=sizes.vocab,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return _model(config, _tokens(sizes, 2, 2048, device), dtype, device)


def gpt2(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Layers of GPT-2 XL without dropout."""
    from transformers import GPT2Config

    heads = sizes.heads or 25
    config = GPT2Config(
        n_embd=64 * heads, n_head=heads, n_layer=sizes.layers, vocab_size=sizes.vocab,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        use_cache=False,
    )  # fmt: skip
    return _model(config, _tokens(sizes, 4, 1024, device), dtype, device)


def gemma2(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Layers of Gemma-2-9B: D = 256, a soft cap, and a window in every other layer."""
    from transformers import Gemma2Config

    heads = sizes.heads or 16
    config = Gemma2Config(
        hidden_size=224 * heads, num_attention_heads=heads, num_key_value_heads=heads // 2,
        head_dim=256, intermediate_size=896 * heads, num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocab, use_cache=False,
    )  # fmt: skip
    return _model(config, _tokens(sizes, 1, 6144, device), dtype, device, reference="eager")


def bert(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Layers of BERT-large, a batch of equal lengths."""
    from transformers import BertConfig

    heads = sizes.heads or 16
    config = BertConfig(
        hidden_size=64 * heads, num_attention_heads=heads, intermediate_size=256 * heads,
        num_hidden_layers=sizes.layers, vocab_size=sizes.vocab,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _model(config, _tokens(sizes, 16, 512, device), dtype, device)


def bert_padded(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """The same with sequences of unlike lengths, and so with a mask."""
    built = bert(sizes, dtype, device)
    batch, tokens = built.inputs["input_ids"].shape
    ends = torch.linspace(tokens // 2, tokens, batch, device=device).round()
    mask = (torch.arange(tokens, device=device) < ends[:, None]).long()
    return Built(built.module, {**built.inputs, "attention_mask": mask}, built.tokens)


def vit(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Layers of ViT-L/16 at 224 pixels."""
    from transformers import ViTConfig

    heads, batch = sizes.heads or 16, sizes.batch or 32
    config = ViTConfig(
        hidden_size=64 * heads, num_attention_heads=heads, intermediate_size=256 * heads,
        num_hidden_layers=sizes.layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(batch, 3, 224, 224, dtype=dtype, device=device)}
    built = _model(config, inputs, dtype, device)
    return Built(built.module, inputs, batch * 197)


class _Encoder(torch.nn.Module):  # type: ignore[misc]  # torch is skipped
    """Whisper's encoder by itself."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def set_attn_implementation(self, name: str) -> None:
        self.encoder.set_attn_implementation(name)

    def forward(self, input_features: Any) -> Any:
        """(B, 80, 2 * frames) to the last hidden states, (B, frames, hidden)."""
        return self.encoder(input_features).last_hidden_state


def whisper(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Encoder layers of Whisper-large, 1500 frames where no tokens are given."""
    from transformers import WhisperConfig

    heads, batch, frames = sizes.heads or 20, sizes.batch or 8, sizes.tokens or 1500
    config = WhisperConfig(
        d_model=64 * heads, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=256 * heads, decoder_ffn_dim=256 * heads, encoder_layers=sizes.layers,
        decoder_layers=1, vocab_size=sizes.vocab, dropout=0.0, attention_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        max_source_positions=frames,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(batch, 80, 2 * frames, dtype=dtype, device=device)}
    built = _model(config, inputs, dtype, device)
    return Built(_Encoder(built.module.encoder), inputs, batch * frames)


class FluxBlock(torch.nn.Module):  # type: ignore[misc]
    """Attention and feed-forward side by side, as in Flux's single blocks; plain PyTorch."""

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


class Flux(torch.nn.Module):  # type: ignore[misc]
    """Several of these blocks."""

    def __init__(self, layers: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(FluxBlock(heads, head_dim) for _ in range(layers))

    def set_attn_implementation(self, name: str) -> None:
        """``tuner`` or PyTorch's, as the models of Transformers have it."""
        sdpa = functional.scaled_dot_product_attention
        for block in self.blocks:
            block.attend = tuner.attention if name == "tuner" else sdpa

    def forward(self, x: Any) -> Any:
        """(B, S, hidden) to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def flux(sizes: Sizes, dtype: torch.dtype, device: str) -> Built:
    """Single blocks of FLUX.1: 24 heads of 128, 4096 patches and 512 tokens of text."""
    heads, batch, tokens = sizes.heads or 24, sizes.batch or 1, sizes.tokens or 4608
    with torch.device(device):
        model = Flux(sizes.layers, heads, 128).to(dtype=dtype)
    x = torch.randn(batch, tokens, 128 * heads, dtype=dtype, device=device)
    return Built(model, {"x": x}, batch * tokens)


BUILDS: Mapping[str, Build] = {
    "llama": llama,
    "phi3": phi3,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "bert": bert,
    "bert-padded": bert_padded,
    "vit": vit,
    "whisper": whisper,
    "flux": flux,
}
