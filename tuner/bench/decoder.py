"""A decoder with the shapes of Llama-3-8B and random weights: where attention is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """What a decoder's tensors measure."""

    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    inner: int
    vocabulary: int


#: The model card's config.json: 32 such layers.
LLAMA_3_8B = Sizes(4096, 32, 8, 128, 14336, 128256)
ROTARY_BASE = 500000.0


class Decoder:
    """A pre-norm decoder with grouped heads, rotary positions and a cache of keys and values."""

    def __init__(self, sizes: Sizes, layers: int, length: int, dtype: Any, device: str) -> None:
        import torch

        self._sizes = sizes
        hidden, inner, head_dim = sizes.hidden, sizes.inner, sizes.head_dim
        self._width, self._kv = sizes.heads * head_dim, sizes.heads_kv * head_dim

        def weight(rows: int, columns: int) -> Any:
            made = torch.randn(rows, columns, dtype=dtype, device=device)
            return made.mul_(columns**-0.5)

        self._embedding = weight(sizes.vocabulary, hidden)
        self._head = weight(sizes.vocabulary, hidden)
        self._layers = [
            {
                "qkv": weight(self._width + 2 * self._kv, hidden),
                "out": weight(hidden, self._width),
                "up": weight(2 * inner, hidden),
                "down": weight(hidden, inner),
            }
            for _ in range(layers)
        ]
        # (B, S, H, D): a prefix of it is a tensor of its own, dense for one sequence.
        shape = (1, length, sizes.heads_kv, head_dim)
        self._cache = [
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
            for _ in range(layers)
        ]
        frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        angle = torch.arange(length, device=device)[:, None] * frequency
        turns = torch.cat([angle, angle], -1)[None, :, None]
        self._cos, self._sin = turns.cos().to(dtype), turns.sin().to(dtype)

    def __call__(self, tokens: Any, start: int, attend: Callable[..., Any]) -> Any:
        """Logits of the last of `tokens`, (1, n), which begin at position `start`."""
        import torch

        functional = torch.nn.functional
        count, width, head_dim = tokens.shape[1], self._width, self._sizes.head_dim
        end = start + count
        cos, sin = self._cos[:, start:end], self._sin[:, start:end]
        x = functional.embedding(tokens, self._embedding)
        for weights, cache in zip(self._layers, self._cache, strict=True):
            mixed = functional.linear(_normed(x), weights["qkv"])
            query, key, value = mixed.split([width, self._kv, self._kv], -1)
            heads = (1, count, -1, head_dim)
            cache[0][:, start:end] = _turned(key.view(heads), cos, sin)
            cache[1][:, start:end] = value.reshape(heads)
            out = attend(
                _turned(query.reshape(heads), cos, sin).transpose(1, 2),
                *(part[:, :end].transpose(1, 2) for part in cache),
                is_causal=count > 1,
                enable_gqa=True,
            )
            x = x + functional.linear(out.transpose(1, 2).reshape(1, count, width), weights["out"])
            gate, up = functional.linear(_normed(x), weights["up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, weights["down"])
        return functional.linear(_normed(x[:, -1:]), self._head)


def _normed(x: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
